// Scores of queries with the keys of one KV head, read from the paged cache in place.
#pragma once

#include "attention_kernel.h"
#include "code_scores.h"

namespace kvllm {
namespace {

template <class T, class KV>
struct KeyScores {
  const PairRange& range;
  const TileScores<T, KV> products;
  float* out;
  const int64_t stride;

  template <int kRows>
  void score_queries(int first, const TilePairs<KV>& pairs, const PairParameters<KV>& parameters) const {
    float scores[kRows * kTilePairs];
    products.template score_queries<kRows>(first, pairs, parameters, scores, nullptr);
    for (int r = 0; r < kRows; ++r) {
      float* row = out + (first + r) * stride + pairs.start;
      __builtin_memcpy(row, scores + r * kTilePairs, pairs.count * sizeof(float));
    }
  }

  void run(int num_queries) const {
    TilePairs<KV> pairs;
    for (int start = range.begin; start < range.end; start += kTilePairs) {
      pairs.locate(range.head, start, range.end);
      products.pack(pairs);
      const PairParameters<KV> parameters{Parameters(pairs.key_scales), Parameters(pairs.value_scales)};
      for (int i = 0; i < num_queries; i += kRowBlock) {
        switch (minimum(kRowBlock, num_queries - i)) {
          case 4: score_queries<4>(i, pairs, parameters); break;
          case 3: score_queries<3>(i, pairs, parameters); break;
          case 2: score_queries<2>(i, pairs, parameters); break;
          case 1: score_queries<1>(i, pairs, parameters); break;
        }
      }
    }
  }
};

template <class T, class KV>
void score_keys(const PairRange& range, const QueryTile& tile, float scale, float* workspace, float* out,
                int64_t stride) {
  KeyScores<T, KV>{range, {tile, range.head.head_dim, scale, workspace}, out, stride}.run(tile.count);
}

}  // namespace
}  // namespace kvllm
