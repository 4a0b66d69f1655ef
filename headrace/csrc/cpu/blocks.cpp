// compiled with: rows.cpp
// Block layouts: ggml's ggml-common.h, and the dequantize functions of its ggml-quants.c.
#include "blocks.h"

#include <algorithm>
#include <cmath>

#include "columns.h"

namespace headrace::HEADRACE_ISA {
namespace {

using namespace blocks;

// 32 weights of an output: code * scale + min, where both may differ from the first half to the second. Codes are
// signed bytes, or nibbles as they are.
struct BlockGroup {
  uint8_t codes[kGroup];
  float scale[2], min[2];

  void set(float of_all, float least = 0.0f) { scale[0] = scale[1] = of_all, min[0] = min[1] = least; }
};

template <class T>
inline T value_at(const uint8_t* p) {
  T value;
  memcpy(&value, p, sizeof(T));
  return value;
}
inline float half_at(const uint8_t* p) { return to_float(value_at<fp16>(p)); }

// 16 bytes: inputs 0 to 15 in the low nibbles, 16 to 31 in the high ones.
inline void read_nibbles(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) codes[i] = from[i] & 15, codes[16 + i] = from[i] >> 4;
}

inline void read_q4_0(const uint8_t* block, int64_t, BlockGroup& group) {
  read_nibbles(block + 2, group.codes);
  group.set(half_at(block), -8.0f * half_at(block));
}
inline void read_q4_1(const uint8_t* block, int64_t, BlockGroup& group) {
  read_nibbles(block + 4, group.codes);
  group.set(half_at(block), half_at(block + 2));
}

// Nibbles at `codes`, of which the fifth bits lie before them.
inline void read_five_bits(const uint8_t* codes, int least, BlockGroup& group) {
  const uint32_t fifth = value_at<uint32_t>(codes - 4);
  read_nibbles(codes, group.codes);
  for (int i = 0; i < kGroup; ++i)
    group.codes[i] = static_cast<uint8_t>((group.codes[i] | (fifth >> i & 1) << 4) + least);
}
inline void read_q5_0(const uint8_t* block, int64_t, BlockGroup& group) {
  read_five_bits(block + 6, -16, group);
  group.set(half_at(block));
}
inline void read_q5_1(const uint8_t* block, int64_t, BlockGroup& group) {
  read_five_bits(block + 8, 0, group);
  group.set(half_at(block), half_at(block + 2));
}
inline void read_q8_0(const uint8_t* block, int64_t, BlockGroup& group) {
  memcpy(group.codes, block + 2, kGroup);
  group.set(half_at(block));
}

// Two bits each of 128 inputs share 32 bytes.
inline void read_two_bits(const uint8_t* from, int64_t g, uint8_t* codes) {
  from += g / 4 * 32;
  for (int i = 0; i < kGroup; ++i) codes[i] = from[i] >> (g % 4 * 2) & 3;
}
inline void read_q2_k(const uint8_t* block, int64_t g, BlockGroup& group) {
  read_two_bits(block + 16, g, group.codes);
  for (int half = 0; half < 2; ++half) {
    const uint8_t both = block[2 * g + half];
    group.scale[half] = half_at(block + 80) * static_cast<float>(both & 15),
    group.min[half] = -half_at(block + 82) * static_cast<float>(both >> 4);
  }
}
inline void read_q3_k(const uint8_t* block, int64_t g, BlockGroup& group) {
  const uint8_t* scales = block + 96;
  read_two_bits(block + 32, g, group.codes);
  for (int i = 0; i < kGroup; ++i) group.codes[i] = static_cast<uint8_t>(group.codes[i] - (block[i] >> g & 1 ? 0 : 4));
  group.set(0.0f);
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t i = 2 * g + half;
    const int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4, high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
    group.scale[half] = half_at(block + 108) * static_cast<float>((low | high << 4) - 32);
  }
}

