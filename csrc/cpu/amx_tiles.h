// Tiles of AMX: registers of 16 rows of 64 bytes, which are 32 channels of bfloat16 or 64 of 8 bits.
//
// Instructions are written in assembly: the compiler's functions take registers as literals only, no constants of
// templates.
#pragma once

#include "product_kernel.h"

namespace kvllm {
namespace {

constexpr int kTileRows = 16;
constexpr int64_t kTileRowBytes = 64;
constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;
constexpr int kTileNumbers = kTileRows * kTileColumns;

// Registers: four tiles of sums, two of rows, two of weights.
constexpr int kRowsRegister = 4, kWeightRegister = 6, kNumRegisters = 8;

// Shapes of the registers of this thread: `rows` rows, but for weights. They are set for each part and given back after
// it: other libraries have shapes of their own, and a thread with tiles in use is slower to switch.
inline void configure_registers(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes;
  for (int i = 0; i < kNumRegisters; ++i) {
    shapes.row_bytes[i] = kTileRowBytes;
    shapes.rows[i] = static_cast<uint8_t>(i < kWeightRegister ? rows : kTileRows);
  }
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}
inline void release_registers() { asm volatile("tilerelease"); }

template <int kRegister>
inline __attribute__((always_inline)) void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
inline __attribute__((always_inline)) void store_tile(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(kTileRowBytes), "i"(kRegister) : "memory");
}
template <int kRegister>
inline __attribute__((always_inline)) void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
}

// The products of one or two tiles of rows.
struct BFloat16Tiles {
  template <int kSum, int kRows, int kWeight>
  static inline __attribute__((always_inline)) void add_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeight));
  }
};

// The products of the high and of the low bytes of the same rows: the low ones have no sign.
struct ByteTiles {
  template <int kSum, int kRows, int kWeight>
  static inline __attribute__((always_inline)) void add_products() {
    if constexpr (kRows == kRowsRegister) {
      asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeight));
    } else {
      asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeight));
    }
  }
};

// The first tile of rows, and the bytes from it to the second one and from a row to the next.
struct RowTiles {
  const char* first;
  int64_t second;
  int64_t stride;
};

// Tiles of weights, `stride` bytes apart, for `steps` tiles of channels. Meanwhile, for each tile that is read,
// `ahead_bytes` from `ahead` on are fetched to the second cache.
struct WeightTiles {
  const char* first;
  int64_t stride;
  int64_t steps;
  const char* ahead;
  int64_t ahead_bytes;
};

template <int kCount, int kTile = 0>
inline __attribute__((always_inline)) void load_sums(const char* sums, bool zero) {
  zero ? zero_tile<kTile>() : load_tile<kTile>(sums + kTile * kTileBytes, kTileRowBytes);
  if constexpr (kTile + 1 < kCount) load_sums<kCount, kTile + 1>(sums, zero);
}
template <int kCount, int kTile = 0>
inline __attribute__((always_inline)) void store_sums(char* sums) {
  store_tile<kTile>(sums + kTile * kTileBytes);
  if constexpr (kTile + 1 < kCount) store_sums<kCount, kTile + 1>(sums);
}

template <class P, int kRowTiles, int kTiles, int kTile = 0>
inline __attribute__((always_inline)) void multiply_step(const WeightTiles& weight) {
  constexpr int kWeight = kWeightRegister + kTile % 2;
  for (int64_t byte = 0; byte < weight.ahead_bytes; byte += kCacheLine) {
    __builtin_prefetch(weight.ahead + kTile * weight.stride + byte, 0, 2);
  }
  load_tile<kWeight>(weight.first + kTile * weight.stride, kTileRowBytes);
  P::template add_products<kTile, kRowsRegister, kWeight>();
  if constexpr (kRowTiles == 2) P::template add_products<kTiles + kTile, kRowsRegister + 1, kWeight>();
  if constexpr (kTile + 1 < kTiles) multiply_step<P, kRowTiles, kTiles, kTile + 1>(weight);
}

// Adds products to sums [kRowTiles, kTiles, kTileRows, kTileColumns], or sets them if these are the first.
template <class P, int kRowTiles, int kTiles>
void multiply_tiles(RowTiles rows, WeightTiles weight, bool first, void* sums) {
  load_sums<kRowTiles * kTiles>(static_cast<char*>(sums), first);
  for (int64_t step = 0; step < weight.steps; ++step) {
    load_tile<kRowsRegister>(rows.first, rows.stride);
    if constexpr (kRowTiles == 2) load_tile<kRowsRegister + 1>(rows.first + rows.second, rows.stride);
    multiply_step<P, kRowTiles, kTiles>(weight);
    rows.first += kTileRowBytes;
    weight.first += kTileBytes;
    weight.ahead += weight.ahead_bytes;
  }
  store_sums<kRowTiles * kTiles>(static_cast<char*>(sums));
}

}  // namespace
}  // namespace kvllm
