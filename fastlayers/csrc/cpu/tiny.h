// The forward of tiny linears, at most a vector of features in and out: as many linears as fit side by side
// in one vector are computed together, from x as it lies. Each input feature is brought to the lanes of its
// linear's outputs by a permutation, so a row costs one load, `in` permutations and multiply-adds, one store.
#pragma once

#include "cpu/linear_list.h"
#include "cpu/vec.h"

namespace fastlayers {
namespace {

// Packed weights of a chunk of linears stay in the first-level cache while all rows pass.
constexpr int64_t kTinyBytes = 16 * 1024;

template <class C>
constexpr bool kTiny = false;

#if defined(__AVX512F__)
template <>
constexpr bool kTiny<float> = true;
template <>
constexpr bool kTiny<double> = true;
template <class C>
struct LaneIndex;
template <>
struct LaneIndex<float> {
  __m512i lanes;
  LaneIndex() = default;
  explicit LaneIndex(const int32_t* from) : lanes(_mm512_loadu_si512(from)) {}
  Vec<float> permute(Vec<float> v) const { return (Vec<float>)_mm512_permutexvar_ps(lanes, (__m512)v); }
};
template <>
struct LaneIndex<double> {
  __m512i lanes;
  LaneIndex() = default;
  explicit LaneIndex(const int32_t* from)
      : lanes(_mm512_cvtepi32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))) {}
  Vec<double> permute(Vec<double> v) const { return (Vec<double>)_mm512_permutexvar_pd(lanes, (__m512d)v); }
};
inline Vec<float> gather(const float* p, const int32_t* offset) {
  return (Vec<float>)_mm512_i32gather_ps(_mm512_loadu_si512(offset), p, 4);
}
inline Vec<double> gather(const double* p, const int32_t* offset) {
  const __m256i at = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(offset));
  return (Vec<double>)_mm512_i32gather_pd(at, p, 8);
}
template <class C>
inline Vec<C> load_lanes(const C* p, int count) {
  return load_part(p, count);
}
template <class C>
inline void store_lanes(C* p, Vec<C> v, int count) {
  store_part(p, v, count);
}
#elif defined(__AVX2__)
template <>
constexpr bool kTiny<float> = true;
template <class C>
struct LaneIndex {
  __m256i lanes;
  LaneIndex() = default;
  explicit LaneIndex(const int32_t* from)
      : lanes(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))) {}
  Vec<float> permute(Vec<float> v) const { return (Vec<float>)_mm256_permutevar8x32_ps((__m256)v, lanes); }
};
inline Vec<float> gather(const float* p, const int32_t* offset) {
  const __m256i at = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(offset));
  return (Vec<float>)_mm256_i32gather_ps(p, at, 4);
}
inline __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec<float> load_lanes(const float* p, int count) {
  return (Vec<float>)_mm256_maskload_ps(p, first_lanes(count));
}
inline void store_lanes(float* p, Vec<float> v, int count) {
  _mm256_maskstore_ps(p, first_lanes(count), (__m256)v);
}
#endif

// Tell whether the kernel below serves a call: features within a vector, and rows of x and out contiguous.
template <class C>
bool tiny_fits(const ForwardArgs& args) {
  const Sizes& s = args.sizes;
  return kTiny<C> && s.in <= kLanes<C> && s.out <= kLanes<C> && s.in > 0 && args.x.feature_stride == 1 &&
         args.out.feature_stride == 1 && args.x.list_stride == s.in && args.out.list_stride == s.out &&
         args.weight.list_stride < (1 << 24) && args.weight.out_stride < (1 << 24) &&
         args.weight.list_stride >= 0 && args.weight.out_stride >= 0;
}

#if defined(__AVX2__)
// One row of one group: the packed bias and weights times the features in v, moved to the lanes they feed.
template <class C, int in>
inline Vec<C> tiny_row(Vec<C> v, const C* w, const LaneIndex<C>* moved) {
  Vec<C> sum = load(w);
#pragma GCC unroll 16
  for (int k = 0; k < in; ++k) sum += moved[k].permute(v) * load(w + (k + 1) * kLanes<C>);
  return sum;
}

template <class C, int in>
void tiny_rows(const ForwardArgs& args, const Range& range) {
  constexpr int lanes = kLanes<C>;
  const int out = static_cast<int>(args.sizes.out);
  const int group = lanes / (in > out ? in : out);
  const C* const x = static_cast<const C*>(args.x.data);
  const C* const weight = static_cast<const C*>(args.weight.data);
  const C* const bias = static_cast<const C*>(args.bias);
  C* const y = static_cast<C*>(args.out.data);

  int32_t first[lanes];   // the lane of x's first feature for each lane of the result
  int32_t offset[lanes];  // and where its row of weights begins
  for (int l = 0; l < lanes; ++l) {
    const int n = l / out < group ? l / out : 0;
    first[l] = n * in;
    offset[l] = static_cast<int32_t>(n * args.weight.list_stride + l % out * args.weight.out_stride);
  }
  LaneIndex<C> moved[in];
  for (int k = 0; k < in; ++k) {
    int32_t from[lanes];
    for (int l = 0; l < lanes; ++l) from[l] = first[l] + k;
    moved[k] = LaneIndex<C>(from);
  }

  constexpr int64_t chunk = kTinyBytes / ((in + 1) * kBytes) > 0 ? kTinyBytes / ((in + 1) * kBytes) : 1;
  alignas(64) C packed[chunk * (in + 1) * lanes];
  for (int64_t begin = range.begin; begin < range.end; begin += chunk * group) {
    const int64_t end = begin + chunk * group < range.end ? begin + chunk * group : range.end;
    C* to = packed;
    for (int64_t n = begin; n < end; n += group, to += (in + 1) * lanes) {
      const int used = static_cast<int>(end - n < group ? end - n : group) * out;
      const C* w = weight + n * args.weight.list_stride;
      for (int l = 0; l < lanes; ++l) to[l] = bias && l < used ? bias[n * out + l] : C(0);
      if (used == group * out) {
        for (int k = 0; k < in; ++k) store(to + (k + 1) * lanes, gather(w + k, offset));
      } else {
        for (int k = 0; k < in; ++k) {
          for (int l = 0; l < lanes; ++l) to[(k + 1) * lanes + l] = l < used ? w[offset[l] + k] : C(0);
        }
      }
    }
    const int64_t whole = (end - begin) / group;
    const int rest = static_cast<int>((end - begin) % group);
    for (int64_t r = range.row_begin; r < range.row_end; ++r) {
      const C* from = x + r * args.x.batch_stride + begin * in;
      C* row = y + r * args.out.batch_stride + begin * out;
      const C* w = packed;
      for (int64_t g = 0; g < whole; ++g, from += group * in, row += group * out, w += (in + 1) * lanes) {
        store_lanes(row, tiny_row<C, in>(load_lanes(from, group * in), w, moved), group * out);
      }
      if (rest) store_lanes(row, tiny_row<C, in>(load_lanes(from, rest * in), w, moved), rest * out);
    }
  }
}

template <class C, int in>
void tiny_dispatch(const ForwardArgs& args, const Range& range) {
  if (args.sizes.in == in) return tiny_rows<C, in>(args, range);
  if constexpr (in < kLanes<C>) tiny_dispatch<C, in + 1>(args, range);
}
#endif

template <class C>
void tiny_forward(const ForwardArgs& args, const Range& range) {
#if defined(__AVX2__)
  if constexpr (kTiny<C>) tiny_dispatch<C, 1>(args, range);
#else
  (void)args, (void)range;
#endif
}

}  // namespace
}  // namespace fastlayers
