// All layers of a decoder as one operator: the loop of kvllm/models/base.py over the same kernels, in memory that is
// kept from step to step.
#include <cstring>
#include <deque>
#include <map>
#include <memory>

#include "adapters.h"
#include "attention.h"
#include "linear.h"
#include "observed_scores.h"
#include "store.h"

namespace kvllm {
namespace {

const void* data_or_null(const std::optional<Tensor>& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

struct Layer {
  std::vector<Tensor> owned;
  const float* cos_sin;
  const void* input_norm;
  PackedMatrix qkv;
  const void* qkv_bias;
  const void* query_norm;
  const void* key_norm;
  PackedMatrix output;
  const void* attention_output_norm;  // null, as that of the MLP: what is added to the residual is not normalized
  const void* post_attention_norm;
  PackedMatrix gate_up;
  PackedMatrix down;
  const void* mlp_output_norm;
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
  GatedActivation activation;
  Tensor final_norm;
  int64_t positions = 0;  // that the tables of rotations have
  std::vector<Layer> layers{};
  Buffer normalized{}, operands{}, qkv{}, attended{}, projected{}, gate_up{}, activated{};

  int64_t qkv_size() const { return static_cast<int64_t>(query_heads + 2 * kv_heads) * head_dim; }
  int64_t query_size() const { return static_cast<int64_t>(query_heads) * head_dim; }
  ScalarType norm_dtype() const { return final_norm.scalar_type(); }
};

constexpr uint64_t kMagic = 0x4b764c4c4d646563;

Decoder& decoder_in(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == static_cast<int64_t>(sizeof(Decoder)),
                  "decoder is not what make_decoder returned");
  auto& decoder = *static_cast<Decoder*>(tensor.mutable_data_ptr());
  STD_TORCH_CHECK(decoder.magic == kMagic, "decoder is not what make_decoder returned");
  return decoder;
}

// What the layers of a part of KV groups share.
struct Part {
  const int64_t* slots;  // where keys and values are stored; null in a pass that stores none
  AttentionBatch batch;
};

// Of each layer: its part, its place in a block, and its window, 0 for none.
struct LayerTables {
  const std::vector<int64_t>& parts;
  const std::vector<int64_t>& places;
  const std::vector<int64_t>& windows;
};

AttentionBatch batch_of(const std::vector<Part>& parts, const LayerTables& tables, int64_t layer) {
  AttentionBatch batch = parts[tables.parts[layer]].batch;
  batch.sliding_window = sliding_window(tables.windows[layer]);
  if (batch.sliding_window != kNoWindow) {
    batch.packed_len = nullptr;
    batch.scored_from = nullptr;
  }
  return batch;
}

// A plan for each part and window that layers have.
class LayerPlans {
 public:
  LayerPlans(const AttentionShape& shape, const std::vector<Part>& parts, const LayerTables& tables) {
    std::map<std::pair<int64_t, int64_t>, AttentionPlan*> found;
    for (size_t layer = 0; layer < tables.parts.size(); ++layer) {
      AttentionPlan*& plan = found[{tables.parts[layer], tables.windows[layer]}];
      if (plan == nullptr) plan = &plans_.emplace_back(shape, batch_of(parts, tables, static_cast<int64_t>(layer)));
      of_layer_.push_back(plan);
    }
  }

  AttentionPlan& operator[](size_t layer) { return *of_layer_[layer]; }

 private:
  std::deque<AttentionPlan> plans_;
  std::vector<AttentionPlan*> of_layer_;
};

// The keys, or the values, of all places.
struct PlaceCaches {
  char* first;
  int64_t bytes;  // from a place to the next

  explicit PlaceCaches(const Tensor& cache)
      : first(static_cast<char*>(cache.mutable_data_ptr())), bytes(cache.stride(0) * cache.element_size()) {}

