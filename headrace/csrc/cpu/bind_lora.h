// add_low_rank: what adapters add to the rows of a product; see kernels/lora.
#pragma once

#include "lora_work.h"
#include "operators.h"

namespace headrace {

// Its `a` [S, P, R, K] and `b` [S, R, N] in the type of x, or in bfloat16 beside float32; or codes [S, bytes] as `a`
// alone, whose R is `most_ranks`.
inline LowRankBank bank_of(const Tensor& x, int64_t outputs, const Tensor& a, const std::optional<Tensor>& b,
                           const Tensor& ranks, const Tensor& ends, int64_t most_ranks) {
  for (const Tensor* each : {&ranks, &ends})
    STD_TORCH_CHECK(each->scalar_type() == ScalarType::Long && each->is_contiguous(),
                    "ranks and ends must be contiguous int64");
  LowRankBank bank{pointer(a), pointer(b), pointer<int64_t>(ranks), pointer<int64_t>(ends), ends.numel(), most_ranks,
                   x.size(1), outputs, BankForm::kPlain};
  STD_TORCH_CHECK(a.is_contiguous() && ranks.numel() == a.size(0) * bank.parts, "a must be dense, ranks [S, P]");
  if (!b) {
    bank.form = BankForm::kCoded;
    STD_TORCH_CHECK(float_type(x) != kFloat16 && a.scalar_type() == ScalarType::Byte && a.dim() == 2 &&
                        most_ranks % CodedSlot::kRanks == 0 && a.size(1) == CodedSlot(bank, 0).bytes,
                    "the codes do not match this library's layout");
    return bank;
  }
  const int type = float_type(x), bank_type = float_type(a);
  STD_TORCH_CHECK(bank_type == type || (type == kFloat32 && bank_type == kBFloat16),
                  "a must be of x's type, or bfloat16 beside float32");
  STD_TORCH_CHECK(a.dim() == 4 && b->dim() == 3 && b->is_contiguous() && float_type(*b) == bank_type &&
                      a.size(0) == b->size(0) && a.size(1) == bank.parts && a.size(2) == most_ranks &&
                      b->size(1) == most_ranks && a.size(3) == bank.inputs && b->size(2) == outputs,
                  "a must be [S, P, R, K] and b [S, R, N]");
  if (bank_type != type) bank.form = BankForm::kBfloat16;
  return bank;
}

// x [T, K], out [T, N], of x's type or float32; a and b: see `bank_of`; ranks [S, P] and ends [P] int64; rows [2, n]
// int64: which rows of x have an adapter, and its slot.
inline void add_low_rank(Tensor x, Tensor out, Tensor a, std::optional<Tensor> b, Tensor ranks, Tensor ends,
                         Tensor rows, int64_t most_ranks) {
  check_rows_are_dense(x), check_rows_are_dense(out);
  const int type = float_type(x), out_type = float_type(out);
  STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 2 && x.size(0) == out.size(0), "x must be [T, K] and out [T, N]");
  STD_TORCH_CHECK(out_type == type || out_type == kFloat32, "out must be of x's type, or float32");
  STD_TORCH_CHECK(
      rows.scalar_type() == ScalarType::Long && rows.is_contiguous() && rows.dim() == 2 && rows.size(0) == 2,
      "rows must be contiguous int64 [2, n]");
  const LowRankBank bank = bank_of(x, out.size(1), a, b, ranks, ends, most_ranks);
  const int64_t count = rows.size(1), *order = pointer<int64_t>(rows), *slots = order + count;
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(order[i] >= 0 && order[i] < x.size(0) && slots[i] >= 0 && slots[i] < a.size(0),
                    "a row or slot does not exist");
  const int64_t ranks_of_row = bank.parts * most_ranks;
  static thread_local std::vector<float> reduced;
  if (static_cast<int64_t>(reduced.size()) < count * ranks_of_row) reduced.resize(count * ranks_of_row);
  const std::vector<LowRankChunk> chunks = chunks_of(slots, count);
  const LowRankWork work{type,
                         {bank, pointer(x), x.stride(0), writable(out), out.stride(0), out_type == kFloat32, order,
                          slots, reduced.data()},
                         chunks};
  over_rows(chunks.size(), ranks_of_row * bank.inputs, [&](int64_t begin, int64_t end) { work.shrink(begin, end); });
  over_rows(work.num_panels(), count * most_ranks * packed::kPanel,
            [&](int64_t begin, int64_t end) { work.expand(begin, end); });
}

inline void define_lora(Library& m) {
  m.def(
      "add_low_rank(Tensor x, Tensor(a!) out, Tensor a, Tensor? b, Tensor ranks, Tensor ends, Tensor rows, int "
      "most_ranks) -> ()");
}

inline void implement_lora(Library& m) { m.impl("add_low_rank", TORCH_BOX(&add_low_rank)); }

}  // namespace headrace
