// The work of paged attention: it groups the queries that share keys, and deals the groups out to threads.
#include "attention.h"

#include "observed_scores.h"
#include "ops.h"
#include "store.h"

namespace kvllm {
namespace {

constexpr int64_t kMaxPartialFloats = 16 << 20;

void check_shape(const AttentionShape& shape) {
  STD_TORCH_CHECK(shape.head_dim > 0 && shape.head_dim % 2 == 0, "head_dim is ", shape.head_dim, ": it must be even");
  STD_TORCH_CHECK(shape.kv_heads > 0 && shape.query_heads % shape.kv_heads == 0 && shape.group() <= kMaxQueries,
                  shape.query_heads, " query heads over ", shape.kv_heads, " KV heads: a multiple of at most ",
                  kMaxQueries, " is supported");
}

// Where the tile begins that has the first KV pair that a query token attends.
int first_tile(const AttentionBatch& batch, int64_t token) {
  return std::max(0, batch.last_kv_index[token] + 1 - batch.sliding_window) / kTilePairs * kTilePairs;
}

void check_batch(const AttentionShape& shape, const AttentionBatch& batch) {
  const int32_t* start = batch.query_start_loc;
  STD_TORCH_CHECK(start[0] == 0 && start[batch.num_sequences] == batch.num_query_tokens, "query_start_loc runs from ",
                  start[0], " to ", start[batch.num_sequences], ", not from 0 to the number of query tokens, ",
                  batch.num_query_tokens);
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    STD_TORCH_CHECK(start[s] < start[s + 1], "sequence ", s, " has no query tokens");
    int32_t previous = 0;
    for (int32_t token = start[s]; token < start[s + 1]; ++token) {
      STD_TORCH_CHECK(batch.last_kv_index[token] >= previous, "last_kv_index ", batch.last_kv_index[token],
                      " of query token ", token, " is negative or descends");
      previous = batch.last_kv_index[token];
    }
    STD_TORCH_CHECK(batch.packed_len == nullptr ||
                        (batch.packed_len[s] >= 0 && batch.packed_len[s] <= batch.last_kv_index[start[s]]),
                    "sequence ", s, " has ", batch.packed_len[s], " packed KV pairs, and queries among them");
    STD_TORCH_CHECK(previous < batch.table_width * shape.block_size, "last_kv_index ", previous,
                    " is beyond a table of ", batch.table_width, " blocks of ", shape.block_size);
    for (int64_t b = first_tile(batch, start[s]) / shape.block_size; b <= previous / shape.block_size; ++b) {
      const int32_t block = batch.block_tables[s * batch.table_width + b];
      STD_TORCH_CHECK(block >= 0 && block < shape.num_blocks, "block ", block, " of sequence ", s,
                      " is not in the cache of ", shape.num_blocks, " blocks");
    }
  }
}

// Positions follow each other within a sequence, and what a query token attends as it was is in the cache, too.
void check_residual(const AttentionShape& shape, const AttentionBatch& batch) {
  const Residual& residual = batch.residual;
  STD_TORCH_CHECK(shape.format.values != VectorFormat::kPlain, "a residual goes with codes");
  STD_TORCH_CHECK(residual.size <= batch.sliding_window, "a residual of ", residual.size,
                  " KV pairs is longer than a sliding window of ", batch.sliding_window);
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int64_t begin = batch.query_start_loc[s];
    for (int64_t token = begin; token < batch.query_start_loc[s + 1]; ++token) {
      const int64_t position = residual.positions[token], index = position - residual.first[s];
      STD_TORCH_CHECK(position == residual.positions[begin] + token - begin && residual.first[s] >= 0 && index >= 0 &&
                          position < INT32_MAX,
                      "position ", position, " of query token ", token,
                      " does not follow the one before, or lies before ", residual.first[s]);
      const int64_t held = std::min<int64_t>(residual.size, index + 1);
      STD_TORCH_CHECK(held <= batch.last_kv_index[token] + 1, "query token ", token, " attends ", held,
                      " KV pairs as they were, and ", batch.last_kv_index[token] + 1, " in all");
    }
  }
}

