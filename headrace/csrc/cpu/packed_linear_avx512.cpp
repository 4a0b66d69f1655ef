// compiled for: avx512
// Packed products for AVX-512 with VNNI and BF16: a register holds the 16 outputs of a panel.
#include <immintrin.h>

#include "packed_rows.h"

namespace headrace::HEADRACE_ISA {
namespace {

// Bytes fetched ahead of the loads, to the first and to the second-level cache; the hardware stops at the end of a page. With
// both, memory is read as fast as without any arithmetic; with the first alone at an eighth less.
constexpr int64_t kAhead = 1 << 10, kFarAhead = 1 << 14;
constexpr int64_t kMostRows = 8;

RowForm choose_form(const Weight& weight, int64_t, bool is_half) {
  if (weight.format == Format::kBfloat16 && is_half) return RowForm::kBfloat16;
  if (weight.format <= Format::kBfloat16) return RowForm::kFloat32;
  return weight.format == Format::kInt8 ? RowForm::kInt8 : RowForm::kInt8Group;
}

// Chains of sums for so many rows: enough in all that additions do not wait for one another.
constexpr int chains_of(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : rows <= 4 ? 2 : 1; }

inline __m512i load(const uint32_t* words) {
  _mm_prefetch(reinterpret_cast<const char*>(words) + kAhead, _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(words) + kFarAhead, _MM_HINT_T1);
  return _mm512_loadu_si512(words);
}

template <class T>
inline __m512i broadcast_word(const T* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}

template <int R, int C>
inline void add_chains(__m512 acc[R][C]) {
  for (int r = 0; r < R; ++r)
    for (int c = 1; c < C; ++c) acc[r][0] = _mm512_add_ps(acc[r][0], acc[r][c]);
}

template <bool kIsHalf, int R>
void multiply_floats(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  constexpr int C = chains_of(R);
  const int64_t padded = weight.padded();
  const float* x = static_cast<const float*>(rows.values) + m * padded;
  const uint32_t* at = weight.panel(p);
  __m512 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = _mm512_setzero_ps();
  for (int64_t k = 0; k < padded; k += 8) {
#pragma GCC unroll 4
    for (int j = 0; j < 8; j += 2) {
      __m512 pair[2];
      if constexpr (kIsHalf) {
        const __m512i words = load(at);
        pair[0] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
        pair[1] = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
        at += kPanel;
      } else {
        pair[0] = _mm512_castsi512_ps(load(at));
        pair[1] = _mm512_castsi512_ps(load(at + kPanel));
        at += 2 * kPanel;
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512 value = _mm512_set1_ps(x[r * padded + k + j + i]);
          acc[r][(j + i) % C] = _mm512_fmadd_ps(value, pair[i], acc[r][(j + i) % C]);
        }
      }
    }
  }
  add_chains<R, C>(acc);
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums[r], acc[r][0]);
}

template <int R>
void multiply_halves(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  constexpr int C = chains_of(R);
  const int64_t padded = weight.padded();
  const uint16_t* x = static_cast<const uint16_t*>(rows.values) + m * padded;
  const uint32_t* at = weight.panel(p);
  __m512 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = _mm512_setzero_ps();
  for (int64_t k = 0; k < padded; k += 16) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j, at += kPanel) {
      const __m512bh words = (__m512bh)load(at);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh value = (__m512bh)broadcast_word(x + r * padded + k + 2 * j);
        acc[r][j % C] = _mm512_dpbf16_ps(acc[r][j % C], words, value);
      }
    }
  }
  add_chains<R, C>(acc);
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums[r], acc[r][0]);
}

// Signed codes plus 128, as vpdpbusd wants one side unsigned; 128 times the sum of x is taken off again.
inline __m512i load_shifted(const uint32_t* at) { return _mm512_xor_si512(load(at), _mm512_set1_epi8(static_cast<char>(0x80))); }

template <int R>
void multiply_int8(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  constexpr int C = chains_of(R);
  const int64_t padded = weight.padded();
  const int8_t* x = static_cast<const int8_t*>(rows.values) + m * padded;
  const uint32_t* at = weight.panel(p);
  __m512i acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = c ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * static_cast<int32_t>(rows.sums[m + r]));
  for (int64_t k = 0; k < padded; k += 32) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j, at += kPanel) {
      const __m512i words = load_shifted(at);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][j % C] = _mm512_dpbusd_epi32(acc[r][j % C], words, broadcast_word(x + r * padded + k + 4 * j));
    }
  }
  const __m512 scales = _mm512_loadu_ps(weight.scales + p * kPanel);
  for (int r = 0; r < R; ++r) {
    for (int c = 1; c < C; ++c) acc[r][0] = _mm512_add_epi32(acc[r][0], acc[r][c]);
    const __m512 by = _mm512_mul_ps(scales, _mm512_set1_ps(rows.scales[m + r]));
    _mm512_storeu_ps(sums[r], _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][0]), by));
  }
}

