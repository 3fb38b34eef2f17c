// Products with weights that were packed when they were loaded, and the rows of such weights.
#include <torch/headeronly/util/Half.h>

#include <cstring>

#include "linear.h"

namespace kvllm {
namespace {

int64_t channels_per_word(const Tensor& tensor) { return kWordBytes / tensor.element_size(); }

// Tiles of a part. Parts are small, so that no thread waits long for the last one of another.
constexpr int64_t kPartTiles = 4;

int64_t part_bytes(const PackedMatrix& weight) { return kPartTiles * weight.words * kTileRowBytes; }

int64_t tile_parts(const PackedMatrix& weight) { return (weight.tiles + kPartTiles - 1) / kPartTiles; }

const ProductKernels& product_kernels(const Kernels& kernels, const PackedMatrix& weight) {
  if (weight.group_scales != nullptr) {
    return kernels.product_grouped[static_cast<int>(weight.form)][weight.minimums ? 1 : 0];
  }
  return weight.bits == 8 ? kernels.product_int8 : weight.bits == 4 ? kernels.product_int4 : kernels.product;
}

// Size of a row of operands, in their numbers and in bytes: float, or those of a product in integers.
struct OperandRow {
  int64_t stride, bytes;

  explicit OperandRow(const PackedMatrix& weight)
      : stride(weight.depth), bytes(weight.depth * static_cast<int64_t>(sizeof(float))) {
    if (weight.group_scales != nullptr) {
      stride = bytes = weight.depth + weight.depth / weight.group * static_cast<int64_t>(sizeof(OperandGroup));
      return;
    }
    if (weight.scales == nullptr) return;
    stride = weight.depth + 2 * integer_blocks(weight.depth, weight.group);
    bytes = stride * static_cast<int64_t>(sizeof(int16_t));
  }
};

}  // namespace

PackedMatrix::PackedMatrix(const Tensor& tensor, const std::optional<Tensor>& scale_tensor, int64_t columns)
    : columns(columns), scales(nullptr), group_scales(nullptr), form(), minimums(false), group(0) {
  const bool halves = scale_tensor && scale_tensor->scalar_type() == ScalarType::Half;
  const bool six_bits = tensor.scalar_type() == ScalarType::Byte && halves;
  const bool nibbles = tensor.scalar_type() == ScalarType::Int;
  const bool bytes = tensor.scalar_type() == ScalarType::Char || six_bits;
  form = nibbles ? GroupedForm::kNibbles : six_bits ? GroupedForm::kSixBits : GroupedForm::kWide;
  if (!nibbles && !bytes) kernels_for(tensor, "packed");
  bits = nibbles ? 4 : six_bits ? 6 : 8 * static_cast<int>(tensor.element_size());
  check_contiguous(tensor, "packed", nibbles ? 3 : 4);
  check_size(tensor, "packed", 2, kTileColumns);
  if (!nibbles) check_size(tensor, "packed", 3, channels_per_word(tensor));
  tiles = tensor.size(0);
  words = tensor.size(1);
  depth = words * 32 / bits;
  data = static_cast<char*>(tensor.mutable_data_ptr());
  STD_TORCH_CHECK(columns > (tiles - 1) * kTileColumns && columns <= tiles * kTileColumns, columns,
                  " columns do not fill the ", tiles, " tiles of packed");
  STD_TORCH_CHECK(scale_tensor.has_value() == (nibbles || bytes), "scales and weights of integers go together");
  if (scale_tensor) set_scales(*scale_tensor);
}

void PackedMatrix::set_scales(const Tensor& tensor) {
  const bool halves = tensor.scalar_type() == ScalarType::Half;
  check_contiguous(tensor, "scales", halves ? 4 : 3);
  if (!halves) check_dtype(tensor, "scales", ScalarType::Float);
  check_size(tensor, "scales", 0, tiles);
  check_size(tensor, "scales", halves ? 3 : 2, kTileColumns);
  const int64_t groups = tensor.size(1);
  STD_TORCH_CHECK(groups > 0 && words % groups == 0, groups, " groups do not divide ", words, " words of packed");
  group = depth / groups;
  if (!halves) {
    scales = tensor.const_data_ptr<float>();
    return;
  }
  STD_TORCH_CHECK(group == 16 || group == 32, "scales of half precision are for groups of 16 or 32, not of ", group);
  STD_TORCH_CHECK(tensor.size(2) == 1 || tensor.size(2) == 2, "scales has ", tensor.size(2),
                  " numbers for a group: it must have a scale, and maybe a minimum");
  group_scales = static_cast<const uint16_t*>(tensor.data_ptr());
  minimums = tensor.size(2) == 2;
}

PackedMatrix PackedMatrix::first_columns(int64_t count) const {
  PackedMatrix part = *this;
  part.columns = count;
  part.tiles = (count + kTileColumns - 1) / kTileColumns;
  return part;
}

char* PackedMatrix::row(int64_t row) const {
  return data + row / kTileColumns * words * kTileRowBytes + row % kTileColumns * kWordBytes;
}

int PackedMatrix::integer(const char* row, int64_t channel) const {
  const auto byte = [&](int64_t word) {
    return static_cast<uint8_t>(row[word * kTileRowBytes + channel % kWordBytes]);
  };
  if (form == GroupedForm::kWide) return static_cast<int8_t>(byte(channel / 4));
  const int excess = minimums ? 0 : bits == 4 ? 8 : 32;
  if (form == GroupedForm::kNibbles) return ((byte(channel / 8) >> channel / 4 % 2 * 4) & 15) - excess;
  const int64_t sixteen = channel / 16 * 3, place = channel / 4 % 4;
  if (place < 3) return (byte(sixteen + place) & 63) - excess;
  return ((byte(sixteen) >> 6) | (byte(sixteen + 1) >> 6) << 2 | (byte(sixteen + 2) >> 6) << 4) - excess;
}

int64_t operand_bytes(const Kernels& kernels, const PackedMatrix& weight, int64_t rows) {
  return product_kernels(kernels, weight).prepare == nullptr ? 0 : rows * OperandRow(weight).bytes;
}

void multiply(const Kernels& kernels, const void* x, int64_t rows, const PackedMatrix& weight, const void* bias,
              void* out, void* memory, const PackedMatrix* next) {
  const ProductKernels& run = product_kernels(kernels, weight);
  Product product{
      .x = x,
      .x_stride = weight.depth,
      .weight = weight.data,
      .scales = weight.scales,
      .group_scales = weight.group_scales,
      .minimums = weight.minimums,
      .group = weight.group,
      .depth = weight.depth,
      .bias = bias,
      .out = out,
      .out_stride = weight.columns,
      .columns = weight.columns,
  };
  if (run.prepare != nullptr) {
    const OperandRow operands(weight);
    const int64_t row_bytes = weight.depth * kernels.element_size;
    for_rows(rows, weight.depth, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        run.prepare(static_cast<const char*>(x) + row * row_bytes, weight.depth, weight.group,
                    static_cast<char*>(memory) + row * operands.bytes);
      }
    });
    product.x = memory;
    product.x_stride = operands.stride;
  }
  const int64_t part_rows = run.part_rows(rows, weight.depth), row_parts = (rows + part_rows - 1) / part_rows;
  const int64_t parts = tile_parts(weight);
  const auto upcoming = next == nullptr ? Upcoming{} : Upcoming{next->data, tile_parts(*next), part_bytes(*next)};
  for_each_in_shares(row_parts * parts, upcoming, [&](int64_t i) {
    const int64_t row = i / parts * part_rows, tile = i % parts * kPartTiles;
    run.multiply(product, {row, std::min(row + part_rows, rows), tile, std::min(tile + kPartTiles, weight.tiles)},
                 scratch(kProductWorkspace));
  });
}

