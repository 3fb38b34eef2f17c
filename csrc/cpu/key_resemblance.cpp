// The work of key resemblance: the keys of one head are one part.
#include "ops.h"

namespace kvllm {

Tensor key_resemblance(const Tensor& keys, double threshold, bool spare_first) {
  const Kernels& kernels = kernels_for(keys, "keys");
  check_contiguous(keys, "keys", 3);
  const int64_t heads = keys.size(0), num_keys = keys.size(1), head_dim = keys.size(2);
  Tensor sums = empty(aoti_torch_dtype_float32(), {heads, num_keys});
  const char* from = static_cast<const char*>(keys.data_ptr());
  float* to = sums.mutable_data_ptr<float>();
  for_rows(heads, num_keys * num_keys, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      kernels.key_resemblance(from + head * num_keys * head_dim * kernels.element_size, static_cast<int>(num_keys),
                              static_cast<int>(head_dim), static_cast<float>(threshold), spare_first,
                              scratch(resemblance_workspace_floats(num_keys, head_dim)), to + head * num_keys);
    }
  });
  return sums;
}

}  // namespace kvllm
