// New KV pairs into the paged cache, without tensors.
#pragma once

#include "ops.h"

namespace kvllm {

// The formats of keys and of values `[..., blocks, kv_heads, block_size, width]`, whose dtypes tell them
// (kvllm/kvcache/quantize.py). Raises an error unless vectors of `head_dim` channels and `dtype` can be stored there,
// and both have the same sizes but for the width.
VectorFormat check_vector_format(const Tensor& cache, const char* name, int64_t head_dim, ScalarType dtype);
KVFormat check_kv_format(const Tensor& key_cache, const Tensor& value_cache, int64_t head_dim, ScalarType dtype);

struct StoreShape {
  KVFormat format;
  int element_size;  // of keys and values before they are stored
  int kv_heads;
  int head_dim;
  int64_t num_blocks;
  int64_t block_size;
};

// Raises an error for a slot beyond the cache. Once per step: all layers have the same slots.
void check_slots(const StoreShape& shape, const int64_t* slots, int64_t num_tokens);

// Keys and values are `[num_tokens, kv_heads, head_dim]`, tokens a stride of elements apart; the caches are
// `[num_blocks, kv_heads, block_size, width]`. A token whose slot is negative is not stored.
struct StoreLayer {
  const void* keys;
  const void* values;
  int64_t key_stride;
  int64_t value_stride;
  void* key_cache;
  void* value_cache;
};

void store_layer(const StoreShape& shape, const int64_t* slots, int64_t num_tokens, const StoreLayer& layer);

}  // namespace kvllm
