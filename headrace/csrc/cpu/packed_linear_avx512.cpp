// compiled for: avx512
// Packed products for AVX-512 with VNNI and BF16: a register holds the 16 outputs of a panel.
#include <immintrin.h>

#include "packed_rows.h"
#include "unroll.h"

namespace headrace::HEADRACE_ISA {
namespace {

// Bytes fetched ahead of the loads, to the first and to the L2 cache; the hardware stops at the end of a
// page. With both, memory is read as fast as without any arithmetic; with the first alone at an eighth less.
constexpr int64_t kAhead = 1 << 10, kFarAhead = 1 << 14;
constexpr int64_t kMostRows = 8;
constexpr int64_t kRows = GroupRows::kRows;  // whose sums lie side by side

RowForm choose_form(const Weight& weight, int64_t, bool is_half) {
  if (weight.format == Format::kBfloat16 && is_half) return RowForm::kBfloat16;
  if (weight.format <= Format::kBfloat16) return RowForm::kFloat32;
  return weight.format == Format::kInt8 ? RowForm::kInt8 : RowForm::kInt8Group;
}

// Kernels take R rows and P panels, one behind the other, and leave sums [P, 16, 16], of which they write R rows. One
// panel is read as fast as memory can; two are for many rows, which find them in the caches.

template <int P>
inline __m512i load(const uint32_t* words) {
  if constexpr (P == 1) {
    _mm_prefetch(reinterpret_cast<const char*>(words) + kAhead, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(words) + kFarAhead, _MM_HINT_T1);
  }
  return _mm512_loadu_si512(words);
}

template <class T>
inline __m512i broadcast_word(const T* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}

// Sums of floats are kept in two chains, of even and odd steps, and added in the end, whatever the number of rows: so a
// row gets the same sums in any batch. One row needs two to be faster than memory. Two panels at once take one chain
// after the other, as there are registers for C = 1. kChain: the first of C.
constexpr int kChains = 2;

template <int kChain, int R, int P, int C>
inline void store_chains(const __m512 (&acc)[R][P][C], float sums[][kPanel]) {
  HEADRACE_EACH(r, R) {
    HEADRACE_EACH(q, P) {
      float* const sum = sums[q * kRows + r];
      __m512 total = kChain ? _mm512_add_ps(_mm512_loadu_ps(sum), acc[r][q][0]) : acc[r][q][0];
      for (int c = 1; c < C; ++c) total = _mm512_add_ps(total, acc[r][q][c]);
      _mm512_storeu_ps(sum, total);
    }
  }
}

template <bool kIsHalf, int R, int P, int kChain = 0>
void multiply_floats(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  constexpr int C = P == 1 ? kChains : 1;
  const int64_t padded = weight.padded(), panel = weight.num_words() * kPanel;
  const float* x = static_cast<const float*>(rows.values) + m * padded;
  const uint32_t* at = weight.panel(p);
  __m512 acc[R][P][C];
  HEADRACE_EACH(r, R)
    HEADRACE_EACH(q, P)
      HEADRACE_EACH(c, C) acc[r][q][c] = _mm512_setzero_ps();
  for (int64_t k = 0; k < padded; k += 8, at += kIsHalf ? 4 * kPanel : 8 * kPanel) {
#pragma GCC unroll 4
    for (int two = 0; two < 8; two += kChains) {
      __m512i words[P];
      HEADRACE_EACH(c, C) {
        const int j = two + kChain + c;  // of the inputs from k on
        __m512 inputs[P];
        HEADRACE_EACH(q, P) {
          if (!kIsHalf || c == 0) words[q] = load<P>(at + q * panel + (kIsHalf ? j / 2 : j) * kPanel);
          if (!kIsHalf) inputs[q] = _mm512_castsi512_ps(words[q]);
          else if (j % 2 == 0) inputs[q] = _mm512_castsi512_ps(_mm512_slli_epi32(words[q], 16));
          else
            inputs[q] = _mm512_castsi512_ps(
                _mm512_and_si512(words[q], _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
        }
        HEADRACE_EACH(r, R) {
          const __m512 value = _mm512_set1_ps(x[r * padded + k + j]);
          HEADRACE_EACH(q, P) acc[r][q][c] = _mm512_fmadd_ps(value, inputs[q], acc[r][q][c]);
        }
      }
    }
  }
  store_chains<kChain>(acc, sums);
  if constexpr (kChain + C < kChains) multiply_floats<kIsHalf, R, P, kChain + C>(weight, rows, m, p, sums);
}

template <int R, int P, int kChain = 0>
void multiply_halves(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  constexpr int C = P == 1 ? kChains : 1;
  const int64_t padded = weight.padded(), panel = weight.num_words() * kPanel;
  const uint16_t* x = static_cast<const uint16_t*>(rows.values) + m * padded;
  const uint32_t* at = weight.panel(p);
  __m512 acc[R][P][C];
  HEADRACE_EACH(r, R)
    HEADRACE_EACH(q, P)
      HEADRACE_EACH(c, C) acc[r][q][c] = _mm512_setzero_ps();
  for (int64_t k = 0; k < padded; k += 16, at += 8 * kPanel) {
#pragma GCC unroll 4
    for (int two = 0; two < 8; two += kChains) {
      HEADRACE_EACH(c, C) {
        const int j = two + kChain + c;  // of the words from k on
        __m512bh words[P];
        HEADRACE_EACH(q, P) words[q] = (__m512bh)load<P>(at + q * panel + j * kPanel);
        HEADRACE_EACH(r, R) {
          const __m512bh value = (__m512bh)broadcast_word(x + r * padded + k + 2 * j);
          HEADRACE_EACH(q, P) acc[r][q][c] = _mm512_dpbf16_ps(acc[r][q][c], words[q], value);
        }
      }
    }
  }
  store_chains<kChain>(acc, sums);
  if constexpr (kChain + C < kChains) multiply_halves<R, P, kChain + C>(weight, rows, m, p, sums);
}

// Signed codes plus 128, as VPDPBUSD takes one side unsigned; 128 times the sum of x is subtracted afterwards.
template <int P>
inline __m512i load_shifted(const uint32_t* at) {
  return _mm512_xor_si512(load<P>(at), _mm512_set1_epi8(static_cast<char>(0x80)));
}

template <int R, int P>
void multiply_int8(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  constexpr int C = P > 1 ? 1 : R == 1 ? 8 : R == 2 ? 4 : R <= 4 ? 2 : 1;  // so that additions do not wait; exact
  const int64_t padded = weight.padded(), panel = weight.num_words() * kPanel;
  const int8_t* x = static_cast<const int8_t*>(rows.values) + m * padded;
  const uint32_t* at = weight.panel(p);
  __m512i acc[R][P][C];
  HEADRACE_EACH(r, R)
    HEADRACE_EACH(q, P)
    HEADRACE_EACH(c, C)
    acc[r][q][c] = c ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * static_cast<int32_t>(rows.sums[m + r]));
    for (int64_t k = 0; k < padded; k += 32) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j, at += kPanel) {
      __m512i words[P];
      HEADRACE_EACH(q, P) words[q] = load_shifted<P>(at + q * panel);
      HEADRACE_EACH(r, R) {
        const __m512i value = broadcast_word(x + r * padded + k + 4 * j);
        HEADRACE_EACH(q, P) acc[r][q][j % C] = _mm512_dpbusd_epi32(acc[r][q][j % C], words[q], value);
      }
    }
  }
  HEADRACE_EACH(q, P) {
    const __m512 scales = _mm512_loadu_ps(weight.scales + (p + q) * kPanel);
    HEADRACE_EACH(r, R) {
      for (int c = 1; c < C; ++c) acc[r][q][0] = _mm512_add_epi32(acc[r][q][0], acc[r][q][c]);
      const __m512 by = _mm512_mul_ps(scales, _mm512_set1_ps(rows.scales[m + r]));
      _mm512_storeu_ps(sums[q * kRows + r], _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][q][0]), by));
    }
  }
}

