// Paged attention of a tile of queries over one KV head: online softmax over tiles of KV pairs, blocks read in place.
//
// Every sum has one order whatever the shape of the tile: a score adds over channels, a weighted value adds over
// KV pairs, each in one accumulator, ascending; sums of weights are taken per tile, tiles per segment. So a query gets
// the same bits in a decode, in a prefill chunk of any size, and beside any other queries.
#pragma once

#include "hadamard_kernel.h"
#include "kv_codes.h"

namespace kvllm {
namespace {

// Rows of accumulators in registers; columns as vectors. 16 accumulators of 32 registers, or 8 of 16: fewer would wait
// for each other.
constexpr int kRowBlock = 4;
constexpr int vector_block(int rows) { return (kLanes == 16 ? 4 : 2) * (rows > 2 ? 1 : 4 / rows); }

// A score is a sum of products of words: a word is a channel, or a pair of bfloat16 channels in the 32 bits of a float.
// Pairs travel through Vec with their bits untouched. A word of a query is kFactors numbers.
template <class T>
struct ChannelProduct {
  using Element = T;
  using Word = T;
  using Factor = T;
  static constexpr int kChannels = 1;
  static constexpr int kFactors = 1;
  static void unpack(Vec word, Vec* factors) { factors[0] = word; }
  static void accumulate(Vec& sum, Vec query, Vec key) { add_product(sum, query, key); }
};
struct BFloat16Product {
  using Element = BFloat16;
  using Word = float;
  static constexpr int kChannels = 2;
#if defined(KVLLM_AVX512_BF16)
  using Factor = float;
  static constexpr int kFactors = 1;
  static void unpack(Vec word, Vec* factors) { factors[0] = word; }
  static void accumulate(Vec& sum, Vec query, Vec key) {
    sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(query), reinterpret_cast<__m512bh>(key));
  }
#else
  using Factor = BFloat16;
  static constexpr int kFactors = 2;
  static void unpack(Vec word, Vec* factors) {
    factors[0] = first_of_pairs(word);
    factors[1] = second_of_pairs(word);
  }
  static void accumulate(Vec& sum, Vec query, Vec key) { add_product(sum, query, key); }
#endif
};

// KV pairs in the cache that are vectors of T (QuantizedKV: those that are integers).
template <class T, class P>
struct PlainKV {
  using Key = T;
  using Value = T;
  using Product = P;
};

// KV pairs that are numbers of 8 bits, with queries of T.
template <class T>
struct Float8KV {
  using Key = Float8;
  using Value = Float8;
  struct Product : ChannelProduct<T> {
    using Element = Float8;
    using Word = Float8;
  };
};

// Addresses of the KV pairs of a tile.
template <class KV>
struct TilePairs {
  using Key = typename KV::Key;
  using Value = typename KV::Value;

  int start;
  int count;
  int block_size;
  const Key* keys[kTilePairs];
  const Value* values[kTilePairs];
  ScalePlaces<Key> key_scales;
  ScalePlaces<Value> value_scales;

  // The tile at `first`, of pairs before `end`. The rest of `keys` repeats the last one: some readable memory.
  void locate(const PagedHead& head, int first, int end) {
    start = first;
    count = first < end ? minimum(kTilePairs, end - first) : 0;
    if (count == 0) return;
    block_size = head.block_size;
    if (block_size == 1) {
      locate_single(head);
    } else {
      locate_blocks(head);
    }
    for (int i = count; i < kTilePairs; ++i) {
      keys[i] = keys[count - 1];
      values[i] = values[count - 1];
    }
    key_scales.repeat(count);
    value_scales.repeat(count);
  }

  void prefetch_scales() const {
    key_scales.prefetch_all(count, block_size);
    value_scales.prefetch_all(count, block_size);
  }

