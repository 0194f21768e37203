// The safetensors header, of a file that is exactly as long as the input.
#include "engine/safetensors.h"
#include "tests/fuzz/fuzz.h"

PITH_FUZZ(file) {
  const auto header = pith::parse_safetensors_header(file, file.size(), "fuzz");
  for (const auto& [name, entry]: header.tensors)
    if (entry.begin > entry.end || header.data_offset + entry.end > file.size()) __builtin_trap();
}
