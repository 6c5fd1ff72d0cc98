// MonarchLinear on the CPU as functions of pointers and sizes: no torch, so that tests run them under
// sanitizers.
//
// Tokens are worked on in tiles of `tile` of them. Between two factors a tile lies in memory with its tokens
// last, [feature][token], so that every factor but the last is a product of its weight, read in place, with
// rows of tokens, and writes rows where the next factor reads them. The last one turns the product round and
// writes rows of features. Where x and grad_out enter and grad_x leaves, a tile is transposed.
#pragma once

#include <cstdint>

#include "cpu/linear_list.h"

namespace fastlayers {

// One factor: weight [done * rest][in_size][out_size] contiguous, of the compute type, as is its gradient.
struct MonarchFactor {
  int64_t done, rest, in_size, out_size;
  const void* weight;
  void* grad;
};

struct MonarchArgs {
  int64_t tokens, in_features, out_features;
  int64_t in_first;  // the input dim that the first factor contracts
  bool contiguous;   // the grouping
  int count;
  const MonarchFactor* factors;
  int64_t tile;
  // states[k]: the input of factor k > 0, [tokens / tile][done * in_size * rest][tile], of the compute type.
  // grads[k]: its gradient. Neither is used for k = 0.
  void* const* states;
  void* const* grads;
  // Rows of features; their strides count elements.
  const void* x;
  int64_t x_row;
  const void* bias;  // or null
  void* out;
  bool stream;  // write out past the caches
  const void* grad_out;
  int64_t grad_out_row;
  void* grad_x;       // or null
  double* grad_bias;  // added to, or null
  bool fresh;         // the first tile sets the gradients of the weights, the others add to them
};

// The part of a factor's work that one call does: tiles and batch entries, and for the gradient of the
// weight also the rows of every entry.
struct MonarchPart {
  int64_t tile_begin, tile_end, batch_begin, batch_end;
};

struct MonarchKernels {
  const char* name;
  int64_t (*lanes)(Type);
  // states[factor] (or x) -> states[factor + 1] (or out).
  void (*forward)(Type, const MonarchArgs&, int factor, const MonarchPart&);
  // grads[factor + 1] (or grad_out) -> grads[factor] (or grad_x), and the gradient of the weight. With the
  // last factor also grad_bias.
  void (*backward)(Type, const MonarchArgs&, int factor, bool input, bool weight, const MonarchPart&);
};

extern const MonarchKernels monarch_baseline;
#if defined(__x86_64__)
extern const MonarchKernels monarch_avx2;
extern const MonarchKernels monarch_avx512;
#endif

// The set that linear_list_kernels() chose.
const MonarchKernels& monarch_kernels();

}  // namespace fastlayers
