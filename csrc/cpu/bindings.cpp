#include <torch/csrc/stable/library.h>

#include "ops.h"

// Of each layer: its part of KV groups, its place in a block, and its window, 0 for none.
#define LAYER_TABLES "int[] layer_parts, int[] layer_places, int[] sliding_windows, "

STABLE_TORCH_LIBRARY(kvllm, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) residual, Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("gelu_mul(Tensor gate_up) -> Tensor");
  m.def(
      "rotary_(Tensor(a!) qkv, Tensor positions, Tensor cos_sin, int num_q_heads, int num_kv_heads, int head_dim, "
      "Tensor? q_weight, Tensor? k_weight, float eps) -> ()");
  m.def(
      "paged_attention(Tensor queries, Tensor key_cache, Tensor value_cache, Tensor query_start_loc, "
      "Tensor last_kv_index, Tensor block_tables, Tensor? packed_len, Tensor? head_lengths, Tensor(s!)? "
      "scores, Tensor? scored_from, float scale, int sliding_window=0, float soft_cap=0.0, Tensor? sinks=None, "
      "Tensor(r!)? kv_residual=None, "
      "Tensor? "
      "residual_slots=None, Tensor? residual_first=None, Tensor? positions=None, Tensor? new_keys=None, Tensor? "
      "new_values=None) -> Tensor");
  m.def(
      "attention_mass(Tensor queries, Tensor keys, int num_scored, float scale, Tensor? last_kv_index=None, "
      "bool squared=False, float soft_cap=0.0, Tensor? sinks=None) -> Tensor");
  m.def(
      "key_scores(Tensor queries, Tensor key_cache, Tensor block_tables, Tensor last_kv_index, float scale) -> Tensor");
  m.def(
      "exchange_pairs(Tensor(a!) resident, Tensor(b!) dropped, Tensor(c!) upper, Tensor movable, Tensor? sinks, int "
      "most, float limit) -> (Tensor, Tensor, Tensor)");
  m.def("choose_chunks(Tensor scores, int total, int chunk_budget, int max_chunk) -> Tensor");
  m.def("key_differences(Tensor keys) -> Tensor");
  m.def("key_resemblance(Tensor keys, float threshold, bool spare_first) -> Tensor");
  m.def("hadamard(Tensor vectors) -> Tensor");
  m.def(
      "short_convolution(Tensor x, Tensor filter, Tensor(a!) inputs, Tensor query_start_loc, Tensor slots, bool silu) "
      "-> "
      "Tensor");
  m.def(
      "gated_delta_rule(Tensor mixed, Tensor decays, Tensor strengths, Tensor(a!) states, Tensor query_start_loc, "
      "Tensor "
      "slots, int key_heads) -> Tensor");
  m.def("gather_blocks(Tensor plane, Tensor tables, int size) -> Tensor");
  m.def("store_kv(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor keys, Tensor values, Tensor slots) -> ()");
  m.def("copy_blocks(Tensor(a!) cache, Tensor sources, Tensor destinations) -> ()");
  m.def("compact(Tensor(a!) cache, Tensor kept, Tensor sources, Tensor destinations) -> ()");
  m.def("most_likely(Tensor logits) -> Tensor");
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def("tile_rows(Tensor rows, int first, Tensor(a!) tiles) -> ()");
  m.def("unpack_rows(Tensor packed, Tensor indices) -> Tensor");
  m.def("dequantize_rows(Tensor packed, Tensor scales, Tensor indices) -> Tensor");
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? scales, Tensor? bias, int out_features) -> Tensor");
  m.def("add_adapters(Tensor(a!) product, Tensor x, Tensor rows, Tensor starts, Tensor[] downs, Tensor[] ups) -> ()");
  m.def(
      "make_decoder(Tensor final_norm, int num_q_heads, int num_kv_heads, int head_dim, float eps, bool float32, bool "
      "gelu) -> Tensor");
  m.def(
      "add_decoder_layer(Tensor decoder, Tensor cos_sin, Tensor input_norm, Tensor qkv, Tensor? qkv_scales, Tensor? "
      "qkv_bias, Tensor? q_norm, Tensor? k_norm, Tensor o, Tensor? o_scales, Tensor? attention_output_norm, Tensor "
      "post_attention_norm, Tensor gate_up, Tensor? gate_up_scales, Tensor down, Tensor? down_scales, Tensor? "
      "mlp_output_norm, int inner_size) -> ()");
  m.def(
      "run_decoder(Tensor decoder, Tensor(a!) residual, Tensor positions, Tensor[] slots, Tensor(b!) key_cache, "
      "Tensor(c!) value_cache, Tensor query_start_loc, Tensor[] last_kv_index, Tensor[] block_tables, Tensor? "
      "packed_len, Tensor? head_lengths, " LAYER_TABLES
      "Tensor(s!)? scores, Tensor[] scored_from, "
      "float scale, Tensor(r!)? kv_residual, Tensor? residual_slots, Tensor? residual_first, Tensor? wanted, Tensor? "
      "adapter_rows, Tensor? adapter_starts, Tensor[] downs, Tensor[] ups) -> Tensor");
  m.def(
      "decoder_queries(Tensor decoder, int layer, Tensor(a!) residual, Tensor? queries, Tensor positions, Tensor "
      "key_cache, Tensor value_cache, Tensor query_start_loc, Tensor[] last_kv_index, Tensor[] block_tables, Tensor? "
      "packed_len, Tensor? head_lengths, " LAYER_TABLES "float scale) -> Tensor");
  m.def("cpu_isa() -> str");
  m.def("set_loop_threads(int threads) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kvllm, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&kvllm::rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&kvllm::add_rms_norm));
  m.impl("silu_mul", TORCH_BOX(&kvllm::silu_mul));
  m.impl("gelu_mul", TORCH_BOX(&kvllm::gelu_mul));
  m.impl("rotary_", TORCH_BOX(&kvllm::rotary));
  m.impl("paged_attention", TORCH_BOX(&kvllm::paged_attention));
  m.impl("attention_mass", TORCH_BOX(&kvllm::attention_mass));
  m.impl("key_scores", TORCH_BOX(&kvllm::key_scores));
  m.impl("exchange_pairs", TORCH_BOX(&kvllm::exchange_pairs));
  m.impl("choose_chunks", TORCH_BOX(&kvllm::choose_chunks));
  m.impl("key_differences", TORCH_BOX(&kvllm::key_differences));
  m.impl("key_resemblance", TORCH_BOX(&kvllm::key_resemblance));
  m.impl("hadamard", TORCH_BOX(&kvllm::hadamard));
  m.impl("short_convolution", TORCH_BOX(&kvllm::short_convolution));
  m.impl("gated_delta_rule", TORCH_BOX(&kvllm::gated_delta_rule));
  m.impl("gather_blocks", TORCH_BOX(&kvllm::gather_blocks));
  m.impl("store_kv", TORCH_BOX(&kvllm::store_kv));
  m.impl("copy_blocks", TORCH_BOX(&kvllm::copy_blocks));
  m.impl("compact", TORCH_BOX(&kvllm::compact));
  m.impl("most_likely", TORCH_BOX(&kvllm::most_likely));
  m.impl("pack_weight", TORCH_BOX(&kvllm::pack_weight));
  m.impl("tile_rows", TORCH_BOX(&kvllm::tile_rows));
  m.impl("unpack_rows", TORCH_BOX(&kvllm::unpack_rows));
  m.impl("dequantize_rows", TORCH_BOX(&kvllm::dequantize_rows));
  m.impl("packed_linear", TORCH_BOX(&kvllm::packed_linear));
  m.impl("add_adapters", TORCH_BOX(&kvllm::add_adapters));
  m.impl("make_decoder", TORCH_BOX(&kvllm::make_decoder));
  m.impl("add_decoder_layer", TORCH_BOX(&kvllm::add_decoder_layer));
  m.impl("run_decoder", TORCH_BOX(&kvllm::run_decoder));
  m.impl("decoder_queries", TORCH_BOX(&kvllm::decoder_queries));
}

STABLE_TORCH_LIBRARY_IMPL(kvllm, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&kvllm::cpu_isa));
  m.impl("set_loop_threads", TORCH_BOX(&kvllm::set_loop_threads));
}
