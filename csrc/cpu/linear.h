// Products with packed weights, without tensors.
#pragma once

#include "ops.h"

namespace kvllm {

// A packed weight (see pack_weight): `[tiles, words, kTileColumns, channels of a word]`.
struct PackedMatrix {
  int64_t tiles, words, depth, columns;
  char* data;

  // Raises an error if the tensor is none, or does not have `columns` columns, at least all but a tile's.
  PackedMatrix(const Tensor& tensor, int64_t columns);

  // The first word of a row of the weight; the next ones follow at a distance of kTileRowBytes.
  char* row(int64_t row) const;
};

// Bytes of a row of the weight that lie together: two bfloat16, or one float.
constexpr int64_t kWordBytes = 4;
constexpr int64_t kTileRowBytes = kTileColumns * kWordBytes;

// out [rows, columns] <- operands [rows, depth] times a weight, plus bias [columns], or none if it is null.
void multiply(const Kernels& kernels, const void* operands, int64_t rows, const PackedMatrix& weight, const void* bias,
              void* out);

}  // namespace kvllm