  char* operator[](int64_t place) const { return first + place * bytes; }
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

// Where a pass reads and stores keys and values. What layers add to, head_lengths `[layers, num_sequences, kv_heads]`
// and scores `[places, num_blocks, kv_heads, block_size]`, is null where no part has it.
struct CachedLayers {
  StoreShape shape;
  PlaceCaches keys;
  PlaceCaches values;
  const std::vector<Part>& parts;
  LayerTables tables;
  KVResidual residual;
  const int32_t* head_lengths;
  float* scores;

  const int64_t* slots(size_t layer) const { return parts[tables.parts[layer]].slots; }
  const int32_t* lengths_of(size_t layer, const AttentionBatch& batch) const {
    if (batch.packed_len == nullptr) return nullptr;
    return head_lengths + static_cast<int64_t>(layer) * batch.num_sequences * shape.kv_heads;
  }
  float* scores_of(size_t layer, const AttentionBatch& batch) const {
    if (batch.scored_from == nullptr) return nullptr;
    return scores + tables.places[layer] * shape.num_blocks * shape.kv_heads * shape.block_size;
  }
};

// Query tokens, ascending: those whose hidden states are wanted. None: those of all are.
struct Wanted {
  const int64_t* rows;
  int64_t count;
};

// The adapters of a pass: of the four matrices of each layer in turn, those of each adapter.
struct PassAdapters {
  AdapterRows rows;
  const std::vector<Tensor>& downs;
  const std::vector<Tensor>& ups;

  AdapterPairs of(size_t matrix) const {
    return {downs.data() + matrix * rows.adapters(), ups.data() + matrix * rows.adapters()};
  }
};

// One pass over the layers.
class Pass {
 public:
  // adapters: null if there are none.
  Pass(Decoder& decoder, int64_t rows, const int64_t* positions, float scale, PassAdapters* adapters = nullptr)
      : d_(decoder),
        kernels_(decoder.dtype == ScalarType::Float ? kernel_set().float32 : kernel_set().bfloat16),
        norms_(kernels_.norms[decoder.norm_dtype() == decoder.dtype ? 0 : 1]),
        bytes_(decoder.dtype == ScalarType::Float ? 4 : 2),
        rows_(rows),
        positions_(positions),
        scale_(scale),
        adapters_(adapters) {}

  // residual `[rows, hidden_size]` is overwritten; hidden gets the normalized result of the wanted rows. After the
  // last attention, these alone are computed.
  void run(char* residual, char* hidden, const Wanted& wanted, LayerPlans& plans, const CachedLayers& cached) {
    char* x = normalize(residual);
    for (size_t i = 0; i < d_.layers.size(); ++i) {
      const Layer& layer = d_.layers[i];
      const bool last = i + 1 == d_.layers.size();
      const char* queries = project(layer, x, cached, i);
      const char *new_keys = keys_behind(queries), *new_values = values_behind(queries);
      char* attended = attend(plans[i], queries, d_.qkv_size(), cached, i,
                              cached.residual.of_layer(i, new_keys, new_values, d_.qkv_size() * bytes_));
      if (last && wanted.rows != nullptr) {
        keep_rows(wanted, attended, d_.query_size());
        keep_rows(wanted, residual, d_.hidden_size);
        rows_ = wanted.count;
        if (adapters_ != nullptr) adapters_->rows.keep(wanted.rows, wanted.count);
      }
      const PackedMatrix* next = last ? nullptr : &d_.layers[i + 1].qkv;
      finish(layer, attended, residual, last ? d_.final_norm.data_ptr() : d_.layers[i + 1].input_norm, next,
             last ? hidden : x);
    }
  }

  // The queries of the first layer, to out `[rows, query_size]`.
  void first_queries(const char* residual, char* out) { project_queries(d_.layers[0], normalize(residual), out); }