inline __m512 load_float16(const uint16_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); }

// Integer sums of one group of 32 inputs; of bytes shifted by 128, of nibbles as they are.
template <bool kIsInt4, int R>
inline const uint32_t* dot_group(const uint32_t* at, const int8_t* x, int64_t padded, __m512i acc[R][2]) {
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int k = 0; k < kGroup; k += kIsInt4 ? 8 : 4, at += kPanel) {
    if constexpr (kIsInt4) {
      const __m512i nibbles = _mm512_set1_epi8(15), words = load(at);
      const __m512i low = _mm512_and_si512(words, nibbles), high = _mm512_and_si512(_mm512_srli_epi16(words, 4), nibbles);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], low, broadcast_word(x + r * padded + k));
        acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], high, broadcast_word(x + r * padded + k + 4));
      }
    } else {
      const __m512i words = load_shifted(at);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][k / 4 % 2] = _mm512_dpbusd_epi32(acc[r][k / 4 % 2], words, broadcast_word(x + r * padded + k));
    }
  }
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
  __m512 total[R];
  for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, x += kGroup, scales += kPanel) {
    __m512i acc[R][2];
    at = dot_group<kIsInt4, R>(at, x, padded, acc);
    const __m512 scale = load_float16(scales);
    __m512 least = mins == nullptr ? _mm512_setzero_ps() : load_float16(mins + g * kPanel);
    if constexpr (!kIsInt4) least = _mm512_fmadd_ps(scale, _mm512_set1_ps(-128.0f), least);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512 dots = _mm512_cvtepi32_ps(_mm512_add_epi32(acc[r][0], acc[r][1]));
      total[r] = _mm512_fmadd_ps(dots, _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[r * groups + g])), total[r]);
      total[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(x_sums[r * groups + g]), total[r]);
    }
  }
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums[r], total[r]);
}

template <int R>
void multiply_rows(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  switch (weight.format) {
    case Format::kFloat32: return multiply_floats<false, R>(weight, rows, m, p, sums);
    case Format::kBfloat16:
      return rows.form == RowForm::kBfloat16 ? multiply_halves<R>(weight, rows, m, p, sums) : multiply_floats<true, R>(weight, rows, m, p, sums);
    case Format::kInt8: return multiply_int8<R>(weight, rows, m, p, sums);
    case Format::kInt8Group: return multiply_groups<false, R>(weight, rows, m, p, sums);
    case Format::kInt4Group: return multiply_groups<true, R>(weight, rows, m, p, sums);
  }
}

void multiply(const Weight& weight, const Rows& rows, const Output& out, int64_t first_row, int64_t last_row, int64_t first, int64_t last) {
  float sums[kMostRows][kPanel];
  for (int64_t p = first; p < last; ++p) {
    for (int64_t m = first_row, count; m < last_row; m += count) {
      const int64_t left = last_row - m, times = (left + kMostRows - 1) / kMostRows;
      count = (left + times - 1) / times;
      switch (count) {
        case 1: multiply_rows<1>(weight, rows, m, p, sums); break;
        case 2: multiply_rows<2>(weight, rows, m, p, sums); break;
        case 3: multiply_rows<3>(weight, rows, m, p, sums); break;
        case 4: multiply_rows<4>(weight, rows, m, p, sums); break;
        case 5: multiply_rows<5>(weight, rows, m, p, sums); break;
        case 6: multiply_rows<6>(weight, rows, m, p, sums); break;
        case 7: multiply_rows<7>(weight, rows, m, p, sums); break;
        default: multiply_rows<8>(weight, rows, m, p, sums);
      }
      for (int64_t r = 0; r < count; ++r) store_row(weight, out, m + r, p, sums[r]);
    }
  }
}

}  // namespace

extern const PackedKernels packed_kernels;
const PackedKernels packed_kernels = {choose_form, prepare_rows, multiply};

}  // namespace headrace::HEADRACE_ISA
