// Scores of KV pairs while queries pass by: what the queries of a KV head give them.
#pragma once

#include "simd.h"

namespace kvllm {
namespace {

// added[pair] <- sum over `num_queries` rows of the squares of their softmax over the first `count` scores, and over
// one of `sinks` for each row, unless that is null. The rows, `stride` floats apart, are overwritten; they have
// room for whole vectors, as `added` has.
inline void add_squares(float* scores, int num_queries, int stride, int count, const float* sinks, float* added) {
  const Vec minus_infinity = broadcast(-__builtin_inff());
  for (int query = 0; query < num_queries; ++query) {
    float* row = scores + query * stride;
    Vec largest = minus_infinity;
    for (int pair = 0; pair < count; pair += kLanes) {
      if (count - pair < kLanes) store(row + pair, keep_first(count - pair, load(row + pair), minus_infinity));
      largest = max(load(row + pair), largest);
    }
    if (sinks != nullptr) largest = max(largest, broadcast(sinks[query]));
    const Vec shift = broadcast(reduce_max(largest));
    Vec sum = {};
    for (int pair = 0; pair < count; pair += kLanes) {
      const Vec weight = exp(sub(load(row + pair), shift));
      store(row + pair, weight);
      sum = add(sum, weight);
    }
    Vec total = broadcast(reduce_add(sum));
    if (sinks != nullptr) total = add(total, exp(sub(broadcast(sinks[query]), shift)));
    const Vec inverse = div(broadcast(1.0f), total);
    for (int pair = 0; pair < count; pair += kLanes) {
      const Vec probability = mul(load(row + pair), inverse);
      const Vec square = mul(probability, probability);
      store(added + pair, query == 0 ? square : add(load(added + pair), square));
    }
  }
}

}  // namespace
}  // namespace kvllm
