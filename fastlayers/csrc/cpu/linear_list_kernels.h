// LinearList's kernels, compiled once per instruction set. See micro.h for the microkernel they are made of.
//
// Sums are taken in a fixed order that depends on the sizes only, so results are bitwise the same however the
// work is split among threads: a row's products run over the inner dimension in blocks of kInnerBlock.
#pragma once

#include <stdlib.h>

#include "cpu/linear_list.h"
#include "cpu/micro.h"
#include "cpu/tiny.h"

namespace fastlayers {
namespace {

// Longer sums are split, for accuracy: each block is summed in registers and then added to the total.
constexpr int64_t kInnerBlock = 512;
// Weights of several small linears are packed together, so that a row of x is read in longer runs.
constexpr int64_t kPackedBytes = 64 * 1024;

template <class T>
inline const T* at(const Operand& o, int64_t b, int64_t n) {
  return static_cast<const T*>(o.data) + b * o.batch_stride + n * o.list_stride;
}
template <class T>
inline T* at(const Output& o, int64_t b, int64_t n) {
  return static_cast<T*>(o.data) + b * o.batch_stride + n * o.list_stride;
}
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

template <class T, class C>
constexpr bool kSame = false;
template <class T>
constexpr bool kSame<T, T> = true;

class Scratch {
 public:
  explicit Scratch(int64_t bytes) : data_(aligned_alloc(64, round_up(bytes + 64, 64))) {
    if (data_ == nullptr) abort();
  }
  ~Scratch() { free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class C>
  C* take(int64_t count) {
    C* p = reinterpret_cast<C*>(static_cast<char*>(data_) + used_);
    used_ += round_up(count * static_cast<int64_t>(sizeof(C)), 64);
    return p;
  }

 private:
  void* data_;
  int64_t used_ = 0;
};

// to[r, c] = from[r, c], widened.
template <class T, class C>
inline void widen_block(const T* from, int64_t row, int64_t column, int64_t rows, int64_t columns, C* to,
                        int64_t to_row) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* p = from + r * row;
    C* q = to + r * to_row;
    if (column == 1) {
      for (int64_t c = 0; c < columns; ++c) q[c] = widen(p[c]);
    } else {
      for (int64_t c = 0; c < columns; ++c) q[c] = widen(p[c * column]);
    }
  }
}

template <class T, class C>
inline void narrow_block(const C* from, int64_t from_row, int64_t rows, int64_t columns, T* to, int64_t row,
                         int64_t column) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) narrow(from[r * from_row + c], to + r * row + c * column);
  }
}

// to[k, j] = w[j, k], j < columns, padded with zeros to a whole vector.
template <class T, class C>
inline void pack_transposed(const T* w, int64_t w_row, int64_t inner, int64_t columns, C* to,
                            int64_t to_row) {
  for (int64_t j = 0; j < to_row; ++j) {
    for (int64_t k = 0; k < inner; ++k) to[k * to_row + j] = j < columns ? widen(w[j * w_row + k]) : C(0);
  }
}

// out[b, n, :] = a[b, n, :] * B_n (+ bias), B_n being weight[n] or its transpose, for the range's linears and
// rows.
struct Product {
  Sizes sizes;
  int64_t inner, columns;
  Operand a;
  Weight weight;
  const void* bias;
  Output out;
  bool sum_over_list;  // out has one linear, the sum of all
};

