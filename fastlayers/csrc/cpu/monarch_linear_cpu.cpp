// Host side of MonarchLinear on the CPU: check, describe the factors, split the work among threads.
#include "cpu/monarch_linear_cpu.h"

#include <stdint.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>

#include "cpu/monarch_linear.h"

namespace fastlayers {
namespace {

using torch::headeronly::ScalarType;

// Memory for what lies between two factors, which sets how many tokens are worked on at a time. It has to
// stay in the last cache.
constexpr int64_t kStateBytes = 8 << 20;
// Batch entries with larger weights than this are the BLAS's: they leave the second cache.
constexpr int64_t kMaxWeightBytes = 512 << 10;
constexpr int64_t kStreamBytes = 4 << 20;      // results from this size on are written past the caches
constexpr int64_t kWorkPerThread = 64 * 1024;  // multiply-adds

bool to_type(int32_t dtype, Type* type) {
  if (dtype == aoti_torch_dtype_float32()) return *type = Type::float32, true;
  if (dtype == aoti_torch_dtype_float64()) return *type = Type::float64, true;
  if (dtype == aoti_torch_dtype_bfloat16()) return *type = Type::bfloat16, true;
  if (dtype == aoti_torch_dtype_float16()) return *type = Type::float16, true;
  return false;
}

struct Plan {
  std::vector<MonarchFactor> factors;
  int64_t in_features, tokens = 1;
  Type type;
  bool fits;  // the kernels cover it

  bool half() const { return type == Type::bfloat16 || type == Type::float16; }
  int64_t element() const { return type == Type::float64 ? 8 : 4; }
  int64_t batches(size_t k) const { return factors[k].done * factors[k].rest; }
  int64_t state_elements(size_t k) const { return batches(k) * factors[k].in_size; }
};

// Checks that guard the kernels' memory; the words for users are in _monarch_ops.py.
Plan make_plan(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<int64_t>& in_dims,
               const std::vector<int64_t>& out_dims) {
  Plan plan;
  const size_t count = weights.size();
  STD_TORCH_CHECK(count >= 2 && in_dims.size() == count && out_dims.size() == count && x.dim() >= 1,
                  "monarch_linear: weights and dims do not fit together");
  int64_t done = 1, rest = 1, rank = 1;
  for (int64_t d : in_dims) rest *= d;
  plan.in_features = x.size(x.dim() - 1);
  STD_TORCH_CHECK(plan.in_features <= rest, "monarch_linear: x has too many features");
  for (int64_t d = 0; d + 1 < x.dim(); ++d) plan.tokens *= x.size(d);
  plan.fits = to_type(dtype_of(x), &plan.type) && x.numel() > 0;
  for (size_t k = 0; k < count; ++k) {
    const Tensor& w = weights[k];
    STD_TORCH_CHECK(in_dims[k] > 0 && out_dims[k] > 0, "monarch_linear: a dim is not positive");
    rest /= in_dims[k];
    STD_TORCH_CHECK(w.dim() == 3 && w.size(0) == done * rest && w.size(1) == rank * in_dims[k] &&
                        w.size(2) % out_dims[k] == 0 && (k + 1 < count || w.size(2) == out_dims[k]),
                    "monarch_linear: a weight does not fit the dims");
    STD_TORCH_CHECK(dtype_of(w) == dtype_of(x) && w.is_cpu() && x.is_cpu(),
                    "monarch_linear: dtypes or devices differ");
    plan.factors.push_back({done, rest, w.size(1), w.size(2), nullptr, nullptr});
    if (w.size(1) * w.size(2) * plan.element() > kMaxWeightBytes || w.numel() == 0) plan.fits = false;
    done *= out_dims[k];
    rank = w.size(2) / out_dims[k];
  }
  return plan;
}

// (*, F) as rows with features next to each other; copied where it does not lie so.
Tensor as_rows(const Tensor& t, int64_t* row) {
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const size_t dim = sizes.size();
  bool regular = strides[dim - 1] == 1 || sizes[dim - 1] == 1;
  int64_t count = 1;
  *row = sizes[dim - 1];
  for (size_t d = dim - 1; d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (count == 1) {
      *row = strides[d];
    } else if (strides[d] != *row * count) {
      regular = false;
    }
    count *= sizes[d];
  }
  if (regular) return t;
  *row = sizes[dim - 1];
  return torch::stable::contiguous(t);
}

// Weights as the kernels read them: contiguous, half types widened once for all tokens.
std::vector<Tensor> prepare(Plan* plan, const std::vector<Tensor>& weights) {
  std::vector<Tensor> ready;
  for (size_t k = 0; k < weights.size(); ++k) {
    ready.push_back(torch::stable::contiguous(plan->half() ? torch::stable::to(weights[k], ScalarType::Float)
                                                           : weights[k]));
    plan->factors[k].weight = ready.back().const_data_ptr();
  }
  return ready;
}

Tensor workspace(const Plan& plan, int64_t elements) {
  return torch::stable::empty({std::max<int64_t>(elements, 1)},
                              plan.type == Type::float64 ? ScalarType::Double : ScalarType::Float);
}

// A multiple of the lanes near `most` that leaves few of them empty; fewer tokens than lanes are rows.
int64_t tile_size(int64_t tokens, int64_t lanes, bool rows) {
  if (tokens < lanes && rows) return tokens;
  const int64_t most = 4 * lanes, tiles = (tokens + most - 1) / most;
  return ((tokens + tiles - 1) / tiles + lanes - 1) / lanes * lanes;
}

// Ask for huge pages behind a large new tensor. The first touch of 32 MiB of small pages took 24 ms of a 30
// ms forward on a virtual machine, of huge ones 5 ms. Where they are not to be had, nothing changes.
Tensor on_huge_pages(Tensor t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  int64_t bytes;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  const uintptr_t first = (begin + page - 1) / page * page, end = (begin + bytes) / page * page;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
  return t;
}

// What lies between the factors for one block of tokens, on one buffer.
struct States {
  Tensor buffer;
  std::vector<void*> at;

