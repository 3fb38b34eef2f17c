#include "ops.h"

namespace kvllm {
namespace {

char* row_pointer(const Tensor& tensor, int64_t row) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + row * tensor.stride(0) * tensor.element_size();
}

void check_weight(const Tensor& weight, const char* name, ScalarType dtype, int64_t width) {
  check_contiguous(weight, name, 1);
  check_dtype(weight, name, dtype);
  check_size(weight, name, 0, width);
}

// The dtype of the weights of a norm: that of x, or float.
ScalarType weight_dtype(const Tensor& x, const Tensor& weight) {
  return weight.scalar_type() == ScalarType::Float ? ScalarType::Float : x.scalar_type();
}

const NormKernels& norm_kernels(const Tensor& x, const char* name, ScalarType weights) {
  return kernels_for(x, name).norms[weights == x.scalar_type() ? 0 : 1];
}

}  // namespace

void check_positions(const int64_t* positions, int64_t count, int64_t num_positions) {
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(positions[i] >= 0 && positions[i] < num_positions, "position ", positions[i], " is not among the ",
                    num_positions, " rows of cos_sin");
  }
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const ScalarType dtype = weight_dtype(x, weight);
  const NormKernels& kernels = norm_kernels(x, "x", dtype);
  check_contiguous(x, "x", 2);
  const int64_t rows = x.size(0), width = x.size(1);
  check_weight(weight, "weight", dtype, width);
  Tensor out = empty_like(x, {rows, width});
  for_rows(rows, width, [&](int64_t begin, int64_t end) {
    kernels.rms_norm(row_pointer(x, begin), weight.data_ptr(), row_pointer(out, begin), end - begin, width, eps);
  });
  return out;
}

Tensor add_rms_norm(const Tensor& residual, const Tensor& x, const Tensor& weight, double eps) {
  const ScalarType dtype = weight_dtype(x, weight);
  const NormKernels& kernels = norm_kernels(x, "x", dtype);
  check_contiguous(x, "x", 2);
  check_contiguous(residual, "residual", 2);
  check_dtype(residual, "residual", x.scalar_type());
  const int64_t rows = x.size(0), width = x.size(1);
  check_size(residual, "residual", 0, rows);
  check_size(residual, "residual", 1, width);
  check_weight(weight, "weight", dtype, width);
  Tensor out = empty_like(x, {rows, width});
  for_rows(rows, width, [&](int64_t begin, int64_t end) {
    kernels.add_rms_norm(row_pointer(residual, begin), row_pointer(x, begin), weight.data_ptr(),
                         row_pointer(out, begin), end - begin, width, eps);
  });
  return out;
}

namespace {

Tensor gated(const Tensor& gate_up, GatedActivation activation) {
  const auto run = kernels_for(gate_up, "gate_up").gated[static_cast<int>(activation)];
  check_contiguous(gate_up, "gate_up", 2);
  STD_TORCH_CHECK(gate_up.size(1) % 2 == 0, "gate_up has an odd number of columns, ", gate_up.size(1));
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  Tensor out = empty_like(gate_up, {rows, width});
  for_rows(rows, 2 * width, [&](int64_t begin, int64_t end) {
    run(row_pointer(gate_up, begin), row_pointer(out, begin), end - begin, width);
  });
  return out;
}

}  // namespace

Tensor silu_mul(const Tensor& gate_up) { return gated(gate_up, GatedActivation::kSilu); }

Tensor gelu_mul(const Tensor& gate_up) { return gated(gate_up, GatedActivation::kGelu); }

void rotary(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin, int64_t num_query_heads,
            int64_t num_kv_heads, int64_t head_dim, const std::optional<Tensor>& query_weight,
            const std::optional<Tensor>& key_weight, double eps) {
  const ScalarType dtype = query_weight ? weight_dtype(qkv, *query_weight) : qkv.scalar_type();
  const NormKernels& kernels = norm_kernels(qkv, "qkv", dtype);
  check_contiguous(qkv, "qkv", 2);
  check_contiguous(positions, "positions", 1);
  check_contiguous(cos_sin, "cos_sin", 2);
  check_dtype(positions, "positions", ScalarType::Long);
  check_dtype(cos_sin, "cos_sin", ScalarType::Float);
  const int64_t rows = qkv.size(0), width = (num_query_heads + num_kv_heads) * head_dim;
  check_size(positions, "positions", 0, rows);
  check_size(cos_sin, "cos_sin", 1, head_dim);
  STD_TORCH_CHECK(head_dim > 0 && head_dim % 2 == 0, "head_dim is ", head_dim, ": it must be even");
  STD_TORCH_CHECK(num_query_heads >= 0 && num_kv_heads >= 0 && width <= qkv.size(1), "qkv has ", qkv.size(1),
                  " columns, which do not hold ", num_query_heads, " + ", num_kv_heads, " heads of ", head_dim);
  if (query_weight) check_weight(*query_weight, "q_weight", dtype, head_dim);
  if (key_weight) check_weight(*key_weight, "k_weight", dtype, head_dim);

  Rotary arguments;
  arguments.qkv = qkv.mutable_data_ptr();
  arguments.row_stride = qkv.size(1);
  arguments.positions = positions.const_data_ptr<int64_t>();
  arguments.cos_sin = cos_sin.const_data_ptr<float>();
  arguments.num_query_heads = static_cast<int>(num_query_heads);
  arguments.num_kv_heads = static_cast<int>(num_kv_heads);
  arguments.head_dim = static_cast<int>(head_dim);
  arguments.query_weight = query_weight ? query_weight->data_ptr() : nullptr;
  arguments.key_weight = key_weight ? key_weight->data_ptr() : nullptr;
  arguments.eps = static_cast<float>(eps);
  check_positions(arguments.positions, rows, cos_sin.size(0));
  for_rows(rows, width, [&](int64_t begin, int64_t end) { kernels.rotary(arguments, begin, end); });
}

}  // namespace kvllm
