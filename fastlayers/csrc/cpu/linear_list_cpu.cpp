// Host side of LinearList on the CPU: check, describe the tensors, split the work among threads.
#include "cpu/linear_list_cpu.h"

#include "cpu/linear_list.h"

namespace fastlayers {
namespace {

// Multiply-adds a thread must have for waking it to pay.
constexpr int64_t kWorkPerThread = 64 * 1024;
// A packed panel of weights has to stay within the scratch memory of a thread.
constexpr int64_t kMaxFeatures = 4096;

bool to_type(int32_t dtype, Type* type) {
  if (dtype == aoti_torch_dtype_float32()) return *type = Type::float32, true;
  if (dtype == aoti_torch_dtype_float64()) return *type = Type::float64, true;
  if (dtype == aoti_torch_dtype_bfloat16()) return *type = Type::bfloat16, true;
  if (dtype == aoti_torch_dtype_float16()) return *type = Type::float16, true;
  return false;
}

void check_fit(const Tensor& x, const Tensor& weight, int64_t x_features) {
  STD_TORCH_CHECK(weight.dim() == 3 && x.dim() >= 2 && weight.size(0) >= 1, "linear_list: wrong dimensions");
  const int64_t list = x.size(x.dim() - 2);
  STD_TORCH_CHECK(x.size(x.dim() - 1) == x_features && (list == weight.size(0) || list == 1),
                  "linear_list: x and weight do not fit together");
  STD_TORCH_CHECK(dtype_of(x) == dtype_of(weight) && weight.is_cpu() && x.is_cpu(),
                  "linear_list: dtypes or devices differ");
}

Operand operand(const Tensor& t, const Flat& flat, int64_t list) {
  const bool shared = t.size(t.dim() - 2) == 1 && list > 1;
  return {t.const_data_ptr(), flat.batch_stride, shared ? 0 : flat.list_stride, flat.feature_stride};
}

Weight describe(const Tensor& weight) {
  return {weight.const_data_ptr(), weight.stride(0), weight.stride(1)};
}

// A tensor whose leading dimensions are one; copied where they cannot be.
Tensor flat_or_copy(const Tensor& t, Flat* flat) {
  if (flatten_lead(t, flat)) return t;
  Tensor copy = torch::stable::contiguous(t);
  flatten_lead(copy, flat);
  return copy;
}

Tensor rows_contiguous(const Tensor& weight) {
  return weight.size(2) > 1 && weight.stride(2) != 1 ? torch::stable::contiguous(weight) : weight;
}

// Run f over linears x rows, split over the list, or also over the rows where the list is short.
template <class F>
void parallel(int64_t list, int64_t rows, int64_t work_per_row, const F& f) {
  const int64_t threads = torch::stable::get_num_threads();
  if (threads == 1 || list * rows * work_per_row < 2 * kWorkPerThread) return f(Range{0, list, 0, rows});
  if (list >= 4 * threads) {
    const int64_t grain = 1 + kWorkPerThread / (rows * work_per_row + 1);
    torch::stable::parallel_for(0, list, grain,
                                [&](int64_t begin, int64_t end) { f(Range{begin, end, 0, rows}); });
    return;
  }
  constexpr int64_t step = 24;  // a multiple of the rows of every microkernel
  const int64_t tiles = (rows + step - 1) / step;
  const int64_t chunks = tiles < 2 * threads ? tiles : 2 * threads;
  torch::stable::parallel_for(0, list * chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / chunks, c = i % chunks;
      const int64_t first = c * tiles / chunks * step, last = (c + 1) * tiles / chunks * step;
      f(Range{n, n + 1, first, last < rows ? last : rows});
    }
  });
}

}  // namespace

