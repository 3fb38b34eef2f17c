// Data movement in the paged cache. Keys and values are copied as bytes, whatever their dtype; a cache of codes is
// written by the kernels that quantize.
#include <cstring>
#include <utility>
#include <vector>

#include "ops.h"
#include "store.h"

namespace kvllm {
namespace {

// Bytes of the vectors of one head in one block that lie together: `bytes` of each, from `begin` on.
struct Part {
  int64_t begin, bytes;
};

bool is_quantized(const Tensor& cache) {
  const ScalarType dtype = cache.scalar_type();
  return dtype == ScalarType::Char || dtype == ScalarType::Byte || dtype == ScalarType::Float8_e4m3fn ||
         dtype == ScalarType::Float4_e2m1fn_x2 || dtype == ScalarType::Float8_e5m2 ||
         dtype == ScalarType::Float8_e5m2fnuz;
}

// `[layers, planes, blocks, kv_heads, block_size, width]`: a plane is the keys or the values of a layer. There are two,
// or one where the others lie in another tensor.
struct Cache {
  int64_t layers, planes, blocks, heads, block_size, vector_bytes;
  char* data;
  std::vector<Part> parts;  // of a vector: codes and their scale, or all of it

  explicit Cache(const Tensor& tensor) {
    check_contiguous(tensor, "cache", 6);
    STD_TORCH_CHECK(tensor.size(1) == 1 || tensor.size(1) == 2, "dimension 1 of cache is ", tensor.size(1),
                    ", not 1 or 2");
    layers = tensor.size(0);
    planes = tensor.size(1);
    blocks = tensor.size(2);
    heads = tensor.size(3);
    block_size = tensor.size(4);
    vector_bytes = tensor.size(5) * tensor.element_size();
    data = static_cast<char*>(tensor.mutable_data_ptr());
    const int64_t codes = vector_bytes - kScaleBytes;
    parts = is_quantized(tensor) ? std::vector<Part>{{0, codes}, {block_size * codes, kScaleBytes}}
                                 : std::vector<Part>{{0, vector_bytes}};
  }

  int64_t block_bytes() const { return heads * block_size * vector_bytes; }

  // A block of a plane, which are counted through all layers.
  char* block(int64_t plane, int64_t block) const { return data + (plane * blocks + block) * block_bytes(); }

