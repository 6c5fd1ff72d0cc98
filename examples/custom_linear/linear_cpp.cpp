// Rung 3: forward and backward in C++, bound with pybind11; first on ATen's matmul, then on our own loops.
#include <torch/extension.h>

#include <iostream>
#include <vector>

#include "linear_loops.h"

namespace {

// doc: hello
void hello() { std::cout << "Hello World!" << std::endl; }

// doc: aten
torch::Tensor forward(torch::Tensor i_input, torch::Tensor i_weight) {
  return at::matmul(i_input, i_weight.t());
}

std::vector<torch::Tensor> backward(torch::Tensor i_grad, torch::Tensor i_input, torch::Tensor i_weights) {
  return {at::matmul(i_grad, i_weights), at::matmul(i_grad.t(), i_input)};
}

// doc: checks
// What a pointer cannot know: read wrongly, it gives wrong numbers or another's memory, and says nothing.
void check_matrix(const char* where, const char* name, const torch::Tensor& t, const torch::Tensor& like) {
  TORCH_CHECK_VALUE(t.dim() == 2, where, ": ", name, " must have 2 dimensions, got shape ", t.sizes());
  TORCH_CHECK_VALUE(t.device().is_cpu(), where, ": ", name, " must be on the CPU, got ", t.device());
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble, where, ": ", name,
                   " must be Float or Double, got ", t.scalar_type());
  TORCH_CHECK_TYPE(t.scalar_type() == like.scalar_type(), where, ": ", name, " must have i_input's dtype ",
                   like.scalar_type(), ", got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.is_contiguous(), where, ": ", name, " must be contiguous, got strides ", t.strides(),
                    " for shape ", t.sizes(), "; call .contiguous() first");
}

void check_size(const char* where, const char* name, const torch::Tensor& t, int64_t dim, int64_t size) {
  TORCH_CHECK_VALUE(t.size(dim) == size, where, ": ", name, " must have size ", size, " in dimension ", dim,
                    " to match the others, got shape ", t.sizes());
}

// doc: own
torch::Tensor forward_loops(torch::Tensor i_input, torch::Tensor i_weight) {
  check_matrix("forward_loops", "i_input", i_input, i_input);
  check_matrix("forward_loops", "i_weight", i_weight, i_input);
  check_size("forward_loops", "i_weight", i_weight, 1, i_input.size(1));
  const custom_linear::Sizes s = {i_input.size(0), i_input.size(1), i_weight.size(0)};
  torch::Tensor y = at::empty({s.batch, s.out}, i_input.options());
  AT_DISPATCH_FLOATING_TYPES(i_input.scalar_type(), "forward_loops", [&] {
    custom_linear::linear_loops(i_input.const_data_ptr<scalar_t>(), i_weight.const_data_ptr<scalar_t>(),
                                y.mutable_data_ptr<scalar_t>(), s);
  });
  return y;
}

// doc: own_backward
std::vector<torch::Tensor> backward_loops(torch::Tensor i_grad, torch::Tensor i_input,
                                          torch::Tensor i_weights) {
  check_matrix("backward_loops", "i_grad", i_grad, i_input);
  check_matrix("backward_loops", "i_input", i_input, i_input);
  check_matrix("backward_loops", "i_weights", i_weights, i_input);
  check_size("backward_loops", "i_weights", i_weights, 1, i_input.size(1));
  check_size("backward_loops", "i_grad", i_grad, 0, i_input.size(0));
  check_size("backward_loops", "i_grad", i_grad, 1, i_weights.size(0));
  const custom_linear::Sizes s = {i_input.size(0), i_input.size(1), i_weights.size(0)};
  torch::Tensor grad_x = at::zeros({s.batch, s.in}, i_input.options());
  torch::Tensor grad_weight = at::zeros({s.out, s.in}, i_input.options());
  AT_DISPATCH_FLOATING_TYPES(i_input.scalar_type(), "backward_loops", [&] {
    custom_linear::linear_backward_loops(
        i_grad.const_data_ptr<scalar_t>(), i_input.const_data_ptr<scalar_t>(),
        i_weights.const_data_ptr<scalar_t>(), grad_x.mutable_data_ptr<scalar_t>(),
        grad_weight.mutable_data_ptr<scalar_t>(), s);
  });
  return {grad_x, grad_weight};
}

// doc: end
}  // namespace

// doc: bind
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using released = py::call_guard<py::gil_scoped_release>;  // other Python threads run meanwhile
  m.def("hello", &hello);
  m.def("forward", &forward, released());
  m.def("backward", &backward, released());
  m.def("forward_loops", &forward_loops, released());
  m.def("backward_loops", &backward_loops, released());
}
// doc: end
