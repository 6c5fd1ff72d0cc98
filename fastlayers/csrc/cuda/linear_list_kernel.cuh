// LinearList with tiny features: forward, and one fused backward, in place on (B, N, features).
//
// A block owns a few neighbouring linears. It copies their weights and a tile of rows to shared memory, where
// the copy keeps each row's distance from a 16-byte boundary, so that whole vectors travel whatever the
// alignment. Every result is summed by one thread in a fixed order: no atomics, the same numbers in every
// run.
#pragma once

#include "device.cuh"
#include "linear_list_plan.h"

namespace fastlayers {

// Blocks that a multiprocessor shall hold at once: as many as the registers allow without a spill. At
// (32, 10000, 7, 7) in float32 there are 625 blocks, which 132 multiprocessors then hold all at once.
template <typename T>
constexpr int kForwardResident = sizeof(T) == 8 ? 5 : 6;
template <typename T>
constexpr int kBackwardResident = sizeof(T) == 8 ? 4 : 5;

// A tile of rows in shared memory: element (r, n, f) lies at row(r) + n * linear + f.
template <typename T>
struct StagedRows {
  T* data;
  int pitch, linear;
  int shift, shift_step, shift_mask;  // row r starts (shift + r * shift_step) & shift_mask elements late
  bool quads;                         // four features lie at a multiple of four elements
  __device__ int row(int r) const { return r * pitch + ((shift + r * shift_step) & shift_mask); }
};

// Copy rows whose linears and features lie side by side, as 16-byte windows cut at the source's own
// boundaries.
template <typename T>
__device__ inline StagedRows<T> stage_vectors(const T* source, int64_t row_stride, int rows, int linears,
                                              int features, const RowLayout& layout, T* shared) {
  constexpr int size = Vector<T>::size;
  const int length = linears * features;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(source) / sizeof(T) % size);
  const int shift_step = static_cast<int>(row_stride & (size - 1));
  const bool quads = features % kQuad == 0 && shift % kQuad == 0 && shift_step % kQuad == 0;
  const StagedRows<T> tile{shared, layout.pitch, features, shift, shift_step, size - 1, quads};
  const int windows = ((shift_step == 0 ? shift : size - 1) + length + size - 1) / size;
  const int step_row = kThreads / windows, step_window = kThreads % windows;
  int r = threadIdx.x / windows, window = threadIdx.x % windows;
  while (r < rows) {
    const int start = tile.row(r);
    const int first = window * size - (start - r * layout.pitch);  // the window's start, counted in the row
    const T* from = source + r * row_stride;
    if (first >= 0 && first + size <= length) {
      copy_async(shared + start + first, from + first);
    } else {
      for (int e = first < 0 ? 0 : first; e < first + size && e < length; ++e) shared[start + e] = from[e];
    }
    r += step_row;
    window += step_window;
    if (window >= windows) {
      window -= windows;
      ++r;
    }
  }
  return tile;
}

// Copy rows of any strides (transposed, expanded), one element at a time, neighbours in memory by neighbours.
template <typename T>
__device__ inline StagedRows<T> stage_elements(const Strided<const T>& source, int rows, int linears,
                                               int features, const RowLayout& layout, T* shared) {
  const bool across = linear_first(source);
  for (int e = threadIdx.x; e < linears * features; e += kThreads) {
    const int n = across ? e % linears : e / features;
    const int f = across ? e / linears : e % features;
    const T* from = source.data + n * source.linear + f * source.feature;
    T* to = shared + n * layout.linear + f;
#pragma unroll 8
    for (int r = 0; r < rows; ++r) to[r * layout.pitch] = from[r * source.row];
  }
  return {shared, layout.pitch, layout.linear, 0, 0, 0, features % kQuad == 0};
}

template <typename T>
__device__ inline StagedRows<T> stage_rows(Strided<const T> source, int64_t first_row, int rows,
                                           int64_t first_linear, int linears, int features,
                                           const RowLayout& layout, T* shared) {
  source.data += first_row * source.row + first_linear * source.linear;
  return layout.vectors ? stage_vectors(source.data, source.row, rows, linears, features, layout, shared)
                        : stage_elements(source, rows, linears, features, layout, shared);
}

// Read neighbouring elements of shared memory, widened: one, or four in one access.
template <typename T>
__device__ inline void read(const T* shared, accumulator_t<T> (&values)[1]) {
  values[0] = widen(*shared);
}

