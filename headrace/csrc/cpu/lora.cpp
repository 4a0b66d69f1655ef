// compiled for: scalar avx2 avx512
#include "lora.h"

#include "unroll.h"
#include "vector.h"

namespace headrace::HEADRACE_ISA {

constexpr int kRowsAtOnce = 4;       // rows of one adapter that share the loads of its additions
constexpr int64_t kMostRanks = 512;  // of an adapter, see AdapterConfig

using Reduced = float[kRowsAtOnce][kMostRanks];

// reduced[n][r] = a[r] x[n] for kRanks rows of `a` from r on.
template <int kRows, int kRanks, class T, class W>
HEADRACE_INLINE void shrink_ranks(const T* const* x, const W* a, int64_t inputs, int64_t r, Reduced& reduced) {
  const W* rows = a + r * inputs;
  Vec sums[kRows][kRanks];
  HEADRACE_EACH(n, kRows) HEADRACE_EACH(k, kRanks) sums[n][k] = Vec(0.0f);
  over_lanes(inputs, [&](int64_t i, auto part) {
    Vec values[kRows];
    HEADRACE_EACH(n, kRows) values[n] = part.load(x[n] + i);
    HEADRACE_EACH(k, kRanks) {
      const Vec weights = part.load(rows + k * inputs + i);
      HEADRACE_EACH(n, kRows) sums[n][k] = fma(values[n], weights, sums[n][k]);
    }
  });
  HEADRACE_EACH(n, kRows) HEADRACE_EACH(k, kRanks) reduced[n][r + k] = sum(sums[n][k]);
}

template <int kRows, class T, class W>
static void shrink(const T* const* x, const W* a, int64_t rank, int64_t inputs, Reduced& reduced) {
  constexpr int kAtOnce = kRows > 2 ? 2 : 4;  // sums fit into the registers of AVX2
  int64_t r = 0;
  for (; r + kAtOnce <= rank; r += kAtOnce) shrink_ranks<kRows, kAtOnce>(x, a, inputs, r, reduced);
  for (; r < rank; ++r) shrink_ranks<kRows, 1>(x, a, inputs, r, reduced);
}

// out[n][i] += sum of reduced[n][r] b[r][i] for i in [0, count), rounded once.
template <int kRows, class W, class O>
static void expand(const Reduced& reduced, const W* b, int64_t rank, int64_t stride, int64_t count, O* const* out) {
  constexpr int kWide = kRows > 2 ? 2 : 4;  // vectors of each row of `b` at a time: its rows are far apart
  int64_t whole = 0;
  for (; whole + kWide * kLanes <= count; whole += kWide * kLanes) {
    Vec sums[kRows][kWide];
    HEADRACE_EACH(n, kRows) HEADRACE_EACH(k, kWide) sums[n][k] = load(out[n] + whole + k * kLanes);
    const W* own = b + whole;
    for (int64_t r = 0; r < rank; ++r, own += stride) {
      Vec weights[kWide];
      HEADRACE_EACH(k, kWide) weights[k] = load(own + k * kLanes);
      HEADRACE_EACH(n, kRows) {
        const Vec factor(reduced[n][r]);
        HEADRACE_EACH(k, kWide) sums[n][k] = fma(factor, weights[k], sums[n][k]);
      }
    }
    HEADRACE_EACH(n, kRows) HEADRACE_EACH(k, kWide) store(out[n] + whole + k * kLanes, sums[n][k]);
  }
  over_lanes(count - whole, [&](int64_t i, auto part) {
    Vec sums[kRows];
    HEADRACE_EACH(n, kRows) sums[n] = part.load(out[n] + whole + i);
    for (int64_t r = 0; r < rank; ++r) {
      const Vec weights = part.load(b + r * stride + whole + i);
      HEADRACE_EACH(n, kRows) sums[n] = fma(Vec(reduced[n][r]), weights, sums[n]);
    }
    HEADRACE_EACH(n, kRows) part.store(out[n] + whole + i, sums[n]);
  });
}

// kRows places from `i` on, all of one slot.
template <int kRows, class T, class W, class O>
static void add_together(const LowRankRows& rows, int64_t i) {
  const LowRankBank& bank = rows.bank;
  Reduced reduced;
  const T* x[kRows];
  O *out[kRows], *from[kRows];
  HEADRACE_EACH(n, kRows) {
    x[n] = static_cast<const T*>(rows.x) + rows.order[i + n] * rows.x_stride;
    out[n] = static_cast<O*>(rows.out) + rows.order[i + n] * rows.out_stride;
  }
  const int64_t slot = rows.slots[i];
  const W* a = static_cast<const W*>(bank.a) + slot * bank.parts * bank.most_ranks * bank.inputs;
  const W* b = static_cast<const W*>(bank.b) + slot * bank.most_ranks * bank.outputs;
  int64_t first = 0;
  for (int64_t part = 0; part < bank.parts; ++part) {
    const int64_t rank = bank.ranks[slot * bank.parts + part], last = bank.ends[part];
    if (rank) {
      HEADRACE_EACH(n, kRows) from[n] = out[n] + first;
      shrink<kRows>(x, a + part * bank.most_ranks * bank.inputs, rank, bank.inputs, reduced);
      expand<kRows>(reduced, b + first, rank, bank.outputs, last - first, from);
    }
    first = last;
  }
}

template <class T, class W, class O>
static void add_rows(const LowRankRows& rows, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end;) {
    int64_t count = 1;
    while (count < kRowsAtOnce && i + count < end && rows.slots[i + count] == rows.slots[i]) ++count;
    if (count == 4) add_together<4, T, W, O>(rows, i);
    else if (count == 3) add_together<3, T, W, O>(rows, i);
    else if (count == 2) add_together<2, T, W, O>(rows, i);
    else add_together<1, T, W, O>(rows, i);
    i += count;
  }
}

template <class T, class W>
static void add_of_type(const LowRankRows& rows, int64_t begin, int64_t end) {
  rows.is_out_float ? add_rows<T, W, float>(rows, begin, end) : add_rows<T, W, T>(rows, begin, end);
}

static void add(int type, const LowRankRows& rows, int64_t begin, int64_t end) {
  if (type == kFloat32)
    rows.bank.is_bfloat16 ? add_rows<float, bf16, float>(rows, begin, end)
                          : add_rows<float, float, float>(rows, begin, end);
  else if (type == kBFloat16) add_of_type<bf16, bf16>(rows, begin, end);
  else add_of_type<fp16, fp16>(rows, begin, end);
}

extern const LowRankKernels low_rank_kernels;
const LowRankKernels low_rank_kernels = {add};

}  // namespace headrace::HEADRACE_ISA
