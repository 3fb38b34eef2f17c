#include "attention_kernel.h"
#include "elementwise_kernel.h"
#include "mass_kernel.h"
#include "product_kernel.h"

namespace kvllm {

const KernelSet kBaselineKernels = {
    {attend<float, ChannelProduct<float>>, merge, finish<float>, attention_mass<float, ChannelProduct<float>>,
     rms_norm<float>, add_rms_norm<float>, silu_mul<float>, rotary<float>, product<float, FloatProduct<float>>,
     product<float, IntegerProduct<8>>, product<float, IntegerProduct<4>>, widen<float>, false},
    {attend<BFloat16, BFloat16Product>, merge, finish<BFloat16>, attention_mass<BFloat16, BFloat16Product>,
     rms_norm<BFloat16>, add_rms_norm<BFloat16>, silu_mul<BFloat16>, rotary<BFloat16>,
     product<BFloat16, FloatProduct<BFloat16>>, product<BFloat16, IntegerProduct<8>>,
     product<BFloat16, IntegerProduct<4>>, widen<BFloat16>, false},
};

}  // namespace kvllm
