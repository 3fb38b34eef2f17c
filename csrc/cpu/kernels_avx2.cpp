#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")
#define KVLLM_AVX2

#include "kernel_set.h"

namespace kvllm {

const KernelSet kAvx2Kernels = kKernels;

}  // namespace kvllm

#endif
