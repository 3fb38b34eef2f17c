// RMSNorm, gated activations and the rotary embedding, row by row.
#pragma once

#include "simd.h"

namespace kvllm {
namespace {

// Calls body(channel, count) for each vector of a row; only the last count may be less than kLanes.
template <class Body>
inline void for_each_vector(int64_t width, Body body) {
  int64_t channel = 0;
  for (; channel + kLanes <= width; channel += kLanes) body(channel, kLanes);
  if (channel < width) body(channel, static_cast<int>(width - channel));
}

template <class T>
inline Vec load_up_to(int count, const T* p) {
  return count == kLanes ? load(p) : load_first(count, p);
}
template <class T>
inline void store_up_to(int count, T* p, Vec x) {
  count == kLanes ? store(p, x) : store_first(count, p, x);
}

template <class T>
inline float sum_of_squares(const T* row, int64_t width) {
  Vec squares = {};
  for_each_vector(width, [&](int64_t channel, int count) __attribute__((always_inline)) {
    const Vec x = load_up_to(count, row + channel);
    squares = fma(x, x, squares);
  });
  return reduce_add(squares);
}

template <class T>
inline float inverse_rms(const T* row, int64_t width, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(row, width) / static_cast<float>(width) + eps);
}

// W: of the weight. x is rounded to it.
template <class W>
inline Vec normalized(Vec x, Vec inverse, Vec weight) {
  return mul(rounded_to(mul(x, inverse), static_cast<const W*>(nullptr)), weight);
}

template <class T, class W>
inline void normalize_row(const T* row, const W* weight, T* out, int64_t width, float eps) {
  const Vec inverse = broadcast(inverse_rms(row, width, eps));
  for_each_vector(width, [&](int64_t channel, int count) __attribute__((always_inline)) {
    const Vec x = load_up_to(count, row + channel);
    store_up_to(count, out + channel, normalized<W>(x, inverse, load_up_to(count, weight + channel)));
  });
}

template <class T, class W>
void rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t width, float eps) {
  for (int64_t row = 0; row < rows; ++row) {
    normalize_row(static_cast<const T*>(x) + row * width, static_cast<const W*>(weight),
                  static_cast<T*>(out) + row * width, width, eps);
  }
}

template <class T, class W>
void add_rms_norm(void* residual, const void* x, const void* weight, void* out, int64_t rows, int64_t width,
                  float eps) {
  for (int64_t row = 0; row < rows; ++row) {
    T* sum = static_cast<T*>(residual) + row * width;
    const T* addend = static_cast<const T*>(x) + row * width;
    for_each_vector(width, [&](int64_t channel, int count) __attribute__((always_inline)) {
      store_up_to(count, sum + channel, add(load_up_to(count, sum + channel), load_up_to(count, addend + channel)));
    });
    normalize_row(sum, static_cast<const W*>(weight), static_cast<T*>(out) + row * width, width, eps);
  }
}

// x times the sigmoid of y.
inline Vec times_sigmoid(Vec x, Vec y) { return div(x, add(broadcast(1.0f), exp(sub(Vec{}, y)))); }
inline Vec silu(Vec x) { return times_sigmoid(x, x); }
// Its approximation with tanh: (1 + tanh(y)) / 2 is the sigmoid of 2 y.
inline Vec gelu(Vec x) {
  constexpr float kTwice = 1.59576912f, kCubes = 0.044715f * kTwice;  // 2 * sqrt(2 / pi)
  return times_sigmoid(x, mul(x, fma(mul(x, x), broadcast(kCubes), broadcast(kTwice))));
}

// Of rows of gates and as many other numbers, kActivation of a gate times the number.
template <class T, Vec (*kActivation)(Vec)>
void gated(const void* gate_up, void* out, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* gates = static_cast<const T*>(gate_up) + row * 2 * width;
    T* products = static_cast<T*>(out) + row * width;
    for_each_vector(width, [&](int64_t channel, int count) __attribute__((always_inline)) {
      const Vec gate = load_up_to(count, gates + channel), up = load_up_to(count, gates + width + channel);
      store_up_to(count, products + channel, mul(rounded_to(kActivation(gate), products), up));
    });
  }
}

template <class T, class W>
void rotate_head(T* head, const W* weight, const float* cos, const float* sin, int half, float eps) {
  const Vec inverse = broadcast(weight ? inverse_rms(head, 2 * half, eps) : 1.0f);
  for_each_vector(half, [&](int64_t channel, int count) __attribute__((always_inline)) {
    T* low_channels = head + channel;
    T* high_channels = head + half + channel;
    Vec low = load_up_to(count, low_channels), high = load_up_to(count, high_channels);
    if (weight) {
      low = rounded_to(normalized<W>(low, inverse, load_up_to(count, weight + channel)), head);
      high = rounded_to(normalized<W>(high, inverse, load_up_to(count, weight + half + channel)), head);
    }
    const Vec c = load_up_to(count, cos + channel), s = load_up_to(count, sin + channel);
    store_up_to(count, low_channels, sub(mul(low, c), mul(high, s)));
    store_up_to(count, high_channels, add(mul(high, c), mul(low, s)));
  });
}

template <class T, class W>
void rotary(const Rotary& a, int64_t begin, int64_t end) {
  const int half = a.head_dim / 2;
  for (int64_t row = begin; row < end; ++row) {
    T* heads = static_cast<T*>(a.qkv) + row * a.row_stride;
    const float* cos = a.cos_sin + a.positions[row] * a.head_dim;
    for (int head = 0; head < a.num_query_heads + a.num_kv_heads; ++head) {
      const void* weight = head < a.num_query_heads ? a.query_weight : a.key_weight;
      rotate_head(heads + static_cast<int64_t>(head) * a.head_dim, static_cast<const W*>(weight), cos, cos + half, half,
                  a.eps);
    }
  }
}

}  // namespace
}  // namespace kvllm
