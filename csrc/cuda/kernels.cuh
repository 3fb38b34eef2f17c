// The kernels that move KV pairs. They use no more of CUDA than the names of threads and the barrier, so that a test
// can run them, thread by thread, on a machine without a GPU.
#pragma once

#include <cstdint>

namespace kvllm {

// `[layers, 2, blocks, kv_heads, block_size, head_dim]` in vectors of 16 bytes. A plane is the keys or the values of
// one layer; places in it are counted from its start.
struct Layout {
  int64_t blocks;
  int heads, block_size, vectors_per_key;
};

__host__ __device__ inline int64_t block_vectors(const Layout& layout) {
  return static_cast<int64_t>(layout.heads) * layout.block_size * layout.vectors_per_key;
}

__host__ __device__ inline int64_t plane_vectors(const Layout& layout) { return layout.blocks * block_vectors(layout); }

// Vectors that a thread reads before it writes the first of them, so that many reads are on their way at once.
constexpr int kInFlight = 4;

// A grid of (parts of a block, copies, planes).
__global__ void copy_blocks_kernel(uint4* cache, Layout layout, const int64_t* sources, const int64_t* destinations) {
  const int64_t size = block_vectors(layout);
  uint4* plane = cache + blockIdx.z * plane_vectors(layout);
  const uint4* from = plane + sources[blockIdx.y] * size;
  uint4* to = plane + destinations[blockIdx.y] * size;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x * kInFlight + threadIdx.x;
  uint4 vectors[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const int64_t place = first + i * static_cast<int64_t>(blockDim.x);
    if (place < size) vectors[i] = from[place];
  }
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const int64_t place = first + i * static_cast<int64_t>(blockDim.x);
    if (place < size) to[place] = vectors[i];
  }
}

// The arguments of the operator `compact`: kept `[layers, sequences, heads, width]`, sources `[sequences,
// source_blocks]`, destinations `[sequences, destination_blocks]`.
struct Compaction {
  const int64_t *kept, *sources, *destinations;
  int sequences, width, source_blocks, destination_blocks;
};

// The move of one vector of a plane; `from` is -1 if it stays where it is, or does not survive.
struct Move {
  int from, to;
};

__host__ __device__ inline int place_of(const Layout& layout, int64_t block, int head, int offset, int column) {
  return static_cast<int>(((block * layout.heads + head) * layout.block_size + offset) * layout.vectors_per_key +
                          column);
}

__host__ __device__ inline Move move_of(const Layout& layout, const Compaction& event, int layer, int head,
                                        int sequence, int pair, int column) {
  const int64_t kept_head = (static_cast<int64_t>(layer) * event.sequences + sequence) * layout.heads + head;
  const int old = pair < event.width ? static_cast<int>(event.kept[kept_head * event.width + pair]) : -1;
  if (old < 0) return {-1, -1};
  const int64_t source = event.sources[sequence * event.source_blocks + old / layout.block_size];
  const int64_t target = event.destinations[sequence * event.destination_blocks + pair / layout.block_size];
  const Move move{place_of(layout, source, head, old % layout.block_size, column),
                  place_of(layout, target, head, pair % layout.block_size, column)};
  return move.from == move.to ? Move{-1, -1} : move;
}

// Tiles of a sequence: kInFlight KV pairs for every `vectors_per_key` threads, one of which has one vector.
__host__ __device__ inline int tiles_of(const Layout& layout, const Compaction& event, int threads) {
  const int pairs = threads / layout.vectors_per_key * kInFlight;
  return (event.width + pairs - 1) / pairs;
}

// The moves of one thread in one tile. The tiles of a sequence come one after the other, then those of the next. A
// thread has the same column of kInFlight KV pairs; threads after the last whole pair have nothing to move.
__host__ __device__ inline void moves_of(const Layout& layout, const Compaction& event, int layer, int head, int tile,
                                         int thread, int threads, Move (&moves)[kInFlight]) {
  const int at_once = threads / layout.vectors_per_key, first = thread / layout.vectors_per_key;
  const int tiles = tiles_of(layout, event, threads);
  for (int i = 0; i < kInFlight; ++i) {
    const int pair = first < at_once ? (tile % tiles * kInFlight + i) * at_once + first : event.width;
    moves[i] = move_of(layout, event, layer, head, tile / tiles, pair, thread % layout.vectors_per_key);
  }
}

// A grid of (heads, planes); a block has at least `vectors_per_key` threads.
//
// A tile is read by all threads before any of them writes it: one thread's new slot is another's old one. Nothing that
// is written then is read later, because a KV pair never moves to a later slot, and no sequence reads what another one
// wrote. So one barrier is enough for each tile. Sequences go in order, because a destination may be a source of a
// sequence before it.
__global__ void __launch_bounds__(128, 8) compact_kernel(uint4* cache, Layout layout, Compaction event, int num_tiles) {
  const int head = blockIdx.x, layer = blockIdx.y / 2;
  uint4* plane = cache + blockIdx.y * plane_vectors(layout);
  Move moves[kInFlight];
  moves_of(layout, event, layer, head, 0, threadIdx.x, blockDim.x, moves);
  for (int tile = 0; tile < num_tiles; ++tile) {
    uint4 vectors[kInFlight];
    int targets[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      targets[i] = moves[i].to;
      if (moves[i].from >= 0) vectors[i] = plane[moves[i].from];
    }
    // Finding the next moves takes as long as reading: it is done meanwhile.
    if (tile + 1 < num_tiles) moves_of(layout, event, layer, head, tile + 1, threadIdx.x, blockDim.x, moves);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (targets[i] >= 0) plane[targets[i]] = vectors[i];
    }
  }
}

// The arguments of the operator `compact_mass`: kept `[layers, sequences, heads, width]`, all others `[sequences]`.
struct MassCompaction {
  const int64_t *kept, *counts, *table_slots, *starts, *ends, *lengths;
  int width;
};

// A grid of (heads, sequences, layers) over mass `[layers, num_slots, heads, max_pairs]`. As above, what a tile writes
// is not read by later ones.
__global__ void compact_mass_kernel(float* mass, int num_slots, int max_pairs, MassCompaction event) {
  const int head = blockIdx.x, heads = gridDim.x, sequence = blockIdx.y, sequences = gridDim.y, layer = blockIdx.z;
  float* head_mass =
      mass + ((static_cast<int64_t>(layer) * num_slots + event.table_slots[sequence]) * heads + head) * max_pairs;
  const int64_t* kept =
      event.kept + ((static_cast<int64_t>(layer) * sequences + sequence) * heads + head) * event.width;
  const int start = static_cast<int>(event.starts[sequence]), end = static_cast<int>(event.ends[sequence]);
  const int length = static_cast<int>(event.lengths[sequence]), count = static_cast<int>(event.counts[sequence]);
  const int moved = count + length - end;
  for (int begin = 0; begin < moved; begin += blockDim.x) {
    const int pair = begin + threadIdx.x;
    float value = 0;
    if (pair < moved) value = head_mass[pair < count ? start + kept[pair] : end + pair - count];
    __syncthreads();
    if (pair < moved) head_mass[start + pair] = value;
  }
  for (int pair = start + moved + threadIdx.x; pair < length; pair += blockDim.x) head_mass[pair] = 0;
}

}  // namespace kvllm