void check_head_lengths(const AttentionPlan& plan, const int32_t* head_lengths) {
  for (int64_t s = 0; s < plan.batch.num_sequences; ++s) {
    for (int64_t head = 0; head < plan.shape.kv_heads; ++head) {
      STD_TORCH_CHECK(head_lengths[s * plan.shape.kv_heads + head] >= 0, "sequence ", s,
                      " has a head of negative length");
    }
  }
}

// KV pairs that one KV head of a sequence lacks: `count` of them, from pair `begin` on.
struct Evicted {
  int begin;
  int count;
};

Evicted evicted(const AttentionPlan& plan, const int32_t* head_lengths, int64_t sequence, int64_t head) {
  if (plan.batch.packed_len == nullptr) return {0, 0};
  const int packed_len = plan.batch.packed_len[sequence];
  const int begin = std::min(packed_len, head_lengths[sequence * plan.shape.kv_heads + head]);
  return {begin, packed_len - begin};
}

int64_t partial_floats(const AttentionShape& shape, const AttentionTask& task) {
  return static_cast<int64_t>(task.num_tokens) * shape.group() * (shape.head_dim + 2);
}

// The longest first, so that threads which take the next task when they are free finish together.
void make_tasks(AttentionPlan& plan, const int32_t* head_lengths) {
  const AttentionBatch& batch = plan.batch;
  const int tokens_per_task = kMaxQueries / plan.shape.group();
  plan.tasks.clear();
  for (int s = 0; s < batch.num_sequences; ++s) {
    for (int token = batch.query_start_loc[s]; token < batch.query_start_loc[s + 1]; token += tokens_per_task) {
      const int count = std::min(tokens_per_task, batch.query_start_loc[s + 1] - token);
      const int last = batch.last_kv_index[token + count - 1] + 1 - plan.residual.held(s, token + count - 1);
      for (int head = 0; head < plan.shape.kv_heads; ++head)
        plan.tasks.push_back(
            {s, head, token, count, last - evicted(plan, head_lengths, s, head).count, first_tile(batch, token)});
    }
  }
  const auto cost = [](const AttentionTask& task) {
    return static_cast<int64_t>(task.num_tokens) * (task.num_pairs - task.begin);
  };
  std::sort(plan.tasks.begin(), plan.tasks.end(),
            [&](const AttentionTask& a, const AttentionTask& b) { return cost(a) > cost(b); });
}

int first_segment(const AttentionTask& task) { return task.begin / kSegmentPairs * kSegmentPairs; }

// Few tasks over many KV pairs are cut into segments, so that all threads have work.
void make_pieces(AttentionPlan& plan) {
  plan.pieces.clear();
  int64_t floats = 0;
  for (size_t i = 0; i < plan.tasks.size(); ++i) {
    for (int begin = first_segment(plan.tasks[i]); begin < plan.tasks[i].num_pairs; begin += kSegmentPairs) {
      plan.pieces.push_back({static_cast<int>(i), begin, floats});
      floats += partial_floats(plan.shape, plan.tasks[i]);
    }
    if (plan.batch.residual.size == 0) continue;
    plan.pieces.push_back({static_cast<int>(i), kResidualPiece, floats});
    floats += partial_floats(plan.shape, plan.tasks[i]);
  }
  plan.partials.resize(floats);
}

void plan_work(AttentionPlan& plan, const int32_t* head_lengths) {
  make_tasks(plan, head_lengths);
  int64_t products = 0, floats = 0;
  for (const AttentionTask& task : plan.tasks) {
    const int64_t segments = (task.num_pairs - first_segment(task) + kSegmentPairs - 1) / kSegmentPairs;
    const int64_t queries = static_cast<int64_t>(task.num_tokens) * plan.shape.group();
    const int residual = plan.batch.residual.size;
    products += queries * (task.num_pairs - task.begin + residual) * plan.shape.head_dim;
    floats += partial_floats(plan.shape, task) * (segments + (residual != 0));
  }
  const int64_t threads = num_threads();
  plan.threaded = threads > 1 && products >= kThreadingProducts;
  plan.pieces.clear();
  if (plan.threaded && static_cast<int64_t>(plan.tasks.size()) < 4 * threads && floats <= kMaxPartialFloats) {
    make_pieces(plan);
  }
}