template <class T, bool transposed>
void multiply_rows(const Product& p, const Range& range) {
  using C = ComputeOf<T>;
  constexpr int64_t wide = kColumns<C>, lanes = kLanes<C>;
  constexpr bool packs = transposed || !kSame<T, C>;
  const int64_t panels = (p.columns + wide - 1) / wide;
  const int64_t packed_columns = round_up(p.columns, lanes);
  int64_t block = kPackedBytes / (p.inner * packed_columns * static_cast<int64_t>(sizeof(C)));
  block = block < 1 || p.sum_over_list ? 1 : block;
  const int64_t panel_block = block > 1 ? panels : 1;
  const int64_t packed =
      packs ? p.inner * (block > 1 ? block * packed_columns : min64(packed_columns, wide)) : 0;
  const int64_t a_size = kSame<T, C> ? 0 : kRows * p.inner;
  Scratch scratch((packed + a_size + kRows * wide + wide + 64) * static_cast<int64_t>(sizeof(C)));
  C* const packed_weights = scratch.take<C>(packed);
  C* const a_tile = scratch.take<C>(a_size);
  C* const c_tile = scratch.take<C>(kRows * wide);
  C* const bias_row = scratch.take<C>(wide);
  const bool direct = kSame<T, C> && p.out.feature_stride == 1;
  const T* const weights = static_cast<const T*>(p.weight.data);

  auto width = [&](int64_t panel) { return min64(wide, p.columns - panel * wide); };
  auto pack = [&](int64_t n, int64_t panel, C* to) {
    const T* w = weights + n * p.weight.list_stride;
    const int64_t columns = width(panel), row = round_up(columns, lanes);
    if (transposed) {
      pack_transposed(w + panel * wide * p.weight.out_stride, p.weight.out_stride, p.inner, columns, to, row);
    } else {
      widen_block(w + panel * wide, p.weight.out_stride, int64_t{1}, p.inner, columns, to, row);
    }
  };
  // One tile of `rows` rows; `first` and `last` tell whether the sum over the list begins or ends here.
  auto multiply = [&](int64_t n, int64_t panel, const C* b, int64_t b_row, int64_t r, int rows, const C* a,
                      int64_t a_row, int64_t a_inner, bool first, bool last) {
    const int columns = static_cast<int>(width(panel));
    T* const out = at<T>(p.out, r, p.sum_over_list ? 0 : n) + panel * wide * p.out.feature_stride;
    Tile<C> t = {0, a, a_row, a_inner, b, b_row, nullptr, c_tile, wide, !first};
    if (direct) {
      t.c = reinterpret_cast<C*>(out);
      t.c_row = p.out.batch_stride;
    }
    if (p.bias) {
      const T* bias = static_cast<const T*>(p.bias) + n * p.columns + panel * wide;
      if (kSame<T, C>) {
        t.bias = reinterpret_cast<const C*>(bias);
      } else {
        widen_block(bias, int64_t{0}, int64_t{1}, int64_t{1}, int64_t{columns}, bias_row, wide);
        t.bias = bias_row;
      }
    }
    for (int64_t k = 0; k == 0 || k < p.inner; k += kInnerBlock) {
      t.inner = min64(kInnerBlock, p.inner - k);
      t.a = a + k * a_inner;
      t.b = b + k * b_row;
      multiply_tile(t, rows, columns);
      t.accumulate = true;
      t.bias = nullptr;
    }
    if (!direct && last) {
      narrow_block(c_tile, wide, rows, columns, out, p.out.batch_stride, p.out.feature_stride);
    }
  };
  auto multiply_panels = [&](int64_t n, int64_t panel_begin, int64_t panel_end, const C* b, int64_t r,
                             bool first, bool last) {
    const int rows = static_cast<int>(min64(kRows, range.row_end - r));
    const T* a = at<T>(p.a, r, n);
    const C* a_data = a_tile;
    int64_t a_row = p.inner, a_inner = 1;
    if (kSame<T, C>) {
      a_data = reinterpret_cast<const C*>(a);
      a_row = p.a.batch_stride;
      a_inner = p.a.feature_stride;
    } else {
      widen_block(a, p.a.batch_stride, p.a.feature_stride, rows, p.inner, a_tile, p.inner);
    }
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      if (packs) {
        const int64_t row = round_up(width(panel), lanes);
        multiply(n, panel, b, row, r, rows, a_data, a_row, a_inner, first, last);
        b += p.inner * row;
      } else {
        const C* w = reinterpret_cast<const C*>(weights + n * p.weight.list_stride + panel * wide);
        multiply(n, panel, w, p.weight.out_stride, r, rows, a_data, a_row, a_inner, first, last);
      }
    }
  };

  if (p.sum_over_list) {
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t r = range.row_begin; r < range.row_end; r += kRows) {
        for (int64_t n = 0; n < p.sizes.list; ++n) {
          if (packs) pack(n, panel, packed_weights);
          multiply_panels(n, panel, panel + 1, packed_weights, r, n == 0, n == p.sizes.list - 1);
        }
      }
    }
    return;
  }
  for (int64_t n0 = range.begin; n0 < range.end; n0 += block) {
    const int64_t n1 = min64(n0 + block, range.end);
    for (int64_t panel0 = 0; panel0 < panels; panel0 += panel_block) {
      const int64_t panel1 = min64(panel0 + panel_block, panels);
      if (packs) {
        C* to = packed_weights;
        for (int64_t n = n0; n < n1; ++n) {
          for (int64_t panel = panel0; panel < panel1; ++panel) {
            pack(n, panel, to);
            to += p.inner * round_up(width(panel), lanes);
          }
        }
      }
      for (int64_t r = range.row_begin; r < range.row_end; r += kRows) {
        const C* b = packed_weights;
        for (int64_t n = n0; n < n1; ++n, b += p.inner * packed_columns) {
          multiply_panels(n, panel0, panel1, b, r, true, true);
        }
      }
    }
  }
}

template <class T>
void forward(const ForwardArgs& args, const Range& range) {
  const Sizes& s = args.sizes;
  if constexpr (kSame<T, ComputeOf<T>>) {
    if (tiny_fits<T>(args)) return tiny_forward<T>(args, range);
  }
  multiply_rows<T, true>({s, s.in, s.out, args.x, args.weight, args.bias, args.out, false}, range);
}

template <class T>
void backward_input(const BackwardArgs& args, const Range& range) {
  const Sizes& s = args.sizes;
  multiply_rows<T, false>({s, s.out, s.in, args.grad_out, args.weight, nullptr, args.grad_x, args.shared},
                          range);
}

