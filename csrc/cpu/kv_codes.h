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

// Whether keys and values, as a whole, are rotated: multiplied with a Hadamard matrix.
template <class KV>
constexpr bool is_rotated = false;

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

// Addresses of the scales of a tile's keys, or of its values.
template <class Element>
struct ScalePlaces {
  void locate(int, int, int, const Element*) {}
  void locate_single(int, const Element*) {}
  void repeat(int) {}
  void prefetch_all(int, int) const {}
};

template <class Element>
  requires is_codes<Element>
struct ScalePlaces<Element> {
  const float* places[kTilePairs];
  bool together[kTilePairs / kLanes];  // whether the scales of so many pairs follow each other

  // Those of pairs begin .. end - 1, from slot `slot` of the block whose scales begin at `scales` on.
  void locate(int begin, int end, int slot, const Element* scales) {
    const float* place = reinterpret_cast<const float*>(scales) + slot;
    for (int i = begin; i < end; ++i) places[i] = place++;
    for (int vector = begin / kLanes; vector * kLanes < end; ++vector) {
      together[vector] = vector * kLanes >= begin && (vector + 1) * kLanes <= end;
    }
  }

  // That of a pair whose block has no other one.
  void locate_single(int pair, const Element* scale) {
    places[pair] = reinterpret_cast<const float*>(scale);
    together[pair / kLanes] = false;
  }

  void repeat(int count) {
    for (int i = count; i < kTilePairs; ++i) {
      places[i] = places[count - 1];
      together[i / kLanes] = false;
    }
  }

  // Those of `count` pairs, of which so many follow each other as a block has.
  void prefetch_all(int count, int block_size) const {
    for (int i = 0; i < count; i += minimum(block_size, kCacheLine / kScaleBytes)) prefetch(places[i]);
  }
};

// The scales of a tile's keys, or of its values, and their zero points where codes have 4 bits.
template <class Element>
struct Parameters {
  explicit Parameters(const ScalePlaces<Element>&) {}
  void apply_to_scores(float*, int) const {}
  void apply_to_weights(float*, int, int, int, float*) const {}
};

template <class Element>
  requires is_codes<Element>
struct Parameters<Element> {
  static constexpr int kBits = Element::kBits;
  float scales[kTilePairs];
  float zeros[kTilePairs];

  explicit Parameters(const ScalePlaces<Element>& from) {
    for (int i = 0; i < kTilePairs; i += kLanes) {
      float words[kLanes];
      const bool together = from.together[i / kLanes];
      if (!together) {
        for (int lane = 0; lane < kLanes; ++lane) words[lane] = *from.places[i + lane];
      }
      const Vec word = load(together ? from.places[i] : words);
      if constexpr (__is_same(Element, Float8)) {
        store(scales + i, mul(word, broadcast(256)));  // what a load of Float8 leaves out
      } else if constexpr (kBits != 4) {
        store(scales + i, word);
      } else {
        store(scales + i, first_of_pairs(word));
        store(zeros + i, second_of_pairs(word));
      }
    }
  }

  // Of keys: turn the first `count` scores of codes without zero points, and some more, into those of keys.
  void apply_to_scores(float* scores, int count) const {
    for (int pair = 0; pair < count; pair += kLanes) {
      store(scores + pair, mul(load(scores + pair), load(scales + pair)));
    }
  }

  // Of keys: scores of kLanes pairs from `pair` on, of products with their codes; `query_sum` is the sum of the query's
  // channels.
  Vec scores(int pair, Vec products, Vec query_sum) const {
    const Vec scaled = mul(products, load(scales + pair));
    if constexpr (kBits != 4) return scaled;
    return fma(load(zeros + pair), query_sum, scaled);
  }

  // Of values: turn weights begin .. count - 1 of a query into those of codes. Zero points are added to its sums.
  void apply_to_weights(float* weights, int begin, int count, int head_dim, float* sums) const {
    Vec zero_sum = {};
    for (int pair = begin / kLanes * kLanes; pair < count; pair += kLanes) {
      const Vec weight = load(weights + pair);
      if constexpr (kBits == 4) {
        Vec weighted = mul(weight, load(zeros + pair));
        if (pair < begin) weighted = keep_first(begin - pair, Vec{}, weighted);
        zero_sum = add(zero_sum, count - pair < kLanes ? keep_first(count - pair, weighted, Vec{}) : weighted);
      }
      store(weights + pair, mul(weight, load(scales + pair)));
    }
    if constexpr (kBits == 4) {
      const Vec zero = broadcast(reduce_add(zero_sum));
      for (int channel = 0; channel < head_dim; channel += kLanes) {
        store(sums + channel, add(load(sums + channel), zero));
      }
    }
  }
};

// What turns products of a tile's codes into those of its KV pairs.
template <class KV>
struct PairParameters {
  Parameters<typename KV::Key> keys;
  Parameters<typename KV::Value> values;
};

}  // namespace
}  // namespace kvllm
