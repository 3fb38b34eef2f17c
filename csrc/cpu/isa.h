// The kernels for this processor.
#pragma once

#include <string>

#include "kernels.h"

namespace kvllm {

// The best set that the processor runs, at most the one named by the environment variable KVLLM_CPU_ISA, which is read
// once. Levels are baseline, avx2, avx512, avx512_vnni, avx512_bf16 and amx; on Arm baseline and arm_bf16.
const KernelSet& kernel_set();
std::string cpu_isa();

}  // namespace kvllm
