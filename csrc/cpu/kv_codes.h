// Codes in the paged cache (kernels.h, KVFormat): where the scales of a tile's KV pairs are, and what they do to scores
// and weights. For elements that are no codes, all of it is empty.
#pragma once

#include "simd.h"

namespace kvllm {
namespace {

constexpr int minimum(int a, int b) { return a < b ? a : b; }
constexpr int maximum(int a, int b) { return a > b ? a : b; }

// Into the second level: the first has no room for the next tile beside this one, and fetches that wait for memory
// would fill its few slots and hold up the loads of this tile.
inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

template <class T>
constexpr bool is_codes = false;
template <int kBits>
constexpr bool is_codes<Codes<kBits>> = true;
template <>
constexpr bool is_codes<Float8> = true;

// Elements that `channels` channels of a vector take.
template <class T>
constexpr int elements(int channels) {
  if constexpr (is_codes<T>) {
    return channels * T::kBits / 8;
  } else {
    return channels;
  }
}

// Two vectors of channels in the order in which load_two gives those of Element.
template <class Element, class T>
inline void store_two_of(T* p, Vec first, Vec second) {
  if constexpr (!is_codes<Element>) {
    store_two(p, first, second);
  } else if constexpr (Element::kBits == 8) {
    store(p, first);
    store(p + kLanes, second);
  } else {
    store_pairs(p, first, second);
  }
}

// Addresses of the scales of a tile's KV pairs.
template <class Element>
struct PairScales {
  void locate_scales(int, int, int, const Element*, const Element*) {}
  void repeat_scales(int) {}
  void prefetch_scales() const {}
};

template <class Element>
  requires is_codes<Element>
struct PairScales<Element> {
  const float* key_scales[kTilePairs];
  const float* value_scales[kTilePairs];
  bool together[kTilePairs / kLanes];  // whether the scales of so many pairs follow each other

  // Those of pairs begin .. end - 1, from slot `slot` of the block whose scales begin at `keys` and `values` on.
  void locate_scales(int begin, int end, int slot, const Element* keys, const Element* values) {
    const float* key = reinterpret_cast<const float*>(keys) + slot;
    const float* value = reinterpret_cast<const float*>(values) + slot;
    for (int i = begin; i < end; ++i) {
      key_scales[i] = key++;
      value_scales[i] = value++;
    }
    for (int vector = begin / kLanes; vector * kLanes < end; ++vector) {
      together[vector] = vector * kLanes >= begin && (vector + 1) * kLanes <= end;
    }
  }

  void repeat_scales(int count) {
    for (int i = count; i < kTilePairs; ++i) {
      key_scales[i] = key_scales[count - 1];
      value_scales[i] = value_scales[count - 1];
      together[i / kLanes] = false;
    }
  }

  void prefetch_scales() const {
    for (int i = 0; i < kTilePairs; i += kCacheLine / kScaleBytes) {
      prefetch(key_scales[i]);
      prefetch(value_scales[i]);
    }
  }
};

// The scales of a tile's KV pairs, and their zero points where codes have 4 bits.
template <class Element>
struct PairParameters {
  explicit PairParameters(const PairScales<Element>&) {}
  void apply_to_scores(float*, int) const {}
  void apply_to_weights(float*, int, int, int, float*) const {}
};

template <class Element>
  requires is_codes<Element>
struct PairParameters<Element> {
  static constexpr int kBits = Element::kBits;
  float key_scales[kTilePairs];
  float key_zeros[kTilePairs];
  float value_scales[kTilePairs];
  float value_zeros[kTilePairs];

  explicit PairParameters(const PairScales<Element>& places) {
    read(places.key_scales, places.together, key_scales, key_zeros);
    read(places.value_scales, places.together, value_scales, value_zeros);
  }

  // Turn the first `count` scores of codes without zero points, and some more, into those of keys.
  void apply_to_scores(float* scores, int count) const {
    for (int pair = 0; pair < count; pair += kLanes) {
      store(scores + pair, mul(load(scores + pair), load(key_scales + pair)));
    }
  }

  // Scores of kLanes pairs from `pair` on, of products with their codes; `query_sum` is the sum of the query's
  // channels.
  Vec scores(int pair, Vec products, Vec query_sum) const {
    const Vec scaled = mul(products, load(key_scales + pair));
    if constexpr (kBits == 8) return scaled;
    return fma(load(key_zeros + pair), query_sum, scaled);
  }

  // Turn weights begin .. count - 1 of a query into those of codes. Zero points are added to its sums.
  void apply_to_weights(float* weights, int begin, int count, int head_dim, float* sums) const {
    Vec zero_sum = {};
    for (int pair = begin / kLanes * kLanes; pair < count; pair += kLanes) {
      const Vec weight = load(weights + pair);
      if constexpr (kBits == 4) {
        Vec zeros = mul(weight, load(value_zeros + pair));
        if (pair < begin) zeros = keep_first(begin - pair, Vec{}, zeros);
        zero_sum = add(zero_sum, count - pair < kLanes ? keep_first(count - pair, zeros, Vec{}) : zeros);
      }
      store(weights + pair, mul(weight, load(value_scales + pair)));
    }
    if constexpr (kBits == 4) {
      const Vec zero = broadcast(reduce_add(zero_sum));
      for (int channel = 0; channel < head_dim; channel += kLanes) {
        store(sums + channel, add(load(sums + channel), zero));
      }
    }
  }

 private:
  static void read(const float* const* places, const bool* together, float* scales, float* zeros) {
    for (int i = 0; i < kTilePairs; i += kLanes) {
      float words[kLanes];
      if (!together[i / kLanes]) {
        for (int lane = 0; lane < kLanes; ++lane) words[lane] = *places[i + lane];
      }
      const Vec word = load(together[i / kLanes] ? places[i] : words);
      if constexpr (__is_same(Element, Float8)) {
        store(scales + i, mul(word, broadcast(256)));  // what a load of Float8 leaves out
      } else if constexpr (kBits == 8) {
        store(scales + i, word);
      } else {
        store(scales + i, first_of_pairs(word));
        store(zeros + i, second_of_pairs(word));
      }
    }
  }
};

}  // namespace
}  // namespace kvllm