inline __m512 load_float16(const uint16_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// Added to codes, as VPDPBUSD takes one side unsigned; this times the sum of x is subtracted afterwards.
constexpr int shift_of(Format format) {
  return format == Format::kInt8Group ? 128 : format == Format::kE2m1Group ? 12 : format == Format::kIq4Group ? 127 : 0;
}

// The shifted codes of nibbles, one a byte.
template <Format F>
inline __m512i codes_of(__m512i nibbles) {
  const __m512i low = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
  if constexpr (!is_looked_up(F)) return low;
  const __m128i table =
      _mm_add_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table_of(F).values)), _mm_set1_epi8(shift_of(F)));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), low);
}

// Integer sums of one group of 32 inputs, of shifted codes. C chains.
template <Format F, int R, int P, int C>
inline void dot_group(const uint32_t* at, int64_t panel, const int8_t* x, int64_t stride, __m512i (&acc)[R][P][C]) {
  constexpr bool kIsBytes = F == Format::kInt8Group;
  HEADRACE_EACH(r, R)
    HEADRACE_EACH(q, P)
      HEADRACE_EACH(c, C) acc[r][q][c] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int k = 0; k < kGroup; k += kIsBytes ? 4 : 8, at += kPanel) {
    __m512i low[P], high[P];
    HEADRACE_EACH(q, P) {
      if constexpr (kIsBytes) {
        low[q] = load_shifted<P>(at + q * panel);
      } else {
        const __m512i words = load<P>(at + q * panel);
        low[q] = codes_of<F>(words), high[q] = codes_of<F>(_mm512_srli_epi16(words, 4));
      }
    }
    constexpr int kSecond = C - 1;
    const int chain = kIsBytes ? k / 4 % C : 0;
    HEADRACE_EACH(r, R) {
      const __m512i value = broadcast_word(x + r * stride + k);
      HEADRACE_EACH(q, P) acc[r][q][chain] = _mm512_dpbusd_epi32(acc[r][q][chain], low[q], value);
      if constexpr (!kIsBytes) {
        const __m512i next = broadcast_word(x + r * stride + k + 4);
        HEADRACE_EACH(q, P) acc[r][q][kSecond] = _mm512_dpbusd_epi32(acc[r][q][kSecond], high[q], next);
      }
    }
  }
}

