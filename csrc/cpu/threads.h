// Threads that share out the loops of the operators.
//
// PyTorch's own threads spin for milliseconds after every loop. Beside another process they then take the time of the
// threads that have work. These ones spin briefly, then sleep; and a loop waits only for threads that have begun a part
// of it, never for one that the system has not scheduled yet.
#pragma once

#include <cstdint>

namespace kvllm {

// A function of the indices 0 .. count - 1, which may run at the same time and must not throw.
struct Loop {
  int64_t count;
  void (*call)(const void* body, int64_t index);
  const void* body;
};

// Runs a loop on at most `threads` threads, the caller's among them; a thread that is free takes the next index. Inside
// of another loop, and while another caller's loop runs, the caller works alone.
void run_loop(const Loop& loop, int64_t threads);

// The number of threads that loops of the calling thread may take; 0, the default, is PyTorch's number.
void set_loop_threads(int64_t threads);
int64_t loop_threads();

}  // namespace kvllm
