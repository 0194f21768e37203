// The compiled half of fmt, which LibTorch's wheel lacks. Header-only: 7 s in every file.
#include <fmt/format-inl.h>

FMT_BEGIN_NAMESPACE
namespace detail {

template FMT_API auto dragonbox::to_decimal(float x) -> dragonbox::decimal_fp<float>;
template FMT_API auto dragonbox::to_decimal(double x) -> dragonbox::decimal_fp<double>;
template FMT_API auto thousands_sep_impl(locale_ref) -> thousands_sep_result<char>;
template FMT_API auto decimal_point_impl(locale_ref) -> char;
template FMT_API void buffer<char>::append(const char*, const char*);

}
FMT_END_NAMESPACE