template <int C>
inline __m512 dots_of(const __m512i (&acc)[C]) {
  return _mm512_cvtepi32_ps(C > 1 ? _mm512_add_epi32(acc[0], acc[C - 1]) : acc[0]);
}

constexpr int64_t words_of_group(Format format) { return kGroup / (format == Format::kInt8Group ? 4 : 8) * kPanel; }

// Adds what fine bytes contribute to the sums [P, 16, 16] of the 16 rows from m on and P panels from p on. Few groups
// have some: their codes are unpacked once for the rows that do. After the product, which has put them into the caches.
template <Format F, int P>
void add_fine(const Weight& weight, const Rows& rows, const FineGroups& groups_of_rows, int64_t m, int64_t p,
              float sums[][kPanel]) {
  const int64_t padded = weight.padded(), groups = weight.groups(), panel = groups * words_of_group(F);
  const GroupRows bytes(rows.values, rows.count, padded);
  groups_of_rows.over(m, [&](int64_t g, uint32_t members) {
    const uint32_t* const at = weight.words + p * panel + g * words_of_group(F);
    __m512i codes[P][8];
    __m512 scale[P];
    HEADRACE_EACH(q, P) {
      HEADRACE_EACH(k, 4) {
        if constexpr (F == Format::kInt8Group) {
          codes[q][2 * k] = load_shifted<2>(at + q * panel + 2 * k * kPanel);
          codes[q][2 * k + 1] = load_shifted<2>(at + q * panel + (2 * k + 1) * kPanel);
        } else {
          const __m512i words = load<2>(at + q * panel + k * kPanel);
          codes[q][2 * k] = codes_of<F>(words), codes[q][2 * k + 1] = codes_of<F>(_mm512_srli_epi16(words, 4));
        }
      }
      scale[q] = _mm512_mul_ps(load_float16(weight.group_scales + ((p + q) * groups + g) * kPanel),
                               _mm512_set1_ps(1.0f / (1 << GroupRows::kFineBits)));
    }
    for (; members; members &= members - 1) {
      const int64_t r = __builtin_ctz(members);
      const int8_t* const x = bytes.fine + (m + r) * padded + g * kGroup;
      const __m512 x_scale = _mm512_set1_ps(rows.scales[(m + r) * groups + g]);
      __m512i acc[P][2];
      HEADRACE_EACH(q, P) acc[q][0] = acc[q][1] = _mm512_setzero_si512();
      HEADRACE_EACH(k, 8) {
        const __m512i value = broadcast_word(x + 4 * k);
        HEADRACE_EACH(q, P) acc[q][k % 2] = _mm512_dpbusd_epi32(acc[q][k % 2], codes[q][k], value);
      }
      HEADRACE_EACH(q, P) {
        float* const sum = sums[q * kRows + r];
        const __m512 by = _mm512_mul_ps(scale[q], x_scale);
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(dots_of(acc[q]), by, _mm512_loadu_ps(sum)));
      }
    }
  });
}

