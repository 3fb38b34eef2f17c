// All layers of a decoder as one operator: the loop of kvllm/models/base.py over the same kernels, in memory that is
// kept from step to step.
#include <cstring>
#include <deque>
#include <memory>

#include "attention.h"
#include "linear.h"
#include "score_windows.h"
#include "store.h"

namespace kvllm {
namespace {

const void* data_or_null(const std::optional<Tensor>& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

struct Layer {
  std::vector<Tensor> owned;
  const void* input_norm;
  PackedMatrix qkv;
  const void* qkv_bias;
  const void* query_norm;
  const void* key_norm;
  PackedMatrix output;
  const void* post_attention_norm;
  PackedMatrix gate_up;
  PackedMatrix down;
};

// Memory of one stage, which grows with the largest step.
class Buffer {
 public:
  char* get(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(new (std::align_val_t{64}) char[bytes]);
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

struct Decoder {
  uint64_t magic;
  ScalarType dtype;
  int query_heads, kv_heads, head_dim;
  int64_t hidden_size, inner_size;
  float eps;
  Tensor cos_sin, final_norm;
  std::vector<Layer> layers{};
  Buffer normalized{}, operands{}, qkv{}, attended{}, projected{}, gate_up{}, activated{};

  int64_t qkv_size() const { return static_cast<int64_t>(query_heads + 2 * kv_heads) * head_dim; }
  int64_t query_size() const { return static_cast<int64_t>(query_heads) * head_dim; }
};

constexpr uint64_t kMagic = 0x4b764c4c4d646563;

Decoder& decoder_in(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == static_cast<int64_t>(sizeof(Decoder)),
                  "decoder is not what make_decoder returned");
  auto& decoder = *static_cast<Decoder*>(tensor.mutable_data_ptr());
  STD_TORCH_CHECK(decoder.magic == kMagic, "decoder is not what make_decoder returned");
  return decoder;
}

// A plan for each window that layers have.
class LayerPlans {
 public:
  // windows: of each layer, 0 for none; null: none has one.
  LayerPlans(const AttentionShape& shape, const AttentionBatch& batch, const int64_t* windows, int64_t layers) {
    for (int64_t layer = 0; layer < layers; ++layer) {
      const int window = sliding_window(windows == nullptr ? 0 : windows[layer]);
      const auto same = [&](const AttentionPlan& plan) { return plan.batch.sliding_window == window; };
      auto found = std::find_if(plans_.begin(), plans_.end(), same);
      of_layer_.push_back(found != plans_.end() ? &*found : &add(shape, batch, window));
    }
  }

  AttentionPlan& operator[](int64_t layer) { return *of_layer_[layer]; }

 private:
  AttentionPlan& add(const AttentionShape& shape, AttentionBatch batch, int window) {
    if (window != kNoWindow) {
      batch.packed_len = nullptr;
      batch.windows.start = nullptr;
    }
    batch.sliding_window = window;
    return plans_.emplace_back(shape, batch);
  }

  std::deque<AttentionPlan> plans_;
  std::vector<AttentionPlan*> of_layer_;
};

// The keys, or the values, of all layers.
struct LayerCaches {
  char* first;
  int64_t bytes;  // from a layer to the next

  explicit LayerCaches(const Tensor& cache)
      : first(static_cast<char*>(cache.mutable_data_ptr())), bytes(cache.stride(0) * cache.element_size()) {}

  char* operator[](size_t layer) const { return first + static_cast<int64_t>(layer) * bytes; }
};

// The rows of all layers in which KV pairs are held as they were, `[layers, 2, slots, size, kv_heads, head_dim]`.
struct KVResidual {
  char* first = nullptr;  // null: there are none
  int64_t bytes = 0;      // of the keys of a layer, as of the values

  explicit KVResidual(const std::optional<Tensor>& rows) {
    if (!rows) return;
    first = static_cast<char*>(rows->mutable_data_ptr());
    bytes = rows->stride(1) * rows->element_size();
  }

  // New keys and values lie a stride of bytes apart.
  ResidualLayer of_layer(size_t layer, const char* new_keys, const char* new_values, int64_t stride) const {
    if (first == nullptr) return {};
    char* keys = first + 2 * static_cast<int64_t>(layer) * bytes;
    return {keys, keys + bytes, new_keys, new_values, stride, stride};
  }
};

// Where a pass stores keys and values.
struct Places {
  StoreShape shape;
  const int64_t* slots;
  KVResidual residual;
};

// Query tokens, ascending: those whose hidden states are wanted. None: those of all are.
struct Wanted {
  const int64_t* rows;
  int64_t count;
};

// One pass over the layers.
class Pass {
 public:
  Pass(Decoder& decoder, int64_t rows, const int64_t* positions, float scale)
      : d_(decoder),
        kernels_(decoder.dtype == ScalarType::Float ? kernel_set().float32 : kernel_set().bfloat16),
        bytes_(decoder.dtype == ScalarType::Float ? 4 : 2),
        rows_(rows),
        positions_(positions),
        scale_(scale) {}

  // residual `[rows, hidden_size]` is overwritten; hidden gets the normalized result of the wanted rows. Behind the
  // last attention, these alone are computed.
  void run(char* residual, char* hidden, const Wanted& wanted, LayerPlans& plans, const Places& places,
           LayerCaches keys, LayerCaches values, const int32_t* head_lengths, float* scores) {
    char* x = normalize(residual);
    const int64_t lengths = plans[0].batch.num_sequences * d_.kv_heads;
    const int64_t scores_of_layer = places.shape.num_blocks * d_.kv_heads * places.shape.block_size;
    for (size_t i = 0; i < d_.layers.size(); ++i) {
      const Layer& layer = d_.layers[i];
      const bool last = i + 1 == d_.layers.size();
      AttentionPlan& plan = plans[static_cast<int64_t>(i)];
      const bool full = plan.batch.sliding_window == kNoWindow;
      const char* queries = project(layer, x, places, keys[i], values[i]);
      const char *new_keys = keys_behind(queries), *new_values = values_behind(queries);
      char* attended =
          attend(plan, queries, d_.qkv_size(), keys[i], values[i],
                 head_lengths == nullptr || !full ? nullptr : head_lengths + static_cast<int64_t>(i) * lengths,
                 scores == nullptr || !full ? nullptr : scores + static_cast<int64_t>(i) * scores_of_layer,
                 places.residual.of_layer(i, new_keys, new_values, d_.qkv_size() * bytes_));
      if (last && wanted.rows != nullptr) {
        keep_rows(wanted, attended, d_.query_size());
        keep_rows(wanted, residual, d_.hidden_size);
        rows_ = wanted.count;
      }
      const PackedMatrix* next = last ? nullptr : &d_.layers[i + 1].qkv;
      finish(layer, attended, residual, last ? d_.final_norm.data_ptr() : d_.layers[i + 1].input_norm, next,
             last ? hidden : x);
    }
  }

  // The queries of the first layer, to out `[rows, query_size]`.
  void first_queries(const char* residual, char* out) { project_queries(d_.layers[0], normalize(residual), out); }

  // Those of a later layer, from the queries of the layer before it, which is finished. residual is updated.
  void next_queries(size_t index, char* residual, const char* queries, AttentionPlan& plan, LayerCaches keys,
                    LayerCaches values, const int32_t* head_lengths, char* out) {
    const Layer& layer = d_.layers[index];
    const char* attended =
        attend(plan, queries, d_.query_size(), keys[index - 1], values[index - 1], head_lengths, nullptr, {});
    char* x = d_.normalized.get(rows_ * d_.hidden_size * bytes_);
    finish(d_.layers[index - 1], attended, residual, layer.input_norm, &layer.qkv, x);
    project_queries(layer, x, out);
  }

 private:
  template <class P>
  P* at(P* data, int64_t row, int64_t width) const {
    return data + row * width * bytes_;
  }

  template <class Body>
  void each_row(int64_t width, const Body& body) const {
    for_rows(rows_, width, body);
  }

  const char* product(const char* x, const PackedMatrix& weight, const void* bias, Buffer& buffer,
                      const PackedMatrix* next) {
    char* out = buffer.get(rows_ * weight.columns * bytes_);
    multiply(kernels_, x, rows_, weight, bias, out, d_.operands.get(operand_bytes(kernels_, weight, rows_)), next);
    return out;
  }

  void keep_rows(const Wanted& wanted, char* matrix, int64_t width) const {
    for (int64_t i = 0; i < wanted.count; ++i) {
      std::memmove(at(matrix, i, width), at(matrix, wanted.rows[i], width), width * bytes_);
    }
  }

  // The input of the first layer.
  char* normalize(const char* residual) {
    char* x = d_.normalized.get(rows_ * d_.hidden_size * bytes_);
    each_row(d_.hidden_size, [&](int64_t begin, int64_t end) {
      kernels_.rms_norm(at(residual, begin, d_.hidden_size), d_.layers[0].input_norm, at(x, begin, d_.hidden_size),
                        end - begin, d_.hidden_size, d_.eps);
    });
    return x;
  }

  // Normalizes and rotates the heads of queries, and of `kv_heads` keys behind them, in rows of `width`.
  void rotate(const Layer& layer, char* heads, int64_t width, int kv_heads) {
    const Rotary rotary{heads,          width,    positions_,  d_.cos_sin.const_data_ptr<float>(),
                        d_.query_heads, kv_heads, d_.head_dim, layer.query_norm,
                        layer.key_norm, d_.eps};
    each_row(width, [&](int64_t begin, int64_t end) { kernels_.rotary(rotary, begin, end); });
  }

  // Stores keys and values, and returns the queries, in rows of qkv_size.
  const char* project(const Layer& layer, const char* x, const Places& places, char* keys, char* values) {
    const int64_t width = d_.qkv_size();
    product(x, layer.qkv, layer.qkv_bias, d_.qkv, &layer.output);
    char* qkv = d_.qkv.get(0);
    rotate(layer, qkv, width, d_.kv_heads);
    store_layer(places.shape, places.slots, rows_, {keys_behind(qkv), values_behind(qkv), width, width, keys, values});
    return qkv;
  }

  const char* keys_behind(const char* queries) const { return queries + d_.query_size() * bytes_; }
  const char* values_behind(const char* queries) const {
    return keys_behind(queries) + static_cast<int64_t>(d_.kv_heads) * d_.head_dim * bytes_;
  }

  void project_queries(const Layer& layer, const char* x, char* out) {
    const PackedMatrix weight = layer.qkv.first_columns(d_.query_size());
    multiply(kernels_, x, rows_, weight, layer.qkv_bias, out, d_.operands.get(operand_bytes(kernels_, weight, rows_)),
             &layer.output);
    rotate(layer, out, d_.query_size(), 0);
  }

  char* attend(AttentionPlan& plan, const char* queries, int64_t width, const char* keys, const char* values,
               const int32_t* head_lengths, float* scores, const ResidualLayer& residual) {
    char* attended = d_.attended.get(rows_ * d_.query_size() * bytes_);
    run_attention(plan, {queries, width, keys, values, head_lengths, scores, attended, scale_, 0, nullptr, residual});
    return attended;
  }

  // What follows attention in a layer. out gets the normalized input of what follows the layer.
  void finish(const Layer& layer, const char* attended, char* residual, const void* next_norm,
              const PackedMatrix* next_weight, char* out) {
    char* x = d_.normalized.get(rows_ * d_.hidden_size * bytes_);
    add_norm(residual, product(attended, layer.output, nullptr, d_.projected, &layer.gate_up),
             layer.post_attention_norm, x);
    const char* gate_up = product(x, layer.gate_up, nullptr, d_.gate_up, &layer.down);
    char* activated = d_.activated.get(rows_ * d_.inner_size * bytes_);
    each_row(2 * d_.inner_size, [&](int64_t begin, int64_t end) {
      kernels_.silu_mul(at(gate_up, begin, 2 * d_.inner_size), at(activated, begin, d_.inner_size), end - begin,
                        d_.inner_size);
    });
    add_norm(residual, product(activated, layer.down, nullptr, d_.projected, next_weight), next_norm, out);
  }

  void add_norm(char* residual, const char* addend, const void* norm, char* out) {
    each_row(d_.hidden_size, [&](int64_t begin, int64_t end) {
      kernels_.add_rms_norm(at(residual, begin, d_.hidden_size), at(addend, begin, d_.hidden_size), norm,
                            at(out, begin, d_.hidden_size), end - begin, d_.hidden_size, d_.eps);
    });
  }

  Decoder& d_;
  const Kernels& kernels_;
  const int64_t bytes_;
  int64_t rows_;
  const int64_t* positions_;
  const float scale_;
};

// `[layers, blocks, kv_heads, block_size, width]`, in which only the layers may be apart.
void check_layers(const Tensor& cache, const char* name) {
  STD_TORCH_CHECK(cache.dim() == 5, name, " has ", cache.dim(), " dimensions, not 5");
  int64_t dense = 1;
  for (int64_t dim = 4; dim > 0; dense *= cache.size(dim--)) {
    STD_TORCH_CHECK(cache.size(dim) == 1 || cache.stride(dim) == dense, "a layer of ", name, " is not contiguous");
  }
}

void check_indices(const Tensor& indices, const char* name, int64_t rows) {
  check_contiguous(indices, name, 1);
  check_dtype(indices, name, ScalarType::Long);
  check_size(indices, name, 0, rows);
}

Wanted check_wanted(const std::optional<Tensor>& wanted, int64_t rows) {
  if (!wanted) return {nullptr, rows};
  check_contiguous(*wanted, "wanted", 1);
  check_dtype(*wanted, "wanted", ScalarType::Long);
  const int64_t* row = wanted->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < wanted->size(0); ++i) {
    STD_TORCH_CHECK(row[i] > (i == 0 ? -1 : row[i - 1]) && row[i] < rows, "wanted has ", row[i],
                    ": its numbers ascend, and are below the number of rows, ", rows);
  }
  return {row, wanted->size(0)};
}

// What every pass over the layers takes. Returns the shape of its attention.
AttentionShape check_pass(const Decoder& decoder, const Tensor& residual, const Tensor& positions,
                          const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
                          const std::optional<Tensor>& packed_len, const std::optional<Tensor>& head_lengths,
                          const std::optional<Tensor>& sliding_windows) {
  const int64_t rows = residual.size(0), layers = static_cast<int64_t>(decoder.layers.size());
  check_contiguous(residual, "residual", 2);
  check_dtype(residual, "residual", decoder.dtype);
  check_size(residual, "residual", 1, decoder.hidden_size);
  check_layers(key_cache, "key_cache");
  check_layers(value_cache, "value_cache");
  const KVFormat format = check_kv_format(key_cache, value_cache, decoder.head_dim, decoder.dtype);
  check_size(key_cache, "key_cache", 0, layers);
  check_size(key_cache, "key_cache", 2, decoder.kv_heads);
  check_indices(positions, "positions", rows);
  check_positions(positions.const_data_ptr<int64_t>(), rows, decoder.cos_sin.size(0));
  STD_TORCH_CHECK(packed_len.has_value() == head_lengths.has_value(), "packed_len and head_lengths go together");
  if (head_lengths) {
    check_contiguous(*head_lengths, "head_lengths", 3);
    check_dtype(*head_lengths, "head_lengths", ScalarType::Int);
    check_size(*head_lengths, "head_lengths", 0, layers);
    check_size(*head_lengths, "head_lengths", 1, block_tables.size(0));
    check_size(*head_lengths, "head_lengths", 2, decoder.kv_heads);
  }
  if (sliding_windows) {
    check_contiguous(*sliding_windows, "sliding_windows", 1);
    check_dtype(*sliding_windows, "sliding_windows", ScalarType::Long);
    check_size(*sliding_windows, "sliding_windows", 0, layers);
  }
  return {format,
          static_cast<int>(residual.element_size()),
          decoder.query_heads,
          decoder.kv_heads,
          decoder.head_dim,
          key_cache.size(1),
          key_cache.size(3)};
}

}  // namespace

Tensor make_decoder(const Tensor& cos_sin, const Tensor& final_norm, int64_t query_heads, int64_t kv_heads,
                    int64_t head_dim, double eps) {
  kernels_for(final_norm, "final_norm");
  check_contiguous(final_norm, "final_norm", 1);
  check_contiguous(cos_sin, "cos_sin", 2);
  check_dtype(cos_sin, "cos_sin", ScalarType::Float);
  check_size(cos_sin, "cos_sin", 1, head_dim);
  auto* decoder = new Decoder{
      .magic = kMagic,
      .dtype = final_norm.scalar_type(),
      .query_heads = static_cast<int>(query_heads),
      .kv_heads = static_cast<int>(kv_heads),
      .head_dim = static_cast<int>(head_dim),
      .hidden_size = final_norm.size(0),
      .inner_size = 0,
      .eps = static_cast<float>(eps),
      .cos_sin = cos_sin,
      .final_norm = final_norm,
  };
  const auto free = [](void* memory) { delete static_cast<Decoder*>(memory); };
  return torch::stable::from_blob(decoder, {static_cast<int64_t>(sizeof(Decoder))}, {1}, cos_sin.device(),
                                  ScalarType::Byte, free);
}

void add_decoder_layer(const Tensor& tensor, const Tensor& input_norm, const Tensor& qkv,
                       const std::optional<Tensor>& qkv_scales, const std::optional<Tensor>& qkv_bias,
                       const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
                       const Tensor& output, const std::optional<Tensor>& output_scales,
                       const Tensor& post_attention_norm, const Tensor& gate_up,
                       const std::optional<Tensor>& gate_up_scales, const Tensor& down,
                       const std::optional<Tensor>& down_scales, int64_t inner_size) {
  Decoder& decoder = decoder_in(tensor);
  const auto check_vector = [&](const Tensor& vector, const char* name, int64_t size) {
    check_contiguous(vector, name, 1);
    check_dtype(vector, name, decoder.dtype);
    check_size(vector, name, 0, size);
  };
  check_vector(input_norm, "input_norm", decoder.hidden_size);
  check_vector(post_attention_norm, "post_attention_norm", decoder.hidden_size);
  if (qkv_bias) check_vector(*qkv_bias, "qkv_bias", decoder.qkv_size());
  if (query_norm) check_vector(*query_norm, "query_norm", decoder.head_dim);
  if (key_norm) check_vector(*key_norm, "key_norm", decoder.head_dim);
  Layer layer{
      .owned = {input_norm, qkv, output, post_attention_norm, gate_up, down},
      .input_norm = input_norm.data_ptr(),
      .qkv = PackedMatrix(qkv, qkv_scales, decoder.qkv_size()),
      .qkv_bias = data_or_null(qkv_bias),
      .query_norm = data_or_null(query_norm),
      .key_norm = data_or_null(key_norm),
      .output = PackedMatrix(output, output_scales, decoder.hidden_size),
      .post_attention_norm = post_attention_norm.data_ptr(),
      .gate_up = PackedMatrix(gate_up, gate_up_scales, 2 * inner_size),
      .down = PackedMatrix(down, down_scales, decoder.hidden_size),
  };
  for (const auto& optional :
       {qkv_bias, query_norm, key_norm, qkv_scales, output_scales, gate_up_scales, down_scales}) {
    if (optional) layer.owned.push_back(*optional);
  }
  for (const auto& [weight, name, depth] : {std::tuple{&layer.qkv, "qkv", decoder.hidden_size},
                                            {&layer.output, "output", decoder.query_size()},
                                            {&layer.gate_up, "gate_up", decoder.hidden_size},
                                            {&layer.down, "down", inner_size}}) {
    STD_TORCH_CHECK(weight->bits <= 8 || weight->bits == (decoder.dtype == ScalarType::Float ? 32 : 16), name, " has ",
                    weight->bits, " bits, not those of the activations");
    STD_TORCH_CHECK(weight->depth == depth, name, " multiplies ", weight->depth, " channels, not ", depth);
  }
  STD_TORCH_CHECK(decoder.layers.empty() || decoder.inner_size == inner_size, "inner_size is ", inner_size, ", not ",
                  decoder.inner_size, " as in the layers before");
  decoder.inner_size = inner_size;
  decoder.layers.push_back(std::move(layer));
}

Tensor run_decoder(const Tensor& tensor, const Tensor& residual, const Tensor& positions, const Tensor& slots,
                   const Tensor& key_cache, const Tensor& value_cache, const Tensor& query_start_loc,
                   const Tensor& last_kv_index, const Tensor& block_tables, const std::optional<Tensor>& packed_len,
                   const std::optional<Tensor>& head_lengths, const std::optional<Tensor>& scores,
                   const std::optional<Tensor>& window_start, int64_t window_size, int64_t window_stride,
                   int64_t num_scored, bool squared, double scale, const std::optional<Tensor>& sliding_windows,
                   const std::optional<Tensor>& kv_residual, const std::optional<Tensor>& residual_slots,
                   const std::optional<Tensor>& residual_first, const std::optional<Tensor>& wanted) {
  Decoder& decoder = decoder_in(tensor);
  const int64_t rows = residual.size(0), layers = static_cast<int64_t>(decoder.layers.size());
  const AttentionShape shape = check_pass(decoder, residual, positions, key_cache, value_cache, block_tables,
                                          packed_len, head_lengths, sliding_windows);
  check_attention_tables(query_start_loc, last_kv_index, block_tables, packed_len, rows);
  check_indices(slots, "slots", rows);
  const Places places{
      {shape.format, shape.element_size, shape.kv_heads, shape.head_dim, shape.num_blocks, shape.block_size},
      slots.const_data_ptr<int64_t>(),
      KVResidual(kv_residual)};
  check_slots(places.shape, places.slots, rows);
  AttentionBatch batch = attention_batch(query_start_loc, last_kv_index, block_tables, packed_len, rows);
  batch.windows = score_windows(window_start, window_size, window_stride, num_scored, squared);
  check_windows(scores, window_start, batch.windows, shape, batch);
  if (scores) check_size(*scores, "scores", 0, layers);
  if (kv_residual) {
    STD_TORCH_CHECK(residual_slots && residual_first, "kv_residual needs residual_slots and residual_first");
    STD_TORCH_CHECK(kv_residual->dim() == 6, "kv_residual has ", kv_residual->dim(), " dimensions, not 6");
    check_size(*kv_residual, "kv_residual", 0, layers);
    batch.residual = residual_tables(*kv_residual, positions, *residual_slots, *residual_first, rows,
                                     batch.num_sequences, decoder.kv_heads, decoder.head_dim, decoder.dtype);
  }
  LayerPlans plans(shape, batch, sliding_windows ? sliding_windows->const_data_ptr<int64_t>() : nullptr, layers);
  const Wanted of_rows = check_wanted(wanted, rows);
  Tensor hidden = empty_like(residual, {of_rows.count, decoder.hidden_size});
  Pass pass(decoder, rows, positions.const_data_ptr<int64_t>(), static_cast<float>(scale));
  pass.run(static_cast<char*>(residual.mutable_data_ptr()), static_cast<char*>(hidden.mutable_data_ptr()), of_rows,
           plans, places, LayerCaches(key_cache), LayerCaches(value_cache),
           head_lengths ? head_lengths->const_data_ptr<int32_t>() : nullptr,
           scores ? scores->mutable_data_ptr<float>() : nullptr);
  return hidden;
}

Tensor decoder_queries(const Tensor& tensor, int64_t layer, const Tensor& residual,
                       const std::optional<Tensor>& queries, const Tensor& positions, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& query_start_loc, const Tensor& last_kv_index,
                       const Tensor& block_tables, const std::optional<Tensor>& packed_len,
                       const std::optional<Tensor>& head_lengths, double scale,
                       const std::optional<Tensor>& sliding_windows) {
  Decoder& decoder = decoder_in(tensor);
  const int64_t rows = residual.size(0), layers = static_cast<int64_t>(decoder.layers.size());
  STD_TORCH_CHECK(layer >= 0 && layer < layers, "layer ", layer, " is not among the ", layers, " of the decoder");
  STD_TORCH_CHECK(queries.has_value() == (layer > 0), "queries are those of the layer before, and none for the first");
  const AttentionShape shape = check_pass(decoder, residual, positions, key_cache, value_cache, block_tables,
                                          packed_len, head_lengths, sliding_windows);
  check_attention_tables(query_start_loc, last_kv_index, block_tables, packed_len, rows);
  Tensor out = empty_like(residual, {rows, decoder.query_heads, decoder.head_dim});
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  auto* updated = static_cast<char*>(residual.mutable_data_ptr());
  Pass pass(decoder, rows, positions.const_data_ptr<int64_t>(), static_cast<float>(scale));
  if (!queries) {
    pass.first_queries(updated, to);
    return out;
  }
  check_contiguous(*queries, "queries", 3);
  check_dtype(*queries, "queries", decoder.dtype);
  check_size(*queries, "queries", 0, rows);
  check_size(*queries, "queries", 1, decoder.query_heads);
  check_size(*queries, "queries", 2, decoder.head_dim);
  const int64_t before = layer - 1;
  const AttentionBatch batch = attention_batch(query_start_loc, last_kv_index, block_tables, packed_len, rows);
  LayerPlans plans(shape, batch, sliding_windows ? sliding_windows->const_data_ptr<int64_t>() + before : nullptr, 1);
  const bool full = plans[0].batch.sliding_window == kNoWindow;
  const int64_t lengths = batch.num_sequences * decoder.kv_heads;
  pass.next_queries(static_cast<size_t>(layer), updated, static_cast<const char*>(queries->data_ptr()), plans[0],
                    LayerCaches(key_cache), LayerCaches(value_cache),
                    head_lengths && full ? head_lengths->const_data_ptr<int32_t>() + before * lengths : nullptr, to);
  return out;
}

}  // namespace kvllm