  char* at(const Part& part, int64_t plane, int64_t id, int64_t head, int64_t offset) const {
    return block(plane, id) + head * block_size * vector_bytes + part.begin + offset * part.bytes;
  }
};

void check_ids(const Tensor& ids, const char* name, int64_t dim) {
  check_contiguous(ids, name, dim);
  check_dtype(ids, name, ScalarType::Long);
}

void check_block(int64_t block, int64_t blocks, const char* name) {
  STD_TORCH_CHECK(block >= 0 && block < blocks, "block ", block, " of ", name, " is not in the cache of ", blocks,
                  " blocks");
}

// Offsets in its region that one KV head of one sequence keeps in one layer.
struct KeptOffsets {
  const int64_t* offsets;
  int64_t count;
};

// The heads of `kept`, in order, after checking that every block they reach exists.
std::vector<KeptOffsets> check_kept(const Tensor& kept, const Cache& cache, const Tensor& sources,
                                    const Tensor& destinations) {
  const int64_t width = kept.size(3), sequences = kept.size(1);
  const int64_t source_blocks = sources.size(1), destination_blocks = destinations.size(1);
  std::vector<KeptOffsets> heads(cache.layers * sequences * cache.heads);
  std::vector<int64_t> source_end(sequences, 0), destination_end(sequences, 0);
  for (size_t i = 0; i < heads.size(); ++i) {
    const int64_t* offsets = kept.const_data_ptr<int64_t>() + static_cast<int64_t>(i) * width;
    int64_t count = 0, previous = -1;
    for (; count < width && offsets[count] != -1; ++count) {
      STD_TORCH_CHECK(offsets[count] > previous, "kept is not strictly ascending: ", offsets[count], " follows ",
                      previous);
      previous = offsets[count];
    }
    for (int64_t j = count; j < width; ++j) STD_TORCH_CHECK(offsets[j] == -1, "kept has -1 before ", offsets[j]);
    heads[i] = {offsets, count};
    const int64_t sequence = static_cast<int64_t>(i) / cache.heads % sequences;
    source_end[sequence] = std::max(source_end[sequence], previous + 1);
    destination_end[sequence] = std::max(destination_end[sequence], count);
  }
  for (int64_t s = 0; s < sequences; ++s) {
    STD_TORCH_CHECK(source_end[s] <= source_blocks * cache.block_size, "kept reaches offset ", source_end[s] - 1,
                    " of a region of ", source_blocks, " blocks of ", cache.block_size);
    STD_TORCH_CHECK(destination_end[s] <= destination_blocks * cache.block_size, destination_end[s],
                    " kept KV pairs do not fit ", destination_blocks, " blocks of ", cache.block_size);
    for (int64_t b = 0; b * cache.block_size < source_end[s]; ++b) {
      check_block(sources.const_data_ptr<int64_t>()[s * source_blocks + b], cache.blocks, "sources");
    }
    for (int64_t b = 0; b * cache.block_size < destination_end[s]; ++b) {
      check_block(destinations.const_data_ptr<int64_t>()[s * destination_blocks + b], cache.blocks, "destinations");
    }
  }
  return heads;
}

}  // namespace

// The format of keys or values, whose dtype tells it.
VectorFormat check_vector_format(const Tensor& cache, const char* name, int64_t head_dim, ScalarType dtype) {
  const ScalarType stored = cache.scalar_type();
  const VectorFormat format = stored == ScalarType::Char               ? VectorFormat::kInt8
                              : stored == ScalarType::Byte             ? VectorFormat::kInt4
                              : stored == ScalarType::Float8_e4m3fn    ? VectorFormat::kFloat8
                              : stored == ScalarType::Float4_e2m1fn_x2 ? VectorFormat::kInt4Hadamard
                              : stored == ScalarType::Float8_e5m2      ? VectorFormat::kInt6
                              : stored == ScalarType::Float8_e5m2fnuz  ? VectorFormat::kInt6Hadamard
                                                                       : VectorFormat::kPlain;
  if (format == VectorFormat::kPlain) {
    check_dtype(cache, name, dtype);
    check_size(cache, name, cache.dim() - 1, head_dim);
    return format;
  }
  STD_TORCH_CHECK(head_dim % kCodeChannels == 0 && head_dim <= kMaxCodeChannels, "head_dim is ", head_dim,
                  ": codes need a multiple of ", kCodeChannels, " up to ", kMaxCodeChannels);
  const bool rotated = format == VectorFormat::kInt4Hadamard || format == VectorFormat::kInt6Hadamard;
  STD_TORCH_CHECK(!rotated || (head_dim & (head_dim - 1)) == 0, "head_dim is ", head_dim,
                  ": a Hadamard matrix needs a power of two");
  check_size(cache, name, cache.dim() - 1, stored_bytes(format, head_dim, 0));
  return format;
}

KVFormat check_kv_format(const Tensor& key_cache, const Tensor& value_cache, int64_t head_dim, ScalarType dtype) {
  const KVFormat format{check_vector_format(key_cache, "key_cache", head_dim, dtype),
                        check_vector_format(value_cache, "value_cache", head_dim, dtype)};
  for (int64_t dim = 0; dim + 1 < key_cache.dim(); ++dim) {
    check_size(value_cache, "value_cache", dim, key_cache.size(dim));
  }
  const KVKernels& kernels = kernel_set().float32.kv[static_cast<int>(format.keys)][static_cast<int>(format.values)];
  STD_TORCH_CHECK(kernels.attend != nullptr, "value_cache has dtype ",
                  torch::headeronly::toString(value_cache.scalar_type()), ", which does not go with key_cache of ",
                  torch::headeronly::toString(key_cache.scalar_type()));
  return format;
}

void check_slots(const StoreShape& shape, const int64_t* slots, int64_t num_tokens) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    STD_TORCH_CHECK(slots[t] < shape.num_blocks * shape.block_size, "slot ", slots[t], " is not in the cache of ",
                    shape.num_blocks, " blocks of ", shape.block_size);
  }
}

