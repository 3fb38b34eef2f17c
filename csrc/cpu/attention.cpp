// The work of paged attention: which queries go together, and which thread takes them.
#include <vector>

#include "ops.h"

namespace kvllm {
namespace {

// Consecutive query tokens of one sequence, with the query heads of one KV head.
struct Task {
  int sequence;
  int kv_head;
  int first_token;
  int num_tokens;
  int num_pairs;  // that its last token attends

  int num_segments() const { return (num_pairs + kSegmentEntries - 1) / kSegmentEntries; }
};

struct Problem {
  const Kernels& kernels;
  int64_t num_query_tokens;
  int64_t query_heads;
  int64_t kv_heads;
  int head_dim;
  int64_t blocks;
  int64_t block_size;
  int64_t sequences;
  int64_t max_blocks;
  int group;  // query heads per KV head
  int64_t element_size;
  int64_t query_stride;
  const char* queries;
  const char* keys;
  const char* values;
  char* outputs;
  const int32_t* query_start_loc;
  const int32_t* last_kv_index;
  const int32_t* block_tables;
  const int32_t* packed_len;    // null: all heads hold the same KV pairs
  const int32_t* head_lengths;  // [sequences, kv_heads]
  float scale;

  // KV pairs that a head lacks of the first `packed_len`.
  int num_evicted(int64_t sequence, int64_t head) const {
    return packed_len == nullptr ? 0 : packed_len[sequence] - evicted_begin(sequence, head);
  }
  int evicted_begin(int64_t sequence, int64_t head) const {
    return packed_len == nullptr ? 0 : std::min(packed_len[sequence], head_lengths[sequence * kv_heads + head]);
  }

  void check_batch() const {
    STD_TORCH_CHECK(query_start_loc[0] == 0 && query_start_loc[sequences] == num_query_tokens,
                    "query_start_loc runs from ", query_start_loc[0], " to ", query_start_loc[sequences],
                    ", not from 0 to the number of rows, ", num_query_tokens);
    for (int64_t s = 0; s < sequences; ++s) {
      STD_TORCH_CHECK(query_start_loc[s] < query_start_loc[s + 1], "sequence ", s, " has no rows");
      int32_t previous = 0;
      for (int32_t token = query_start_loc[s]; token < query_start_loc[s + 1]; ++token) {
        STD_TORCH_CHECK(last_kv_index[token] >= previous, "last_kv_index ", last_kv_index[token], " of row ", token,
                        " is negative or descends");
        previous = last_kv_index[token];
      }
      if (packed_len != nullptr) {
        STD_TORCH_CHECK(packed_len[s] >= 0 && packed_len[s] <= last_kv_index[query_start_loc[s]], "sequence ", s,
                        " has ", packed_len[s], " packed entries, and queries among them");
        for (int64_t head = 0; head < kv_heads; ++head) {
          STD_TORCH_CHECK(head_lengths[s * kv_heads + head] >= 0, "sequence ", s, " has a head of negative length");
        }
      }
      STD_TORCH_CHECK(previous < max_blocks * block_size, "last_kv_index ", previous, " is beyond a table of ",
                      max_blocks, " blocks of ", block_size);
      for (int64_t b = 0; b <= previous / block_size; ++b) {
        const int32_t block = block_tables[s * max_blocks + b];
        STD_TORCH_CHECK(block >= 0 && block < blocks, "block ", block, " of sequence ", s, " is not in the cache of ",
                        blocks, " blocks");
      }
    }
  }

  // The longest first, so that threads which take the next task when they are free finish together.
  std::vector<Task> tasks() const {
    const int tokens_per_task = kMaxQueries / group;
    std::vector<Task> tasks;
    for (int s = 0; s < sequences; ++s) {
      for (int token = query_start_loc[s]; token < query_start_loc[s + 1]; token += tokens_per_task) {
        const int count = std::min(tokens_per_task, query_start_loc[s + 1] - token);
        const int last = last_kv_index[token + count - 1] + 1;
        for (int head = 0; head < kv_heads; ++head)
          tasks.push_back({s, head, token, count, last - num_evicted(s, head)});
      }
    }
    const auto cost = [](const Task& task) { return static_cast<int64_t>(task.num_tokens) * task.num_pairs; };
    std::sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    return tasks;
  }