template <Format F, int R, int P>
void multiply_groups(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  constexpr int C = R * P < 8 || (R * P == 8 && F != Format::kInt8Group) ? 2 : 1;
  const int64_t padded = weight.padded(), groups = weight.groups(), panel = groups * words_of_group(F);
  const int8_t* x = static_cast<const int8_t*>(rows.values) + m * padded;
  const float *x_scales = rows.scales + m * groups, *x_sums = rows.sums + m * groups;
  const uint32_t* at = weight.words + p * panel;
  const uint16_t* scales = weight.group_scales + p * groups * kPanel;
  const uint16_t* mins = weight.group_mins == nullptr ? nullptr : weight.group_mins + p * groups * kPanel;
  __m512 total[R][P];
  HEADRACE_EACH(r, R)
    HEADRACE_EACH(q, P) total[r][q] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, x += kGroup, at += words_of_group(F)) {
    __m512i acc[R][P][C];
    dot_group<F, R, P, C>(at, panel, x, padded, acc);
    HEADRACE_EACH(q, P) {
      const int64_t place = (q * groups + g) * kPanel;
      const __m512 scale = load_float16(scales + place);
      __m512 least = mins == nullptr ? _mm512_setzero_ps() : load_float16(mins + place);
      if constexpr (shift_of(F) != 0) least = _mm512_fmadd_ps(scale, _mm512_set1_ps(-shift_of(F)), least);
      HEADRACE_EACH(r, R) {
        const __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[r * groups + g]));
        total[r][q] = _mm512_fmadd_ps(dots_of(acc[r][q]), by, total[r][q]);
        total[r][q] = _mm512_fmadd_ps(least, _mm512_set1_ps(x_sums[r * groups + g]), total[r][q]);
      }
    }
  }
  HEADRACE_EACH(r, R)
    HEADRACE_EACH(q, P) _mm512_storeu_ps(sums[q * kRows + r], total[r][q]);
}

// Sums of row m, the outputs of panel p, into the output with the bias added.
void store_sums(const Weight& weight, const Output& out, int64_t m, int64_t p, const float* sums) {
  const int64_t n = p * kPanel, left = weight.outputs - n;
  const __mmask16 inside = left < kPanel ? static_cast<__mmask16>((1u << left) - 1) : 0xffff;
  __m512 values = _mm512_loadu_ps(sums);
  if (out.bias != nullptr) {
    const __m512 bias =
        out.is_bias_half
            ? _mm512_castsi512_ps(_mm512_slli_epi32(
                  _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, static_cast<const uint16_t*>(out.bias) + n)),
                  16))
            : _mm512_maskz_loadu_ps(inside, static_cast<const float*>(out.bias) + n);
    values = _mm512_add_ps(values, bias);
  }
  const int64_t place = m * out.stride + n;
  if (out.is_half)
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(out.data) + place, inside, (__m256i)_mm512_cvtneps_pbh(values));
  else _mm512_mask_storeu_ps(static_cast<float*>(out.data) + place, inside, values);
}

constexpr int kPairRows = 8,
              kGroupPairRows =
                  4;  // rows that go through two panels; twelve would evict one another from the L1 cache
constexpr int64_t kLeastPairRows = 32;            // from which panels are read from memory seldom enough

template <int R, int P>
void multiply_rows(const Weight& weight, const Rows& rows, int64_t m, int64_t p, float sums[][kPanel]) {
  if constexpr (P == 1 || R == kPairRows) {
    if (weight.format == Format::kFloat32) multiply_floats<false, R, P>(weight, rows, m, p, sums);
    else if (weight.format == Format::kInt8) multiply_int8<R, P>(weight, rows, m, p, sums);
    else if (rows.form == RowForm::kBfloat16) multiply_halves<R, P>(weight, rows, m, p, sums);
    else if (weight.format == Format::kBfloat16) multiply_floats<true, R, P>(weight, rows, m, p, sums);
  }
  if constexpr (P == 1 || R == kGroupPairRows) {
    if (weight.format == Format::kInt8Group) multiply_groups<Format::kInt8Group, R, P>(weight, rows, m, p, sums);
    else if (weight.format == Format::kInt4Group) multiply_groups<Format::kInt4Group, R, P>(weight, rows, m, p, sums);
    else if (weight.format == Format::kE2m1Group) multiply_groups<Format::kE2m1Group, R, P>(weight, rows, m, p, sums);
    else if (weight.format == Format::kIq4Group) multiply_groups<Format::kIq4Group, R, P>(weight, rows, m, p, sums);
  }
}

