#include "threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace kvllm {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Time for which a thread looks for its next loop, or the caller for the last parts of one, before it sleeps. Python
// needs about this long between two steps; to wake a thread takes longer than most loops.
constexpr std::chrono::microseconds kIdleSpin{200};
constexpr std::chrono::microseconds kFinishSpin{50};

// Waits until `value` differs from `old`.
void await_change(const std::atomic<uint32_t>& value, uint32_t old, std::chrono::microseconds spin) {
  const auto end = std::chrono::steady_clock::now() + spin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  value.wait(old, std::memory_order_acquire);
}

// Bytes that a worker fetches of what is upcoming: they fit its second cache beside what the caller does meanwhile. A
// worker looks for the next loop after each few.
constexpr int64_t kUpcomingBytes = 256 << 10;
constexpr int64_t kFetchedBytes = 2048;
constexpr int64_t kCacheLine = 64;

void fetch(const char* data, int64_t bytes) {
  for (int64_t offset = 0; offset < bytes; offset += kCacheLine) __builtin_prefetch(data + offset, 0, 2);
}

thread_local bool inside_loop = false;
thread_local int64_t own_threads = 0;

class ThreadPool {
 public:
  void run(const Loop& loop, int64_t threads) {
    while (num_workers_ < threads - 1) std::thread([this, id = num_workers_++] { work(id); }).detach();
    loop_ = loop;
    max_workers_.store(threads - 1, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    left_.store(0, std::memory_order_relaxed);
    const uint64_t opened = (gate_.load(std::memory_order_relaxed) & ~kLoopMask) + kOneLoop;
    gate_.store(opened, std::memory_order_release);
    loops_.store(static_cast<uint32_t>(opened >> 32), std::memory_order_release);
    loops_.notify_all();
    take_parts(loop, 0);
    const uint64_t closed = gate_.fetch_or(kClosed, std::memory_order_acq_rel);
    const auto joined = static_cast<uint32_t>((closed & kLoopMask) / kOneWorker);
    for (uint32_t left = left_.load(std::memory_order_acquire); left != joined;) {
      await_change(left_, left, kFinishSpin);
      left = left_.load(std::memory_order_acquire);
    }
  }

 private:
  // The gate holds the number of the loop, the number of workers that joined it, and whether more may.
  static constexpr uint64_t kClosed = 1, kOneWorker = 2, kOneLoop = uint64_t{1} << 32, kLoopMask = kOneLoop - 1;

  void work(int64_t id) {
    inside_loop = true;
    for (uint32_t seen = 0;;) {
      await_change(loops_, seen, kIdleSpin);
      seen = loops_.load(std::memory_order_acquire);
      if (!join(id)) continue;
      take_parts(loop_, id + 1);
      const Upcoming upcoming = loop_.upcoming;
      const int64_t threads = max_workers_.load(std::memory_order_relaxed) + 1;
      left_.fetch_add(1, std::memory_order_release);
      left_.notify_one();
      fetch_upcoming(upcoming, share_begin(upcoming.parts, threads, id + 1), seen);
    }
  }

  // From a part on, as long as no loop has followed the one that is `seen`.
  void fetch_upcoming(const Upcoming& upcoming, int64_t part, uint32_t seen) const {
    const int64_t bytes = std::min(kUpcomingBytes, (upcoming.parts - part) * upcoming.part_bytes);
    for (int64_t offset = 0; offset < bytes && loops_.load(std::memory_order_relaxed) == seen;
         offset += kFetchedBytes) {
      fetch(upcoming.data + part * upcoming.part_bytes + offset, std::min(kFetchedBytes, bytes - offset));
    }
  }

  // Whether the loop was still open. While it is, its caller does not change it; so it may be read before.
  bool join(int64_t id) {
    uint64_t gate = gate_.load(std::memory_order_acquire);
    do {
      if ((gate & kClosed) != 0 || id >= max_workers_.load(std::memory_order_relaxed)) return false;
    } while (!gate_.compare_exchange_weak(gate, gate + kOneWorker, std::memory_order_acq_rel));
    return true;
  }

  void take_parts(const Loop& loop, int64_t thread) {
    for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < loop.count;
         i = next_.fetch_add(1, std::memory_order_relaxed)) {
      loop.call(loop.body, i, thread);
    }
  }

  int64_t num_workers_ = 0;
  Loop loop_{};
  std::atomic<int64_t> max_workers_{0};
  alignas(64) std::atomic<uint64_t> gate_{kClosed};
  std::atomic<uint32_t> loops_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> left_{0};
};

// Never destroyed: its threads sleep until the process ends. A forked process has none of them, and makes its own.
std::mutex* busy = nullptr;
ThreadPool* pool = nullptr;

void make_pool() {
  busy = new std::mutex;
  pool = new ThreadPool;
}

void make_pool_once() {
  static const bool made = [] {
    make_pool();
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, make_pool);
#endif
    return true;
  }();
  static_cast<void>(made);
}

}  // namespace

void set_loop_threads(int64_t threads) { own_threads = threads; }

int64_t loop_threads() { return own_threads; }

void run_loop(const Loop& loop, int64_t threads) {
  make_pool_once();
  threads = std::min(threads, loop.count);
  if (threads > 1 && !inside_loop && busy->try_lock()) {
    const std::lock_guard lock(*busy, std::adopt_lock);
    inside_loop = true;
    pool->run(loop, threads);
    inside_loop = false;
    return;
  }
  for (int64_t i = 0; i < loop.count; ++i) loop.call(loop.body, i, 0);
}

}  // namespace kvllm
