// A short convolution, and the gated delta rule, over the states of sequences (kvllm/models/gated_delta.py).
#pragma once

#include "elementwise_kernel.h"

namespace kvllm {
namespace {

constexpr float kDeltaEps = 1e-6f;

// Channels begin .. end - 1 of one sequence: each token's last inputs times the filter, then perhaps SiLU. `inputs`
// gets the last ones.
template <class T>
void convolve(const Convolution& arguments, int64_t begin, int64_t end) {
  const int64_t tokens = arguments.tokens, taps = arguments.taps, channels = arguments.channels;
  const T* x = static_cast<const T*>(arguments.x);
  const T* filter = static_cast<const T*>(arguments.filter);
  T* inputs = static_cast<T*>(arguments.inputs);
  T* out = static_cast<T*>(arguments.out);
  const Vec one = broadcast(1);
  const auto input = [&](int64_t token) {
    return token < 0 ? inputs + (taps - 1 + token) * channels : x + token * arguments.x_stride;
  };
  for_each_vector(end - begin, [&](int64_t offset, int count) __attribute__((always_inline)) {
    const int64_t channel = begin + offset;
    for (int64_t token = 0; token < tokens; ++token) {
      Vec sum = {};
      for (int64_t tap = 0; tap < taps; ++tap) {
        const Vec weight = load_up_to(count, filter + tap * channels + channel);
        sum = fma(load_up_to(count, input(token - taps + 1 + tap) + channel), weight, sum);
      }
      if (arguments.silu) sum = div(sum, add(one, exp(sub(Vec{}, sum))));
      store_up_to(count, out + token * channels + channel, sum);
    }
    for (int64_t i = 0; i + 1 < taps; ++i) {  // ascending: what is read has not been overwritten
      store_up_to(count, inputs + i * channels + channel, load_up_to(count, input(tokens - taps + 1 + i) + channel));
    }
  });
}

// out <- a vector of length 1, times a factor.
template <class T>
inline void scale_to(float factor, const T* vector, int64_t width, float* out) {
  const Vec scale = broadcast(factor / __builtin_sqrtf(sum_of_squares(vector, width) + kDeltaEps));
  for_each_vector(width, [&](int64_t channel, int count) __attribute__((always_inline)) {
    store_up_to(count, out + channel, mul(load_up_to(count, vector + channel), scale));
  });
}

// kVecs vectors of columns of the state, the last `count` lanes wide, for some tokens from `first` on, of which queries
// and keys are scaled. A state's columns do not depend on each other, and those of one call stay in the first cache.
template <class T, int kVecs>
inline void delta_columns(const GatedDelta& rule, const float* queries, const float* keys, int64_t first,
                          int64_t tokens, int64_t column, int count) {
  const int64_t key_dim = rule.key_dim, value_dim = rule.value_dim;
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t row = first + token;
    const float* const query = queries + token * key_dim;
    const float* const key = keys + token * key_dim;
    const Vec decay = broadcast(rule.decays[row * rule.control_stride]);
    const Vec strength = broadcast(rule.strengths[row * rule.control_stride]);
    const T* const value = static_cast<const T*>(rule.values) + row * rule.stride + column;
    T* const out = static_cast<T*>(rule.out) + row * rule.out_stride + column;
    float* const state = rule.state + column;
    Vec change[kVecs] = {}, read[kVecs] = {};
    for (int64_t i = 0; i < key_dim; ++i) {
      const Vec k = broadcast(key[i]);
      for (int v = 0; v < kVecs; ++v) {
        change[v] = fma(k, load_up_to(v + 1 < kVecs ? kLanes : count, state + i * value_dim + v * kLanes), change[v]);
      }
    }
    for (int v = 0; v < kVecs; ++v) {
      const Vec wanted = load_up_to(v + 1 < kVecs ? kLanes : count, value + v * kLanes);
      change[v] = mul(strength, sub(wanted, mul(decay, change[v])));
    }
    for (int64_t i = 0; i < key_dim; ++i) {
      const Vec k = broadcast(key[i]), q = broadcast(query[i]);
      for (int v = 0; v < kVecs; ++v) {
        const int width = v + 1 < kVecs ? kLanes : count;
        float* const place = state + i * value_dim + v * kLanes;
        const Vec changed = fma(k, change[v], mul(decay, load_up_to(width, place)));
        store_up_to(width, place, changed);
        read[v] = fma(q, changed, read[v]);
      }
    }
    for (int v = 0; v < kVecs; ++v) store_up_to(v + 1 < kVecs ? kLanes : count, out + v * kLanes, read[v]);
  }
}

template <class T>
void gated_delta(const GatedDelta& rule, float* workspace) {
  constexpr int kVecs = 4;
  const int64_t key_dim = rule.key_dim, value_dim = rule.value_dim, block = kVecs * kLanes;
  float *const queries = workspace, *const keys = workspace + kDeltaTokens * key_dim;
  const float scale = 1 / __builtin_sqrtf(static_cast<float>(key_dim));
  for (int64_t first = 0; first < rule.tokens; first += kDeltaTokens) {
    const int64_t tokens = rule.tokens - first < kDeltaTokens ? rule.tokens - first : kDeltaTokens;
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t row = (first + token) * rule.stride;
      scale_to(scale, static_cast<const T*>(rule.queries) + row, key_dim, queries + token * key_dim);
      scale_to(1, static_cast<const T*>(rule.keys) + row, key_dim, keys + token * key_dim);
    }
    int64_t column = 0;
    for (; column + block <= value_dim; column += block) {
      delta_columns<T, kVecs>(rule, queries, keys, first, tokens, column, kLanes);
    }
    for (; column < value_dim; column += kLanes) {
      const int64_t left = value_dim - column;
      delta_columns<T, 1>(rule, queries, keys, first, tokens, column, static_cast<int>(left < kLanes ? left : kLanes));
    }
  }
}

}  // namespace
}  // namespace kvllm
