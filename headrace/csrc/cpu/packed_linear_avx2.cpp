// compiled for: avx2 avxvnni
// Packed products for AVX2 with FMA and F16C; with AVX-VNNI those of codes take a half to a quarter of the
// instructions. Two registers hold the 16 outputs of a panel; rows are taken a few at a time so that their sums stay in
// registers.
#include <immintrin.h>

#include <type_traits>

#include "packed_rows.h"

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int64_t kAhead = 16 * 64;  // bytes fetched ahead of the loads; the hardware stops at the end of a page

RowForm choose_form(const Weight& weight, int64_t, bool) {
  if (weight.format <= Format::kBfloat16) return RowForm::kFloat32;
  return weight.format == Format::kInt8 ? RowForm::kInt8 : RowForm::kInt8Group;
}

inline __m256i load(const uint32_t* words) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)); }

inline void fetch_ahead(const uint32_t* words) {
  _mm_prefetch(reinterpret_cast<const char*>(words) + kAhead, _MM_HINT_T0);
}

// Inputs of 16 outputs in bfloat16: those at even (0) or odd places.
template <int kPlace>
inline __m256 widen(__m256i words) {
  return _mm256_castsi256_ps(kPlace ? _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u)))
                                    : _mm256_slli_epi32(words, 16));
}

// R rows. Sums are kept in two chains, of even and odd inputs, and added in the end, whatever the number of rows: so a
// row gets the same sums in any batch, and few rows do not wait for one another's additions. C chains from kChain on:
template <bool kIsHalf, int R, int kChain, int C>
void multiply_floats(const Weight& weight, const float* x, int64_t p, float sums[][kPanel]) {
  const int64_t padded = weight.padded();
  const uint32_t* at = weight.panel(p);
  __m256 acc[R][C][2];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c][0] = acc[r][c][1] = _mm256_setzero_ps();
  const auto add = [&]<int c>(int64_t k) __attribute__((always_inline)) {
    __m256 inputs[2];
    for (int i = 0; i < 2; ++i) {
      const __m256i words = load(at + 8 * i + (kIsHalf ? 0 : (kChain + c) * kPanel));
      inputs[i] = kIsHalf ? widen<kChain + c>(words) : _mm256_castsi256_ps(words);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256 value = _mm256_broadcast_ss(x + r * padded + k + kChain + c);
      for (int i = 0; i < 2; ++i) acc[r][c][i] = _mm256_fmadd_ps(value, inputs[i], acc[r][c][i]);
    }
    asm volatile("" ::: "memory");  // loads of what follows would take the registers of sums
  };
  for (int64_t k = 0; k < padded; k += 4) {
#pragma GCC unroll 2
    for (int pair = 0; pair < 4; pair += 2, at += kIsHalf ? kPanel : 2 * kPanel) {
      fetch_ahead(kIsHalf ? at : at + kChain * kPanel);
      if constexpr (!kIsHalf && C == 2) fetch_ahead(at + kPanel);
      add.template operator()<0>(k + pair);
      if constexpr (C == 2) add.template operator()<1>(k + pair);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < 2; ++i) {
      float* const sum = sums[r] + 8 * i;
      const __m256 before = C == 2 ? acc[r][0][i] : _mm256_loadu_ps(sum);
      _mm256_storeu_ps(sum, C == 2 || kChain == 1 ? _mm256_add_ps(before, acc[r][C - 1][i]) : acc[r][0][i]);
    }
  }
}

template <bool kIsHalf, int R>
void multiply_floats(const Weight& weight, const float* x, int64_t p, float sums[][kPanel]) {
  if constexpr (R <= 3) return multiply_floats<kIsHalf, R, 0, 2>(weight, x, p, sums);
  multiply_floats<kIsHalf, R, 0, 1>(weight, x, p, sums);  // there are registers for one chain
  multiply_floats<kIsHalf, R, 1, 1>(weight, x, p, sums);
}

inline __m256i broadcast(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

// Ends a step: compilers would begin with what follows, for other rows, and then have no registers for sums.
inline void settle(__m256i& low, __m256i& high) { asm volatile("" : "+x"(low), "+x"(high)); }

#ifdef HEADRACE_IS_AVXVNNI
constexpr bool kHasVnni = true;
inline __m256i add_dot(__m256i sum, __m256i sizes, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, sizes, x); }
#else
constexpr bool kHasVnni = false;
// Sums of two products must stay below 2^15.
inline __m256i add_dot(__m256i sum, __m256i sizes, __m256i x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, x), _mm256_set1_epi16(1)));
}
#endif

