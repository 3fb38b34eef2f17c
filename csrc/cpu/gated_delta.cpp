// The work of recurrent layers: a head of one sequence is one part, or some of its channels.
#include "ops.h"

namespace kvllm {
namespace {

constexpr int64_t kConvolvedChannels = 256;

// Where the tokens of each sequence begin, and the slot of its state.
struct Sequences {
  const int32_t* starts;
  const int32_t* slots;
  int64_t count;
  int64_t num_slots;

  Sequences(const Tensor& query_start_loc, const Tensor& all_slots, int64_t num_tokens, int64_t slots_of_states)
      : count(all_slots.size(0)), num_slots(slots_of_states) {
    check_contiguous(query_start_loc, "query_start_loc", 1);
    check_dtype(query_start_loc, "query_start_loc", ScalarType::Int);
    check_size(query_start_loc, "query_start_loc", 0, count + 1);
    check_contiguous(all_slots, "slots", 1);
    check_dtype(all_slots, "slots", ScalarType::Int);
    starts = query_start_loc.const_data_ptr<int32_t>();
    slots = all_slots.const_data_ptr<int32_t>();
    STD_TORCH_CHECK(starts[0] == 0 && starts[count] == num_tokens, "query_start_loc covers tokens ", starts[0], " to ",
                    starts[count], ", not 0 to ", num_tokens);
    for (int64_t i = 0; i < count; ++i) {
      STD_TORCH_CHECK(starts[i] <= starts[i + 1], "query_start_loc descends after sequence ", i);
      STD_TORCH_CHECK(0 <= slots[i] && slots[i] < num_slots, "slot ", slots[i], " of sequence ", i,
                      " is not among the ", num_slots, " slots");
    }
  }
};

void check_rows(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 2 && (tensor.stride(1) == 1 || tensor.numel() == 0), name,
                  " has rows that are not contiguous");
}

}  // namespace

Tensor short_convolution(const Tensor& x, const Tensor& filter, const Tensor& inputs, const Tensor& query_start_loc,
                         const Tensor& slots, bool silu) {
  const Kernels& kernels = kernels_for(x, "x");
  check_rows(x, "x");
  check_contiguous(filter, "filter", 2);
  check_contiguous(inputs, "inputs", 3);
  check_dtype(filter, "filter", x.scalar_type());
  check_dtype(inputs, "inputs", x.scalar_type());
  const int64_t tokens = x.size(0), channels = x.size(1), taps = filter.size(0);
  check_size(filter, "filter", 1, channels);
  check_size(inputs, "inputs", 1, taps - 1);
  check_size(inputs, "inputs", 2, channels);
  const Sequences sequences(query_start_loc, slots, tokens, inputs.size(0));
  Tensor out = empty_like(x, {tokens, channels});
  const int64_t element = kernels.element_size, parts = (channels + kConvolvedChannels - 1) / kConvolvedChannels;
  const char* from = static_cast<const char*>(x.data_ptr());
  char* held = static_cast<char*>(inputs.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  const int64_t each = sequences.count ? tokens / sequences.count + 1 : 1;
  for_rows(sequences.count * parts, each * taps * kConvolvedChannels, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = i / parts, first = i % parts * kConvolvedChannels, row = sequences.starts[sequence];
      const Convolution arguments{.x = from + row * x.stride(0) * element,
                                  .x_stride = x.stride(0),
                                  .filter = filter.data_ptr(),
                                  .inputs = held + sequences.slots[sequence] * (taps - 1) * channels * element,
                                  .out = to + row * channels * element,
                                  .tokens = sequences.starts[sequence + 1] - row,
                                  .taps = taps,
                                  .channels = channels,
                                  .silu = silu};
      kernels.convolve(arguments, first, std::min(channels, first + kConvolvedChannels));
    }
  });
  return out;
}

Tensor gated_delta_rule(const Tensor& mixed, const Tensor& decays, const Tensor& strengths, const Tensor& states,
                        const Tensor& query_start_loc, const Tensor& slots, int64_t key_heads) {
  const Kernels& kernels = kernels_for(mixed, "mixed");
  check_rows(mixed, "mixed");
  check_contiguous(states, "states", 4);
  check_dtype(states, "states", ScalarType::Float);
  const int64_t tokens = mixed.size(0), heads = states.size(1), key_dim = states.size(2), value_dim = states.size(3);
  STD_TORCH_CHECK(key_heads > 0 && heads % key_heads == 0, heads, " heads do not share ", key_heads, " key heads");
  check_size(mixed, "mixed", 1, 2 * key_heads * key_dim + heads * value_dim);
  for (const auto& [tensor, name] : {std::pair{&decays, "decays"}, std::pair{&strengths, "strengths"}}) {
    check_contiguous(*tensor, name, 2);
    check_dtype(*tensor, name, ScalarType::Float);
    check_size(*tensor, name, 0, tokens);
    check_size(*tensor, name, 1, heads);
  }
  const Sequences sequences(query_start_loc, slots, tokens, states.size(0));
  Tensor out = empty_like(mixed, {tokens, heads, value_dim});
  const int64_t element = kernels.element_size, width = key_heads * key_dim;
  const char* from = static_cast<const char*>(mixed.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  const int64_t each = sequences.count ? tokens / sequences.count + 1 : 1;
  for_rows(sequences.count * heads, each * key_dim * value_dim, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = i / heads, head = i % heads, key_head = head / (heads / key_heads);
      const int64_t row = sequences.starts[sequence];
      const char* first = from + row * mixed.stride(0) * element;
      const int64_t slot = sequences.slots[sequence];
      const GatedDelta rule{
          .queries = first + key_head * key_dim * element,
          .keys = first + (width + key_head * key_dim) * element,
          .values = first + (2 * width + head * value_dim) * element,
          .stride = mixed.stride(0),
          .decays = decays.const_data_ptr<float>() + row * heads + head,
          .strengths = strengths.const_data_ptr<float>() + row * heads + head,
          .control_stride = heads,
          .state = states.mutable_data_ptr<float>() + (slot * heads + head) * key_dim * value_dim,
          .out = to + (row * heads + head) * value_dim * element,
          .out_stride = heads * value_dim,
          .tokens = sequences.starts[sequence + 1] - row,
          .key_dim = key_dim,
          .value_dim = value_dim,
      };
      kernels.gated_delta(rule, scratch(delta_workspace_floats(key_dim)));
    }
  });
  return out;
}

}  // namespace kvllm
