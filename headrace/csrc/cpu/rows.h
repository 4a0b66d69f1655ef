// Kernels on rows of values: norms and gated activations. `type` is a FloatType; rows [begin, end) are computed by the
// calling thread. Strides and widths count values.
#pragma once

#include "types.h"

namespace headrace {

struct NormRows {
  const void* x;
  int64_t x_stride;
  void* residual;  // null: norm(x); else residual += x, norm(residual)
  int64_t residual_stride;
  const void* weight;
  int weight_type;
  void* out;  // rows of exactly `width`
  int64_t width;
  float eps, offset;
};

enum Activation : int { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };

// Parameters of a clamped SwiGLU: see CLAMPED_SWIGLU in kernels/activation.
struct Clamp {
  float limit = 0.0f, alpha = 1.0f, up_offset = 0.0f;
};

struct GatedRows {
  const void* x;  // rows of 2 * width: gate, then up
  int64_t x_stride;
  void* out;
  int64_t width;
  Activation activation;
  int64_t out_stride = 0;  // 0: width
  Clamp clamp = {};
};

// MoE combine: row r of `out` is the sum of rows places[r, 0 ... count) of x times weights[r, ...]; negative: no row.
struct WeighedRows {
  const float* x;
  int64_t width;
  const int32_t* places;
  const float* weights;
  int64_t count;
  void* out;  // of `type`
};

struct RowKernels {
  void (*norm)(int type, const NormRows&, int64_t begin, int64_t end);
  void (*gate)(int type, const GatedRows&, int64_t begin, int64_t end);
  void (*weigh)(int type, const WeighedRows&, int64_t begin, int64_t end);
};

}  // namespace headrace
