#include "cpu/monarch_linear_kernels.h"

namespace fastlayers {
const MonarchKernels monarch_baseline = {"baseline", monarch_lanes, monarch_forward, monarch_backward};
}  // namespace fastlayers
