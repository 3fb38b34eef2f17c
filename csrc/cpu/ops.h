// The operators, and what all of them need to check and split their work.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace kvllm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor add_rms_norm(const Tensor& residual, const Tensor& x, const Tensor& weight, double eps);
Tensor silu_mul(const Tensor& gate_up);
Tensor gelu_mul(const Tensor& gate_up);
void rotary(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin, int64_t num_query_heads,
            int64_t num_kv_heads, int64_t head_dim, const std::optional<Tensor>& query_weight,
            const std::optional<Tensor>& key_weight, double eps);
Tensor paged_attention(const Tensor& queries, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& query_start_loc, const Tensor& last_kv_index, const Tensor& block_tables,
                       const std::optional<Tensor>& packed_len, const std::optional<Tensor>& head_lengths,
                       const std::optional<Tensor>& scores, const std::optional<Tensor>& scored_from, double scale,
                       int64_t sliding_window, double soft_cap, const std::optional<Tensor>& sinks,
                       const std::optional<Tensor>& kv_residual, const std::optional<Tensor>& residual_slots,
                       const std::optional<Tensor>& residual_first, const std::optional<Tensor>& positions,
                       const std::optional<Tensor>& new_keys, const std::optional<Tensor>& new_values);
Tensor attention_mass(const Tensor& queries, const Tensor& keys, int64_t num_scored, double scale,
                      const std::optional<Tensor>& last_kv_index, bool squared, double soft_cap,
                      const std::optional<Tensor>& sinks);
// Scores of each sequence's query tokens with its keys, unbounded: of queries `[sequences, tokens, query_heads,
// head_dim]` float32 `[sequences, kv_heads, tokens * group, blocks * block_size]`, -inf after the last key of a query
// token.
Tensor key_scores(const Tensor& queries, const Tensor& key_cache, const Tensor& block_tables,
                  const Tensor& last_kv_index, double scale);
// Exchanges of each sequence and KV head, see ExchangeHead: of scores `[sequences, kv_heads, queries, pairs]` bounds
// float32 `[sequences, kv_heads]`, counts int32, and arriving and leaving pairs int32 `[sequences, kv_heads, 2, most]`.
std::tuple<Tensor, Tensor, Tensor> exchange_pairs(const Tensor& resident, const Tensor& dropped, const Tensor& upper,
                                                  const Tensor& movable, const std::optional<Tensor>& sinks,
                                                  int64_t most, double limit);
// `kvllm.compression.methods.token2chunk.expand`: of scores `[.., n]` int64 `[.., total]`.
Tensor choose_chunks(const Tensor& scores, int64_t total, int64_t chunk_budget, int64_t max_chunk);
// `kvllm.compression.methods.keydiff.scores`: of keys `[windows, kv_heads, n, head_dim]` float32 `[windows, kv_heads,
// n]`.
Tensor key_differences(const Tensor& keys);
// `kvllm.compression.methods.rkv.resemblance`: of keys `[kv_heads, n, head_dim]` float32 `[kv_heads, n]`.
Tensor key_resemblance(const Tensor& keys, double threshold, bool spare_first);
// `kvllm.kvcache.hadamard.hadamard`: of vectors `[count, d]` float32 `[count, d]`, d a power of two from 32 to 256.
Tensor hadamard(const Tensor& vectors);
// `kvllm.models.gated_delta.convolve`: of x `[T, channels]`, a filter `[taps, channels]` and inputs `[slots, taps - 1,
// channels]`, which are changed, `[T, channels]`.
Tensor short_convolution(const Tensor& x, const Tensor& filter, const Tensor& inputs, const Tensor& query_start_loc,
                         const Tensor& slots, bool silu);
// `kvllm.models.gated_delta.gated_delta_rule`: mixed `[T, ...]` has the queries and keys of all key heads, then the
// values; decays are factors. states `[slots, heads, key_dim, value_dim]` are changed. Returns `[T, heads, value_dim]`.
Tensor gated_delta_rule(const Tensor& mixed, const Tensor& decays, const Tensor& strengths, const Tensor& states,
                        const Tensor& query_start_loc, const Tensor& slots, int64_t key_heads);
// The first `size` slots of windows in all layers of a plane `[layers, blocks, kv_heads, block_size, width]`, whose
// slots of one head in one block are contiguous: `[layers * windows, kv_heads, size, width]`. tables: int32 `[windows,
// blocks]`.
Tensor gather_blocks(const Tensor& plane, const Tensor& tables, int64_t size);
void store_kv(const Tensor& key_cache, const Tensor& value_cache, const Tensor& keys, const Tensor& values,
              const Tensor& slots);
void copy_blocks(const Tensor& cache, const Tensor& sources, const Tensor& destinations);
void compact(const Tensor& cache, const Tensor& kept, const Tensor& sources, const Tensor& destinations);

// logits `[rows, tokens]` -> int64 `[rows]`, the first of the largest of each row, -1 where that is not finite.
Tensor most_likely(const Tensor& logits);

