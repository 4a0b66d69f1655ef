// compiled for: scalar avx2 avx512
#include "lora.h"

#include "unroll.h"
#include "vector.h"

namespace headrace::HEADRACE_ISA {

constexpr int kRowsAtOnce = 4;  // rows of one adapter that share the loads of its additions

// reduced[n][r] = a[r] x[n] for kRanks rows of `a` from r on.
template <int kRows, int kRanks, class T, class W>
HEADRACE_INLINE void shrink_ranks(const T* const* x, const W* a, int64_t inputs, int64_t r, float* const* reduced) {
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

// kRows places from `i` on, all of one slot.
template <int kRows, class T, class W>
static void shrink_together(const LowRankRows& rows, int64_t i) {
  constexpr int kAtOnce = kRows > 2 ? 2 : 4;  // sums fit into the registers of AVX2
  const LowRankBank& bank = rows.bank;
  const T* x[kRows];
  HEADRACE_EACH(n, kRows) x[n] = static_cast<const T*>(rows.x) + rows.order[i + n] * rows.x_stride;
  const int64_t first = rows.slots[i] * bank.parts;
  for (int64_t part = 0; part < bank.parts; ++part) {
    const int64_t rank = bank.ranks[first + part];
    const W* a = static_cast<const W*>(bank.a) + (first + part) * bank.most_ranks * bank.inputs;
    float* reduced[kRows];
    HEADRACE_EACH(n, kRows) reduced[n] = rows.reduced + ((i + n) * bank.parts + part) * bank.most_ranks;
    int64_t r = 0;
    for (; r + kAtOnce <= rank; r += kAtOnce) shrink_ranks<kRows, kAtOnce>(x, a, bank.inputs, r, reduced);
    for (; r < rank; ++r) shrink_ranks<kRows, 1>(x, a, bank.inputs, r, reduced);
  }
}

template <int kValue>
struct Count {
  constexpr int operator()() const { return kValue; }
};

// f(Count of rows, first place), a few rows of one slot at a time.
template <class F>
HEADRACE_INLINE void over_places(int64_t begin, int64_t end, const F& f) {
  for (; begin + kRowsAtOnce <= end; begin += kRowsAtOnce) f(Count<kRowsAtOnce>{}, begin);
  if (end - begin == 3) f(Count<3>{}, begin);
  else if (end - begin == 2) f(Count<2>{}, begin);
  else if (end - begin == 1) f(Count<1>{}, begin);
}

template <class T, class W>
static void shrink_rows(const LowRankRows& rows, int64_t begin, int64_t end) {
  over_places(begin, end, [&](auto count, int64_t i) { shrink_together<count(), T, W>(rows, i); });
}

static void shrink(int type, const LowRankRows& rows, int64_t begin, int64_t end) {
  if (type == kBFloat16) shrink_rows<bf16, bf16>(rows, begin, end);
  else if (type == kFloat16) shrink_rows<fp16, fp16>(rows, begin, end);
  else if (rows.bank.form == BankForm::kBfloat16) shrink_rows<float, bf16>(rows, begin, end);
  else shrink_rows<float, float>(rows, begin, end);
}

// out[n][i] += sum of reduced[n][r] b[r][i] for i in [0, count), rounded once.
template <int kRows, class W, class O>
HEADRACE_INLINE void expand_part(const float* const* reduced, const W* b, int64_t rank, int64_t stride, int64_t count,
                                 O* const* out) {
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

// Outputs [first, last) of kRows places from `i` on, all of one slot.
template <int kRows, class W, class O>
static void expand_together(const LowRankRows& rows, int64_t i, int64_t first, int64_t last) {
  const LowRankBank& bank = rows.bank;
  const int64_t slot = rows.slots[i];
  const W* b = static_cast<const W*>(bank.b) + slot * bank.most_ranks * bank.outputs;
  int64_t begin = 0;
  for (int64_t part = 0; part < bank.parts; begin = bank.ends[part++]) {
    const int64_t rank = bank.ranks[slot * bank.parts + part], from = begin > first ? begin : first,
                  to = bank.ends[part] < last ? bank.ends[part] : last;
    if (rank == 0 || from >= to) continue;
    const float* reduced[kRows];
    O* out[kRows];
    HEADRACE_EACH(n, kRows) {
      reduced[n] = rows.reduced + ((i + n) * bank.parts + part) * bank.most_ranks;
      out[n] = static_cast<O*>(rows.out) + rows.order[i + n] * rows.out_stride + from;
    }
    expand_part<kRows>(reduced, b + from, rank, bank.outputs, to - from, out);
  }
}

// What `code` makes of 16 floats in place: value = (128 * coarse + fine) * unit, or with other instructions as it is.
// `start` and `start_fine`: -128 times the sums of the codes, as those of b are 128 too large.
struct CodedRanks {
  int8_t coarse[16], fine[16];
  float unit;
  int32_t start, start_fine, unused[5];
};
static_assert(sizeof(CodedRanks) == CodedSlot::kRanks * sizeof(float));

#if defined(HEADRACE_IS_AVX512)
HEADRACE_INLINE void code_ranks(float* values) {
  constexpr int kFineBits = 7;
  const __m512 x = _mm512_loadu_ps(values);
  const float most = _mm512_reduce_max_ps(_mm512_abs_ps(x));
  const float scale = most > 1e-30f ? (127.0f * (1 << kFineBits)) / most : 0.0f;
  const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(scale)));
  const __m512i coarse = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(1 << (kFineBits - 1))), kFineBits);
  const __m512i fine = _mm512_sub_epi32(code, _mm512_slli_epi32(coarse, kFineBits));
  CodedRanks& to = *reinterpret_cast<CodedRanks*>(values);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to.coarse), _mm512_cvtepi32_epi8(coarse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to.fine), _mm512_cvtepi32_epi8(fine));
  to.unit = most / (127.0f * (1 << kFineBits));  // NaN where an input was
  to.start = -128 * _mm512_reduce_add_epi32(coarse), to.start_fine = -128 * _mm512_reduce_add_epi32(fine);
}

