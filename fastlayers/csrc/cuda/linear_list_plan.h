// What is decided before a launch: which shapes the tiny-feature kernels serve, and how they are cut into
// blocks. Plain C++ without torch or CUDA, so that the tests ask the same functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#ifdef __CUDACC__
#define FASTLAYERS_HOST_DEVICE __host__ __device__
#else
#define FASTLAYERS_HOST_DEVICE
#endif

namespace fastlayers {

constexpr int kThreads = 128;     // of a block
constexpr int kVectorBytes = 16;  // the widest access of one thread
constexpr int kQuad = 4;          // elements read from shared memory at once where features come in fours
constexpr int kGradTile = kQuad;  // a thread sums 4 x 4 elements of grad_weight: 8 reads for 16 products
constexpr int kSharePitch = kThreads + 1;  // one row of shares per element of it: odd, so that banks differ
constexpr int kTileRows = 32;              // rows of the batch that a block holds in shared memory
constexpr int kSegmentBytes = 512;         // of one row that a block reads: 16 sectors of 32 bytes
constexpr int kSharedBytes = 48 * 1024;    // more would need an opt-in per device
constexpr int64_t kFewBlocks = 128;        // about as many as a large card has multiprocessors
constexpr int64_t kEnoughBlocks = 1024;    // more of them read the weights again and gain nothing

// Sizes of one call: B rows of N linears with I inputs and O outputs each.
struct Shape {
  int64_t rows, linears;
  int in_features, out_features;
};

// A (B, N, features) tensor of any strides, in elements.
template <typename T>
struct Strided {
  T* data;
  int64_t row, linear, feature;
};

// How a tile of rows lies in shared memory.
struct RowLayout {
  bool vectors;  // copied as whole vectors, linears and features side by side; else one element at a time
  int linear;    // distance of two linears, in elements
  int pitch;     // distance of two rows
};

// A block's share of the work: `linears` neighbouring linears, `rows` rows of the batch at a time.
struct Tile {
  int linears, rows;
  RowLayout x, grad_out;
};

struct Plan {
  Tile tile;
  int64_t blocks;      // along the list
  int64_t row_blocks;  // along the batch; 1 in backward, where a block sums over the whole batch
  size_t shared_bytes;
};

FASTLAYERS_HOST_DEVICE constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
FASTLAYERS_HOST_DEVICE constexpr int round_up(int a, int b) { return (a + b - 1) / b * b; }

// Tiles of grad_weight in one linear: the threads that share its sum.
FASTLAYERS_HOST_DEVICE constexpr int grad_tiles(int in_features, int out_features) {
  return static_cast<int>(divide_up(in_features, kGradTile) * divide_up(out_features, kGradTile));
}

// Whether neighbours in memory are neighbouring linears, as in (B, features, N).
template <typename T>
FASTLAYERS_HOST_DEVICE constexpr bool linear_first(const Strided<T>& t) {
  return t.linear < t.feature;
}

// Whether a tile of rows can be copied as whole vectors. `across_linears`: neighbouring threads will read one
// feature of neighbouring linears; an even number of features side by side would put them all in a few banks.
template <typename T>
constexpr bool copies_as_vectors(const Strided<T>& t, int64_t linears, int features, bool across_linears) {
  return (features == 1 || t.feature == 1) && (linears == 1 || t.linear == features) &&
         !(across_linears && features % 2 == 0);
}

// Copied as vectors, a row starts as far from a vector boundary as in its source. Copied by elements, linears
// are an odd distance apart, or an odd number of quads: 32 of them lie in 32 banks.
constexpr RowLayout row_layout(bool vectors, int linears, int features, int vector_size) {
  if (vectors) return {true, features, round_up(linears * features + vector_size - 1, vector_size)};
  const int padded = features % kQuad == 0 ? (features / kQuad | 1) * kQuad : features | 1;
  return {false, padded, round_up(linears * padded, vector_size)};
}

// The choice of kernel, in one place; everything else goes to ATen's strided batched GEMMs. By arithmetic,
// until a GPU has measured it: see docs/cuda.md.
constexpr int kMaxFeatures = 32;          // above, a linear fills the tiles of a batched GEMM
constexpr int64_t kBackwardLinears = 64;  // with fewer linears than this, and so fewer blocks, ...
constexpr int64_t kBackwardRows = 4096;  // ... a block that sums over more rows takes longer than three GEMMs

inline bool fits_forward(const Shape& s) {
  return s.in_features <= kMaxFeatures && s.out_features <= kMaxFeatures;
}

inline bool fits_backward(const Shape& s) {
  return fits_forward(s) && (s.linears >= kBackwardLinears || s.rows <= kBackwardRows);
}

// What a plan depends on besides the shape.
struct PlanOptions {
  int item, accumulator;  // sizes in bytes of an element and of a sum
  bool backward;
  bool x_vectors, grad_out_vectors;  // copies_as_vectors of the two
};

// The tile of that many linears and rows, and the bytes of shared memory it needs.
inline std::pair<Tile, size_t> make_tile(const Shape& s, const PlanOptions& o, int linears, int rows) {
  const int vector_size = kVectorBytes / o.item;
  const Tile tile = {linears, rows, row_layout(o.x_vectors, linears, s.in_features, vector_size),
                     row_layout(o.grad_out_vectors, linears, s.out_features, vector_size)};
  const int pitches = tile.x.pitch + (o.backward ? tile.grad_out.pitch : 0);
  const size_t weights = size_t{1} * linears * s.in_features * s.out_features * o.accumulator;
  const size_t bytes = size_t{1} * rows * pitches * o.item + weights;
  const size_t sums = size_t{1} * kSharePitch * (kGradTile + 1) * kGradTile * o.accumulator;
  return {tile, o.backward ? std::max(bytes, sums) : bytes};
}

inline Plan make_plan(const Shape& s, const PlanOptions& o) {
  const int rows = static_cast<int>(std::clamp<int64_t>(s.rows, 1, kTileRows));
  const int64_t row_tiles = std::max<int64_t>(1, divide_up(s.rows, rows));
  int linears = std::max(1, kSegmentBytes / (std::max({s.in_features, s.out_features, 1}) * o.item));
  if (o.backward)
    linears = std::min(linears, kThreads / std::max(1, grad_tiles(s.in_features, s.out_features)));
  if (const int sector = 32 / o.item; linears > sector) linears -= linears % sector;
  linears = static_cast<int>(std::min<int64_t>(linears, s.linears));

  const auto blocks = [&] { return divide_up(s.linears, linears); };
  const auto too_large = [&] { return make_tile(s, o, linears, rows).second > kSharedBytes; };
  const auto too_few = [&] { return blocks() * (o.backward ? 1 : row_tiles) < kFewBlocks; };
  while (linears > 1 && (too_large() || too_few())) linears = (linears + 1) / 2;

  const int64_t wanted = o.backward ? 1 : divide_up(kEnoughBlocks, blocks());
  const int64_t row_blocks = std::clamp<int64_t>(wanted, 1, std::min<int64_t>(row_tiles, 65535));
  const auto [tile, shared_bytes] = make_tile(s, o, linears, rows);
  return {tile, blocks(), row_blocks, shared_bytes};
}

}  // namespace fastlayers
