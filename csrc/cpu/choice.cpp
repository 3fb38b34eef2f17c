// The work of choices from scores: rows, which are shared out.
#include "ops.h"

namespace kvllm {
namespace {

// Times that a choice passes over its row, about.
constexpr int64_t kPasses = 16;

}  // namespace

Tensor choose_chunks(const Tensor& scores, int64_t total, int64_t chunk_budget, int64_t max_chunk) {
  const int64_t dims = scores.dim();
  STD_TORCH_CHECK(dims > 0, "scores has no dimension");
  check_contiguous(scores, "scores", dims);
  check_dtype(scores, "scores", ScalarType::Float);
  STD_TORCH_CHECK(total >= 0 && chunk_budget >= 0 && max_chunk >= 3, "total is ", total, ", chunk_budget ",
                  chunk_budget, ", max_chunk ", max_chunk, ": at least 0, 0 and 3");
  const int64_t count = scores.size(dims - 1), rows = count > 0 ? scores.numel() / count : 0;
  total = std::min(total, count);
  std::vector<int64_t> sizes(dims, total), strides(dims, 1);
  for (int64_t dim = dims - 1; dim-- > 0;) {
    sizes[dim] = scores.size(dim);
    strides[dim] = strides[dim + 1] * sizes[dim + 1];
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes.data(), strides.data(), aoti_torch_dtype_int64(),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  Tensor kept(handle);
  const int64_t candidates = total - chunk_budget;
  const bool chunks = total < count && candidates >= 2;
  const ChunkBudget budget{static_cast<int>(total), static_cast<int>(candidates),
                           chunks ? static_cast<int>(chunk_budget / (max_chunk - 2)) : 0,
                           static_cast<int>(std::min(max_chunk, count))};
  const float* from = scores.const_data_ptr<float>();
  int64_t* to = kept.mutable_data_ptr<int64_t>();
  for_rows(rows, kPasses * count, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> workspace(choice_workspace(count));
    for (int64_t row = begin; row < end; ++row) {
      kernel_set().float32.choose(from + row * count, static_cast<int>(count), budget, workspace.data(),
                                  to + row * total);
    }
  });
  return kept;
}

}  // namespace kvllm
