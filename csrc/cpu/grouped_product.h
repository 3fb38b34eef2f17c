// Products with weights in groups of 16 or 32, each with a scale of half precision and maybe a minimum, in integers:
// those of GGUF files.
//
// A row's channels are rounded to 8 bits, with a scale for each group of the weight. The products of a group are summed
// exactly, and groups in ascending order, whatever the number of rows.
#pragma once

#include "integer_product.h"

namespace kvllm {
namespace {

// Tiles and rows that are multiplied at once: their sums, and what these add to, must fit the registers. A few rows
// more are multiplied at once where none are left then.
constexpr int kGroupedTiles = kLanes == 16 ? 2 : 1;
constexpr int kGroupedRows = kLanes == 16 ? 6 : kLanes == 8 || kRegisters == 32 ? 4 : 2;
constexpr int kMostGroupedRows = kLanes == 16 ? 8 : kGroupedRows;

// Channels that all rows pass before the next ones, at most: their weights stay in the first cache.
constexpr int64_t kGroupedChannels = 640;

// Rows that pass one tile after the other: nibbles keep a core busy from the second row on.
template <GroupedForm kForm>
constexpr int kStreamingGroupedRows = kForm == GroupedForm::kNibbles ? 1 : kStreamingRows;

// Four bytes, in every word.
inline Words broadcast_word(const void* p) { return broadcast_pair(static_cast<const int16_t*>(p)); }

// Bytes of a word in all columns of a tile, and of sixteen channels: two words of nibbles, three of six bits, or four.
constexpr int64_t kTileWords = 4 * kTileColumns;
template <GroupedForm kForm>
constexpr int64_t kSixteenBytes = (2 + static_cast<int>(kForm)) * kTileWords;

// Rows, and the groups of tiles that multiply them.
struct GroupedBlock {
  const int8_t* x;
  const OperandGroup* x_groups;
  int64_t x_stride;  // in bytes, of both
  const char* weight;
  const char* tile;  // in which the weight is, of the first tile
  int64_t tile_bytes;
  const uint16_t* scales;
  int64_t tile_scales;  // from a tile's to the next one's
  int64_t groups;
  int64_t group;
  bool minimums;
  bool prefetches;

  const OperandGroup* x_group(int row) const {
    return reinterpret_cast<const OperandGroup*>(reinterpret_cast<const char*>(x_groups) + row * x_stride);
  }
};

// The operands of a half of sixteen channels of a vector of columns, four in each word.
template <GroupedForm kForm, int kHalf>
inline __attribute__((always_inline)) void load_eight(const char* from, Words& first, Words& second) {
  const auto word = [&](int i) __attribute__((always_inline)) { return load_words(from + i * kTileWords); };
  if constexpr (kForm == GroupedForm::kNibbles) {
    first = low_nibbles(word(kHalf));
    second = high_nibbles(word(kHalf));
  } else if constexpr (kForm == GroupedForm::kWide) {
    first = wide_operands(word(2 * kHalf));
    second = wide_operands(word(2 * kHalf + 1));
  } else {
    first = low_six_bits(word(2 * kHalf));
    second = kHalf == 0 ? low_six_bits(word(1)) : high_bits(word(0), word(1), word(2));
  }
}

// Fetches what is `ahead` bytes after sixteen channels of tiles.
template <GroupedForm kForm, int kTiles>
inline __attribute__((always_inline)) void prefetch_sixteen(const char* weight, int64_t tile_bytes, int64_t ahead) {
#pragma GCC unroll 16
  for (int64_t byte = 0; byte < kSixteenBytes<kForm>; byte += kCacheLine) {
#pragma GCC unroll 16
    for (int t = 0; t < kTiles; ++t) __builtin_prefetch(weight + t * tile_bytes + ahead + byte, 0, 2);
  }
}

// Adds the products of a half of sixteen channels to sums. Those of kNibbles may be narrow: a group of 32 does not pass
// 16 bits.
template <GroupedForm kForm, int kHalf, int kRows, int kVectors>
inline __attribute__((always_inline)) void multiply_eight(const Rows<int8_t, kRows>& x, const char* weight,
                                                          int64_t tile_bytes, Words (&sums)[kRows][kVectors]) {
  Words first[kVectors], second[kVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const char* tile = weight + v / kTileVectors * tile_bytes;
    load_eight<kForm, kHalf>(tile + v % kTileVectors * kLanes * 4, first[v], second[v]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Words x_first = broadcast_word(x[r]), x_second = broadcast_word(x[r] + 4);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kForm == GroupedForm::kWide) {
        add_wide_products(sums[r][v], first[v], x_first);
        add_wide_products(sums[r][v], second[v], x_second);
      } else if constexpr (kForm == GroupedForm::kSixBits) {
        add_eight_products(sums[r][v], first[v], x_first, second[v], x_second);
      } else {
        add_byte_products(sums[r][v], first[v], x_first);
        add_byte_products(sums[r][v], second[v], x_second);
      }
    }
  }
}

// totals += the sums of a group, times their scales, less the minimum of each weight.
template <int kRows, int kVectors>
inline __attribute__((always_inline)) void add_group(const Words (&sums)[kRows][kVectors], const GroupedBlock& block,
                                                     Vec (&totals)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const uint16_t* scales = block.scales + v / kTileVectors * block.tile_scales + v % kTileVectors * kLanes;
    if (v % kTileVectors == 0 && block.prefetches) {
      __builtin_prefetch(scales + kVectors / kTileVectors * block.tile_scales, 0, 2);
    }
    const Vec scale = load_halves(scales);
    const Vec minimum = block.minimums ? load_halves(scales + kTileColumns) : Vec{};
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const OperandGroup* group = block.x_group(r);
      add_product(totals[r][v], mul(to_float(sums[r][v]), broadcast(group->scale)), scale);
      if (block.minimums) add_product(totals[r][v], broadcast(group->negative_sum), minimum);
    }
  }
}

