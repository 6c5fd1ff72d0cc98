// LinearList on the CPU as functions of pointers and sizes: no torch, so that tests run them under
// sanitizers.
#pragma once

#include <cstdint>

namespace fastlayers {

enum class Type { float32, float64, bfloat16, float16 };

// A (batch, list, feature) operand. Strides count elements; those of inputs may be 0.
struct Operand {
  const void* data;
  int64_t batch_stride, list_stride, feature_stride;
};

struct Output {
  void* data;
  int64_t batch_stride, list_stride, feature_stride;
};

// The weight is (list, out, in) with in contiguous, the bias (list, out) contiguous or null.
struct Weight {
  const void* data;
  int64_t list_stride, out_stride;
};

struct Sizes {
  int64_t batch, list, in, out;
};

// What one call computes; a thread works on linears [begin, end) and rows [row_begin, row_end).
struct Range {
  int64_t begin, end, row_begin, row_end;
};

struct ForwardArgs {
  Sizes sizes;
  Operand x;
  Weight weight;
  const void* bias;
  Output out;
};

// A null output is not computed. Where x is shared, grad_x is the sum over the list. grad_weight (list, out,
// in) and grad_bias (list, out) are contiguous.
struct BackwardArgs {
  Sizes sizes;
  Operand grad_out, x;
  Weight weight;
  Output grad_x;
  void* grad_weight;
  void* grad_bias;
  bool shared;
};

// The kernels of one instruction set, for one element type.
struct LinearListKernels {
  const char* name;
  void (*forward)(Type, const ForwardArgs&, const Range&);
  // grad_x for the linears and rows of the range.
  void (*backward_input)(Type, const BackwardArgs&, const Range&);
  // grad_weight and grad_bias for the linears of the range and the outputs [row_begin, row_end), all batch
  // rows.
  void (*backward_weight)(Type, const BackwardArgs&, const Range&);
};

extern const LinearListKernels linear_list_baseline;
#if defined(__x86_64__)
extern const LinearListKernels linear_list_avx2;
extern const LinearListKernels linear_list_avx512;
#endif

// The best set this machine can run; FASTLAYERS_CPU_CAPABILITY=baseline, avx2 or avx512 asks for a lesser
// one.
const LinearListKernels& linear_list_kernels();

}  // namespace fastlayers
