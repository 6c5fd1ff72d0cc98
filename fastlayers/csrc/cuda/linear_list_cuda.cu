// Host side of LinearList on CUDA: check, device guard, allocate, dispatch the dtype, launch on the current
// stream.
//
// Nothing here waits for the GPU or allocates more than the results, so a call can be captured in a CUDA
// graph.
#include <array>
#include <stdexcept>
#include <string>
#include <tuple>

#include "checks.h"
#include "launch.cuh"
#include "linear_list_kernel.cuh"

namespace fastlayers {
namespace {

// Call f with an element of the tensors' type; false where the kernels do not know it.
template <typename F>
bool dispatch_dtype(int32_t dtype, const F& f) {
  if (dtype == aoti_torch_dtype_float32()) return f(float{}), true;
  if (dtype == aoti_torch_dtype_float64()) return f(double{}), true;
  if (dtype == aoti_torch_dtype_float16()) return f(__half{}), true;
  if (dtype == aoti_torch_dtype_bfloat16()) return f(__nv_bfloat16{}), true;
  return false;
}

// What a kernel and its checks know of x and weight.
struct Call {
  Shape shape;
  bool shared;  // one input for all linears
  bool fits;    // the dtype and sizes are the kernels'
};

bool kernel_dtype(int32_t dtype) {
  return dispatch_dtype(dtype, [](auto) {});
}

void check_like(const Tensor& t, const Tensor& x, const char* name) {
  STD_TORCH_CHECK(
      dtype_of(t) == dtype_of(x) && is_on_device(t) && t.get_device_index() == x.get_device_index(),
      "linear_list: ", name, " must have x's dtype and device");
}

Call check(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 3 && x.dim() >= 2 && weight.size(0) >= 1,
                  "linear_list: weight must be (N, O, I) and x (*, N, I)");
  const int64_t linears = weight.size(0), list = x.size(x.dim() - 2);
  STD_TORCH_CHECK(x.size(x.dim() - 1) == weight.size(2) && (list == linears || list == 1),
                  "linear_list: x and weight do not fit together");
  check_like(weight, x, "weight");
  const int64_t in = weight.size(2), out = weight.size(1);
  const int64_t rows = in == 0 || list == 0 ? 0 : x.numel() / (list * in);
  const bool small = in >= 1 && out >= 1 && in <= kMaxFeatures && out <= kMaxFeatures;
  const Shape shape = {rows, linears, small ? static_cast<int>(in) : 0, small ? static_cast<int>(out) : 0};
  return {shape, list != linears, small && kernel_dtype(dtype_of(x))};
}

// (*, N, F) as (B, N, F); copied where the leading dimensions have no one stride.
Tensor flatten_or_copy(const Tensor& t, Flat* flat) {
  if (flatten_lead(t, flat)) return t;
  Tensor copy = torch::stable::contiguous(t);
  flatten_lead(copy, flat);
  return copy;
}

Tensor contiguous_or_copy(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

template <typename T>
Strided<const T> read_view(const Tensor& t, const Flat& flat, bool shared) {
  return {static_cast<const T*>(t.const_data_ptr()), flat.batch_stride, shared ? 0 : flat.list_stride,
          flat.feature_stride};
}

template <typename T>
Strided<T> write_view(const Tensor& t) {
  if (t.numel() == 0) return {};
  Flat flat;
  flatten_lead(t, &flat);
  return {static_cast<T*>(t.mutable_data_ptr()), flat.batch_stride, flat.list_stride, flat.feature_stride};
}

template <typename T>
T* write_pointer(const Tensor& t) {
  return t.numel() == 0 ? nullptr : static_cast<T*>(t.mutable_data_ptr());
}

// The stable ABI reports a failed allocation without its type; say what it was.
Tensor allocate(const Tensor& like, const std::vector<int64_t>& sizes, bool channel_last) {
  try {
    return empty_features(like, sizes, channel_last);
  } catch (const std::exception& error) {
    int64_t bytes = static_cast<int64_t>(like.element_size());
    for (const int64_t size : sizes) bytes *= size;
    throw std::runtime_error("linear_list: CUDA out of memory: no " + std::to_string(bytes) +
                             " bytes for a result (" + error.what() + ")");
  }
}

// Call an op of ops.py that computes the same through ATen.
template <size_t N>
void call_op(const char* name, std::array<StableIValue, N>& stack) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
}

}  // namespace

