// Products of one level of instruction sets, without torch: against sums in double, and a row beside any other rows.
//
//     check_products LEVEL
//
// The status is 77 where the processor lacks the level.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "../../csrc/cpu/isa.h"

namespace {

using namespace kvllm;

constexpr int64_t kMostRows = 100;
constexpr int kGuard = 64;  // numbers after an output that must stay as they are

int failures = 0;
int64_t numbers_checked = 0, rows_checked = 0;

void expect(bool condition, const std::string& what) {
  if (!condition && ++failures <= 10) std::printf("failed: %s\n", what.c_str());
}

float to_float(float x) { return x; }
float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
template <class T>
T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  }
}

template <class T>
uint32_t bits_of(T number) {
  uint32_t bits = 0;
  std::memcpy(&bits, &number, sizeof(number));
  return bits;
}

template <class T>
std::vector<T> normal_numbers(int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<T> numbers(count);
  for (T& number : numbers) number = from_float<T>(normal(engine));
  return numbers;
}

struct Shape {
  int64_t columns, depth, group;  // group: 0 for weights of a float dtype
  int bits;
};

// A weight as PackedMatrix describes it, and its values [columns, depth].
struct Weight {
  Shape shape;
  std::vector<double> values;
  std::vector<uint32_t> words;
  std::vector<float> scales;

  int64_t tiles() const { return (shape.columns + kTileColumns - 1) / kTileColumns; }
  uint32_t& word(int64_t column, int64_t channel) {
    const int64_t word = channel * shape.bits / 32, depth_words = shape.depth * shape.bits / 32;
    return words[(column / kTileColumns * depth_words + word) * kTileColumns + column % kTileColumns];
  }
};

// Bits of a random weight, with its value before the scale.
template <class T>
std::pair<uint32_t, double> random_bits(std::mt19937& engine, int bits) {
  if (bits < 16 && bits < static_cast<int>(8 * sizeof(T))) {
    const int low = -(1 << (bits - 1)), value = low + static_cast<int>(engine() % (1u << bits));
    return {static_cast<uint32_t>(value) & ((1u << bits) - 1), value};
  }
  const T number = from_float<T>(std::normal_distribution<float>()(engine));
  return {bits_of(number), to_float(number)};
}

// Odd columns of a float dtype have the negative of their first half as their second one.
template <class T>
Weight random_weight(const Shape& shape) {
  Weight weight{shape, std::vector<double>(shape.columns * shape.depth), {}, {}};
  weight.words.resize(weight.tiles() * kTileColumns * shape.depth * shape.bits / 32);
  std::mt19937 engine(static_cast<unsigned>(shape.depth + shape.bits));
  const int64_t groups = shape.group == 0 ? 0 : shape.depth / shape.group;
  weight.scales.resize(weight.tiles() * kTileColumns * groups);
  for (float& scale : weight.scales) scale = 0.001f * static_cast<float>(1 + engine() % 64);
  for (int64_t column = 0; column < shape.columns; ++column) {
    for (int64_t channel = 0; channel < shape.depth; ++channel) {
      auto [bits, value] = random_bits<T>(engine, shape.bits);
      if (groups == 0 && column % 2 == 1 && channel >= shape.depth / 2) {
        const int64_t opposite = channel - shape.depth / 2;
        value = -weight.values[column * shape.depth + opposite];
        bits = bits_of(from_float<T>(static_cast<float>(value)));
      }
      weight.word(column, channel) |= bits << channel * shape.bits % 32;
      if (groups > 0) {
        const int64_t tile_group = column / kTileColumns * groups + channel / shape.group;
        value *= weight.scales[tile_group * kTileColumns + column % kTileColumns];
      }
      weight.values[column * shape.depth + channel] = value;
    }
  }
  return weight;
}

const ProductKernels& product_kernels(const Kernels& kernels, const Shape& shape) {
  return shape.group == 0 ? kernels.product : shape.bits == 8 ? kernels.product_int8 : kernels.product_int4;
}

