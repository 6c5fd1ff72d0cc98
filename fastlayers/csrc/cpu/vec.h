// Vectors of one instruction set, as GCC's and Clang's vector extensions. Included by units that are compiled
// once per instruction set: everything is in an anonymous namespace, so that no AVX-512 code can be linked
// into the baseline, and only headers without inline functions are included.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace fastlayers {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <class C>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(kBytes)));
  typedef float loose __attribute__((vector_size(kBytes), aligned(4), may_alias));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(kBytes)));
  typedef double loose __attribute__((vector_size(kBytes), aligned(8), may_alias));
};
template <class C>
using Vec = typename Vector<C>::type;
template <class C>
constexpr int kLanes = kBytes / sizeof(C);

template <class C>
inline Vec<C> load(const C* p) {
  return *reinterpret_cast<const typename Vector<C>::loose*>(p);
}

template <class C>
inline void store(C* p, Vec<C> v) {
  *reinterpret_cast<typename Vector<C>::loose*>(p) = v;
}

// The first `count` lanes; the others are 0 and their memory is not touched.
#if defined(__AVX512F__)
inline Vec<float> load_part(const float* p, int count) {
  return (Vec<float>)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
}
inline Vec<double> load_part(const double* p, int count) {
  return (Vec<double>)_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), p);
}
inline void store_part(float* p, Vec<float> v, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), (__m512)v);
}
inline void store_part(double* p, Vec<double> v, int count) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << count) - 1), (__m512d)v);
}
#else
template <class C>
inline Vec<C> load_part(const C* p, int count) {
  Vec<C> v = {};
  for (int i = 0; i < count; ++i) v[i] = p[i];
  return v;
}
template <class C>
inline void store_part(C* p, Vec<C> v, int count) {
  for (int i = 0; i < count; ++i) p[i] = v[i];
}
#endif

// Storage types: what lies in memory, and the type it is computed in.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class T>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};
template <class T>
using ComputeOf = typename Compute<T>::type;

inline float as_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
inline uint32_t as_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

inline float widen(float v) { return v; }
inline double widen(double v) { return v; }
inline float widen(BFloat16 v) { return as_float(static_cast<uint32_t>(v.bits) << 16); }
inline void narrow(float v, float* to) { *to = v; }
inline void narrow(double v, double* to) { *to = v; }
// Round to nearest, ties to even; a NaN stays one.
inline void narrow(float v, BFloat16* to) {
  const uint32_t bits = as_bits(v);
  to->bits = v != v ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__F16C__)
inline float widen(Float16 v) { return _cvtsh_ss(v.bits); }
inline void narrow(float v, Float16* to) { to->bits = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT); }
#else
inline float widen(Float16 v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000) << 16, rest = v.bits & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Scaling by 2^112 moves the exponent's bias from 15 to 127 and normalises subnormals.
  return as_float(sign | as_bits(as_float(rest << 13) * as_float(0x77800000)));
}
inline void narrow(float v, Float16* to) {
  const uint32_t sign = as_bits(v) >> 16 & 0x8000, rest = as_bits(v) & 0x7fffffff;
  if (rest > 0x7f800000) {
    to->bits = static_cast<uint16_t>(sign | 0x7e00);
  } else if (rest >= 0x477ff000) {  // rounds to infinity
    to->bits = static_cast<uint16_t>(sign | 0x7c00);
  } else if (rest < 0x38800000) {  // subnormal: adding 0.5 shifts the mantissa into place and rounds it
    to->bits = static_cast<uint16_t>(sign | (as_bits(as_float(rest) + 0.5f) - 0x3f000000));
  } else {
    to->bits = static_cast<uint16_t>(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
  }
}
#endif

}  // namespace
}  // namespace fastlayers