Tensor linear_list_cuda(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        bool out_channel_last) {
  const Call call = check(x, weight);
  const Shape& shape = call.shape;
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 2 && bias->size(0) == shape.linears && bias->size(1) == weight.size(1),
                    "linear_list: bias must be (N, O)");
    check_like(*bias, x, "bias");
  }
  const DeviceGuard guard(x.get_device_index());
  if (!call.fits || !fits_forward(shape)) {
    using torch::stable::detail::from;
    std::array<StableIValue, 4> stack{from(x), from(weight), from(bias), from(out_channel_last)};
    call_op("fastlayers::linear_list_strided", stack);
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes[sizes.size() - 2] = shape.linears;
  sizes[sizes.size() - 1] = shape.out_features;
  const Tensor out = allocate(x, sizes, out_channel_last);
  if (shape.rows == 0) return out;
  Flat flat;
  const Tensor x_flat = flatten_or_copy(x, &flat), w = contiguous_or_copy(weight);
  const Tensor b = bias ? contiguous_or_copy(*bias) : w;
  dispatch_dtype(dtype_of(x), [&](auto element) {
    using T = decltype(element);
    const auto x_view = read_view<T>(x_flat, flat, call.shared);
    const auto out_view = write_view<T>(out);
    const bool vectors = copies_as_vectors(x_view, shape.linears, shape.in_features, linear_first(out_view));
    const Plan plan = make_plan(shape, {sizeof(T), sizeof(accumulator_t<T>), false, vectors, false});
    launch(linear_list_kernel<T>, plan, x.get_device_index(), x_view,
           static_cast<const T*>(w.const_data_ptr()),
           bias ? static_cast<const T*>(b.const_data_ptr()) : nullptr, out_view, shape, plan.tile);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> linear_list_backward_cuda(const Tensor& grad_out, const Tensor& x,
                                                             const Tensor& weight, bool need_x,
                                                             bool need_weight, bool need_bias) {
  const Call call = check(x, weight);
  const Shape& shape = call.shape;
  const int64_t dim = x.dim();
  bool fits = grad_out.dim() == dim && grad_out.size(dim - 1) == weight.size(1) &&
              grad_out.size(dim - 2) == shape.linears;
  for (int64_t d = 0; fits && d < dim - 2; ++d) fits = grad_out.size(d) == x.size(d);
  STD_TORCH_CHECK(fits, "linear_list_backward: grad_out must be (*, N, O) with x's leading dimensions");
  check_like(grad_out, x, "grad_out");
  const DeviceGuard guard(x.get_device_index());
  // grad_x of a shared input sums over the list, and so over all blocks: that is a GEMM's work.
  if ((call.shared && need_x) || !call.fits || !fits_backward(shape)) {
    using torch::stable::detail::from;
    using torch::stable::detail::to;
    std::array<StableIValue, 6> stack{from(grad_out), from(x),           from(weight),
                                      from(need_x),   from(need_weight), from(need_bias)};
    call_op("fastlayers::linear_list_backward_strided", stack);
    return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
  }
  const std::vector<int64_t> x_sizes(x.sizes().begin(), x.sizes().end());
  const int64_t in = shape.in_features, out = shape.out_features;
  const Tensor grad_x = need_x ? allocate(x, x_sizes, is_channel_last(x)) : empty_flat(x);
  const Tensor grad_weight = need_weight ? allocate(x, {shape.linears, out, in}, false) : empty_flat(x);
  const Tensor grad_bias = need_bias ? allocate(x, {shape.linears, out}, false) : empty_flat(x);
  if (grad_x.numel() + grad_weight.numel() + grad_bias.numel() == 0) return {grad_x, grad_weight, grad_bias};
  Flat flat, grad_flat;
  const Tensor x_flat = flatten_or_copy(x, &flat), g_flat = flatten_or_copy(grad_out, &grad_flat);
  const Tensor w = contiguous_or_copy(weight);
  dispatch_dtype(dtype_of(x), [&](auto element) {
    using T = decltype(element);
    const auto x_view = read_view<T>(x_flat, flat, call.shared);
    const auto grad_view = read_view<T>(g_flat, grad_flat, false);
    const auto grad_x_view = write_view<T>(grad_x);
    const bool x_vectors = copies_as_vectors(x_view, shape.linears, shape.in_features, false);
    const bool grad_vectors =
        copies_as_vectors(grad_view, shape.linears, shape.out_features, linear_first(grad_x_view));
    const Plan plan = make_plan(shape, {sizeof(T), sizeof(accumulator_t<T>), true, x_vectors, grad_vectors});
    launch(linear_list_backward_kernel<T>, plan, x.get_device_index(), grad_view, x_view,
           static_cast<const T*>(w.const_data_ptr()), grad_x_view, write_pointer<T>(grad_weight),
           write_pointer<T>(grad_bias), shape, plan.tile);
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, FASTLAYERS_DEVICE_KEY, m) {
  m.impl("linear_list", TORCH_BOX(&fastlayers::linear_list_cuda));
  m.impl("linear_list_backward", TORCH_BOX(&fastlayers::linear_list_backward_cuda));
}
