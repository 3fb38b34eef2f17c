#include "residual.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace kvllm {

ResidualPlan::ResidualPlan(const Residual& residual, const int32_t* query_start_loc, int64_t num_sequences,
                           int64_t vector_bytes)
    : residual_(residual), query_start_loc_(query_start_loc), vector_bytes_(vector_bytes) {
  int64_t rows = 0;
  for (int s = 0; s < num_sequences; ++s) {
    const int num_tokens = query_start_loc[s + 1] - query_start_loc[s], own = index(s, query_start_loc[s]);
    const int begin = std::max(0, own + 1 - residual.size), end = own + num_tokens;
    const int base = begin / kSegmentPairs * kSegmentPairs;
    const bool several = num_tokens > 1;
    sequences_.push_back({begin, end, base, static_cast<int64_t>(tables_.size()), several ? rows : -1});
    for (int pair = base; pair < end; ++pair) {  // those before the first one that is there name any row
      const int present = std::max(begin, pair);
      tables_.push_back(static_cast<int32_t>(several ? rows + present - begin : slot_row(s, present)));
    }
    if (several) rows += end - begin;
  }
  keys_.resize(rows * vector_bytes);
  values_.resize(rows * vector_bytes);
}

void ResidualPlan::begin_layer(const ResidualLayer& layer) {
  const auto write = [&](int s, const char* slots, std::vector<char>& several, const char* news, int64_t stride) {
    const ResidualSequence& sequence = sequences_[s];
    const int64_t token = query_start_loc_[s];
    const int own = index(s, token);
    for (int pair = sequence.first_row < 0 ? own : sequence.begin; pair < sequence.end; ++pair) {
      const char* from = pair < own ? slots + slot_row(s, pair) * vector_bytes_ : news + (token + pair - own) * stride;
      char* to = sequence.first_row < 0 ? const_cast<char*>(slots) + slot_row(s, pair) * vector_bytes_
                                        : several.data() + (sequence.first_row + pair - sequence.begin) * vector_bytes_;
      std::memcpy(to, from, vector_bytes_);
    }
  };
  for (int s = 0; s < static_cast<int>(sequences_.size()); ++s) {
    write(s, layer.keys, keys_, layer.new_keys, layer.key_stride);
    write(s, layer.values, values_, layer.new_values, layer.value_stride);
  }
}

void ResidualPlan::end_layer(const ResidualLayer& layer) const {
  for (int s = 0; s < static_cast<int>(sequences_.size()); ++s) {
    const ResidualSequence& sequence = sequences_[s];
    if (sequence.first_row < 0) continue;
    for (int pair = std::max(sequence.begin, sequence.end - residual_.size); pair < sequence.end; ++pair) {
      const int64_t from = (sequence.first_row + pair - sequence.begin) * vector_bytes_;
      const int64_t to = slot_row(s, pair) * vector_bytes_;
      std::memcpy(layer.keys + to, keys_.data() + from, vector_bytes_);
      std::memcpy(layer.values + to, values_.data() + from, vector_bytes_);
    }
  }
}

int ResidualPlan::held(int sequence, int64_t token) const {
  return residual_.size == 0 ? 0 : std::min(residual_.size, index(sequence, token) + 1);
}

Residual residual_tables(const Tensor& kv_residual, const Tensor& positions, const Tensor& slots, const Tensor& first,
                         int64_t num_query_tokens, int64_t num_sequences, int64_t kv_heads, int64_t head_dim,
                         ScalarType dtype) {
  const int64_t dims = kv_residual.dim();
  STD_TORCH_CHECK(dims >= 5, "kv_residual has ", dims, " dimensions, at least 5 are needed");
  check_contiguous(kv_residual, "kv_residual", dims);
  check_dtype(kv_residual, "kv_residual", dtype);
  check_size(kv_residual, "kv_residual", dims - 5, 2);
  check_size(kv_residual, "kv_residual", dims - 2, kv_heads);
  check_size(kv_residual, "kv_residual", dims - 1, head_dim);
  const int64_t num_slots = kv_residual.size(dims - 4), size = kv_residual.size(dims - 3);
  STD_TORCH_CHECK(size > 0 && num_slots * size < INT32_MAX, "kv_residual has ", num_slots, " slots of ", size,
                  " KV pairs");
  check_contiguous(positions, "positions", 1);
  check_dtype(positions, "positions", ScalarType::Long);
  check_size(positions, "positions", 0, num_query_tokens);
  for (const auto& [tensor, name] : {std::pair{&slots, "residual_slots"}, {&first, "residual_first"}}) {
    check_contiguous(*tensor, name, 1);
    check_dtype(*tensor, name, ScalarType::Int);
    check_size(*tensor, name, 0, num_sequences);
  }
  const Residual residual{static_cast<int>(size), positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int32_t>(),
                          first.const_data_ptr<int32_t>()};
  for (int64_t s = 0; s < num_sequences; ++s) {
    STD_TORCH_CHECK(residual.slots[s] >= 0 && residual.slots[s] < num_slots, "slot ", residual.slots[s],
                    " of sequence ", s, " is none of ", num_slots);
  }
  return residual;
}

ResidualLayer residual_layer(const Tensor& kv_residual, const Tensor& new_keys, const Tensor& new_values,
                             int64_t num_query_tokens) {
  check_contiguous(kv_residual, "kv_residual", 5);
  for (const auto& [tensor, name] : {std::pair{&new_keys, "new_keys"}, {&new_values, "new_values"}}) {
    check_heads(*tensor, name);
    check_dtype(*tensor, name, kv_residual.scalar_type());
    check_size(*tensor, name, 0, num_query_tokens);
    check_size(*tensor, name, 1, kv_residual.size(3));
    check_size(*tensor, name, 2, kv_residual.size(4));
  }
  const int64_t element = kv_residual.element_size();
  char* keys = static_cast<char*>(kv_residual.mutable_data_ptr());
  return {keys,
          keys + kv_residual.stride(0) * element,
          static_cast<const char*>(new_keys.data_ptr()),
          static_cast<const char*>(new_values.data_ptr()),
          new_keys.stride(0) * element,
          new_values.stride(0) * element};
}

}  // namespace kvllm
