// Products of rows with a weight that lies in tiles of kTileColumns columns (see ops.h: pack_weight).
//
// Every output is summed in one accumulator over ascending channels, whatever the number of rows, so a row gets the
// same bits beside any other rows.
#pragma once

#include "simd.h"

namespace kvllm {
namespace {

constexpr int kTileVectors = kTileColumns / kLanes;

// Rows that share one pass over a tile, and sums that several tiles at once may have: all must fit the 32 or 16
// registers.
constexpr int kProductRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 3;
constexpr int kSums = kLanes == 16 ? 24 : kLanes == 8 ? 8 : 16;

// Channels of the weight that stay in the first cache while all rows pass.
constexpr int kDepthBlock = 256;

// Bytes between what is multiplied and what is fetched, where rows pass a block once. It is fetched to the second
// cache: a core can wait for more cache lines there than in the first one.
constexpr int kPrefetchDistance = 6144;

// Rows that can multiply `tiles` tiles at once, and tiles that `rows` rows can.
constexpr int rows_for(int tiles) {
  const int fitting = kSums / (tiles * kTileVectors);
  return tiles == 1 || fitting > kProductRows ? kProductRows : fitting;
}
constexpr int tiles_for(int rows) { return rows <= rows_for(4) ? 4 : rows <= rows_for(2) ? 2 : 1; }

template <int kRows, int kVectors>
inline __attribute__((always_inline)) void multiply_channel(const float* x, int64_t x_stride, const Vec* weights,
                                                            Vec (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Vec channel = broadcast(x[r * x_stride]);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) add_product(sums[r][v], channel, weights[v]);
  }
}

// How a number of channels, kChannels, is multiplied; a tile has kWords elements of the weight for them.
template <class T>
struct FloatProduct;

template <>
struct FloatProduct<float> {
  using Operand = float;
  using Weight = float;
  static constexpr int kChannels = 1;
  static constexpr int kWords = kTileColumns;
  static constexpr bool kScaled = false;

  template <int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply(const float* x, int64_t x_stride, const float* weight,
                                                             int64_t tile_stride,
                                                             Vec (&sums)[kRows][kTiles * kTileVectors]) {
    Vec weights[kTiles * kTileVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) {
      weights[v] = load(weight + v / kTileVectors * tile_stride + v % kTileVectors * kLanes);
    }
    multiply_channel(x, x_stride, weights, sums);
  }
};

template <>
struct FloatProduct<BFloat16> {
  using Operand = float;
  using Weight = BFloat16;
  static constexpr int kChannels = 2;
  static constexpr int kWords = 2 * kTileColumns;
  static constexpr bool kScaled = false;

  template <int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply(const float* x, int64_t x_stride, const BFloat16* weight,
                                                             int64_t tile_stride,
                                                             Vec (&sums)[kRows][kTiles * kTileVectors]) {
    Vec pairs[kTiles * kTileVectors], weights[kTiles * kTileVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) {
      pairs[v] = load_pairs(weight + v / kTileVectors * tile_stride + v % kTileVectors * 2 * kLanes);
    }
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) weights[v] = first_of_pairs(pairs[v]);
    multiply_channel(x, x_stride, weights, sums);
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) weights[v] = second_of_pairs(pairs[v]);
    multiply_channel(x + 1, x_stride, weights, sums);
  }
};

// Integers of kBits, as many as fit 32 bits side by side. They are widened to float in registers; the sums of a group
// of channels are scaled afterwards.
template <int kBits>
struct IntegerProduct {
  using Operand = float;
  using Weight = int32_t;
  static constexpr int kChannels = 32 / kBits;
  static constexpr int kWords = kTileColumns;
  static constexpr bool kScaled = true;

  template <int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply(const float* x, int64_t x_stride, const int32_t* weight,
                                                             int64_t tile_stride,
                                                             Vec (&sums)[kRows][kTiles * kTileVectors]) {
    Vec words[kTiles * kTileVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) {
      words[v] = load_words(weight + v / kTileVectors * tile_stride + v % kTileVectors * kLanes);
    }
    multiply_from<0, kRows, kTiles>(x, x_stride, words, sums);
  }

