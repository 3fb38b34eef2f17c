// Scores of queries against keys that are codes. Queries are rounded to 16 bits, as the operands of products with
// weights of 8 and 4 bits are, and multiplied in integers: their sums are exact.
#pragma once

#include "attention_kernel.h"
#include "integer_product.h"

namespace kvllm {
namespace {

template <int kKeyBits, int kValueBits, bool kRotated = false>
struct QuantizedKV {
  using Key = Codes<kKeyBits>;
  using Value = Codes<kValueBits>;
};

// Of vectors that were multiplied with a Hadamard matrix.
template <int kKeyBits, int kValueBits>
using RotatedKV = QuantizedKV<kKeyBits, kValueBits, true>;
template <int kKeyBits, int kValueBits>
constexpr bool is_rotated<RotatedKV<kKeyBits, kValueBits>> = true;

// Codes of 8 bits, or the low 4 bits of others, that are multiplied at once, in bytes, and their channels: in vectors
// of integers of 16 bits, one for each channel of a byte.
constexpr int kCodeBytes = 2 * kLanes;
template <int kBits>
constexpr int kPerByte = kBits == 8 ? 1 : 2;
template <int kBits>
constexpr int kChunk = kCodeBytes * kPerByte<kBits>;

// Where codes are read next. high: the high 2 bits of codes of 6 bits.
struct CodePlace {
  const uint8_t* bytes;
  const uint8_t* high;
};

template <int kBits>
inline void load_code_pairs(const CodePlace& place, Words* out) {
  if constexpr (kBits == 8) {
    out[0] = load_signed_pairs(place.bytes);
  } else {
    const Words both = load_byte_pairs(place.bytes);
    out[0] = unsigned_pairs_of_words<4, 0>(both);
    out[1] = unsigned_pairs_of_words<4, 4>(both);
  }
  if constexpr (kBits == 6) {
    const Words four = load_bytes(place.high), pairs = four | four << 12;  // half of a byte in each half of a word
    out[0] = out[0] | keep_bits_of_pairs<0x30>(pairs << 4);
    out[1] = out[1] | keep_bits_of_pairs<0x30>(pairs << 2);
  }
}

// Queries as integers in the order of load_code_pairs. A row has head_dim integers, up to a whole chunk zeros, and at
// its end the float that they are multiples of, and their sum.
template <int kBits>
struct QueryIntegers {
  float* rows;
  int stride;

  QueryIntegers(float* memory, int head_dim) : rows(memory), stride(2 * head_dim) {}

  const float* row(int i) const { return rows + i * stride; }

  template <class T>
  void set(int i, const void* query, int head_dim) const {
    float* row = rows + i * stride;
    auto* integers = reinterpret_cast<int16_t*>(row);
    quantize<T, 16>(query, head_dim, head_dim, integers);
    float factor;
    __builtin_memcpy(&factor, integers + head_dim, sizeof(factor));
    int sum = 0;
    for (int channel = 0; channel < head_dim; ++channel) sum += integers[channel];
    for (int channel = head_dim; channel % kChunk<kBits> != 0; ++channel) integers[channel] = 0;
    for (int begin = 0; kBits != 8 && begin < head_dim; begin += kChunk<kBits>) separate(integers + begin);
    row[stride - 2] = factor;
    row[stride - 1] = static_cast<float>(sum);
  }

 private:
  // The second of each pair of a chunk after the first ones.
  static void separate(int16_t* chunk) {
    int16_t second[kCodeBytes];
    for (int i = 0; i < kCodeBytes; ++i) {
      second[i] = chunk[2 * i + 1];
      chunk[i] = chunk[2 * i];
    }
    __builtin_memcpy(chunk + kCodeBytes, second, sizeof(second));
  }
};

// sums[row][key] += products of a chunk, whose codes begin at codes[key], and whose integers begin at queries[row].
template <int kBits, int kRows, int kKeys>
inline __attribute__((always_inline)) void add_chunk(const float* queries, int stride, const CodePlace* codes,
                                                     Words* sums) {
#pragma GCC unroll 16
  for (int key = 0; key < kKeys; ++key) {
    Words pairs[kPerByte<kBits>];
    load_code_pairs<kBits>(codes[key], pairs);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kPerByte<kBits>; ++v) {
        add_pair_products(sums[r * kKeys + key], load_words(queries + r * stride + v * kLanes), pairs[v]);
      }
    }
  }
}

