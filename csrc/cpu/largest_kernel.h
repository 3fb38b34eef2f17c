// The largest of many numbers, and where it is.
#pragma once

#include "simd.h"

namespace kvllm {
namespace {

template <class T>
Largest largest_of_few(const T* numbers, int64_t begin, int64_t end) {
  Largest found{to_number(numbers[begin]), begin};
  for (int64_t i = begin; i < end; ++i) {
    const float number = to_number(numbers[i]);
    if (number != number) return {number, i};
    if (number > found.number) found = {number, i};
  }
  return found;
}

// Looks for the block that has it first, a vector at a time.
template <class T>
Largest largest(const void* all, int64_t begin, int64_t end) {
  constexpr int kBlock = 256;
  constexpr float kLowest = -3.40282347e38f;
  const T* numbers = static_cast<const T*>(all);
  Vec not_finite = {};
  float most = -__builtin_inff();
  int64_t first = begin, block = begin;
  for (; block + kBlock <= end; block += kBlock) {
    Vec of_block = broadcast(most);
    for (int i = 0; i < kBlock; i += kLanes) {
      const Vec x = load(numbers + block + i);
      of_block = max(of_block, x);
      not_finite = fma(max(broadcast(kLowest), x), Vec{}, not_finite);  // NaN stays NaN, and infinity becomes it
    }
    const float number = reduce_max(of_block);
    if (number > most) {
      most = number;
      first = block;
    }
  }
  if (block == begin || reduce_add(not_finite) != 0) return largest_of_few(numbers, begin, end);
  const Largest found = largest_of_few(numbers, first, first + kBlock);
  const Largest rest = block < end ? largest_of_few(numbers, block, end) : found;
  return rest.number <= found.number ? found : rest;
}

}  // namespace
}  // namespace kvllm