 private:
  template <int kChannel, int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply_from(const float* x, int64_t x_stride, const Vec* words,
                                                                  Vec (&sums)[kRows][kTiles * kTileVectors]) {
    Vec weights[kTiles * kTileVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) {
      weights[v] = integer_of_words<kBits, kChannel * kBits>(words[v]);
    }
    multiply_channel(x + kChannel, x_stride, weights, sums);
    if constexpr (kChannel + 1 < kChannels) {
      multiply_from<kChannel + 1, kRows, kTiles>(x, x_stride, words, sums);
    }
  }
};

#if defined(KVLLM_AVX512_BF16)
struct PairsProduct {
  using Operand = BFloat16;
  using Weight = BFloat16;
  static constexpr int kChannels = 2;
  static constexpr int kWords = 2 * kTileColumns;
  static constexpr bool kScaled = false;

  template <int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply(const BFloat16* x, int64_t x_stride,
                                                             const BFloat16* weight, int64_t tile_stride,
                                                             Vec (&sums)[kRows][kTiles * kTileVectors]) {
    __m512bh weights[kTiles];
#pragma GCC unroll 16
    for (int t = 0; t < kTiles; ++t) weights[t] = reinterpret_cast<__m512bh>(load_pairs(weight + t * tile_stride));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, x + r * x_stride, sizeof(pair));
      const __m512bh channels = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 16
      for (int t = 0; t < kTiles; ++t) sums[r][t] = _mm512_dpbf16_ps(sums[r][t], channels, weights[t]);
    }
  }
};
#endif

// Memory that a block fetches meanwhile: `step` bytes of each tile's for every cache line of the tile that it reads.
struct Ahead {
  const char* data;
  int64_t step;
  bool to_second_cache;
};

// Adds the products of `depth` channels to sums [kRows, kTiles * kTileColumns], or sets them if these are the first.
template <class P, int kRows, int kTiles>
void multiply_block(const typename P::Operand* x, int64_t x_stride, const typename P::Weight* weight,
                    int64_t tile_stride, int64_t depth, float* sums, bool first, Ahead ahead) {
  constexpr int kVectors = kTiles * kTileVectors;
  Vec accumulated[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) accumulated[r][v] = first ? Vec{} : load(sums + (r * kVectors + v) * kLanes);
  }
  for (int64_t k = 0; k < depth; k += P::kChannels, weight += P::kWords) {
#pragma GCC unroll 16
    for (int t = 0; t < kTiles; ++t) {
      const char* line = ahead.data + t * tile_stride * static_cast<int64_t>(sizeof(*weight));
      ahead.to_second_cache ? __builtin_prefetch(line, 0, 2) : __builtin_prefetch(line);
    }
    ahead.data += ahead.step;
    P::template multiply<kRows, kTiles>(x + k, x_stride, weight, tile_stride, accumulated);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(sums + (r * kVectors + v) * kLanes, accumulated[r][v]);
  }
}

template <class P>
using BlockProduct = void (*)(const typename P::Operand* x, int64_t x_stride, const typename P::Weight* weight,
                              int64_t tile_stride, int64_t depth, float* sums, bool first, Ahead ahead);

template <class P, int kTiles, int kRows = rows_for(kTiles)>
BlockProduct<P> block_product(int rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return block_product<P, kTiles, kRows - 1>(rows);
  }
  return multiply_block<P, kRows, kTiles>;
}
template <class P>
BlockProduct<P> block_product(int rows, int tiles) {
  return tiles == 4 ? block_product<P, 4>(rows) : tiles == 2 ? block_product<P, 2>(rows) : block_product<P, 1>(rows);
}

// Row r of sums [rows, num_columns] with the bias, to columns of out.
template <class T>
inline void write_sums(const float* sums, int num_columns, const T* bias, T* out) {
  for (int column = 0; column < num_columns; column += kLanes) {
    const int count = num_columns - column < kLanes ? num_columns - column : kLanes;
    Vec sum = load(sums + column);
    if (bias != nullptr) sum = add(sum, count == kLanes ? load(bias + column) : load_first(count, bias + column));
    count == kLanes ? store(out + column, sum) : store_first(count, out + column, sum);
  }
}

