// The largest number of each row.
#include <cmath>

#include "ops.h"

namespace kvllm {

Tensor most_likely(const Tensor& logits) {
  const Kernels& kernels = kernels_for(logits, "logits");
  STD_TORCH_CHECK(logits.dim() == 2, "logits has ", logits.dim(), " dimensions, not 2");
  const int64_t rows = logits.size(0), width = logits.size(1);
  STD_TORCH_CHECK(width > 0 && (width == 1 || logits.stride(1) == 1), "the rows of logits are not contiguous");
  const char* first = static_cast<const char*>(logits.data_ptr());
  const int64_t row_bytes = logits.stride(0) * logits.element_size();
  const int64_t spans = (width + kGrainElements - 1) / kGrainElements;
  std::vector<Largest> found(rows * spans);
  for_each_dynamic(rows * spans, [&](int64_t i) {
    const int64_t begin = i % spans * kGrainElements;
    found[i] = kernels.largest(first + i / spans * row_bytes, begin, std::min(begin + kGrainElements, width));
  });
  Tensor tokens = empty(aoti_torch_dtype_int64(), {rows});
  for (int64_t row = 0; row < rows; ++row) {
    Largest most = found[row * spans];
    for (int64_t i = row * spans + 1; i < (row + 1) * spans; ++i) {
      if (!(found[i].number <= most.number) && !std::isnan(most.number)) most = found[i];
    }
    tokens.mutable_data_ptr<int64_t>()[row] = std::isfinite(most.number) ? most.index : -1;
  }
  return tokens;
}

}  // namespace kvllm