  PagedHead head(const Task& task) const {
    const int64_t offset = task.kv_head * block_size * head_dim * element_size;
    return {keys + offset,
            values + offset,
            kv_heads * block_size * head_dim,
            block_tables + task.sequence * max_blocks,
            static_cast<int>(block_size),
            head_dim,
            evicted_begin(task.sequence, task.kv_head),
            num_evicted(task.sequence, task.kv_head)};
  }

  QueryTile tile(const Task& task) const {
    QueryTile tile;
    tile.count = 0;
    const int evicted = num_evicted(task.sequence, task.kv_head);
    for (int64_t token = task.first_token; token < task.first_token + task.num_tokens; ++token) {
      for (int64_t query_head = task.kv_head * group; query_head < (task.kv_head + 1) * group; ++query_head) {
        tile.queries[tile.count] = queries + (token * query_stride + query_head * head_dim) * element_size;
        tile.outputs[tile.count] = outputs + (token * query_heads + query_head) * head_dim * element_size;
        tile.last[tile.count] = last_kv_index[token] - evicted;
        ++tile.count;
      }
    }
    return tile;
  }

  int64_t workspace_floats() const { return static_cast<int64_t>(kWorkspaceRows) * (head_dim + 2); }

  int64_t partial_floats(const Task& task) const {
    return static_cast<int64_t>(task.num_tokens) * group * (head_dim + 2);
  }

  PartialSoftmax partial(const Task& task, float* memory) const {
    const int count = task.num_tokens * group;
    return {memory, memory + count, memory + 2 * count};
  }
};

void attend_whole(const Problem& problem, const Task& task) {
  float* memory = scratch(problem.partial_floats(task) + problem.workspace_floats());
  const PartialSoftmax total = problem.partial(task, memory);
  const QueryTile tile = problem.tile(task);
  problem.kernels.attend(problem.head(task), tile, problem.scale, 0, task.num_pairs,
                         memory + problem.partial_floats(task), total);
  problem.kernels.finish(tile, problem.head_dim, total);
}

// Few tasks over many KV pairs: the segments are shared out, and merged afterwards in the order of attend_whole.
void attend_split(const Problem& problem, const std::vector<Task>& tasks) {
  struct Piece {
    const Task* task;
    int begin;
    int64_t offset;
  };
  std::vector<Piece> pieces;
  int64_t floats = 0;
  for (const Task& task : tasks) {
    for (int begin = 0; begin < task.num_pairs; begin += kSegmentEntries) {
      pieces.push_back({&task, begin, floats});
      floats += problem.partial_floats(task);
    }
  }
  std::vector<float> partials(floats);
  for_each_dynamic(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const auto& [task, begin, offset] = pieces[i];
    problem.kernels.attend(problem.head(*task), problem.tile(*task), problem.scale, begin, begin + kSegmentEntries,
                           scratch(problem.workspace_floats()), problem.partial(*task, partials.data() + offset));
  });
  PartialSoftmax total{};
  for (const auto& [task, begin, offset] : pieces) {
    const QueryTile tile = problem.tile(*task);
    const PartialSoftmax part = problem.partial(*task, partials.data() + offset);
    if (begin == 0) {
      total = part;
    } else {
      problem.kernels.merge(tile.count, problem.head_dim, total, part);
    }
    if (begin + kSegmentEntries >= task->num_pairs) problem.kernels.finish(tile, problem.head_dim, total);
  }
}

}  // namespace

