// The work of key scores: a task for each KV head of each sequence.
#include <cmath>

#include "ops.h"
#include "store.h"

namespace kvllm {
namespace {

struct KeyScores {
  int64_t sequences, tokens, query_heads, head_dim, num_blocks, kv_heads, block_size, table_width;
  VectorFormat format;
  const Kernels& kernels;
  const char* queries;    // [sequences, tokens, query_heads, head_dim]
  const char* keys;       // [num_blocks, kv_heads, block_size, width]
  const int32_t* tables;  // [sequences, table_width]
  const int32_t* last;    // [sequences, tokens]
  float scale;
  float* scores;  // [sequences, kv_heads, tokens * group, table_width * block_size]

  int64_t group() const { return query_heads / kv_heads; }
  int64_t row() const { return table_width * block_size; }

  // Where what the query tokens of a sequence see ends.
  int64_t end(int64_t sequence) const {
    const int32_t* of_sequence = last + sequence * tokens;
    return std::max(0, *std::max_element(of_sequence, of_sequence + tokens) + 1);
  }

  void check() const {
    STD_TORCH_CHECK(head_dim > 0 && head_dim % 2 == 0, "head_dim is ", head_dim, ": it must be even");
    STD_TORCH_CHECK(kv_heads > 0 && query_heads % kv_heads == 0 && group() <= kMaxQueries, query_heads,
                    " query heads over ", kv_heads, " KV heads: a multiple of at most ", kMaxQueries, " is supported");
    for (int64_t s = 0; s < sequences; ++s) {
      STD_TORCH_CHECK(end(s) <= row(), "last_kv_index ", end(s) - 1, " of sequence ", s, " is beyond a table of ",
                      table_width, " blocks of ", block_size);
      for (int64_t b = 0; b * block_size < end(s); ++b) {
        const int32_t block = tables[s * table_width + b];
        STD_TORCH_CHECK(block >= 0 && block < num_blocks, "block ", block, " of sequence ", s,
                        " is not in the cache of ", num_blocks, " blocks");
      }
    }
  }

  int64_t products() const {
    int64_t pairs = 0;
    for (int64_t s = 0; s < sequences; ++s) pairs += end(s);
    return pairs * tokens * query_heads * head_dim;
  }

  PagedHead head(int64_t sequence, int64_t kv_head) const {
    const int64_t bytes = block_size * stored_bytes(format, head_dim, kernels.element_size);
    const int64_t element = format == VectorFormat::kPlain ? kernels.element_size : 1;
    const int64_t stride = kv_heads * bytes / element;
    const char* first = keys + kv_head * bytes;
    const int32_t* table = tables + sequence * table_width;
    return {first, first, stride, stride, table, static_cast<int>(block_size), static_cast<int>(head_dim), 0, 0};
  }

  void score_head(int64_t task) const {
    const int64_t sequence = task / kv_heads, at_once = kMaxQueries / group();
    for (int64_t token = 0; token < tokens; token += at_once) {
      score_tokens(sequence, task % kv_heads, token, std::min(tokens, token + at_once));
    }
  }

  void score_tokens(int64_t sequence, int64_t kv_head, int64_t begin, int64_t end_token) const {
    QueryTile tile;
    tile.count = 0;
    for (int64_t token = begin; token < end_token; ++token) {
      for (int64_t i = 0; i < group(); ++i) {
        const int64_t query = (sequence * tokens + token) * query_heads + kv_head * group() + i;
        tile.queries[tile.count++] = queries + query * head_dim * kernels.element_size;
      }
    }
    float* rows = scores + ((sequence * kv_heads + kv_head) * tokens + begin) * group() * row();
    const auto score_keys = kernels.score_keys[static_cast<int>(format)];
    score_keys({head(sequence, kv_head), 0, static_cast<int>(end(sequence))}, tile, scale,
               scratch(kWorkspaceRows * (head_dim + 2)), rows, row());
    for (int64_t i = 0; i < tile.count; ++i, rows += row()) {
      std::fill(rows + std::max(0, last[sequence * tokens + begin + i / group()] + 1), rows + row(), -INFINITY);
    }
  }
};

}  // namespace

Tensor key_scores(const Tensor& queries, const Tensor& key_cache, const Tensor& block_tables,
                  const Tensor& last_kv_index, double scale) {
  const Kernels& kernels = kernels_for(queries, "queries");
  check_contiguous(queries, "queries", 4);
  check_contiguous(key_cache, "key_cache", 4);
  check_contiguous(block_tables, "block_tables", 2);
  check_contiguous(last_kv_index, "last_kv_index", 2);
  check_dtype(block_tables, "block_tables", ScalarType::Int);
  check_dtype(last_kv_index, "last_kv_index", ScalarType::Int);
  const int64_t sequences = queries.size(0), tokens = queries.size(1), query_heads = queries.size(2);
  const int64_t head_dim = queries.size(3), kv_heads = key_cache.size(1), table_width = block_tables.size(1);
  check_size(block_tables, "block_tables", 0, sequences);
  check_size(last_kv_index, "last_kv_index", 0, sequences);
  check_size(last_kv_index, "last_kv_index", 1, tokens);
  STD_TORCH_CHECK(tokens > 0, "a sequence has no query tokens");
  const VectorFormat format = check_vector_format(key_cache, "key_cache", head_dim, queries.scalar_type());
  KeyScores work{sequences,
                 tokens,
                 query_heads,
                 head_dim,
                 key_cache.size(0),
                 kv_heads,
                 key_cache.size(2),
                 table_width,
                 format,
                 kernels,
                 static_cast<const char*>(queries.data_ptr()),
                 static_cast<const char*>(key_cache.data_ptr()),
                 block_tables.const_data_ptr<int32_t>(),
                 last_kv_index.const_data_ptr<int32_t>(),
                 static_cast<float>(scale),
                 nullptr};
  work.check();
  Tensor out = empty(aoti_torch_dtype_float32(), {sequences, kv_heads, tokens * work.group(), work.row()});
  work.scores = static_cast<float*>(out.mutable_data_ptr());
  const int64_t tasks = sequences * kv_heads;
  if (num_threads() > 1 && work.products() >= kThreadingProducts) {
    for_each_dynamic(tasks, [&](int64_t task) { work.score_head(task); });
  } else {
    for (int64_t task = 0; task < tasks; ++task) work.score_head(task);
  }
  return out;
}

}  // namespace kvllm
