// The compiled half of the fmt library. Its header-only form would be compiled into every file, at
// 7 s each; LibTorch's wheel brings the headers but no library.
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