// A plan on one layer.
struct Run {
  const AttentionPlan& plan;
  const AttentionLayer& layer;
  const Kernels& kernels;
  const KVKernels& kv_kernels;

  // KV pairs begin .. end - 1 of a task, as far as it has them.
  PairRange pairs(const AttentionTask& task, int begin, int end) const {
    const AttentionShape& shape = plan.shape;
    const VectorFormat keys = shape.format.keys, values = shape.format.values;
    const int64_t key_elements = shape.head_elements(keys), value_elements = shape.head_elements(values);
    const Evicted gap = evicted(plan, layer.head_lengths, task.sequence, task.kv_head);
    const PagedHead head{
        static_cast<const char*>(layer.keys) + task.kv_head * key_elements * shape.element_bytes(keys),
        static_cast<const char*>(layer.values) + task.kv_head * value_elements * shape.element_bytes(values),
        shape.kv_heads * key_elements,
        shape.kv_heads * value_elements,
        plan.batch.block_tables + task.sequence * plan.batch.table_width,
        static_cast<int>(shape.block_size),
        shape.head_dim,
        gap.begin,
        gap.count};
    return {head, std::max(begin, task.begin), std::min(end, task.num_pairs)};
  }

  // The KV pairs that a task attends as they were.
  PairRange residual_pairs(const AttentionTask& task) const {
    const AttentionShape& shape = plan.shape;
    const ResidualPlan& residual = plan.residual;
    const int64_t offset = static_cast<int64_t>(task.kv_head) * shape.head_dim,
                  stride = shape.kv_heads * shape.head_dim;
    const int base = residual[task.sequence].base;
    const PagedHead head{residual.keys(layer.residual, task.sequence) + offset * shape.element_size,
                         residual.values(layer.residual, task.sequence) + offset * shape.element_size,
                         stride,
                         stride,
                         residual.table(task.sequence),
                         1,
                         shape.head_dim,
                         0,
                         0};
    const int first = residual.index(task.sequence, task.first_token);
    const int begin = std::max(0, first + 1 - plan.batch.residual.size) - base;
    return {head, begin / kTilePairs * kTilePairs, first + task.num_tokens - base};
  }

  // kept_scores: memory for scores, where the task's are wanted.
  QueryTile tile(const AttentionTask& task, float* kept_scores) const {
    const AttentionShape& shape = plan.shape;
    const int num_evicted = evicted(plan, layer.head_lengths, task.sequence, task.kv_head).count;
    QueryTile tile;
    tile.count = 0;
    tile.group = shape.group();
    tile.soft_cap = layer.soft_cap;
    tile.sinks = layer.sinks == nullptr ? nullptr : layer.sinks + task.kv_head * shape.group();
    keep_scores(plan, task, kept_scores, tile);
    for (int64_t token = task.first_token; token < task.first_token + task.num_tokens; ++token) {
      for (int head = task.kv_head * shape.group(); head < (task.kv_head + 1) * shape.group(); ++head) {
        const int64_t query = token * layer.query_stride + head * shape.head_dim;
        const int64_t output = (token * shape.query_heads + head) * shape.head_dim;
        tile.queries[tile.count] = static_cast<const char*>(layer.queries) + query * shape.element_size;
        tile.outputs[tile.count] = static_cast<char*>(layer.outputs) + output * shape.element_size;
        const int own = plan.batch.last_kv_index[token] - num_evicted;
        tile.first[tile.count] = own + 1 - plan.batch.sliding_window;
        tile.last[tile.count] = own - plan.residual.held(task.sequence, token);
        ++tile.count;
      }
    }
    return tile;
  }

  // The same queries against the KV pairs that they attend as they were. cached: the tile of those in the cache.
  QueryTile residual_tile(const AttentionTask& task, const QueryTile& cached) const {
    const ResidualPlan& residual = plan.residual;
    const int base = residual[task.sequence].base, group = plan.shape.group();
    QueryTile tile = cached;
    for (int i = 0; i < tile.count; ++i) {
      tile.last[i] = residual.index(task.sequence, task.first_token + i / group) - base;
      tile.first[i] = tile.last[i] + 1 - plan.batch.residual.size;
    }
    if (tile.kept_scores != nullptr) {  // those of the pairs that are attended here, which are the last ones
      const int before = std::max(0, cached.last[0] + 1 - cached.kept_begin);
      const int shift = plan.batch.last_kv_index[task.first_token] - tile.last[0];
      tile.kept_begin = cached.kept_begin + before - shift;
      tile.kept_scores += before;
    }
    return tile;
  }

