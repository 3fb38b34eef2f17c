// The hot loops, compiled once per instruction set and chosen at run time.
//
// This header is seen by translation units that are compiled for AVX-512. It therefore holds plain declarations only:
// an inline function emitted there could be the copy that the linker keeps for everyone, and fail on an older
// processor.
#pragma once

#include <stdint.h>

namespace kvllm {

struct BFloat16 {
  uint16_t bits;
};

// The paged cache holds vectors of the dtype of queries, or codes with a word of 32 bits for each vector: the scale, a
// float, of kInt8, kInt6 and kFloat8; the scale and the zero point of kInt4, each a bfloat16 (docs/kv-cache-dtypes.md).
// kInt6Hadamard and kInt4Hadamard are those of vectors that were multiplied with a Hadamard matrix: the kernels below
// rotate queries and outputs. The bytes of one head in one block are the codes of its vectors, then their words.
enum class VectorFormat { kPlain, kInt8, kInt4, kFloat8, kInt4Hadamard, kInt6, kInt6Hadamard };
constexpr int kVectorFormats = 7;
constexpr int kScaleBytes = 4;

// Keys and values lie apart, each with a format of its own.
struct KVFormat {
  VectorFormat keys, values;
};

constexpr int64_t code_bytes(VectorFormat format, int64_t head_dim) {
  if (format == VectorFormat::kInt6 || format == VectorFormat::kInt6Hadamard) return head_dim * 6 / 8;
  return format == VectorFormat::kInt4 || format == VectorFormat::kInt4Hadamard ? head_dim / 2 : head_dim;
}
// Bytes of a vector with its word; `element_size` is that of vectors which are no codes.
constexpr int64_t stored_bytes(VectorFormat format, int64_t head_dim, int64_t element_size) {
  return format == VectorFormat::kPlain ? head_dim * element_size : code_bytes(format, head_dim) + kScaleBytes;
}

// Channels of a vector are whole vectors of floats, whatever the instruction set, and a query is one block of integers.
constexpr int kCodeChannels = 32;
constexpr int kMaxCodeChannels = 256;

// What codes of 6 bits have above the integers that they stand for, so that none is negative.
constexpr int kExcess6 = 32;

// One byte of codes that are integers. Two codes of 4 bits share a byte, the even one has the low bits. Codes of 6 bits
// are their low 4 bits like these, for the whole vector, and then their high 2 bits, four codes to a byte.
template <int kBitsOfCode>
struct Codes {
  static constexpr int kBits = kBitsOfCode;
  uint8_t bits;
};

// A code that is a number: a sign, 4 bits of exponent and 3 of mantissa, and no infinity.
struct Float8 {
  static constexpr int kBits = 8;
  uint8_t bits;
};

// KV pairs that attention handles at once, and pairs after which it closes a partial softmax. Both count from pair 0
// of the sequence, so the order of every sum depends on nothing else.
constexpr int kTilePairs = 64;
constexpr int kSegmentPairs = 512;

// Queries (query tokens times heads) that share one pass over keys and values.
constexpr int kMaxQueries = 64;

// Memory that attention works in, in rows of head_dim floats: queries (as integers, two rows each), packed keys,
// decoded values, and a partial softmax, whose rows have two floats more.
constexpr int kPackedRow = 2 * kMaxQueries;
constexpr int kDecodedRow = kPackedRow + kTilePairs;
constexpr int kPartialRow = kDecodedRow + kTilePairs;
constexpr int kWorkspaceRows = kPartialRow + kMaxQueries;

// Memory that attention mass works in: all keys packed, scores and channels of four queries.
constexpr int64_t mass_workspace_floats(int64_t num_keys, int64_t head_dim) {
  const int64_t padded = (num_keys + kTilePairs - 1) / kTilePairs * kTilePairs;
  return padded * head_dim + 4 * padded + 4 * head_dim;
}

// Memory that key resemblance works in: all keys packed, a tile of them, four rows of cosines, sums.
constexpr int64_t resemblance_workspace_floats(int64_t num_keys, int64_t head_dim) {
  const int64_t padded = (num_keys + kTilePairs - 1) / kTilePairs * kTilePairs;
  return (padded + kTilePairs) * head_dim + 5 * padded;
}

// Keys and values of one KV head of one sequence. Pairs are counted without those that were evicted from this head
// and not from others: pair `evicted_begin` lies `num_evicted` places after the one before.
struct PagedHead {
  const void* keys;  // the head's first vector in block 0
  const void* values;
  int64_t key_stride;  // elements of keys from a block to the next; bytes where they are codes
  int64_t value_stride;
  const int32_t* block_table;
  int block_size;
  int head_dim;
  int evicted_begin;
  int num_evicted;
};

// KV pairs begin .. end - 1 of a head; `begin` is a multiple of kTilePairs.
struct PairRange {
  PagedHead head;
  int begin;
  int end;
};

// A window that is longer than any sequence.
constexpr int kNoWindow = 1 << 30;

// Queries of that sequence and head. Query i attends the KV pairs first[i] .. last[i], which do not decrease; first[i]
// may be below 0. Scores are bounded by `soft_cap`, unless it is 0. Query i has a learned score sinks[i % group] in its
// softmax, unless `sinks` is null. Their scores of the pairs from `kept_begin` on are kept in rows of `kept_stride`
// floats, unless `kept_scores` is null.
struct QueryTile {
  int count;
  int group;
  float soft_cap;
  const float* sinks;
  float* kept_scores;
  int kept_begin;
  int kept_stride;
  const void* queries[kMaxQueries];
  void* outputs[kMaxQueries];
  int first[kMaxQueries];
  int last[kMaxQueries];
};

// Softmax over some of the KV pairs, not yet normalized: [count], [count], [count, head_dim].
struct PartialSoftmax {
  float* max;
  float* sum;
  float* weighted_values;
};

struct Rotary {
  void* qkv;
  int64_t row_stride;
  const int64_t* positions;
  const float* cos_sin;
  int num_query_heads;
  int num_kv_heads;
  int head_dim;
  const void* query_weight;  // null: no normalization
  const void* key_weight;
  float eps;
};

// Float weights multiply before a result is rounded, which happens once; others are of the dtype of the rows.
struct NormKernels {
  void (*rms_norm)(const void* x, const void* weight, void* out, int64_t rows, int64_t width, float eps);
  void (*add_rms_norm)(void* residual, const void* x, const void* weight, void* out, int64_t rows, int64_t width,
                       float eps);
  void (*rotary)(const Rotary& arguments, int64_t begin, int64_t end);
};

enum class GatedActivation { kSilu, kGelu };

// Tokens of one sequence: rows of x `x_stride` apart, `out` [tokens, channels]. filter: [taps, channels], that of the
// newest token last. inputs: [taps - 1, channels], those before the first token, then before the next one. silu: of the
// results.
struct Convolution {
  const void* x;
  int64_t x_stride;
  const void* filter;
  void* inputs;
  void* out;
  int64_t tokens, taps, channels;
  bool silu;
};

// Tokens of one head of a sequence. Rows of queries, keys and values are `stride` apart, decays (factors of the state)
// and strengths `control_stride`, rows of `out` `out_stride`. state: [key_dim, value_dim].
struct GatedDelta {
  const void* queries;
  const void* keys;
  const void* values;
  int64_t stride;
  const float* decays;
  const float* strengths;
  int64_t control_stride;
  float* state;
  void* out;
  int64_t out_stride;
  int64_t tokens, key_dim, value_dim;
};
// Tokens whose queries and keys are scaled before any of them changes the state, and floats for these.
constexpr int64_t kDeltaTokens = 32;
constexpr int64_t delta_workspace_floats(int64_t key_dim) { return 2 * kDeltaTokens * key_dim; }

// Columns of a packed weight that lie together.
constexpr int kTileColumns = 16;

// Rows that a part of a product has at most.
constexpr int kMaxPartRows = 96;

// Channels of a weight that all rows pass before the next ones: they stay in the first cache.
constexpr int64_t kBlockChannels = 256;

// Operands of a product in integers: a row has `depth` of 16 bits, then a float scale for each of its blocks. A block
// is kBlockChannels channels, or less at the end of a group.
constexpr int64_t integer_blocks(int64_t depth, int64_t group) {
  return depth / group * ((group + kBlockChannels - 1) / kBlockChannels);
}

// How weights with a scale of half precision for each group are held: integers of 4 bits, integers below 64 in a byte
// each, or with a sign in all 8 bits. Those of the first two mean 8 or 32 less, unless groups have minimums.
enum class GroupedForm { kNibbles, kSixBits, kWide };
constexpr int kGroupedForms = 3;

// Operands of a product with such weights: a row has `depth` of 8 bits, then this for each group.
struct OperandGroup {
  float scale;
  int32_t initial;     // what the sum of products begins with: it takes away what weights have too much
  float negative_sum;  // of the channels that the operands mean
};

// out [rows, columns] <- x [rows, depth] times a packed weight, plus a bias [columns], or none.
struct Product {
  const void* x;                 // operands, as `prepare` makes them
  int64_t x_stride;              // of their numbers from a row to the next
  const void* weight;            // [tiles, depth / c, kTileColumns, c], c channels in 32 bits
  const float* scales;           // [tiles, depth / group, kTileColumns]; null unless the weight is of integers
  const uint16_t* group_scales;  // [tiles, depth / group, 1 or 2, kTileColumns]; null unless it has a GroupedForm
  bool minimums;                 // the second of these, which are taken away from weights
  int64_t group;
  int64_t depth;
  const void* bias;
  void* out;
  int64_t out_stride;
  int64_t columns;
};
struct ProductPart {
  int64_t begin_row, end_row;  // at most kMaxPartRows
  int64_t begin_tile, end_tile;
};
// Floats of memory that a part works in.
constexpr int64_t kProductWorkspace = kMaxPartRows * 4 * kTileColumns;

struct ProductKernels {
  // A row of x, `[depth]`, as operands of a product with a weight of this group; null if operands are what x is.
  void (*prepare)(const void* x, int64_t depth, int64_t group, void* operands);
  // Rows that a part of a product of `rows` should have.
  int64_t (*part_rows)(int64_t rows, int64_t depth);
  void (*multiply)(const Product& arguments, const ProductPart& part, float* workspace);
};

// What the queries of one KV head of a sequence attend: scores of `residents` KV pairs and of `dropped_pairs` others,
// in a row for each query. upper: at least the scores that these had before they were stored; it may be `dropped`.
// movable: residents that may change places. Query i has a learned score sinks[i % group] in its softmax, unless
// `sinks` is null.
struct ExchangeHead {
  float* resident;
  float* dropped;
  float* upper;
  const bool* movable;
  const float* sinks;
  int queries;
  int group;
  int residents;
  int dropped_pairs;
  int most;     // exchanges; no more than there are pairs of either kind
  float limit;  // of the share of a query's attention in dropped pairs that ends exchanges; below 0 if there is none
};

// KV pairs that a choice keeps: `total`, of which the best `candidates` come first, and then what lies in the most
// rewarding `chunks` gaps between these, each shorter than `max_chunk`; none if there are no chunks.
struct ChunkBudget {
  int total;
  int candidates;
  int chunks;
  int max_chunk;
};

// Integers that a choice among `count` scores works in.
constexpr int64_t choice_workspace(int64_t count) { return 4 * count + 2; }

// What depends on how the cache holds KV pairs; null for formats of keys and values that no cache has together.
struct KVKernels {
  // Queries against KV pairs, as far as each attends them. The beginning of `following`, which this thread will
  // probably attend next, is prefetched; it may be null. `workspace` has kWorkspaceRows rows.
  void (*attend)(const PairRange& range, const PairRange* following, const QueryTile& tile, float scale,
                 float* workspace, const PartialSoftmax& result);
  void (*finish)(const QueryTile& tile, int head_dim, const PartialSoftmax& total);
  // Puts the weighted values of `count` queries, summed over vectors of the queries' dtype, into the order in which
  // those of this cache are, and rotates them where it holds rotated ones. Null where both are the same.
  void (*reorder)(int count, int head_dim, float* weighted_values);
};

// A number and its place.
struct Largest {
  float number;
  int64_t index;
};

// Pointers are to float or BFloat16, one table for each. Matrices are dense `[rows, width]`.
struct Kernels {
  int element_size;

