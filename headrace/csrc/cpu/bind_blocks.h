// pack_blocks: weights as they lie in GGUF files, in blocks of 32 inputs, into packed layout (packed_linear.h). For types whose
// codes and float16 scales are taken as they are; see kernels/packed_linear/blocks.py for what a block holds.
#pragma once

#include <algorithm>
#include <cstring>

#include "operators.h"
#include "packed_linear.h"

namespace headrace {

namespace blocks {

// What codes are. Nibbles hold input j and j + 16 in byte j, or pairs of neighbours; E2M1 numbers have a scale of one byte, an exponent.
enum class Content : int64_t { kBytes = 0, kNibbles = 1, kE2m1 = 2, kE2m1Pairs = 3, kIq4 = 4 };

// A block of 32 inputs: where its parts are, in bytes. `min` is -1 where there is none.
struct Type {
  int64_t num_bytes, scale, min, codes;
  Content content;

  bool is_e2m1() const { return content == Content::kE2m1 || content == Content::kE2m1Pairs; }
};

// What the nibbles in each byte of a word stand for.
inline uint32_t look_up(const packed::Table& table, uint32_t nibbles) {
  uint32_t values = 0;
  for (int i = 0; i < 32; i += 8) values |= static_cast<uint32_t>(static_cast<uint8_t>(table.values[nibbles >> i & 15])) << i;
  return values;
}

// Half of the power of two that an exponent stands for, as float16; 0 below 2^-24.
inline uint16_t half_of_e8m0(int exponent) { return static_cast<uint16_t>(exponent >= 114 ? (exponent - 113) << 10 : exponent >= 104 ? 1 << (exponent - 104) : 0); }

inline uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// The 32 codes of a block as bytes, four a word; nibbles as they are.
inline void read_bytes(const Type& type, const uint8_t* codes, uint32_t (&words)[8]) {
  const auto spread = [](uint32_t pairs) {  // two bytes to four
    const uint32_t apart = (pairs | pairs << 8) & 0x00ff00ffu;
    return (apart | apart << 4) & 0x0f0f0f0fu;
  };
  if (type.content == Content::kBytes) {
    for (int w = 0; w < 8; ++w) words[w] = word_at(codes + 4 * w);
    return;
  }
  for (int w = 0; w < 4; ++w) {
    const uint32_t word = word_at(codes + 4 * w);
    if (type.content == Content::kE2m1Pairs) words[2 * w] = spread(word & 0xffffu), words[2 * w + 1] = spread(word >> 16);
    else words[w] = word & 0x0f0f0f0fu, words[4 + w] = word >> 4 & 0x0f0f0f0fu;
  }
}

struct Target {
  uint32_t* words;
  uint16_t *scales, *mins;  // mins may be null
  int64_t words_of_group, groups;
};

// Rows [first, last) of a panel; the first of all rows of `raw` is row `at` of the weight.
inline void pack_panel(const Type& type, const uint8_t* raw, int64_t row_bytes, int64_t at, int64_t first, int64_t last, const Target& to) {
  const int64_t panel = first / packed::kPanel, num_blocks = row_bytes / type.num_bytes;
  for (int64_t g = 0; g < to.groups; ++g) {
    uint32_t* words = to.words + (panel * to.groups + g) * to.words_of_group * packed::kPanel;
    for (int64_t row = first; row < last; ++row) {
      const int64_t lane = row % packed::kPanel, place = (panel * to.groups + g) * packed::kPanel + lane;
      uint32_t bytes[8] = {};
      uint16_t scale = 0, min = 0;
      if (g < num_blocks) {
        const uint8_t* block = raw + (row - at) * row_bytes + g * type.num_bytes;
        read_bytes(type, block + type.codes, bytes);
        for (int w = 0; w < 8 && to.words_of_group == 8 && type.content >= Content::kE2m1; ++w) bytes[w] = look_up(type.is_e2m1() ? packed::kE2m1 : packed::kIq4, bytes[w]);
        if (type.is_e2m1()) scale = half_of_e8m0(block[type.scale]);
        else std::memcpy(&scale, block + type.scale, 2);
        if (type.min >= 0) std::memcpy(&min, block + type.min, 2);
      }
      to.scales[place] = scale;
      if (to.mins) to.mins[place] = min;
      for (int64_t w = 0; w < to.words_of_group; ++w) words[w * packed::kPanel + lane] = to.words_of_group == 8 ? bytes[w] : bytes[2 * w] | bytes[2 * w + 1] << 4;
    }
  }
}

}  // namespace blocks

// Rows of `raw` [n, bytes] become rows `at` and on of a weight of a group format.
inline void pack_blocks(Tensor raw, int64_t num_bytes, int64_t scale, int64_t min, int64_t codes, int64_t content, int64_t at, Tensor words, Tensor scales, std::optional<Tensor> mins) {
  STD_TORCH_CHECK(raw.scalar_type() == ScalarType::Byte && raw.dim() == 2 && raw.is_contiguous() && raw.size(1) % num_bytes == 0, "blocks must be dense bytes");
  STD_TORCH_CHECK(words.is_contiguous() && scales.is_contiguous() && words.dim() == 3 && scales.dim() == 3 && words.size(1) % scales.size(1) == 0, "the weight does not fit");
  const int64_t rows = raw.size(0), row_bytes = raw.size(1), last = at + rows;
  const blocks::Type type{num_bytes, scale, min, codes, static_cast<blocks::Content>(content)};
  const blocks::Target to{writable<uint32_t>(words), writable<uint16_t>(scales), mins ? writable<uint16_t>(*mins) : nullptr, words.size(1) / scales.size(1), scales.size(1)};
  STD_TORCH_CHECK(last <= words.size(0) * packed::kPanel && row_bytes / num_bytes <= to.groups && (to.words_of_group == 8 || (to.words_of_group == 4 && type.content != blocks::Content::kBytes)),
                  "the blocks do not fit the weight");
  const uint8_t* from = pointer<uint8_t>(raw);
  const int64_t first_panel = at / packed::kPanel, num_panels = (last + packed::kPanel - 1) / packed::kPanel - first_panel;
  over_rows(num_panels, packed::kPanel * row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t p = first_panel + begin; p < first_panel + end; ++p)
      blocks::pack_panel(type, from, row_bytes, at, std::max(at, p * packed::kPanel), std::min(last, (p + 1) * packed::kPanel), to);
  });
}

inline void define_blocks(Library& m) {
  m.def(
      "pack_blocks(Tensor raw, int num_bytes, int scale, int min, int codes, int content, int at, Tensor(a!) words, Tensor(b!) scales, Tensor(c!)? mins) -> ()");
}

inline void implement_blocks(Library& m) { m.impl("pack_blocks", TORCH_BOX(&pack_blocks)); }

}  // namespace headrace