void store_layer(const StoreShape& shape, const int64_t* slots, int64_t num_tokens, const StoreLayer& layer) {
  const int64_t vector_bytes = static_cast<int64_t>(shape.head_dim) * shape.element_size;
  const KernelSet& set = kernel_set();
  const Kernels& kernels = shape.element_size == sizeof(float) ? set.float32 : set.bfloat16;
  const auto store_token = [&](int64_t token, VectorFormat format, void* cache, const void* vectors, int64_t stride) {
    const auto quantize = kernels.quantize[static_cast<int>(format)];
    const int64_t codes = code_bytes(format, shape.head_dim);
    const int64_t head_bytes = shape.block_size * stored_bytes(format, shape.head_dim, shape.element_size);
    const int64_t block = slots[token] / shape.block_size, offset = slots[token] % shape.block_size;
    const char* from = static_cast<const char*>(vectors) + token * stride * shape.element_size;
    char* to = static_cast<char*>(cache) + block * shape.kv_heads * head_bytes;
    for (int head = 0; head < shape.kv_heads; ++head, from += vector_bytes, to += head_bytes) {
      if (quantize == nullptr) {
        std::memcpy(to + offset * vector_bytes, from, vector_bytes);
      } else {
        quantize(from, shape.head_dim, to + offset * codes, to + shape.block_size * codes + offset * kScaleBytes);
      }
    }
  };
  const int64_t width = 2 * static_cast<int64_t>(shape.kv_heads) * shape.head_dim;
  for_rows(num_tokens, width, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (slots[token] < 0) continue;
      store_token(token, shape.format.keys, layer.key_cache, layer.keys, layer.key_stride);
      store_token(token, shape.format.values, layer.value_cache, layer.values, layer.value_stride);
    }
  });
}

void store_kv(const Tensor& key_cache, const Tensor& value_cache, const Tensor& keys, const Tensor& values,
              const Tensor& slots) {
  check_contiguous(key_cache, "key_cache", 4);
  check_contiguous(value_cache, "value_cache", 4);
  check_heads(keys, "keys");
  check_heads(values, "values");
  check_ids(slots, "slots", 1);
  const int64_t heads = key_cache.size(1), head_dim = keys.size(2), num_tokens = slots.size(0);
  const KVFormat format = check_kv_format(key_cache, value_cache, head_dim, keys.scalar_type());
  if (format.keys != VectorFormat::kPlain) kernels_for(keys, "keys");
  for (const auto& [tensor, name] : {std::pair{&keys, "keys"}, std::pair{&values, "values"}}) {
    check_dtype(*tensor, name, keys.scalar_type());
    check_size(*tensor, name, 0, num_tokens);
    check_size(*tensor, name, 1, heads);
    check_size(*tensor, name, 2, head_dim);
  }
  const StoreShape shape{format,
                         static_cast<int>(keys.element_size()),
                         static_cast<int>(heads),
                         static_cast<int>(head_dim),
                         key_cache.size(0),
                         key_cache.size(2)};
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  check_slots(shape, slot, num_tokens);
  store_layer(shape, slot, num_tokens,
              {keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0), key_cache.mutable_data_ptr(),
               value_cache.mutable_data_ptr()});
}

void copy_blocks(const Tensor& tensor, const Tensor& sources, const Tensor& destinations) {
  const Cache cache(tensor);
  check_ids(sources, "sources", 1);
  check_ids(destinations, "destinations", 1);
  const int64_t count = sources.size(0);
  check_size(destinations, "destinations", 0, count);
  const int64_t* source = sources.const_data_ptr<int64_t>();
  const int64_t* destination = destinations.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    check_block(source[i], cache.blocks, "sources");
    check_block(destination[i], cache.blocks, "destinations");
  }
  for_rows(cache.layers * cache.planes * count, cache.block_bytes(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t plane = i / count;
      std::memcpy(cache.block(plane, destination[i % count]), cache.block(plane, source[i % count]),
                  cache.block_bytes());
    }
  });
}

