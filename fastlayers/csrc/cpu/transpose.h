// Transposing blocks of rows, widening or narrowing on the way.
#pragma once

#include "cpu/vec.h"

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FASTLAYERS_SHUFFLES 1
#endif
#endif

namespace fastlayers {
namespace {

#if defined(FASTLAYERS_SHUFFLES) && defined(__AVX512F__)
typedef float Float16Lanes __attribute__((vector_size(64)));

// v[i][j] and v[j][i] change places: four rounds, each swapping halves of blocks half as large.
inline void transpose_lanes(Float16Lanes* v) {
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) {
    const Float16Lanes a = v[i], b = v[i + 8];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    v[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
#pragma GCC unroll 16
  for (int n = 0; n < 8; ++n) {
    const int i = n / 4 * 8 + n % 4;
    const Float16Lanes a = v[i], b = v[i + 4];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    v[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
#pragma GCC unroll 16
  for (int n = 0; n < 8; ++n) {
    const int i = n / 2 * 4 + n % 2;
    const Float16Lanes a = v[i], b = v[i + 2];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    v[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
#pragma GCC unroll 16
  for (int n = 0; n < 8; ++n) {
    const int i = n * 2;
    const Float16Lanes a = v[i], b = v[i + 1];
    v[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    v[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
}
#endif

// to[c * to_row + r] = from[r * from_row + c]: rows of `from` become columns.
template <class From, class To>
inline void transpose_block(const From* from, int64_t from_row, int64_t rows, int64_t columns, To* to,
                            int64_t to_row) {
  int64_t done = 0;
#if defined(FASTLAYERS_SHUFFLES) && defined(__AVX512F__)
  if constexpr (sizeof(From) == 4 && sizeof(To) == 4) {
    done = columns / 16 * 16;
    const int64_t whole = rows / 16 * 16;
    for (int64_t r = 0; r < whole; r += 16) {
      for (int64_t c = 0; c < done; c += 16) {
        Float16Lanes v[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) v[i] = (Float16Lanes)load(from + (r + i) * from_row + c);
        transpose_lanes(v);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) store(to + (c + i) * to_row + r, (Vec<float>)v[i]);
      }
    }
    for (int64_t c = 0; c < done; ++c) {
      for (int64_t r = whole; r < rows; ++r) to[c * to_row + r] = from[r * from_row + c];
    }
  }
#endif
  for (int64_t c = done; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) narrow(widen(from[r * from_row + c]), to + c * to_row + r);
  }
}

}  // namespace
}  // namespace fastlayers