// Sixteen outputs' codes of four inputs each, signed: one side of products must be unsigned, so the weight's sign is
// moved to x. Codes are within +-127.
struct SignedCodes {
  __m256i low, high, low_size, high_size;

  SignedCodes(__m256i low_words, __m256i high_words)
      : low(low_words), high(high_words), low_size(_mm256_abs_epi8(low)), high_size(_mm256_abs_epi8(high)) {}
  explicit SignedCodes(const uint32_t* at) : SignedCodes(load(at), load(at + 8)) {}
  void add(__m256i acc[2], __m256i x) const {
    acc[0] = add_dot(acc[0], low_size, _mm256_sign_epi8(x, low));
    acc[1] = add_dot(acc[1], high_size, _mm256_sign_epi8(x, high));
  }
  static void finish(__m256i[2]) {}
};

// Without VNNI, sums of a group stay 16 bits until it is over where codes are so small that eight sums of two products
// are below 2^15: 8 * 2 * 15 * 127 of nibbles as they are, 8 * 2 * 12 * 127 of E2M1 numbers.
inline __m256i add_small_dot(__m256i sum, __m256i sizes, __m256i x) {
  return kHasVnni ? add_dot(sum, sizes, x) : _mm256_add_epi16(sum, _mm256_maddubs_epi16(sizes, x));
}
inline void finish_small_dots(__m256i acc[2]) {
  for (int i = 0; i < 2 && !kHasVnni; ++i) acc[i] = _mm256_madd_epi16(acc[i], _mm256_set1_epi16(1));
}

inline __m256i low_nibbles(__m256i words) { return _mm256_and_si256(words, _mm256_set1_epi8(15)); }

// Those of nibbles that are looked up.
template <Format F>
struct LookedUpCodes : SignedCodes {
  LookedUpCodes(__m256i low_words, __m256i high_words) : SignedCodes(look_up(low_words), look_up(high_words)) {}
  void add(__m256i acc[2], __m256i x) const {
    if constexpr (F != Format::kE2m1Group) return SignedCodes::add(acc, x);
    acc[0] = add_small_dot(acc[0], low_size, _mm256_sign_epi8(x, low));
    acc[1] = add_small_dot(acc[1], high_size, _mm256_sign_epi8(x, high));
  }
  static void finish(__m256i acc[2]) {
    if constexpr (F == Format::kE2m1Group) finish_small_dots(acc);
  }
  static __m256i look_up(__m256i words) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table_of(F).values));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), low_nibbles(words));
  }
};

// The same of nibbles as they are, which are unsigned.
struct Nibbles {
  __m256i low, high;

  Nibbles(__m256i low_words, __m256i high_words) : low(low_nibbles(low_words)), high(low_nibbles(high_words)) {}
  void add(__m256i acc[2], __m256i x) const {
    acc[0] = add_small_dot(acc[0], low, x);
    acc[1] = add_small_dot(acc[1], high, x);
  }
  static void finish(__m256i acc[2]) { finish_small_dots(acc); }
};

// Adds the products of some codes with R rows, `stride` bytes apart.
template <int R, class Codes>
inline void add_products(const Codes& codes, const int8_t* x, int64_t stride, __m256i acc[R][2]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    codes.add(acc[r], broadcast(x + r * stride));
    if constexpr (R > 2) settle(acc[r][0], acc[r][1]);
  }
}

template <int R>
void multiply_int8(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  const int64_t padded = weight.padded();
  const int8_t* x = static_cast<const int8_t*>(rows.values) + m * padded;
  const uint32_t* at = weight.panel(p);
  __m256i acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  for (int64_t k = 0; k < padded; k += 4, at += kPanel) {
    fetch_ahead(at);
    const SignedCodes codes(at);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) codes.add(acc[r], broadcast(x + r * padded + k));
  }
  for (int r = 0; r < R; ++r) {
    const __m256 scale = _mm256_set1_ps(rows.scales[m + r]);
    for (int i = 0; i < 2; ++i) {
      const __m256 scales = _mm256_mul_ps(scale, _mm256_loadu_ps(weight.scales + p * kPanel + 8 * i));
      _mm256_storeu_ps(sums[r] + 8 * i, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][i]), scales));
    }
  }
}