 private:
  // Pairs in blocks of their own: without the work that a block takes.
  void locate_single(const PagedHead& head) {
    for (int i = 0; i < count; ++i) {
      const int place = start + i + (start + i < head.evicted_begin ? 0 : head.num_evicted);
      const int64_t block = head.block_table[place];
      keys[i] = static_cast<const Key*>(head.keys) + block * head.key_stride;
      values[i] = static_cast<const Value*>(head.values) + block * head.value_stride;
      key_scales.locate_single(i, keys[i] + elements<Key>(head.head_dim));
      value_scales.locate_single(i, values[i] + elements<Value>(head.head_dim));
    }
  }

  void locate_blocks(const PagedHead& head) {
    const int32_t* block;
    int slot;
    const auto seek = [&](int pair) {
      const int place = pair + (pair < head.evicted_begin ? 0 : head.num_evicted);
      block = head.block_table + place / head.block_size;
      slot = place % head.block_size;
    };
    seek(start);
    for (int i = 0; i < count;) {
      const bool before_evicted = start + i < head.evicted_begin;
      int block_end = minimum(count, i + head.block_size - slot);
      if (before_evicted) block_end = minimum(block_end, head.evicted_begin - start);
      const Key* key_block = static_cast<const Key*>(head.keys) + *block * head.key_stride;
      const Value* value_block = static_cast<const Value*>(head.values) + *block * head.value_stride;
      locate_vectors(head, i, block_end, slot, key_block, keys, key_scales);
      locate_vectors(head, i, block_end, slot, value_block, values, value_scales);
      i = block_end;
      if (before_evicted && start + i == head.evicted_begin) {
        seek(start + i);
      } else {  // a division for each block would take as long as the products where blocks are short
        ++block;
        slot = 0;
      }
    }
  }

  // Vectors begin .. end - 1, from slot `slot` of the head's block at `block` on.
  template <class T>
  static void locate_vectors(const PagedHead& head, int begin, int end, int slot, const T* block, const T** vectors,
                             ScalePlaces<T>& scales) {
    const int size = elements<T>(head.head_dim);
    scales.locate(begin, end, slot, block + static_cast<int64_t>(head.block_size) * size);
    const T* vector = block + static_cast<int64_t>(slot) * size;
    for (int i = begin; i < end; ++i, vector += size) vectors[i] = vector;
  }
};

template <class T>
inline void prefetch_vectors(const T* const* vectors, int begin, int end, int head_dim) {
  const int count = elements<T>(head_dim);
  for (int i = begin; i < end; ++i) {
    for (int element = 0; element < count; element += kCacheLine / sizeof(T)) prefetch(vectors[i] + element);
  }
}

// packed[word][pair] <- word of each pair's key, for `count` pairs of the tile and some that fill a vector.
template <class Word, class T>
void pack_keys(const T* const* keys, int count, int num_words, float* packed) {
  for (int pair = 0; pair < count; pair += kLanes) {
    for (int first = 0; first < num_words; first += kLanes) {
      const int words = minimum(kLanes, num_words - first);
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const Word* key = reinterpret_cast<const Word*>(keys[pair + i]) + first;
        square[i] = words == kLanes ? load(key) : load_first(words, key);
      }
      transpose(square);
      for (int i = 0; i < words; ++i) store(packed + (first + i) * kTilePairs + pair, square[i]);
    }
  }
}

