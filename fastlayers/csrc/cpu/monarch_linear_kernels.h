// MonarchLinear's kernels, compiled once per instruction set, on the microkernel of micro.h.
//
// The gradient of a weight is summed tile after tile in order, whoever computes it, so results are bitwise
// the same however the work is split among threads.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "cpu/micro.h"
#include "cpu/monarch_linear.h"
#include "cpu/transpose.h"

namespace fastlayers {
namespace {

constexpr int64_t kLongestSum = 512;  // longer ones are summed in blocks, for accuracy
// From this many tokens on, copying 64 rows of a weight's panel next to each other pays: rows 1 KiB apart
// (64 x 256 weights) share 8 of the 64 sets of the first cache.
constexpr int64_t kPackTokens = 32;

// Write past the caches, for results that would not stay there anyway: a plain store first reads the line.
// `to` lies on a whole vector.
template <class C>
inline void stream(C* to, Vec<C> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(C) == 4) {
    _mm512_stream_ps(to, (__m512)v);
  } else {
    _mm512_stream_pd(to, (__m512d)v);
  }
#elif defined(__AVX__)
  if constexpr (sizeof(C) == 4) {
    _mm256_stream_ps(to, (__m256)v);
  } else {
    _mm256_stream_pd(to, (__m256d)v);
  }
#else
  store(to, v);
#endif
}
inline void stream_end() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t clamp(int64_t value, int64_t most) { return value < 0 ? 0 : value < most ? value : most; }

template <class C>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<C*>(aligned_alloc(64, (count * sizeof(C) + 127) / 64 * 64))) {
    if (data_ == nullptr) abort();
  }
  ~Buffer() { free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator C*() const { return data_; }

 private:
  C* data_;
};

// C[m, j] (+)= sum_k A[m, k] * B[k, j], of any size; `t` holds everything but the number of rows and columns.
template <class C>
inline void multiply(Tile<C> t, int64_t rows, int64_t columns) {
  const int64_t inner = t.inner;
  const C* const bias = t.bias;
  const bool accumulate = t.accumulate;
  const Tile<C> start = t;
  for (int64_t j = 0; j < columns; j += kColumns<C>) {
    const int width = static_cast<int>(least(kColumns<C>, columns - j));
    for (int64_t m = 0; m < rows; m += kRows) {
      const int height = static_cast<int>(least(kRows, rows - m));
      t.c = start.c + m * t.c_row + j;
      t.bias = bias == nullptr ? nullptr : bias + j;
      t.accumulate = accumulate;
      for (int64_t k = 0; k == 0 || k < inner; k += kLongestSum) {
        t.inner = least(kLongestSum, inner - k);
        t.a = start.a + m * t.a_row + k * t.a_inner;
        t.b = start.b + k * t.b_row + j;
        multiply_tile(t, height, width);
        t.accumulate = true;
        t.bias = nullptr;
      }
    }
  }
}

template <class T>
constexpr bool kSame = sizeof(T) == sizeof(ComputeOf<T>);

template <class T>
struct Monarch {
  using C = ComputeOf<T>;
  const MonarchArgs& args;
  const MonarchFactor& f;
  const int k;
  const int64_t tile;

  Monarch(const MonarchArgs& a, int factor) : args(a), f(a.factors[factor]), k(factor), tile(a.tile) {}