  // Those of a later layer, from the queries of the layer before it, which is finished. residual is updated.
  void next_queries(size_t index, char* residual, const char* queries, AttentionPlan& plan, const CachedLayers& cached,
                    char* out) {
    const Layer& layer = d_.layers[index];
    const char* attended = attend(plan, queries, d_.query_size(), cached, index - 1, {});
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

  // Matrices are asked for in order: of each layer that of queries, keys and values, the output's, and the MLP's two.
  char* product(const char* x, const PackedMatrix& weight, const void* bias, Buffer& buffer, const PackedMatrix* next) {
    char* out = buffer.get(rows_ * weight.columns * bytes_);
    multiply(kernels_, x, rows_, weight, bias, out, d_.operands.get(operand_bytes(kernels_, weight, rows_)), next);
    if (adapters_ != nullptr) {
      add_adapters(kernels_, out, weight.columns, x, weight.depth, adapters_->rows, adapters_->of(num_products_++));
    }
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
      norms_.rms_norm(at(residual, begin, d_.hidden_size), d_.layers[0].input_norm, at(x, begin, d_.hidden_size),
                      end - begin, d_.hidden_size, d_.eps);
    });
    return x;
  }

  // Normalizes and rotates the heads of queries, and of `kv_heads` keys after them, in rows of `width`.
  void rotate(const Layer& layer, char* heads, int64_t width, int kv_heads) {
    const Rotary rotary{heads,    width,       positions_,       layer.cos_sin,  d_.query_heads,
                        kv_heads, d_.head_dim, layer.query_norm, layer.key_norm, d_.eps};
    each_row(width, [&](int64_t begin, int64_t end) { norms_.rotary(rotary, begin, end); });
  }

