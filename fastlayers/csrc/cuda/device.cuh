// What a kernel header needs of the device, under nvcc or under a plain C++ compiler.
//
// The kernels themselves contain no #ifdef: a C++ compiler that has `simt.h` on its include path (the tests'
// emulation of a grid of threads) reads the same source and runs it on the CPU.
#pragma once

#include <cstdint>

#include "linear_list_plan.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#else
#include "simt.h"
#endif

namespace fastlayers {

template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int size = kVectorBytes / sizeof(T);
  T item[size];
};

// Four elements: one access where they come in fours (two for float64).
template <typename T>
struct alignas(kQuad * sizeof(T) < kVectorBytes ? kQuad * sizeof(T) : kVectorBytes) Quad {
  T item[kQuad];
};

#ifdef __CUDACC__
// The block's dynamic shared memory.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(kVectorBytes) unsigned char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// Start copying 16 aligned bytes to shared memory; no register holds them, so all copies of a tile fly at
// once.
__device__ inline void copy_async(void* shared, const void* global) {
  __pipeline_memcpy_async(shared, global, kVectorBytes);
}

// Wait for this thread's copies. The other threads' copies are there after a barrier.
__device__ inline void wait_for_copies() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

template <typename T>
__device__ inline Vector<T> load_vector(const T* global) {
  return *reinterpret_cast<const Vector<T>*>(global);
}
#endif

// The type in which a sum over elements of type T is kept.
template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename T>
using accumulator_t = typename Accumulator<T>::type;

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ inline T narrow(accumulator_t<T> value) {
  return value;
}
template <>
__device__ inline __half narrow<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

}  // namespace fastlayers