// Adds the products of a block to totals [kRows, kTiles * kTileColumns].
template <GroupedForm kForm, int kRows, int kTiles>
void multiply_groups(GroupedBlock block, float* totals) {
  constexpr int kVectors = kTiles * kTileVectors;
  constexpr bool kNarrow = kForm == GroupedForm::kNibbles && kNarrowSums;
  Rows<int8_t, kRows> x(block.x, block.x_stride);
  Vec in_registers[kRows][kVectors];
  load_sums(totals, false, in_registers);
  // From the edge on, what is fetched is the beginning of the tiles after these.
  const int64_t distance = kTiles > 1 && block.tile_bytes < kPrefetchDistance ? block.tile_bytes : kPrefetchDistance;
  const char* edge = block.tile + block.tile_bytes - distance;
  for (int64_t i = 0; i < block.groups; ++i) {
    const int64_t ahead = block.weight < edge ? distance : distance + (kTiles - 1) * block.tile_bytes;
    Words sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Words initial = kNarrow ? Words{} : broadcast_word(&block.x_group(r)->initial);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[r][v] = initial;
    }
    for (int64_t channel = 0; channel < block.group; channel += 16, block.weight += kSixteenBytes<kForm>) {
      if (block.prefetches) prefetch_sixteen<kForm, kTiles>(block.weight, block.tile_bytes, ahead);
      multiply_eight<kForm, 0>(x, block.weight, block.tile_bytes, sums);
      x.advance(8);
      multiply_eight<kForm, 1>(x, block.weight, block.tile_bytes, sums);
      x.advance(8);
    }
    if constexpr (kNarrow) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Words initial = broadcast_word(&block.x_group(r)->initial);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sums[r][v] = add_words(initial, widen_sums(sums[r][v]));
      }
    }
    add_group(sums, block, in_registers);
    ++block.x_groups;
    block.scales += (block.minimums ? 2 : 1) * kTileColumns;
  }
  store_sums(in_registers, totals);
}

using GroupsProduct = void (*)(GroupedBlock block, float* totals);

template <GroupedForm kForm, int kTiles, int kRows = kMostGroupedRows>
GroupsProduct groups_product(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return groups_product<kForm, kTiles, kRows - 1>(rows);
  }
  return multiply_groups<kForm, kRows, kTiles>;
}

