// Paged attention without tensors: a plan for the batch of a step, which all layers share, and its run on one layer.
#pragma once

#include <vector>

#include "ops.h"
#include "residual.h"

namespace kvllm {

struct AttentionShape {
  KVFormat format;
  int element_size;  // of queries; 4: float32, 2: bfloat16
  int query_heads;
  int kv_heads;
  int head_dim;
  int64_t num_blocks;
  int64_t block_size;

  int group() const { return query_heads / kv_heads; }
  // Elements of one head in one block, and bytes of an element. Those of codes are bytes.
  int64_t head_elements(VectorFormat of) const {
    return block_size * (of == VectorFormat::kPlain ? head_dim : stored_bytes(of, head_dim, element_size));
  }
  int64_t element_bytes(VectorFormat of) const { return of == VectorFormat::kPlain ? element_size : 1; }
};

// The caller's tables, which outlive the plan.
struct AttentionBatch {
  int64_t num_query_tokens;
  int64_t num_sequences;
  int64_t table_width;
  const int32_t* query_start_loc;        // [num_sequences + 1]
  const int32_t* last_kv_index;          // [num_query_tokens]
  const int32_t* block_tables;           // [num_sequences, table_width]
  const int32_t* packed_len;             // [num_sequences]; null: all heads hold the same KV pairs
  const int32_t* scored_from = nullptr;  // [num_sequences], the first KV pair that is scored; null beside packed_len
  int sliding_window = kNoWindow;  // KV pairs that a query token attends at most; neither beside packed_len nor scores
  Residual residual{};             // at most as long as a sliding window
};

struct AttentionLayer {
  const void* queries;   // [num_query_tokens, query_heads, head_dim]
  int64_t query_stride;  // elements from a query token to the next
  const void* keys;      // [num_blocks, kv_heads, block_size, width], as are the values
  const void* values;
  const int32_t* head_lengths;  // [num_sequences, kv_heads]; null exactly where packed_len is
  float* scores;                // [num_blocks, kv_heads, block_size]; null exactly where scored_from is
  void* outputs;                // [num_query_tokens, query_heads, head_dim]
  float scale;
  float soft_cap = 0;            // of scores; 0: they have none
  const float* sinks = nullptr;  // [query_heads], learned scores; null: there are none
  ResidualLayer residual{};      // where the batch has one
};

// Consecutive query tokens of one sequence, with the query heads of one KV head.
struct AttentionTask {
  int sequence;
  int kv_head;
  int first_token;
  int num_tokens;
  int num_pairs;  // where what its last token attends in the cache ends
  int begin;      // the tile in which what its first token attends begins
};

constexpr int kResidualPiece = -1;

// One segment of a task, or its residual, whose partial softmax is kept at `offset` until all of its task are merged.
struct AttentionPiece {
  int task;
  int begin;  // kResidualPiece: the residual, which comes last
  int64_t offset;
};

// Built once per step. Where heads hold different KV pairs, the tasks are those of the layer that ran last.
struct AttentionPlan {
  AttentionShape shape;
  AttentionBatch batch;
  ResidualPlan residual;
  std::vector<AttentionTask> tasks;
  std::vector<AttentionPiece> pieces;  // empty: tasks run whole
  std::vector<float> partials;
  std::vector<float> kept_scores;  // of each task that has pieces
  bool threaded = false;

  // Raises an error where the shape is not supported or the batch reaches beyond the cache.
  AttentionPlan(const AttentionShape& shape, const AttentionBatch& batch);
};

void run_attention(AttentionPlan& plan, const AttentionLayer& layer);

// The batch in tensors, after a check of their dtypes and sizes.
void check_attention_tables(const Tensor& query_start_loc, const Tensor& last_kv_index, const Tensor& block_tables,
                            const std::optional<Tensor>& packed_len, int64_t num_query_tokens);
AttentionBatch attention_batch(const Tensor& query_start_loc, const Tensor& last_kv_index, const Tensor& block_tables,
                               const std::optional<Tensor>& packed_len, int64_t num_query_tokens);

// `sliding_window` of a batch from a layer's window, 0 for none.
int sliding_window(int64_t window);

}  // namespace kvllm
