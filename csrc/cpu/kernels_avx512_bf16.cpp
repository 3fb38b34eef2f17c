#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own headers
#define KVLLM_AVX512
#define KVLLM_AVX512_BF16

#include "attention_kernel.h"
#include "elementwise_kernel.h"
#include "mass_kernel.h"
#include "product_kernel.h"

namespace kvllm {

const KernelSet kAvx512Bf16Kernels = {
    {attend<float, ChannelProduct<float>>, merge, finish<float>, attention_mass<float, ChannelProduct<float>>,
     rms_norm<float>, add_rms_norm<float>, silu_mul<float>, rotary<float>, product<float, FloatProduct<float>>,
     product<float, IntegerProduct<8>>, product<float, IntegerProduct<4>>, widen<float>, false},
    {attend<BFloat16, BFloat16Product>, merge, finish<BFloat16>, attention_mass<BFloat16, BFloat16Product>,
     rms_norm<BFloat16>, add_rms_norm<BFloat16>, silu_mul<BFloat16>, rotary<BFloat16>, product<BFloat16, PairsProduct>,
     product<BFloat16, IntegerProduct<8>>, product<BFloat16, IntegerProduct<4>>, widen<BFloat16>, true},
};

}  // namespace kvllm

#endif