// [out, in] -> the order in which products read it: `[out / 16, in / c, 16, c]`, c = 2 for bfloat16, 1 for float32, and
// rows of zeros up to a multiple of 16.
Tensor pack_weight(const Tensor& weight);
// Writes rows `[n, words]` to those of tiles `[tiles, words, 16]` from `first` on. Words have 2 or 4 bytes.
void tile_rows(const Tensor& rows, int64_t first, const Tensor& tiles);
// Rows of a packed weight: `[indices]` -> `[indices, in]`.
Tensor unpack_rows(const Tensor& packed, const Tensor& indices);
// The same of integers in groups (kvllm/models/weights.py), as the float numbers that they mean.
Tensor dequantize_rows(const Tensor& packed, const Tensor& scales, const Tensor& indices);
// `[rows, in]` times a packed weight, plus bias -> `[rows, out_features]`. A weight of integers has scales:
// `[out / 16, groups, 16]`, each for a group of channels of a row (kvllm/models/quantize.py).
// Adds the products of adapters to that of a matrix, product `[T, columns]` of x `[T, depth]`: for adapter i of tokens
// `rows[starts[i]] .. rows[starts[i + 1] - 1]`, times downs[i], of which all columns of its tiles that ups[i] has
// channels for, then times ups[i], of which the first columns. All are packed.
void add_adapters(const Tensor& product, const Tensor& x, const Tensor& rows, const Tensor& starts,
                  const std::vector<Tensor>& downs, const std::vector<Tensor>& ups);
Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
                     const std::optional<Tensor>& bias, int64_t out_features);

// An opaque tensor that holds a decoder without layers, and is freed with it.
// `float32`: its activations are, else bfloat16. `gelu`: the MLPs' activation is, else SiLU.
Tensor make_decoder(const Tensor& final_norm, int64_t query_heads, int64_t kv_heads, int64_t head_dim, double eps,
                    bool float32, bool gelu);
void add_decoder_layer(const Tensor& decoder, const Tensor& cos_sin, const Tensor& input_norm, const Tensor& qkv,
                       const std::optional<Tensor>& qkv_scales, const std::optional<Tensor>& qkv_bias,
                       const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
                       const Tensor& output, const std::optional<Tensor>& output_scales,
                       const std::optional<Tensor>& attention_output_norm, const Tensor& post_attention_norm,
                       const Tensor& gate_up, const std::optional<Tensor>& gate_up_scales, const Tensor& down,
                       const std::optional<Tensor>& down_scales, const std::optional<Tensor>& mlp_output_norm,
                       int64_t inner_size);
// residual: the embedded tokens, overwritten. key_cache, value_cache: of all places. slots, last_kv_index,
// block_tables: of each part of KV groups; scored_from: of the first ones, whose KV pairs are scored. layer_parts,
// layer_places, sliding_windows: of each layer, the part that it belongs to, its place in a block, and its window, 0
// for none. wanted: int64, ascending, the tokens whose normalized hidden states are returned; none for all.
// adapter_rows, adapter_starts: as in add_adapters, none if no token has an adapter; downs, ups: of the four matrices
// of each layer in turn, those of each adapter.
Tensor run_decoder(const Tensor& decoder, const Tensor& residual, const Tensor& positions,
                   const std::vector<Tensor>& slots, const Tensor& key_cache, const Tensor& value_cache,
                   const Tensor& query_start_loc, const std::vector<Tensor>& last_kv_index,
                   const std::vector<Tensor>& block_tables, const std::optional<Tensor>& packed_len,
                   const std::optional<Tensor>& head_lengths, const std::vector<int64_t>& layer_parts,
                   const std::vector<int64_t>& layer_places, const std::vector<int64_t>& sliding_windows,
                   const std::optional<Tensor>& scores, const std::vector<Tensor>& scored_from, double scale,
                   const std::optional<Tensor>& kv_residual, const std::optional<Tensor>& residual_slots,
                   const std::optional<Tensor>& residual_first, const std::optional<Tensor>& wanted,
                   const std::optional<Tensor>& adapter_rows, const std::optional<Tensor>& adapter_starts,
                   const std::vector<Tensor>& downs, const std::vector<Tensor>& ups);
// The rotated queries `[T, query_heads, head_dim]` of a layer, for tokens whose keys and values are in the cache.
// residual: the embedded tokens, which calls for all layers in order overwrite. queries: those of the layer before,
// none for the first; that layer is finished.
Tensor decoder_queries(const Tensor& decoder, int64_t layer, const Tensor& residual,
                       const std::optional<Tensor>& queries, const Tensor& positions, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& query_start_loc,
                       const std::vector<Tensor>& last_kv_index, const std::vector<Tensor>& block_tables,
                       const std::optional<Tensor>& packed_len, const std::optional<Tensor>& head_lengths,
                       const std::vector<int64_t>& layer_parts, const std::vector<int64_t>& layer_places,
                       const std::vector<int64_t>& sliding_windows, double scale);