HEADRACE_INLINE __m512i word_of(const int8_t* codes, int w) {
  int32_t word;
  memcpy(&word, codes + 4 * w, 4);
  return _mm512_set1_epi32(word);
}

// sums[n] += what 16 ranks give for a panel.
template <int kRows>
HEADRACE_INLINE void add_panel(const uint8_t* codes, const bf16* scales, const float* const* reduced, Vec* sums) {
  constexpr int64_t kAhead = 1 << 10;
  __m512i words[4], dots[kRows];
  HEADRACE_EACH(w, 4) {
    words[w] = _mm512_loadu_si512(codes + 64 * w);
    _mm_prefetch(reinterpret_cast<const char*>(codes + 64 * w) + kAhead, _MM_HINT_T0);
  }
  const Vec scale = load(scales);
  HEADRACE_EACH(n, kRows) dots[n] = _mm512_set1_epi32(reinterpret_cast<const CodedRanks*>(reduced[n])->start);
  HEADRACE_EACH(w, 4) HEADRACE_EACH(n, kRows) {
    const CodedRanks& ranks = *reinterpret_cast<const CodedRanks*>(reduced[n]);
    dots[n] = _mm512_dpbusd_epi32(dots[n], words[w], word_of(ranks.coarse, w));
  }
  HEADRACE_EACH(n, kRows) {
    const CodedRanks& ranks = *reinterpret_cast<const CodedRanks*>(reduced[n]);
    dots[n] = _mm512_add_epi32(_mm512_slli_epi32(dots[n], 7), _mm512_set1_epi32(ranks.start_fine));
  }
  HEADRACE_EACH(w, 4) HEADRACE_EACH(n, kRows) {
    const CodedRanks& ranks = *reinterpret_cast<const CodedRanks*>(reduced[n]);
    dots[n] = _mm512_dpbusd_epi32(dots[n], words[w], word_of(ranks.fine, w));
  }
  HEADRACE_EACH(n, kRows) {
    const CodedRanks& ranks = *reinterpret_cast<const CodedRanks*>(reduced[n]);
    const __m512 by = _mm512_mul_ps(scale.v, _mm512_set1_ps(ranks.unit));
    sums[n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[n]), by, sums[n].v);
  }
}
#else
HEADRACE_INLINE void code_ranks(float*) {}

// sums[n][v]: vector v of a panel, to which 16 ranks are added.
template <int kRows>
HEADRACE_INLINE void add_panel(const uint8_t* codes, const bf16* scales, const float* const* reduced, Vec* sums) {
  constexpr int kVectors = packed::kPanel / kLanes;
  HEADRACE_EACH(v, kVectors) {
    Vec dots[kRows];
    HEADRACE_EACH(n, kRows) dots[n] = Vec(0.0f);
    for (int k = 0; k < CodedSlot::kRanks; ++k) {
      float weights[kLanes];
      for (int l = 0; l < kLanes; ++l)
        weights[l] = static_cast<float>(codes[(k / 4 * packed::kPanel + v * kLanes + l) * 4 + k % 4] - 128);
      HEADRACE_EACH(n, kRows) dots[n] = fma(Vec(reduced[n][k]), load(weights), dots[n]);
    }
    const Vec scale = load(scales + v * kLanes);
    HEADRACE_EACH(n, kRows) sums[n * kVectors + v] = fma(dots[n], scale, sums[n * kVectors + v]);
  }
}
#endif

