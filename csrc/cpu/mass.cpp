// The work of attention mass: it deals the queries out to tasks, and adds their sums in a fixed order.
#include <vector>

#include "ops.h"

namespace kvllm {
namespace {

// Queries of one KV head that one task sums. A constant: the order of addition must not depend on the number of
// threads.
constexpr int64_t kQueriesPerTask = 512;

}  // namespace

Tensor attention_mass(const Tensor& queries, const Tensor& keys, int64_t num_scored, double scale,
                      const std::optional<Tensor>& last_kv_index, bool squared, double soft_cap,
                      const std::optional<Tensor>& sinks) {
  const Kernels& kernels = kernels_for(queries, "queries");
  STD_TORCH_CHECK(queries.dim() == 4, "queries has ", queries.dim(), " dimensions, not 4");
  check_contiguous(keys, "keys", 4);
  check_dtype(keys, "keys", queries.scalar_type());
  const int64_t sequences = queries.size(0), query_heads = queries.size(1), num_tokens = queries.size(2);
  const int64_t head_dim = queries.size(3), kv_heads = keys.size(1);
  check_size(keys, "keys", 0, sequences);
  check_size(keys, "keys", 3, head_dim);
  STD_TORCH_CHECK(head_dim > 0 && head_dim % 2 == 0 && queries.stride(3) == 1, "head_dim is ", head_dim,
                  ": it must be even, and the channels of a query contiguous");
  STD_TORCH_CHECK(kv_heads > 0 && query_heads % kv_heads == 0, query_heads, " query heads over ", kv_heads,
                  " KV heads: a multiple is needed");
  STD_TORCH_CHECK(num_scored > 0 && num_scored <= keys.size(2), "num_scored is ", num_scored, " of ", keys.size(2),
                  " keys");
  if (last_kv_index) {
    check_contiguous(*last_kv_index, "last_kv_index", 1);
    check_dtype(*last_kv_index, "last_kv_index", ScalarType::Long);
    check_size(*last_kv_index, "last_kv_index", 0, num_tokens);
  }
  check_sinks(sinks, query_heads);
  const float* sink = sinks ? sinks->const_data_ptr<float>() : nullptr;
  const int64_t* index = last_kv_index ? static_cast<const int64_t*>(last_kv_index->data_ptr()) : nullptr;

  const int64_t group = query_heads / kv_heads, group_queries = group * num_tokens;
  const int64_t heads = sequences * kv_heads;
  const int64_t parts = std::max<int64_t>(1, (group_queries + kQueriesPerTask - 1) / kQueriesPerTask);
  const int64_t padded = (num_scored + kTilePairs - 1) / kTilePairs * kTilePairs;
  const int64_t element_size = queries.element_size();
  std::vector<float> partial(heads * parts * padded);
  const auto pointer = [&](int64_t head, int64_t query) {  // tokens of the first query head of a group, then the next
    const int64_t query_head = head % kv_heads * group + query / num_tokens;
    const int64_t offset =
        head / kv_heads * queries.stride(0) + query_head * queries.stride(1) + query % num_tokens * queries.stride(2);
    return static_cast<const void*>(static_cast<const char*>(queries.data_ptr()) + offset * element_size);
  };
  const auto attended = [&](int64_t query) {
    return static_cast<int>(index ? std::clamp<int64_t>(index[query % num_tokens] + 1, 1, num_scored) : num_scored);
  };
  for_each_dynamic(heads * parts, [&](int64_t task) {
    const int64_t head = task / parts, begin = task % parts * kQueriesPerTask;
    const int64_t end = std::min(group_queries, begin + kQueriesPerTask);
    const void* task_queries[kQueriesPerTask];
    int task_attended[kQueriesPerTask];
    float task_sinks[kQueriesPerTask];
    for (int64_t query = begin; query < end; ++query) {
      task_queries[query - begin] = pointer(head, query);
      task_attended[query - begin] = attended(query);
      if (sinks) task_sinks[query - begin] = sink[head % kv_heads * group + query / num_tokens];
    }
    // Not by the stride of a head: where there is one, that may be anything.
    const char* head_keys = static_cast<const char*>(keys.data_ptr()) + head * keys.size(2) * head_dim * element_size;
    kernels.attention_mass(task_queries, task_attended, static_cast<int>(end - begin), head_keys,
                           static_cast<int>(num_scored), static_cast<int>(head_dim), static_cast<float>(scale),
                           static_cast<float>(soft_cap), sinks ? task_sinks : nullptr, squared,
                           scratch(mass_workspace_floats(num_scored, head_dim)), partial.data() + task * padded);
  });

  Tensor out = empty(aoti_torch_dtype_float32(), {sequences, kv_heads, num_scored});
  float* mass = static_cast<float*>(out.mutable_data_ptr());
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t key = 0; key < num_scored; ++key) {
      float sum = 0;
      for (int64_t part = 0; part < parts; ++part) sum += partial[(head * parts + part) * padded + key];
      mass[head * num_scored + key] = sum;
    }
  }
  return out;
}

}  // namespace kvllm