namespace {

// tiles[t, word, lane] <- rows[16 * t + lane - first, word], for the tiles that have such rows. A cache line of each
// row at a time: those of sixteen rows that lie a power of two apart would push each other out of the cache.
template <class Word>
void copy_rows(const Word* rows, int64_t num_rows, int64_t words, int64_t first, Word* tiles) {
  constexpr int64_t kLineWords = 64 / sizeof(Word);
  const int64_t begin_tile = first / kTileColumns, end_row = first + num_rows;
  const auto copy_tile = [&](int64_t tile) {
    Word* const into = tiles + tile * words * kTileColumns;
    for (int64_t line = 0; line < words; line += kLineWords) {
      const int64_t line_end = std::min(words, line + kLineWords);
      for (int64_t lane = 0; lane < kTileColumns; ++lane) {
        const int64_t row = tile * kTileColumns + lane;
        if (row < first || row >= end_row) continue;
        const Word* const from = rows + (row - first) * words;
        for (int64_t word = line; word < line_end; ++word) into[word * kTileColumns + lane] = from[word];
      }
    }
  };
  for_rows((end_row + kTileColumns - 1) / kTileColumns - begin_tile, words * kTileColumns,
           [&](int64_t begin, int64_t end) {
             for (int64_t tile = begin_tile + begin; tile < begin_tile + end; ++tile) copy_tile(tile);
           });
}

}  // namespace

void tile_rows(const Tensor& rows, int64_t first, const Tensor& tiles) {
  check_contiguous(rows, "rows", 2);
  check_contiguous(tiles, "tiles", 3);
  check_dtype(rows, "rows", tiles.scalar_type());
  check_size(tiles, "tiles", 1, rows.size(1));
  check_size(tiles, "tiles", 2, kTileColumns);
  const int64_t count = rows.size(0), words = rows.size(1);
  STD_TORCH_CHECK(first >= 0 && first + count <= tiles.size(0) * kTileColumns, "rows ", first, " to ", first + count,
                  " are not among the ", tiles.size(0) * kTileColumns, " rows of tiles");
  if (rows.element_size() == 2) {
    copy_rows(static_cast<const uint16_t*>(rows.data_ptr()), count, words, first,
              static_cast<uint16_t*>(tiles.mutable_data_ptr()));
  } else {
    STD_TORCH_CHECK(rows.element_size() == 4, "rows have elements of ", rows.element_size(), " bytes, not of 2 or 4");
    copy_rows(static_cast<const uint32_t*>(rows.data_ptr()), count, words, first,
              static_cast<uint32_t*>(tiles.mutable_data_ptr()));
  }
}

