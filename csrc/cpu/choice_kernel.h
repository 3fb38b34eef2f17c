// The highest of some scores, and gaps between them that are filled (kvllm/compression/methods/token2chunk.py).
#pragma once

#include "simd.h"

namespace kvllm {
namespace {

constexpr int32_t kRankOfInfinity = 0x7f800000;

// Integers in the order of scores. NaN comes first of all, as torch sorts; zeros of both signs are equal.
inline void rank(const float* scores, int count, int32_t* ranks) {
  for (int i = 0; i < count; ++i) {
    const float score = scores[i] + 0.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &score, sizeof(bits));
    ranks[i] = score != score ? INT32_MAX : bits ^ ((bits >> 31) & INT32_MAX);
  }
}

inline int count_from(int32_t bound, const int32_t* ranks, int count) {
  int found = 0;
  for (int i = 0; i < count; ++i) found += ranks[i] >= bound;
  return found;
}

// The places of the `most` highest of `count` ranks, ascending; of equal ones the first. `places` has room for one
// more.
inline void highest(const int32_t* ranks, int count, int most, int32_t* places) {
  if (most == 0) return;
  // The highest bound that at least `most` ranks reach is found bit by bit, as a number from 0 on.
  const auto bound_of = [](uint32_t number) { return static_cast<int32_t>(number ^ 0x80000000u); };
  uint32_t lowest = 0;
  int reached = count;
  for (int bit = 31; bit >= 0 && reached != most; --bit) {
    const uint32_t raised = lowest | 1u << bit;
    const int found = count_from(bound_of(raised), ranks, count);
    if (found < most) continue;
    lowest = raised;
    reached = found;
  }
  const int32_t bound = bound_of(lowest);
  int equal = count;  // how many that lie on the bound are taken
  if (reached != most) equal = bound == INT32_MAX ? most : most - count_from(bound + 1, ranks, count);
  for (int i = 0, taken = 0; i < count; ++i) {
    const bool is_equal = ranks[i] == bound && equal > 0;
    equal -= is_equal;
    places[taken] = i;
    taken += ranks[i] > bound || is_equal;
  }
}

inline void choose(const float* scores, int count, const ChunkBudget& budget, int32_t* workspace, int64_t* kept) {
  int32_t *ranks = workspace, *places = ranks + count, *reward_ranks = places + count + 1;
  rank(scores, count, ranks);
  if (budget.chunks > 0) {
    highest(ranks, count, budget.candidates, places);
    const int gaps = budget.candidates - 1, chunks = budget.chunks < gaps ? budget.chunks : gaps;
    const auto length = [&](int gap) {
      const int pairs = places[gap + 1] - places[gap];
      return pairs < budget.max_chunk ? pairs : 1;
    };
    for (int gap = 0; gap < gaps; ++gap) {
      const float between = static_cast<float>(length(gap) - 1);
      const float reward = (scores[places[gap]] + scores[places[gap + 1]]) * between;
      const float admissible = between > 0 ? reward : -__builtin_inff();
      rank(&admissible, 1, reward_ranks + gap);
    }
    int32_t* chosen = reward_ranks + gaps;
    highest(reward_ranks, gaps, chunks, chosen);
    for (int i = 0; i < budget.candidates; ++i) ranks[places[i]] = kRankOfInfinity;
    for (int i = 0; i < chunks; ++i) {
      const int begin = places[chosen[i]], end = begin + length(chosen[i]);
      for (int place = begin; place < end; ++place) ranks[place] = kRankOfInfinity;
    }
  }
  highest(ranks, count, budget.total, places);
  for (int i = 0; i < budget.total; ++i) kept[i] = places[i];
}

}  // namespace
}  // namespace kvllm
