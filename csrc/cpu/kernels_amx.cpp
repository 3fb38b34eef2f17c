// Products in the tiles of AMX.
//
// A packed weight has the order of the second factor already. Channels are summed 32 or 64 at a time in ascending
// order, and a row of a tile does not depend on the others, so a row gets the same bits beside any other rows.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own headers
#pragma GCC diagnostic ignored "-Wuninitialized"
#define KVLLM_AVX512

#include "amx_tiles.h"

namespace kvllm {
namespace {

// The rows of a part in tiles. The last tile begins so early that it is full: some rows are computed twice.
struct PartRows {
  int64_t begin, count;

  explicit PartRows(const ProductPart& part) : begin(part.begin_row), count(part.end_row - part.begin_row) {}
  int64_t tiles() const { return (count + kTileRows - 1) / kTileRows; }
  int64_t height() const { return count < kTileRows ? count : kTileRows; }
  int64_t first_of(int64_t tile) const { return tile + 1 < tiles() ? tile * kTileRows : count - height(); }
};

// Channels begin .. begin + depth - 1 of `count` tiles of a weight, from tile `tile` on.
struct WeightBlock {
  int64_t tile;
  int count;
  int64_t begin, depth;
};

// Channels from which on a single pass fetches the beginning of the tiles after these.
template <class T>
int64_t edge_of(const Product& a) {
  return a.depth - kPrefetchDistance / kTileBytes * kTileRowBytes / static_cast<int64_t>(sizeof(T));
}

// The tiles of a block for one of `passes` over it. A single pass fetches what it reads next; several share what
// follows the block.
template <class T>
WeightTiles tiles_of(const Product& a, const WeightBlock& block, int64_t pass, int64_t passes) {
  const int64_t channel = kTileColumns * static_cast<int64_t>(sizeof(T));
  const int64_t stride = a.depth * channel, bytes = block.depth * channel, others = (block.count - 1) * stride;
  const char* first = static_cast<const char*>(a.weight) + block.tile * stride + block.begin * channel;
  if (passes == 1) {
    const char* ahead = first + kPrefetchDistance + (block.begin < edge_of<T>(a) ? 0 : others);
    return {first, stride, bytes / kTileBytes, ahead, kTileBytes};
  }
  const int64_t share = kTileBytes / passes / kCacheLine * kCacheLine;
  const char* following = first + bytes + (block.begin + block.depth < a.depth ? 0 : others);
  return {first, stride, bytes / kTileBytes, following + pass * (bytes / kTileBytes) * share, share};
}

// multiply_tiles for 1 or 2 tiles of weights, or for 4 with one tile of rows.
template <class P, int kRowTiles>
auto multiply_with(int tiles) {
  if constexpr (kRowTiles == 1) {
    if (tiles == 4) return multiply_tiles<P, 1, 4>;
  }
  return tiles == 2 ? multiply_tiles<P, kRowTiles, 2> : multiply_tiles<P, kRowTiles, 1>;
}

// sums [row tiles, tiles, kTileRows, kTileColumns] of products with bfloat16.
void sum_bfloat16(const Product& a, const PartRows& rows, int64_t tile, int tiles, float* sums) {
  const int64_t passes = (rows.tiles() + 1) / 2, stride = a.x_stride * static_cast<int64_t>(sizeof(BFloat16));
  const int64_t edge = edge_of<BFloat16>(a);
  for (int64_t begin = 0, depth; begin < a.depth; begin += depth) {
    depth = passes == 1 && begin < edge ? edge - begin : a.depth - begin;
    if (passes > 1 && depth > kBlockChannels) depth = kBlockChannels;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const WeightTiles weight = tiles_of<BFloat16>(a, {tile, tiles, begin, depth}, pass, passes);
      const int64_t first = rows.first_of(2 * pass);
      const auto* x = static_cast<const BFloat16*>(a.x) + (rows.begin + first) * a.x_stride + begin;
      const bool pair = 2 * pass + 1 < rows.tiles();
      const int64_t second = pair ? (rows.first_of(2 * pass + 1) - first) * stride : 0;
      const RowTiles x_tiles{reinterpret_cast<const char*>(x), second, stride};
      const auto multiply = pair ? multiply_with<BFloat16Tiles, 2>(tiles) : multiply_with<BFloat16Tiles, 1>(tiles);
      multiply(x_tiles, weight, begin == 0, sums + 2 * pass * tiles * kTileNumbers);
    }
  }
}

// sums += or = 256 times the products of high bytes, plus those of low bytes, times their scales.
template <int kTiles>
void add_scaled_bytes(const int32_t (&products)[2][kTiles][kTileRows][kTileColumns], int64_t height,
                      const Scales& scales, bool first, float* sums) {
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int64_t row = 0; row < height; ++row) {
      const Words high = load_words(products[0][tile][row]), low = load_words(products[1][tile][row]);
      const Words total[1][1] = {{_mm512_add_epi32(_mm512_slli_epi32(high, 8), low)}};
      const Scales of_row{scales.rows + row * scales.row_stride, 0, scales.columns + tile * scales.tile_stride, 0};
      add_scaled(total, of_row, first, sums + (tile * kTileRows + row) * kTileColumns);
    }
  }
}