// products[row][pair] <- the exact sums of queries and codes, for kRows queries and the pairs of a tile, with some more
// that fill blocks. Meanwhile the vectors of `next` are fetched, unless that is null.
template <int kBits, int kRows, class Next>
[[gnu::noinline]] void multiply_codes(const float* queries, int stride, const Codes<kBits>* const* keys, int head_dim,
                                      int count, int32_t* products, const Next* const* next) {
  constexpr int kKeys = vector_block(kRows), kSums = (kRows * kKeys + 3) / 4 * 4;
  const int bytes = head_dim / kPerByte<kBits>;
  for (int pair = 0; pair < count; pair += kKeys) {
    Words sums[kSums] = {};
    CodePlace codes[kKeys];
    for (int key = 0; key < kKeys; ++key) {
      const uint8_t* const begin = &keys[pair + key]->bits;
      codes[key] = {begin, begin + bytes};
      if (next == nullptr) continue;
      for (int byte = 0; byte < elements<Next>(head_dim); byte += kCacheLine) prefetch(next[pair + key] + byte);
    }
    const float* integers = queries;
    int rest = bytes;
    for (; rest >= kCodeBytes; rest -= kCodeBytes, integers += kChunk<kBits> / 2) {
      add_chunk<kBits, kRows, kKeys>(integers, stride, codes, sums);
      for (CodePlace& place : codes) place = {place.bytes + kCodeBytes, place.high + kCodeBytes / 2};
    }
    if (rest != 0) {
      uint8_t padded[kKeys][kCodeBytes * 3 / 2] = {};
      for (int key = 0; key < kKeys; ++key) {
        __builtin_memcpy(padded[key], codes[key].bytes, rest);
        if (kBits == 6) __builtin_memcpy(padded[key] + kCodeBytes, codes[key].high, rest / 2);
        codes[key] = {padded[key], padded[key] + kCodeBytes};
      }
      add_chunk<kBits, kRows, kKeys>(integers, stride, codes, sums);
    }
    int32_t of_block[kSums];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i += 4) store_sums_of_four(sums + i, of_block + i);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kBits == 6) {
        const int excess = kExcess6 * static_cast<int>(queries[(r + 1) * stride - 1]);  // the sum of integers
        for (int key = 0; key < kKeys; ++key) of_block[r * kKeys + key] -= excess;
      }
      __builtin_memcpy(products + r * kTilePairs + pair, of_block + r * kKeys, kKeys * sizeof(int32_t));
    }
  }
}

// packed[word][pair] <- words of load_code_pairs of each pair's key, for `count` pairs of the tile and some that fill a
// vector.
template <int kBits>
void pack_codes(const Codes<kBits>* const* keys, int count, int head_dim, float* packed) {
  const int bytes = head_dim / kPerByte<kBits>;
  for (int pair = 0; pair < count; pair += kLanes) {
    float* words = packed + pair;
    for (int byte = 0; byte < bytes; byte += kCodeBytes) {
      const int some = minimum(kCodeBytes, bytes - byte);
      Vec squares[kPerByte<kBits>][kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const uint8_t* const begin = &keys[pair + i]->bits;
        CodePlace place{begin + byte, begin + bytes + byte / 2};
        uint8_t padded[kCodeBytes * 3 / 2] = {};
        if (some < kCodeBytes) {
          __builtin_memcpy(padded, place.bytes, some);
          if (kBits == 6) __builtin_memcpy(padded + kCodeBytes, place.high, some / 2);
          place = {padded, padded + kCodeBytes};
        }
        Words of_key[kPerByte<kBits>];
        load_code_pairs<kBits>(place, of_key);
        for (int v = 0; v < kPerByte<kBits>; ++v) squares[v][i] = reinterpret_cast<Vec>(of_key[v]);
      }
      for (int v = 0; v < kPerByte<kBits>; ++v) {
        transpose(squares[v]);
        for (int i = 0; i < kLanes; ++i, words += kTilePairs) store(words, squares[v][i]);
      }
    }
  }
}

