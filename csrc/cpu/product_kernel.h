// Products of rows with a weight that lies in tiles of kTileColumns columns (see ops.h: pack_weight).
//
// Every output is summed over ascending channels, whatever the number of rows, so a row gets the same bits beside any
// other rows.
#pragma once

#include "simd.h"

namespace kvllm {
namespace {

constexpr int kTileVectors = kTileColumns / kLanes;

// Rows that share one pass over a tile, and sums that several tiles at once may have: all must fit the registers.
constexpr int kProductRows = kLanes == 16 ? 12 : kLanes == 8 || kRegisters == 32 ? 6 : 3;
constexpr int kSums = kRegisters == 32 ? 24 : kLanes == 8 ? 8 : 16;

// Bytes between what is multiplied and what is fetched, where rows pass a block once. It is fetched to the second
// cache: a core can wait for more cache lines there than in the first one.
constexpr int kPrefetchDistance = 6144;

// Rows that can multiply `tiles` tiles at once, and tiles that `rows` rows can.
constexpr int rows_for(int tiles) {
  const int fitting = kSums / (tiles * kTileVectors);
  return tiles == 1 || fitting > kProductRows ? kProductRows : fitting;
}
constexpr int tiles_for(int rows) { return rows <= rows_for(4) ? 4 : rows <= rows_for(2) ? 2 : 1; }

// So few rows wait for memory, unless weights of few bits are to be unpacked. They pass one tile after the other: a
// core reads a single stream up to 1.4 times as fast as two or four.
constexpr int kStreamingRows = 4;

// Memory that a block fetches meanwhile: `step` bytes of each tile's for every cache line of the tile that it reads.
struct Ahead {
  const char* data;
  int64_t step;
  bool to_second_cache;
};

// Scales of a block of integers: of the rows, each `row_stride` after the one before, and of the columns of the tiles.
struct Scales {
  const float* rows;
  int64_t row_stride;
  const float* columns;
  int64_t tile_stride;
};

// Rows, and the channels of tiles that multiply them.
template <class P>
struct Block {
  const typename P::Operand* x;
  int64_t x_stride;
  const typename P::Weight* weight;
  int64_t tile_stride;
  int64_t depth;
  Scales scales;
  Ahead ahead;
};

// The operands of rows at some channel, which moves on. Three rows share a pointer, so that registers hold all of them.
template <class T, int kRows>
class Rows {
 public:
  Rows(const T* x, int64_t stride) : stride_(stride * static_cast<int64_t>(sizeof(T))) {
    for (int i = 0; i < kPointers; ++i) pointers_[i] = reinterpret_cast<const char*>(x + 3 * i * stride);
  }

  inline __attribute__((always_inline)) const T* operator[](int row) const {
    return reinterpret_cast<const T*>(pointers_[row / 3] + row % 3 * stride_);
  }

  inline __attribute__((always_inline)) void advance(int channels) {
#pragma GCC unroll 16
    for (int i = 0; i < kPointers; ++i) {
      pointers_[i] += channels * static_cast<int64_t>(sizeof(T));
      asm("" : "+r"(pointers_[i]));  // or g++ makes a pointer for each row, and keeps some in vector registers
    }
  }

 private:
  static constexpr int kPointers = (kRows + 2) / 3;
  const char* pointers_[kPointers];
  int64_t stride_;
};

// Bytes of a tile that P multiplies at once.
template <class P>
constexpr int kStepBytes = P::kWords * sizeof(typename P::Weight);

template <int kRows, int kVectors>
inline __attribute__((always_inline)) void load_sums(const float* from, bool zero, Vec (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zero ? Vec{} : load(from + (r * kVectors + v) * kLanes);
  }
}

template <int kRows, int kVectors>
inline __attribute__((always_inline)) void store_sums(const Vec (&sums)[kRows][kVectors], float* to) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(to + (r * kVectors + v) * kLanes, sums[r][v]);
  }
}

// sums += or = the products of integers, times their scales.
template <int kRows, int kVectors>
inline __attribute__((always_inline)) void add_scaled(const Words (&products)[kRows][kVectors], const Scales& scales,
                                                      bool first, float* sums) {
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const Vec column = load(scales.columns + v / kTileVectors * scales.tile_stride + v % kTileVectors * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec scaled = mul(to_float(products[r][v]), broadcast(scales.rows[r * scales.row_stride]));
      float* sum = sums + (r * kVectors + v) * kLanes;
      store(sum, fma(scaled, column, first ? Vec{} : load(sum)));
    }
  }
}