  int64_t workspace_floats() const { return static_cast<int64_t>(kWorkspaceRows) * (plan.shape.head_dim + 2); }

  PartialSoftmax partial(const AttentionTask& task, const float* memory) const {
    float* start = const_cast<float*>(memory);
    const int count = task.num_tokens * plan.shape.group();
    return {start, start + count, start + 2 * count};
  }

  PairRange pairs_of_task(int64_t i) const { return pairs(plan.tasks[i], 0, plan.tasks[i].num_pairs); }

  PairRange pairs_of_piece(int64_t i) const {
    const AttentionPiece& piece = plan.pieces[i];
    return pairs(plan.tasks[piece.task], piece.begin, piece.begin + kSegmentPairs);
  }

  // What a task attends as it was. `cached`: its tile of what is in the cache.
  void attend_residual(const AttentionTask& task, const QueryTile& cached, float* workspace,
                       const PartialSoftmax& result) const {
    const KVKernels& plain = kernels.kv[static_cast<int>(VectorFormat::kPlain)][static_cast<int>(VectorFormat::kPlain)];
    plain.attend(residual_pairs(task), nullptr, residual_tile(task, cached), layer.scale, workspace, result);
    if (kv_kernels.reorder != nullptr) {
      kv_kernels.reorder(cached.count, plan.shape.head_dim, result.weighted_values);
    }
  }

  // `stride`: tasks until the one that this thread will probably take next.
  void attend_task(int64_t i, int64_t stride) const {
    const AttentionTask& task = plan.tasks[i];
    const bool has_residual = plan.batch.residual.size != 0, in_cache = task.num_pairs > task.begin;
    const int64_t floats = partial_floats(plan.shape, task);
    float* memory = scratch((1 + has_residual) * floats + workspace_floats() + kept_floats(plan));
    float* workspace = memory + (1 + has_residual) * floats;
    const PartialSoftmax total = partial(task, memory);
    const QueryTile queries = tile(task, workspace + workspace_floats());
    const bool more = i + stride < static_cast<int64_t>(plan.tasks.size());
    const PairRange following = pairs_of_task(more ? i + stride : i);
    if (in_cache) {
      kv_kernels.attend(pairs_of_task(i), more ? &following : nullptr, queries, layer.scale, workspace, total);
    }
    if (has_residual) {
      const PartialSoftmax part = in_cache ? partial(task, memory + floats) : total;
      attend_residual(task, queries, workspace, part);
      if (in_cache) kernels.merge(queries.count, plan.shape.head_dim, total, part);
    }
    kv_kernels.finish(queries, plan.shape.head_dim, total);
    add_scores(plan, task, layer, kernels, queries);
  }

  // A task's place among kept scores, while its pieces are computed one by one.
  float* kept_scores(int task) const { return const_cast<float*>(plan.kept_scores.data()) + task * kept_floats(plan); }

  void attend_piece(int64_t i, int64_t stride) const {
    const AttentionPiece& piece = plan.pieces[i];
    const AttentionTask& task = plan.tasks[piece.task];
    const QueryTile queries = tile(task, kept_scores(piece.task));
    const PartialSoftmax result = partial(task, plan.partials.data() + piece.offset);
    float* workspace = scratch(workspace_floats());
    if (piece.begin == kResidualPiece) {
      attend_residual(task, queries, workspace, result);
      return;
    }
    const int64_t next = i + stride < static_cast<int64_t>(plan.pieces.size()) ? i + stride : i;
    const bool more = next != i && plan.pieces[next].begin != kResidualPiece;
    const PairRange following = pairs_of_piece(more ? next : i);
    kv_kernels.attend(pairs_of_piece(i), more ? &following : nullptr, queries, layer.scale, workspace, result);
  }