template <typename T>
__device__ inline void read(const T* shared, accumulator_t<T> (&values)[kQuad]) {
  const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(shared);
#pragma unroll
  for (int k = 0; k < kQuad; ++k) values[k] = widen(quad.item[k]);
}

// Where the columns of a result lie: column c of a tile is a feature of a linear, neighbours in memory are
// neighbouring columns. A row of the result is written by neighbouring threads.
struct Columns {
  int linears, features;
  bool across;  // neighbours are linears
  __device__ int count() const { return linears * features; }
  __device__ int linear(int column) const { return across ? column % linears : column / features; }
  __device__ int feature(int column) const { return across ? column / linears : column % features; }
  __device__ int column(int n, int f) const { return across ? f * linears + n : n * features + f; }
};

// Copy weights (n, o, i) to shared memory as [inner][column]; the inner index is i in forward, o in backward.
template <bool kBackward, typename T>
__device__ inline void stage_weights(const T* source, Columns columns, int in_features, int out_features,
                                     accumulator_t<T>* shared) {
  constexpr int size = Vector<T>::size;
  const int length = columns.linears * out_features * in_features;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(source) / sizeof(T) % size);
  for (int first = static_cast<int>(threadIdx.x) * size - shift; first < length; first += kThreads * size) {
    Vector<T> values;
    const bool whole = first >= 0 && first + size <= length;
    if (whole) values = load_vector(source + first);
    const int begin = first < 0 ? 0 : first;
    int i = begin % in_features, o = begin / in_features % out_features;
    int n = begin / (in_features * out_features);
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const int e = first + k;
      if (e < 0 || e >= length) continue;
      const int at =
          kBackward ? o * columns.count() + columns.column(n, i) : i * columns.count() + columns.column(n, o);
      shared[at] = widen(whole ? values.item[k] : source[e]);
      if (++i == in_features) {
        i = 0;
        if (++o == out_features) {
          o = 0;
          ++n;
        }
      }
    }
  }
}

// Write result(r, column) = bias(column) + sum over k < inner of rows(r, linear, k) * weights(k, column).
// A thread sums kRows rows at a time, so that one weight serves them all, and reads kStep features at once.
template <int kRows, int kStep, typename T>
__device__ inline void multiply_rows(const StagedRows<T>& staged, int rows, int inner,
                                     const accumulator_t<T>* weights, Columns columns, const T* bias,
                                     const Strided<T>& result) {
  using A = accumulator_t<T>;
  const int count = columns.count(), groups = (rows + kRows - 1) / kRows;
  for (int task = threadIdx.x; task < count * groups; task += kThreads) {
    const int group = task / count, column = task - group * count;
    const int n = columns.linear(column), f = columns.feature(column);
    int at[kRows];
    A sum[kRows];
    const A start = bias == nullptr ? A(0) : widen(bias[n * columns.features + f]);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int r = group + j * groups;
      at[j] = staged.row(r < rows ? r : rows - 1) + n * staged.linear;
      sum[j] = start;
    }
#pragma unroll(kQuad / kStep)
    for (int k = 0; k < inner; k += kStep) {
      A weight[kStep], value[kStep];
#pragma unroll
      for (int q = 0; q < kStep; ++q) weight[q] = weights[(k + q) * count + column];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        read(staged.data + at[j] + k, value);
#pragma unroll
        for (int q = 0; q < kStep; ++q) sum[j] = fma(value[q], weight[q], sum[j]);
      }
    }
    T* to = result.data + n * result.linear + f * result.feature;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int r = group + j * groups;
      if (r < rows) to[r * result.row] = narrow<T>(sum[j]);
    }
  }
}

template <typename T>
__device__ inline void multiply_rows(const StagedRows<T>& staged, int rows, int inner,
                                     const accumulator_t<T>* weights, Columns columns, const T* bias,
                                     const Strided<T>& result) {
  if (staged.quads) {
    multiply_rows<4, kQuad>(staged, rows, inner, weights, columns, bias, result);
  } else {
    multiply_rows<8, 1>(staged, rows, inner, weights, columns, bias, result);
  }
}

template <typename T>
__device__ inline Columns make_columns(const Strided<T>& result, int linears, int features) {
  return {linears, features, linear_first(result)};
}