Tensor linear_list_cpu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                       bool out_channel_last) {
  STD_TORCH_CHECK(weight.dim() == 3, "linear_list: weight must have 3 dimensions");
  const Sizes s = {0, weight.size(0), weight.size(2), weight.size(1)};
  check_fit(x, weight, s.in);
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 2 && bias->size(0) == s.list && bias->size(1) == s.out &&
                        dtype_of(*bias) == dtype_of(x) && bias->is_cpu(),
                    "linear_list: bias does not fit");
  }
  Type type;
  if (!to_type(dtype_of(x), &type) || s.in > kMaxFeatures || s.in == 0) {
    std::array<StableIValue, 4> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                      torch::stable::detail::from(bias),
                                      torch::stable::detail::from(out_channel_last)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("fastlayers::linear_list_strided", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes[sizes.size() - 2] = s.list;
  sizes[sizes.size() - 1] = s.out;
  const Tensor out = empty_features(x, sizes, out_channel_last);
  Flat flat, out_flat;
  const Tensor x_flat = flat_or_copy(x, &flat);
  flatten_lead(out, &out_flat);
  const Tensor w = rows_contiguous(weight);
  const Tensor b = bias && !bias->is_contiguous() ? torch::stable::contiguous(*bias) : bias.value_or(w);
  const ForwardArgs args = {
      {flat.batch, s.list, s.in, s.out},
      operand(x_flat, flat, s.list),
      describe(w),
      bias ? b.const_data_ptr() : nullptr,
      {out.mutable_data_ptr(), out_flat.batch_stride, out_flat.list_stride, out_flat.feature_stride}};
  if (flat.batch == 0 || s.out == 0) return out;
  const LinearListKernels& kernels = linear_list_kernels();
  parallel(s.list, flat.batch, s.in * s.out, [&](const Range& range) { kernels.forward(type, args, range); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> linear_list_backward_cpu(const Tensor& grad_out, const Tensor& x,
                                                            const Tensor& weight, bool need_x,
                                                            bool need_weight, bool need_bias) {
  STD_TORCH_CHECK(weight.dim() == 3, "linear_list_backward: weight must have 3 dimensions");
  Sizes s = {0, weight.size(0), weight.size(2), weight.size(1)};
  check_fit(x, weight, s.in);
  check_fit(grad_out, weight, s.out);
  Type type;
  if (!to_type(dtype_of(x), &type) || s.out > kMaxFeatures || s.in == 0 || s.out == 0 || x.numel() == 0) {
    std::array<StableIValue, 6> stack{
        torch::stable::detail::from(grad_out),    torch::stable::detail::from(x),
        torch::stable::detail::from(weight),      torch::stable::detail::from(need_x),
        torch::stable::detail::from(need_weight), torch::stable::detail::from(need_bias)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("fastlayers::linear_list_backward_strided", "",
                                                        stack.data(), TORCH_ABI_VERSION));
    return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1]),
            torch::stable::detail::to<Tensor>(stack[2])};
  }
  const std::vector<int64_t> x_sizes(x.sizes().begin(), x.sizes().end());
  const Tensor grad_x = need_x ? empty_features(x, x_sizes, is_channel_last(x)) : empty_flat(x);
  const Tensor grad_weight = need_weight ? empty_features(x, {s.list, s.out, s.in}, false) : empty_flat(x);
  const Tensor grad_bias = need_bias ? empty_features(x, {s.list, s.out}, false) : empty_flat(x);
  Flat flat, grad_flat, grad_x_flat = {};
  const Tensor x_flat = flat_or_copy(x, &flat), g_flat = flat_or_copy(grad_out, &grad_flat);
  const Tensor w = rows_contiguous(weight);
  s.batch = flat.batch;
  if (need_x) flatten_lead(grad_x, &grad_x_flat);
  const bool shared = s.list > 1 && x.size(x.dim() - 2) == 1;
  const BackwardArgs args = {s,
                             operand(g_flat, grad_flat, s.list),
                             operand(x_flat, flat, s.list),
                             describe(w),
                             {grad_x.mutable_data_ptr(), grad_x_flat.batch_stride, grad_x_flat.list_stride,
                              grad_x_flat.feature_stride},
                             need_weight ? grad_weight.mutable_data_ptr() : nullptr,
                             need_bias ? grad_bias.mutable_data_ptr() : nullptr,
                             shared};
  const LinearListKernels& kernels = linear_list_kernels();
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t work = s.in * s.out;
  if (!shared && s.list >= 4 * threads) {
    // One pass: a linear's x and grad_out are still in the cache for the second product.
    parallel(s.list, s.batch, 2 * work, [&](const Range& range) {
      for (int64_t n = range.begin; n < range.end; ++n) {
        if (need_x) kernels.backward_input(type, args, {n, n + 1, 0, s.batch});
        if (need_weight || need_bias) kernels.backward_weight(type, args, {n, n + 1, 0, s.out});
      }
    });
    return {grad_x, grad_weight, grad_bias};
  }
  if (need_x) {
    parallel(shared ? 1 : s.list, s.batch, (shared ? s.list : 1) * work,
             [&](const Range& range) { kernels.backward_input(type, args, range); });
  }
  if (need_weight || need_bias) {
    parallel(s.list, s.out, s.in * s.batch,
             [&](const Range& range) { kernels.backward_weight(type, args, range); });
  }
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace fastlayers
