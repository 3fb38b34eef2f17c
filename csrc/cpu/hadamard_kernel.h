// The orthonormal Hadamard matrix in Sylvester's order: symmetric, and its own inverse.
#pragma once

#include "simd.h"

namespace kvllm {
namespace {

// x <- x times the matrix. `size` is a power of two, kMaxCodeChannels at most. Each sum adds channels in pairs, then
// pairs of pairs, as kvllm/kvcache/hadamard.py does. A stage moves the lowest bit of a place to the top, so that the
// same loop, which the compiler turns into vectors, serves all of them, and the last one leaves each channel in place.
inline void hadamard(float* x, int size) {
  float memory[kMaxCodeChannels];
  float *from = x, *to = memory;
  const int half = size / 2;
  for (int stage = 1; stage < size; stage *= 2) {
    const float* __restrict__ pairs = from;
    float* __restrict__ sums = to;
    for (int i = 0; i < half; ++i) {
      sums[i] = pairs[2 * i] + pairs[2 * i + 1];
      sums[half + i] = pairs[2 * i] - pairs[2 * i + 1];
    }
    float* const done = from;
    from = to;
    to = done;
  }
  const float scale = static_cast<float>(1 / __builtin_sqrt(static_cast<double>(size)));
  for (int i = 0; i < size; ++i) x[i] = from[i] * scale;
}

// out <- a vector times the matrix.
template <class T>
inline void rotate(const void* vector, int size, float* out) {
  for (int i = 0; i < size; i += kLanes) store(out + i, load(static_cast<const T*>(vector) + i));
  hadamard(out, size);
}

}  // namespace
}  // namespace kvllm
