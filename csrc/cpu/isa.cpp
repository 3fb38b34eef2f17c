#include "isa.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace kvllm {
namespace {

struct Level {
  std::string name;
  const KernelSet* kernels;
};

// In ascending order; each level includes the ones before it.
std::vector<Level> supported_levels() {
  std::vector<Level> levels{{"baseline", &kBaselineKernels}};
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return levels;
  levels.push_back({"avx2", &kAvx2Kernels});
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return levels;
  }
  levels.push_back({"avx512", &kAvx512Kernels});
  if (!__builtin_cpu_supports("avx512vnni")) return levels;
  levels.push_back({"avx512_vnni", &kAvx512VnniKernels});
  if (!__builtin_cpu_supports("avx512bf16")) return levels;
  levels.push_back({"avx512_bf16", &kAvx512Bf16Kernels});
#endif
  return levels;
}

Level choose_level() {
  const std::vector<Level> levels = supported_levels();
  const char* cap = std::getenv("KVLLM_CPU_ISA");
  if (cap == nullptr || *cap == '\0') return levels.back();
  const std::vector<std::string> names{"baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16"};
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == cap) return levels[std::min(i, levels.size() - 1)];
  }
  STD_TORCH_CHECK(false, "KVLLM_CPU_ISA is '", cap, "': use baseline, avx2, avx512, avx512_vnni or avx512_bf16");
}

const Level& level() {
  static const Level chosen = choose_level();
  return chosen;
}

}  // namespace

const KernelSet& kernel_set() { return *level().kernels; }

std::string cpu_isa() { return level().name; }

}  // namespace kvllm
