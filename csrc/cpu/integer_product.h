// Products with weights of 8 or 4 bits, in integers.
//
// A row's channels are rounded to 16 bits, with a scale for each block: so finely that a product is off by at most
// 2^-16 of the block's largest channel times the sum of its weights. The products of a block are summed exactly: 256 of
// them stay below 2^31.
#pragma once

#include "product_kernel.h"

namespace kvllm {
namespace {

// A word of the weight has kChannels integers. Those at place i and i + kChannels / 2 are a pair, for every i.
template <int kBits>
struct IntegerProduct {
  using Operand = int16_t;
  using Weight = int32_t;
  using Sum = Words;
  static constexpr int kChannels = 32 / kBits;
  static constexpr int kWords = kTileColumns;
  static constexpr bool kIntegers = true;

  template <int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply(const Rows<int16_t, kRows>& x, const int32_t* weight,
                                                             int64_t tile_stride,
                                                             Words (&sums)[kRows][kTiles * kTileVectors]) {
    multiply_pairs<0>(x, weight, tile_stride, sums);
  }

 private:
  template <int kPair, int kRows, int kVectors>
  static inline __attribute__((always_inline)) void multiply_pairs(const Rows<int16_t, kRows>& x, const int32_t* weight,
                                                                   int64_t tile_stride,
                                                                   Words (&sums)[kRows][kVectors]) {
    Words weights[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const Words words = load_words(weight + v / kTileVectors * tile_stride + v % kTileVectors * kLanes);
      weights[v] = pairs_of_words<kBits, kPair * kBits>(words);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Words pair = broadcast_pair(x[r] + 2 * kPair);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) add_pair_products(sums[r][v], pair, weights[v]);
    }
    if constexpr (kPair + 1 < kChannels / 2) {
      asm("" : "+r"(weight));  // or g++ keeps the words in registers, which the sums need
      multiply_pairs<kPair + 1>(x, weight, tile_stride, sums);
    }
  }
};

// The largest magnitude; NaN if any channel is infinite or NaN.
template <class T>
inline float largest_magnitude(const T* x, int count) {
  const Vec zero = broadcast(0);
  Vec largest = zero, nan = zero;
  for (int i = 0; i < count; i += kLanes) {
    const Vec channels = count - i < kLanes ? load_first(count - i, x + i) : load(x + i);
    largest = max(largest, max(channels, sub(zero, channels)));
    nan = fma(channels, zero, nan);
  }
  return reduce_max(largest) + reduce_add(nan);
}

// Channels times `factor`, as integers in the order in which pairs are multiplied.
template <class T, int kChannels>
inline void round_to_pairs(const T* x, int count, float factor, int16_t* pairs) {
  int16_t integers[kBlockChannels + kLanes];
  for (int i = 0; i < count; i += kLanes) {
    const Vec channels = count - i < kLanes ? load_first(count - i, x + i) : load(x + i);
    store_rounded(integers + i, mul(channels, broadcast(factor)));
  }
  for (int word = 0; word < count; word += kChannels) {
#pragma GCC unroll 16
    for (int i = 0; i < kChannels / 2; ++i) {
      pairs[word + 2 * i] = integers[word + i];
      pairs[word + 2 * i + 1] = integers[word + i + kChannels / 2];
    }
  }
}

// A row of x as operands. Where a block is not finite, its scale is NaN, and so are the sums.
template <class T, int kBits>
void quantize(const void* row, int64_t depth, int64_t group, void* operands) {
  constexpr float kLargest = 32767, kTiny = 1e-30f;  // kTiny keeps the factor finite
  const T* x = static_cast<const T*>(row);
  auto* pairs = static_cast<int16_t*>(operands);
  auto* scale = reinterpret_cast<float*>(pairs + depth);
  for (int64_t begin = 0, count; begin < depth; begin += count, ++scale) {
    const int64_t rest = group - begin % group;
    count = rest < kBlockChannels ? rest : kBlockChannels;
    const float magnitude = largest_magnitude(x + begin, static_cast<int>(count));
    const float largest = magnitude < kTiny ? kTiny : magnitude;
    *scale = largest / kLargest;
    round_to_pairs<T, 32 / kBits>(x + begin, static_cast<int>(count), kLargest / largest, pairs + begin);
  }
}

}  // namespace
}  // namespace kvllm