Tensor gather_blocks(const Tensor& plane, const Tensor& tables, int64_t size) {
  STD_TORCH_CHECK(plane.dim() == 5, "plane has ", plane.dim(), " dimensions, not 5");
  check_contiguous(tables, "tables", 2);
  check_dtype(tables, "tables", ScalarType::Int);
  const int64_t layers = plane.size(0), heads = plane.size(2), block_size = plane.size(3), width = plane.size(4);
  STD_TORCH_CHECK((width == 1 || plane.stride(4) == 1) && (block_size == 1 || plane.stride(3) == width),
                  "the slots of a block of plane are not contiguous");
  const int64_t windows = tables.size(0), table_width = tables.size(1);
  STD_TORCH_CHECK(size >= 0 && size <= table_width * block_size, "size is ", size, ", beyond tables of ", table_width,
                  " blocks of ", block_size);
  const int32_t* ids = tables.const_data_ptr<int32_t>();
  for (int64_t window = 0; window < windows; ++window) {
    for (int64_t b = 0; b * block_size < size; ++b) {
      check_block(ids[window * table_width + b], plane.size(1), "tables");
    }
  }
  Tensor found = empty_like(plane, {layers * windows, heads, size, width});
  const int64_t element = plane.element_size(), slot_bytes = width * element;
  const char* from = static_cast<const char*>(plane.data_ptr());
  char* to = static_cast<char*>(found.mutable_data_ptr());
  for_rows(layers * windows * heads, size * slot_bytes / 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row % heads, window = row / heads % windows, layer = row / heads / windows;
      const char* of_head = from + (layer * plane.stride(0) + head * plane.stride(2)) * element;
      for (int64_t slot = 0; slot < size; slot += block_size) {
        const int64_t block = ids[window * table_width + slot / block_size];
        std::memcpy(to + (row * size + slot) * slot_bytes, of_head + block * plane.stride(1) * element,
                    std::min(block_size, size - slot) * slot_bytes);
      }
    }
  });
  return found;
}

void compact(const Tensor& tensor, const Tensor& kept, const Tensor& sources, const Tensor& destinations) {
  const Cache cache(tensor);
  check_ids(kept, "kept", 4);
  check_ids(sources, "sources", 2);
  check_ids(destinations, "destinations", 2);
  const int64_t sequences = kept.size(1);
  check_size(kept, "kept", 0, cache.layers);
  check_size(kept, "kept", 2, cache.heads);
  check_size(sources, "sources", 0, sequences);
  check_size(destinations, "destinations", 0, sequences);
  const std::vector<KeptOffsets> kept_offsets = check_kept(kept, cache, sources, destinations);

  const int64_t* source = sources.const_data_ptr<int64_t>();
  const int64_t* destination = destinations.const_data_ptr<int64_t>();
  // One head of one layer is one thread's, which goes through the sequences in order: where they share blocks, the
  // destinations of one are sources of those before it.
  const int64_t width = cache.planes * sequences * kept.size(3) * cache.vector_bytes;
  for_rows(cache.layers * cache.heads, width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t layer = i / cache.heads, head = i % cache.heads;
      for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        const KeptOffsets& of_head = kept_offsets[(layer * sequences + sequence) * cache.heads + head];
        const int64_t* from = source + sequence * sources.size(1);
        const int64_t* to = destination + sequence * destinations.size(1);
        for (int64_t plane = cache.planes * layer; plane < cache.planes * (layer + 1); ++plane) {
          // In place, no KV pair moves to a later slot: ascending order reads each slot before it is overwritten.
          for (const Part& part : cache.parts) {
            for (int64_t j = 0; j < of_head.count; ++j) {
              const int64_t offset = of_head.offsets[j];
              const char* old_slot =
                  cache.at(part, plane, from[offset / cache.block_size], head, offset % cache.block_size);
              char* new_slot = cache.at(part, plane, to[j / cache.block_size], head, j % cache.block_size);
              if (new_slot != old_slot) std::memcpy(new_slot, old_slot, part.bytes);
            }
          }
        }
      }
    }
  });
}

}  // namespace kvllm
