// Keys and values as codes: the formulas of docs/kv-cache-dtypes.md. A head_dim is a multiple of kCodeChannels. The
// scale, or the zero point, of a vector that is not finite is NaN.
#pragma once

#include "hadamard_kernel.h"
#include "integer_product.h"

namespace kvllm {
namespace {

// Codes up to kLargest on both sides of 0. write(channel, integers): those of kLanes channels.
template <int kLargest, class T, class Write>
void quantize_symmetric(const T* x, int head_dim, void* word, const Write& write) {
  const float magnitude = largest_magnitude(x, head_dim);
  const float scale = (magnitude < 1e-8f ? 1e-8f : magnitude) / kLargest;
  for (int i = 0; i < head_dim; i += kLanes) {
    int16_t integers[kLanes];
    store_rounded(integers, div(load(x + i), broadcast(scale)));
    write(i, integers);
  }
  __builtin_memcpy(word, &scale, sizeof(scale));
}

template <class T>
void quantize_int8(const void* vector, int head_dim, void* codes, void* word) {
  auto* out = static_cast<int8_t*>(codes);
  quantize_symmetric<127>(static_cast<const T*>(vector), head_dim, word, [&](int channel, const int16_t* integers) {
    for (int lane = 0; lane < kLanes; ++lane) out[channel + lane] = static_cast<int8_t>(integers[lane]);
  });
}

template <class T>
void quantize_int6(const void* vector, int head_dim, void* codes, void* word) {
  auto* const low = static_cast<uint8_t*>(codes);
  uint8_t* const high = low + head_dim / 2;
  quantize_symmetric<31>(static_cast<const T*>(vector), head_dim, word, [&](int channel, const int16_t* integers) {
    for (int lane = 0; lane < kLanes; lane += 4) {
      int four[4];
      for (int i = 0; i < 4; ++i) four[i] = integers[lane + i] + kExcess6;
      uint8_t* const two = low + (channel + lane) / 2;
      two[0] = static_cast<uint8_t>((four[0] & 15) | (four[1] & 15) << 4);
      two[1] = static_cast<uint8_t>((four[2] & 15) | (four[3] & 15) << 4);
      high[(channel + lane) / 4] = static_cast<uint8_t>((four[0] >> 4 & 3) | (four[1] >> 4 & 3) << 2 |
                                                        (four[2] >> 4 & 3) << 4 | (four[3] >> 4 & 3) << 6);
    }
  });
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// The nearest number of at most 448, the even one from the middle.
inline uint8_t as_float8(float x) {
  const float magnitude = x < 0 ? -x : x;
  const uint32_t bits = bits_of(magnitude < 448 ? magnitude : 448), sign = bits_of(x) >> 24 & 0x80;
  if (magnitude < 0.015625f) {  // 2^-6: below it, numbers are multiples of 2^-9
    return static_cast<uint8_t>(sign | (bits_of(magnitude * 512 + 8388608.0f) & 15));  // 2^23: low bits are an integer
  }
  constexpr uint32_t kBias = (127 - 7) << 3;
  return static_cast<uint8_t>(sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - kBias));
}

template <class T>
void quantize_float8(const void* vector, int head_dim, void* codes, void* word) {
  const T* x = static_cast<const T*>(vector);
  const float magnitude = largest_magnitude(x, head_dim);
  const float scale = (magnitude < 1e-8f ? 1e-8f : magnitude) / 448;
  auto* out = static_cast<uint8_t*>(codes);
  for (int i = 0; i < head_dim; i += kLanes) {
    float numbers[kLanes];
    store(numbers, div(load(x + i), broadcast(scale)));
    for (int lane = 0; lane < kLanes; ++lane) out[i + lane] = as_float8(numbers[lane]);
  }
  __builtin_memcpy(word, &scale, sizeof(scale));
}

inline float as_bfloat16(float x) {
  float lanes[kLanes];
  store(lanes, round_to_bfloat16(broadcast(x)));
  return lanes[0];
}

template <class T>
void quantize_int4(const void* vector, int head_dim, void* codes, void* word) {
  const T* x = static_cast<const T*>(vector);
  Vec low = load(x), high = low;
  for (int i = kLanes; i < head_dim; i += kLanes) {
    low = min(load(x + i), low);
    high = max(load(x + i), high);
  }
  const float least = 0 - reduce_max(sub(Vec{}, low)) + 0 * largest_magnitude(x, head_dim);
  const float step = as_bfloat16((reduce_max(high) - least) / 15);
  const float scale = step == 0 ? 1 : step, zero = as_bfloat16(least);
  auto* out = static_cast<uint8_t*>(codes);
  for (int i = 0; i < head_dim; i += kLanes) {
    int16_t integers[kLanes];
    const Vec steps = div(sub(load(x + i), broadcast(zero)), broadcast(scale));
    store_rounded(integers, min(broadcast(15), max(Vec{}, steps)));
    for (int lane = 0; lane < kLanes; lane += 2) {
      out[(i + lane) / 2] = static_cast<uint8_t>(integers[lane] | integers[lane + 1] << 4);
    }
  }
  const uint32_t both = bits_of(scale) >> 16 | bits_of(zero);
  __builtin_memcpy(word, &both, sizeof(both));
}

template <class T>
void quantize_int6_hadamard(const void* vector, int head_dim, void* codes, void* word) {
  float rotated[kMaxCodeChannels];
  rotate<T>(vector, head_dim, rotated);
  quantize_int6<float>(rotated, head_dim, codes, word);
}

template <class T>
void quantize_int4_hadamard(const void* vector, int head_dim, void* codes, void* word) {
  float rotated[kMaxCodeChannels];
  rotate<T>(vector, head_dim, rotated);
  quantize_int4<float>(rotated, head_dim, codes, word);
}

}  // namespace
}  // namespace kvllm
