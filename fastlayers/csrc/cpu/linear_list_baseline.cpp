#include "cpu/linear_list_kernels.h"

namespace fastlayers {
const LinearListKernels linear_list_baseline = {"baseline", forward_any, backward_input_any,
                                                backward_weight_any};
}  // namespace fastlayers
