// What the SIMT machine notes of every access to memory. Without SIMT_TRACE it notes nothing.
#pragma once

#include <cstddef>

namespace simt::trace {

extern bool in_kernel;
extern unsigned thread;

void begin_block(const void* shared, size_t bytes, unsigned threads);
void barrier();
void end_block();
void end_launch();
void access(const void* where, const void* address, size_t bytes, bool write);

}  // namespace simt::trace