  // In the order in which attend_task adds segments.
  void merge_pieces() const {
    const std::vector<AttentionPiece>& pieces = plan.pieces;
    PartialSoftmax total{};
    for (size_t i = 0; i < pieces.size(); ++i) {
      const AttentionTask& task = plan.tasks[pieces[i].task];
      const QueryTile queries = tile(task, kept_scores(pieces[i].task));
      const PartialSoftmax part = partial(task, plan.partials.data() + pieces[i].offset);
      if (i == 0 || pieces[i - 1].task != pieces[i].task) {
        total = part;
      } else {
        kernels.merge(queries.count, plan.shape.head_dim, total, part);
      }
      if (i + 1 < pieces.size() && pieces[i + 1].task == pieces[i].task) continue;
      kv_kernels.finish(queries, plan.shape.head_dim, total);
      add_scores(plan, task, layer, kernels, queries);
    }
  }
};

}  // namespace

AttentionPlan::AttentionPlan(const AttentionShape& shape, const AttentionBatch& batch) : shape(shape), batch(batch) {
  STD_TORCH_CHECK(batch.sliding_window == kNoWindow || (batch.packed_len == nullptr && batch.scored_from == nullptr),
                  "a layer with a sliding window holds all KV pairs, and scores none");
  check_shape(shape);
  check_batch(shape, batch);
  if (batch.residual.size != 0) {
    check_residual(shape, batch);
    const int64_t vector_bytes = static_cast<int64_t>(shape.kv_heads) * shape.head_dim * shape.element_size;
    residual = ResidualPlan(batch.residual, batch.query_start_loc, batch.num_sequences, vector_bytes);
  }
  if (batch.packed_len == nullptr) plan_work(*this, nullptr);
}

void run_attention(AttentionPlan& plan, const AttentionLayer& layer) {
  if (plan.batch.packed_len != nullptr) {
    check_head_lengths(plan, layer.head_lengths);
    plan_work(plan, layer.head_lengths);
  }
  const KernelSet& set = kernel_set();
  const Kernels& kernels = plan.shape.element_size == sizeof(float) ? set.float32 : set.bfloat16;
  const KVFormat format = plan.shape.format;
  const Run run{plan, layer, kernels, kernels.kv[static_cast<int>(format.keys)][static_cast<int>(format.values)]};
  const int64_t tasks = static_cast<int64_t>(plan.tasks.size()), pieces = static_cast<int64_t>(plan.pieces.size());
  if (pieces != 0) plan.kept_scores.resize(tasks * kept_floats(plan));
  const int64_t threads = num_threads();
  plan.residual.begin_layer(layer.residual);
  if (!plan.threaded) {
    for (int64_t i = 0; i < tasks; ++i) run.attend_task(i, 1);
  } else if (pieces == 0) {
    for_each_dynamic(tasks, [&](int64_t i) { run.attend_task(i, threads); });
  } else {
    for_each_dynamic(pieces, [&](int64_t i) { run.attend_piece(i, threads); });
    run.merge_pieces();
  }
  plan.residual.end_layer(layer.residual);
}

void check_attention_tables(const Tensor& query_start_loc, const Tensor& last_kv_index, const Tensor& block_tables,
                            const std::optional<Tensor>& packed_len, int64_t num_query_tokens) {
  check_contiguous(query_start_loc, "query_start_loc", 1);
  check_contiguous(last_kv_index, "last_kv_index", 1);
  check_contiguous(block_tables, "block_tables", 2);
  check_dtype(query_start_loc, "query_start_loc", ScalarType::Int);
  check_dtype(last_kv_index, "last_kv_index", ScalarType::Int);
  check_dtype(block_tables, "block_tables", ScalarType::Int);
  check_size(last_kv_index, "last_kv_index", 0, num_query_tokens);
  check_size(query_start_loc, "query_start_loc", 0, block_tables.size(0) + 1);
  if (packed_len) {
    check_contiguous(*packed_len, "packed_len", 1);
    check_dtype(*packed_len, "packed_len", ScalarType::Int);
    check_size(*packed_len, "packed_len", 0, block_tables.size(0));
  }
}

