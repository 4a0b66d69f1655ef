// Low-rank additions of many adapters, each for its own rows: see kernels/lora. No torch here. P parts of an output, R
// ranks that there is room for, K inputs, N outputs. `type` is a FloatType, of x, a, b and out alike unless said; beside
// float32, a and b may be in bfloat16.
#pragma once

#include "types.h"

namespace headrace {

struct LowRankBank {
  const void *a, *b;     // [slots, P, R, K] and [slots, R, N]
  const int64_t* ranks;  // [slots, P]
  const int64_t* ends;   // [P]: one past each part's last output
  int64_t parts, most_ranks, inputs, outputs;
  bool is_bfloat16;
};

struct LowRankRows {
  LowRankBank bank;
  const void* x;  // rows of `inputs`, `x_stride` values apart
  int64_t x_stride;
  void* out;  // rows of `outputs`, `out_stride` values apart, of `type`, or float32
  int64_t out_stride;
  bool is_out_float;
  const int64_t *order, *slots;  // rows with an adapter, those of a slot together, and the slot of each
};

struct LowRankKernels {
  // out[order[i]] += b' (a x[order[i]]) for i in [begin, end).
  void (*add)(int type, const LowRankRows&, int64_t begin, int64_t end);
};

}  // namespace headrace
