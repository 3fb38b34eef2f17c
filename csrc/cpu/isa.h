// The kernels for this processor.
#pragma once

#include <string>

#include "kernels.h"

namespace kvllm {

// The best set that the processor runs, at most the one named by the environment variable KVLLM_CPU_ISA (baseline,
// avx2, avx512, avx512_vnni or avx512_bf16), which is read once.
const KernelSet& kernel_set();
std::string cpu_isa();

}  // namespace kvllm