inline __m256 load_float16(const uint16_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// Sums of the products of one group of 32 inputs, as integers.
template <int R>
inline void dot_bytes(const uint32_t* at, const int8_t* x, int64_t stride, __m256i acc[R][2]) {
#pragma GCC unroll 8
  for (int word = 0; word < 8; ++word, at += kPanel) {
    fetch_ahead(at);
    add_products<R>(SignedCodes(at), x + 4 * word, stride, acc);
  }
}

template <class Codes, int R>
inline void dot_nibbles(const uint32_t* at, const int8_t* x, int64_t stride, __m256i acc[R][2]) {
#pragma GCC unroll 4
  for (int word = 0; word < 4; ++word, at += kPanel) {
    fetch_ahead(at);
    const __m256i low = load(at), high = load(at + 8);
    add_products<R>(Codes(low, high), x + 8 * word, stride, acc);
    add_products<R>(Codes(_mm256_srli_epi16(low, 4), _mm256_srli_epi16(high, 4)), x + 8 * word + 4, stride, acc);
  }
}

template <Format F>
using CodesOf = std::conditional_t<F == Format::kInt8Group, SignedCodes,
                                   std::conditional_t<F == Format::kInt4Group, Nibbles, LookedUpCodes<F>>>;

constexpr int64_t words_of_group(Format format) { return kGroup / (format == Format::kInt8Group ? 4 : 8) * kPanel; }

template <Format F, int R>
inline void dot_group(const uint32_t* at, const int8_t* x, int64_t stride, __m256i acc[R][2]) {
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  if constexpr (F == Format::kInt8Group) dot_bytes<R>(at, x, stride, acc);
  else dot_nibbles<CodesOf<F>, R>(at, x, stride, acc);
  for (int r = 0; r < R; ++r) CodesOf<F>::finish(acc[r]);
}

// Adds what fine bytes contribute to the sums of the 16 rows from m on.
template <Format F>
void add_fine(const Weight& weight, const Rows& rows, const FineGroups& groups_of_rows, int64_t m, int64_t p,
              float sums[][kPanel]) {
  const int64_t padded = weight.padded(), groups = weight.groups();
  const GroupRows bytes(rows.values, rows.count, padded);
  groups_of_rows.over(m, [&](int64_t g, uint32_t members) {
    const uint16_t* const scales = weight.group_scales + (p * groups + g) * kPanel;
    for (; members; members &= members - 1) {
      const int64_t r = __builtin_ctz(members);
      __m256i acc[1][2];
      dot_group<F, 1>(weight.panel(p) + g * words_of_group(F), bytes.fine + (m + r) * padded + g * kGroup, 0, acc);
      const __m256 unit = _mm256_set1_ps(rows.scales[(m + r) * groups + g] / (1 << GroupRows::kFineBits));
      for (int i = 0; i < 2; ++i) {
        float* const sum = sums[r] + 8 * i;
        const __m256 by = _mm256_mul_ps(load_float16(scales + 8 * i), unit);
        _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[0][i]), by, _mm256_loadu_ps(sum)));
      }
    }
  });
}

template <Format F, int R>
void multiply_groups(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  const int64_t padded = weight.padded(), groups = weight.groups();
  const int8_t* x = static_cast<const int8_t*>(rows.values) + m * padded;
  const float *x_scales = rows.scales + m * groups, *x_sums = rows.sums + m * groups;
  const uint32_t* at = weight.panel(p);
  const uint16_t* scales = weight.group_scales + p * groups * kPanel;
  const uint16_t* mins = weight.group_mins == nullptr ? nullptr : weight.group_mins + p * groups * kPanel;
  __m256 total[R][2];
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, x += kGroup, at += words_of_group(F)) {
    __m256i acc[R][2];
    dot_group<F, R>(at, x, padded, acc);
    __m256 scale[2], least[2];
    for (int i = 0; i < 2; ++i) {
      scale[i] = load_float16(scales + g * kPanel + 8 * i);
      if (mins != nullptr) least[i] = load_float16(mins + g * kPanel + 8 * i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 x_scale = _mm256_broadcast_ss(x_scales + r * groups + g);
      for (int i = 0; i < 2; ++i)
        total[r][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][i]), _mm256_mul_ps(scale[i], x_scale), total[r][i]);
    }
    if (mins == nullptr) continue;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 x_sum = _mm256_broadcast_ss(x_sums + r * groups + g);
      for (int i = 0; i < 2; ++i) total[r][i] = _mm256_fmadd_ps(least[i], x_sum, total[r][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i) _mm256_storeu_ps(sums[r] + 8 * i, total[r][i]);
}

