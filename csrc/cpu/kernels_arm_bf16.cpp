// Products with weights of bfloat16 on Arm processors that multiply it.
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=armv8.2-a+bf16")
#include "product_kernel.h"

namespace kvllm {
namespace {

inline bfloat16x8_t load_bfloat16(const BFloat16* p) {
  bfloat16x8_t x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
inline bfloat16x8_t broadcast_pair(const BFloat16* p) {
  uint32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
}

// Operands and weights are bfloat16; two channels at once.
struct PairsProduct {
  using Operand = BFloat16;
  using Weight = BFloat16;
  static constexpr int kChannels = 2;
  static constexpr int kWords = 2 * kTileColumns;
  using Sum = Vec;
  static constexpr bool kIntegers = false;

  template <int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply(const Rows<BFloat16, kRows>& x, const BFloat16* weight,
                                                             int64_t tile_stride,
                                                             Vec (&sums)[kRows][kTiles * kTileVectors]) {
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) {
      const bfloat16x8_t pairs = load_bfloat16(weight + v / kTileVectors * tile_stride + v % kTileVectors * 2 * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r][v] = vbfdotq_f32(sums[r][v], pairs, broadcast_pair(x[r]));
      }
    }
  }
};

// The same with four channels and two rows at once. An instruction for matrices adds the first two channels, then the
// others, as two instructions for pairs do, so that a last odd row gets the same bits from these.
struct MatrixProduct {
  using Operand = BFloat16;
  using Weight = BFloat16;
  static constexpr int kChannels = 4;
  static constexpr int kWords = 4 * kTileColumns;
  using Sum = Vec;
  static constexpr bool kIntegers = false;

  // Sums of two rows with four columns, to or from the sums of both with two columns, then with the next two.
  template <int kRows, int kVectors>
  static inline __attribute__((always_inline)) void rearrange(Vec (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
    for (int r = 0; r + 1 < kRows; r += 2) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const Vec first = sums[r][v], second = sums[r + 1][v];
        sums[r][v] = Vec{first[0], first[1], second[0], second[1]};
        sums[r + 1][v] = Vec{first[2], first[3], second[2], second[3]};
      }
    }
  }

  template <int kRows, int kTiles>
  static inline __attribute__((always_inline)) void multiply(const Rows<BFloat16, kRows>& x, const BFloat16* weight,
                                                             int64_t tile_stride,
                                                             Vec (&sums)[kRows][kTiles * kTileVectors]) {
    [[maybe_unused]] bfloat16x8_t rows[kRows / 2 + 1];
#pragma GCC unroll 16
    for (int r = 0; r + 1 < kRows; r += 2) rows[r / 2] = load_two_rows(x[r], x[r + 1]);
    const BFloat16* last = x[kRows - 1];
    [[maybe_unused]] const bfloat16x8_t last_first = broadcast_pair(last), last_second = broadcast_pair(last + 2);
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) {
      const BFloat16* from = weight + v / kTileVectors * tile_stride + v % kTileVectors * 2 * kLanes;
      const bfloat16x8_t first = load_bfloat16(from), second = load_bfloat16(from + 2 * kTileColumns);
      const auto a = vreinterpretq_u32_bf16(first), b = vreinterpretq_u32_bf16(second);
      const bfloat16x8_t left = vreinterpretq_bf16_u32(vzip1q_u32(a, b));
      const bfloat16x8_t right = vreinterpretq_bf16_u32(vzip2q_u32(a, b));
#pragma GCC unroll 16
      for (int r = 0; r + 1 < kRows; r += 2) {
        sums[r][v] = vbfmmlaq_f32(sums[r][v], rows[r / 2], left);
        sums[r + 1][v] = vbfmmlaq_f32(sums[r + 1][v], rows[r / 2], right);
      }
      if constexpr (kRows % 2 == 1) {
        Vec& sum = sums[kRows - 1][v];
        sum = vbfdotq_f32(vbfdotq_f32(sum, first, last_first), second, last_second);
      }
      asm volatile("" ::: "memory");  // or g++ loads later weights already, and spills sums
    }
  }

 private:
  static inline bfloat16x8_t load_two_rows(const BFloat16* x, const BFloat16* y) {
    uint64_t first, second;
    __builtin_memcpy(&first, x, sizeof(first));
    __builtin_memcpy(&second, y, sizeof(second));
    return vreinterpretq_bf16_u64(uint64x2_t{first, second});
  }
};

void multiply_bfloat16(const Product& a, const ProductPart& part, float* workspace) {
  const bool fours = a.depth % MatrixProduct::kChannels == 0;
  fours ? product<BFloat16, MatrixProduct>(a, part, workspace) : product<BFloat16, PairsProduct>(a, part, workspace);
}

}  // namespace

KernelSet make_arm_bf16_kernels() {
  KernelSet kernels = kBaselineKernels;
  kernels.bfloat16.product = {nullptr, part_rows, multiply_bfloat16};
  return kernels;
}

}  // namespace kvllm

#endif
