#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own headers
#pragma GCC diagnostic ignored "-Wuninitialized"
#define KVLLM_AVX512
#define KVLLM_AVX512_VNNI
#define KVLLM_AVX512_BF16

#include "kernel_set.h"

namespace kvllm {

const KernelSet kAvx512Bf16Kernels = kKernels;

}  // namespace kvllm

#endif
