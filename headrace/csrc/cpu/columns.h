// Sixteen outputs side by side, as they lie in a panel (packed_linear.h).
#pragma once

#include "packed_linear.h"
#include "vector.h"

namespace headrace::HEADRACE_ISA {
namespace {

using packed::kPanel;

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

}  // namespace
}  // namespace headrace::HEADRACE_ISA