static void code(const LowRankRows& rows, int64_t begin, int64_t end) {
  const LowRankBank& bank = rows.bank;
  const int64_t* const ranks = bank.ranks + rows.slots[begin] * bank.parts;
  for (int64_t i = begin; i < end; ++i)
    for (int64_t part = 0; part < bank.parts; ++part)
      for (int64_t r = 0; r < ranks[part]; r += CodedSlot::kRanks)
        code_ranks(rows.reduced + (i * bank.parts + part) * bank.most_ranks + r);
}

// Panels [first, last) of kRows places from `i` on, all of one slot.
template <int kRows, class O>
static void expand_codes_together(const LowRankRows& rows, int64_t i, int64_t first, int64_t last) {
  constexpr int kVectors = packed::kPanel / kLanes;
  const LowRankBank& bank = rows.bank;
  const int64_t slot = rows.slots[i];
  const CodedSlot own(bank, slot);
  int64_t begin = 0, from = 0;  // outputs and panels before a part
  for (int64_t part = 0; part < bank.parts; ++part) {
    const int64_t width = bank.ends[part] - begin, to = from + (width + packed::kPanel - 1) / packed::kPanel,
                  groups = (bank.ranks[slot * bank.parts + part] + CodedSlot::kRanks - 1) / CodedSlot::kRanks;
    const float* reduced[kRows];
    HEADRACE_EACH(n, kRows) reduced[n] = rows.reduced + ((i + n) * bank.parts + part) * bank.most_ranks;
    for (int64_t p = from > first ? from : first; groups && p < to && p < last; ++p) {
      const int64_t at = (p - from) * packed::kPanel, left = width - at;
      O* out[kRows];
      HEADRACE_EACH(n, kRows) out[n] = static_cast<O*>(rows.out) + rows.order[i + n] * rows.out_stride + begin + at;
      const auto lanes = [&](int v) {
        return left - v * kLanes < kLanes ? static_cast<int>(left - v * kLanes) : kLanes;
      };
      Vec sums[kRows * kVectors];
      HEADRACE_EACH(n, kRows) HEADRACE_EACH(v, kVectors) {
        if (left >= packed::kPanel) sums[n * kVectors + v] = load(out[n] + v * kLanes);
        else sums[n * kVectors + v] = lanes(v) > 0 ? load(out[n] + v * kLanes, lanes(v)) : Vec(0.0f);
      }
      const float* ranks[kRows];
      for (int64_t g = 0; g < groups; ++g) {
        HEADRACE_EACH(n, kRows) ranks[n] = reduced[n] + g * CodedSlot::kRanks;
        const int64_t panel = g * own.panels + p;
        add_panel<kRows>(own.codes + panel * packed::kPanel * CodedSlot::kRanks, own.scales + panel * packed::kPanel,
                         ranks, sums);
      }
      HEADRACE_EACH(n, kRows) HEADRACE_EACH(v, kVectors) {
        if (left >= packed::kPanel) store(out[n] + v * kLanes, sums[n * kVectors + v]);
        else if (lanes(v) > 0) store(out[n] + v * kLanes, sums[n * kVectors + v], lanes(v));
      }
    }
    begin = bank.ends[part], from = to;
  }
}

template <class W, class O>
static void expand_rows(const LowRankRows& rows, int64_t begin, int64_t end, int64_t first, int64_t last) {
  over_places(begin, end, [&](auto count, int64_t i) {
    expand_together<count(), W, O>(rows, i, first * packed::kPanel, last * packed::kPanel);
  });
}

template <class O>
static void expand_codes(const LowRankRows& rows, int64_t begin, int64_t end, int64_t first, int64_t last) {
  over_places(begin, end,
              [&](auto count, int64_t i) { expand_codes_together<count(), O>(rows, i, first, last); });
}

template <class T, class W>
static void expand_of_type(const LowRankRows& rows, int64_t begin, int64_t end, int64_t first, int64_t last) {
  rows.is_out_float ? expand_rows<W, float>(rows, begin, end, first, last)
                    : expand_rows<W, T>(rows, begin, end, first, last);
}

static void expand(int type, const LowRankRows& rows, int64_t begin, int64_t end, int64_t first, int64_t last) {
  if (rows.bank.form == BankForm::kCoded)
    type == kBFloat16 && !rows.is_out_float ? expand_codes<bf16>(rows, begin, end, first, last)
                                            : expand_codes<float>(rows, begin, end, first, last);
  else if (type == kBFloat16) expand_of_type<bf16, bf16>(rows, begin, end, first, last);
  else if (type == kFloat16) expand_of_type<fp16, fp16>(rows, begin, end, first, last);
  else if (rows.bank.form == BankForm::kBfloat16) expand_rows<bf16, float>(rows, begin, end, first, last);
  else expand_rows<float, float>(rows, begin, end, first, last);
}

extern const LowRankKernels low_rank_kernels;
const LowRankKernels low_rank_kernels = {shrink, code, expand};

}  // namespace headrace::HEADRACE_ISA