// Rows [first, last), at most 16, of one panel.
void multiply_few(const Weight& weight, const Rows& rows, int64_t first, int64_t last, int64_t p,
                  float sums[][kPanel]) {
  for (int64_t m = first, count; m < last; m += count, sums += count) {
    const int64_t left = last - m, times = (left + kMostRows - 1) / kMostRows;
    count = (left + times - 1) / times;
    switch (count) {
      case 1: multiply_rows<1, 1>(weight, rows, m, p, sums); break;
      case 2: multiply_rows<2, 1>(weight, rows, m, p, sums); break;
      case 3: multiply_rows<3, 1>(weight, rows, m, p, sums); break;
      case 4: multiply_rows<4, 1>(weight, rows, m, p, sums); break;
      case 5: multiply_rows<5, 1>(weight, rows, m, p, sums); break;
      case 6: multiply_rows<6, 1>(weight, rows, m, p, sums); break;
      case 7: multiply_rows<7, 1>(weight, rows, m, p, sums); break;
      default: multiply_rows<8, 1>(weight, rows, m, p, sums);
    }
  }
}

template <int P>
void add_fine(const Weight& weight, const Rows& rows, const FineGroups& groups, int64_t m, int64_t p,
              float sums[][kPanel]) {
  switch (weight.format) {
    case Format::kInt8Group: return add_fine<Format::kInt8Group, P>(weight, rows, groups, m, p, sums);
    case Format::kInt4Group: return add_fine<Format::kInt4Group, P>(weight, rows, groups, m, p, sums);
    case Format::kE2m1Group: return add_fine<Format::kE2m1Group, P>(weight, rows, groups, m, p, sums);
    default: return add_fine<Format::kIq4Group, P>(weight, rows, groups, m, p, sums);
  }
}

// P panels from p on.
template <int P>
void multiply_panels(const Weight& weight, const Rows& rows, const FineGroups& groups, const Output& out,
                     int64_t first_row, int64_t last_row, int64_t p) {
  alignas(64) float sums[P * kRows][kPanel];
  for (int64_t m = first_row; m < last_row; m += kRows) {
    const int64_t last = m + kRows < last_row ? m + kRows : last_row;
    if (P == 1 || last - m < kRows) {
      for (int q = 0; q < P; ++q) multiply_few(weight, rows, m, last, p + q, sums + q * kRows);
    } else if (weight.format < Format::kInt8Group) {
      for (int64_t r = 0; r < kRows; r += kPairRows) multiply_rows<kPairRows, P>(weight, rows, m + r, p, sums + r);
    } else {
      for (int64_t r = 0; r < kRows; r += kGroupPairRows)
        multiply_rows<kGroupPairRows, P>(weight, rows, m + r, p, sums + r);
    }
    if (groups.has_some(m)) add_fine<P>(weight, rows, groups, m, p, sums);
    for (int64_t r = m; r < last; ++r)
      for (int q = 0; q < P; ++q) store_sums(weight, out, r, p + q, sums[q * kRows + r - m]);
  }
}

void multiply(const Weight& weight, const Rows& rows, const Output& out, int64_t first_row, int64_t last_row,
              int64_t first, int64_t last) {
  const FineGroups groups(weight, rows, first_row, last_row);
  int64_t p = first;
  for (; p + 2 <= last && last_row - first_row >= kLeastPairRows; p += 2)
    multiply_panels<2>(weight, rows, groups, out, first_row, last_row, p);
  for (; p < last; ++p) multiply_panels<1>(weight, rows, groups, out, first_row, last_row, p);
}

}  // namespace

extern const PackedKernels packed_kernels;
const PackedKernels packed_kernels = {choose_form, prepare_rows, multiply};

}  // namespace headrace::HEADRACE_ISA