// scores[row][pair] <- scale * query . key, for kRows queries and the first `count` pairs of the tile, with some that
// fill vectors. Meanwhile it prefetches as many vectors of `next`, unless that is null.
template <class Product, int kRows>
[[gnu::noinline]] void score(const float* queries, const float* packed_keys, int num_words, float scale, int count,
                             float* scores, const typename Product::Element* const* next) {
  constexpr int kFactors = Product::kFactors;
  constexpr int kVectors = minimum(vector_block(kRows), kTilePairs / kLanes);
  for (int pair = 0; pair < count; pair += kVectors * kLanes) {
    Vec sums[kRows][kVectors] = {};
    const float* query = queries;
    for (int word = 0; word < num_words; ++word, query += kFactors) {
      const float* keys = packed_keys + word * kTilePairs + pair;
      if (next != nullptr) {
        constexpr int kPairs = kVectors * kLanes;
#pragma GCC unroll 16
        for (int i = 0; i < (kPairs + 15) / 16; ++i) {
          const char* vector = reinterpret_cast<const char*>(next[pair + word % 16 * kPairs / 16 + i]);
          prefetch(vector + word / 16 * kCacheLine);
        }
      }
      const auto factor = [&](int r, int f) { return broadcast(query[r * num_words * kFactors + f]); };
      if constexpr (kRows > 2) {
        Vec key[kVectors][kFactors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) Product::unpack(load(keys + v * kLanes), key[v]);
#pragma GCC unroll 16
        for (int f = 0; f < kFactors; ++f) {
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const Vec x = factor(r, f);
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) Product::accumulate(sums[r][v], x, key[v][f]);
          }
        }
      } else {
        Vec x[kRows][kFactors];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
          for (int f = 0; f < kFactors; ++f) x[r][f] = factor(r, f);
        }
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          Vec key[kFactors];
          Product::unpack(load(keys + v * kLanes), key);
#pragma GCC unroll 16
          for (int f = 0; f < kFactors; ++f) {
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) Product::accumulate(sums[r][v], x[r][f], key[f]);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        store(scores + r * kTilePairs + pair + v * kLanes, mul(sums[r][v], broadcast(scale)));
      }
    }
  }
}

// A query as score() reads it: kFactors numbers for each word.
template <class Product>
void unpack_query(const void* query, int head_dim, float* factors) {
  const int count = head_dim / Product::kChannels * Product::kFactors;
  for (int i = 0; i < count; i += kLanes) {
    const int some = minimum(kLanes, count - i);
    store_first(some, factors + i, load_first(some, static_cast<const typename Product::Factor*>(query) + i));
  }
}

// Bound the first `count` scores of a query, and some that fill a vector: soft_cap * tanh(score / soft_cap).
inline void bound_scores(float* scores, int count, float soft_cap) {
  for (int pair = 0; pair < count; pair += kLanes) {
    const Vec power = exp(mul(load(scores + pair), broadcast(2 / soft_cap)));
    const Vec below = div(broadcast(2 * soft_cap), add(power, broadcast(1.0f)));  // tanh(x) = 1 - 2 / (e^2x + 1)
    store(scores + pair, sub(broadcast(soft_cap), below));
  }
}

// Turn scores begin .. count - 1 of a query, at least one, into weights, and rescale what it has so far.
inline void softmax(float* scores, int begin, int count, int head_dim, float& max_so_far, float& sum_so_far,
                    float* values_so_far) {
  const Vec minus_infinity = broadcast(-__builtin_inff());
  const int first = begin / kLanes * kLanes;
  Vec largest = minus_infinity;
  for (int pair = first; pair < count; pair += kLanes) {
    const int valid = count - pair;
    Vec x = load(scores + pair);
    if (pair < begin) {
      x = keep_first(begin - pair, minus_infinity, x);
      store(scores + pair, x);
    }
    if (valid < kLanes) {
      x = keep_first(valid, x, minus_infinity);
      store(scores + pair, x);
    }
    largest = max(x, largest);
  }
  const float new_max = any_greater(largest, broadcast(max_so_far)) ? reduce_max(largest) : max_so_far;

  Vec sum = {};
  for (int pair = first; pair < count; pair += kLanes) {
    const Vec weight = exp(sub(load(scores + pair), broadcast(new_max)));
    store(scores + pair, weight);
    sum = add(sum, weight);
  }
  if (new_max == max_so_far) {
    sum_so_far += reduce_add(sum);
    return;
  }
  const Vec shrink = exp(sub(broadcast(max_so_far), broadcast(new_max)));
  float factor[kLanes];
  store(factor, shrink);
  sum_so_far = sum_so_far * factor[0] + reduce_add(sum);
  max_so_far = new_max;
  for (int channel = 0; channel < head_dim; ++channel) values_so_far[channel] *= factor[0];
}

