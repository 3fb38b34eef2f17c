// Exchanges of dropped KV pairs for residents of one KV head: which of them change places, so that queries miss less.
#pragma once

#include "simd.h"

namespace kvllm {
namespace {

inline Vec load_scores(const float* scores, int count) {
  if (count >= kLanes) return load(scores);
  float padded[kLanes];
  for (float& score : padded) score = -__builtin_inff();
  __builtin_memcpy(padded, scores, count * sizeof(float));
  return load(padded);
}

// The logarithm of the sum of e^score, with one of a learned score unless `sink` is null.
inline float log_sum_exp(const float* scores, int count, const float* sink) {
  Vec largest = broadcast(sink == nullptr ? -__builtin_inff() : *sink);
  for (int i = 0; i < count; i += kLanes) largest = max(load_scores(scores + i, count - i), largest);
  const float shift = reduce_max(largest);
  if (shift == -__builtin_inff()) return shift;
  Vec sum = {};
  for (int i = 0; i < count; i += kLanes) {
    sum = add(sum, exp(sub(load_scores(scores + i, count - i), broadcast(shift))));
  }
  const float of_sink = sink == nullptr ? 0 : __builtin_expf(*sink - shift);
  return shift + __builtin_logf(reduce_add(sum) + of_sink);
}

// best[i] <- max(scores[i] - mass, best[i])
inline void raise(const float* scores, float mass, int count, bool first, float* best) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec value = sub(load(scores + i), broadcast(mass));
    store(best + i, first ? value : max(value, load(best + i)));
  }
  for (; i < count; ++i) {
    const float value = scores[i] - mass;
    best[i] = first || value > best[i] ? value : best[i];
  }
}

// The `most` largest of some values in descending order, by their indices. Of equal ones the first comes first.
inline void largest_of(const float* values, int count, int most, int32_t* found) {
  int size = 0;
  const auto insert = [&](int index) {
    int place = size < most ? size++ : most - 1;
    for (; place > 0 && values[found[place - 1]] < values[index]; --place) found[place] = found[place - 1];
    found[place] = index;
  };
  int i = 0;
  for (; i < count && size < most; ++i) insert(i);
  for (; i < count; i += kLanes) {
    const int some = count - i < kLanes ? count - i : kLanes;
    if (!(reduce_max(load_scores(values + i, some)) > values[found[most - 1]])) continue;
    for (int j = i; j < i + some; ++j) {
      if (values[j] > values[found[most - 1]]) insert(j);
    }
  }
}

inline float missing_share(float missing, float mass) { return 1 / (1 + __builtin_expf(mass - missing)); }

struct Exchange {
  const ExchangeHead& head;
  float* masses;   // of residents, in the softmax, by query
  float* missing;  // bounds on the shares of dropped pairs

  float measure() const {
    float largest = 0;
    for (int query = 0; query < head.queries; ++query) {
      const float* sink = head.sinks == nullptr ? nullptr : head.sinks + query % head.group;
      masses[query] = log_sum_exp(head.resident + query * head.residents, head.residents, sink);
      const float bound = log_sum_exp(head.upper + query * head.dropped_pairs, head.dropped_pairs, nullptr);
      missing[query] = missing_share(bound, masses[query]);
      largest = missing[query] > largest ? missing[query] : largest;
    }
    return largest;
  }

  // Whether the exchanges so far leave a query with too much in dropped pairs, after one more.
  bool add(int arriving, int leaving, float* after) const {
    bool too_much = false;
    for (int query = 0; query < head.queries; ++query) {
      const float share = 1 - missing[query];
      const float arrives = head.dropped[query * head.dropped_pairs + arriving] - masses[query];
      const float leaves = head.resident[query * head.residents + leaving] - masses[query];
      after[query] += share * (__builtin_expf(leaves) - __builtin_expf(arrives));
      too_much = too_much || after[query] > head.limit;
    }
    return too_much;
  }

  void swap(int arriving, int leaving) const {
    for (int query = 0; query < head.queries; ++query) {
      float& resident = head.resident[query * head.residents + leaving];
      float& dropped = head.dropped[query * head.dropped_pairs + arriving];
      const float left = resident;
      resident = dropped;
      dropped = head.upper[query * head.dropped_pairs + arriving] = left;
    }
  }
};

inline float exchange(const ExchangeHead& head, float* workspace, int32_t* arriving, int32_t* leaving, int* count) {
  float *gain = workspace, *loss = gain + head.dropped_pairs, *masses = loss + head.residents;
  float *missing = masses + head.queries, *after = missing + head.queries;
  const Exchange work{head, masses, missing};
  *count = 0;
  const float bound = work.measure();
  if (head.limit >= 0 && !(bound > head.limit)) return bound;
  for (int query = 0; query < head.queries; ++query) {
    raise(head.dropped + query * head.dropped_pairs, masses[query], head.dropped_pairs, query == 0, gain);
    raise(head.resident + query * head.residents, masses[query], head.residents, query == 0, loss);
    after[query] = missing[query];
  }
  for (int i = 0; i < head.residents; ++i) loss[i] = head.movable[i] ? -loss[i] : -__builtin_inff();
  largest_of(gain, head.dropped_pairs, head.most, arriving);
  largest_of(loss, head.residents, head.most, leaving);
  int exchanges = 0;
  for (bool goes_on = true; goes_on && exchanges < head.most; ++exchanges) {
    if (!(gain[arriving[exchanges]] > -loss[leaving[exchanges]])) break;
    if (head.limit >= 0) goes_on = work.add(arriving[exchanges], leaving[exchanges], after);
  }
  if (exchanges == 0) return bound;
  for (int i = 0; i < exchanges; ++i) work.swap(arriving[i], leaving[i]);
  *count = exchanges;
  return work.measure();
}

}  // namespace
}  // namespace kvllm