  int64_t tokens_of(int64_t i) const { return least(tile, args.tokens - i * tile); }
  int64_t done_of(int64_t batch) const { return batch / f.rest; }
  int64_t rest_of(int64_t batch) const { return batch % f.rest; }
  const C* weight(int64_t batch) const {
    return static_cast<const C*>(f.weight) + batch * f.in_size * f.out_size;
  }
  C* grad_weight(int64_t batch) const { return static_cast<C*>(f.grad) + batch * f.in_size * f.out_size; }
  // The features this batch entry reads and writes, `rest * tile` elements apart.
  C* in_rows(void* const* of, int64_t i, int64_t batch) const {
    const int64_t features = f.done * f.in_size * f.rest;
    return static_cast<C*>(of[k]) +
           (i * features + done_of(batch) * f.in_size * f.rest + rest_of(batch)) * tile;
  }
  C* out_rows(void* const* of, int64_t i, int64_t batch) const {
    const int64_t features = f.done * f.out_size * f.rest;
    return static_cast<C*>(of[k + 1]) +
           (i * features + done_of(batch) * f.out_size * f.rest + rest_of(batch)) * tile;
  }
  bool last() const { return k + 1 == args.count; }
  // How many of the output features of this batch entry of the last factor exist.
  int64_t columns_of(int64_t batch) const {
    return clamp(args.out_features - batch * f.out_size, f.out_size);
  }

  // The features of x that group `c` reads: the first, their distance, and how many exist.
  int64_t first_feature(int64_t c) const { return args.contiguous ? c * args.in_first : c; }
  int64_t feature_step() const { return args.contiguous ? 1 : f.rest; }
  int64_t features_of(int64_t c) const {
    const int64_t left = args.in_features - first_feature(c);
    return left <= 0 ? 0 : clamp((left + feature_step() - 1) / feature_step(), args.in_first);
  }
  // Groups that are transposed together: of strided ones, as many as share a run of x.
  int64_t group_block() const { return args.contiguous ? 1 : least(kLanes<C>, f.rest); }

  // to[c - c0][feature][token] = x, zero where there is none.
  void gather(int64_t i, int64_t c0, int64_t c1, C* to) const {
    const int64_t tokens = tokens_of(i), in = args.in_first;
    const T* x = static_cast<const T*>(args.x) + i * tile * args.x_row;
    if (tokens < tile || features_of(c1 - 1) < in) memset(to, 0, (c1 - c0) * in * tile * sizeof(C));
    if (args.contiguous) {
      transpose_block(x + first_feature(c0), args.x_row, tokens, features_of(c0), to, tile);
      return;
    }
    for (int64_t n = 0; n < in; ++n) {
      const int64_t groups = clamp(args.in_features - n * f.rest - c0, c1 - c0);
      transpose_block(x + n * f.rest + c0, args.x_row, tokens, groups, to + n * tile, in * tile);
    }
  }

  // grad_x = from[c - c0][feature][token].
  void scatter(int64_t i, int64_t c0, int64_t c1, const C* from) const {
    const int64_t tokens = tokens_of(i), in = args.in_first;
    T* x = static_cast<T*>(args.grad_x) + i * tile * args.in_features;
    if (args.contiguous) {
      transpose_block(from, tile, features_of(c0), tokens, x + first_feature(c0), args.in_features);
      return;
    }
    for (int64_t n = 0; n < in; ++n) {
      const int64_t groups = clamp(args.in_features - n * f.rest - c0, c1 - c0);
      transpose_block(from + n * tile, in * tile, groups, tokens, x + n * f.rest + c0, args.in_features);
    }
  }

  // A few tokens: rows of tokens times the weight as it lies, and then each result to its place.
  void forward_rows(int64_t batch, const C* a, int64_t a_row, int64_t a_inner, int64_t inner,
                    C* scratch) const {
    Tile<C> t = {inner, a, a_row, a_inner, weight(batch), f.out_size, nullptr, scratch, f.out_size, false};
    multiply(t, args.tokens, f.out_size);
    transpose_block(scratch, f.out_size, args.tokens, f.out_size, out_rows(args.states, 0, batch),
                    f.rest * tile);
  }

