// Scores of queries against keys that are codes. Queries are rounded to 16 bits, as the operands of products with
// weights of 8 and 4 bits are, and multiplied in integers: their sums are exact.
#pragma once

#include "attention_kernel.h"
#include "integer_product.h"

namespace kvllm {
namespace {

template <class T, int kBits>
struct QuantizedKV {
  using Element = Codes<kBits>;
};

// sums += products of the pairs of a word of codes, from pair kPair on.
template <int kBits, int kPair, int kRows, int kVectors>
inline __attribute__((always_inline)) void add_code_products(const int16_t* queries, int query_stride,
                                                             const float* keys, Words (&sums)[kRows][kVectors]) {
  Words codes[kVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const Words words = load_words(keys + v * kLanes);
    if constexpr (kBits == 8) {
      codes[v] = pairs_of_words<kBits, kPair * kBits>(words);
    } else {
      codes[v] = unsigned_pairs_of_words<kBits, kPair * kBits>(words);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Words pair = broadcast_pair(queries + r * query_stride + 2 * kPair);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) add_pair_products(sums[r][v], pair, codes[v]);
  }
  if constexpr (kPair + 1 < 16 / kBits) {
    asm("" : "+r"(keys));  // or g++ keeps the words in registers, which the sums need
    add_code_products<kBits, kPair + 1>(queries, query_stride, keys, sums);
  }
}

// score() of attention_kernel.h. A query is head_dim integers, the float that they are multiples of, and their sum.
template <int kBits, int kRows>
[[gnu::noinline]] void score_codes(const float* queries, const float* packed_keys, int head_dim, float scale, int count,
                                   const PairParameters<Codes<kBits>>& parameters, float* scores,
                                   const Codes<kBits>* const* next) {
  constexpr int kVectors = minimum(vector_block(kRows), kTilePairs / kLanes);
  const int num_words = head_dim * kBits / 32;
  for (int pair = 0; pair < count; pair += kVectors * kLanes) {
    Words sums[kRows][kVectors] = {};
    const auto* integers = reinterpret_cast<const int16_t*>(queries);
    for (int word = 0; word < num_words; ++word, integers += 32 / kBits) {
      if (next != nullptr) {
        constexpr int kPairs = kVectors * kLanes;
#pragma GCC unroll 16
        for (int i = 0; i < (kPairs + 15) / 16; ++i) {
          prefetch(next[pair + word % 16 * kPairs / 16 + i] + word / 16 * kCacheLine);
        }
      }
      add_code_products<kBits, 0>(integers, 2 * head_dim, packed_keys + word * kTilePairs + pair, sums);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float* of_query = queries + r * head_dim + head_dim / 2;
      const Vec factor = broadcast(scale * of_query[0]), query_sum = mul(factor, broadcast(of_query[1]));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const int place = pair + v * kLanes;
        const Vec products = mul(to_float(sums[r][v]), factor);
        store(scores + r * kTilePairs + place, parameters.scores(place, products, query_sum));
      }
    }
  }
}

template <class T, int kBits>
struct TileScores<T, QuantizedKV<T, kBits>> {
  const float scale;
  const int head_dim;
  float* queries;      // [tile.count, head_dim]
  float* packed_keys;  // [head_dim * kBits / 32, kTilePairs]

  TileScores(const QueryTile& tile, int head_dim, float scale, float* workspace)
      : scale(scale), head_dim(head_dim), queries(workspace), packed_keys(workspace + kMaxQueries * head_dim) {
    for (int i = 0; i < tile.count; ++i) {
      auto* integers = reinterpret_cast<int16_t*>(queries + i * head_dim);
      quantize<T, kBits>(tile.queries[i], head_dim, head_dim, integers);
      int sum = 0;
      for (int channel = 0; channel < head_dim; ++channel) sum += integers[channel];
      queries[i * head_dim + head_dim / 2 + 1] = static_cast<float>(sum);
    }
  }

  void pack(const TilePairs<Codes<kBits>>& pairs) const { pack_keys<float>(pairs, head_dim * kBits / 32, packed_keys); }

  template <int kRows>
  void score_queries(int first, int count, const PairParameters<Codes<kBits>>& parameters, float* scores,
                     const Codes<kBits>* const* next) const {
    score_codes<kBits, kRows>(queries + first * head_dim, packed_keys, head_dim, scale, count, parameters, scores,
                              next);
  }
};

}  // namespace
}  // namespace kvllm