Tensor paged_attention(const Tensor& queries, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& query_start_loc, const Tensor& last_kv_index, const Tensor& block_tables,
                       const std::optional<Tensor>& packed_len, const std::optional<Tensor>& head_lengths,
                       double scale) {
  const Kernels& kernels = kernels_for(queries, "queries");
  check_heads(queries, "queries");
  check_contiguous(key_cache, "key_cache", 4);
  check_contiguous(value_cache, "value_cache", 4);
  check_dtype(key_cache, "key_cache", queries.scalar_type());
  check_dtype(value_cache, "value_cache", queries.scalar_type());
  for (int64_t dim = 0; dim < 4; ++dim) check_size(value_cache, "value_cache", dim, key_cache.size(dim));
  check_contiguous(query_start_loc, "query_start_loc", 1);
  check_contiguous(last_kv_index, "last_kv_index", 1);
  check_contiguous(block_tables, "block_tables", 2);
  check_dtype(query_start_loc, "query_start_loc", ScalarType::Int);
  check_dtype(last_kv_index, "last_kv_index", ScalarType::Int);
  check_dtype(block_tables, "block_tables", ScalarType::Int);
  const int64_t num_query_tokens = queries.size(0), query_heads = queries.size(1), head_dim = queries.size(2);
  const int64_t kv_heads = key_cache.size(1), sequences = block_tables.size(0);
  check_size(key_cache, "key_cache", 3, head_dim);
  check_size(last_kv_index, "last_kv_index", 0, num_query_tokens);
  check_size(query_start_loc, "query_start_loc", 0, sequences + 1);
  STD_TORCH_CHECK(packed_len.has_value() == head_lengths.has_value(), "packed and head_lengths go together");
  if (packed_len) {
    check_contiguous(*packed_len, "packed", 1);
    check_contiguous(*head_lengths, "head_lengths", 2);
    check_dtype(*packed_len, "packed", ScalarType::Int);
    check_dtype(*head_lengths, "head_lengths", ScalarType::Int);
    check_size(*packed_len, "packed", 0, sequences);
    check_size(*head_lengths, "head_lengths", 0, sequences);
    check_size(*head_lengths, "head_lengths", 1, kv_heads);
  }
  STD_TORCH_CHECK(head_dim > 0 && head_dim % 2 == 0, "head_dim is ", head_dim, ": it must be even");
  STD_TORCH_CHECK(kv_heads > 0 && query_heads % kv_heads == 0 && query_heads / kv_heads <= kMaxQueries, query_heads,
                  " query heads over ", kv_heads, " KV heads: a multiple of at most ", kMaxQueries, " is supported");

  Tensor out = empty_like(queries, {num_query_tokens, query_heads, head_dim});
  const Problem problem{
      .kernels = kernels,
      .num_query_tokens = num_query_tokens,
      .query_heads = query_heads,
      .kv_heads = kv_heads,
      .head_dim = static_cast<int>(head_dim),
      .blocks = key_cache.size(0),
      .block_size = key_cache.size(2),
      .sequences = sequences,
      .max_blocks = block_tables.size(1),
      .group = static_cast<int>(query_heads / kv_heads),
      .element_size = static_cast<int64_t>(queries.element_size()),
      .query_stride = queries.stride(0),
      .queries = static_cast<const char*>(queries.data_ptr()),
      .keys = static_cast<const char*>(key_cache.data_ptr()),
      .values = static_cast<const char*>(value_cache.data_ptr()),
      .outputs = static_cast<char*>(out.mutable_data_ptr()),
      .query_start_loc = query_start_loc.const_data_ptr<int32_t>(),
      .last_kv_index = last_kv_index.const_data_ptr<int32_t>(),
      .block_tables = block_tables.const_data_ptr<int32_t>(),
      .packed_len = packed_len ? packed_len->const_data_ptr<int32_t>() : nullptr,
      .head_lengths = head_lengths ? head_lengths->const_data_ptr<int32_t>() : nullptr,
      .scale = static_cast<float>(scale),
  };
  problem.check_batch();
  const std::vector<Task> tasks = problem.tasks();

  int64_t products = 0, partial_floats = 0;
  for (const Task& task : tasks) {
    products += static_cast<int64_t>(task.num_tokens) * problem.group * task.num_pairs * head_dim;
    partial_floats += problem.partial_floats(task) * task.num_segments();
  }
  constexpr int64_t kThreadingProducts = 100000;
  constexpr int64_t kMaxPartialFloats = 16 << 20;
  const int64_t threads = torch::stable::get_num_threads();
  if (threads == 1 || products < kThreadingProducts) {
    for (const Task& task : tasks) attend_whole(problem, task);
  } else if (static_cast<int64_t>(tasks.size()) < 4 * threads && partial_floats <= kMaxPartialFloats) {
    attend_split(problem, tasks);
  } else {
    for_each_dynamic(static_cast<int64_t>(tasks.size()), [&](int64_t i) { attend_whole(problem, tasks[i]); });
  }
  return out;
}

}  // namespace kvllm
