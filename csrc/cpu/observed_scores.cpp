#include "observed_scores.h"

namespace kvllm {
namespace {

// Floats from one query's kept scores to the next one's, so that kernels can handle whole vectors.
int kept_stride(const AttentionPlan& plan) {
  return static_cast<int>(plan.batch.table_width * plan.shape.block_size) + 16;
}

}  // namespace

const int32_t* check_observed(const std::optional<Tensor>& scores, const std::optional<Tensor>& scored_from,
                              const AttentionShape& shape, const AttentionBatch& batch) {
  STD_TORCH_CHECK(scores.has_value() == scored_from.has_value(), "scores and scored_from go together");
  if (!scores) return nullptr;
  STD_TORCH_CHECK(batch.packed_len == nullptr, "KV pairs are not scored where heads hold different ones");
  check_contiguous(*scored_from, "scored_from", 1);
  check_dtype(*scored_from, "scored_from", ScalarType::Int);
  check_size(*scored_from, "scored_from", 0, batch.num_sequences);
  check_contiguous(*scores, "scores", scores->dim());
  check_dtype(*scores, "scores", ScalarType::Float);
  const int64_t sizes[] = {shape.num_blocks, shape.kv_heads, shape.block_size};
  for (int64_t dim = 0; dim < 3; ++dim) check_size(*scores, "scores", scores->dim() - 3 + dim, sizes[dim]);
  const int32_t* start = scored_from->const_data_ptr<int32_t>();
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    STD_TORCH_CHECK(start[s] >= 0, "scored_from of sequence ", s, " is negative");
  }
  return start;
}

int64_t kept_floats(const AttentionPlan& plan) {
  if (plan.batch.scored_from == nullptr) return 0;
  return static_cast<int64_t>(plan.shape.group() + 1) * kept_stride(plan);
}

void keep_scores(const AttentionPlan& plan, const AttentionTask& task, float* memory, QueryTile& tile) {
  tile.kept_scores = nullptr;
  const int32_t* start = plan.batch.query_start_loc + task.sequence;
  if (plan.batch.scored_from == nullptr || start[1] - start[0] != 1) return;
  const int first = plan.batch.scored_from[task.sequence];
  if (plan.batch.last_kv_index[task.first_token] < first) return;
  tile.kept_scores = memory;
  tile.kept_begin = first;
  tile.kept_stride = kept_stride(plan);
}

void add_scores(const AttentionPlan& plan, const AttentionTask& task, const AttentionLayer& layer,
                const Kernels& kernels, const QueryTile& queries) {
  if (queries.kept_scores == nullptr) return;
  const int begin = queries.kept_begin, own = plan.batch.last_kv_index[task.first_token], count = own - begin + 1;
  float* added = queries.kept_scores + queries.count * queries.kept_stride;
  kernels.add_squares(queries.kept_scores, queries.count, queries.kept_stride, count, queries.sinks, added);
  const int32_t* table = plan.batch.block_tables + task.sequence * plan.batch.table_width;
  const int block_size = static_cast<int>(plan.shape.block_size);
  const auto of_block = [&](int block) {
    return layer.scores + (static_cast<int64_t>(table[block]) * plan.shape.kv_heads + task.kv_head) * block_size;
  };
  of_block(own / block_size)[own % block_size] = 0;  // nobody has given it anything so far
  int block = begin / block_size, slot = begin % block_size;
  for (int pair = 0; pair < count; ++block, slot = 0) {
    float* row = of_block(block) + slot;
    const int some = std::min(count - pair, block_size - slot);
    for (int i = 0; i < some; ++i) row[i] += added[pair + i];
    pair += some;
  }
}

}  // namespace kvllm