  KVKernels kv[kVectorFormats][kVectorFormats];  // by the format of keys, and of values
  // By the format of keys: out[query][pair] <- scale * query . key, for queries in rows of `stride` floats. `workspace`
  // is as for `attend`; the values of the range are its keys.
  void (*score_keys[kVectorFormats])(const PairRange& range, const QueryTile& tile, float scale, float* workspace,
                                     float* out, int64_t stride);
  // A vector as codes and the word that holds its scale; null for those that are no codes.
  void (*quantize[kVectorFormats])(const void* vector, int head_dim, void* codes, void* word);
  // out <- a vector times a Hadamard matrix, see hadamard_kernel.h.
  void (*rotate)(const void* vector, int size, float* out);
  void (*merge)(int count, int head_dim, const PartialSoftmax& into, const PartialSoftmax& later);

  // See squares_kernel.h.
  void (*add_squares)(float* scores, int num_queries, int stride, int count, const float* sinks, float* added);

  // Which dropped pairs change places with residents: arriving[i] with leaving[i] for i below `count`. Scores do so,
  // too. Returns the largest bound on the share of a query's attention in dropped pairs, after the exchanges.
  // `workspace` has a float for each pair and three for each query, `arriving` and `leaving` have room for `most`.
  float (*exchange)(const ExchangeHead& head, float* workspace, int32_t* arriving, int32_t* leaving, int* count);

