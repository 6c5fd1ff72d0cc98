// Registers the CPU kernels; the ops themselves are defined in fastlayers/ops.py.
#include "cpu/linear_list_cpu.h"
#include "cpu/monarch_linear_cpu.h"

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CPU, m) {
  m.impl("linear_list", TORCH_BOX(&fastlayers::linear_list_cpu));
  m.impl("linear_list_backward", TORCH_BOX(&fastlayers::linear_list_backward_cpu));
  m.impl("monarch_linear", TORCH_BOX(&fastlayers::monarch_linear_cpu));
  m.impl("monarch_linear_backward", TORCH_BOX(&fastlayers::monarch_linear_backward_cpu));
}