// The same of products with integers of 8 bits.
template <int kTiles>
void sum_bytes(const Product& a, const PartRows& rows, int64_t tile, float* sums) {
  for (int64_t begin = 0, depth; begin < a.depth; begin += depth) {
    depth = a.group - begin % a.group < kBlockChannels ? a.group - begin % a.group : kBlockChannels;
    for (int64_t pass = 0; pass < rows.tiles(); ++pass) {
      const auto* x = static_cast<const int16_t*>(a.x) + (rows.begin + rows.first_of(pass)) * a.x_stride;
      const RowTiles bytes{reinterpret_cast<const char*>(x + begin), depth, a.x_stride * 2};
      alignas(kCacheLine) int32_t products[2][kTiles][kTileRows][kTileColumns];
      multiply_tiles<ByteTiles, 2, kTiles>(bytes, tiles_of<int8_t>(a, {tile, kTiles, begin, depth}, pass, rows.tiles()),
                                           true, products);
      add_scaled_bytes(products, rows.height(), scales_at(a, x, tile, begin), begin == 0,
                       sums + pass * kTiles * kTileNumbers);
    }
  }
}

// Sums of a part, with the bias, to the columns of `count` tiles from `tile` on.
template <class T>
void write_tiles(const Product& a, const PartRows& rows, int64_t tile, int count, const float* sums) {
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t row_tile = row / kTileRows, row_of_tile = row - rows.first_of(row_tile);
    T* out = static_cast<T*>(a.out) + (rows.begin + row) * a.out_stride;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t column = (tile + t) * kTileColumns;
      const int valid = static_cast<int>(a.columns - column < kTileColumns ? a.columns - column : kTileColumns);
      const float* from = sums + ((row_tile * count + t) * kTileRows + row_of_tile) * kTileColumns;
      write_sums(from, valid, a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + column, out + column);
    }
  }
}

// Multiplies a part, `at_once` tiles of the weight at once and single ones at its end.
template <class T, class Sum>
void multiply_part(const Product& a, const ProductPart& part, int at_once, float* workspace, const Sum& sum) {
  const PartRows rows(part);
  configure_registers(static_cast<int>(rows.height()));
  for (int64_t tile = part.begin_tile, tiles; tile < part.end_tile; tile += tiles) {
    tiles = part.end_tile - tile < at_once ? 1 : at_once;
    sum(rows, tile, static_cast<int>(tiles), workspace);
    write_tiles<T>(a, rows, tile, static_cast<int>(tiles), workspace);
  }
  release_registers();
}

template <class T>
const Kernels& kernels_without_tiles() {
  if constexpr (sizeof(T) == sizeof(float))
    return kAvx512Bf16Kernels.float32;
  else
    return kAvx512Bf16Kernels.bfloat16;
}

// Weights whose channels do not fill tiles are multiplied without them.
bool fills_tiles(const Product& a) { return a.depth * sizeof(BFloat16) % kTileRowBytes == 0; }
bool fills_byte_tiles(int64_t group) { return group % kTileRowBytes == 0; }

void multiply_bfloat16(const Product& a, const ProductPart& part, float* workspace) {
  if (!fills_tiles(a)) return kernels_without_tiles<BFloat16>().product.multiply(a, part, workspace);
  const int at_once = part.end_row - part.begin_row <= kTileRows ? 4 : 2;
  multiply_part<BFloat16>(a, part, at_once, workspace, [&](const PartRows& rows, int64_t tile, int tiles, float* sums) {
    sum_bfloat16(a, rows, tile, tiles, sums);
  });
}

template <class T>
void multiply_bytes(const Product& a, const ProductPart& part, float* workspace) {
  if (!fills_byte_tiles(a.group)) return kernels_without_tiles<T>().product_int8.multiply(a, part, workspace);
  multiply_part<T>(a, part, 2, workspace, [&](const PartRows& rows, int64_t tile, int tiles, float* sums) {
    tiles == 2 ? sum_bytes<2>(a, rows, tile, sums) : sum_bytes<1>(a, rows, tile, sums);
  });
}

// A row of x as operands: of each block of channels the high bytes, then the low bytes, in the order of the channels.
template <class T>
void prepare_bytes(const void* x, int64_t depth, int64_t group, void* operands) {
  kernels_without_tiles<T>().product_int8.prepare(x, depth, group, operands);
  if (!fills_byte_tiles(group)) return;
  constexpr int kPlaces[4] = {0, 2, 1, 3};  // of a word's channels in its pairs
  auto* bytes = static_cast<uint8_t*>(operands);
  for (int64_t begin = 0, count; begin < depth; begin += count, bytes += 2 * count) {
    count = group - begin % group < kBlockChannels ? group - begin % group : kBlockChannels;
    int16_t pairs[kBlockChannels];
    __builtin_memcpy(pairs, bytes, count * sizeof(int16_t));
    for (int64_t i = 0; i < count; ++i) {
      const int16_t channel = pairs[i / 4 * 4 + kPlaces[i % 4]];
      bytes[i] = static_cast<uint8_t>(channel >> 8);
      bytes[count + i] = static_cast<uint8_t>(channel);
    }
  }
}

// As many as there are, in whole tiles: a weight has to be multiplied by about 100 rows for each time it is read, or
// the arithmetic waits for it.
int64_t rows_of_part(int64_t rows, int64_t) {
  const int64_t parts = (rows + kMaxPartRows - 1) / kMaxPartRows;
  return ((rows + parts - 1) / parts + kTileRows - 1) / kTileRows * kTileRows;
}

}  // namespace

KernelSet make_amx_kernels() {
  KernelSet kernels = kAvx512Bf16Kernels;
  kernels.bfloat16.product = {nullptr, rows_of_part, multiply_bfloat16};
  kernels.bfloat16.product_int8 = {prepare_bytes<BFloat16>, rows_of_part, multiply_bytes<BFloat16>};
  kernels.float32.product_int8 = {prepare_bytes<float>, rows_of_part, multiply_bytes<float>};
  return kernels;
}

}  // namespace kvllm

#endif