// Rows of x times a weight, in parts of `part_tiles` tiles.
template <class T>
std::vector<T> multiply(const ProductKernels& kernels, Weight& weight, const T* x, int64_t rows, const T* bias,
                        int64_t part_tiles) {
  const Shape& shape = weight.shape;
  const int64_t columns = shape.columns, depth = shape.depth;
  std::vector<T> out(rows * columns + kGuard, from_float<T>(-7));
  Product product{x,       depth,  weight.words.data(), weight.scales.data(), shape.group, depth, bias, out.data(),
                  columns, columns};
  std::vector<float> operands, workspace(kProductWorkspace + 16);
  if (kernels.prepare != nullptr) {
    const int64_t blocks = shape.group == 0 ? 0 : integer_blocks(depth, shape.group);
    const int64_t row_floats = shape.group == 0 ? depth : depth / 2 + blocks;
    operands.resize(rows * row_floats);
    for (int64_t row = 0; row < rows; ++row) {
      kernels.prepare(x + row * depth, depth, shape.group, operands.data() + row * row_floats);
    }
    product.x = operands.data();
    product.x_stride = shape.group == 0 ? depth : 2 * row_floats;
  }
  const int64_t part_rows = kernels.part_rows(rows, depth);
  expect(part_rows > 0 && part_rows <= kMaxPartRows, "a part has at most kMaxPartRows rows");
  for (int64_t row = 0; row < rows; row += part_rows) {
    for (int64_t tile = 0; tile < weight.tiles(); tile += part_tiles) {
      kernels.multiply(
          product, {row, std::min(row + part_rows, rows), tile, std::min<int64_t>(tile + part_tiles, weight.tiles())},
          workspace.data());
    }
  }
  for (int i = 0; i < kGuard; ++i) expect(to_float(out[rows * columns + i]) == -7, "nothing is written after out");
  out.resize(rows * columns);
  return out;
}

// Rows differ from exact sums by the rounding of the sums, of operands of 16 bits, and of the result.
template <class T>
void check_row(const Weight& weight, const T* x, const T* bias, const T* found, const std::string& name) {
  const int64_t depth = weight.shape.depth;
  const int64_t block = weight.shape.group == 0 ? depth : std::min<int64_t>(weight.shape.group, kBlockChannels);
  for (int64_t column = 0; column < weight.shape.columns; ++column, ++numbers_checked) {
    double exact = bias == nullptr ? 0 : to_float(bias[column]), size = std::abs(exact), rounding = 0;
    for (int64_t begin = 0; begin < depth; begin += block) {
      double largest = 0, weights = 0;
      for (int64_t i = begin; i < std::min(begin + block, depth); ++i) {
        const double channel = to_float(x[i]), value = weight.values[column * depth + i];
        exact += channel * value;
        size += std::abs(channel * value);
        largest = std::max(largest, std::abs(channel));
        weights += std::abs(value);
      }
      if (weight.shape.group != 0) rounding += largest * weights / 65534;
    }
    double allowed = 1.0001 * rounding + std::ldexp(size, -20);
    if (sizeof(T) == 2) allowed += std::ldexp(std::abs(exact) + allowed, -8);
    expect(std::abs(to_float(found[column]) - exact) <= allowed, name + ", column " + std::to_string(column));
  }
}

template <class T>
bool same_bits(const T* a, const T* b, int64_t count) {
  return std::memcmp(a, b, count * sizeof(T)) == 0;
}

template <class T>
void check_shape(const Kernels& kernels, const Shape& shape) {
  const std::string name = std::to_string(8 * sizeof(T)) + " bits times " + std::to_string(shape.bits) + " bits [" +
                           std::to_string(shape.columns) + ", " + std::to_string(shape.depth) + "], groups of " +
                           std::to_string(shape.group);
  const ProductKernels& run = product_kernels(kernels, shape);
  Weight weight = random_weight<T>(shape);
  std::vector<T> x = normal_numbers<T>(kMostRows * shape.depth, 1);
  for (int64_t row = 0; row < kMostRows; ++row) {  // so that sums of odd columns are nothing but their rounding
    const auto first = x.begin() + row * shape.depth;
    std::copy(first, first + shape.depth / 2, first + shape.depth / 2);
  }
  const std::vector<T> bias = normal_numbers<T>(shape.columns, 2);
  const std::vector<T> all = multiply(run, weight, x.data(), kMostRows, bias.data(), 4);
  for (int64_t row = 0; row < kMostRows; row += 21) {
    check_row(weight, x.data() + row * shape.depth, bias.data(), all.data() + row * shape.columns, name);
  }
  const std::vector<T> unbiased = multiply<T>(run, weight, x.data(), 3, nullptr, 16);
  check_row<T>(weight, x.data(), nullptr, unbiased.data(), name + ", no bias");
  for (int64_t rows : {1, 2, 3, 4, 5, 7, 12, 13, 16, 17, 31, 32, 33, 49, 97}) {
    const int64_t first = rows * 7 % (kMostRows - rows + 1), part_tiles = rows % 2 == 0 ? 1 : 16;
    const auto found = multiply(run, weight, x.data() + first * shape.depth, rows, bias.data(), part_tiles);
    expect(same_bits(found.data(), all.data() + first * shape.columns, rows * shape.columns),
           name + ": " + std::to_string(rows) + " rows have other bits than beside others");
    rows_checked += rows;
  }
  x[5 * shape.depth + shape.depth - 1] = from_float<T>(INFINITY);
  const std::vector<T> broken = multiply(run, weight, x.data(), 20, bias.data(), 4);
  bool finite = false;
  for (int64_t i = 0; i < shape.columns; ++i) finite |= std::isfinite(to_float(broken[5 * shape.columns + i]));
  expect(!finite, name + ": a channel that is not finite makes its row so");
  const int64_t others = 14 * shape.columns, begin = 6 * shape.columns;
  expect(same_bits(broken.data(), all.data(), 5 * shape.columns) &&
             same_bits(broken.data() + begin, all.data() + begin, others),
         name + ": and no other row");
}

