// The work of exchanges: a task for each KV head of each sequence.
#include "ops.h"

namespace kvllm {
namespace {

constexpr int64_t kThreadingScores = 20000;

void check_scores(const Tensor& scores, const char* name, const Tensor& like) {
  check_contiguous(scores, name, 4);
  check_dtype(scores, name, ScalarType::Float);
  for (int64_t dim = 0; dim < 3; ++dim) check_size(scores, name, dim, like.size(dim));
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> exchange_pairs(const Tensor& resident, const Tensor& dropped, const Tensor& upper,
                                                  const Tensor& movable, const std::optional<Tensor>& sinks,
                                                  int64_t most, double limit) {
  check_scores(resident, "resident", resident);
  check_scores(dropped, "dropped", resident);
  check_scores(upper, "upper", resident);
  check_contiguous(movable, "movable", 2);
  check_dtype(movable, "movable", ScalarType::Bool);
  const int64_t sequences = resident.size(0), kv_heads = resident.size(1), queries = resident.size(2);
  const int64_t residents = resident.size(3), dropped_pairs = dropped.size(3);
  check_size(upper, "upper", 3, dropped_pairs);
  check_size(movable, "movable", 0, sequences);
  check_size(movable, "movable", 1, residents);
  STD_TORCH_CHECK(most > 0, "most is ", most, ": at least one exchange");
  most = std::min({most, residents, dropped_pairs});
  int64_t group = queries;
  if (sinks) {
    check_contiguous(*sinks, "sinks", 1);
    group = sinks->size(0) / std::max<int64_t>(1, kv_heads);
    STD_TORCH_CHECK(group > 0 && sinks->size(0) == group * kv_heads && queries % group == 0, sinks->size(0),
                    " sinks for ", queries, " queries of each of ", kv_heads, " KV heads");
    check_sinks(sinks, group * kv_heads);
  }
  Tensor bounds = empty(aoti_torch_dtype_float32(), {sequences, kv_heads});
  Tensor counts = empty(aoti_torch_dtype_int32(), {sequences, kv_heads});
  Tensor pairs = empty(aoti_torch_dtype_int32(), {sequences, kv_heads, int64_t{2}, most});
  const auto work = [&](int64_t task) {
    const int64_t head = task % kv_heads;
    const ExchangeHead arguments{static_cast<float*>(resident.mutable_data_ptr()) + task * queries * residents,
                                 static_cast<float*>(dropped.mutable_data_ptr()) + task * queries * dropped_pairs,
                                 static_cast<float*>(upper.mutable_data_ptr()) + task * queries * dropped_pairs,
                                 static_cast<const bool*>(movable.data_ptr()) + task / kv_heads * residents,
                                 sinks ? sinks->const_data_ptr<float>() + head * group : nullptr,
                                 static_cast<int>(queries),
                                 static_cast<int>(group),
                                 static_cast<int>(residents),
                                 static_cast<int>(dropped_pairs),
                                 static_cast<int>(most),
                                 static_cast<float>(limit)};
    int32_t* found = static_cast<int32_t*>(pairs.mutable_data_ptr()) + task * 2 * most;
    int count;
    float* workspace = scratch(residents + dropped_pairs + 3 * queries);
    static_cast<float*>(bounds.mutable_data_ptr())[task] =
        kernel_set().float32.exchange(arguments, workspace, found, found + most, &count);
    static_cast<int32_t*>(counts.mutable_data_ptr())[task] = count;
  };
  const int64_t tasks = sequences * kv_heads;
  if (num_threads() > 1 && tasks * queries * (residents + dropped_pairs) >= kThreadingScores) {
    for_each_dynamic(tasks, work);
  } else {
    for (int64_t task = 0; task < tasks; ++task) work(task);
  }
  return {bounds, counts, pairs};
}

}  // namespace kvllm
