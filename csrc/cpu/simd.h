// Vectors of float for one instruction set. The including translation unit selects it twice, by the target pragma for
// the code and by KVLLM_AVX2 or KVLLM_AVX512 for this file: g++ runs the preprocessor ahead of the pragma.
//
// Fused multiply-add is explicit (contraction is switched off for the whole build), so that loops which compute the
// same sum with a different number of accumulators give the same bits.
#pragma once

#include <stdint.h>

#include "kernels.h"

#if defined(KVLLM_AVX2) || defined(KVLLM_AVX512)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvllm {
namespace {

constexpr int kCacheLine = 64;
#if defined(KVLLM_AVX512) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

#if defined(KVLLM_AVX512)

using Vec = __m512;
constexpr int kLanes = 16;

inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const BFloat16* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
// The bits of kLanes pairs, and the first or second of each.
inline Vec load_pairs(const BFloat16* p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
inline Vec first_of_pairs(Vec x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16)); }
inline Vec second_of_pairs(Vec x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// Numbers of float8, divided by 256: their bits are those of a half at other places.
inline Vec load(const Float8* p) {
  const __m256i halves = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(
      _mm256_and_si256(_mm256_slli_epi16(halves, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }

inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// sum <- fma(a, b, sum), in place: with many sums, g++ chooses the form that overwrites a factor, and moves registers.
inline void add_product(Vec& sum, Vec a, Vec b) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
// The second operand where either is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec zero_where_less(Vec a, Vec bound, Vec x) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(a, bound, _CMP_LT_OQ), _mm512_setzero_ps());
}
inline Vec keep_first(int count, Vec x, Vec others) {
  return _mm512_mask_mov_ps(others, static_cast<__mmask16>((1u << count) - 1), x);
}
// x * 2^n, given n + 1.5 * 2^23.
inline Vec scale_by_power(Vec x, Vec shifted_n) {
  return _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(shifted_n), 23)));
}

// To nearest even. A NaN stays one: its low bits are zero, whether it was read as bfloat16 or made by an operation.
inline Vec round_to_bfloat16(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i rounded = _mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  return _mm512_castsi512_ps(rounded);
}
inline void store(BFloat16* p, Vec x) {
  const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(round_to_bfloat16(x)), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

// Pairs of bfloat16, of floats.
inline Vec join_pairs(Vec first, Vec second) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(round_to_bfloat16(first)), 16);
  return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(round_to_bfloat16(second))));
}

inline float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
// Whether a number of a is more than that of b.
inline bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

// kLanes words of 32 bits: integers, or pairs of integers of 16 bits.
using Words = __m512i;

inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline Words broadcast_pair(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return _mm512_set1_epi32(pair);
}
// The signed integers of kBits that begin at bit kBegin of both halves of each word.
template <int kBits, int kBegin>
inline Words pairs_of_words(Words x) {
  if constexpr (kBegin + kBits < 16) x = _mm512_slli_epi16(x, 16 - kBegin - kBits);
  return _mm512_srai_epi16(x, 16 - kBits);
}
// The same for integers without a sign.
template <int kBits, int kBegin>
inline Words unsigned_pairs_of_words(Words x) {
  return _mm512_and_si512(_mm512_srli_epi16(x, kBegin), _mm512_set1_epi16((1 << kBits) - 1));
}
// x where a bit of kBits is set, in both halves of each word.
template <int kBits>
inline Words keep_bits_of_pairs(Words x) {
  return _mm512_and_si512(x, _mm512_set1_epi16(kBits));
}
// sum += a * b for the first integers of all pairs, and for the second ones.
inline void add_pair_products(Words& sum, Words a, Words b) {
#if defined(KVLLM_AVX512_VNNI)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // g++ would move and spill the sums of many rows
#else
  asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(_mm512_madd_epi16(a, b)));  // g++ would add two products first, and spill