// How weights multiply values of T: those of kPairs KV pairs at once, the first of which is a multiple of it. A load
// leaves out pairs that are not among begin .. end - 1.
template <class T>
struct Weighing {
  static constexpr int kPairs = 1;
  static void prepare(float*) {}
  static void accumulate(Vec& sum, Vec weight, Vec value) { add_product(sum, weight, value); }
  static void load_channels(const T* const* values, int pair, int, int, int element, Vec* out) {
    load_two(values[pair] + element, out);
  }
  static Vec load_last(int count, const T* const* values, int pair, int, int, int channel) {
    return load_first(count, values[pair] + channel);
  }
};

#if defined(KVLLM_AVX512_BF16)
// Weights are rounded to bfloat16, too; those of two pairs share a word.
template <>
struct Weighing<BFloat16> {
  using Values = const BFloat16* const*;
  static constexpr int kPairs = 2;
  static void prepare(float* weights) {
    for (int pair = 0; pair < kTilePairs; pair += 2 * kLanes) {
      const __m512bh words = _mm512_cvtne2ps_pbh(load(weights + pair + kLanes), load(weights + pair));
      store(weights + pair / 2, reinterpret_cast<__m512>(words));
    }
  }
  static void accumulate(Vec& sum, Vec weight, Vec value) { BFloat16Product::accumulate(sum, weight, value); }
  static void load_channels(Values values, int pair, int begin, int end, int element, Vec* out) {
    constexpr __mmask32 kSecond = 0xaaaaaaaa;
    const Vec zero = {}, first = pair < begin ? zero : load_pairs(values[pair] + element);
    const Vec second = pair + 1 < end ? load_pairs(values[pair + 1] + element) : zero;
    const __m512i a = _mm512_castps_si512(first), b = _mm512_castps_si512(second);
    out[0] = _mm512_castsi512_ps(_mm512_mask_blend_epi16(kSecond, a, _mm512_slli_epi32(b, 16)));
    out[1] = _mm512_castsi512_ps(_mm512_mask_blend_epi16(kSecond, _mm512_srli_epi32(a, 16), b));
  }
  static Vec load_last(int count, Values values, int pair, int begin, int end, int channel) {
    const Vec zero = {}, first = pair < begin ? zero : load_first(count, values[pair] + channel);
    return join_pairs(first, pair + 1 < end ? load_first(count, values[pair + 1] + channel) : zero);
  }
};
#endif

