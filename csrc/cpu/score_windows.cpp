#include "score_windows.h"

namespace kvllm {
namespace {

// Floats from one query's kept scores to the next one's, so that kernels can handle whole vectors.
int kept_stride(const AttentionPlan& plan) { return plan.batch.windows.size + 16; }

// The query token of a task in the windows: where the one that it lies in begins, and how far behind it is.
struct Place {
  int window;
  int offset;
  bool in_overlap;  // it lies in the window before as well
};

Place place_of(const AttentionPlan& plan, const AttentionTask& task) {
  const ScoreWindows& windows = plan.batch.windows;
  const int first = windows.start[task.sequence], index = plan.batch.last_kv_index[task.first_token];
  const int offset = (index - first) % windows.stride;
  return {index - offset, offset, offset < windows.size - windows.stride && index - offset > first};
}

// Adds to the scores of the first `count` KV pairs of the window from `begin` on.
void add_window(const AttentionPlan& plan, const AttentionTask& task, float* scores, const Kernels& kernels,
                const QueryTile& queries, int begin, int count) {
  float* added = queries.kept_scores + queries.count * queries.kept_stride;
  kernels.add_window(queries.kept_scores + begin - queries.kept_begin, queries.count, queries.kept_stride, count,
                     plan.batch.windows.squared, queries.sinks, added);
  const int32_t* table = plan.batch.block_tables + task.sequence * plan.batch.table_width;
  const int block_size = static_cast<int>(plan.shape.block_size);
  const auto of_block = [&](int block) {
    return scores + (static_cast<int64_t>(table[block]) * plan.shape.kv_heads + task.kv_head) * block_size;
  };
  const int own = plan.batch.last_kv_index[task.first_token];
  if (begin + count - 1 == own)
    of_block(own / block_size)[own % block_size] = 0;  // nobody has given it anything so far
  int block = begin / block_size, slot = begin % block_size;
  for (int pair = 0; pair < count; ++block, slot = 0) {
    float* row = of_block(block) + slot;
    const int some = std::min(count - pair, block_size - slot);
    for (int i = 0; i < some; ++i) row[i] += added[pair + i];
    pair += some;
  }
}

}  // namespace

ScoreWindows score_windows(const std::optional<Tensor>& window_start, int64_t size, int64_t stride, int64_t num_scored,
                           bool squared) {
  return {window_start ? window_start->const_data_ptr<int32_t>() : nullptr, static_cast<int>(size),
          static_cast<int>(stride), static_cast<int>(num_scored), squared};
}

void check_windows(const std::optional<Tensor>& scores, const std::optional<Tensor>& window_start,
                   const ScoreWindows& windows, const AttentionShape& shape, const AttentionBatch& batch) {
  STD_TORCH_CHECK(scores.has_value() == window_start.has_value(), "scores and window_start go together");
  if (!scores) return;
  STD_TORCH_CHECK(batch.packed_len == nullptr, "KV pairs are not scored where heads hold different ones");
  check_contiguous(*window_start, "window_start", 1);
  check_dtype(*window_start, "window_start", ScalarType::Int);
  check_size(*window_start, "window_start", 0, batch.num_sequences);
  check_contiguous(*scores, "scores", scores->dim());
  check_dtype(*scores, "scores", ScalarType::Float);
  const int64_t sizes[] = {shape.num_blocks, shape.kv_heads, shape.block_size};
  for (int64_t dim = 0; dim < 3; ++dim) check_size(*scores, "scores", scores->dim() - 3 + dim, sizes[dim]);
  STD_TORCH_CHECK(0 < windows.num_scored && windows.num_scored <= windows.stride && windows.stride <= windows.size,
                  "windows of ", windows.size, " KV pairs, one every ", windows.stride, ", cannot have ",
                  windows.num_scored, " scored ones");
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    STD_TORCH_CHECK(windows.start[s] >= 0, "window_start of sequence ", s, " is negative");
  }
}

int64_t kept_floats(const AttentionPlan& plan) {
  if (plan.batch.windows.start == nullptr) return 0;
  return static_cast<int64_t>(plan.shape.group() + 1) * kept_stride(plan);
}

void keep_scores(const AttentionPlan& plan, const AttentionTask& task, float* memory, QueryTile& tile) {
  tile.kept_scores = nullptr;
  const ScoreWindows& windows = plan.batch.windows;
  const int32_t* start = plan.batch.query_start_loc + task.sequence;
  if (windows.start == nullptr || start[1] - start[0] != 1) return;
  if (plan.batch.last_kv_index[task.first_token] < windows.start[task.sequence]) return;
  const Place place = place_of(plan, task);
  tile.kept_scores = memory;
  tile.kept_begin = place.window - (place.in_overlap ? windows.stride : 0);
  tile.kept_stride = kept_stride(plan);
}

void add_scores(const AttentionPlan& plan, const AttentionTask& task, const AttentionLayer& layer,
                const Kernels& kernels, const QueryTile& queries) {
  if (queries.kept_scores == nullptr) return;
  const ScoreWindows& windows = plan.batch.windows;
  const Place place = place_of(plan, task);
  // The later window first: whole vectors of the one before overwrite its beginning.
  add_window(plan, task, layer.scores, kernels, queries, place.window, std::min(place.offset + 1, windows.num_scored));
  if (place.in_overlap) {
    add_window(plan, task, layer.scores, kernels, queries, place.window - windows.stride, windows.num_scored);
  }
}

}  // namespace kvllm
