// How host code reaches the device: where tensors must lie, the device guard, and the launch of a kernel.
//
// Like device.cuh it has a second form: under a plain C++ compiler the tests' `simt_launch.h` runs the same
// host code on CPU tensors.
#pragma once

#include "checks.h"
#include "linear_list_plan.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>

#include <limits>

#define FASTLAYERS_DEVICE_KEY CUDA

namespace fastlayers {

using torch::stable::accelerator::DeviceGuard;

inline bool is_on_device(const Tensor& t) { return t.is_cuda(); }

// Launch on the current stream of `device`, without waiting, and check that the launch was accepted.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const Plan& plan, int32_t device, const Arguments&... arguments) {
  STD_TORCH_CHECK(plan.blocks <= std::numeric_limits<int32_t>::max(),
                  "linear_list: more linears than a grid holds");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.row_blocks));
  kernel<<<grid, kThreads, plan.shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace fastlayers
#else
#include "simt_launch.h"
#endif