// Sums of integers of every level with fused products and sums have the same bits.
template <class T>
void check_same_as(const Kernels& kernels, const Kernels& other, const Shape& shape) {
  Weight weight = random_weight<T>(shape);
  const std::vector<T> x = normal_numbers<T>(20 * shape.depth, 3);
  const auto found = multiply<T>(product_kernels(kernels, shape), weight, x.data(), 20, nullptr, 4);
  const auto expected = multiply<T>(product_kernels(other, shape), weight, x.data(), 20, nullptr, 4);
  expect(same_bits(found.data(), expected.data(), 20 * shape.columns), "integers give the bits of avx2");
}

// The largest channels and weights of either sign: sums of integers come close to their limits.
template <class T>
void check_largest_sums(const Kernels& kernels, int bits) {
  Weight weight = random_weight<T>({16, 512, 512, bits});
  const int largest = -(1 << (bits - 1));
  std::fill(weight.words.begin(), weight.words.end(), bits == 8 ? 0x80808080u : 0x88888888u);
  for (int64_t i = 0; i < 16 * 512; ++i) weight.values[i] = largest * static_cast<double>(weight.scales[i / 512]);
  for (const float sign : {1.0f, -1.0f}) {
    const std::vector<T> x(512, from_float<T>(sign));
    const auto found = multiply<T>(product_kernels(kernels, weight.shape), weight, x.data(), 1, nullptr, 4);
    check_row<T>(weight, x.data(), nullptr, found.data(), "largest sums");
  }
}

template <class T>
int check_dtype(const Kernels& kernels, [[maybe_unused]] const Kernels* avx2) {
  constexpr int kBits = 8 * sizeof(T);
  std::vector<Shape> shapes;
  for (const auto& [columns, depth] :
       {std::pair{40, 2}, {20, 34}, {16, 32}, {72, 36}, {130, 64}, {70, 320}, {33, 1152}, {50, 616}}) {
    shapes.push_back({columns, depth, 0, kBits});
    for (const int bits : {8, 4}) {
      if (depth % 8 == 0) shapes.push_back({columns, depth, depth, bits});
      for (const int group : {128, 64, 40}) {
        if (group < depth && depth % group == 0) shapes.push_back({columns, depth, group, bits});
      }
    }
  }
  for (const Shape& shape : shapes) {
    check_shape<T>(kernels, shape);
    if (avx2 != nullptr && shape.group != 0) check_same_as<T>(kernels, *avx2, shape);
  }
  for (const int bits : {8, 4}) check_largest_sums<T>(kernels, bits);
  return static_cast<int>(shapes.size());
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return std::fprintf(stderr, "usage: check_products LEVEL\n"), 2;
  const std::string level = arguments[1];
  setenv("KVLLM_CPU_ISA", level.c_str(), 1);
  if (kvllm::cpu_isa() != level) {
    std::printf("this processor stops at %s\n", kvllm::cpu_isa().c_str());
    return 77;
  }
  const KernelSet& kernels = kernel_set();
  const KernelSet* avx2 = nullptr;
#if defined(__x86_64__)
  if (level != "baseline") avx2 = &kAvx2Kernels;
#endif
  const int shapes = check_dtype<float>(kernels.float32, avx2 == nullptr ? nullptr : &avx2->float32) +
                     check_dtype<BFloat16>(kernels.bfloat16, avx2 == nullptr ? nullptr : &avx2->bfloat16);
  std::printf("%s: %d weights, %lld numbers against double, %lld rows beside others, %d failures\n", level.c_str(),
              shapes, static_cast<long long>(numbers_checked), static_cast<long long>(rows_checked), failures);
  return failures == 0 ? 0 : 1;
}