template <class T>
void widen(const void* x, float* out, int64_t count) {
  const T* p = static_cast<const T*>(x);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load(p + i));
  if (i < count) store_first(static_cast<int>(count - i), out + i, load_first(static_cast<int>(count - i), p + i));
}

// sums <- scale * partial, or what they are plus that, for [rows, tiles * kTileColumns]; scales are those of one group,
// `stride` apart from tile to tile.
inline void add_scaled(const float* partial, const float* scales, int64_t stride, int64_t rows, int tiles, bool first,
                       float* sums) {
  for (int tile = 0; tile < tiles; ++tile) {
    for (int column = 0; column < kTileColumns; column += kLanes) {
      const Vec scale = load(scales + tile * stride + column);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = (row * tiles + tile) * kTileColumns + column;
        store(sums + at, fma(load(partial + at), scale, first ? Vec{} : load(sums + at)));
      }
    }
  }
}

// The sums of `rows` rows with `tiles` tiles, from `tile` on.
template <class P>
void sum_tiles(const Product& a, int64_t first_row, int64_t rows, int64_t tile, int tiles, float* workspace) {
  const int64_t groups = (rows + kProductRows - 1) / kProductRows, width = tiles * kTileColumns;
  const int64_t tile_stride = a.depth / P::kChannels * P::kWords;
  const int64_t group = P::kScaled ? a.group : a.depth;
  float* sums = P::kScaled ? workspace + kProductSums : workspace;
  for (int64_t begin = 0, depth; begin < a.depth; begin += depth) {
    const int64_t rest = group - begin % group;
    depth = groups > 1 && rest > kDepthBlock ? kDepthBlock : rest;
    const auto* weight =
        static_cast<const typename P::Weight*>(a.weight) + tile * tile_stride + begin / P::kChannels * P::kWords;
    const bool last_block = begin + depth == a.depth;
    const auto* next = last_block ? weight + (tiles - 1) * tile_stride : weight;  // the blocks lie one after the other
    next += depth / P::kChannels * P::kWords;
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t first = rows * i / groups, last = rows * (i + 1) / groups;
      const Ahead ahead =
          groups == 1 ? Ahead{reinterpret_cast<const char*>(weight) + kPrefetchDistance, kCacheLine, true}
                      : Ahead{reinterpret_cast<const char*>(next + depth / P::kChannels * P::kWords * i / groups),
                              kCacheLine / groups, false};
      const auto* x = static_cast<const typename P::Operand*>(a.x) + (first_row + first) * a.x_stride + begin;
      block_product<P>(static_cast<int>(last - first), tiles)(x, a.x_stride, weight, tile_stride, depth,
                                                              sums + first * width, begin % group == 0, ahead);
    }
    if (P::kScaled && depth == rest) {
      const int64_t stride = a.depth / group * kTileColumns;
      add_scaled(sums, a.scales + tile * stride + begin / group * kTileColumns, stride, rows, tiles, begin < group,
                 workspace);
    }
  }
}

template <class T, class P>
void product(const Product& a, const ProductPart& part, float* workspace) {
  const int64_t rows = part.end_row - part.begin_row;
  const int64_t groups = (rows + kProductRows - 1) / kProductRows;
  const int at_once = tiles_for(static_cast<int>((rows + groups - 1) / groups));
  for (int64_t tile = part.begin_tile; tile < part.end_tile;) {
    const int tiles = part.end_tile - tile < at_once ? 1 : at_once;
    sum_tiles<P>(a, part.begin_row, rows, tile, tiles, workspace);
    const int64_t column = tile * kTileColumns, width = tiles * kTileColumns;
    const int valid = static_cast<int>(a.columns - column < width ? a.columns - column : width);
    const T* bias = a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + column;
    for (int64_t row = 0; row < rows; ++row) {
      write_sums(workspace + row * width, valid, bias,
                 static_cast<T*>(a.out) + (part.begin_row + row) * a.out_stride + column);
    }
    tile += tiles;
  }
}

}  // namespace
}  // namespace kvllm