  // Stores keys and values, and returns the queries, in rows of qkv_size.
  const char* project(const Layer& layer, const char* x, const CachedLayers& cached, size_t index) {
    const int64_t width = d_.qkv_size();
    product(x, layer.qkv, layer.qkv_bias, d_.qkv, &layer.output);
    char* qkv = d_.qkv.get(0);
    rotate(layer, qkv, width, d_.kv_heads);
    const int64_t place = cached.tables.places[index];
    store_layer(cached.shape, cached.slots(index), rows_,
                {keys_behind(qkv), values_behind(qkv), width, width, cached.keys[place], cached.values[place]});
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

  char* attend(AttentionPlan& plan, const char* queries, int64_t width, const CachedLayers& cached, size_t index,
               const ResidualLayer& residual) {
    char* attended = d_.attended.get(rows_ * d_.query_size() * bytes_);
    const int64_t place = cached.tables.places[index];
    const int32_t* head_lengths = cached.lengths_of(index, plan.batch);
    float* scores = cached.scores_of(index, plan.batch);
    run_attention(plan, {queries, width, cached.keys[place], cached.values[place], head_lengths, scores, attended,
                         scale_, 0, nullptr, residual});
    return attended;
  }

  // What follows attention in a layer. out gets the normalized input of what follows the layer.
  void finish(const Layer& layer, const char* attended, char* residual, const void* next_norm,
              const PackedMatrix* next_weight, char* out) {
    char* x = d_.normalized.get(rows_ * d_.hidden_size * bytes_);
    add_norm(residual, product(attended, layer.output, nullptr, d_.projected, &layer.gate_up),
             layer.attention_output_norm, layer.post_attention_norm, x);
    const char* gate_up = product(x, layer.gate_up, nullptr, d_.gate_up, &layer.down);
    char* activated = d_.activated.get(rows_ * d_.inner_size * bytes_);
    each_row(2 * d_.inner_size, [&](int64_t begin, int64_t end) {
      kernels_.gated[static_cast<int>(d_.activation)](at(gate_up, begin, 2 * d_.inner_size),
                                                      at(activated, begin, d_.inner_size), end - begin, d_.inner_size);
    });
    add_norm(residual, product(activated, layer.down, nullptr, d_.projected, next_weight), layer.mlp_output_norm,
             next_norm, out);
  }

  // The addend is normalized first where it has a norm.
  void add_norm(char* residual, char* addend, const void* addend_norm, const void* norm, char* out) {
    const int64_t width = d_.hidden_size;
    each_row(width, [&](int64_t begin, int64_t end) {
      char* rows = at(addend, begin, width);
      if (addend_norm != nullptr) norms_.rms_norm(rows, addend_norm, rows, end - begin, width, d_.eps);
      norms_.add_rms_norm(at(residual, begin, width), rows, norm, at(out, begin, width), end - begin, width, d_.eps);
    });
  }

  Decoder& d_;
  const Kernels& kernels_;
  const NormKernels& norms_;
  const int64_t bytes_;
  int64_t rows_;
  const int64_t* positions_;
  const float scale_;
  PassAdapters* adapters_;
  size_t num_products_ = 0;
};

// `[places, blocks, kv_heads, block_size, width]`, in which only the places may be apart.
void check_places(const Tensor& cache, const char* name) {
  STD_TORCH_CHECK(cache.dim() == 5, name, " has ", cache.dim(), " dimensions, not 5");
  int64_t dense = 1;
  for (int64_t dim = 4; dim > 0; dense *= cache.size(dim--)) {
    STD_TORCH_CHECK(cache.size(dim) == 1 || cache.stride(dim) == dense, "a place of ", name, " is not contiguous");
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

// One of the numbers for each layer, from 0 to below `end`.
void check_of_layers(const std::vector<int64_t>& numbers, const char* name, const Decoder& decoder, size_t end) {
  STD_TORCH_CHECK(numbers.size() == decoder.layers.size(), name, " has ", numbers.size(), " numbers, not ",
                  decoder.layers.size(), ", one for each layer");
  for (const int64_t number : numbers) {
    STD_TORCH_CHECK(number >= 0 && static_cast<size_t>(number) < end, name, " has ", number, ", not below ", end);
  }
}

// What every pass over the layers takes.
struct PassTensors {
  const Tensor& residual;
  const Tensor& positions;
  const Tensor& key_cache;
  const Tensor& value_cache;
  const Tensor& query_start_loc;
  const std::vector<Tensor>& last_kv_index;
  const std::vector<Tensor>& block_tables;
  const std::optional<Tensor>& packed_len;
  const std::optional<Tensor>& head_lengths;
  LayerTables tables;

  int64_t rows() const { return residual.size(0); }
};

AttentionShape check_pass(const Decoder& decoder, const PassTensors& of) {
  check_contiguous(of.residual, "residual", 2);
  check_dtype(of.residual, "residual", decoder.dtype);
  check_size(of.residual, "residual", 1, decoder.hidden_size);
  check_places(of.key_cache, "key_cache");
  check_places(of.value_cache, "value_cache");
  const KVFormat format = check_kv_format(of.key_cache, of.value_cache, decoder.head_dim, decoder.dtype);
  check_size(of.key_cache, "key_cache", 2, decoder.kv_heads);
  check_of_layers(of.tables.parts, "layer_parts", decoder, of.block_tables.size());
  check_of_layers(of.tables.places, "layer_places", decoder, of.key_cache.size(0));
  check_of_layers(of.tables.windows, "sliding_windows", decoder, INT64_MAX);
  check_indices(of.positions, "positions", of.rows());
  check_positions(of.positions.const_data_ptr<int64_t>(), of.rows(), decoder.positions);
  STD_TORCH_CHECK(of.packed_len.has_value() == of.head_lengths.has_value(), "packed_len and head_lengths go together");
  if (of.head_lengths) {
    check_contiguous(*of.head_lengths, "head_lengths", 3);
    check_dtype(*of.head_lengths, "head_lengths", ScalarType::Int);
    check_size(*of.head_lengths, "head_lengths", 0, static_cast<int64_t>(decoder.layers.size()));
    check_size(*of.head_lengths, "head_lengths", 1, of.query_start_loc.size(0) - 1);
    check_size(*of.head_lengths, "head_lengths", 2, decoder.kv_heads);
  }
  return {format,
          static_cast<int>(of.residual.element_size()),
          decoder.query_heads,
          decoder.kv_heads,
          decoder.head_dim,
          of.key_cache.size(1),
          of.key_cache.size(3)};
}

// The batch of each part. Heads hold different KV pairs in the first one alone.
std::vector<Part> parts_of(const PassTensors& of) {
  STD_TORCH_CHECK(of.last_kv_index.size() == of.block_tables.size(), "last_kv_index has ", of.last_kv_index.size(),
                  " tensors, and block_tables has ", of.block_tables.size(), ": one for each part");
  std::vector<Part> parts;
  for (size_t i = 0; i < of.block_tables.size(); ++i) {
    const std::optional<Tensor> packed_len = i == 0 ? of.packed_len : std::nullopt;
    check_attention_tables(of.query_start_loc, of.last_kv_index[i], of.block_tables[i], packed_len, of.rows());
    parts.push_back(
        {nullptr, attention_batch(of.query_start_loc, of.last_kv_index[i], of.block_tables[i], packed_len, of.rows())});
  }
  return parts;
}

CachedLayers cached_layers(const AttentionShape& shape, const PassTensors& of, const std::vector<Part>& parts) {
  return {{shape.format, shape.element_size, shape.kv_heads, shape.head_dim, shape.num_blocks, shape.block_size},
          PlaceCaches(of.key_cache),
          PlaceCaches(of.value_cache),
          parts,
          of.tables,
          KVResidual(std::nullopt),
          of.head_lengths ? of.head_lengths->const_data_ptr<int32_t>() : nullptr,
          nullptr};
}

}  // namespace

Tensor make_decoder(const Tensor& final_norm, int64_t query_heads, int64_t kv_heads, int64_t head_dim, double eps,
                    bool float32, bool gelu) {
  kernels_for(final_norm, "final_norm");
  check_contiguous(final_norm, "final_norm", 1);
  auto* decoder = new Decoder{
      .magic = kMagic,
      .dtype = float32 ? ScalarType::Float : ScalarType::BFloat16,
      .query_heads = static_cast<int>(query_heads),
      .kv_heads = static_cast<int>(kv_heads),
      .head_dim = static_cast<int>(head_dim),
      .hidden_size = final_norm.size(0),
      .inner_size = 0,
      .eps = static_cast<float>(eps),
      .activation = gelu ? GatedActivation::kGelu : GatedActivation::kSilu,
      .final_norm = final_norm,
  };
  const auto free = [](void* memory) { delete static_cast<Decoder*>(memory); };
  return torch::stable::from_blob(decoder, {static_cast<int64_t>(sizeof(Decoder))}, {1}, final_norm.device(),
                                  ScalarType::Byte, free);
}

void add_decoder_layer(const Tensor& tensor, const Tensor& cos_sin, const Tensor& input_norm, const Tensor& qkv,
                       const std::optional<Tensor>& qkv_scales, const std::optional<Tensor>& qkv_bias,
                       const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
                       const Tensor& output, const std::optional<Tensor>& output_scales,
                       const std::optional<Tensor>& attention_output_norm, const Tensor& post_attention_norm,
                       const Tensor& gate_up, const std::optional<Tensor>& gate_up_scales, const Tensor& down,
                       const std::optional<Tensor>& down_scales, const std::optional<Tensor>& mlp_output_norm,
                       int64_t inner_size) {
  Decoder& decoder = decoder_in(tensor);
  const auto check_vector = [&](const Tensor& vector, const char* name, int64_t size, ScalarType dtype) {
    check_contiguous(vector, name, 1);
    check_dtype(vector, name, dtype);
    check_size(vector, name, 0, size);
  };
  const auto check_norm = [&](const std::optional<Tensor>& norm, const char* name, int64_t size) {
    if (norm) check_vector(*norm, name, size, decoder.norm_dtype());
  };
  check_contiguous(cos_sin, "cos_sin", 2);
  check_dtype(cos_sin, "cos_sin", ScalarType::Float);
  check_size(cos_sin, "cos_sin", 1, decoder.head_dim);
  STD_TORCH_CHECK(decoder.layers.empty() || decoder.positions == cos_sin.size(0), "cos_sin has ", cos_sin.size(0),
                  " positions, not ", decoder.positions, " as in the layers before");
  decoder.positions = cos_sin.size(0);
  check_norm(input_norm, "input_norm", decoder.hidden_size);
  check_norm(attention_output_norm, "attention_output_norm", decoder.hidden_size);
  check_norm(post_attention_norm, "post_attention_norm", decoder.hidden_size);
  check_norm(mlp_output_norm, "mlp_output_norm", decoder.hidden_size);
  check_norm(query_norm, "query_norm", decoder.head_dim);
  check_norm(key_norm, "key_norm", decoder.head_dim);
  if (qkv_bias) check_vector(*qkv_bias, "qkv_bias", decoder.qkv_size(), decoder.dtype);
  Layer layer{
      .owned = {cos_sin, input_norm, qkv, output, post_attention_norm, gate_up, down},
      .cos_sin = cos_sin.const_data_ptr<float>(),
      .input_norm = input_norm.data_ptr(),
      .qkv = PackedMatrix(qkv, qkv_scales, decoder.qkv_size()),
      .qkv_bias = data_or_null(qkv_bias),
      .query_norm = data_or_null(query_norm),
      .key_norm = data_or_null(key_norm),
      .output = PackedMatrix(output, output_scales, decoder.hidden_size),
      .attention_output_norm = data_or_null(attention_output_norm),
      .post_attention_norm = post_attention_norm.data_ptr(),
      .gate_up = PackedMatrix(gate_up, gate_up_scales, 2 * inner_size),
      .down = PackedMatrix(down, down_scales, decoder.hidden_size),
      .mlp_output_norm = data_or_null(mlp_output_norm),
  };
  for (const auto& optional : {qkv_bias, query_norm, key_norm, attention_output_norm, mlp_output_norm, qkv_scales,
                               output_scales, gate_up_scales, down_scales}) {
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

Tensor run_decoder(const Tensor& tensor, const Tensor& residual, const Tensor& positions,
                   const std::vector<Tensor>& slots, const Tensor& key_cache, const Tensor& value_cache,
                   const Tensor& query_start_loc, const std::vector<Tensor>& last_kv_index,
                   const std::vector<Tensor>& block_tables, const std::optional<Tensor>& packed_len,
                   const std::optional<Tensor>& head_lengths, const std::vector<int64_t>& layer_parts,
                   const std::vector<int64_t>& layer_places, const std::vector<int64_t>& sliding_windows,
                   const std::optional<Tensor>& scores, const std::vector<Tensor>& scored_from, double scale,
                   const std::optional<Tensor>& kv_residual, const std::optional<Tensor>& residual_slots,
                   const std::optional<Tensor>& residual_first, const std::optional<Tensor>& wanted,
                   const std::optional<Tensor>& adapter_rows, const std::optional<Tensor>& adapter_starts,
                   const std::vector<Tensor>& downs, const std::vector<Tensor>& ups) {
  Decoder& decoder = decoder_in(tensor);
  const PassTensors of{
      residual,      positions,    key_cache,  value_cache,  query_start_loc,
      last_kv_index, block_tables, packed_len, head_lengths, {layer_parts, layer_places, sliding_windows}};
  const int64_t rows = of.rows();
  const AttentionShape shape = check_pass(decoder, of);
  std::vector<Part> parts = parts_of(of);
  CachedLayers cached = cached_layers(shape, of, parts);
  STD_TORCH_CHECK(slots.size() == parts.size() && scored_from.size() <= parts.size(), "slots has ", slots.size(),
                  " tensors and scored_from ", scored_from.size(), ", for ", parts.size(), " parts");
  STD_TORCH_CHECK(scores.has_value() == !scored_from.empty(), "scores and scored_from go together");
  if (scores) check_size(*scores, "scores", 0, key_cache.size(0));
  for (size_t i = 0; i < parts.size(); ++i) {
    check_indices(slots[i], "slots", rows);
    parts[i].slots = slots[i].const_data_ptr<int64_t>();
    check_slots(cached.shape, parts[i].slots, rows);
    if (i >= scored_from.size()) continue;
    AttentionBatch& batch = parts[i].batch;
    batch.scored_from = check_observed(scores, scored_from[i], shape, batch);
  }
  if (scores) cached.scores = scores->mutable_data_ptr<float>();
  if (kv_residual) {
    STD_TORCH_CHECK(residual_slots && residual_first, "kv_residual needs residual_slots and residual_first");
    STD_TORCH_CHECK(kv_residual->dim() == 6, "kv_residual has ", kv_residual->dim(), " dimensions, not 6");
    check_size(*kv_residual, "kv_residual", 0, static_cast<int64_t>(decoder.layers.size()));
    const Residual of_all =
        residual_tables(*kv_residual, positions, *residual_slots, *residual_first, rows, parts[0].batch.num_sequences,
                        decoder.kv_heads, decoder.head_dim, decoder.dtype);
    for (Part& part : parts) part.batch.residual = of_all;
    cached.residual = KVResidual(kv_residual);
  }
  LayerPlans plans(shape, parts, of.tables);
  const Wanted of_rows = check_wanted(wanted, rows);
  Tensor hidden = empty_like(residual, {of_rows.count, decoder.hidden_size});
  PassAdapters adapters{AdapterRows(adapter_rows, adapter_starts, rows), downs, ups};
  const size_t pairs = 4 * decoder.layers.size() * adapters.rows.adapters();
  STD_TORCH_CHECK(downs.size() == pairs && ups.size() == pairs, "downs has ", downs.size(), " tensors and ups ",
                  ups.size(), ", not ", pairs);
  Pass pass(decoder, rows, positions.const_data_ptr<int64_t>(), static_cast<float>(scale),
            pairs == 0 ? nullptr : &adapters);
  pass.run(static_cast<char*>(residual.mutable_data_ptr()), static_cast<char*>(hidden.mutable_data_ptr()), of_rows,
           plans, cached);
  return hidden;
}

Tensor decoder_queries(const Tensor& tensor, int64_t layer, const Tensor& residual,
                       const std::optional<Tensor>& queries, const Tensor& positions, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& query_start_loc,
                       const std::vector<Tensor>& last_kv_index, const std::vector<Tensor>& block_tables,
                       const std::optional<Tensor>& packed_len, const std::optional<Tensor>& head_lengths,
                       const std::vector<int64_t>& layer_parts, const std::vector<int64_t>& layer_places,
                       const std::vector<int64_t>& sliding_windows, double scale) {
  Decoder& decoder = decoder_in(tensor);
  const int64_t layers = static_cast<int64_t>(decoder.layers.size());
  STD_TORCH_CHECK(layer >= 0 && layer < layers, "layer ", layer, " is not among the ", layers, " of the decoder");
  STD_TORCH_CHECK(queries.has_value() == (layer > 0), "queries are those of the layer before, and none for the first");
  const PassTensors of{
      residual,      positions,    key_cache,  value_cache,  query_start_loc,
      last_kv_index, block_tables, packed_len, head_lengths, {layer_parts, layer_places, sliding_windows}};
  const int64_t rows = of.rows();
  const AttentionShape shape = check_pass(decoder, of);
  const std::vector<Part> parts = parts_of(of);
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
  AttentionPlan plan(shape, batch_of(parts, of.tables, layer - 1));
  pass.next_queries(static_cast<size_t>(layer), updated, static_cast<const char*>(queries->data_ptr()), plan,
                    cached_layers(shape, of, parts), to);
  return out;
}

}  // namespace kvllm