// sums[row][channels] += weights[row][begin .. end - 1] . values, for kVectors vectors of channels from `channel` on.
// Meanwhile it prefetches those of `next`, unless that is null.
template <class T, class Next, int kRows, int kVectors>
[[gnu::noinline]] void weigh_channels(const float* weights, const T* const* values, int begin, int end, int channel,
                                      int head_dim, float* sums, const Next* const* next) {
  Vec registers[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) registers[r][v] = load(sums + r * head_dim + channel + v * kLanes);
  }
  if (is_codes<Next> && elements<Next>(channel) % kCacheLine != 0) next = nullptr;  // several blocks share a cache line
  constexpr int kPairs = Weighing<T>::kPairs;
  for (int pair = begin / kPairs * kPairs; pair < end; pair += kPairs) {
    if (next != nullptr) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; v += kCacheLine / elements<Next>(kLanes * static_cast<int>(sizeof(Next)))) {
        for (int i = 0; i < kPairs; ++i) prefetch(next[pair + i] + elements<Next>(channel + v * kLanes));
      }
    }
    Vec value[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; v += 2) {
      Weighing<T>::load_channels(values, pair, begin, end, elements<T>(channel + v * kLanes), value + v);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = broadcast(weights[r * kTilePairs + pair / kPairs]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) Weighing<T>::accumulate(registers[r][v], weight, value[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(sums + r * head_dim + channel + v * kLanes, registers[r][v]);
  }
}

// The same for as many channels as there are whole blocks of vectors, then for smaller blocks. Returns the first
// channel that is left.
template <class T, class Next, int kRows, int kVectors>
int weigh_blocks(const float* weights, const T* const* values, int begin, int end, int channel, int head_dim,
                 float* sums, const Next* const* next) {
  for (; channel + kVectors * kLanes <= head_dim; channel += kVectors * kLanes) {
    weigh_channels<T, Next, kRows, kVectors>(weights, values, begin, end, channel, head_dim, sums, next);
  }
  if constexpr (kVectors > 2) {
    return weigh_blocks<T, Next, kRows, kVectors / 2>(weights, values, begin, end, channel, head_dim, sums, next);
  }
  return channel;
}

// Channels of a sum are in the order of load_two where two vectors fit.
template <int kRows, class T, class Next>
void weigh(const float* weights, const T* const* values, int begin, int end, int head_dim, float* sums,
           const Next* const* next) {
  int channel = weigh_blocks<T, Next, kRows, vector_block(kRows)>(weights, values, begin, end, 0, head_dim, sums, next);
  if constexpr (!is_codes<T>) {
    constexpr int kPairs = Weighing<T>::kPairs;
    for (; channel < head_dim; channel += kLanes) {
      const int channels = minimum(kLanes, head_dim - channel);
      for (int r = 0; r < kRows; ++r) {
        Vec sum = load_first(channels, sums + r * head_dim + channel);
        for (int pair = begin / kPairs * kPairs; pair < end; pair += kPairs) {
          const Vec value = Weighing<T>::load_last(channels, values, pair, begin, end, channel);
          Weighing<T>::accumulate(sum, broadcast(weights[r * kTilePairs + pair / kPairs]), value);
        }
        store_first(channels, sums + r * head_dim + channel, sum);
      }
    }
  }
}

// Queries with which it pays to pack codes of keys, and to decode those of values, once a tile.
constexpr int kDecodingQueries = 2 * kRowBlock + 1;

// The values of a tile as floats, in the order of load_two: those of codes, for many queries.
template <class T>
struct DecodedValues {
  float* const memory;  // [kTilePairs, head_dim], null where values are multiplied as they are
  const float* rows[kTilePairs];

  DecodedValues(int num_queries, float* memory)
      : memory(is_codes<T> && num_queries >= kDecodingQueries ? memory : nullptr) {}

  void decode(const T* const* values, int count, int head_dim) {
    if (memory == nullptr) return;
    for (int pair = 0; pair < count; ++pair) {
      float* const row = memory + pair * head_dim;
      rows[pair] = row;
      for (int channel = 0; channel < head_dim; channel += 2 * kLanes) {
        Vec two[2];
        load_two(values[pair] + elements<T>(channel), two);
        store(row + channel, two[0]);
        store(row + channel + kLanes, two[1]);
      }
    }
  }
};

// The queries of a tile, and the keys that they are multiplied with.
template <class T, class KV>
struct TileScores {
  using Value = typename KV::Value;
  using Product = typename KV::Product;
  using Word = typename Product::Word;

  const float scale;
  const int num_words;
  const int query_floats;
  float* queries;      // [tile.count, query_floats]
  float* packed_keys;  // [num_words, kTilePairs]

  TileScores(const QueryTile& tile, int head_dim, float scale, float* workspace)
      : scale(scale),
        num_words(head_dim / Product::kChannels),
        query_floats(num_words * Product::kFactors),
        queries(workspace),
        packed_keys(workspace + kPackedRow * head_dim) {
    for (int i = 0; i < tile.count; ++i) unpack_query<Product>(tile.queries[i], head_dim, queries + i * query_floats);
  }

  void pack(const TilePairs<KV>& pairs) const { pack_keys<Word>(pairs.keys, pairs.count, num_words, packed_keys); }

  template <int kRows>
  void score_queries(int first, const TilePairs<KV>& pairs, const PairParameters<KV>& parameters, float* scores,
                     const Value* const* next) const {
    if (is_codes<Value> && next != nullptr) {  // score() prefetches as many bytes as there are words of 32 bits
      prefetch_vectors(next, 0, pairs.count, num_words);
      next = nullptr;
    }
    score<Product, kRows>(queries + first * query_floats, packed_keys, num_words, scale, pairs.count, scores, next);
    for (int r = 0; r < kRows; ++r) parameters.keys.apply_to_scores(scores + r * kTilePairs, pairs.count);
  }
};

// All queries of a tile against one tile of KV pairs after the other.
template <class T, class KV>
struct TileAttention {
  using Value = typename KV::Value;

  const QueryTile& tile;
  const int head_dim;
  const TileScores<T, KV> products;
  DecodedValues<Value> decoded;

  TileAttention(const QueryTile& tile, int head_dim, float scale, float* workspace)
      : tile(tile),
        head_dim(head_dim),
        products(tile, head_dim, scale, workspace),
        decoded(tile.count, workspace + kDecodedRow * head_dim) {}

  template <int kRows>
  void keep_scores(int first, const TilePairs<KV>& pairs, const float* scores) const {
    const int begin = tile.kept_begin > pairs.start ? tile.kept_begin - pairs.start : 0;
    for (int r = 0; r < kRows; ++r) {
      float* kept = tile.kept_scores + (first + r) * tile.kept_stride + pairs.start - tile.kept_begin;
      for (int pair = begin; pair < pairs.count; ++pair) kept[pair] = scores[r * kTilePairs + pair];
    }
  }

  // Queries `first` .. `first + kRows - 1` against the KV pairs whose keys are packed.
  template <int kRows>
  void attend_queries(int first, const TilePairs<KV>& pairs, const PairParameters<KV>& parameters,
                      const TilePairs<KV>* next, const PartialSoftmax& result) const {
    const typename KV::Key* const* next_keys = next == nullptr ? nullptr : next->keys;
    float scores[kRows * kTilePairs];
    int begin[kRows], valid[kRows];
    float* sums = result.weighted_values + first * head_dim;
    products.template score_queries<kRows>(first, pairs, parameters, scores, next == nullptr ? nullptr : next->values);
    if (tile.soft_cap != 0) {
      for (int r = 0; r < kRows; ++r) bound_scores(scores + r * kTilePairs, pairs.count, tile.soft_cap);
    }
    if (tile.kept_scores != nullptr) keep_scores<kRows>(first, pairs, scores);
    for (int r = 0; r < kRows; ++r) {
      valid[r] = minimum(pairs.count, tile.last[first + r] + 1 - pairs.start);
      begin[r] = maximum(0, tile.first[first + r] - pairs.start);
      if (begin[r] >= valid[r]) continue;
      softmax(scores + r * kTilePairs, begin[r], valid[r], head_dim, result.max[first + r], result.sum[first + r],
              sums + r * head_dim);
      parameters.values.apply_to_weights(scores + r * kTilePairs, begin[r], valid[r], head_dim, sums + r * head_dim);
      Weighing<Value>::prepare(scores + r * kTilePairs);
    }
    const int all_end = decoded.memory == nullptr
                            ? weigh_queries<kRows>(scores, pairs.values, begin, valid, sums, next_keys)
                            : weigh_queries<kRows>(scores, decoded.rows, begin, valid, sums, next_keys);
    if (next != nullptr) {
      prefetch_vectors(next->keys, all_end, kTilePairs, head_dim);
      prefetch_vectors(next->values, pairs.count, kTilePairs, head_dim);
    }
  }

  // Add what the queries attend: row r from pair begin[r] to valid[r]. Returns the end of the pairs that all do.
  // A weight of 0 would not hide a NaN among the values: each query begins and stops at pairs of its own. What all
  // have are whole steps, so that the sums of each have the same ones beside any others.
  template <int kRows, class Element>
  int weigh_queries(const float* scores, const Element* const* values, const int* begin, const int* valid, float* sums,
                    const typename KV::Key* const* next_keys) const {
    constexpr const typename KV::Key* const* no_next = nullptr;
    constexpr int kPairs = Weighing<Element>::kPairs;
    const int all_begin = (begin[kRows - 1] + kPairs - 1) / kPairs * kPairs;
    const int all_end = maximum(all_begin, valid[0] / kPairs * kPairs);
    for (int r = 0; r < kRows; ++r) {
      if (begin[r] >= minimum(all_begin, valid[r])) continue;
      weigh<1>(scores + r * kTilePairs, values, begin[r], minimum(all_begin, valid[r]), head_dim, sums + r * head_dim,
               no_next);
    }
    weigh<kRows>(scores, values, all_begin, all_end, head_dim, sums, next_keys);
    for (int r = 0; r < kRows; ++r) {
      if (valid[r] <= all_end) continue;
      weigh<1>(scores + r * kTilePairs, values, all_end, valid[r], head_dim, sums + r * head_dim, no_next);
    }
    return all_end;
  }

  // `next` is the tile to prefetch, or null.
  void attend_tile(const TilePairs<KV>& pairs, const TilePairs<KV>* next, const PartialSoftmax& result) {
    products.pack(pairs);
    decoded.decode(pairs.values, pairs.count, head_dim);
    const PairParameters<KV> parameters{Parameters(pairs.key_scales), Parameters(pairs.value_scales)};
    if (next != nullptr) next->prefetch_scales();
    int first = 0;
    while (tile.last[first] < pairs.start) ++first;
    int end = tile.count;
    while (end > first && tile.first[end - 1] >= pairs.start + pairs.count) --end;
    for (int i = first; i < end; i += kRowBlock, next = nullptr) {
      switch (minimum(kRowBlock, end - i)) {
        case 4: attend_queries<4>(i, pairs, parameters, next, result); break;
        case 3: attend_queries<3>(i, pairs, parameters, next, result); break;
        case 2: attend_queries<2>(i, pairs, parameters, next, result); break;
        case 1: attend_queries<1>(i, pairs, parameters, next, result); break;
      }
    }
  }
};

inline void clear(int count, int head_dim, const PartialSoftmax& result) {
  for (int i = 0; i < count; ++i) {
    result.max[i] = -__builtin_inff();
    result.sum[i] = 0;
  }
  for (int i = 0; i < count * head_dim; ++i) result.weighted_values[i] = 0;
}

// `into` covers earlier KV pairs than `later`.
inline void merge(int count, int head_dim, const PartialSoftmax& into, const PartialSoftmax& later) {
  for (int i = 0; i < count; ++i) {
    if (later.sum[i] == 0) continue;  // attends none of the later pairs
    const float new_max = later.max[i] > into.max[i] ? later.max[i] : into.max[i];
    float shrink[2][kLanes];
    store(shrink[0], exp(broadcast(into.max[i] - new_max)));
    store(shrink[1], exp(broadcast(later.max[i] - new_max)));
    into.max[i] = new_max;
    into.sum[i] = into.sum[i] * shrink[0][0] + later.sum[i] * shrink[1][0];
    float* sums = into.weighted_values + i * head_dim;
    const float* others = later.weighted_values + i * head_dim;
    for (int channel = 0; channel < head_dim; ++channel) {
      sums[channel] = sums[channel] * shrink[0][0] + others[channel] * shrink[1][0];
    }
  }
}

template <class T, class KV>
void attend(const PairRange& range, const PairRange* following, const QueryTile& tile, float scale, float* workspace,
            const PartialSoftmax& result) {
  const PagedHead& head = range.head;
  const int end = minimum(range.end, tile.last[tile.count - 1] + 1);
  TilePairs<KV> tiles[2];
  int current = 0;
  tiles[current].locate(head, range.begin, end);
  prefetch_vectors(tiles[current].keys, 0, tiles[current].count, head.head_dim);
  prefetch_vectors(tiles[current].values, 0, tiles[current].count, head.head_dim);
  TileAttention<T, KV> attention(tile, head.head_dim, scale, workspace);
  float* memory = workspace + kPartialRow * head.head_dim;
  const PartialSoftmax later{memory, memory + tile.count, memory + 2 * tile.count};
  for (int segment = range.begin / kSegmentPairs * kSegmentPairs; segment < end; segment += kSegmentPairs) {
    const PartialSoftmax& partial = segment <= range.begin ? result : later;
    clear(tile.count, head.head_dim, partial);
    const int segment_end = minimum(end, segment + kSegmentPairs);
    for (int start = maximum(segment, range.begin); start < segment_end; start += kTilePairs) {
      TilePairs<KV>& next = tiles[!current];
      next.locate(head, start + kTilePairs, end);
      if (next.count == 0 && following != nullptr) next.locate(following->head, following->begin, following->end);
      attention.attend_tile(tiles[current], next.count == 0 ? nullptr : &next, partial);
      current = !current;
    }
    if (segment > range.begin) merge(tile.count, head.head_dim, result, later);
  }
}

// output <- factor * sums, whose channels are in the order in which load_two gives those of Element.
template <class Element, class T>
void write_output(const float* sums, Vec factor, int head_dim, T* output) {
  int channel = 0;
  for (; channel + 2 * kLanes <= head_dim; channel += 2 * kLanes) {
    const Vec first = mul(factor, load(sums + channel)), second = mul(factor, load(sums + channel + kLanes));
    store_two_of<Element>(output + channel, first, second);
  }
  for (; channel < head_dim; channel += kLanes) {
    const int channels = minimum(kLanes, head_dim - channel);
    store_first(channels, output + channel, mul(factor, load_first(channels, sums + channel)));
  }
}

template <class T, class KV>
void finish(const QueryTile& tile, int head_dim, const PartialSoftmax& total) {
  for (int i = 0; i < tile.count; ++i) {
    Vec inverse = div(broadcast(1.0f), broadcast(total.sum[i]));
    if (tile.sinks != nullptr) {
      const float sink = tile.sinks[i % tile.group], largest = sink > total.max[i] ? sink : total.max[i];
      const Vec shrink = exp(broadcast(total.max[i] - largest));
      inverse = div(shrink, fma(shrink, broadcast(total.sum[i]), exp(broadcast(sink - largest))));
    }
    T* output = static_cast<T*>(tile.outputs[i]);
    const float* sums = total.weighted_values + i * head_dim;
    if constexpr (is_rotated<KV>) {
      float rotated[kMaxCodeChannels];
      write_output<typename KV::Value>(sums, inverse, head_dim, rotated);
      hadamard(rotated, head_dim);
      for (int channel = 0; channel < head_dim; channel += kLanes) store(output + channel, load(rotated + channel));
    } else {
      write_output<typename KV::Value>(sums, inverse, head_dim, output);
    }
  }
}

// Whether load_two gives the first of each pair of channels, and then the second ones.
template <class Element>
constexpr bool kByPairs = false;
template <>
constexpr bool kByPairs<BFloat16> = true;
template <>
constexpr bool kByPairs<Codes<4>> = true;

// Sums whose channels follow each other into the order by pairs, or the other way round.
template <bool kIntoPairs>
void reorder(int count, int head_dim, float* weighted_values) {
  for (int group = 0; group < count * head_dim; group += 2 * kLanes) {
    float* sums = weighted_values + group;
    float ordered[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) {
      const int by_pairs = i % 2 * kLanes + i / 2;
      ordered[kIntoPairs ? by_pairs : i] = sums[kIntoPairs ? i : by_pairs];
    }
    __builtin_memcpy(sums, ordered, sizeof(ordered));
  }
}

// Sums over vectors of T into those over rotated codes of Element.
template <class T, class Element>
void rotate_sums(int count, int head_dim, float* weighted_values) {
  if (kByPairs<T>) reorder<false>(count, head_dim, weighted_values);
  for (int i = 0; i < count; ++i) hadamard(weighted_values + i * head_dim, head_dim);
  if (kByPairs<Element>) reorder<true>(count, head_dim, weighted_values);
}

// From the order of load_two for T into that for values of KV; null where they are the same.
template <class T, class KV>
constexpr auto reorder_from() {
  using Element = typename KV::Value;
  using Function = void (*)(int count, int head_dim, float* weighted_values);
  if constexpr (is_rotated<KV>) {
    return Function{rotate_sums<T, Element>};
  } else {
    return kByPairs<T> == kByPairs<Element> ? Function{} : Function{reorder<kByPairs<Element>>};
  }
}

}  // namespace
}  // namespace kvllm
