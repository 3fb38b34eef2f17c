// The last KV pairs of each sequence as they were before they became codes, beside a cache that has the codes of all
// (docs/kv-cache-dtypes.md, "A residual of recent tokens").
#pragma once

#include <vector>

#include "ops.h"

namespace kvllm {

// The caller's tables, which outlive a plan. Pairs of a sequence are held from position `first` on, the last `size` of
// them: that of position p in row p % size of the sequence's slot.
struct Residual {
  int size = 0;                        // KV pairs that a query token attends as they were, its own among them; 0: none
  const int64_t* positions = nullptr;  // [num_query_tokens], consecutive within a sequence
  const int32_t* slots = nullptr;      // [num_sequences]
  const int32_t* first = nullptr;      // [num_sequences]
};

// Rows of one layer, `[slots, size, kv_heads, head_dim]`, and the KV pairs of the step's tokens, `[kv_heads, head_dim]`
// each, which are strides of bytes apart.
struct ResidualLayer {
  char* keys = nullptr;
  char* values = nullptr;
  const char* new_keys = nullptr;
  const char* new_values = nullptr;
  int64_t key_stride = 0;
  int64_t value_stride = 0;
};

// Where a sequence's pairs are in one layer. Those of a sequence with one query token are in its slot. Those of several
// lie in a row of their own while the layer is computed, since the last ones take the rows of the first.
//
// Pairs are counted from the sequence's `first`, so that tiles and segments of a query token begin at the same pairs
// whatever is computed with it.
struct ResidualSequence {
  int begin;          // the first pair that is there
  int end;            // after the last one
  int base;           // of the table: pair i is in row table[i - base]
  int64_t table;      // where it begins in ResidualPlan::tables
  int64_t first_row;  // of several, in the memory of the plan; below 0: in the slot
};

class ResidualPlan {
 public:
  ResidualPlan() = default;
  // vector_bytes: of the keys of one token, as of the values.
  ResidualPlan(const Residual& residual, const int32_t* query_start_loc, int64_t num_sequences, int64_t vector_bytes);

  // Writes the step's pairs where its query tokens find them, before a layer's attention; and after it, those of
  // sequences with several query tokens to their slots.
  void begin_layer(const ResidualLayer& layer);
  void end_layer(const ResidualLayer& layer) const;

  // KV pairs that a query token attends as they were.
  int held(int sequence, int64_t token) const;
  // Its own pair.
  int index(int sequence, int64_t token) const {
    return static_cast<int>(residual_.positions[token]) - residual_.first[sequence];
  }

  const ResidualSequence& operator[](int sequence) const { return sequences_[sequence]; }
  const int32_t* table(int sequence) const { return tables_.data() + sequences_[sequence].table; }
  const char* keys(const ResidualLayer& layer, int sequence) const { return rows(layer.keys, keys_, sequence); }
  const char* values(const ResidualLayer& layer, int sequence) const { return rows(layer.values, values_, sequence); }

 private:
  const char* rows(const char* slots, const std::vector<char>& several, int sequence) const {
    return sequences_[sequence].first_row < 0 ? slots : several.data();
  }
  int64_t slot_row(int sequence, int pair) const {
    return static_cast<int64_t>(residual_.slots[sequence]) * residual_.size +
           (residual_.first[sequence] + pair) % residual_.size;
  }

  Residual residual_;
  const int32_t* query_start_loc_ = nullptr;
  int64_t vector_bytes_ = 0;
  std::vector<ResidualSequence> sequences_;
  std::vector<int32_t> tables_;
  std::vector<char> keys_, values_;
};

// The tables in tensors, after a check of dtypes and sizes. kv_residual: `[..., 2, slots, size, kv_heads, head_dim]`.
Residual residual_tables(const Tensor& kv_residual, const Tensor& positions, const Tensor& slots, const Tensor& first,
                         int64_t num_query_tokens, int64_t num_sequences, int64_t kv_heads, int64_t head_dim,
                         ScalarType dtype);
// A layer's rows, `[2, slots, size, kv_heads, head_dim]`, and its new keys and values, `[T, kv_heads, head_dim]`.
ResidualLayer residual_layer(const Tensor& kv_residual, const Tensor& new_keys, const Tensor& new_values,
                             int64_t num_query_tokens);

}  // namespace kvllm