// grad_bias: 32 rows at a time in the compute type, those sums in double. nn.Linear's own sum is a cascade.
template <class T>
void sum_rows(const BackwardArgs& args, int64_t n, int64_t o0, int64_t o1, ComputeOf<T>* partial,
              double* total) {
  using C = ComputeOf<T>;
  const int64_t count = o1 - o0, step = args.grad_out.feature_stride;
  for (int64_t o = 0; o < count; ++o) total[o] = 0;
  for (int64_t b0 = 0; b0 < args.sizes.batch; b0 += 32) {
    for (int64_t o = 0; o < count; ++o) partial[o] = 0;
    for (int64_t b = b0; b < min64(b0 + 32, args.sizes.batch); ++b) {
      const T* g = at<T>(args.grad_out, b, n) + o0 * step;
      if (step == 1) {
        for (int64_t o = 0; o < count; ++o) partial[o] += widen(g[o]);
      } else {
        for (int64_t o = 0; o < count; ++o) partial[o] += widen(g[o * step]);
      }
    }
    for (int64_t o = 0; o < count; ++o) total[o] += partial[o];
  }
  T* to = static_cast<T*>(args.grad_bias) + n * args.sizes.out + o0;
  for (int64_t o = 0; o < count; ++o) narrow(static_cast<C>(total[o]), to + o);
}

template <class T>
void backward_weight(const BackwardArgs& args, const Range& range) {
  using C = ComputeOf<T>;
  constexpr int64_t wide = kColumns<C>;
  const Sizes& s = args.sizes;
  const int64_t outs = range.row_end - range.row_begin;
  const int64_t depth = min64(kInnerBlock, s.batch);
  const bool pack_x = !kSame<T, C> || args.x.feature_stride != 1;
  Scratch scratch((depth * (wide + kRows) + outs * (wide + 3) + 256) * static_cast<int64_t>(sizeof(C)));
  C* const x_panel = scratch.take<C>(pack_x ? depth * wide : 0);
  C* const g_tile = scratch.take<C>(kSame<T, C> ? 0 : depth * kRows);
  C* const acc = scratch.take<C>(kSame<T, C> ? 0 : outs * wide);
  C* const partial = scratch.take<C>(outs);
  double* const total = scratch.take<double>(outs);
  for (int64_t n = range.begin; n < range.end; ++n) {
    if (args.grad_bias) sum_rows<T>(args, n, range.row_begin, range.row_end, partial, total);
    if (!args.grad_weight) continue;
    T* const to = static_cast<T*>(args.grad_weight) + (n * s.out + range.row_begin) * s.in;
    for (int64_t i0 = 0; i0 < s.in; i0 += wide) {
      const int columns = static_cast<int>(min64(wide, s.in - i0));
      for (int64_t b0 = 0; b0 < s.batch; b0 += depth) {
        const int64_t inner = min64(depth, s.batch - b0);
        const T* x = at<T>(args.x, b0, n) + i0 * args.x.feature_stride;
        if (pack_x) widen_block(x, args.x.batch_stride, args.x.feature_stride, inner, columns, x_panel, wide);
        for (int64_t o = 0; o < outs; o += kRows) {
          const int rows = static_cast<int>(min64(kRows, outs - o));
          const T* g = at<T>(args.grad_out, b0, n) + (range.row_begin + o) * args.grad_out.feature_stride;
          Tile<C> t = {inner, g_tile, 1, kRows, x_panel, wide, nullptr, acc + o * wide, wide, b0 > 0};
          if (!pack_x) {
            t.b = reinterpret_cast<const C*>(x);
            t.b_row = args.x.batch_stride;
          }
          if (kSame<T, C>) {
            t.a = reinterpret_cast<const C*>(g);
            t.a_row = args.grad_out.feature_stride;
            t.a_inner = args.grad_out.batch_stride;
            t.c = reinterpret_cast<C*>(to + o * s.in + i0);
            t.c_row = s.in;
          } else {
            widen_block(g, args.grad_out.batch_stride, args.grad_out.feature_stride, inner, rows, g_tile,
                        kRows);
          }
          multiply_tile(t, rows, columns);
        }
      }
      if (!kSame<T, C>) narrow_block(acc, wide, outs, columns, to + i0, s.in, int64_t{1});
    }
  }
}

#define FASTLAYERS_DISPATCH(type, function, ...) \
  switch (type) {                                \
    case Type::float32:                          \
      return function<float>(__VA_ARGS__);       \
    case Type::float64:                          \
      return function<double>(__VA_ARGS__);      \
    case Type::bfloat16:                         \
      return function<BFloat16>(__VA_ARGS__);    \
    case Type::float16:                          \
      return function<Float16>(__VA_ARGS__);     \
  }

void forward_any(Type type, const ForwardArgs& args, const Range& range) {
  FASTLAYERS_DISPATCH(type, forward, args, range)
}
void backward_input_any(Type type, const BackwardArgs& args, const Range& range) {
  FASTLAYERS_DISPATCH(type, backward_input, args, range)
}
void backward_weight_any(Type type, const BackwardArgs& args, const Range& range) {
  FASTLAYERS_DISPATCH(type, backward_weight, args, range)
}

}  // namespace
}  // namespace fastlayers