  void forward_few(const MonarchPart& part) const {
    Buffer<C> scratch(tile * f.out_size), row(k == 0 ? tile * f.in_size : 0);
    for (int64_t batch = part.batch_begin; batch < part.batch_end; ++batch) {
      if (k > 0) {
        forward_rows(batch, in_rows(args.states, 0, batch), 1, f.rest * tile, f.in_size, scratch);
        continue;
      }
      const T* x = static_cast<const T*>(args.x) + first_feature(batch);
      const int64_t features = features_of(batch);
      if constexpr (kSame<T>) {
        forward_rows(batch, x, args.x_row, feature_step(), features, scratch);
      } else {
        for (int64_t t = 0; t < args.tokens; ++t) {
          for (int64_t n = 0; n < features; ++n) {
            row[t * f.in_size + n] = widen(x[t * args.x_row + n * feature_step()]);
          }
        }
        forward_rows(batch, row, f.in_size, 1, features, scratch);
      }
    }
  }

  void forward_inner(const MonarchPart& part) const {
    if (args.tokens == tile && tile < kLanes<C>) return forward_few(part);
    const int64_t block = k == 0 ? group_block() : 1;
    Buffer<C> gathered(k == 0 ? block * f.in_size * tile : 0);
    for (int64_t b0 = part.batch_begin; b0 < part.batch_end; b0 += block) {
      const int64_t b1 = least(b0 + block, part.batch_end);
      for (int64_t i = part.tile_begin; i < part.tile_end; ++i) {
        if (k == 0) gather(i, b0, b1, gathered);
        for (int64_t batch = b0; batch < b1; ++batch) {
          const C* in = k == 0 ? gathered + (batch - b0) * f.in_size * tile : in_rows(args.states, i, batch);
          const int64_t in_row = k == 0 ? tile : f.rest * tile;
          Tile<C> t = {f.in_size,
                       weight(batch),
                       1,
                       f.out_size,
                       in,
                       in_row,
                       nullptr,
                       out_rows(args.states, i, batch),
                       f.rest * tile,
                       false};
          multiply(t, f.out_size, tile);
        }
      }
    }
  }

  // The last factor, whose rest is 1: rows of features.
  void forward_last(const MonarchPart& part) const {
    constexpr int64_t wide = kColumns<C>;
    const bool packs = args.tokens >= kPackTokens && f.out_size > wide;
    const bool streams =
        kSame<T> && args.stream && f.out_size % kLanes<C> == 0 && args.out_features % kLanes<C> == 0;
    const bool direct = kSame<T> && !streams;
    Buffer<C> packed(packs ? (f.out_size + wide - 1) / wide * f.in_size * wide : 0), bias_row(f.out_size);
    Buffer<C> rows(direct ? 0 : tile * wide);
    for (int64_t batch = part.batch_begin; batch < part.batch_end; ++batch) {
      const int64_t columns = columns_of(batch);
      if (columns == 0) continue;
      const C* bias = nullptr;
      if (args.bias != nullptr) {
        const T* from = static_cast<const T*>(args.bias) + batch * f.out_size;
        for (int64_t j = 0; j < columns; ++j) bias_row[j] = widen(from[j]);
        bias = bias_row;
      }
      const C* const b = weight(batch);
      if (packs) pack_panels(b, columns, packed);
      for (int64_t i = part.tile_begin; i < part.tile_end; ++i) {
        const int64_t tokens = tokens_of(i);
        T* const out = static_cast<T*>(args.out) + i * tile * args.out_features + batch * f.out_size;
        for (int64_t j = 0; j < columns; j += wide) {
          const int64_t width = least(wide, columns - j);
          Tile<C> t = {f.in_size,
                       in_rows(args.states, i, batch),
                       1,
                       tile,
                       packs ? packed + j * f.in_size : b + j,
                       packs ? wide : f.out_size,
                       bias == nullptr ? nullptr : bias + j,
                       rows,
                       wide,
                       false};
          if constexpr (kSame<T>) {
            if (direct) {
              t.c = out + j;
              t.c_row = args.out_features;
            }
          }
          multiply(t, tokens, width);
          if (!direct) write_rows(rows, tokens, width, streams, out + j);
        }
      }
    }
    if (streams) stream_end();
  }

