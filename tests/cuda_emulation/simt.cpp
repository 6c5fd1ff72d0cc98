// The scheduler of the SIMT machine: fibres, barriers, shuffles, and the half types.
#include "simt.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "trace.h"

#ifdef SIMT_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr unsigned kWarp = 32;

enum class State { ready, barrier, shuffle, done };

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fibre {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
  State state = State::done;
  const void* where = nullptr;  // the call it waits in
  uint64_t value = 0, received = 0;
  int source_lane = 0;
  std::vector<Copy> copies;
  void* asan_stack = nullptr;
};

std::vector<Fibre> fibres;
ucontext_t scheduler;
void* scheduler_asan_stack = nullptr;
[[maybe_unused]] const void* scheduler_stack = nullptr;
[[maybe_unused]] size_t scheduler_stack_bytes = 0;
unsigned current = 0;
unsigned char* shared = nullptr;
void (*body)(const void*) = nullptr;
const void* body_arguments = nullptr;

// AddressSanitizer has to be told of every change of stack.
void leave_to(Fibre* to, void** keep) {
#ifdef SIMT_ASAN
  __sanitizer_start_switch_fiber(keep, to ? to->stack.get() : scheduler_stack,
                                 to ? kStackBytes : scheduler_stack_bytes);
#else
  (void)to;
  (void)keep;
#endif
}

void arrive_from([[maybe_unused]] void* kept, [[maybe_unused]] bool in_fibre) {
#ifdef SIMT_ASAN
  if (in_fibre) {
    __sanitizer_finish_switch_fiber(kept, &scheduler_stack, &scheduler_stack_bytes);
  } else {
    __sanitizer_finish_switch_fiber(kept, nullptr, nullptr);
  }
#endif
}

void run_fibre() {
  arrive_from(nullptr, true);
  trace::in_kernel = true;
  body(body_arguments);
  trace::in_kernel = false;
  Fibre& self = fibres[current];
  if (!self.copies.empty()) problem("a thread ends with copies it never waited for");
  self.state = State::done;
  leave_to(nullptr, nullptr);  // null: this stack is not coming back
  swapcontext(&self.context, &scheduler);
}

void resume(unsigned thread) {
  current = thread;
  threadIdx = {thread, 0, 0};
  trace::thread = thread;
  leave_to(&fibres[thread], &scheduler_asan_stack);
  swapcontext(&scheduler, &fibres[thread].context);
  arrive_from(scheduler_asan_stack, false);
}

void wait(State state, const void* where) {
  Fibre& self = fibres[current];
  trace::in_kernel = false;
  self.state = state;
  self.where = where;
  leave_to(nullptr, &self.asan_stack);
  swapcontext(&self.context, &scheduler);
  arrive_from(self.asan_stack, true);
  trace::in_kernel = true;
}

// Let the warps whose 32 lanes all stand at one shuffle exchange their values.
bool complete_shuffles() {
  bool any = false;
  for (size_t first = 0; first + kWarp <= fibres.size(); first += kWarp) {
    const auto at_shuffle = [](const Fibre& f) { return f.state == State::shuffle; };
    const auto begin = fibres.begin() + static_cast<std::ptrdiff_t>(first), end = begin + kWarp;
    if (!std::all_of(begin, end, at_shuffle)) continue;
    if (!std::all_of(begin, end, [&](const Fibre& f) { return f.where == begin->where; })) {
      problem("the lanes of a warp stand at different shuffles");
    }
    for (auto f = begin; f != end; ++f) f->received = (begin + f->source_lane)->value;
    for (auto f = begin; f != end; ++f) f->state = State::ready;
    any = true;
  }
  return any;
}

void complete_barrier() {
  const void* where = nullptr;
  size_t waiting = 0;
  for (Fibre& f : fibres) {
    if (f.state != State::barrier) continue;
    if (waiting++ > 0 && f.where != where) problem("threads of a block wait at different barriers");
    where = f.where;
    f.state = State::ready;
  }
  if (waiting == 0) throw std::runtime_error("simt: the threads of a block wait for each other in vain");
  if (waiting < fibres.size()) problem("a barrier that some threads of the block never reach");
  trace::barrier();
}

__attribute__((noinline)) void start(Fibre& f) {
  f.state = State::ready;
  f.copies.clear();
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.get();
  f.context.uc_stack.ss_size = kStackBytes;
  f.context.uc_link = nullptr;
  makecontext(&f.context, run_fibre, 0);
}

void run_block(unsigned order, std::mt19937& random) {
  std::vector<unsigned> turn(fibres.size());
  std::iota(turn.begin(), turn.end(), 0u);
  for (Fibre& f : fibres) start(f);
  for (;;) {
    if (order == 1) std::sort(turn.rbegin(), turn.rend());
    if (order > 1) std::shuffle(turn.begin(), turn.end(), random);
    bool ran = false;
    for (const unsigned thread : turn) {
      if (fibres[thread].state != State::ready) continue;
      resume(thread);
      ran = true;
    }
    if (std::all_of(fibres.begin(), fibres.end(), [](const Fibre& f) { return f.state == State::done; }))
      return;
    if (!complete_shuffles() && !ran) complete_barrier();
  }
}

}  // namespace

void launch(Dim3 grid, int threads, size_t shared_bytes, unsigned order, void (*kernel)(const void*),
            const void* arguments) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 16, shared_bytes) != 0) throw std::bad_alloc();
  fibres = std::vector<Fibre>(static_cast<size_t>(threads));
  std::mt19937 random(order);
  shared = static_cast<unsigned char*>(memory);
  body = kernel;
  body_arguments = arguments;
  gridDim = grid;
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = {x, y, 0};
      std::memset(memory, 0xff, shared_bytes);  // NaN in every floating type
      trace::begin_block(memory, shared_bytes, static_cast<unsigned>(threads));
      run_block(order, random);
      trace::end_block();
    }
  }
  fibres.clear();
  std::free(memory);
  trace::end_launch();
}

unsigned char* shared_memory() { return shared; }
int lane() { return static_cast<int>(current % kWarp); }

void read_vector(void* to, const void* global, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0) problem("a vector load from a misaligned address");
  trace::access(__builtin_return_address(0), global, bytes, false);
  std::memcpy(to, global, bytes);
}

void copy_async(void* to, const void* global, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0)
    problem("an asynchronous copy from a misaligned address");
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0) problem("an asynchronous copy to a misaligned address");
  trace::access(__builtin_return_address(0), global, bytes, false);
  fibres[current].copies.push_back({to, global, bytes});
}

void wait_for_copies() {
  for (const Copy& copy : fibres[current].copies) {
    trace::access(__builtin_return_address(0), copy.to, copy.bytes, true);
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
  fibres[current].copies.clear();
}

uint64_t exchange(uint64_t value, int source_lane) {
  Fibre& self = fibres[current];
  self.value = value;
  self.source_lane = source_lane;
  wait(State::shuffle, __builtin_return_address(0));
  return self.received;
}

float half_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  if (exponent == 31) value = mantissa ? NAN : INFINITY;
  return bits & 0x8000 ? -value : value;
}

uint16_t float_to_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  const int exponent = size < 6.103515625e-05f ? -14 : std::ilogb(size);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // ties to even
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + steps));
}

float bfloat16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t float_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace simt

__attribute__((noinline)) void __syncthreads() {
  simt::wait(simt::State::barrier, __builtin_return_address(0));
}

__attribute__((noinline)) void __syncwarp(unsigned) { simt::exchange(0, simt::lane()); }