// Adds the products of a block to sums [kRows, kTiles * kTileColumns], or sets them if these are the first.
template <class P, int kRows, int kTiles>
void multiply_block(Block<P> block, bool first, float* sums) {
  typename P::Sum accumulated[kRows][kTiles * kTileVectors]{};
  if constexpr (!P::kIntegers) load_sums(sums, first, accumulated);
  if constexpr (requires { P::rearrange(accumulated); }) P::rearrange(accumulated);
  constexpr int kLines = kStepBytes<P> / kCacheLine;
  const int64_t tile_bytes = block.tile_stride * static_cast<int64_t>(sizeof(typename P::Weight));
  Rows<typename P::Operand, kRows> x(block.x, block.x_stride);
  for (int64_t k = 0; k < block.depth; k += P::kChannels, block.weight += P::kWords) {
#pragma GCC unroll 16
    for (int i = 0; i < kLines * kTiles; ++i) {
      const char* line = block.ahead.data + i / kTiles * block.ahead.step + i % kTiles * tile_bytes;
      block.ahead.to_second_cache ? __builtin_prefetch(line, 0, 2) : __builtin_prefetch(line);
    }
    block.ahead.data += kLines * block.ahead.step;
    P::template multiply<kRows, kTiles>(x, block.weight, block.tile_stride, accumulated);
    x.advance(P::kChannels);
  }
  if constexpr (requires { P::rearrange(accumulated); }) P::rearrange(accumulated);
  if constexpr (P::kIntegers) {
    add_scaled(accumulated, block.scales, first, sums);
  } else {
    store_sums(accumulated, sums);
  }
}

template <class P>
using BlockProduct = void (*)(Block<P> block, bool first, float* sums);

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

// The scales of the block from channel `begin` on, for rows from `x` on and tiles from `tile` on.
inline Scales scales_at(const Product& a, const int16_t* x, int64_t tile, int64_t begin) {
  const int64_t group = begin / a.group, group_blocks = integer_blocks(a.group, a.group);
  const auto* rows = reinterpret_cast<const float*>(x + a.depth);
  const int64_t tile_stride = a.depth / a.group * kTileColumns;
  return {rows + group * group_blocks + begin % a.group / kBlockChannels, a.x_stride / 2,
          a.scales + tile * tile_stride + group * kTileColumns, tile_stride};
}

// sums [rows, tiles * kTileColumns] of `rows` rows with `tiles` tiles, from `tile` on.
template <class P>
void sum_tiles(const Product& a, int64_t first_row, int64_t rows, int64_t tile, int tiles, float* sums) {
  const int64_t passes = (rows + kProductRows - 1) / kProductRows;
  const int64_t tile_stride = a.depth / P::kChannels * P::kWords;
  const int64_t group = P::kIntegers ? a.group : a.depth;
  // From this channel on, what is fetched is the beginning of the tiles after these.
  const int64_t edge = a.depth - kPrefetchDistance / kStepBytes<P> * P::kChannels;
  for (int64_t begin = 0, depth; begin < a.depth; begin += depth) {
    depth = group - begin % group;
    if ((P::kIntegers || passes > 1) && depth > kBlockChannels) depth = kBlockChannels;
    if (!P::kIntegers && passes == 1 && begin < edge && depth > edge - begin) depth = edge - begin;
    const int64_t words = depth / P::kChannels * P::kWords;
    const auto* weight =
        static_cast<const typename P::Weight*>(a.weight) + tile * tile_stride + begin / P::kChannels * P::kWords;
    const bool last_block = begin + depth == a.depth;
    const auto* next = words + (last_block ? weight + (tiles - 1) * tile_stride : weight);  // blocks follow each other
    for (int64_t i = 0; i < passes; ++i) {
      const int64_t first = rows * i / passes, last = rows * (i + 1) / passes;
      const auto* x = static_cast<const typename P::Operand*>(a.x) + (first_row + first) * a.x_stride;
      Block<P> block{x + begin, a.x_stride, weight, tile_stride, depth, {}, {}};
      block.ahead =
          passes == 1
              ? Ahead{reinterpret_cast<const char*>(begin < edge ? weight : weight + (tiles - 1) * tile_stride) +
                          kPrefetchDistance,
                      kCacheLine, true}
              : Ahead{reinterpret_cast<const char*>(next + words * i / passes), kCacheLine / passes, false};
      if constexpr (P::kIntegers) block.scales = scales_at(a, x, tile, begin);
      block_product<P>(static_cast<int>(last - first), tiles)(block, begin == 0, sums + first * tiles * kTileColumns);
    }
  }
}

template <class T, class P>
void product(const Product& a, const ProductPart& part, float* workspace) {
  const int64_t rows = part.end_row - part.begin_row;
  const int64_t passes = (rows + kProductRows - 1) / kProductRows;
  const int at_once =
      !P::kIntegers && rows <= kStreamingRows ? 1 : tiles_for(static_cast<int>((rows + passes - 1) / passes));
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

// Rows of a part: so many that they stay in the second cache.
inline int64_t part_rows(int64_t rows, int64_t depth) {
  constexpr int64_t kCachedFloats = 65536, kStep = 12, kMost = 48;
  const int64_t fitting = kCachedFloats / depth / kStep * kStep;
  const int64_t cached = fitting < kStep ? kStep : fitting > kMost ? kMost : fitting;
  const int64_t parts = (rows + cached - 1) / cached;
  return (rows + parts - 1) / parts;
}

}  // namespace
}  // namespace kvllm
