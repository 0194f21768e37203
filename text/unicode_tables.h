// The generated tables of unicode_tables.inc and their look-up.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>

namespace pith {

struct CodeRange {
  char32_t first, last;
  uint32_t value;
};

#include "text/unicode_tables.inc"

// The row that holds `code`, or nullptr. Rows are sorted.
template <size_t N>
const CodeRange* find_range(const CodeRange (&table)[N], char32_t code) {
  const CodeRange* row = std::lower_bound(std::begin(table), std::end(table), code,
      [](const CodeRange& r, char32_t c) { return r.last < c; });
  return row != std::end(table) && row->first <= code ? row : nullptr;
}

}  // namespace pith
