// The CUDA operators: checks of what the host can see, and one launch each. Ids lie on the device, so their values are
// not checked.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels.cuh"

// Weak: a libtorch without CUDA has no such symbol, and this library loads all the same.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace kvllm {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kVectorBytes = sizeof(uint4);
constexpr int kThreads = 128;

void check(cudaError_t error) { STD_TORCH_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error)); }

void check_tensor(const Tensor& tensor, const char* name, int64_t dim) {
  STD_TORCH_CHECK(tensor.dim() == dim, name, " has ", tensor.dim(), " dimensions, not ", dim);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " is not contiguous");
}

void check_size(const Tensor& tensor, const char* name, int64_t dim, int64_t size) {
  STD_TORCH_CHECK(tensor.size(dim) == size, "dimension ", dim, " of ", name, " is ", tensor.size(dim), ", not ", size);
}

const int64_t* ids(const Tensor& tensor, const char* name, int64_t dim, const Tensor& like) {
  check_tensor(tensor, name, dim);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long, name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), ", not Long");
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), name,
                  " is not on the device of the cache");
  return static_cast<const int64_t*>(tensor.data_ptr());
}

Layout layout_of(const Tensor& cache, const char* name) {
  check_tensor(cache, name, 6);
  const int64_t key_bytes = cache.size(5) * cache.element_size();
  STD_TORCH_CHECK(key_bytes > 0 && key_bytes % kVectorBytes == 0, "keys of ", name, " have ", key_bytes,
                  " bytes: a multiple of ", kVectorBytes, " is needed");
  return {cache.size(2), static_cast<int>(cache.size(3)), static_cast<int>(cache.size(4)),
          static_cast<int>(key_bytes / kVectorBytes)};
}

uint4* vectors_of(const Tensor& cache, const char* name) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(cache.data_ptr()) % kVectorBytes == 0, name,
                  " does not begin at a multiple of ", kVectorBytes, " bytes");
  return static_cast<uint4*>(cache.data_ptr());
}

// Makes the device of a tensor current for its scope.
struct Launch {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit Launch(const Tensor& tensor) : guard(tensor.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this libtorch has no CUDA");
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
};

void copy_blocks(const Tensor& cache, const Tensor& sources, const Tensor& destinations) {
  const Layout layout = layout_of(cache, "cache");
  const int64_t* source_ids = ids(sources, "sources", 1, cache);
  const int64_t* target_ids = ids(destinations, "destinations", 1, cache);
  const int64_t copies = sources.size(0), planes = cache.size(0) * cache.size(1);
  check_size(destinations, "destinations", 0, copies);
  STD_TORCH_CHECK(copies < 65536 && planes < 65536, copies, " blocks of ", planes,
                  " planes are too many for one launch");
  if (copies == 0) return;
  const int64_t part = kThreads * kInFlight, parts = (block_vectors(layout) + part - 1) / part;
  const Launch launch(cache);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(copies), static_cast<unsigned>(planes));
  copy_blocks_kernel<<<grid, kThreads, 0, launch.stream>>>(vectors_of(cache, "cache"), layout, source_ids, target_ids);
  check(cudaGetLastError());
}

void compact(const Tensor& cache, const Tensor& kept, const Tensor& sources, const Tensor& destinations) {
  const Layout layout = layout_of(cache, "cache");
  check_size(cache, "cache", 1, 2);
  const int64_t layers = cache.size(0), sequences = kept.size(1);
  const Compaction event{ids(kept, "kept", 4, cache),
                         ids(sources, "sources", 2, cache),
                         ids(destinations, "destinations", 2, cache),
                         static_cast<int>(sequences),
                         static_cast<int>(kept.size(3)),
                         static_cast<int>(sources.size(1)),
                         static_cast<int>(destinations.size(1))};
  check_size(kept, "kept", 0, layers);
  check_size(kept, "kept", 2, layout.heads);
  check_size(sources, "sources", 0, sequences);
  check_size(destinations, "destinations", 0, sequences);
  STD_TORCH_CHECK(layout.vectors_per_key <= kThreads && 2 * layers < 65536 &&
                      plane_vectors(layout) <= std::numeric_limits<int>::max(),
                  "the cache is too large: a key may have ", kThreads * kVectorBytes, " bytes, the keys of a layer ",
                  std::numeric_limits<int>::max(), " vectors of ", kVectorBytes);
  const int num_tiles = event.sequences * tiles_of(layout, event, kThreads);
  if (num_tiles == 0 || cache.numel() == 0) return;
  const Launch launch(cache);
  const dim3 grid(static_cast<unsigned>(layout.heads), static_cast<unsigned>(2 * layers));
  compact_kernel<<<grid, kThreads, 0, launch.stream>>>(vectors_of(cache, "cache"), layout, event, num_tiles);
  check(cudaGetLastError());
}

void compact_mass(const Tensor& mass, const Tensor& kept, const Tensor& counts, const Tensor& table_slots,
                  const Tensor& starts, const Tensor& ends, const Tensor& lengths) {
  check_tensor(mass, "mass", 4);
  STD_TORCH_CHECK(mass.scalar_type() == ScalarType::Float, "mass has dtype ",
                  torch::headeronly::toString(mass.scalar_type()), ", not Float");
  const MassCompaction event{
      ids(kept, "kept", 4, mass),     ids(counts, "counts", 1, mass), ids(table_slots, "table_slots", 1, mass),
      ids(starts, "starts", 1, mass), ids(ends, "ends", 1, mass),     ids(lengths, "lengths", 1, mass),
      static_cast<int>(kept.size(3))};
  const int64_t layers = mass.size(0), heads = mass.size(2), sequences = kept.size(1);
  check_size(kept, "kept", 0, layers);
  check_size(kept, "kept", 2, heads);
  for (const Tensor* tensor : {&counts, &table_slots, &starts, &ends, &lengths}) {
    check_size(*tensor, "an argument", 0, sequences);
  }
  STD_TORCH_CHECK(sequences < 65536 && layers < 65536, sequences, " sequences and ", layers,
                  " layers are too many for one launch");
  if (mass.numel() == 0 || sequences == 0) return;
  const Launch launch(mass);
  const dim3 grid(static_cast<unsigned>(heads), static_cast<unsigned>(sequences), static_cast<unsigned>(layers));
  compact_mass_kernel<<<grid, kThreads, 0, launch.stream>>>(
      static_cast<float*>(mass.data_ptr()), static_cast<int>(mass.size(1)), static_cast<int>(mass.size(3)), event);
  check(cudaGetLastError());
}

}  // namespace
}  // namespace kvllm

// `copy_blocks` and `compact` are defined with the CPU operators.
STABLE_TORCH_LIBRARY_FRAGMENT(kvllm, m) {
  m.def(
      "compact_mass(Tensor(a!) mass, Tensor kept, Tensor counts, Tensor table_slots, Tensor starts, Tensor ends, "
      "Tensor lengths) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kvllm, CUDA, m) {
  m.impl("copy_blocks", TORCH_BOX(&kvllm::copy_blocks));
  m.impl("compact", TORCH_BOX(&kvllm::compact));
  m.impl("compact_mass", TORCH_BOX(&kvllm::compact_mass));
}
