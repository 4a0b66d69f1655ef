// The additions of adapters to one product as pieces of work: shrink by rows of an adapter, then expand by outputs.
#pragma once

#include <algorithm>
#include <vector>

#include "bind_packed.h"
#include "lora.h"

namespace headrace {

// Rows of one adapter that are shrunk together.
struct LowRankChunk {
  int64_t begin, end;  // places in LowRankRows::order
};

inline std::vector<LowRankChunk> chunks_of(const int64_t* slots, int64_t count) {
  std::vector<LowRankChunk> chunks;
  for (int64_t i = 0, first = 0; i < count; first = i) {
    while (i < count && slots[i] == slots[first] && i - first < packed::GroupRows::kRows) ++i;
    chunks.push_back({first, i});
  }
  return chunks;
}

// `a` of a coded bank as a packed product; the sums are then coded for expand.
inline void shrink_codes(int type, const LowRankRows& rows, const LowRankChunk& chunk) {
  const LowRankBank& bank = rows.bank;
  const int64_t slot = rows.slots[chunk.begin], count = chunk.end - chunk.begin;
  const int64_t* const ranks = bank.ranks + slot * bank.parts;
  const packed::Weight weight = CodedSlot(bank, slot).a;
  const packed::Rows values = packed_scratch().rows(packed::RowForm::kInt8Group, weight, count);
  const int64_t size = type == kFloat32 ? 4 : 2;
  const PackedKernels& kernels = best_packed_kernels();
  for (int64_t i = 0; i < count; ++i) {
    const char* const x =
        static_cast<const char*>(rows.x) + (rows.order[chunk.begin + i] - i) * rows.x_stride * size;
    kernels.prepare(weight, {x, count, rows.x_stride, type == kBFloat16}, values, i, i + 1);
  }
  const packed::Output to{rows.reduced + chunk.begin * weight.outputs, weight.outputs, false, nullptr, false};
  const int64_t panels = bank.most_ranks / packed::kPanel;  // of a part
  int64_t first = 0, last = 0;  // one call for parts whose panels touch
  for (int64_t part = 0; part < bank.parts; ++part) {
    if (part * panels != last) {
      if (first < last) kernels.multiply(weight, values, to, 0, count, first, last);
      first = part * panels;
    }
    last = part * panels + (ranks[part] + packed::kPanel - 1) / packed::kPanel;
  }
  if (first < last) kernels.multiply(weight, values, to, 0, count, first, last);
  best_low_rank_kernels().code(rows, chunk.begin, chunk.end);
}

// Shrink chunk by chunk, then expand panels [first, last) for all rows, in any order and by any threads.
struct LowRankWork {
  int type;
  LowRankRows rows;
  const std::vector<LowRankChunk>& chunks;

  int64_t num_panels() const {
    return rows.bank.form == BankForm::kCoded ? CodedSlot::panels_of(rows.bank)
                                              : (rows.bank.outputs + packed::kPanel - 1) / packed::kPanel;
  }
  void shrink(int64_t begin, int64_t end) const {
    for (; begin < end; ++begin) {
      if (rows.bank.form == BankForm::kCoded) shrink_codes(type, rows, chunks[begin]);
      else best_low_rank_kernels().shrink(type, rows, chunks[begin].begin, chunks[begin].end);
    }
  }
  void expand(int64_t first, int64_t last) const {
    for (const LowRankChunk& chunk : chunks)
      best_low_rank_kernels().expand(type, rows, chunk.begin, chunk.end, first, last);
  }
};

}  // namespace headrace
