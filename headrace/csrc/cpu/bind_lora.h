// add_low_rank: what adapters add to the rows of a product; see kernels/lora.
#pragma once

#include "lora.h"
#include "operators.h"

namespace headrace {

// x [T, K], out [T, N]; a [S, P, R, K], b [S, R, N], ranks [S, P] and ends [P] int64; rows [2, n] int64: which rows of x
// have an adapter, and its slot. `a` and `b` of x's type, or bfloat16 beside float32.
inline void add_low_rank(Tensor x, Tensor out, Tensor a, Tensor b, Tensor ranks, Tensor ends, Tensor rows) {
  check_rows_are_dense(x), check_rows_are_dense(out);
  const int type = float_type(x);
  const int bank_type = float_type(a);
  STD_TORCH_CHECK(a.dim() == 4 && b.dim() == 3 && a.is_contiguous() && b.is_contiguous() &&
                      (bank_type == type || (type == kFloat32 && bank_type == kBFloat16)) &&
                      float_type(b) == bank_type && a.size(0) == b.size(0) && a.size(2) == b.size(1),
                  "a must be [S, P, R, K] and b [S, R, N], of x's type, or bfloat16 beside float32");
  STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 2 && x.size(0) == out.size(0) && x.size(1) == a.size(3) &&
                      out.size(1) == b.size(2),
                  "x must be [T, K] and out [T, N]");
  const int out_type = float_type(out);
  STD_TORCH_CHECK(out_type == type || out_type == kFloat32, "out must be of x's type, or float32");
  for (const Tensor* each : {&ranks, &ends, &rows})
    STD_TORCH_CHECK(each->scalar_type() == ScalarType::Long && each->is_contiguous(),
                    "ranks, ends and rows must be contiguous int64");
  STD_TORCH_CHECK(ranks.numel() == a.size(0) * a.size(1) && ends.numel() == a.size(1) && rows.dim() == 2 &&
                      rows.size(0) == 2,
                  "ranks must be [S, P], ends [P] and rows [2, n]");
  const int64_t count = rows.size(1), *order = pointer<int64_t>(rows), *slots = order + count;
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(order[i] >= 0 && order[i] < x.size(0) && slots[i] >= 0 && slots[i] < a.size(0),
                    "a row or slot does not exist");
  const LowRankRows about{{pointer(a), pointer(b), pointer<int64_t>(ranks), pointer<int64_t>(ends), a.size(1), a.size(2),
                           a.size(3), b.size(2), bank_type == kBFloat16},
                          pointer(x), x.stride(0), writable(out), out.stride(0), out_type == kFloat32, order, slots};
  const auto kernel = best_low_rank_kernels().add;
  over_rows(count, a.size(2) * (a.size(1) * a.size(3) + b.size(2)),
            [&](int64_t begin, int64_t end) { kernel(type, about, begin, end); });
}

inline void define_lora(Library& m) {
  m.def(
      "add_low_rank(Tensor x, Tensor(a!) out, Tensor a, Tensor b, Tensor ranks, Tensor ends, Tensor rows) -> ()");
}

inline void implement_lora(Library& m) { m.impl("add_low_rank", TORCH_BOX(&add_low_rank)); }

}  // namespace headrace