void check_positions(const int64_t* positions, int64_t count, int64_t num_positions);

inline void check_contiguous(const Tensor& tensor, const char* name, int64_t dim) {
  STD_TORCH_CHECK(tensor.dim() == dim, name, " has ", tensor.dim(), " dimensions, not ", dim);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " is not contiguous");
}

inline void check_dtype(const Tensor& tensor, const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                  ", not ", torch::headeronly::toString(dtype));
}

inline void check_size(const Tensor& tensor, const char* name, int64_t dim, int64_t size) {
  STD_TORCH_CHECK(tensor.size(dim) == size, "dimension ", dim, " of ", name, " is ", tensor.size(dim), ", not ", size);
}

// Learned scores, one for each query head.
inline void check_sinks(const std::optional<Tensor>& sinks, int64_t query_heads) {
  if (!sinks) return;
  check_contiguous(*sinks, "sinks", 1);
  check_dtype(*sinks, "sinks", ScalarType::Float);
  check_size(*sinks, "sinks", 0, query_heads);
}

// An uninitialized tensor. The stable new_empty goes through the boxed dispatcher, which would
// be a quarter of the cost of a small operator.
template <size_t kDims>
Tensor empty(int32_t dtype, const int64_t (&sizes)[kDims]) {
  int64_t strides[kDims];
  int64_t stride = 1;
  for (size_t dim = kDims; dim-- > 0; stride *= sizes[dim]) strides[dim] = stride;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(kDims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

template <size_t kDims>
Tensor empty_like(const Tensor& like, const int64_t (&sizes)[kDims]) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  return empty(dtype, sizes);
}

// Heads of T tokens: `[T, heads, head_dim]`, in which only the tokens may be apart.
inline void check_heads(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 3, name, " has ", tensor.dim(), " dimensions, not 3");
  const bool dense_heads =
      (tensor.size(2) == 1 || tensor.stride(2) == 1) && (tensor.size(1) == 1 || tensor.stride(1) == tensor.size(2));
  STD_TORCH_CHECK(tensor.numel() == 0 || dense_heads, "the heads of a token of ", name, " are not contiguous");
}

inline const Kernels& kernels_for(const Tensor& tensor, const char* name) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, name, " has dtype ",
                  torch::headeronly::toString(dtype), ": float32 and bfloat16 are supported");
  return dtype == ScalarType::Float ? kernel_set().float32 : kernel_set().bfloat16;
}

inline int64_t num_threads() { return loop_threads() > 0 ? loop_threads() : torch::stable::get_num_threads(); }

// body(i) for i in 0 .. count - 1; a thread that is free takes the next.
template <class Body>
void for_each_dynamic(int64_t count, const Body& body) {
  const auto call = [](const void* object, int64_t i, int64_t) { (*static_cast<const Body*>(object))(i); };
  run_loop({count, call, &body}, num_threads());
}

// The same, where each thread takes the parts of a share of its own in order, and then of others': it reads on where
// it was. `upcoming`: see Loop.
template <class Body>
void for_each_in_shares(int64_t count, const Upcoming& upcoming, const Body& body) {
  constexpr int64_t kMaxShares = 64;
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Shares {
    const Body& body;
    int64_t size;
    Share all[kMaxShares];
  };
  Shares shares{body, std::clamp<int64_t>(std::min(num_threads(), count), 1, kMaxShares), {}};
  for (int64_t i = 0; i < shares.size; ++i) {
    shares.all[i].next.store(share_begin(count, shares.size, i), std::memory_order_relaxed);
    shares.all[i].end = share_begin(count, shares.size, i + 1);
  }
  // There are as many calls as parts, and each takes one: so none finds all shares empty.
  const auto call = [](const void* object, int64_t, int64_t thread) {
    Shares& from = *static_cast<Shares*>(const_cast<void*>(object));
    for (int64_t i = 0; i < from.size; ++i) {
      Share& share = from.all[(thread + i) % from.size];
      const int64_t part = share.next.fetch_add(1, std::memory_order_relaxed);
      if (part < share.end) return from.body(part);
    }
  };
  run_loop({count, call, &shares, upcoming}, num_threads());
}

// Elements below which a loop over memory is faster on one thread.
constexpr int64_t kGrainElements = 32768;

// Products of scores below which attention is faster on one thread.
constexpr int64_t kThreadingProducts = 100000;

// body(begin, end) over rows of `width` elements, on several threads where there is enough to do.
template <class Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  const int64_t most = std::min<int64_t>(rows, 4 * num_threads());
  const int64_t parts = std::min(most, 1 + rows * width / kGrainElements);
  for_each_dynamic(parts, [&](int64_t i) { body(rows * i / parts, rows * (i + 1) / parts); });
}

// Memory of the calling thread, kept for its next task; one piece for each `kUse`.
template <int kUse = 0>
float* scratch(int64_t floats) {
  constexpr int64_t kAlignment = 64 / sizeof(float);
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + kAlignment) memory.resize(floats + kAlignment);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

}  // namespace kvllm
