// All kernels of one instruction set, for the translation unit that is compiled for it.
#pragma once

#include "attention_kernel.h"
#include "choice_kernel.h"
#include "code_scores.h"
#include "elementwise_kernel.h"
#include "exchange_kernel.h"
#include "float_product.h"
#include "gated_delta_kernel.h"
#include "grouped_product.h"
#include "hadamard_kernel.h"
#include "integer_product.h"
#include "key_differences_kernel.h"
#include "key_resemblance_kernel.h"
#include "key_scores_kernel.h"
#include "largest_kernel.h"
#include "mass_kernel.h"
#include "product_kernel.h"
#include "quantize_kernel.h"
#include "squares_kernel.h"

namespace kvllm {
namespace {

// prepare of a product whose operands are Operand.
template <class T, class Operand>
constexpr auto widen_to = widen<T>;
template <class T>
constexpr decltype(&widen<T>) widen_to<T, T> = nullptr;

template <class T, class KV>
constexpr KVKernels kv_kernels() {
  return {attend<T, KV>, finish<T, KV>, reorder_from<T, KV>()};
}

// What a sum of products with kForm begins with is the negative sum of channels times kOffset.
template <class T, GroupedForm kForm, int kOffset>
constexpr ProductKernels grouped_kernels() {
  return {quantize_groups<T, kOffset>, grouped_part_rows, grouped_product<T, kForm>};
}

template <class T, class W>
constexpr NormKernels norm_kernels() {
  return {rms_norm<T, W>, add_rms_norm<T, W>, rotary<T, W>};
}

// Kernels for T, with the way in which scores and products with weights of T are multiplied.
template <class T, class Score, class P>
constexpr Kernels make_kernels() {
  return {
      .element_size = sizeof(T),
      .kv = {{kv_kernels<T, PlainKV<T, Score>>()},
             {{}, kv_kernels<T, QuantizedKV<8, 8>>()},
             {{}, {}, kv_kernels<T, QuantizedKV<4, 4>>()},
             {{}, {}, {}, kv_kernels<T, Float8KV<T>>()},
             {{}, {}, {}, {}, kv_kernels<T, RotatedKV<4, 4>>()},
             {{}, {}, kv_kernels<T, QuantizedKV<6, 4>>()},
             {{}, {}, {}, {}, kv_kernels<T, RotatedKV<6, 4>>()}},
      .score_keys = {score_keys<T, PlainKV<T, Score>>, score_keys<T, QuantizedKV<8, 8>>,
                     score_keys<T, QuantizedKV<4, 4>>, score_keys<T, Float8KV<T>>, score_keys<T, RotatedKV<4, 4>>,
                     score_keys<T, QuantizedKV<6, 6>>, score_keys<T, RotatedKV<6, 6>>},
      .quantize = {nullptr, quantize_int8<T>, quantize_int4<T>, quantize_float8<T>, quantize_int4_hadamard<T>,
                   quantize_int6<T>, quantize_int6_hadamard<T>},
      .rotate = rotate<T>,
      .merge = merge,
      .add_squares = add_squares,
      .exchange = exchange,
      .choose = choose,
      .key_differences = key_differences<T>,
      .key_resemblance = key_resemblance<T>,
      .attention_mass = attention_mass<T, Score>,
      .norms = {norm_kernels<T, T>(), norm_kernels<T, float>()},
      .largest = largest<T>,
      .gated = {gated<T, silu>, gated<T, gelu>},
      .convolve = convolve<T>,
      .gated_delta = gated_delta<T>,
      .product = {widen_to<T, typename P::Operand>, part_rows, product<T, P>},
      .product_int8 = {quantize<T, 8>, part_rows, product<T, IntegerProduct<8>>},
      .product_int4 = {quantize<T, 4>, part_rows, product<T, IntegerProduct<4>>},
      .product_grouped = {{grouped_kernels<T, GroupedForm::kNibbles, 8>(),
                           grouped_kernels<T, GroupedForm::kNibbles, 0>()},
                          {grouped_kernels<T, GroupedForm::kSixBits, 32>(),
                           grouped_kernels<T, GroupedForm::kSixBits, 0>()},
                          {grouped_kernels<T, GroupedForm::kWide, kWideOffset>(),
                           grouped_kernels<T, GroupedForm::kWide, kWideOffset>()}},
  };
}

#if defined(KVLLM_AVX512_BF16)
using BFloat16Weights = PairsProduct;
#else
using BFloat16Weights = FloatProduct<BFloat16>;
#endif

constexpr KernelSet kKernels = {
    make_kernels<float, ChannelProduct<float>, FloatProduct<float>>(),
    make_kernels<BFloat16, BFloat16Product, BFloat16Weights>(),
};

}  // namespace
}  // namespace kvllm
