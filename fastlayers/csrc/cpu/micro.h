// The register-blocked microkernel: a few rows times a few vectors of columns, kept in registers over the
// whole inner dimension. Everything larger is made of it, for any product C[m, j] (+)= sum_k A[m, k] * B[k,
// j].
#pragma once

#include "cpu/vec.h"

namespace fastlayers {
namespace {

// Registers: kRows x kVecs accumulators, kVecs of B and one broadcast. 8 x 2 leaves room in 32 registers and
// already hides the latency of two multiply-adds a cycle; 16 registers hold 6 x 2.
constexpr int kVecs = 2;
constexpr int kRows = kBytes == 64 ? 8 : 6;
template <class C>
constexpr int kColumns = kVecs * kLanes<C>;

// One product of at most kRows rows and kColumns columns.
template <class C>
struct Tile {
  int64_t inner;
  const C* a;  // element (m, k) at a[m * a_row + k * a_inner]
  int64_t a_row, a_inner;
  const C* b;  // row k at b + k * b_row
  int64_t b_row;
  const C* bias;  // a row of `columns` added once, or null
  C* c;           // row m at c + m * c_row
  int64_t c_row;
  bool accumulate;  // add to c
};

template <class C, int rows, int vecs, bool part>
void tile_kernel(const Tile<C>& t, int columns) {
  constexpr int lanes = kLanes<C>;
  const int last = columns - (vecs - 1) * lanes;
  auto read = [last](const C* p, int v) {
    return part && v == vecs - 1 ? load_part(p + v * lanes, last) : load(p + v * lanes);
  };
  Vec<C> acc[rows][vecs];
#pragma GCC unroll 8
  for (int v = 0; v < vecs; ++v) {
    Vec<C> start = {};
    if (t.bias) start = read(t.bias, v);
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m) acc[m][v] = start;
  }
  const C* b = t.b;
  const C* a = t.a;
  for (int64_t k = 0; k < t.inner; ++k, b += t.b_row, a += t.a_inner) {
    Vec<C> bv[vecs];
#pragma GCC unroll 8
    for (int v = 0; v < vecs; ++v) bv[v] = read(b, v);
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m) {
      const Vec<C> av = a[m * t.a_row] - Vec<C>{};
#pragma GCC unroll 8
      for (int v = 0; v < vecs; ++v) acc[m][v] += av * bv[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < vecs; ++v) {
      C* p = t.c + m * t.c_row;
      if (t.accumulate) acc[m][v] += read(p, v);
      if (part && v == vecs - 1) {
        store_part(p + v * lanes, acc[m][v], last);
      } else {
        store(p + v * lanes, acc[m][v]);
      }
    }
  }
}

template <class C, int vecs, bool part>
void tile_rows(const Tile<C>& t, int rows, int columns) {
  switch (rows) {
    case 1:
      return tile_kernel<C, 1, vecs, part>(t, columns);
    case 2:
      return tile_kernel<C, 2, vecs, part>(t, columns);
    case 3:
      return tile_kernel<C, 3, vecs, part>(t, columns);
    case 4:
      return tile_kernel<C, 4, vecs, part>(t, columns);
    case 5:
      return tile_kernel<C, 5, vecs, part>(t, columns);
    case 6:
      return tile_kernel<C, 6, vecs, part>(t, columns);
    case 7:
      return tile_kernel < C, kRows<7 ? kRows : 7, vecs, part>(t, columns);
    default:
      return tile_kernel<C, kRows, vecs, part>(t, columns);
  }
}

// At most kRows rows and kColumns columns.
template <class C>
void multiply_tile(const Tile<C>& t, int rows, int columns) {
  constexpr int lanes = kLanes<C>;
  if (columns == kColumns<C>) return tile_rows<C, kVecs, false>(t, rows, columns);
  if (columns > lanes) return tile_rows<C, kVecs, true>(t, rows, columns);
  if (columns == lanes) return tile_rows<C, 1, false>(t, rows, columns);
  return tile_rows<C, 1, true>(t, rows, columns);
}

}  // namespace
}  // namespace fastlayers