AttentionBatch attention_batch(const Tensor& query_start_loc, const Tensor& last_kv_index, const Tensor& block_tables,
                               const std::optional<Tensor>& packed_len, int64_t num_query_tokens) {
  return {num_query_tokens,
          block_tables.size(0),
          block_tables.size(1),
          query_start_loc.const_data_ptr<int32_t>(),
          last_kv_index.const_data_ptr<int32_t>(),
          block_tables.const_data_ptr<int32_t>(),
          packed_len ? packed_len->const_data_ptr<int32_t>() : nullptr,
          {}};
}

int sliding_window(int64_t window) {
  STD_TORCH_CHECK(window >= 0, "the window of a layer is ", window, ": it must be positive, or 0 for none");
  return window == 0 ? kNoWindow : static_cast<int>(std::min<int64_t>(window, kNoWindow));
}

Tensor paged_attention(const Tensor& queries, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& query_start_loc, const Tensor& last_kv_index, const Tensor& block_tables,
                       const std::optional<Tensor>& packed_len, const std::optional<Tensor>& head_lengths,
                       const std::optional<Tensor>& scores, const std::optional<Tensor>& scored_from, double scale,
                       int64_t window, double soft_cap, const std::optional<Tensor>& sinks,
                       const std::optional<Tensor>& kv_residual, const std::optional<Tensor>& residual_slots,
                       const std::optional<Tensor>& residual_first, const std::optional<Tensor>& positions,
                       const std::optional<Tensor>& new_keys, const std::optional<Tensor>& new_values) {
  kernels_for(queries, "queries");
  check_heads(queries, "queries");
  check_contiguous(key_cache, "key_cache", 4);
  check_contiguous(value_cache, "value_cache", 4);
  const int64_t num_query_tokens = queries.size(0), query_heads = queries.size(1), head_dim = queries.size(2);
  const int64_t kv_heads = key_cache.size(1), sequences = block_tables.size(0);
  const KVFormat format = check_kv_format(key_cache, value_cache, head_dim, queries.scalar_type());
  check_attention_tables(query_start_loc, last_kv_index, block_tables, packed_len, num_query_tokens);
  STD_TORCH_CHECK(packed_len.has_value() == head_lengths.has_value(), "packed_len and head_lengths go together");
  if (packed_len) {
    check_contiguous(*head_lengths, "head_lengths", 2);
    check_dtype(*head_lengths, "head_lengths", ScalarType::Int);
    check_size(*head_lengths, "head_lengths", 0, sequences);
    check_size(*head_lengths, "head_lengths", 1, kv_heads);
  }

  Tensor out = empty_like(queries, {num_query_tokens, query_heads, head_dim});
  const AttentionShape shape{format,
                             static_cast<int>(queries.element_size()),
                             static_cast<int>(query_heads),
                             static_cast<int>(kv_heads),
                             static_cast<int>(head_dim),
                             key_cache.size(0),
                             key_cache.size(2)};
  AttentionBatch batch = attention_batch(query_start_loc, last_kv_index, block_tables, packed_len, num_query_tokens);
  batch.scored_from = check_observed(scores, scored_from, shape, batch);
  batch.sliding_window = sliding_window(window);
  check_sinks(sinks, query_heads);
  ResidualLayer residual{};
  if (kv_residual) {
    STD_TORCH_CHECK(residual_slots && residual_first && positions && new_keys && new_values,
                    "kv_residual needs residual_slots, residual_first, positions, new_keys and new_values");
    batch.residual = residual_tables(*kv_residual, *positions, *residual_slots, *residual_first, num_query_tokens,
                                     sequences, kv_heads, head_dim, queries.scalar_type());
    residual = residual_layer(*kv_residual, *new_keys, *new_values, num_query_tokens);
  }
  AttentionPlan plan(shape, batch);
  run_attention(
      plan, {queries.data_ptr(), queries.stride(0), key_cache.data_ptr(), value_cache.data_ptr(),
             head_lengths ? head_lengths->const_data_ptr<int32_t>() : nullptr,
             scores ? scores->mutable_data_ptr<float>() : nullptr, out.mutable_data_ptr(), static_cast<float>(scale),
             static_cast<float>(soft_cap), sinks ? sinks->const_data_ptr<float>() : nullptr, residual});
  return out;
}

}  // namespace kvllm
