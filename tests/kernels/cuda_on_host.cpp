// Runs the kernels of csrc/cuda on the host: one block after the other, and a thread of the operating system for each
// of its threads.
#include <barrier>
#include <cstdint>
#include <thread>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct Indices {
  unsigned x, y, z;
};
static Indices blockDim, gridDim;
static thread_local Indices blockIdx, threadIdx;
static std::barrier<>* block_barrier;
static void __syncthreads() { block_barrier->arrive_and_wait(); }

#include "../../csrc/cuda/kernels.cuh"

namespace {

template <class Kernel, class... Arguments>
void launch(Indices grid, int threads, Kernel kernel, Arguments... arguments) {
  gridDim = grid;
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  for (unsigned block = 0; block < grid.x * grid.y * grid.z; ++block) {
    std::barrier barrier(threads);
    block_barrier = &barrier;
    std::vector<std::thread> running;
    for (unsigned thread = 0; thread < blockDim.x; ++thread) {
      running.emplace_back([=] {
        blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
        threadIdx = {thread, 0, 0};
        kernel(arguments...);
      });
    }
    for (std::thread& thread : running) thread.join();
  }
}

}  // namespace

extern "C" {

void copy_blocks(uint4* cache, int64_t blocks, int heads, int block_size, int vectors_per_key, unsigned planes,
                 const int64_t* sources, const int64_t* destinations, unsigned copies, int threads) {
  const kvllm::Layout layout{blocks, heads, block_size, vectors_per_key};
  const int64_t part = threads * kvllm::kInFlight;
  const Indices grid{static_cast<unsigned>((kvllm::block_vectors(layout) + part - 1) / part), copies, planes};
  launch(grid, threads, kvllm::copy_blocks_kernel, cache, layout, sources, destinations);
}

void compact(uint4* cache, int64_t blocks, int heads, int block_size, int vectors_per_key, unsigned planes,
             const int64_t* kept, const int64_t* sources, const int64_t* destinations, int sequences, int width,
             int source_blocks, int destination_blocks, int threads) {
  const kvllm::Layout layout{blocks, heads, block_size, vectors_per_key};
  const kvllm::Compaction event{kept, sources, destinations, sequences, width, source_blocks, destination_blocks};
  const int tiles = sequences * kvllm::tiles_of(layout, event, threads);
  launch({static_cast<unsigned>(heads), planes, 1}, threads, kvllm::compact_kernel, cache, layout, event, tiles);
}

void compact_mass(float* mass, int num_slots, int max_pairs, unsigned heads, unsigned sequences, unsigned layers,
                  const int64_t* kept, const int64_t* counts, const int64_t* table_slots, const int64_t* starts,
                  const int64_t* ends, const int64_t* lengths, int width, int threads) {
  const kvllm::MassCompaction event{kept, counts, table_slots, starts, ends, lengths, width};
  launch({heads, sequences, layers}, threads, kvllm::compact_mass_kernel, mass, num_slots, max_pairs, event);
}
}
