#include "cpu/monarch_linear_kernels.h"

namespace fastlayers {
const MonarchKernels monarch_avx2 = {"avx2", monarch_lanes, monarch_forward, monarch_backward};
}  // namespace fastlayers
