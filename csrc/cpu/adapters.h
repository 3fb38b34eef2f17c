// Products of adapters, added to those of the matrices that they change.
#pragma once

#include <optional>
#include <vector>

#include "linear.h"

namespace kvllm {

// The tokens of a pass that have adapters, those of one adapter after those of another: adapter i has
// `rows[starts[i]] .. rows[starts[i + 1] - 1]`.
struct AdapterRows {
  std::vector<int64_t> rows, starts;

  // None, if the tensors are none. Raises an error unless the rows are among the `tokens` of the pass.
  AdapterRows(const std::optional<Tensor>& rows, const std::optional<Tensor>& starts, int64_t tokens);

  size_t adapters() const { return starts.empty() ? 0 : starts.size() - 1; }

  // What stays of them if only `count` tokens do, whose numbers ascend.
  void keep(const int64_t* tokens, int64_t count);
};

// Both matrices of each adapter, packed. Those of an adapter that does not change the matrix have no elements.
struct AdapterPairs {
  const Tensor* downs;
  const Tensor* ups;
};

// Adds to product `[tokens, width]` those of x `[tokens, depth]`.
void add_adapters(const Kernels& kernels, char* product, int64_t width, const char* x, int64_t depth,
                  const AdapterRows& rows, const AdapterPairs& pairs);

}  // namespace kvllm