#endif
}
inline Vec to_float(Words x) { return _mm512_cvtepi32_ps(x); }
// kLanes integers of 8 bits as words: with a sign, and without.
inline Words load_signed_bytes(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// 2 * kLanes of them as pairs of 16 bits.
inline Words load_signed_pairs(const uint8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Words load_byte_pairs(const uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// out[i] <- the sum of the words of x[i].
inline void store_sums_of_four(const Words* x, int32_t* out) {
  __m256i y[4];
  for (int i = 0; i < 4; ++i) y[i] = _mm256_add_epi32(_mm512_castsi512_si256(x[i]), _mm512_extracti64x4_epi64(x[i], 1));
  const __m256i sums = _mm256_hadd_epi32(_mm256_hadd_epi32(y[0], y[1]), _mm256_hadd_epi32(y[2], y[3]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
}
inline Words load_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Words of four integers of 8 bits: of four bits of each byte of x.
inline Words low_nibbles(Words x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Words high_nibbles(Words x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
// Of six bits of each byte of x; and of the two others of bytes of three words, the first ones lowest.
inline Words low_six_bits(Words x) { return _mm512_and_si512(x, _mm512_set1_epi8(63)); }
inline Words high_bits(Words x, Words y, Words z) {
  const Words first = _mm512_and_si512(_mm512_srli_epi16(x, 6), _mm512_set1_epi8(3));
  const Words second = _mm512_and_si512(_mm512_srli_epi16(y, 4), _mm512_set1_epi8(12));
  const Words third = _mm512_and_si512(_mm512_srli_epi16(z, 2), _mm512_set1_epi8(48));
  return _mm512_or_si512(first, _mm512_or_si512(second, third));
}
inline Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
// sum += weights * x, four products to a word, or with add_eight_products twice four. Weights have no sign and are
// below 64, x are above -128. Where sums are narrow, add_byte_products sums to 16 bits, and widen_sums makes words of
// these. Wide weights have all 8 bits and a sign.
#if defined(KVLLM_AVX512_VNNI)
constexpr bool kNarrowSums = false;
constexpr int kWideOffset = 128;  // what wide operands have above the weights
inline void add_byte_products(Words& sum, Words weights, Words x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
}
inline Words widen_sums(Words x) { return x; }
inline void add_eight_products(Words& sum, Words first, Words x_first, Words second, Words x_second) {
  add_byte_products(sum, first, x_first);
  add_byte_products(sum, second, x_second);
}
inline Words wide_operands(Words weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8(-128)); }
inline void add_wide_products(Words& sum, Words operands, Words x) { add_byte_products(sum, operands, x); }
#else
constexpr bool kNarrowSums = true;
constexpr int kWideOffset = 0;
inline void add_byte_products(Words& sum, Words weights, Words x) {
  asm("vpaddw %1, %0, %0" : "+v"(sum) : "v"(_mm512_maddubs_epi16(weights, x)));  // as add_pair_products
}
inline Words widen_sums(Words x) { return _mm512_madd_epi16(x, _mm512_set1_epi16(1)); }
inline void add_eight_products(Words& sum, Words first, Words x_first, Words second, Words x_second) {
  const Words products = _mm512_add_epi16(_mm512_maddubs_epi16(first, x_first), _mm512_maddubs_epi16(second, x_second));
  asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(widen_sums(products)));
}
inline Words wide_operands(Words weights) { return weights; }
inline void add_wide_products(Words& sum, Words weights, Words x) {
  const Words signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), x);
  const Words products = _mm512_maddubs_epi16(_mm512_abs_epi8(weights), signed_x);
  asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(widen_sums(products)));
}
#endif
inline Vec load_halves(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// The halves of words below 256, of four bits each.
inline Words low_halves(Words x) { return _mm512_and_si512(x, _mm512_set1_epi32(15)); }
inline Words high_halves(Words x) { return _mm512_srli_epi32(x, 4); }
// To the nearest integers, to even ones between two. Numbers beyond 16 bits, and NaN, become some integer.
inline Words to_integers(Vec x) { return _mm512_cvtps_epi32(x); }
inline void store_bytes(int8_t* p, Words x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}
inline int32_t reduce_add(Words x) { return _mm512_reduce_add_epi32(x); }
inline void store_rounded(int16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(to_integers(x)));
}

inline void transpose(Vec rows[kLanes]) {
  Vec t[kLanes];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  // rows[4q + j] now gets element j of each 128-bit lane, of the four rows 4q .. 4q + 3.
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    rows[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    rows[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    rows[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_f32x4(rows[j], rows[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_f32x4(rows[j], rows[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_f32x4(rows[8 + j], rows[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_f32x4(rows[8 + j], rows[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0x88);
    rows[8 + j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0xdd);
    rows[4 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0x88);
    rows[12 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

#elif defined(KVLLM_AVX2)

using Vec = __m256;
constexpr int kLanes = 8;

inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const BFloat16* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
// The bits of kLanes pairs, and the first or second of each.
inline Vec load_pairs(const BFloat16* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
inline Vec first_of_pairs(Vec x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16)); }
inline Vec second_of_pairs(Vec x) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
// Numbers of float8, divided by 256: their bits are those of a half at other places.
inline Vec load(const Float8* p) {
  const __m128i halves = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(halves, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff))));
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }

inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// sum <- fma(a, b, sum), in place: with many sums, g++ chooses the form that overwrites a factor, and moves registers.
inline void add_product(Vec& sum, Vec a, Vec b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
// The second operand where either is NaN.
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec zero_where_less(Vec a, Vec bound, Vec x) { return _mm256_andnot_ps(_mm256_cmp_ps(a, bound, _CMP_LT_OQ), x); }
inline Vec keep_first(int count, Vec x, Vec others) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i keep = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
  return _mm256_blendv_ps(others, x, _mm256_castsi256_ps(keep));
}
// x * 2^n, given n + 1.5 * 2^23.
inline Vec scale_by_power(Vec x, Vec shifted_n) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(shifted_n), 23)));
}

inline Vec round_to_bfloat16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i rounded = _mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
  return _mm256_castsi256_ps(rounded);
}
inline void store(BFloat16* p, Vec x) {
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(round_to_bfloat16(x)), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// Pairs of bfloat16, of floats.
inline Vec join_pairs(Vec first, Vec second) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(round_to_bfloat16(first)), 16);
  return _mm256_castsi256_ps(_mm256_or_si256(low, _mm256_castps_si256(round_to_bfloat16(second))));
}

inline float reduce_add(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(Vec x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
// Whether a number of a is more than that of b.
inline bool any_greater(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }

// kLanes words of 32 bits: integers, or pairs of integers of 16 bits.
using Words = __m256i;

inline Words load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Words broadcast_pair(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return _mm256_set1_epi32(pair);
}
// The signed integers of kBits that begin at bit kBegin of both halves of each word.
template <int kBits, int kBegin>
inline Words pairs_of_words(Words x) {
  if constexpr (kBegin + kBits < 16) x = _mm256_slli_epi16(x, 16 - kBegin - kBits);
  return _mm256_srai_epi16(x, 16 - kBits);
}
// The same for integers without a sign.
template <int kBits, int kBegin>
inline Words unsigned_pairs_of_words(Words x) {
  return _mm256_and_si256(_mm256_srli_epi16(x, kBegin), _mm256_set1_epi16((1 << kBits) - 1));
}
// x where a bit of kBits is set, in both halves of each word.
template <int kBits>
inline Words keep_bits_of_pairs(Words x) {
  return _mm256_and_si256(x, _mm256_set1_epi16(kBits));
}
// sum += a * b for the first integers of all pairs, and for the second ones.
inline void add_pair_products(Words& sum, Words a, Words b) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(a, b)));  // g++ would add two products first, and spill
}
inline Vec to_float(Words x) { return _mm256_cvtepi32_ps(x); }
// kLanes integers of 8 bits as words: with a sign, and without.
inline Words load_signed_bytes(const uint8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
// 2 * kLanes of them as pairs of 16 bits.
inline Words load_signed_pairs(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Words load_byte_pairs(const uint8_t* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// out[i] <- the sum of the words of x[i].
inline void store_sums_of_four(const Words* x, int32_t* out) {
  const __m256i sums = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
}
inline Words load_bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
// Words of four integers of 8 bits: of four bits of each byte of x.
inline Words low_nibbles(Words x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Words high_nibbles(Words x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
// Of six bits of each byte of x; and of the two others of bytes of three words, the first ones lowest.
inline Words low_six_bits(Words x) { return _mm256_and_si256(x, _mm256_set1_epi8(63)); }
inline Words high_bits(Words x, Words y, Words z) {
  const Words first = _mm256_and_si256(_mm256_srli_epi16(x, 6), _mm256_set1_epi8(3));
  const Words second = _mm256_and_si256(_mm256_srli_epi16(y, 4), _mm256_set1_epi8(12));
  const Words third = _mm256_and_si256(_mm256_srli_epi16(z, 2), _mm256_set1_epi8(48));
  return _mm256_or_si256(first, _mm256_or_si256(second, third));
}
inline Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
// sum += weights * x, four products to a word, or with add_eight_products twice four. Weights have no sign and are
// below 64, x are above -128. Where sums are narrow, add_byte_products sums to 16 bits, and widen_sums makes words of
// these. Wide weights have all 8 bits and a sign.
constexpr bool kNarrowSums = true;
constexpr int kWideOffset = 0;  // what wide operands have above the weights
inline void add_byte_products(Words& sum, Words weights, Words x) {
  asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16(weights, x)));  // as add_pair_products
}
inline Words widen_sums(Words x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
inline void add_eight_products(Words& sum, Words first, Words x_first, Words second, Words x_second) {
  const Words products = _mm256_add_epi16(_mm256_maddubs_epi16(first, x_first), _mm256_maddubs_epi16(second, x_second));
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(widen_sums(products)));
}
inline Words wide_operands(Words weights) { return weights; }
inline void add_wide_products(Words& sum, Words weights, Words x) {
  const Words products = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(widen_sums(products)));
}
inline Vec load_halves(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// The halves of words below 256, of four bits each.
inline Words low_halves(Words x) { return _mm256_and_si256(x, _mm256_set1_epi32(15)); }
inline Words high_halves(Words x) { return _mm256_srli_epi32(x, 4); }
// To the nearest integers, to even ones between two. Numbers beyond 16 bits, and NaN, become some integer.
inline Words to_integers(Vec x) { return _mm256_cvtps_epi32(x); }
inline void store_bytes(int8_t* p, Words x) {
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
inline int32_t reduce_add(Words x) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline void store_rounded(int16_t* p, Vec x) {
  const __m256i words = to_integers(x);
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(words, words), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(halves));
}

inline void transpose(Vec rows[kLanes]) {
  Vec t[kLanes];
  for (int i = 0; i < 8; i += 4) {
    const Vec a = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    const Vec b = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    const Vec c = _mm256_unpacklo_ps(rows[i + 2], rows[i + 3]);
    const Vec d = _mm256_unpackhi_ps(rows[i + 2], rows[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm256_permute2f128_ps(t[j], t[4 + j], 0x20);
    rows[4 + j] = _mm256_permute2f128_ps(t[j], t[4 + j], 0x31);
  }
}

#else  // any processor, through the compiler's own vectors

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Bits __attribute__((vector_size(16)));
constexpr int kLanes = 4;

inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
inline Vec load(const BFloat16* p) {
  Bits bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i].bits) << 16);
  return reinterpret_cast<Vec>(bits);
}
// Numbers of float8, divided by 256.
inline Vec load(const Float8* p) {
  Vec x;
  for (int i = 0; i < kLanes; ++i) {
    const int exponent = p[i].bits >> 3 & 15, mantissa = p[i].bits & 7;
    const int32_t power = ((exponent == 0 ? 1 : exponent) + 109) << 23;  // 2^(exponent - 18)
    float step;
    __builtin_memcpy(&step, &power, sizeof(step));
    const int steps = exponent == 0 ? mantissa : mantissa + 8;
    x[i] = step * static_cast<float>(p[i].bits < 128 ? steps : -steps);
  }
  return x;
}
// The bits of kLanes pairs, and the first or second of each.
inline Vec load_pairs(const BFloat16* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
inline Vec first_of_pairs(Vec x) { return reinterpret_cast<Vec>(reinterpret_cast<Bits>(x) << 16); }
inline Vec second_of_pairs(Vec x) {
  return reinterpret_cast<Vec>(reinterpret_cast<Bits>(x) & static_cast<int32_t>(0xffff0000));
}
inline void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof(x)); }

inline Vec select(Bits condition, Vec yes, Vec no) {
  return reinterpret_cast<Vec>((condition & reinterpret_cast<Bits>(yes)) | (~condition & reinterpret_cast<Bits>(no)));
}
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
#if defined(__aarch64__)
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
#else
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
#endif
inline void add_product(Vec& sum, Vec a, Vec b) { sum = fma(a, b, sum); }
// The second operand where either is NaN.
inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }
inline Vec zero_where_less(Vec a, Vec bound, Vec x) { return select(a < bound, Vec{}, x); }
inline Vec keep_first(int count, Vec x, Vec others) {
  return select(Bits{0, 1, 2, 3} < Bits{count, count, count, count}, x, others);
}
// x * 2^n, given n + 1.5 * 2^23.
inline Vec scale_by_power(Vec x, Vec shifted_n) {
  typedef uint32_t Unsigned __attribute__((vector_size(16)));
  return reinterpret_cast<Vec>(reinterpret_cast<Unsigned>(x) + (reinterpret_cast<Unsigned>(shifted_n) << 23));
}

inline Vec round_to_bfloat16(Vec x) {
  typedef uint32_t Unsigned __attribute__((vector_size(16)));
  const Unsigned bits = reinterpret_cast<Unsigned>(x);
  const Unsigned rounded = (bits + ((bits >> 16) & 1) + 0x7fff) & 0xffff0000;
  return reinterpret_cast<Vec>(rounded);
}
inline void store(BFloat16* p, Vec x) {
  const Bits bits = reinterpret_cast<Bits>(round_to_bfloat16(x));
  for (int i = 0; i < kLanes; ++i) p[i].bits = static_cast<uint16_t>(static_cast<uint32_t>(bits[i]) >> 16);
}

// Pairs of bfloat16, of floats.
inline Vec join_pairs(Vec first, Vec second) {
  typedef uint32_t Unsigned __attribute__((vector_size(16)));
  const Unsigned low = reinterpret_cast<Unsigned>(round_to_bfloat16(first)) >> 16;
  return reinterpret_cast<Vec>(low | reinterpret_cast<Unsigned>(round_to_bfloat16(second)));
}

inline float reduce_add(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float reduce_max(Vec x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}
// Whether a number of a is more than that of b.
inline bool any_greater(Vec a, Vec b) {
  const Bits greater = a > b;
  return (greater[0] | greater[1] | greater[2] | greater[3]) != 0;
}

// kLanes words of 32 bits: integers, or pairs of integers of 16 bits.
using Words = Bits;
typedef int16_t Halves __attribute__((vector_size(16)));

inline Words load_words(const void* p) {
  Words x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
inline Words broadcast_pair(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return Words{pair, pair, pair, pair};
}
// The signed integers of kBits that begin at bit kBegin of both halves of each word.
template <int kBits, int kBegin>
inline Words pairs_of_words(Words x) {
  return reinterpret_cast<Words>(reinterpret_cast<Halves>(x) << (16 - kBegin - kBits) >> (16 - kBits));
}
// The same for integers without a sign.
template <int kBits, int kBegin>
inline Words unsigned_pairs_of_words(Words x) {
  typedef uint16_t Unsigned __attribute__((vector_size(16)));
  return reinterpret_cast<Words>(reinterpret_cast<Unsigned>(x) << (16 - kBegin - kBits) >> (16 - kBits));
}
// x where a bit of kBits is set, in both halves of each word.
template <int kBits>
inline Words keep_bits_of_pairs(Words x) {
  return x & (kBits << 16 | kBits);
}
// sum += a * b for the first integers of all pairs, and for the second ones.
inline void add_pair_products(Words& sum, Words a, Words b) {
#if defined(__SSE2__)
  sum += reinterpret_cast<Words>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#elif defined(__aarch64__)
  const auto x = reinterpret_cast<int16x8_t>(a), y = reinterpret_cast<int16x8_t>(b);
  sum += vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  sum += (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
inline Vec to_float(Words x) { return __builtin_convertvector(x, Vec); }
// kLanes integers of 8 bits as words: with a sign, and without.
inline Words load_bytes(const uint8_t* p) { return Words{p[0], p[1], p[2], p[3]}; }
inline Words load_signed_bytes(const uint8_t* p) { return load_bytes(p) << 24 >> 24; }
// Words of four integers of 8 bits: of four bits of each byte of x.
inline Words low_nibbles(Words x) { return x & 0x0f0f0f0f; }
inline Words high_nibbles(Words x) { return low_nibbles(x >> 4); }
// Of six bits of each byte of x; and of the two others of bytes of three words, the first ones lowest.
inline Words low_six_bits(Words x) { return x & 0x3f3f3f3f; }
inline Words high_bits(Words x, Words y, Words z) {
  return (x >> 6 & 0x03030303) | (y >> 4 & 0x0c0c0c0c) | (z >> 2 & 0x30303030);
}
inline Words add_words(Words a, Words b) { return a + b; }
// sum += weights * x, four products to a word, or with add_eight_products twice four. Weights have no sign and are
// below 64, x are above -128. Where sums are narrow, add_byte_products sums to 16 bits, and widen_sums makes words of
// these. Wide weights have all 8 bits and a sign.
constexpr bool kNarrowSums = false;
constexpr int kWideOffset = 0;  // what wide operands have above the weights
inline void add_wide_products(Words& sum, Words weights, Words x) {
  add_pair_products(sum, pairs_of_words<8, 0>(weights), pairs_of_words<8, 0>(x));
  add_pair_products(sum, pairs_of_words<8, 8>(weights), pairs_of_words<8, 8>(x));
}
inline void add_byte_products(Words& sum, Words weights, Words x) { add_wide_products(sum, weights, x); }
inline Words widen_sums(Words x) { return x; }
inline void add_eight_products(Words& sum, Words first, Words x_first, Words second, Words x_second) {
  add_byte_products(sum, first, x_first);
  add_byte_products(sum, second, x_second);
}
inline Words wide_operands(Words weights) { return weights; }
// Numbers of half precision: their bits, moved to the places of a float's, are 2^-112 times these.
inline Vec load_halves(const uint16_t* p) {
  Vec x;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = (p[i] & 0x7fffu) << 13 | (p[i] & 0x8000u) << 16;
    __builtin_memcpy(reinterpret_cast<char*>(&x) + i * sizeof(bits), &bits, sizeof(bits));
  }
  return x * broadcast(0x1p112f);
}
// 2 * kLanes of them as pairs of 16 bits.
inline Words load_signed_pairs(const uint8_t* p) {
  Halves x;
  for (int i = 0; i < 2 * kLanes; ++i) x[i] = static_cast<int8_t>(p[i]);
  return reinterpret_cast<Words>(x);
}
inline Words load_byte_pairs(const uint8_t* p) {
  Halves x;
  for (int i = 0; i < 2 * kLanes; ++i) x[i] = p[i];
  return reinterpret_cast<Words>(x);
}
// out[i] <- the sum of the words of x[i].
inline void store_sums_of_four(const Words* x, int32_t* out) {
  for (int i = 0; i < 4; ++i) out[i] = x[i][0] + x[i][1] + x[i][2] + x[i][3];
}
// The halves of words below 256, of four bits each.
inline Words low_halves(Words x) { return x & 15; }
inline Words high_halves(Words x) { return x >> 4; }
// To the nearest integers, to even ones between two. Numbers beyond 16 bits, and NaN, become some integer.
inline Words to_integers(Vec x) {
  typedef uint32_t Unsigned __attribute__((vector_size(16)));
  constexpr uint32_t kBits = 0x4b400000;  // of 1.5 * 2^23: what is added to these is the integer
  return reinterpret_cast<Words>(reinterpret_cast<Unsigned>(x + broadcast(12582912.0f)) - kBits);
}
inline void store_bytes(int8_t* p, Words x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(x[i]);
}
inline int32_t reduce_add(Words x) {
  return static_cast<int32_t>(static_cast<uint32_t>(x[0]) + static_cast<uint32_t>(x[1]) + static_cast<uint32_t>(x[2]) +
                              static_cast<uint32_t>(x[3]));
}
inline void store_rounded(int16_t* p, Vec x) {
  const Words words = to_integers(x);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(words[i]);
}

inline void transpose(Vec rows[kLanes]) {
  Vec t[kLanes];
  for (int i = 0; i < kLanes; ++i) t[i] = Vec{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
  for (int i = 0; i < kLanes; ++i) rows[i] = t[i];
}

#endif

// Fewer values than a vector holds go through these, so that they get the same arithmetic as full vectors.
template <class T>
inline Vec load_first(int count, const T* p) {
  T padded[kLanes] = {};
  __builtin_memcpy(padded, p, count * sizeof(T));
  return load(padded);
}
template <class T>
inline void store_first(int count, T* p, Vec x) {
  T padded[kLanes];
  store(padded, x);
  __builtin_memcpy(p, padded, count * sizeof(T));
}

// 2 * kLanes values as two vectors. The order is the cheapest: bfloat16 come apart into first and second of each pair.
inline void load_two(const float* p, Vec* out) {
  out[0] = load(p);
  out[1] = load(p + kLanes);
}
inline void load_two(const BFloat16* p, Vec* out) {
  const Vec pairs = load_pairs(p);
  out[0] = first_of_pairs(pairs);
  out[1] = second_of_pairs(pairs);
}
inline void load_two(const Float8* p, Vec* out) {
  out[0] = load(p);
  out[1] = load(p + kLanes);
}
inline void load_two(const Codes<8>* p, Vec* out) {
  out[0] = to_float(load_signed_bytes(&p->bits));
  out[1] = to_float(load_signed_bytes(&p->bits + kLanes));
}
inline void load_two(const Codes<4>* p, Vec* out) {
  const Words bytes = load_bytes(&p->bits);
  out[0] = to_float(low_halves(bytes));
  out[1] = to_float(high_halves(bytes));
}
inline void store_two(float* p, Vec first, Vec second) {
  store(p, first);
  store(p + kLanes, second);
}
inline void store_two(BFloat16* p, Vec first, Vec second) {
  store(reinterpret_cast<float*>(p), join_pairs(first, second));
}

// First and second of each pair.
inline void store_pairs(BFloat16* p, Vec first, Vec second) { store_two(p, first, second); }
inline void store_pairs(float* p, Vec first, Vec second) {
  float numbers[2][kLanes];
  store(numbers[0], first);
  store(numbers[1], second);
  for (int i = 0; i < 2 * kLanes; ++i) p[i] = numbers[i % 2][i / 2];
}

inline Vec rounded_to(Vec x, const float*) { return x; }
inline Vec rounded_to(Vec x, const BFloat16*) { return round_to_bfloat16(x); }

inline float to_number(float x) { return x; }
inline float to_number(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float number;
  __builtin_memcpy(&number, &bits, sizeof(number));
  return number;
}

// e^x to 1e-7 relative; 0 below -87, e^88 above 88, NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec low = broadcast(-87.0f), shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec y = min(broadcast(88.0f), max(low, x));
  const Vec shifted_n = fma(y, broadcast(1.44269504f), shift);
  const Vec n = sub(shifted_n, shift);
  const Vec r = fma(n, broadcast(-1.42860682e-6f), fma(n, broadcast(-0.693145752f), y));  // y - n * ln 2, |r| <= 0.35
  Vec p = broadcast(1.39501e-3f);
  p = fma(p, r, broadcast(8.37169e-3f));
  p = fma(p, r, broadcast(4.16662e-2f));
  p = fma(p, r, broadcast(1.6666491e-1f));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return zero_where_less(x, low, scale_by_power(p, shifted_n));
}

}  // namespace
}  // namespace kvllm