// The scale and the min of a group, six bits each of twelve bytes, times those of the block.
inline void set_six_bits(const uint8_t* block, int64_t g, BlockGroup& group) {
  const uint8_t* six = block + 4;
  const int scale = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4,
            min = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
  group.set(half_at(block) * static_cast<float>(scale), -half_at(block + 2) * static_cast<float>(min));
}
// Two groups share 32 bytes.
inline void read_four_bits(const uint8_t* from, int64_t g, uint8_t* codes) {
  from += g / 2 * 32;
  for (int i = 0; i < kGroup; ++i) codes[i] = from[i] >> (g % 2 * 4) & 15;
}
inline void read_q4_k(const uint8_t* block, int64_t g, BlockGroup& group) {
  read_four_bits(block + 16, g, group.codes);
  set_six_bits(block, g, group);
}
inline void read_q5_k(const uint8_t* block, int64_t g, BlockGroup& group) {
  read_four_bits(block + 48, g, group.codes);
  for (int i = 0; i < kGroup; ++i) group.codes[i] |= (block[16 + i] >> g & 1) << 4;
  set_six_bits(block, g, group);
}
inline void read_q6_k(const uint8_t* block, int64_t g, BlockGroup& group) {
  const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32;
  for (int i = 0; i < kGroup; ++i)
    group.codes[i] = static_cast<uint8_t>(((low[i] >> (g % 4 / 2 * 4) & 15) | (high[i] >> (g % 4 * 2) & 3) << 4) - 32);
  group.set(0.0f);
  for (int64_t half = 0; half < 2; ++half)
    group.scale[half] = half_at(block + 208) * static_cast<float>(value_at<int8_t>(block + 192 + 2 * g + half));
}

inline void read_iq4_nl(const uint8_t* block, int64_t, BlockGroup& group) {
  read_nibbles(block + 2, group.codes);
  group.set(half_at(block));
}
inline void read_iq4_xs(const uint8_t* block, int64_t g, BlockGroup& group) {
  const int scale = (block[4 + g / 2] >> (g % 2 * 4) & 15) | (value_at<uint16_t>(block + 2) >> (2 * g) & 3) << 4;
  read_nibbles(block + 8 + 16 * g, group.codes);
  group.set(half_at(block) * static_cast<float>(scale - 32));
}

// Half of the power of two that the first byte stands for, as codes are twice E2M1 numbers.
inline void set_exponent(const uint8_t* block, BlockGroup& group) { group.set(std::ldexp(1.0f, block[0] - 128)); }
inline void read_mxfp4(const uint8_t* block, int64_t, BlockGroup& group) {
  read_nibbles(block + 1, group.codes);
  set_exponent(block, group);
}
inline void read_mxfp4_pairs(const uint8_t* block, int64_t, BlockGroup& group) {
  for (int i = 0; i < 16; ++i) group.codes[2 * i] = block[1 + i] & 15, group.codes[2 * i + 1] = block[1 + i] >> 4;
  set_exponent(block, group);
}

// `is_even`: a group has one scale and one min. Else it is rounded to 8 bits with a scale of its own.
struct BlockType {
  Size size;
  void (*read)(const uint8_t* block, int64_t g, BlockGroup& group);
  bool is_even = true;
  const packed::Table* table = nullptr;
};
constexpr BlockType kTypes[] = {
    {{18, 1}, read_q4_0},
    {{20, 1}, read_q4_1},
    {{22, 1}, read_q5_0},
    {{24, 1}, read_q5_1},
    {{34, 1}, read_q8_0},
    {{84, 8}, read_q2_k, false},
    {{110, 8}, read_q3_k, false},
    {{144, 8}, read_q4_k},
    {{176, 8}, read_q5_k},
    {{210, 8}, read_q6_k, false},
    {{18, 1}, read_iq4_nl, true, &packed::kIq4},
    {{136, 8}, read_iq4_xs, true, &packed::kIq4},
    {{17, 1}, read_mxfp4, true, &packed::kE2m1},
    {{17, 1}, read_mxfp4_pairs, true, &packed::kE2m1},
};
static_assert(sizeof(kTypes) / sizeof(BlockType) == static_cast<int64_t>(Kind::kCount));

