// Threads that share out the loops of the operators.
//
// PyTorch's own threads spin for milliseconds after every loop. Beside another process they then take the time of the
// threads that have work. These ones spin briefly, then sleep; and a loop waits only for threads that have begun a part
// of it, never for one that the system has not scheduled yet.
#pragma once

#include <cstdint>

namespace kvllm {

// Memory that the next loop reads: parts of as many bytes, of which each thread begins with a share of its own.
struct Upcoming {
  const char* data = nullptr;
  int64_t parts = 0, part_bytes = 0;
};

// A function of the indices 0 .. count - 1, which may run at the same time and must not throw, and of the number of the
// thread, 0 for the caller. Workers that find no more indices fetch what is upcoming, until the next loop begins.
struct Loop {
  int64_t count;
  void (*call)(const void* body, int64_t index, int64_t thread);
  const void* body;
  Upcoming upcoming{};
};

// The first of `parts` in the share of one of `shares` threads.
constexpr int64_t share_begin(int64_t parts, int64_t shares, int64_t thread) { return parts * thread / shares; }

// Runs a loop on at most `threads` threads, the caller's among them; a thread that is free takes the next index. Inside
// of another loop, and while another caller's loop runs, the caller works alone.
void run_loop(const Loop& loop, int64_t threads);

// The number of threads that loops of the calling thread may take; 0, the default, is PyTorch's number.
void set_loop_threads(int64_t threads);
int64_t loop_threads();

}  // namespace kvllm