// The sums of multiply_codes, of keys that are packed: without sums over lanes, which take longer than the products.
template <int kBits, int kRows>
[[gnu::noinline]] void multiply_packed(const float* queries, int stride, const float* packed, int head_dim, int count,
                                       int32_t* products) {
  constexpr int kVectors = minimum(vector_block(kRows), kTilePairs / kLanes);
  const int num_words = (head_dim + kChunk<kBits> - 1) / kChunk<kBits> * kChunk<kBits> / 2;
  for (int pair = 0; pair < count; pair += kVectors * kLanes) {
    Words sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const int32_t excess = kBits == 6 ? -kExcess6 * static_cast<int>(queries[(r + 1) * stride - 1]) : 0;
      const Words first = broadcast_pair(reinterpret_cast<const int16_t*>(&excess));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[r][v] = first;
    }
    const float* keys = packed + pair;
    for (int word = 0; word < num_words; ++word, keys += kTilePairs) {
      Words key[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) key[v] = load_words(keys + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Words query = broadcast_pair(reinterpret_cast<const int16_t*>(queries + r * stride + word));
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) add_pair_products(sums[r][v], query, key[v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v)
        __builtin_memcpy(products + r * kTilePairs + pair + v * kLanes, &sums[r][v], sizeof(Words));
    }
  }
}

template <class T, int kBits, int kValueBits, bool kRotated>
struct TileScores<T, QuantizedKV<kBits, kValueBits, kRotated>> {
  using KV = QuantizedKV<kBits, kValueBits, kRotated>;

  const float scale;
  const int head_dim;
  const QueryIntegers<kBits> queries;
  float* const packed_keys;  // null for few queries, with which packing takes longer than it saves

  TileScores(const QueryTile& tile, int head_dim, float scale, float* workspace)
      : scale(scale),
        head_dim(head_dim),
        queries(workspace, head_dim),
        packed_keys(tile.count >= kDecodingQueries ? workspace + kPackedRow * head_dim : nullptr) {
    for (int i = 0; i < tile.count; ++i) {
      if constexpr (kRotated) {
        float rotated[kMaxCodeChannels];
        rotate<T>(tile.queries[i], head_dim, rotated);
        queries.template set<float>(i, rotated, head_dim);
      } else {
        queries.template set<T>(i, tile.queries[i], head_dim);
      }
    }
  }

  void pack(const TilePairs<KV>& pairs) const {
    if (packed_keys != nullptr) pack_codes(pairs.keys, pairs.count, head_dim, packed_keys);
  }

  template <int kRows>
  void score_queries(int first, const TilePairs<KV>& pairs, const PairParameters<KV>& parameters, float* scores,
                     const typename KV::Value* const* next) const {
    int32_t products[kRows * kTilePairs];
    if (packed_keys == nullptr) {
      multiply_codes<kBits, kRows>(queries.row(first), queries.stride, pairs.keys, head_dim, pairs.count, products,
                                   next);
    } else {
      if (next != nullptr) prefetch_vectors(next, 0, pairs.count, head_dim);
      multiply_packed<kBits, kRows>(queries.row(first), queries.stride, packed_keys, head_dim, pairs.count, products);
    }
    for (int r = 0; r < kRows; ++r) {
      const float* end_of_row = queries.row(first + r + 1);
      const Vec factor = broadcast(scale * end_of_row[-2]), query_sum = mul(factor, broadcast(end_of_row[-1]));
      for (int pair = 0; pair < pairs.count; pair += kLanes) {
        const int place = r * kTilePairs + pair;
        const Vec product = mul(to_float(load_words(products + place)), factor);
        store(scores + place, parameters.keys.scores(pair, product, query_sum));
      }
    }
  }
};

}  // namespace
}  // namespace kvllm