// totals [rows, kTiles * kTileColumns] of the rows of a part with kTiles tiles, from `tile` on.
template <GroupedForm kForm, int kTiles>
void multiply_tiles(const Product& a, const ProductPart& part, int64_t tile, float* totals) {
  const int64_t rows = part.end_row - part.begin_row;
  const int64_t passes = rows <= kMostGroupedRows ? 1 : (rows + kGroupedRows - 1) / kGroupedRows;
  const int64_t blocks = passes == 1 ? 1 : (a.depth + kGroupedChannels - 1) / kGroupedChannels;
  const int64_t groups = a.depth / a.group, group_scales = (a.minimums ? 2 : 1) * kTileColumns;
  const int64_t tile_bytes = a.depth / 16 * kSixteenBytes<kForm>;
  const char* weight = static_cast<const char*>(a.weight) + tile * tile_bytes;
  __builtin_memset(totals, 0, rows * kTiles * kTileColumns * sizeof(float));
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t group = groups * block / blocks, begin = group * a.group;
    for (int64_t i = 0; i < passes; ++i) {
      const int64_t first = rows * i / passes, last = rows * (i + 1) / passes;
      const auto* x = static_cast<const int8_t*>(a.x) + (part.begin_row + first) * a.x_stride;
      const GroupedBlock of_pass{
          .x = x + begin,
          .x_groups = reinterpret_cast<const OperandGroup*>(x + a.depth) + group,
          .x_stride = a.x_stride,
          .weight = weight + begin / 16 * kSixteenBytes<kForm>,
          .tile = weight,
          .tile_bytes = tile_bytes,
          .scales = a.group_scales + (tile * groups + group) * group_scales,
          .tile_scales = groups * group_scales,
          .groups = groups * (block + 1) / blocks - group,
          .group = a.group,
          .minimums = a.minimums,
          .prefetches = i == 0,
      };
      groups_product<kForm, kTiles>(last - first)(of_pass, totals + first * kTiles * kTileColumns);
    }
  }
}

template <class T, GroupedForm kForm>
void grouped_product(const Product& a, const ProductPart& part, float* workspace) {
  const bool one_by_one = part.end_row - part.begin_row <= kStreamingGroupedRows<kForm>;
  for (int64_t tile = part.begin_tile, tiles; tile < part.end_tile; tile += tiles) {
    tiles = one_by_one || part.end_tile - tile < kGroupedTiles ? 1 : kGroupedTiles;
    tiles == 1 ? multiply_tiles<kForm, 1>(a, part, tile, workspace)
               : multiply_tiles<kForm, kGroupedTiles>(a, part, tile, workspace);
    const int64_t column = tile * kTileColumns, width = tiles * kTileColumns;
    const int valid = static_cast<int>(a.columns - column < width ? a.columns - column : width);
    const T* bias = a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + column;
    for (int64_t row = part.begin_row; row < part.end_row; ++row) {
      write_sums(workspace + (row - part.begin_row) * width, valid, bias,
                 static_cast<T*>(a.out) + row * a.out_stride + column);
    }
  }
}

// As part_rows, of operands that are a quarter as large.
inline int64_t grouped_part_rows(int64_t rows, int64_t depth) { return part_rows(rows, (depth + 3) / 4); }

// A row of x as operands. Where a group is not finite, its scale is NaN, and so are the sums.
template <class T, int kOffset>
void quantize_groups(const void* row, int64_t depth, int64_t group, void* operands) {
  constexpr float kLargest = 127, kTiny = 1e-30f;  // kTiny keeps the factor finite
  const T* x = static_cast<const T*>(row);
  auto* bytes = static_cast<int8_t*>(operands);
  auto* group_of = reinterpret_cast<OperandGroup*>(bytes + depth);
  for (int64_t begin = 0; begin < depth; begin += group, ++group_of) {
    const float magnitude = largest_magnitude(x + begin, static_cast<int>(group));
    const float largest = magnitude < kTiny ? kTiny : magnitude;
    const Vec factor = broadcast(kLargest / largest);
    Words sums{};
    for (int64_t i = 0; i < group; i += kLanes) {
      const Words integers = to_integers(mul(load(x + begin + i), factor));
      store_bytes(bytes + begin + i, integers);
      sums = add_words(sums, integers);
    }
    const int32_t sum = reduce_add(sums);
    const float scale = largest / kLargest;
    *group_of = {scale, static_cast<int32_t>(kOffset * -static_cast<uint32_t>(sum)), -scale * static_cast<float>(sum)};
  }
}

}  // namespace
}  // namespace kvllm
