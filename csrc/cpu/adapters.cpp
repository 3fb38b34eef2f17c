#include "adapters.h"

#include <algorithm>
#include <cstring>

namespace kvllm {
namespace {

// Copies of some rows of x, the products of these with both matrices, and the operands of a product.
struct AdapterMemory {
  char *x, *low, *high;
  float* operands;
};

AdapterMemory memory_for(const Kernels& kernels, const PackedMatrix& down, const PackedMatrix& up, int64_t rows) {
  const auto floats = [&](int64_t width) {
    return (rows * width * kernels.element_size + 63) / 64 * 64 / static_cast<int64_t>(sizeof(float));
  };
  const int64_t x = floats(down.depth), low = floats(down.columns), high = floats(up.columns);
  const int64_t operands = std::max(operand_bytes(kernels, down, rows), operand_bytes(kernels, up, rows));
  float* memory = scratch<2>(x + low + high);
  return {reinterpret_cast<char*>(memory), reinterpret_cast<char*>(memory + x),
          reinterpret_cast<char*>(memory + x + low), scratch<1>(operands / static_cast<int64_t>(sizeof(float)))};
}

float to_float(float x) { return x; }
float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof(found));
  return found;
}
void round_into(float& out, float x) { out = x; }
// To nearest even. A NaN stays one.
void round_into(BFloat16& out, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  out.bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 1 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
void add_row(void* into, const void* from, int64_t width) {
  T* sum = static_cast<T*>(into);
  const T* addend = static_cast<const T*>(from);
  for (int64_t i = 0; i < width; ++i) round_into(sum[i], to_float(sum[i]) + to_float(addend[i]));
}

// Adds the product of an adapter for `count` tokens.
void add_adapter(const Kernels& kernels, char* product, int64_t width, const char* x, int64_t depth,
                 const int64_t* rows, int64_t count, const Tensor& packed_down, const Tensor& packed_up) {
  const int64_t low = packed_up.size(1) * (kWordBytes / kernels.element_size);
  const PackedMatrix down(packed_down, std::nullopt, low);
  const int64_t columns = packed_up.size(0) * kTileColumns;
  STD_TORCH_CHECK(width <= columns, "product has ", width, " columns, and ups have ", columns);
  const PackedMatrix up = PackedMatrix(packed_up, std::nullopt, columns).first_columns(width);
  STD_TORCH_CHECK(depth == down.depth, "x has ", depth, " channels, and downs have ", down.depth);
  const AdapterMemory memory = memory_for(kernels, down, up, count);
  const int64_t x_bytes = depth * kernels.element_size, row_bytes = width * kernels.element_size;
  for (int64_t i = 0; i < count; ++i) std::memcpy(memory.x + i * x_bytes, x + rows[i] * x_bytes, x_bytes);
  multiply(kernels, memory.x, count, down, nullptr, memory.low, memory.operands);
  multiply(kernels, memory.low, count, up, nullptr, memory.high, memory.operands);
  for (int64_t i = 0; i < count; ++i) {
    char* into = product + rows[i] * row_bytes;
    const char* from = memory.high + i * row_bytes;
    if (kernels.element_size == sizeof(float)) {
      add_row<float>(into, from, width);
    } else {
      add_row<BFloat16>(into, from, width);
    }
  }
}

std::vector<int64_t> numbers_of(const Tensor& tensor, const char* name) {
  check_contiguous(tensor, name, 1);
  check_dtype(tensor, name, ScalarType::Long);
  const int64_t* first = tensor.const_data_ptr<int64_t>();
  return {first, first + tensor.size(0)};
}

}  // namespace

AdapterRows::AdapterRows(const std::optional<Tensor>& of_rows, const std::optional<Tensor>& of_starts, int64_t tokens) {
  STD_TORCH_CHECK(of_rows.has_value() == of_starts.has_value(), "rows and starts of adapters go together");
  if (!of_rows) return;
  rows = numbers_of(*of_rows, "rows");
  starts = numbers_of(*of_starts, "starts");
  for (const int64_t row : rows) {
    STD_TORCH_CHECK(row >= 0 && row < tokens, "row ", row, " is not among the ", tokens, " rows of x");
  }
  const bool ascend = std::is_sorted(starts.begin(), starts.end()) && !starts.empty() && starts.front() >= 0;
  STD_TORCH_CHECK(ascend && starts.back() <= static_cast<int64_t>(rows.size()), "starts leave rows");
}

void AdapterRows::keep(const int64_t* tokens, int64_t count) {
  std::vector<int64_t> kept;
  int64_t begin = starts.empty() ? 0 : starts.front();
  for (size_t i = 0; i < adapters(); ++i) {
    starts[i] = static_cast<int64_t>(kept.size());
    for (; begin < starts[i + 1]; ++begin) {
      const int64_t* found = std::lower_bound(tokens, tokens + count, rows[begin]);
      if (found != tokens + count && *found == rows[begin]) kept.push_back(found - tokens);
    }
  }
  if (!starts.empty()) starts.back() = static_cast<int64_t>(kept.size());
  rows = std::move(kept);
}

void add_adapters(const Kernels& kernels, char* product, int64_t width, const char* x, int64_t depth,
                  const AdapterRows& rows, const AdapterPairs& pairs) {
  for (size_t i = 0; i < rows.adapters(); ++i) {
    const int64_t count = rows.starts[i + 1] - rows.starts[i];
    if (count == 0 || pairs.downs[i].numel() == 0) continue;
    add_adapter(kernels, product, width, x, depth, rows.rows.data() + rows.starts[i], count, pairs.downs[i],
                pairs.ups[i]);
  }
}

void add_adapters(const Tensor& product, const Tensor& x, const Tensor& rows, const Tensor& starts,
                  const std::vector<Tensor>& downs, const std::vector<Tensor>& ups) {
  const Kernels& kernels = kernels_for(x, "x");
  check_contiguous(x, "x", 2);
  check_contiguous(product, "product", 2);
  check_dtype(product, "product", x.scalar_type());
  check_size(product, "product", 0, x.size(0));
  check_size(starts, "starts", 0, static_cast<int64_t>(downs.size()) + 1);
  STD_TORCH_CHECK(downs.size() == ups.size(), "downs and ups go together");
  add_adapters(kernels, static_cast<char*>(product.mutable_data_ptr()), product.size(1),
               static_cast<const char*>(x.data_ptr()), x.size(1), AdapterRows(rows, starts, x.size(0)),
               {downs.data(), ups.data()});
}

}  // namespace kvllm
