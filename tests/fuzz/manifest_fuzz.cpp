// manifest.json as it is, and with a valid seal around it, so that the parser behind the checksum
// is reached.
#include "engine/checkpoint.h"
#include "tests/fuzz/fuzz.h"

PITH_FUZZ(text) {
  const std::string sealed = pith::seal_json(std::string(text));
  const auto manifest = pith::parse_manifest(sealed, "fuzz");
  for (const auto& [name, file]: manifest.files)
    if (name.empty() || name[0] == '/' || name.rfind("..", 0) == 0) __builtin_trap();
  pith::parse_manifest(text, "fuzz");
}
