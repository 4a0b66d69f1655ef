// Kernels on rows of values: norms and gated activations. `type` is a FloatType; rows [begin, end) are done by the caller's
// thread. Strides and widths count values.
#pragma once

#include "types.h"

namespace headrace {

struct NormRows {
  const void* x;
  int64_t x_stride;
  void* residual;  // null: x alone is normed; else x is added to it first
  int64_t residual_stride;
  const void* weight;
  int weight_type;
  void* out;  // rows of exactly `width`
  int64_t width;
  float eps, offset;
};

enum Activation : int { kSilu = 0, kGeluTanh = 1 };

struct GatedRows {
  const void* x;  // rows of 2 * width: the gate, then what it is multiplied with
  int64_t x_stride;
  void* out;
  int64_t width;
  Activation activation;
  int64_t out_stride = 0;  // 0: width
};

struct RowKernels {
  void (*norm)(int type, const NormRows&, int64_t begin, int64_t end);
  void (*gate)(int type, const GatedRows&, int64_t begin, int64_t end);
};

}  // namespace headrace
