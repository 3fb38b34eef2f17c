// Products of adapters, added to those of the matrices that they change.
#include <cstring>

#include "linear.h"

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

}  // namespace

void add_adapters(const Tensor& product, const Tensor& x, const Tensor& rows, const Tensor& starts,
                  const std::vector<Tensor>& downs, const std::vector<Tensor>& ups) {
  const Kernels& kernels = kernels_for(x, "x");
  check_contiguous(x, "x", 2);
  check_contiguous(product, "product", 2);
  check_contiguous(rows, "rows", 1);
  check_contiguous(starts, "starts", 1);
  check_dtype(product, "product", x.scalar_type());
  check_dtype(rows, "rows", ScalarType::Long);
  check_dtype(starts, "starts", ScalarType::Long);
  check_size(product, "product", 0, x.size(0));
  check_size(starts, "starts", 0, static_cast<int64_t>(downs.size()) + 1);
  STD_TORCH_CHECK(downs.size() == ups.size(), "downs and ups go together");
  const int64_t width = product.size(1), row_bytes = width * kernels.element_size;
  const int64_t* row = rows.const_data_ptr<int64_t>();
  const int64_t* start = starts.const_data_ptr<int64_t>();
  for (size_t group = 0; group < downs.size(); ++group) {
    const int64_t begin = start[group], count = start[group + 1] - begin;
    STD_TORCH_CHECK(begin >= 0 && count >= 0 && begin + count <= rows.size(0), "starts leave rows");
    if (count == 0) continue;
    const int64_t low = ups[group].size(1) * (kWordBytes / kernels.element_size);
    const PackedMatrix down(downs[group], std::nullopt, low);
    const int64_t columns = ups[group].size(0) * kTileColumns;
    STD_TORCH_CHECK(width <= columns, "product has ", width, " columns, and ups have ", columns);
    const PackedMatrix up = PackedMatrix(ups[group], std::nullopt, columns).first_columns(width);
    check_size(x, "x", 1, down.depth);
    const AdapterMemory memory = memory_for(kernels, down, up, count);
    const int64_t x_bytes = down.depth * kernels.element_size;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = row[begin + i];
      STD_TORCH_CHECK(token >= 0 && token < x.size(0), "row ", token, " is not among the ", x.size(0), " rows of x");
      std::memcpy(memory.x + i * x_bytes, static_cast<const char*>(x.data_ptr()) + token * x_bytes, x_bytes);
    }
    multiply(kernels, memory.x, count, down, nullptr, memory.low, memory.operands);
    multiply(kernels, memory.low, count, up, nullptr, memory.high, memory.operands);
    for (int64_t i = 0; i < count; ++i) {
      char* into = static_cast<char*>(product.mutable_data_ptr()) + row[begin + i] * row_bytes;
      const char* from = memory.high + i * row_bytes;
      if (kernels.element_size == sizeof(float)) {
        add_row<float>(into, from, width);
      } else {
        add_row<BFloat16>(into, from, width);
      }
    }
  }
}

}  // namespace kvllm
