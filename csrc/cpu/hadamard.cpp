// The work of a rotation by a Hadamard matrix: some of the vectors are one part.
#include "ops.h"

namespace kvllm {

Tensor hadamard(const Tensor& vectors) {
  const Kernels& kernels = kernels_for(vectors, "vectors");
  check_contiguous(vectors, "vectors", 2);
  const int64_t count = vectors.size(0), size = vectors.size(1);
  STD_TORCH_CHECK(size % kCodeChannels == 0 && size <= kMaxCodeChannels && (size & (size - 1)) == 0, "vectors have ",
                  size, " channels, not a power of two from ", kCodeChannels, " to ", kMaxCodeChannels);
  Tensor rotated = empty(aoti_torch_dtype_float32(), {count, size});
  const char* from = static_cast<const char*>(vectors.data_ptr());
  float* to = rotated.mutable_data_ptr<float>();
  for_rows(count, size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.rotate(from + i * size * kernels.element_size, static_cast<int>(size), to + i * size);
    }
  });
  return rotated;
}

}  // namespace kvllm
