// A small SIMT machine on the CPU: a C++ compiler reads a CUDA kernel header through this file and runs it.
//
// Blocks run one after another, the threads of a block as fibres, each until its next barrier. The order of
// the threads is a parameter. Shared memory is a heap buffer of exactly the size asked for, poisoned before
// each block; asynchronous copies land when they are waited for, not before. Built with SIMT_TRACE (and the
// kernels with -fsanitize=thread, whose hooks simt.cpp implements itself) every access to memory is seen: see
// `Report`.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};
extern Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

// Run `kernel` once for each thread; `order`: 0 threads in order, 1 reversed, else shuffled from that seed.
void launch(Dim3 grid, int threads, size_t shared_bytes, unsigned order, void (*kernel)(const void*),
            const void* arguments);

template <typename F>
void launch(Dim3 grid, int threads, size_t shared_bytes, unsigned order, const F& kernel) {
  launch(grid, threads, shared_bytes, order, [](const void* f) { (*static_cast<const F*>(f))(); }, &kernel);
}

// Name a buffer that kernels read, or write exactly once in every byte.
void watch(const std::string& name, const void* data, size_t bytes, bool output);

// What was found since the start: problems (races, unwritten results, ...) and the memory traffic, as JSON.
std::string report();
void problem(const std::string& text);

unsigned char* shared_memory();
void read_vector(void* to, const void* global, size_t bytes);
void copy_async(void* shared, const void* global, size_t bytes);
void wait_for_copies();
uint64_t exchange(uint64_t value, int source_lane);  // a shuffle: every lane of the warp takes part

template <typename T>
T shuffle(T value, int source_lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(bits, source_lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
int lane();

float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);  // to nearest, ties to even
float bfloat16_to_float(uint16_t bits);
uint16_t float_to_bfloat16(float value);

}  // namespace simt

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);

template <typename T>
T __shfl_sync(unsigned, T value, int source_lane) {
  return simt::shuffle(value, source_lane & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane_mask) {
  return simt::shuffle(value, simt::lane() ^ lane_mask);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int delta) {
  const int source = simt::lane() + delta;
  return simt::shuffle(value, source < 32 ? source : simt::lane());
}

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __half2float(__half value) { return simt::half_to_float(value.bits); }
inline __half __float2half_rn(float value) { return {simt::float_to_half(value)}; }
inline float __bfloat162float(__nv_bfloat16 value) { return simt::bfloat16_to_float(value.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {simt::float_to_bfloat16(value)}; }

namespace fastlayers {

using std::fma;
inline int min(int a, int b) { return a < b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

inline unsigned char* shared_memory() { return simt::shared_memory(); }
inline void copy_async(void* shared, const void* global) { simt::copy_async(shared, global, 16); }
inline void wait_for_copies() { simt::wait_for_copies(); }

template <typename T>
struct Vector;

template <typename T>
Vector<T> load_vector(const T* global) {
  Vector<T> values;
  simt::read_vector(&values, global, sizeof values);
  return values;
}

}  // namespace fastlayers
