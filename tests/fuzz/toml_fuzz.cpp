// The run configuration. What parses must come back from its own TOML.
#include "engine/config.h"
#include "tests/fuzz/fuzz.h"

PITH_FUZZ(text) {
  const std::string once = pith::to_toml(pith::parse_run_config(text, "fuzz", {}));
  if (pith::to_toml(pith::parse_run_config(once, "fuzz", {})) != once) __builtin_trap();
}
