// Sixteen outputs side by side, as in a panel (packed_linear.h).
#pragma once

#include "packed_linear.h"
#include "vector.h"

namespace headrace::HEADRACE_ISA {
namespace {

using packed::kGroup, packed::kPanel;

constexpr float kMostInt8 = 127.0f;

// A value of each output of a panel.
struct Column {
  float at[kPanel];
};

template <class F>
HEADRACE_INLINE void over_column(const F& f) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kPanel; i += kLanes) f(i);
}

inline void round_to_half(Column& x) {
  fp16 halves[kPanel];
  over_column([&](int64_t i) { store(halves + i, load(x.at + i)); });
  over_column([&](int64_t i) { store(x.at + i, load(halves + i)); });
}

// 1 / x, 0 for 0.
inline Column invert(const Column& x) {
  Column out;
  for (int64_t i = 0; i < kPanel; ++i) out.at[i] = x.at[i] > 0.0f ? 1.0f / x.at[i] : 0.0f;
  return out;
}

// Rounded codes of one group, as floats.
struct Group {
  Column values[kGroup], codes[kGroup], scale, least;
};

// Symmetric codes of `count` columns, relative to `inverse`.
HEADRACE_INLINE void round_codes(const Column* x, const Column& inverse, Column* codes, int64_t count) {
  for (int64_t k = 0; k < count; ++k)
    over_column([&](int64_t i) {
      store(codes[k].at + i,
            maximum(Vec(-kMostInt8), minimum(Vec(kMostInt8), round(load(x[k].at + i) * load(inverse.at + i)))));
    });
}

// Symmetric 8-bit codes of `values`, and their scale.
inline void quantise_int8(Group& group) {
  over_column([&](int64_t i) {
    Vec most(0.0f);
    for (int64_t k = 0; k < kGroup; ++k)
      most = maximum(most, maximum(load(group.values[k].at + i), Vec(0.0f) - load(group.values[k].at + i)));
    store(group.scale.at + i, most / Vec(kMostInt8));
  });
  round_to_half(group.scale);
  round_codes(group.values, invert(group.scale), group.codes, kGroup);
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
