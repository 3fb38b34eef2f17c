// Products with packed weights, without tensors.
#pragma once

#include "ops.h"

namespace kvllm {

// A packed weight: `[tiles, words, kTileColumns, channels of a word]`, of float32, bfloat16 or int8; or of int32
// without the last dimension, where a word is eight integers of 4 bits, the lowest bits first. With scales of half
// precision it has a GroupedForm: int32 kNibbles, in whose words channel i + 4 shares a byte with channel i; uint8
// kSixBits, of which three words are sixteen channels: four of these in six bits of each, and the last four in the two
// others of all three, the lowest ones first; int8 kWide.
struct PackedMatrix {
  int bits;
  int64_t tiles, words, depth, columns;
  char* data;
  const float* scales;  // [tiles, depth / group, kTileColumns] for integers
  const uint16_t* group_scales;
  GroupedForm form;
  bool minimums;
  int64_t group;

  // Raises an error if the tensors are none, or do not have `columns` columns, at least all but a tile's.
  PackedMatrix(const Tensor& tensor, const std::optional<Tensor>& scales, int64_t columns);

  // Reads the scales, whose groups divide the words.
  void set_scales(const Tensor& tensor);

  // The weight of the first columns alone.
  PackedMatrix first_columns(int64_t count) const;

  // The first word of a row of the weight; the next ones follow at a distance of kTileRowBytes.
  char* row(int64_t row) const;

  // The integer of a channel that has a GroupedForm, in a row whose first word is `row`.
  int integer(const char* row, int64_t channel) const;
};

// Bytes of a row of the weight that lie together.
constexpr int64_t kWordBytes = 4;
constexpr int64_t kTileRowBytes = kTileColumns * kWordBytes;

// Bytes of x [rows, depth] as operands of a product with a weight; 0 if operands are what x is.
int64_t operand_bytes(const Kernels& kernels, const PackedMatrix& weight, int64_t rows);

// out [rows, columns] <- x [rows, depth] times a weight, plus bias [columns], or none if it is null. `memory` has room
// for the operands. `next`: the weight that is multiplied next, if that is known; threads fetch its beginning while
// they wait.
void multiply(const Kernels& kernels, const void* x, int64_t rows, const PackedMatrix& weight, const void* bias,
              void* out, void* memory, const PackedMatrix* next = nullptr);

}  // namespace kvllm