  States(const Plan& plan, int64_t tokens) : buffer(on_huge_pages(workspace(plan, total(plan) * tokens))) {
    char* p = static_cast<char*>(buffer.mutable_data_ptr());
    for (size_t k = 0; k < plan.factors.size(); ++k) {
      at.push_back(p);
      if (k > 0) p += plan.state_elements(k) * tokens * plan.element();
    }
  }
  static int64_t total(const Plan& plan) {
    int64_t sum = 0;
    for (size_t k = 1; k < plan.factors.size(); ++k) sum += plan.state_elements(k);
    return sum;
  }
};

int64_t block_tokens(const Plan& plan, int64_t tile) {
  const int64_t fit = kStateBytes / (States::total(plan) * plan.element() * tile);
  return std::min(std::max<int64_t>(fit, 1), (plan.tokens + tile - 1) / tile) * tile;
}

// Run f over batch entries x tiles: over whole entries, whose weights then stay in the cache, where there are
// enough of them.
template <class F>
void parallel(int64_t batches, int64_t tiles, int64_t work_per_tile, bool whole_entries, const F& f) {
  const int64_t threads = torch::stable::get_num_threads();
  if (threads == 1 || batches * tiles * work_per_tile < 2 * kWorkPerThread) return f({0, tiles, 0, batches});
  if (whole_entries || batches >= 2 * threads) {
    const int64_t grain = 1 + kWorkPerThread / (tiles * work_per_tile + 1);
    torch::stable::parallel_for(0, batches, grain,
                                [&](int64_t begin, int64_t end) { f({0, tiles, begin, end}); });
    return;
  }
  torch::stable::parallel_for(0, batches * tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t batch = i / tiles, stop = std::min(end, (batch + 1) * tiles);
      f({i - batch * tiles, stop - batch * tiles, batch, batch + 1});
      i = stop;
    }
  });
}

const char* at_row(const void* data, int64_t row, int64_t token, Type type) {
  const int64_t size = type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2;
  return static_cast<const char*>(data) + row * token * size;
}

}  // namespace

const MonarchKernels& monarch_kernels() {
#if defined(__x86_64__)
  const char* name = linear_list_kernels().name;
  if (strcmp(name, monarch_avx512.name) == 0) return monarch_avx512;
  if (strcmp(name, monarch_avx2.name) == 0) return monarch_avx2;
#endif
  return monarch_baseline;
}

