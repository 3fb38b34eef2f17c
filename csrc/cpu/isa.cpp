#include "isa.h"

#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string_view>
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvllm {
namespace {

struct Level {
  const char* name;
  bool (*supported)();
  KernelSet (*kernels)();
};

// In ascending order; each level includes the ones before it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#if !defined(KVLLM_UP_TO_AVX2)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return __builtin_cpu_supports("avx512bf16"); }
bool has_amx() {
#if defined(__linux__)  // which gives the tiles to a process that asks for them, and to all of its threads
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("amx-int8") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

constexpr Level kLevels[] = {
    {"baseline", nullptr, [] { return kBaselineKernels; }},
    {"avx2", has_avx2, [] { return kAvx2Kernels; }},
#if !defined(KVLLM_UP_TO_AVX2)
    {"avx512", has_avx512, [] { return kAvx512Kernels; }},
    {"avx512_vnni", has_avx512_vnni, [] { return kAvx512VnniKernels; }},
    {"avx512_bf16", has_avx512_bf16, [] { return kAvx512Bf16Kernels; }},
    {"amx", has_amx, make_amx_kernels},
#endif
};

#elif defined(__aarch64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)

bool has_arm_bf16() {
  constexpr unsigned long kBf16 = 1 << 14;
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
}

constexpr Level kLevels[] = {
    {"baseline", nullptr, [] { return kBaselineKernels; }},
    {"arm_bf16", has_arm_bf16, make_arm_bf16_kernels},
};

#else

constexpr Level kLevels[] = {{"baseline", nullptr, [] { return kBaselineKernels; }}};

#endif

// The number of levels that KVLLM_CPU_ISA allows.
size_t allowed_levels() {
  const char* cap = std::getenv("KVLLM_CPU_ISA");
  if (cap == nullptr || *cap == '\0') return std::size(kLevels);
  std::string names;
  for (size_t i = 0; i < std::size(kLevels); ++i) {
    if (std::string_view(cap) == kLevels[i].name) return i + 1;
    names += i == 0 ? "" : i + 1 < std::size(kLevels) ? ", " : " or ";
    names += kLevels[i].name;
  }
  throw std::runtime_error("KVLLM_CPU_ISA is '" + std::string(cap) + "': use " + names);
}

struct Chosen {
  std::string name;
  KernelSet kernels;
};

// A level beyond those allowed is not asked for: permission for tiles makes every signal's frame larger.
const Chosen& chosen() {
  static const Chosen level = [] {
    const size_t allowed = allowed_levels();
    size_t best = 0;
    while (best + 1 < allowed && kLevels[best + 1].supported()) ++best;
    return Chosen{kLevels[best].name, kLevels[best].kernels()};
  }();
  return level;
}

}  // namespace

const KernelSet& kernel_set() { return chosen().kernels; }

std::string cpu_isa() { return chosen().name; }

}  // namespace kvllm