  // Row after row, as they lie: a panel after the other would defeat the prefetcher.
  void pack_panels(const C* b, int64_t columns, C* to) const {
    constexpr int64_t wide = kColumns<C>, lanes = kLanes<C>;
    for (int64_t n = 0; n < f.in_size; ++n, b += f.out_size) {
      for (int64_t j = 0; j < columns; j += wide) {
        C* const row = to + j * f.in_size + n * wide;
        if (columns - j >= wide) {
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v) store(row + v * lanes, load(b + j + v * lanes));
        } else {
          for (int64_t c = 0; c < columns - j; ++c) row[c] = b[j + c];
        }
      }
    }
  }

  void write_rows(const C* rows, int64_t tokens, int64_t width, bool streams, T* out) const {
    for (int64_t r = 0; r < tokens; ++r) {
      const C* from = rows + r * kColumns<C>;
      T* to = out + r * args.out_features;
      if constexpr (kSame<T>) {
        for (int64_t c = 0; streams && c < width; c += kLanes<C>) stream(to + c, load(from + c));
      }
      for (int64_t c = 0; !streams && c < width; ++c) narrow(from[c], to + c);
    }
  }

  // Everything of one tile and batch entry, given grad [out_size][tile] with its rows `grad_step` apart, and
  // the same with tokens first, [tokens][grad_columns].
  void backward_entry(int64_t batch, bool fresh, int64_t columns, int64_t tokens, const C* grad,
                      int64_t grad_step, const C* grad_rows, int64_t grad_rows_step, const C* in,
                      int64_t in_step, C* grad_in, int64_t grad_in_step) const {
    if (grad_in != nullptr) {
      Tile<C> t = {columns, weight(batch), f.out_size,   1,    grad, grad_step,
                   nullptr, grad_in,       grad_in_step, false};
      multiply(t, f.in_size, tile);
    }
    if (in != nullptr) {
      Tile<C> t = {tokens,     in,    in_step, 1, grad_rows, grad_rows_step, nullptr, grad_weight(batch),
                   f.out_size, !fresh};
      multiply(t, f.in_size, columns);
      for (int64_t n = 0; fresh && columns < f.out_size && n < f.in_size; ++n) {
        memset(grad_weight(batch) + n * f.out_size + columns, 0, (f.out_size - columns) * sizeof(C));
      }
    }
  }

  void backward_last(bool input, bool with_weight, const MonarchPart& part) const {
    Buffer<C> turned(f.out_size * tile), widened(kSame<T> ? 0 : tile * f.out_size);
    Buffer<C> sum(f.out_size);
    for (int64_t batch = part.batch_begin; batch < part.batch_end; ++batch) {
      const int64_t columns = columns_of(batch);
      for (int64_t i = part.tile_begin; i < part.tile_end; ++i) {
        const int64_t tokens = tokens_of(i);
        const T* from =
            static_cast<const T*>(args.grad_out) + i * tile * args.grad_out_row + batch * f.out_size;
        const C* rows;
        int64_t rows_step = args.grad_out_row;
        if constexpr (kSame<T>) {
          rows = from;
        } else {
          for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t j = 0; j < columns; ++j)
              widened[t * f.out_size + j] = widen(from[t * args.grad_out_row + j]);
          }
          rows = widened;
          rows_step = f.out_size;
        }
        if (args.grad_bias != nullptr)
          add_rows(rows, rows_step, tokens, columns, sum, args.grad_bias + batch * f.out_size);
        if (input) {
          if (tokens < tile) memset(turned, 0, columns * tile * sizeof(C));
          transpose_block(rows, rows_step, tokens, columns, static_cast<C*>(turned), tile);
        }
        backward_entry(batch, args.fresh && i == 0, columns, tokens, turned, tile, rows, rows_step,
                       with_weight ? in_rows(args.states, i, batch) : nullptr, tile,
                       input ? in_rows(args.grads, i, batch) : nullptr, tile);
      }
    }
  }

  // Sixteen rows at a time in the compute type, those sums in double: nn.Linear's own sum is a cascade.
  static void add_rows(const C* rows, int64_t step, int64_t count, int64_t columns, C* sum, double* to) {
    for (int64_t t0 = 0; t0 < count; t0 += 16) {
      memset(sum, 0, columns * sizeof(C));
      for (int64_t t = t0; t < least(t0 + 16, count); ++t) {
        for (int64_t j = 0; j < columns; ++j) sum[j] += rows[t * step + j];
      }
      for (int64_t j = 0; j < columns; ++j) to[j] += sum[j];
    }
  }

  void backward_inner(bool input, bool with_weight, const MonarchPart& part) const {
    const int64_t block = k == 0 ? group_block() : 1;
    const int64_t size = k == 0 ? block * f.in_size * tile : 0;
    Buffer<C> gathered(with_weight ? size : 0), grad_in(input ? size : 0), turned(tile * f.out_size);
    const int64_t step = f.rest * tile;
    for (int64_t b0 = part.batch_begin; b0 < part.batch_end; b0 += block) {
      const int64_t b1 = least(b0 + block, part.batch_end);
      for (int64_t i = part.tile_begin; i < part.tile_end; ++i) {
        const int64_t tokens = tokens_of(i);
        if (k == 0 && with_weight) gather(i, b0, b1, gathered);
        for (int64_t batch = b0; batch < b1; ++batch) {
          const C* grad = out_rows(args.grads, i, batch);
          if (with_weight)
            transpose_block(grad, step, f.out_size, tokens, static_cast<C*>(turned), f.out_size);
          const int64_t at = (batch - b0) * f.in_size * tile;
          const C* in = nullptr;
          C* to = nullptr;
          if (with_weight) in = k == 0 ? gathered + at : in_rows(args.states, i, batch);
          if (input) to = k == 0 ? grad_in + at : in_rows(args.grads, i, batch);
          backward_entry(batch, args.fresh && i == 0, f.out_size, tokens, grad, step, turned, f.out_size, in,
                         k == 0 ? tile : step, to, k == 0 ? tile : step);
        }
        if (k == 0 && input) scatter(i, b0, b1, grad_in);
      }
    }
  }
};

