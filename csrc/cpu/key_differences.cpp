// The work of key differences: the keys of one head of a window are one part.
#include "ops.h"

namespace kvllm {

Tensor key_differences(const Tensor& keys) {
  const Kernels& kernels = kernels_for(keys, "keys");
  check_contiguous(keys, "keys", 4);
  const int64_t windows = keys.size(0), heads = keys.size(1), num_keys = keys.size(2), head_dim = keys.size(3);
  Tensor differences = empty(aoti_torch_dtype_float32(), {windows, heads, num_keys});
  const char* from = static_cast<const char*>(keys.data_ptr());
  float* to = differences.mutable_data_ptr<float>();
  for_rows(windows * heads, num_keys * head_dim, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      kernels.key_differences(from + head * num_keys * head_dim * kernels.element_size, static_cast<int>(num_keys),
                              static_cast<int>(head_dim), scratch(head_dim), to + head * num_keys);
    }
  });
  return differences;
}

}  // namespace kvllm
