// compiled for: avx2
// Packed products for AVX2 with FMA and F16C. Two registers hold the 16 outputs of a panel; rows are taken a few at a time
// so that their sums stay in registers.
#include <immintrin.h>

#include "packed_rows.h"

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int64_t kAhead = 16 * 64;  // bytes fetched ahead of the loads; the hardware stops at the end of a page

RowForm choose_form(const Weight& weight, int64_t, bool) {
  if (weight.format <= Format::kBfloat16) return RowForm::kFloat32;
  return weight.format == Format::kInt8 ? RowForm::kInt8 : RowForm::kInt8Group;
}

inline __m256i load(const uint32_t* words) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)); }

inline void fetch_ahead(const uint32_t* words) { _mm_prefetch(reinterpret_cast<const char*>(words) + kAhead, _MM_HINT_T0); }

// Two neighbouring inputs of 16 outputs: [input][half of the panel].
inline void widen_pair(const uint32_t* at, __m256 pair[2][2]) {
  const __m256i low = load(at), high = load(at + 8), odd = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  pair[0][0] = _mm256_castsi256_ps(_mm256_slli_epi32(low, 16));
  pair[0][1] = _mm256_castsi256_ps(_mm256_slli_epi32(high, 16));
  pair[1][0] = _mm256_castsi256_ps(_mm256_and_si256(low, odd));
  pair[1][1] = _mm256_castsi256_ps(_mm256_and_si256(high, odd));
}

// R rows; C independent chains of sums each, so that few rows do not wait for one another's additions.
template <bool kIsHalf, int R, int C>
void multiply_floats(const Weight& weight, const float* x, int64_t p, float sums[][kPanel]) {
  const int64_t padded = weight.padded();
  const uint32_t* at = weight.panel(p);
  constexpr int64_t kStep = kIsHalf ? kPanel : 2 * kPanel;  // words of two inputs
  __m256 acc[R][C][2];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c][0] = acc[r][c][1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < padded; k += 4) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, at += kStep) {
      fetch_ahead(at);
      if constexpr (!kIsHalf) fetch_ahead(at + kPanel);
      __m256 pair[2][2];
      if constexpr (kIsHalf) widen_pair(at, pair);
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        if constexpr (!kIsHalf) {  // none before its turn: there is a register for each sum and hardly another
          for (int i = 0; i < 2; ++i) pair[j][i] = _mm256_castsi256_ps(load(at + j * kPanel + 8 * i));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256 value = _mm256_broadcast_ss(x + r * padded + k + 2 * half + j);
          const int c = (2 * half + j) % C;
          acc[r][c][0] = _mm256_fmadd_ps(value, pair[j][0], acc[r][c][0]);
          acc[r][c][1] = _mm256_fmadd_ps(value, pair[j][1], acc[r][c][1]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 1; c < C; ++c)
      for (int i = 0; i < 2; ++i) acc[r][0][i] = _mm256_add_ps(acc[r][0][i], acc[r][c][i]);
    for (int i = 0; i < 2; ++i) _mm256_storeu_ps(sums[r] + 8 * i, acc[r][0][i]);
  }
}

inline __m256i broadcast(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

// Sums of four products of signed bytes each. maddubs takes one side unsigned: the weight's sign is moved to x. Codes
// are within +-127, so that its sums of two stay below 2^15.
inline __m256i dot(__m256i magnitude, __m256i weight, __m256i x) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, weight)), _mm256_set1_epi16(1));
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
    const __m256i low = load(at), high = load(at + 8);
    const __m256i low_size = _mm256_abs_epi8(low), high_size = _mm256_abs_epi8(high);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i value = broadcast(x + r * padded + k);
      acc[r][0] = _mm256_add_epi32(acc[r][0], dot(low_size, low, value));
      acc[r][1] = _mm256_add_epi32(acc[r][1], dot(high_size, high, value));
    }
  }
  for (int r = 0; r < R; ++r) {
    const __m256 scale = _mm256_set1_ps(rows.scales[m + r]);
    for (int i = 0; i < 2; ++i) {
      const __m256 scales = _mm256_mul_ps(scale, _mm256_loadu_ps(weight.scales + p * kPanel + 8 * i));
      _mm256_storeu_ps(sums[r] + 8 * i, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][i]), scales));
    }
  }
}

inline __m256 load_float16(const uint16_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }

// Products of one group with bytes: sums of 32 products as integers.
template <int R>
inline const uint32_t* dot_group_int8(const uint32_t* at, const int8_t* x, int64_t padded, __m256i acc[R][2]) {
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int word = 0; word < 8; ++word, at += kPanel) {
    fetch_ahead(at);
    const __m256i low = load(at), high = load(at + 8);
    const __m256i low_size = _mm256_abs_epi8(low), high_size = _mm256_abs_epi8(high);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i value = broadcast(x + r * padded + 4 * word);
      acc[r][0] = _mm256_add_epi32(acc[r][0], dot(low_size, low, value));
      acc[r][1] = _mm256_add_epi32(acc[r][1], dot(high_size, high, value));
    }
  }
  return at;
}

