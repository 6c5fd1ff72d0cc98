// Rung 4: CPU kernels of the ops that linear_op.py defines, on LibTorch's stable ABI: no ATen, no Python.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "linear_loops.h"

namespace {

// doc: kernel
using custom_linear::Sizes;
using torch::headeronly::ScalarType;
using namespace torch::stable;  // Tensor, contiguous, matmul, new_empty, new_zeros, transpose

Sizes check(const char* op, const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), op,
                  ": x (B, I) and weight (O, I) do not fit together");
  STD_TORCH_CHECK(x.scalar_type() == weight.scalar_type(), op, ": weight must have x's dtype");
  STD_TORCH_CHECK(x.is_cpu() && weight.is_cpu(), op, ": x and weight must be on the CPU");
  return {x.size(0), x.size(1), weight.size(0)};
}

// Other dtypes go to ATen, so that what the op accepts does not depend on whether its kernel was built.
bool has_loops(const Tensor& x) {
  return x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double;
}

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

Tensor linear_cpu(const Tensor& x, const Tensor& weight) {
  const Sizes s = check("linear", x, weight);
  if (!has_loops(x)) return matmul(x, transpose(weight, 0, 1));
  // The dispatcher hands over whatever the caller had, so the kernel itself sees to contiguity.
  const Tensor x_rows = contiguous(x), w_rows = contiguous(weight);
  Tensor y = new_empty(x, {s.batch, s.out});
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    custom_linear::linear_loops(data<T>(x_rows), data<T>(w_rows), static_cast<T*>(y.mutable_data_ptr()), s);
  };
  x.scalar_type() == ScalarType::Float ? run(0.0f) : run(0.0);
  return y;
}

// doc: kernel_backward
std::tuple<Tensor, Tensor> linear_backward_cpu(const Tensor& grad_y, const Tensor& x, const Tensor& weight) {
  const Sizes s = check("linear_backward", x, weight);
  STD_TORCH_CHECK(grad_y.dim() == 2 && grad_y.size(0) == s.batch && grad_y.size(1) == s.out &&
                      grad_y.scalar_type() == x.scalar_type() && grad_y.is_cpu(),
                  "linear_backward: grad_y must be (B, O) with x's dtype and device");
  if (!has_loops(x)) return {matmul(grad_y, weight), matmul(transpose(grad_y, 0, 1), x)};
  const Tensor g_rows = contiguous(grad_y);
  const Tensor x_rows = contiguous(x), w_rows = contiguous(weight);
  Tensor grad_x = new_zeros(x, {s.batch, s.in});
  Tensor grad_weight = new_zeros(x, {s.out, s.in});
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    custom_linear::linear_backward_loops(data<T>(g_rows), data<T>(x_rows), data<T>(w_rows),
                                         static_cast<T*>(grad_x.mutable_data_ptr()),
                                         static_cast<T*>(grad_weight.mutable_data_ptr()), s);
  };
  x.scalar_type() == ScalarType::Float ? run(0.0f) : run(0.0);
  return {grad_x, grad_weight};
}

// doc: end
}  // namespace

// doc: register
STABLE_TORCH_LIBRARY_IMPL(custom_linear, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear_cpu));
  m.impl("linear_backward", TORCH_BOX(&linear_backward_cpu));
}
// doc: end
