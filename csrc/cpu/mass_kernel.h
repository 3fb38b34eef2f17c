// Attention mass: how much probability each key of a window receives from all queries (Kara, Eq. 4), or its squares.
//
// A query's softmax is complete before it is added, so the matrix of probabilities never exists: four rows of it do.
// Queries are added in ascending order whatever their number, so the result has the same bits in every blocking.
#pragma once

#include "attention_kernel.h"

namespace kvllm {
namespace {

template <class T, class Product>
struct WindowMass {
  using Word = typename Product::Word;

  const int num_keys;
  const int num_tiles;
  const int head_dim;
  const int num_words;
  const float scale;
  const float soft_cap;
  const bool squared;
  float* packed_keys;  // [num_tiles, num_words, kTilePairs]
  float* scores;       // [num_tiles, kRowBlock, kTilePairs]
  float* rows;         // [kRowBlock, head_dim]
  float* mass;         // [num_tiles * kTilePairs]

  WindowMass(const void* keys, int num_keys, int head_dim, float scale, float soft_cap, bool squared, float* workspace,
             float* mass)
      : num_keys(num_keys),
        num_tiles((num_keys + kTilePairs - 1) / kTilePairs),
        head_dim(head_dim),
        num_words(head_dim / Product::kChannels),
        scale(scale),
        soft_cap(soft_cap),
        squared(squared),
        packed_keys(workspace),
        scores(packed_keys + static_cast<int64_t>(num_tiles) * head_dim * kTilePairs),
        rows(scores + static_cast<int64_t>(num_tiles) * kRowBlock * kTilePairs),
        mass(mass) {
    for (int i = 0; i < num_tiles * kTilePairs; ++i) mass[i] = 0;
    const T* tile[kTilePairs];
    for (int t = 0; t < num_tiles; ++t) {
      for (int i = 0; i < kTilePairs; ++i) {
        const int key = minimum(t * kTilePairs + i, num_keys - 1);
        tile[i] = static_cast<const T*>(keys) + static_cast<int64_t>(key) * head_dim;
      }
      pack_keys<Word>(tile, kTilePairs, num_words, packed_keys + static_cast<int64_t>(t) * num_words * kTilePairs);
    }
  }

  template <int kRows>
  void add_queries(const void* const* queries, const int* attended, const float* sinks) const {
    const int query_floats = num_words * Product::kFactors;
    for (int r = 0; r < kRows; ++r) unpack_query<Product>(queries[r], head_dim, rows + r * query_floats);
    for (int t = 0; t < num_tiles; ++t) {
      const float* keys = packed_keys + static_cast<int64_t>(t) * num_words * kTilePairs;
      score<Product, kRows>(rows, keys, num_words, scale, kTilePairs, scores + t * kRows * kTilePairs, nullptr);
    }
    if (soft_cap != 0) bound_scores(scores, num_tiles * kRows * kTilePairs, soft_cap);
    Vec inverse[kRows];
    for (int r = 0; r < kRows; ++r) {
      inverse[r] = exponentiate(scores + r * kTilePairs, kRows * kTilePairs, attended[r],
                                sinks == nullptr ? nullptr : sinks + r);
    }
    for (int t = 0; t < num_tiles; ++t) {
      for (int key = 0; key < kTilePairs; key += kLanes) {
        float* column = mass + t * kTilePairs + key;
        Vec sum = load(column);
        for (int r = 0; r < kRows; ++r) {
          const Vec weight = load(scores + (t * kRows + r) * kTilePairs + key);
          const Vec probability = mul(weight, inverse[r]);
          sum = squared ? fma(probability, probability, sum) : fma(weight, inverse[r], sum);
        }
        store(column, sum);
      }
    }
  }

  // Scores of one query, tiles `stride` apart, to e^(score - max), 0 after the first `attended`. Returns 1 / their
  // sum, which a score without a key may be a part of.
  Vec exponentiate(float* query_scores, int stride, int attended, const float* sink) const {
    const Vec minus_infinity = broadcast(-__builtin_inff());
    Vec largest = minus_infinity;
    for (int t = 0; t < num_tiles; ++t) {
      for (int key = 0; key < kTilePairs; key += kLanes) {
        float* place = query_scores + t * stride + key;
        const int valid = attended - t * kTilePairs - key;
        if (valid < kLanes) store(place, valid > 0 ? keep_first(valid, load(place), minus_infinity) : minus_infinity);
        largest = max(load(place), largest);
      }
    }
    if (sink != nullptr) largest = max(largest, broadcast(*sink));
    const Vec shift = broadcast(reduce_max(largest));
    Vec sum = {};
    for (int t = 0; t < num_tiles; ++t) {
      for (int key = 0; key < kTilePairs; key += kLanes) {
        float* place = query_scores + t * stride + key;
        const Vec weight = exp(sub(load(place), shift));
        store(place, weight);
        sum = add(sum, weight);
      }
    }
    Vec total = broadcast(reduce_add(sum));
    if (sink != nullptr) total = add(total, exp(sub(broadcast(*sink), shift)));
    return div(broadcast(1.0f), total);
  }
};

template <class T, class Product>
void attention_mass(const void* const* queries, const int* attended, int num_queries, const void* keys, int num_keys,
                    int head_dim, float scale, float soft_cap, const float* sinks, bool squared, float* workspace,
                    float* mass) {
  const WindowMass<T, Product> window(keys, num_keys, head_dim, scale, soft_cap, squared, workspace, mass);
  for (int i = 0; i < num_queries; i += kRowBlock) {
    const float* some = sinks == nullptr ? nullptr : sinks + i;
    switch (minimum(kRowBlock, num_queries - i)) {
      case 4: window.template add_queries<4>(queries + i, attended + i, some); break;
      case 3: window.template add_queries<3>(queries + i, attended + i, some); break;
      case 2: window.template add_queries<2>(queries + i, attended + i, some); break;
      case 1: window.template add_queries<1>(queries + i, attended + i, some); break;
    }
  }
}

}  // namespace
}  // namespace kvllm