// The same with nibbles, which are unsigned: eight sums of two products are at most 8 * 2 * 15 * 127 < 2^15.
template <int R>
inline const uint32_t* dot_group_int4(const uint32_t* at, const int8_t* x, int64_t padded, __m256i acc[R][2]) {
  const __m256i nibbles = _mm256_set1_epi8(15);
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int word = 0; word < 4; ++word, at += kPanel) {
    fetch_ahead(at);
    const __m256i low = load(at), high = load(at + 8);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i low_codes = _mm256_and_si256(half ? _mm256_srli_epi16(low, 4) : low, nibbles);
      const __m256i high_codes = _mm256_and_si256(half ? _mm256_srli_epi16(high, 4) : high, nibbles);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i value = broadcast(x + r * padded + 8 * word + 4 * half);
        acc[r][0] = _mm256_add_epi16(acc[r][0], _mm256_maddubs_epi16(low_codes, value));
        acc[r][1] = _mm256_add_epi16(acc[r][1], _mm256_maddubs_epi16(high_codes, value));
      }
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i) acc[r][i] = _mm256_madd_epi16(acc[r][i], ones);
  return at;
}

template <bool kIsInt4, int R>
void multiply_groups(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  const int64_t padded = weight.padded(), groups = weight.groups();
  const int8_t* x = static_cast<const int8_t*>(rows.values) + m * padded;
  const float *x_scales = rows.scales + m * groups, *x_sums = rows.sums + m * groups;
  const uint32_t* at = weight.panel(p);
  const uint16_t* scales = weight.group_scales + p * groups * kPanel;
  const uint16_t* mins = weight.group_mins == nullptr ? nullptr : weight.group_mins + p * groups * kPanel;
  __m256 total[R][2];
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, x += kGroup, scales += kPanel) {
    __m256i acc[R][2];
    at = kIsInt4 ? dot_group_int4<R>(at, x, padded, acc) : dot_group_int8<R>(at, x, padded, acc);
    for (int i = 0; i < 2; ++i) {
      const __m256 scale = load_float16(scales + 8 * i);
      for (int r = 0; r < R; ++r) {
        const __m256 by = _mm256_mul_ps(scale, _mm256_broadcast_ss(x_scales + r * groups + g));
        total[r][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][i]), by, total[r][i]);
      }
      if (mins == nullptr) continue;
      const __m256 least = load_float16(mins + g * kPanel + 8 * i);
      for (int r = 0; r < R; ++r) total[r][i] = _mm256_fmadd_ps(least, _mm256_broadcast_ss(x_sums + r * groups + g), total[r][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i) _mm256_storeu_ps(sums[r] + 8 * i, total[r][i]);
}

template <bool kIsHalf>
void multiply_float_rows(const Weight& weight, const float* x, int64_t count, int64_t p, float sums[][kPanel]) {
  switch (count) {
    case 1: return multiply_floats<kIsHalf, 1, 4>(weight, x, p, sums);
    case 2: return multiply_floats<kIsHalf, 2, 2>(weight, x, p, sums);
    case 3: return multiply_floats<kIsHalf, 3, 1>(weight, x, p, sums);
    case 4: return multiply_floats<kIsHalf, 4, 1>(weight, x, p, sums);
    case 5: return multiply_floats<kIsHalf, 5, 1>(weight, x, p, sums);
    default: return multiply_floats<kIsHalf, 6, 1>(weight, x, p, sums);
  }
}

template <int R>
void multiply_code_rows(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  if (weight.format == Format::kInt8) return multiply_int8<R>(weight, rows, m, p, sums);
  if (weight.format == Format::kInt8Group) return multiply_groups<false, R>(weight, rows, m, p, sums);
  return multiply_groups<true, R>(weight, rows, m, p, sums);
}

// As many rows at a time as there are registers for, evenly.
inline int64_t rows_at_once(int64_t left, int64_t most) {
  const int64_t times = (left + most - 1) / most;
  return (left + times - 1) / times;
}

void multiply(const Weight& weight, const Rows& rows, const Output& out, int64_t first_row, int64_t last_row, int64_t first, int64_t last) {
  const bool is_float = rows.form == RowForm::kFloat32;
  float sums[6][kPanel];
  for (int64_t p = first; p < last; ++p) {
    for (int64_t m = first_row, count; m < last_row; m += count) {
      count = rows_at_once(last_row - m, is_float ? 6 : 4);
      if (is_float) {
        const float* x = static_cast<const float*>(rows.values) + m * weight.padded();
        weight.format == Format::kFloat32 ? multiply_float_rows<false>(weight, x, count, p, sums) : multiply_float_rows<true>(weight, x, count, p, sums);
      } else {
        switch (count) {
          case 1: multiply_code_rows<1>(weight, rows, m, p, sums); break;
          case 2: multiply_code_rows<2>(weight, rows, m, p, sums); break;
          case 3: multiply_code_rows<3>(weight, rows, m, p, sums); break;
          default: multiply_code_rows<4>(weight, rows, m, p, sums);
        }
      }
      for (int64_t r = 0; r < count; ++r) store_row(weight, out, m + r, p, sums[r]);
    }
  }
}

}  // namespace

extern const PackedKernels packed_kernels;
const PackedKernels packed_kernels = {choose_form, prepare_rows, multiply};

}  // namespace headrace::HEADRACE_ISA