Size size_of(Kind kind) { return kTypes[static_cast<int64_t>(kind)].size; }

// Groups of a panel's outputs, whose halves have scales of their own, to 8 bits with a scale of all.
void round_groups(BlockGroup* groups, int64_t first, int64_t last) {
  Group columns = {};
  for (int64_t lane = first; lane < last; ++lane)
    for (int i = 0; i < kGroup; ++i)
      columns.values[i].at[lane] =
          static_cast<float>(static_cast<int8_t>(groups[lane].codes[i])) * groups[lane].scale[i / 16] +
          groups[lane].min[i / 16];
  quantise_int8(columns);
  for (int64_t lane = first; lane < last; ++lane) {
    for (int i = 0; i < kGroup; ++i)
      groups[lane].codes[i] = static_cast<uint8_t>(static_cast<int32_t>(columns.codes[i].at[lane]));
    groups[lane].set(columns.scale.at[lane]);
  }
}

// Outputs [first, last) of a panel, of which `rows` is the first's.
void pack_panel(const BlockType& type, const uint8_t* rows, int64_t row_bytes, int64_t panel, int64_t first,
                int64_t last, const Target& to) {
  const int64_t num_groups = row_bytes / type.size.num_bytes * type.size.groups;
  BlockGroup groups[kPanel];
  for (int64_t g = 0; g < to.groups; ++g) {
    for (int64_t lane = first; lane < last; ++lane) {
      if (g < num_groups)
        type.read(rows + (lane - first) * row_bytes + g / type.size.groups * type.size.num_bytes, g % type.size.groups,
                  groups[lane]);
      else groups[lane] = {};
    }
    if (!type.is_even) round_groups(groups, first, last);
    Column scale = {}, min = {};
    uint32_t* words = to.words + (panel * to.groups + g) * to.words_of_group * kPanel;
    for (int64_t lane = first; lane < last; ++lane) {
      BlockGroup& group = groups[lane];
      scale.at[lane] = group.scale[0], min.at[lane] = group.min[0];
      if (type.table != nullptr && to.words_of_group == 8)
        for (uint8_t& code : group.codes) code = static_cast<uint8_t>(type.table->values[code]);
      for (int64_t w = 0; w < to.words_of_group; ++w)
        words[w * kPanel + lane] = to.words_of_group == 8 ? value_at<uint32_t>(group.codes + 4 * w)
                                                          : value_at<uint32_t>(group.codes + 8 * w) |
                                                                value_at<uint32_t>(group.codes + 8 * w + 4) << 4;
    }
    fp16 halves[2][kPanel];
    over_column([&](int64_t i) { store(halves[0] + i, load(scale.at + i)), store(halves[1] + i, load(min.at + i)); });
    const int64_t place = (panel * to.groups + g) * kPanel;
    std::copy(halves[0] + first, halves[0] + last, to.scales + place + first);
    if (to.mins != nullptr) std::copy(halves[1] + first, halves[1] + last, to.mins + place + first);
  }
}

void pack(const Source& source, const Target& target, int64_t first, int64_t last) {
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t from = std::max(source.at, panel * kPanel),
                  to = std::min(source.at + source.rows, (panel + 1) * kPanel);
    pack_panel(kTypes[static_cast<int64_t>(source.kind)], source.raw + (from - source.at) * source.row_bytes,
               source.row_bytes, panel, from - panel * kPanel, to - panel * kPanel, target);
  }
}

}  // namespace

extern const BlockKernels block_kernels;
const BlockKernels block_kernels = {size_of, pack};

}  // namespace headrace::HEADRACE_ISA