template <class T>
void forward(const MonarchArgs& args, int factor, const MonarchPart& part) {
  const Monarch<T> m(args, factor);
  m.last() ? m.forward_last(part) : m.forward_inner(part);
}

template <class T>
void backward(const MonarchArgs& args, int factor, bool input, bool weight, const MonarchPart& part) {
  const Monarch<T> m(args, factor);
  m.last() ? m.backward_last(input, weight, part) : m.backward_inner(input, weight, part);
}

#define FASTLAYERS_MONARCH_DISPATCH(type, function, ...) \
  switch (type) {                                        \
    case Type::float32:                                  \
      return function<float>(__VA_ARGS__);               \
    case Type::float64:                                  \
      return function<double>(__VA_ARGS__);              \
    case Type::bfloat16:                                 \
      return function<BFloat16>(__VA_ARGS__);            \
    case Type::float16:                                  \
      return function<Float16>(__VA_ARGS__);             \
  }

void monarch_forward(Type type, const MonarchArgs& args, int factor, const MonarchPart& part) {
  FASTLAYERS_MONARCH_DISPATCH(type, forward, args, factor, part)
}
void monarch_backward(Type type, const MonarchArgs& args, int factor, bool input, bool weight,
                      const MonarchPart& part){
    FASTLAYERS_MONARCH_DISPATCH(type, backward, args, factor, input, weight, part)} int64_t
    monarch_lanes(Type type) {
  return type == Type::float64 ? kLanes<double> : kLanes<float>;
}

}  // namespace
}  // namespace fastlayers