Tensor pack_weight(const Tensor& weight) {
  kernels_for(weight, "weight");
  check_contiguous(weight, "weight", 2);
  const int64_t rows = weight.size(0), channels = channels_per_word(weight), words = weight.size(1) / channels;
  STD_TORCH_CHECK(weight.size(1) > 0 && weight.size(1) % channels == 0, "weight has ", weight.size(1),
                  " columns: they must be a multiple of ", channels);
  const int64_t tiles = (rows + kTileColumns - 1) / kTileColumns;
  Tensor packed = empty_like(weight, {tiles, words, kTileColumns, channels});
  if (rows % kTileColumns != 0) {
    std::memset(static_cast<char*>(packed.mutable_data_ptr()) + (tiles - 1) * words * kTileRowBytes, 0,
                words * kTileRowBytes);
  }
  copy_rows(static_cast<const uint32_t*>(weight.data_ptr()), rows, words, 0,
            static_cast<uint32_t*>(packed.mutable_data_ptr()));
  return packed;
}

namespace {

const int64_t* check_rows(const Tensor& indices, const PackedMatrix& weight) {
  check_contiguous(indices, "indices", 1);
  check_dtype(indices, "indices", ScalarType::Long);
  const int64_t* index = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.size(0); ++i) {
    STD_TORCH_CHECK(index[i] >= 0 && index[i] < weight.columns, "row ", index[i], " is not among the ", weight.columns,
                    " rows of packed");
  }
  return index;
}

}  // namespace

Tensor dequantize_rows(const Tensor& packed, const Tensor& scales, const Tensor& indices) {
  const PackedMatrix from(packed, scales, packed.size(0) * kTileColumns);
  STD_TORCH_CHECK(from.group_scales != nullptr, "scales have not half precision: they are not those of small groups");
  const int64_t* index = check_rows(indices, from);
  const int64_t count = indices.size(0), groups = from.depth / from.group, numbers = from.minimums ? 2 : 1;
  Tensor out = empty(static_cast<int32_t>(ScalarType::Float), {count, from.depth});
  float* into = out.mutable_data_ptr<float>();
  for_rows(count, from.depth, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* row = from.row(index[i]);
      const auto* of_tile = reinterpret_cast<const torch::headeronly::Half*>(from.group_scales) +
                            index[i] / kTileColumns * groups * numbers * kTileColumns + index[i] % kTileColumns;
      for (int64_t channel = 0; channel < from.depth; ++channel) {
        const auto* scale = of_tile + channel / from.group * numbers * kTileColumns;
        const float product = static_cast<float>(from.integer(row, channel)) * static_cast<float>(*scale);
        into[i * from.depth + channel] = from.minimums ? product - static_cast<float>(scale[kTileColumns]) : product;
      }
    }
  });
  return out;
}

Tensor unpack_rows(const Tensor& packed, const Tensor& indices) {
  const PackedMatrix from(packed, std::nullopt, packed.size(0) * kTileColumns);
  const int64_t* index = check_rows(indices, from);
  const int64_t count = indices.size(0);
  Tensor out = empty_like(packed, {count, from.depth});
  char* into = static_cast<char*>(out.mutable_data_ptr());
  for_rows(count, from.depth, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* row = from.row(index[i]);
      for (int64_t word = 0; word < from.words; ++word) {
        std::memcpy(into + (i * from.words + word) * kWordBytes, row + word * kTileRowBytes, kWordBytes);
      }
    }
  });
  return out;
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
                     const std::optional<Tensor>& bias, int64_t out_features) {
  const Kernels& kernels = kernels_for(x, "x");
  check_contiguous(x, "x", 2);
  const PackedMatrix weight(packed, scales, out_features);
  if (!scales) check_dtype(packed, "packed", x.scalar_type());
  check_size(x, "x", 1, weight.depth);
  if (bias) {
    check_contiguous(*bias, "bias", 1);
    check_dtype(*bias, "bias", x.scalar_type());
    check_size(*bias, "bias", 0, out_features);
  }
  Tensor out = empty_like(x, {x.size(0), out_features});
  if (x.size(0) > 0) {
    const int64_t rows = x.size(0);
    float* memory = scratch<1>(operand_bytes(kernels, weight, rows) / static_cast<int64_t>(sizeof(float)));
    multiply(kernels, x.data_ptr(), rows, weight, bias ? bias->data_ptr() : nullptr, out.mutable_data_ptr(), memory);
  }
  return out;
}

}  // namespace kvllm
