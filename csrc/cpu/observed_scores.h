// Scores of KV pairs that are added up while queries pass by: attention keeps the scores of a query token, and what
// they give the KV pairs is added when it is done.
#pragma once

#include "attention.h"

namespace kvllm {

// Checks where scores begin against a batch, and the scores of a layer or of all: `[..., num_blocks, kv_heads,
// block_size]`. Returns the former.
const int32_t* check_observed(const std::optional<Tensor>& scores, const std::optional<Tensor>& scored_from,
                              const AttentionShape& shape, const AttentionBatch& batch);

// Floats that the kept scores of a task take, and one row more to add them in; 0 where none are kept.
int64_t kept_floats(const AttentionPlan& plan);

// Says in `tile` which scores of a task to keep in `memory`: those of the KV pairs that are scored, if its query token
// is the only one of its sequence.
void keep_scores(const AttentionPlan& plan, const AttentionTask& task, float* memory, QueryTile& tile);

// Adds to the scores of a layer what a task's kept scores give its KV pairs.
void add_scores(const AttentionPlan& plan, const AttentionTask& task, const AttentionLayer& layer,
                const Kernels& kernels, const QueryTile& queries);

}  // namespace kvllm
