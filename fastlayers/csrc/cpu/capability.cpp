#include <stdlib.h>
#include <string.h>

#include "cpu/linear_list.h"

namespace fastlayers {
namespace {

const LinearListKernels& choose() {
#if defined(__x86_64__)
  const char* asked = getenv("FASTLAYERS_CPU_CAPABILITY");
  auto allowed = [asked](const char* name, int level) {
    if (asked == nullptr) return true;
    const int most = !strcmp(asked, "baseline") ? 0 : !strcmp(asked, "avx2") ? 1 : 2;
    return level <= most || !strcmp(asked, name);
  };
  __builtin_cpu_init();
  if (allowed("avx512", 2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return linear_list_avx512;
  }
  if (allowed("avx2", 1) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return linear_list_avx2;
#endif
  return linear_list_baseline;
}

}  // namespace

const LinearListKernels& linear_list_kernels() {
  static const LinearListKernels& chosen = choose();
  return chosen;
}

}  // namespace fastlayers
