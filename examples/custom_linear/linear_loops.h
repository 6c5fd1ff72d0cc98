// The linear layer as loops over pointers and sizes. Both C++ rungs call it; it knows neither torch nor
// Python.
#pragma once

#include <cstdint>

namespace custom_linear {

struct Sizes {
  int64_t batch, in, out;
};

// doc: loops
// A sum in strict order cannot be vectorised, and loses more digits; 16 partial sums can, and lose fewer.
constexpr int64_t kLanes = 16;

template <class T>
T dot(const T* a, const T* b, int64_t n) {
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  T sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (int64_t j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

template <class T>
void add_scaled(T* sum, T scale, const T* row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += scale * row[i];
}

// y (B, O) = x (B, I) weight (O, I)^T: every output is a dot product of two rows, both contiguous.
template <class T>
void linear_loops(const T* x, const T* weight, T* y, const Sizes& s) {
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t o = 0; o < s.out; ++o) y[b * s.out + o] = dot(x + b * s.in, weight + o * s.in, s.in);
  }
}

// grad_x (B, I) = grad_y (B, O) weight, grad_weight (O, I) = grad_y^T x; both must come in as zeros.
template <class T>
void linear_backward_loops(const T* grad_y, const T* x, const T* weight, T* grad_x, T* grad_weight,
                           const Sizes& s) {
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t o = 0; o < s.out; ++o) {
      const T g = grad_y[b * s.out + o];
      add_scaled(grad_x + b * s.in, g, weight + o * s.in, s.in);
      add_scaled(grad_weight + o * s.in, g, x + b * s.in, s.in);
    }
  }
}
// doc: end

}  // namespace custom_linear
