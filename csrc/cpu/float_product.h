// Products with weights of float or bfloat16.
#pragma once

#include "product_kernel.h"

namespace kvllm {
namespace {

template <int kRows, int kVectors>
inline __attribute__((always_inline)) void multiply_channel(const Rows<float, kRows>& x, int place, const Vec* weights,
                                                            Vec (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Vec channel = broadcast(x[r][place]);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) add_product(sums[r][v], channel, weights[v]);
  }
}

// Products whose weights are T; operands are float.
template <class T>
struct FloatProduct;

template <>
struct FloatProduct<float> {
  using Operand = float;
  using Weight = float;
  static constexpr int kChannels = 1;
  static constexpr int kWords = kTileColumns;
  using Sum = Vec;
  static constexpr bool kIntegers = false;

  template <int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply(const Rows<float, kRows>& x, const float* weight,
                                                             int64_t tile_stride,
                                                             Vec (&sums)[kRows][kTiles * kTileVectors]) {
    Vec weights[kTiles * kTileVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) {
      weights[v] = load(weight + v / kTileVectors * tile_stride + v % kTileVectors * kLanes);
    }
    multiply_channel(x, 0, weights, sums);
  }
};

template <>
struct FloatProduct<BFloat16> {
  using Operand = float;
  using Weight = BFloat16;
  static constexpr int kChannels = 2;
  static constexpr int kWords = 2 * kTileColumns;
  using Sum = Vec;
  static constexpr bool kIntegers = false;

  template <int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply(const Rows<float, kRows>& x, const BFloat16* weight,
                                                             int64_t tile_stride,
                                                             Vec (&sums)[kRows][kTiles * kTileVectors]) {
    Vec pairs[kTiles * kTileVectors], weights[kTiles * kTileVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) {
      pairs[v] = load_pairs(weight + v / kTileVectors * tile_stride + v % kTileVectors * 2 * kLanes);
    }
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) weights[v] = first_of_pairs(pairs[v]);
    multiply_channel(x, 0, weights, sums);
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) weights[v] = second_of_pairs(pairs[v]);
    multiply_channel(x, 1, weights, sums);
  }
};

#if defined(KVLLM_AVX512_BF16)
// Operands and weights are bfloat16.
struct PairsProduct {
  using Operand = BFloat16;
  using Weight = BFloat16;
  static constexpr int kChannels = 2;
  static constexpr int kWords = 2 * kTileColumns;
  using Sum = Vec;
  static constexpr bool kIntegers = false;

  template <int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply(const Rows<BFloat16, kRows>& x, const BFloat16* weight,
                                                             int64_t tile_stride,
                                                             Vec (&sums)[kRows][kTiles * kTileVectors]) {
    __m512bh weights[kTiles];
#pragma GCC unroll 16
    for (int t = 0; t < kTiles; ++t) weights[t] = reinterpret_cast<__m512bh>(load_pairs(weight + t * tile_stride));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, x[r], sizeof(pair));
      const __m512bh channels = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 16
      for (int t = 0; t < kTiles; ++t) sums[r][t] = _mm512_dpbf16_ps(sums[r][t], channels, weights[t]);
    }
  }
};
#endif

// A row of x in the dtype of the operands.
template <class T>
void widen(const void* x, int64_t count, int64_t, void* operands) {
  const T* p = static_cast<const T*>(x);
  float* out = static_cast<float*>(operands);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load(p + i));
  if (i < count) store_first(static_cast<int>(count - i), out + i, load_first(static_cast<int>(count - i), p + i));
}

}  // namespace
}  // namespace kvllm