Tensor monarch_linear_cpu(Tensor x, std::vector<Tensor> weights, std::optional<Tensor> bias,
                          std::vector<int64_t> in_dims, std::vector<int64_t> out_dims, int64_t out_features,
                          bool contiguous) {
  Plan plan = make_plan(x, weights, in_dims, out_dims);
  const size_t count = weights.size();
  const MonarchFactor& last = plan.factors.back();
  STD_TORCH_CHECK(out_features >= 0 && out_features <= last.done * last.out_size,
                  "monarch_linear: too many out_features");
  if (bias) {
    STD_TORCH_CHECK(
        bias->dim() == 1 && bias->size(0) == out_features && dtype_of(*bias) == dtype_of(x) && bias->is_cpu(),
        "monarch_linear: bias does not fit");
  }
  if (!plan.fits || out_features == 0) {
    std::array<StableIValue, 7> stack{
        torch::stable::detail::from(x),         torch::stable::detail::from(weights),
        torch::stable::detail::from(bias),      torch::stable::detail::from(in_dims),
        torch::stable::detail::from(out_dims),  torch::stable::detail::from(out_features),
        torch::stable::detail::from(contiguous)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("fastlayers::monarch_linear_strided", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  const std::vector<Tensor> ready = prepare(&plan, weights);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = out_features;
  const Tensor out = on_huge_pages(empty_features(x, sizes, false));
  int64_t x_row;
  const Tensor rows = as_rows(x, &x_row);
  const Tensor b = bias ? torch::stable::contiguous(*bias) : x;
  const MonarchKernels& kernels = monarch_kernels();
  const int64_t tile = tile_size(plan.tokens, kernels.lanes(plan.type), true);
  const int64_t block = block_tokens(plan, tile);
  const States states(plan, block);
  for (int64_t first = 0; first < plan.tokens; first += block) {
    MonarchArgs args = {};
    args.tokens = std::min(block, plan.tokens - first);
    args.in_features = plan.in_features;
    args.out_features = out_features;
    args.in_first = in_dims[0];
    args.contiguous = contiguous;
    args.count = static_cast<int>(count);
    args.factors = plan.factors.data();
    args.tile = tile;
    args.states = states.at.data();
    args.x = at_row(rows.const_data_ptr(), x_row, first, plan.type);
    args.x_row = x_row;
    args.bias = bias ? b.const_data_ptr() : nullptr;
    args.out = const_cast<char*>(at_row(out.mutable_data_ptr(), out_features, first, plan.type));
    args.stream = plan.tokens * out_features * plan.element() > kStreamBytes &&
                  reinterpret_cast<uintptr_t>(out.const_data_ptr()) % 64 == 0;
    const int64_t tiles = (args.tokens + tile - 1) / tile;
    for (size_t k = 0; k < count; ++k) {
      const MonarchFactor& f = plan.factors[k];
      parallel(plan.batches(k), tiles, f.in_size * f.out_size * tile, false,
               [&](const MonarchPart& part) { kernels.forward(plan.type, args, static_cast<int>(k), part); });
    }
  }
  return out;
}

std::tuple<Tensor, std::vector<Tensor>, Tensor> monarch_linear_backward_cpu(
    Tensor grad_out, Tensor x, std::vector<Tensor> weights, std::vector<int64_t> in_dims,
    std::vector<int64_t> out_dims, bool contiguous, bool need_x, bool need_weights, bool need_bias) {
  Plan plan = make_plan(x, weights, in_dims, out_dims);
  const size_t count = weights.size();
  const MonarchFactor& last = plan.factors.back();
  const int64_t out_features = grad_out.size(grad_out.dim() - 1), padded = last.done * last.out_size;
  STD_TORCH_CHECK(out_features <= padded && plan.in_features > 0 &&
                      grad_out.numel() == plan.tokens * out_features && dtype_of(grad_out) == dtype_of(x) &&
                      grad_out.is_cpu(),
                  "monarch_linear_backward: grad_out does not fit");
  // The gradient of a batch entry's weight is one thread's, so that sums keep their order.
  const int64_t threads = torch::stable::get_num_threads();
  for (size_t k = 0; k < count; ++k) plan.fits = plan.fits && 2 * plan.batches(k) >= threads;
  if (!plan.fits || out_features == 0) {
    std::array<StableIValue, 9> stack{
        torch::stable::detail::from(grad_out), torch::stable::detail::from(x),
        torch::stable::detail::from(weights),  torch::stable::detail::from(in_dims),
        torch::stable::detail::from(out_dims), torch::stable::detail::from(contiguous),
        torch::stable::detail::from(need_x),   torch::stable::detail::from(need_weights),
        torch::stable::detail::from(need_bias)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("fastlayers::monarch_linear_backward_strided", "",
                                                        stack.data(), TORCH_ABI_VERSION));
    return {torch::stable::detail::to<Tensor>(stack[0]),
            torch::stable::detail::to<std::vector<Tensor>>(stack[1]),
            torch::stable::detail::to<Tensor>(stack[2])};
  }
  const std::vector<Tensor> ready = prepare(&plan, weights);
  const std::vector<int64_t> x_sizes(x.sizes().begin(), x.sizes().end());
  const Tensor grad_x = need_x ? on_huge_pages(empty_features(x, x_sizes, false)) : empty_flat(x);
  std::vector<Tensor> grads;
  for (size_t k = 0; k < count; ++k) {
    const MonarchFactor& f = plan.factors[k];
    if (need_weights) {
      grads.push_back(
          on_huge_pages(empty_features(ready[k], {f.done * f.rest, f.in_size, f.out_size}, false)));
      plan.factors[k].grad = grads.back().mutable_data_ptr();
    } else {
      grads.push_back(empty_flat(x));
    }
  }
  Tensor bias_sum = torch::stable::empty({need_bias ? padded : 0}, ScalarType::Double);
  torch::stable::zero_(bias_sum);
  int64_t x_row, grad_row;
  const Tensor rows = as_rows(x, &x_row), grad_rows = as_rows(grad_out, &grad_row);
  const MonarchKernels& kernels = monarch_kernels();
  const int64_t tile = tile_size(plan.tokens, kernels.lanes(plan.type), false);
  const int64_t block = block_tokens(plan, tile);
  const States states(plan, need_weights ? block : 0), state_grads(plan, block);
  for (int64_t first = 0; first < plan.tokens; first += block) {
    MonarchArgs args = {};
    args.tokens = std::min(block, plan.tokens - first);
    args.in_features = plan.in_features;
    args.out_features = out_features;
    args.in_first = in_dims[0];
    args.contiguous = contiguous;
    args.count = static_cast<int>(count);
    args.factors = plan.factors.data();
    args.tile = tile;
    args.states = states.at.data();
    args.grads = state_grads.at.data();
    args.x = at_row(rows.const_data_ptr(), x_row, first, plan.type);
    args.x_row = x_row;
    args.grad_out = at_row(grad_rows.const_data_ptr(), grad_row, first, plan.type);
    args.grad_out_row = grad_row;
    args.grad_x = const_cast<char*>(at_row(grad_x.mutable_data_ptr(), plan.in_features, first, plan.type));
    args.grad_bias = need_bias ? static_cast<double*>(bias_sum.mutable_data_ptr()) : nullptr;
    args.fresh = first == 0;
    const int64_t tiles = (args.tokens + tile - 1) / tile;
    auto work = [&](size_t k) { return plan.factors[k].in_size * plan.factors[k].out_size * tile; };
    for (size_t k = 0; need_weights && k + 1 < count; ++k) {
      parallel(plan.batches(k), tiles, work(k), false,
               [&](const MonarchPart& part) { kernels.forward(plan.type, args, static_cast<int>(k), part); });
    }
    for (size_t k = count; k-- > 0;) {
      const bool input = k > 0 ? need_x || need_weights : need_x;
      if (!input && !need_weights && !(need_bias && k + 1 == count)) continue;
      parallel(plan.batches(k), tiles, 2 * work(k), true, [&](const MonarchPart& part) {
        kernels.backward(plan.type, args, static_cast<int>(k), input, need_weights, part);
      });
    }
  }
  const ScalarType dtype = x.scalar_type();
  if (plan.half() && need_weights) {
    for (Tensor& grad : grads) grad = torch::stable::to(grad, dtype);
  }
  Tensor grad_bias = empty_flat(x);
  if (need_bias) {
    grad_bias = torch::stable::narrow(bias_sum, 0, 0, out_features);
    grad_bias = torch::stable::to(grad_bias, dtype, std::nullopt, std::nullopt, std::nullopt, false, true);
  }
  return {grad_x, grads, grad_bias};
}

}  // namespace fastlayers
