// How unlike the others each key is (KeyDiff, arXiv 2504.15364): its negative cosine to the mean of all unit keys.
#pragma once

#include "elementwise_kernel.h"

namespace kvllm {
namespace {

constexpr float kLeastLength = 1e-12f;

// The sum of the products of two vectors.
template <class T>
inline float dot(const T* a, const float* b, int64_t width) {
  Vec sum = {};
  for_each_vector(width, [&](int64_t channel, int count) __attribute__((always_inline)) {
    sum = fma(load_up_to(count, a + channel), load_up_to(count, b + channel), sum);
  });
  return reduce_add(sum);
}

template <class T>
inline float inverse_length(const T* vector, int64_t width) {
  const float length = __builtin_sqrtf(sum_of_squares(vector, width));
  return 1.0f / (length > kLeastLength ? length : kLeastLength);
}

template <class T>
void key_differences(const void* all_keys, int num_keys, int head_dim, float* anchor, float* differences) {
  const T* keys = static_cast<const T*>(all_keys);
  const auto add_to_anchor = [&](const T* key, Vec factor) {
    for_each_vector(head_dim, [&](int64_t channel, int count) __attribute__((always_inline)) {
      const Vec sum = load_up_to(count, anchor + channel);
      store_up_to(count, anchor + channel, fma(load_up_to(count, key + channel), factor, sum));
    });
  };
  for (int channel = 0; channel < head_dim; ++channel) anchor[channel] = 0;
  for (int i = 0; i < num_keys; ++i) {
    const T* key = keys + static_cast<int64_t>(i) * head_dim;
    differences[i] = inverse_length(key, head_dim);
    add_to_anchor(key, broadcast(differences[i]));
  }
  for (int channel = 0; channel < head_dim; ++channel) anchor[channel] /= static_cast<float>(num_keys);
  const float inverse = inverse_length(anchor, head_dim);
  for (int i = 0; i < num_keys; ++i) {
    const float along = dot(keys + static_cast<int64_t>(i) * head_dim, anchor, head_dim);
    differences[i] *= -along * inverse;
  }
}

}  // namespace
}  // namespace kvllm
