// One fuzz target: any input either parses or gives a pith::Error; every other way out is a
// finding.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include "core/error.h"

#define PITH_FUZZ(text) \
  static void fuzz_one(std::string_view text); \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { \
    try { \
      fuzz_one({reinterpret_cast<const char*>(data), size}); \
    } catch (const pith::Error&) {} \
    return 0; \
  } \
  static void fuzz_one(std::string_view text)