// f.template operator()<R>() for `count` rows, at most kMost.
template <int kMost, class F>
inline void with_rows(int64_t count, const F& f) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_rows<kMost - 1>(count, f);
  }
  f.template operator()<kMost>();
}

// As many rows at a time as there are registers for, evenly.
inline int64_t rows_at_once(int64_t left, int64_t most) {
  const int64_t times = (left + most - 1) / most;
  return (left + times - 1) / times;
}

template <Format F>
void multiply_group_panel(const Weight& weight, const Rows& rows, const FineGroups& groups, const Output& out,
                          int64_t first_row, int64_t last_row, int64_t p) {
  float sums[GroupRows::kRows][kPanel];
  for (int64_t block = first_row; block < last_row; block += GroupRows::kRows) {
    const int64_t last = block + GroupRows::kRows < last_row ? block + GroupRows::kRows : last_row;
    for (int64_t m = block, count; m < last; m += count) {
      count = rows_at_once(last - m, 4);
      with_rows<4>(count, [&]<int R>() { multiply_groups<F, R>(weight, rows, m, p, sums + (m - block)); });
    }
    if (groups.has_some(block)) add_fine<F>(weight, rows, groups, block, p, sums);
    for (int64_t m = block; m < last; ++m) store_row(weight, out, m, p, sums[m - block]);
  }
}

void multiply_int8_panel(const Weight& weight, const Rows& rows, const FineGroups&, const Output& out,
                         int64_t first_row, int64_t last_row, int64_t p) {
  float sums[4][kPanel];
  for (int64_t m = first_row, count; m < last_row; m += count) {
    count = rows_at_once(last_row - m, 4);
    with_rows<4>(count, [&]<int R>() { multiply_int8<R>(weight, rows, m, p, sums); });
    for (int64_t r = 0; r < count; ++r) store_row(weight, out, m + r, p, sums[r]);
  }
}

template <bool kIsHalf>
void multiply_float_panel(const Weight& weight, const Rows& rows, const FineGroups&, const Output& out,
                          int64_t first_row, int64_t last_row, int64_t p) {
  float sums[6][kPanel];
  for (int64_t m = first_row, count; m < last_row; m += count) {
    count = rows_at_once(last_row - m, 6);
    const float* x = static_cast<const float*>(rows.values) + m * weight.padded();
    with_rows<6>(count, [&]<int R>() { multiply_floats<kIsHalf, R>(weight, x, p, sums); });
    for (int64_t r = 0; r < count; ++r) store_row(weight, out, m + r, p, sums[r]);
  }
}

void multiply(const Weight& weight, const Rows& rows, const Output& out, int64_t first_row, int64_t last_row,
              int64_t first, int64_t last) {
  constexpr decltype(&multiply_int8_panel) kPanels[] = {multiply_float_panel<false>, multiply_float_panel<true>,
                                                        multiply_int8_panel, multiply_group_panel<Format::kInt8Group>,
                                                        multiply_group_panel<Format::kInt4Group>,
                                                        multiply_group_panel<Format::kE2m1Group>,
                                                        multiply_group_panel<Format::kIq4Group>};
  const FineGroups groups(weight, rows, first_row, last_row);
  for (int64_t p = first; p < last; ++p)
    kPanels[static_cast<int64_t>(weight.format)](weight, rows, groups, out, first_row, last_row, p);
}

}  // namespace

extern const PackedKernels packed_kernels;
const PackedKernels packed_kernels = {choose_form, prepare_rows, multiply};

}  // namespace headrace::HEADRACE_ISA
