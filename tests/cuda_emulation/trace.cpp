// Sees every access of the kernels to memory: implements the hooks that -fsanitize=thread puts into their
// code.
//
// Problems: two threads at one byte of shared memory between two barriers, one of them writing; a byte of
// shared memory read that nobody wrote; a result written by two threads, or not at all; an address in no
// buffer. Traffic, for each buffer: the accesses of a warp (its lanes' accesses by one instruction, taken
// together), the 32-byte sectors they touch and the bytes they ask for; for shared memory the cycles that its
// 32 banks need.
#include "trace.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "simt.h"

extern "C" const char __executable_start, _end;  // the program's own code and variables

namespace simt {
namespace {

std::vector<std::string> problems;

struct Buffer {
  std::string name;
  const unsigned char* data;
  size_t bytes;
  bool output;
  std::vector<int64_t> writer;  // 1 + the thread of the grid that wrote a byte
  std::vector<bool> touched;
  uint64_t accesses = 0, sectors = 0, requested = 0;
};

struct SharedByte {
  int writer = -1, reader = -1;  // the thread; kMany for several readers
  unsigned write_epoch = 0, read_epoch = 0;
  bool written = false;
};
constexpr int kMany = 1 << 20;

struct Request {  // of one lane
  const unsigned char* address;
  size_t bytes;
};

std::vector<Buffer> buffers;
const unsigned char* shared_data = nullptr;
std::vector<SharedByte> shared_bytes;
const void* launch_frame = nullptr;
unsigned epoch = 0;
uint64_t shared_accesses = 0, shared_cycles = 0;
// A warp's access: the instruction, the buffer, and how often the lane has been there before.
using Place = std::pair<const void*, const Buffer*>;
std::vector<std::map<std::pair<Place, unsigned>, std::vector<Request>>> warps;
std::vector<std::map<Place, unsigned>> visits;

Buffer* find_buffer(const unsigned char* address, size_t bytes) {
  for (Buffer& b : buffers) {
    if (address >= b.data && address + bytes <= b.data + b.bytes) return &b;
  }
  return nullptr;
}

bool in_shared(const unsigned char* address, size_t bytes) {
  return address >= shared_data && address + bytes <= shared_data + shared_bytes.size();
}

int64_t grid_thread() {
  return (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * blockDim.x + trace::thread;
}

void note_shared(const unsigned char* address, size_t bytes, bool write) {
  const int self = static_cast<int>(trace::thread);
  for (size_t i = 0; i < bytes; ++i) {
    SharedByte& b = shared_bytes[static_cast<size_t>(address - shared_data) + i];
    const bool written_now = b.written && b.write_epoch == epoch && b.writer != self;
    if (write) {
      if (written_now) problem("race: two threads write one byte of shared memory between two barriers");
      if (b.reader >= 0 && b.read_epoch == epoch && b.reader != self) {
        problem("race: a thread overwrites shared memory that another reads before the next barrier");
      }
      b.writer = self;
      b.write_epoch = epoch;
      b.written = true;
    } else {
      if (!b.written) problem("a thread reads shared memory that nobody has written");
      if (written_now)
        problem("race: a thread reads shared memory that another wrote since the last barrier");
      if (b.reader >= 0 && b.read_epoch == epoch && b.reader != self) {
        b.reader = kMany;
      } else {
        b.reader = self;
      }
      b.read_epoch = epoch;
    }
  }
}

void note_global(Buffer& buffer, const unsigned char* address, size_t bytes, bool write) {
  for (size_t i = 0; i < bytes; ++i) {
    const size_t at = static_cast<size_t>(address - buffer.data) + i;
    buffer.touched[at] = true;
    if (!write) continue;
    if (!buffer.output) problem("a thread writes into " + buffer.name);
    if (buffer.writer[at] != 0) problem(buffer.name + " is written twice in one place");
    buffer.writer[at] = 1 + grid_thread();
  }
}

bool beside(const unsigned char* address, const void* frame) {
  return std::abs(address - static_cast<const unsigned char*>(frame)) < 128 * 1024;
}

bool is_static(const void* address) { return address >= &__executable_start && address < &_end; }

void note(const void* where, const void* address, size_t bytes, bool write) {
  const auto* data = static_cast<const unsigned char*>(address);
  Buffer* buffer = nullptr;
  if (in_shared(data, bytes)) {
    note_shared(data, bytes, write);
  } else if ((buffer = find_buffer(data, bytes))) {
    note_global(*buffer, data, bytes, write);
  } else {
    if (!beside(data, __builtin_frame_address(0)) && !beside(data, launch_frame) && !is_static(data)) {
      problem("an address that lies in no buffer");
    }
    return;  // the thread's own variables, the kernel's arguments, threadIdx
  }
  const Place place{where, buffer};
  const unsigned visit = visits[trace::thread][place]++;
  warps[trace::thread / 32][{place, visit}].push_back({data, bytes});
}

// Shared memory serves 32 banks of 4 bytes a cycle, and no more than 128 bytes.
uint64_t bank_cycles(const std::vector<Request>& requests) {
  std::map<size_t, std::set<size_t>> words_of_bank;
  for (const Request& r : requests) {
    for (size_t offset = 0; offset < r.bytes; offset += 4) {
      const size_t word = static_cast<size_t>(r.address + offset - shared_data) / 4;
      words_of_bank[word % 32].insert(word);
    }
  }
  size_t most = 1;
  for (const auto& [bank, words] : words_of_bank) most = std::max(most, words.size());
  return most;
}

}  // namespace

void problem(const std::string& text) {
  if (std::find(problems.begin(), problems.end(), text) == problems.end()) problems.push_back(text);
}

void watch(const std::string& name, const void* data, size_t bytes, bool output) {
  buffers.push_back({name, static_cast<const unsigned char*>(data), bytes, output,
                     std::vector<int64_t>(output ? bytes : 0), std::vector<bool>(bytes)});
}

std::string report() {
  const auto number = [](const char* key, uint64_t value) {
    return std::string("\"") + key + "\": " + std::to_string(value);
  };
  std::string text = "{\"problems\": [";
  for (size_t i = 0; i < problems.size(); ++i) text += (i ? ", \"" : "\"") + problems[i] + "\"";
  text += "], \"buffers\": {";
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    const auto used = static_cast<uint64_t>(std::count(b.touched.begin(), b.touched.end(), true));
    text += (i ? ", \"" : "\"") + b.name + "\": {" + number("accesses", b.accesses) + ", " +
            number("sectors", b.sectors) + ", " + number("requested", b.requested) + ", " +
            number("used", used) + "}";
  }
  return text + "}, \"shared\": {" + number("accesses", shared_accesses) + ", " +
         number("cycles", shared_cycles) + "}}";
}

namespace trace {

bool in_kernel = false;
unsigned thread = 0;

#ifdef SIMT_TRACE
constexpr bool kOn = true;
#else
constexpr bool kOn = false;
#endif

void begin_block(const void* shared, size_t bytes, unsigned threads) {
  if (!kOn) return;
  launch_frame = __builtin_frame_address(0);
  shared_data = static_cast<const unsigned char*>(shared);
  shared_bytes.assign(bytes, {});
  epoch = 1;
  warps.assign((threads + 31) / 32, {});
  visits.assign(threads, {});
}

void barrier() { ++epoch; }

void end_block() {
  for (const auto& warp : warps) {
    for (const auto& [key, requests] : warp) {
      if (key.first.second == nullptr) {
        ++shared_accesses;
        shared_cycles += bank_cycles(requests);
        continue;
      }
      Buffer* buffer = find_buffer(requests[0].address, requests[0].bytes);
      std::set<uintptr_t> sectors;
      for (const Request& r : requests) {
        const auto address = reinterpret_cast<uintptr_t>(r.address);
        for (uintptr_t s = address / 32; s <= (address + r.bytes - 1) / 32; ++s) sectors.insert(s);
        buffer->requested += r.bytes;
      }
      ++buffer->accesses;
      buffer->sectors += sectors.size();
    }
  }
}

void end_launch() {
  if (!kOn) return;
  for (const Buffer& b : buffers) {
    if (b.output && std::count(b.writer.begin(), b.writer.end(), 0) > 0) {
      problem(b.name + " is not written everywhere");
    }
  }
}

void access(const void* where, const void* address, size_t bytes, bool write) {
  if (!kOn || !in_kernel) return;
  in_kernel = false;  // the standard library's functions below may be the kernels' copies, with hooks in them
  note(where, address, bytes, write);
  in_kernel = true;
}

}  // namespace trace
}  // namespace simt

#ifdef SIMT_TRACE
#define SIMT_HOOK(name, bytes, write)                                        \
  extern "C" void __tsan_##name(void* address) {                             \
    simt::trace::access(__builtin_return_address(0), address, bytes, write); \
  }
#define SIMT_HOOKS(bytes)                        \
  SIMT_HOOK(read##bytes, bytes, false)           \
  SIMT_HOOK(write##bytes, bytes, true)           \
  SIMT_HOOK(unaligned_read##bytes, bytes, false) \
  SIMT_HOOK(unaligned_write##bytes, bytes, true)
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* address, size_t bytes) {
  simt::trace::access(__builtin_return_address(0), address, bytes, false);
}
void __tsan_write_range(void* address, size_t bytes) {
  simt::trace::access(__builtin_return_address(0), address, bytes, true);
}
}
#endif