// out(b, n, o) = bias(n, o) + sum over i of x(b, n, i) * weight(n, o, i). Grid: (blocks, row_blocks) of the
// plan.
template <typename T>
__global__ void __launch_bounds__(kThreads, kForwardResident<T>)
    linear_list_kernel(Strided<const T> x, const T* weight, const T* bias, Strided<T> out, Shape shape,
                       Tile tile) {
  const int64_t first_linear = int64_t{blockIdx.x} * tile.linears;
  const int linears = static_cast<int>(min(int64_t{tile.linears}, shape.linears - first_linear));
  const int in = shape.in_features, out_features = shape.out_features;
  const Columns columns = make_columns(out, linears, out_features);
  T* staged_x = reinterpret_cast<T*>(shared_memory());
  auto* weights = reinterpret_cast<accumulator_t<T>*>(staged_x + tile.rows * tile.x.pitch);

  for (int64_t first_row = int64_t{blockIdx.y} * tile.rows; first_row < shape.rows;
       first_row += int64_t{gridDim.y} * tile.rows) {
    const int rows = static_cast<int>(min(int64_t{tile.rows}, shape.rows - first_row));
    const bool first = first_row == int64_t{blockIdx.y} * tile.rows;
    if (!first) __syncthreads();  // the last tile has been read
    const auto staged = stage_rows(x, first_row, rows, first_linear, linears, in, tile.x, staged_x);
    if (first) {
      stage_weights<false>(weight + first_linear * out_features * in, columns, in, out_features, weights);
    }
    wait_for_copies();
    __syncthreads();
    multiply_rows(
        staged, rows, in, weights, columns, bias == nullptr ? nullptr : bias + first_linear * out_features,
        {out.data + first_row * out.row + first_linear * out.linear, out.row, out.linear, out.feature});
  }
}

// A thread's share of grad_weight and grad_bias: 4 x 4 elements of one linear, summed over some of the rows.
template <typename T>
struct GradTile {
  using A = accumulator_t<T>;
  int group, groups, n, o, i;
  A weight[kGradTile][kGradTile];
  A bias[kGradTile];

  __device__ GradTile(int linears, int in_features, int out_features) : weight{}, bias{} {
    const int tiles_i = (in_features + kGradTile - 1) / kGradTile;
    const int tasks = linears * grad_tiles(in_features, out_features);
    groups = kThreads / tasks;
    const int task = threadIdx.x % tasks;
    group = threadIdx.x / tasks;
    n = task / grad_tiles(in_features, out_features);
    o = task / tiles_i * kGradTile % round_up(out_features, kGradTile);
    i = task % tiles_i * kGradTile;
  }

  // Read this thread's four features of row r.
  __device__ static void read_features(const StagedRows<T>& staged, int r, const int (&at)[kGradTile],
                                       A (&values)[kGradTile]) {
    const T* row = staged.data + staged.row(r);
    if (staged.quads) return read(row + at[0], values);
#pragma unroll
    for (int k = 0; k < kGradTile; ++k) values[k] = widen(row[at[k]]);
  }

  // Threads beyond the last group have no rows; elements beyond the last feature repeat it and are not
  // stored.
  __device__ void add_rows(StagedRows<T> grad_out, StagedRows<T> x, bool with_x, int rows, int in_features,
                           int out_features) {
    if (group >= groups) return;
    int at_o[kGradTile], at_i[kGradTile];
#pragma unroll
    for (int k = 0; k < kGradTile; ++k) {
      at_o[k] = n * grad_out.linear + min(o + k, out_features - 1);
      at_i[k] = n * x.linear + min(i + k, in_features - 1);
    }
#pragma unroll 2
    for (int r = group; r < rows; r += groups) {
      A g[kGradTile];
      read_features(grad_out, r, at_o, g);
#pragma unroll
      for (int k = 0; k < kGradTile; ++k) bias[k] += g[k];
      if (!with_x) continue;
      A value[kGradTile];
      read_features(x, r, at_i, value);
#pragma unroll
      for (int k = 0; k < kGradTile; ++k) {
#pragma unroll
        for (int l = 0; l < kGradTile; ++l) weight[k][l] = fma(g[k], value[l], weight[k][l]);
      }
    }
  }

  // Lay this thread's sums beside those of the others, one slot for each element of the tile.
  __device__ void share(A* shares) const {
#pragma unroll
    for (int k = 0; k < kGradTile; ++k) {
#pragma unroll
      for (int l = 0; l < kGradTile; ++l) {
        shares[(k * kGradTile + l) * kSharePitch + static_cast<int>(threadIdx.x)] = weight[k][l];
      }
      shares[(kGradTile * kGradTile + k) * kSharePitch + static_cast<int>(threadIdx.x)] = bias[k];
    }
  }
};