  // The indices of the scores that are kept, ascending, of equal ones the first; `workspace` has choice_workspace.
  void (*choose)(const float* scores, int count, const ChunkBudget& budget, int32_t* workspace, int64_t* kept);

  // The negative cosine of each of some dense keys to the mean of all unit keys. `anchor` has room for one.
  void (*key_differences)(const void* keys, int num_keys, int head_dim, float* anchor, float* differences);

  // The sum of the cosines of each of some dense keys to the others, where each of these leaves out the last one that
  // it resembles by more than `threshold`; one that resembles none leaves out the first if `spare_first`. `workspace`
  // has resemblance_workspace_floats.
  void (*key_resemblance)(const void* keys, int num_keys, int head_dim, float threshold, bool spare_first,
                          float* workspace, float* sums);

  // mass[key] <- sum of the softmax weights, or their squares, that `num_queries` queries give it, each over the first
  // `attended` (one number for each) of `num_keys` dense keys, with a learned score of each in `sinks`, unless that is
  // null. Scores are bounded by `soft_cap`, unless it is 0. `mass` has room for whole tiles of keys, `workspace` for
  // mass_workspace_floats.
  void (*attention_mass)(const void* const* queries, const int* attended, int num_queries, const void* keys,
                         int num_keys, int head_dim, float scale, float soft_cap, const float* sinks, bool squared,
                         float* workspace, float* mass);

  // With weights of the dtype, and of float.
  NormKernels norms[2];
  // The first of the largest of numbers begin .. end - 1; the first NaN where there is one.
  Largest (*largest)(const void* numbers, int64_t begin, int64_t end);
  // By the GatedActivation.
  void (*gated[2])(const void* gate_up, void* out, int64_t rows, int64_t width);
  // See gated_delta_kernel.h: channels begin .. end - 1, and a head.
  void (*convolve)(const Convolution& arguments, int64_t begin, int64_t end);
  void (*gated_delta)(const GatedDelta& rule, float* workspace);

  // With weights of the dtype, of 8 bits and of 4.
  ProductKernels product;
  ProductKernels product_int8;
  ProductKernels product_int4;
  // With a GroupedForm: the second ones where groups have minimums.
  ProductKernels product_grouped[kGroupedForms][2];
};

struct KernelSet {
  Kernels float32;
  Kernels bfloat16;
};

extern const KernelSet kBaselineKernels;
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
extern const KernelSet kAvx512VnniKernels;
extern const KernelSet kAvx512Bf16Kernels;

// The kernels of the level before, and products of their own.
KernelSet make_amx_kernels();
KernelSet make_arm_bf16_kernels();

}  // namespace kvllm
