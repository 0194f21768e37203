// Philox-4x32-10 (Salmon et al. 2011) and Box-Muller, the same text for host and device.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define PITH_HOST_DEVICE __host__ __device__
#else
#define PITH_HOST_DEVICE
#endif

namespace pith {
struct Philox4 {
  uint32_t word[4];
};

// Ten rounds over a 128-bit counter under a 64-bit key: four uniform words.
PITH_HOST_DEVICE inline Philox4 philox_4x32_10(Philox4 counter, uint64_t key) {
  uint32_t* c = counter.word;
  uint32_t key0 = uint32_t(key), key1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * c[2];
    counter = {{uint32_t(product1 >> 32) ^ c[1] ^ key0, uint32_t(product1),
      uint32_t(product0 >> 32) ^ c[3] ^ key1, uint32_t(product0)}};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

PITH_HOST_DEVICE inline Philox4 philox(uint64_t key, uint64_t counter) {
  return philox_4x32_10({{uint32_t(counter), uint32_t(counter >> 32), 0, 0}}, key);
}

struct Normal4 {
  float value[4];
};

// Numbers 4 * counter .. 4 * counter + 3 of the stream. Host and device agree up to logf, sinf,
// cosf: all else is exact or rounded once, with or without fused multiply-add.
PITH_HOST_DEVICE inline Normal4 normal4(uint64_t key, uint64_t counter) {
  const Philox4 bits = philox(key, counter);
  Normal4 normal;
  for (int pair = 0; pair < 2; ++pair) {
    // (0, 1]: 0 has no logarithm. The largest radius is 6.8.
    const float uniform = float(bits.word[2 * pair]) * 0x1p-32f + 0x1p-33f;
    const float turn = float(bits.word[2 * pair + 1] >> 8) * 0x1p-24f;
    const float radius = sqrtf(-2.0f * logf(uniform));
    const float angle = turn * 6.28318530717958647692f;
    normal.value[2 * pair] = radius * cosf(angle);
    normal.value[2 * pair + 1] = radius * sinf(angle);
  }
  return normal;
}
}
