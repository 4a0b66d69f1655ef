// compiled with: rows.cpp
#include "pack.h"

#include <algorithm>

#include "columns.h"

namespace headrace::HEADRACE_ISA {
namespace {

using packed::Format, packed::kPad;

constexpr float kMostInt4 = 15.0f;
constexpr double kShrinks[] = {1.0, 0.92, 0.84};

// Not inlined: so that a product is rounded before it is added to something, as the reference has it.
__attribute__((noinline)) void square(Column* x, int64_t count) {
  for (int64_t k = 0; k < count; ++k)
    over_column([&](int64_t i) { store(x[k].at + i, load(x[k].at + i) * load(x[k].at + i)); });
}
__attribute__((noinline)) void multiply(const Column& x, float by, Column& out) {
  over_column([&](int64_t i) { store(out.at + i, load(x.at + i) * Vec(by)); });
}

// In halves, as the reference adds them.
void add_up(Column* x, int64_t count) {
  for (int64_t half = count / 2; half > 0; half /= 2)
    for (int64_t k = 0; k < half; ++k)
      over_column([&](int64_t i) { store(x[k].at + i, load(x[k].at + i) + load(x[k + half].at + i)); });
}

// Where inputs [k, k + count) of a panel's outputs are, as columns; what lies beyond the weight is zero.
template <class T>
void read_columns(const PackSource& source, int64_t panel, int64_t k, int64_t count, Column* out) {
  const int64_t rows = std::min(kPanel, source.outputs - panel * kPanel),
                known = std::clamp<int64_t>(source.inputs - k, 0, count);
  if (rows < kPanel || known < count) std::fill_n(out[0].at, count * kPanel, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    const T* x = static_cast<const T*>(source.data) + (panel * kPanel + row) * source.stride + k;
    for (int64_t i = 0; i < known; ++i) out[i].at[row] = to_float(x[i]);
  }
}

void quantise_int4(Group& group) {
  Column low, range, best;
  over_column([&](int64_t i) {
    Vec least = load(group.values[0].at + i), most = least;
    for (int64_t k = 1; k < kGroup; ++k)
      least = minimum(least, load(group.values[k].at + i)), most = maximum(most, load(group.values[k].at + i));
    store(low.at + i, least), store(range.at + i, most - least);
  });
  for (const double shrink : kShrinks) {
    Column scale, least, codes[kGroup], losses[kGroup];
    multiply(range, static_cast<float>((1.0 - shrink) / 2), least);
    over_column([&](int64_t i) { store(least.at + i, load(low.at + i) + load(least.at + i)); });
    multiply(range, static_cast<float>(shrink / kMostInt4), scale);
    round_to_half(least), round_to_half(scale);
    const Column inverse = invert(scale);
    for (int64_t k = 0; k < kGroup; ++k)
      over_column([&](int64_t i) {
        const Vec x = load(group.values[k].at + i), from = load(least.at + i);
        const Vec code = maximum(Vec(0.0f), minimum(Vec(kMostInt4), round((x - from) * load(inverse.at + i))));
        store(codes[k].at + i, code);
        store(losses[k].at + i, fma(code, load(scale.at + i), from) - x);  // the product is exact
      });
    square(losses, kGroup);
    add_up(losses, kGroup);
    const bool is_first = shrink == kShrinks[0];
    for (int64_t i = 0; i < kPanel; ++i) {
      const bool is_better = is_first || losses[0].at[i] < best.at[i];
      best.at[i] = is_better ? losses[0].at[i] : best.at[i];
      group.scale.at[i] = is_better ? scale.at[i] : group.scale.at[i],
      group.least.at[i] = is_better ? least.at[i] : group.least.at[i];
      losses[1].at[i] = is_better ? 1.0f : 0.0f;
    }
    for (int64_t k = 0; k < kGroup; ++k)
      for (int64_t i = 0; i < kPanel; ++i)
        group.codes[k].at[i] = losses[1].at[i] > 0.0f ? codes[k].at[i] : group.codes[k].at[i];
  }
}

// Words of bytes: input 4 w + j in byte j.
void put_bytes(const Column* codes, int64_t num_words, uint32_t* words) {
  for (int64_t w = 0; w < num_words; ++w)
    for (int64_t i = 0; i < kPanel; ++i) {
      uint32_t word = 0;
      for (int64_t j = 0; j < 4; ++j)
        word |= static_cast<uint32_t>(static_cast<int32_t>(codes[4 * w + j].at[i]) & 255) << (8 * j);
      words[w * kPanel + i] = word;
    }
}

// Words of nibbles: input 8 w + j in the low half of byte j, 8 w + 4 + j in its high half.
void put_nibbles(const Column* codes, int64_t num_words, uint32_t* words) {
  for (int64_t w = 0; w < num_words; ++w)
    for (int64_t i = 0; i < kPanel; ++i) {
      uint32_t word = 0;
      for (int64_t j = 0; j < 4; ++j)
        word |= (static_cast<uint32_t>(static_cast<int32_t>(codes[8 * w + j].at[i])) |
                 static_cast<uint32_t>(static_cast<int32_t>(codes[8 * w + 4 + j].at[i])) << 4)
                << (8 * j);
      words[w * kPanel + i] = word;
    }
}

template <class T>
void pack_groups(const PackSource& source, const PackTarget& target, int64_t panel) {
  const bool is_int4 = target.format == Format::kInt4Group;
  const int64_t groups = (source.inputs + kPad - 1) / kPad * kPad / kGroup, num_words = is_int4 ? 4 : 8;
  Group group;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t known = source.inputs - g * kGroup, place = panel * groups + g;
    read_columns<T>(source, panel, g * kGroup, kGroup, group.values);
    is_int4 ? quantise_int4(group) : quantise_int8(group);
    for (int64_t k = std::max<int64_t>(known, 0); k < kGroup; ++k) group.codes[k] = {};
    uint32_t* words = target.words + place * num_words * kPanel;
    is_int4 ? put_nibbles(group.codes, num_words, words) : put_bytes(group.codes, num_words, words);
    over_column([&](int64_t i) { store(target.group_scales + place * kPanel + i, load(group.scale.at + i)); });
    if (is_int4)
      over_column([&](int64_t i) { store(target.group_mins + place * kPanel + i, load(group.least.at + i)); });
  }
}

template <class T>
void pack_int8(const PackSource& source, const PackTarget& target, int64_t panel) {
  const int64_t padded = (source.inputs + kPad - 1) / kPad * kPad;
  Column scale = {};
  for (int64_t row = 0; row < std::min(kPanel, source.outputs - panel * kPanel); ++row) {
    const T* x = static_cast<const T*>(source.data) + (panel * kPanel + row) * source.stride;
    Vec most(0.0f);
    over_lanes(source.inputs, [&](int64_t i, auto part) {
      most = maximum(most, maximum(part.load(x + i), Vec(0.0f) - part.load(x + i)));
    });
    scale.at[row] = largest(most) / kMostInt8;
  }
  const Column inverse = invert(scale);
  Column values[kPad], codes[kPad];
  for (int64_t k = 0; k < padded; k += kPad) {
    read_columns<T>(source, panel, k, kPad, values);
    round_codes(values, inverse, codes, kPad);
    put_bytes(codes, kPad / 4, target.words + (panel * padded + k) / 4 * kPanel);
  }
  std::copy_n(scale.at, kPanel, target.scales + panel * kPanel);
}

// Words of plain numbers, of which `kPerWord` of type T make one.
template <class T, int kPerWord>
void pack_plain(const PackSource& source, const PackTarget& target, int64_t panel) {
  const int64_t num_words = (source.inputs + kPad - 1) / kPad * kPad / kPerWord,
                rows = std::min(kPanel, source.outputs - panel * kPanel);
  uint32_t* words = target.words + panel * num_words * kPanel;
  const int64_t whole = source.inputs / kPerWord;
  if (rows < kPanel) memset(words, 0, num_words * kPanel * 4);
  for (int64_t w = 0; w < num_words; ++w)
    for (int64_t row = 0; row < rows; ++row) {
      const T* x = static_cast<const T*>(source.data) + (panel * kPanel + row) * source.stride + w * kPerWord;
      uint32_t word = 0;
      if (w < whole) memcpy(&word, x, 4);
      else if (w * kPerWord < source.inputs) memcpy(&word, x, sizeof(T));
      words[w * kPanel + row] = word;
    }
}

template <class T>
void pack_panel(const PackSource& source, const PackTarget& target, int64_t panel) {
  target.format == Format::kInt8 ? pack_int8<T>(source, target, panel) : pack_groups<T>(source, target, panel);
}

void pack(const PackSource& source, const PackTarget& target, int64_t first, int64_t last) {
  for (int64_t panel = first; panel < last; ++panel) {
    if (target.format == Format::kFloat32) pack_plain<float, 1>(source, target, panel);
    else if (target.format == Format::kBfloat16) pack_plain<bf16, 2>(source, target, panel);
    else if (source.type == kFloat32) pack_panel<float>(source, target, panel);
    else if (source.type == kBFloat16) pack_panel<bf16>(source, target, panel);
    else pack_panel<fp16>(source, target, panel);
  }
}

}  // namespace

extern const PackKernels pack_kernels;
const PackKernels pack_kernels = {pack};

}  // namespace headrace::HEADRACE_ISA
