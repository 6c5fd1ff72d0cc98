// What is decided before a launch: which shapes the tiny-feature kernels serve, and how they are cut into
// blocks. Plain C++ without torch or CUDA, so that the tests ask the same functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define FASTLAYERS_HOST_DEVICE __host__ __device__
#else
#define FASTLAYERS_HOST_DEVICE
#endif

namespace fastlayers {

constexpr int kThreads = 128;       // of a block
constexpr int kRowsPerThread = 8;   // results one thread sums at a time: one weight is read for eight rows
constexpr int kGradTile = 4;        // a thread sums 4 x 4 elements of grad_weight: 8 reads for 16 products
constexpr int kTileRows = 32;       // rows of the batch that a block holds in shared memory
constexpr int kSegmentBytes = 512;  // of one row that a block reads: 16 sectors of 32 bytes
constexpr int kSharedBytes = 48 * 1024;  // more would need an opt-in per device
constexpr int64_t kEnoughBlocks = 1024;  // about 8 for each multiprocessor of a large card

// Sizes of one call: B rows of N linears with I inputs and O outputs each.
struct Shape {
  int64_t rows;
  int64_t linears;
  int in_features;
  int out_features;
};

// A block's share of the work: `linears` neighbouring linears, `rows` rows of the batch at a time.
struct Tile {
  int linears;
  int rows;
};

struct Plan {
  Tile tile;
  int64_t blocks;      // along the list
  int64_t row_blocks;  // along the batch; 1 in backward, where a block sums over the whole batch
  size_t shared_bytes;
};

FASTLAYERS_HOST_DEVICE constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
FASTLAYERS_HOST_DEVICE constexpr int round_up(int a, int b) { return (a + b - 1) / b * b; }

// The distance of two rows of a tile in shared memory, in elements: room for the linears, each padded to an
// odd number of elements, and for a start that is as far from a vector boundary as the source's.
FASTLAYERS_HOST_DEVICE constexpr int row_pitch(int linears, int features, int vector_size) {
  return round_up(linears * (features | 1) + vector_size - 1, vector_size);
}

// Tiles of grad_weight in one linear: the threads that share its sum.
FASTLAYERS_HOST_DEVICE constexpr int grad_tiles(int in_features, int out_features) {
  return static_cast<int>(divide_up(in_features, kGradTile) * divide_up(out_features, kGradTile));
}

// The choice of kernel, in one place. Everything else goes to ATen: one GEMM where all linears share the
// input, strided batched GEMMs where not. The limits follow from shared memory and from the arithmetic beside
// them.
constexpr int kMaxFeatures = 32;  // 64 tiles of grad_weight for each linear; above, GEMM tiles are full
constexpr int64_t kBackwardLinears = 64;  // with fewer blocks than this ...
constexpr int64_t kBackwardRows = 4096;  // ... a block that sums over more rows takes longer than three GEMMs

inline bool fits_forward(const Shape& s) {
  return s.in_features <= kMaxFeatures && s.out_features <= kMaxFeatures;
}

inline bool fits_backward(const Shape& s) {
  return fits_forward(s) && (s.linears >= kBackwardLinears || s.rows <= kBackwardRows);
}

inline size_t forward_shared_bytes(const Shape& s, Tile t, int item, int accumulator) {
  const size_t x = size_t{1} * t.rows * row_pitch(t.linears, s.in_features, 16 / item) * item;
  return x + size_t{1} * t.linears * s.in_features * s.out_features * accumulator;
}

inline size_t backward_shared_bytes(const Shape& s, Tile t, int item, int accumulator) {
  const size_t grad_out = size_t{1} * t.rows * row_pitch(t.linears, s.out_features, 16 / item) * item;
  const size_t partial_sums = size_t{1} * kThreads * (kGradTile + 1) * kGradTile * accumulator;
  return std::max(grad_out + forward_shared_bytes(s, t, item, accumulator), partial_sums);
}

// Cut a call into blocks; `item` and `accumulator` are the sizes in bytes of an element and of a sum.
inline Plan make_plan(const Shape& s, int item, int accumulator, bool backward) {
  const auto shared_bytes = [&](Tile t) {
    return backward ? backward_shared_bytes(s, t, item, accumulator)
                    : forward_shared_bytes(s, t, item, accumulator);
  };
  Tile tile{};
  tile.rows = static_cast<int>(std::clamp<int64_t>(s.rows, 1, kTileRows));
  tile.linears = std::max(1, kSegmentBytes / (std::max({s.in_features, s.out_features, 1}) * item));
  if (const int sector = 32 / item; tile.linears > sector) tile.linears -= tile.linears % sector;
  tile.linears = static_cast<int>(std::min<int64_t>(tile.linears, s.linears));

  const int64_t row_tiles = std::max<int64_t>(1, divide_up(s.rows, tile.rows));
  const auto blocks = [&] { return divide_up(s.linears, tile.linears); };
  const auto too_large = [&] {
    return shared_bytes(tile) > kSharedBytes ||
           (backward && tile.linears * grad_tiles(s.in_features, s.out_features) > kThreads);
  };
  const auto too_few = [&] { return blocks() * (backward ? 1 : row_tiles) < kEnoughBlocks / 8; };
  while (tile.linears > 1 && (too_large() || too_few())) tile.linears = (tile.linears + 1) / 2;

  const int64_t wanted = backward ? 1 : divide_up(kEnoughBlocks, blocks());
  const int64_t row_blocks = std::clamp<int64_t>(wanted, 1, std::min<int64_t>(row_tiles, 65535));
  return {tile, blocks(), row_blocks, shared_bytes(tile)};
}

}  // namespace fastlayers
