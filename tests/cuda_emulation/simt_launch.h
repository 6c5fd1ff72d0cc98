// The host code of the CUDA ops over the SIMT machine: the same library, on CPU tensors.
#pragma once

#include "simt.h"

#define FASTLAYERS_DEVICE_KEY CPU

namespace fastlayers {

struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};

inline bool is_on_device(const Tensor& t) { return t.is_cpu(); }

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const Plan& plan, int32_t, const Arguments&... arguments) {
  const Dim3 grid{static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.row_blocks), 1};
  simt::launch(grid, kThreads, plan.shared_bytes, 2, [&] { kernel(arguments...); });
}

}  // namespace fastlayers
