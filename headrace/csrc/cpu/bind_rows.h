// rms_norm, add_rms_norm and the gated activations: see kernels/rowwise for what they compute.
#pragma once

#include "operators.h"
#include "rows.h"

namespace headrace {

inline Tensor run_norm(const Tensor& x, const Tensor* residual, const Tensor& weight, double eps, double offset) {
  check_rows_are_dense(x);
  const int64_t rows = x.size(0), width = x.size(1);
  const int type = float_type(x);
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 1 && weight.size(0) == width && weight.is_contiguous(),
                  "x must be [T, D] and weight [D]");
  Tensor out = empty({rows, width}, x);
  NormRows a{pointer(x), x.stride(0), nullptr, 0, pointer(weight), float_type(weight), writable(out), width,
             static_cast<float>(eps), static_cast<float>(offset)};
  if (residual) {
    check_rows_are_dense(*residual);
    STD_TORCH_CHECK(float_type(*residual) == type && residual->size(0) == rows && residual->size(1) == width,
                    "residual must be like x");
    a.residual = writable(*residual), a.residual_stride = residual->stride(0);
  }
  const auto kernel = best_row_kernels().norm;
  over_rows(rows, width, [&](int64_t begin, int64_t end) { kernel(type, a, begin, end); });
  return out;
}

inline Tensor rms_norm(Tensor x, Tensor weight, double eps, double offset) {
  return run_norm(x, nullptr, weight, eps, offset);
}

inline Tensor add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps, double offset) {
  return run_norm(x, &residual, weight, eps, offset);
}

inline Tensor gated(Tensor x, int64_t activation) {
  check_rows_are_dense(x);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "x must be [T, 2F]");
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  Tensor out = empty({rows, width}, x);
  const GatedRows a{pointer(x), x.stride(0), writable(out), width, static_cast<Activation>(activation)};
  const auto kernel = best_row_kernels().gate;
  const int type = float_type(x);
  over_rows(rows, 4 * width,
            [&](int64_t begin, int64_t end) { kernel(type, a, begin, end); });  // an exponential per value
  return out;
}

inline void define_rows(Library& m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, float offset) -> Tensor");
  m.def("gated(Tensor x, int activation) -> Tensor");
}

inline void implement_rows(Library& m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("gated", TORCH_BOX(&gated));
}

}  // namespace headrace