// Write the sums of the groups' shares, in the groups' order, to a block's grad_weight or grad_bias.
template <typename T>
__device__ inline void sum_shares(const accumulator_t<T>* shares, int linears, int in_features,
                                  int out_features, bool of_bias, T* result) {
  const int tiles_i = (in_features + kGradTile - 1) / kGradTile;
  const int tiles = grad_tiles(in_features, out_features), tasks = linears * tiles;
  const int width = of_bias ? 1 : in_features;
  for (int e = threadIdx.x; e < linears * out_features * width; e += kThreads) {
    const int i = e % width, o = e / width % out_features, n = e / (width * out_features);
    const int task = n * tiles + o / kGradTile * tiles_i + i / kGradTile;
    const int slot =
        of_bias ? kGradTile * kGradTile + o % kGradTile : o % kGradTile * kGradTile + i % kGradTile;
    accumulator_t<T> sum = shares[slot * kSharePitch + task];
    for (int g = 1; g < kThreads / tasks; ++g) sum += shares[slot * kSharePitch + g * tasks + task];
    result[e] = narrow<T>(sum);
  }
}

// grad_x(b, n, i) = sum over o of grad_out(b, n, o) * weight(n, o, i), and over the batch
// grad_weight(n, o, i) = sum of grad_out(b, n, o) * x(b, n, i), grad_bias(n, o) = sum of grad_out(b, n, o):
// each row is read once for all three. A result whose pointer is null is not wanted. Grid: blocks of the
// plan.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBackwardResident<T>)
    linear_list_backward_kernel(Strided<const T> grad_out, Strided<const T> x, const T* weight,
                                Strided<T> grad_x, T* grad_weight, T* grad_bias, Shape shape, Tile tile) {
  const int64_t first_linear = int64_t{blockIdx.x} * tile.linears;
  const int linears = static_cast<int>(min(int64_t{tile.linears}, shape.linears - first_linear));
  const int in = shape.in_features, out = shape.out_features;
  const Columns columns = make_columns(grad_x, linears, in);
  T* shared_g = reinterpret_cast<T*>(shared_memory());
  T* shared_x = shared_g + tile.rows * tile.grad_out.pitch;
  auto* weights = reinterpret_cast<accumulator_t<T>*>(shared_x + tile.rows * tile.x.pitch);
  const bool sums = grad_weight != nullptr || grad_bias != nullptr;
  GradTile<T> grad_tile(linears, in, out);

  for (int64_t first_row = 0; first_row < shape.rows; first_row += tile.rows) {
    const int rows = static_cast<int>(min(int64_t{tile.rows}, shape.rows - first_row));
    if (first_row > 0) __syncthreads();  // the last tile has been read
    const auto staged_g =
        stage_rows(grad_out, first_row, rows, first_linear, linears, out, tile.grad_out, shared_g);
    StagedRows<T> staged_x{};
    if (grad_weight != nullptr) {
      staged_x = stage_rows(x, first_row, rows, first_linear, linears, in, tile.x, shared_x);
    }
    if (grad_x.data != nullptr && first_row == 0) {
      stage_weights<true>(weight + first_linear * out * in, columns, in, out, weights);
    }
    wait_for_copies();
    __syncthreads();
    if (sums) grad_tile.add_rows(staged_g, staged_x, grad_weight != nullptr, rows, in, out);
    if (grad_x.data != nullptr) {
      T* to = grad_x.data + first_row * grad_x.row + first_linear * grad_x.linear;
      multiply_rows<T>(staged_g, rows, out, weights, columns, nullptr,
                       {to, grad_x.row, grad_x.linear, grad_x.feature});
    }
  }
  if (!sums) return;

  __syncthreads();  // the tiles have been read; their memory holds the groups' shares now
  auto* shares = reinterpret_cast<accumulator_t<T>*>(shared_memory());
  grad_tile.share(shares);
  __syncthreads();
  if (grad_weight != nullptr) {
    sum_shares(shares, linears, in, out, false, grad_weight + first_linear * out * in);
  }
  if (grad_bias != nullptr) sum_shares(shares, linears, in, out, true, grad_bias + first_linear * out);
}

}  // namespace fastlayers
