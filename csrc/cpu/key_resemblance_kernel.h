// How much the other keys of a head resemble each key (R-KV, arXiv 2505.24133): the sum of its cosines to them.
//
// The matrix of cosines never exists: four rows of it do. Rows are added in ascending order.
#pragma once

#include "attention_kernel.h"
#include "elementwise_kernel.h"

namespace kvllm {
namespace {

template <class T>
struct KeyResemblance {
  using Product = ChannelProduct<float>;

  const T* keys;
  const int num_keys;
  const int head_dim;
  const int num_tiles;
  const float threshold;
  const bool spare_first;
  float* packed_keys;  // [num_tiles, head_dim, kTilePairs], unit keys
  float* cosines;      // [num_tiles, kRowBlock, kTilePairs]
  float* units;        // [kTilePairs, head_dim]
  float* sums;         // [num_tiles * kTilePairs]

  KeyResemblance(const void* all_keys, int num_keys, int head_dim, float threshold, bool spare_first, float* workspace)
      : keys(static_cast<const T*>(all_keys)),
        num_keys(num_keys),
        head_dim(head_dim),
        num_tiles((num_keys + kTilePairs - 1) / kTilePairs),
        threshold(threshold),
        spare_first(spare_first),
        packed_keys(workspace),
        cosines(packed_keys + static_cast<int64_t>(num_tiles) * head_dim * kTilePairs),
        units(cosines + static_cast<int64_t>(num_tiles) * kRowBlock * kTilePairs),
        sums(units + static_cast<int64_t>(kTilePairs) * head_dim) {
    for (int i = 0; i < num_tiles * kTilePairs; ++i) sums[i] = 0;
    const float* tile[kTilePairs];
    for (int i = 0; i < kTilePairs; ++i) tile[i] = units + i * head_dim;
    for (int t = 0; t < num_tiles; ++t) {
      unit_keys(t * kTilePairs, kTilePairs);
      pack_keys<float>(tile, kTilePairs, head_dim, packed_keys + static_cast<int64_t>(t) * head_dim * kTilePairs);
    }
  }

  // Keys first .. first + count - 1 of length 1 in `units`; 0 after the last one.
  void unit_keys(int first, int count) const {
    for (int i = 0; i < count; ++i) {
      const bool exists = first + i < num_keys;
      const T* key = keys + static_cast<int64_t>(exists ? first + i : 0) * head_dim;
      const float length = __builtin_sqrtf(sum_of_squares(key, head_dim));
      const Vec factor = broadcast(exists ? 1.0f / (length + 1e-8f) : 0.0f);
      for_each_vector(head_dim, [&](int64_t channel, int some) __attribute__((always_inline)) {
        store_up_to(some, units + i * head_dim + channel, mul(load_up_to(some, key + channel), factor));
      });
    }
  }

  float* cosine(int row, int rows, int key) const {
    return cosines + (key / kTilePairs * rows + row) * kTilePairs + key % kTilePairs;
  }

  // The last key that a row of cosines has above the threshold, or -1.
  int last_near(int row, int rows) const {
    for (int t = num_tiles - 1; t >= 0; --t) {
      const float* of_tile = cosine(row, rows, t * kTilePairs);
      Vec largest = load(of_tile);
      for (int i = kLanes; i < kTilePairs; i += kLanes) largest = max(load(of_tile + i), largest);
      if (!(reduce_max(largest) > threshold)) continue;
      for (int i = minimum(kTilePairs, num_keys - t * kTilePairs) - 1; i >= 0; --i) {
        if (of_tile[i] > threshold) return t * kTilePairs + i;
      }
    }
    return -1;
  }

  template <int kRows>
  void add_rows(int first) const {
    unit_keys(first, kRows);
    for (int t = 0; t < num_tiles; ++t) {
      const float* tile = packed_keys + static_cast<int64_t>(t) * head_dim * kTilePairs;
      score<Product, kRows>(units, tile, head_dim, 1.0f, kTilePairs, cosine(0, kRows, t * kTilePairs), nullptr);
    }
    for (int r = 0; r < kRows; ++r) {
      *cosine(r, kRows, first + r) = 0;
      const int spared = last_near(r, kRows);
      if (spared >= 0 || spare_first) *cosine(r, kRows, spared >= 0 ? spared : 0) = 0;
    }
    for (int key = 0; key < num_tiles * kTilePairs; key += kLanes) {
      Vec sum = load(sums + key);
      for (int r = 0; r < kRows; ++r) sum = add(load(cosine(r, kRows, key)), sum);
      store(sums + key, sum);
    }
  }
};

template <class T>
void key_resemblance(const void* keys, int num_keys, int head_dim, float threshold, bool spare_first, float* workspace,
                     float* sums) {
  const KeyResemblance<T> rows(keys, num_keys, head_dim, threshold, spare_first, workspace);
  for (int i = 0; i < num_keys; i += kRowBlock) {
    switch (minimum(kRowBlock, num_keys - i)) {
      case 4: rows.template add_rows<4>(i); break;
      case 3: rows.template add_rows<3>(i); break;
      case 2: rows.template add_rows<2>(i); break;
      case 1: rows.template add_rows<1>(i); break;
    }
  }
  for (int i = 0; i < num_keys; ++i) sums[i] = rows.sums[i];
}

}  // namespace
}  // namespace kvllm
