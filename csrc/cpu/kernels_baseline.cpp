#include "kernel_set.h"

namespace kvllm {

const KernelSet kBaselineKernels = kKernels;

}  // namespace kvllm
