// compiled for: amx
// Packed products on AMX tiles, for more than a handful of rows; fewer, and what must stay float32, go to AVX-512.
// A tile is 16 rows of 64 bytes. Tiles 0 to 3 hold 32 rows times 32 outputs, 4 and 5 the rows, 6 and 7 the panels.
#include <vector>

#include "amx_tiles.h"
#include "packed_rows.h"

namespace headrace::avx512 {
extern const PackedKernels packed_kernels;
}

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int64_t kLeastRows = 6;        // from which tiles are faster than registers
constexpr int64_t kLeastGroupRows = 24;  // from which making bfloat16 of a group format pays
constexpr int64_t kTileWords = 16 * kPanel;
constexpr int64_t kAhead = 4;  // tiles of rows fetched before their turn: the panels stay in the first-level cache, the rows do not

RowForm choose_form(const Weight& weight, int64_t num_rows, bool is_half) {
  switch (weight.format) {
    case Format::kBfloat16:
      if (is_half && num_rows >= kLeastRows) return RowForm::kBfloat16Tile;
      break;
    case Format::kInt8:
      if (num_rows >= kLeastRows) return RowForm::kInt8Tile;
      break;
    case Format::kInt8Group:
    case Format::kInt4Group:
      if (num_rows >= kLeastGroupRows) return RowForm::kBfloat16Tile;
      break;
    default: break;
  }
  return avx512::packed_kernels.choose_form(weight, num_rows, is_half);
}

void prepare(const Weight& weight, const Input& input, const Rows& rows, int64_t first, int64_t last) {
  std::vector<float> line(2 * weight.padded());
  prepare_rows(weight, input, rows, first, last, line.data());
}

struct Tiles {
  Tiles() { _tile_loadconfig(&kTileConfig); }
  ~Tiles() { _tile_release(); }
};

// A macro, as the instructions take their tiles from the text.
#define HEADRACE_MULTIPLY_TILE(c, a, b) \
  do {                                  \
    if constexpr (kIsHalf)              \
      _tile_dpbf16ps(c, a, b);          \
    else                                \
      _tile_dpbssd(c, a, b);            \
  } while (false)

// A block of 16 * R rows and 16 * N outputs; a and b are the first tiles of each 16 rows and 16 outputs.
template <bool kIsHalf, int R, int N>
void multiply_block(const char* const a[2], const uint32_t* const b[2], int64_t num_tiles, uint32_t sums[2][2][kTileWords]) {
  _tile_zero(0);
  if constexpr (N == 2) _tile_zero(1);
  if constexpr (R == 2) _tile_zero(2);
  if constexpr (R == 2 && N == 2) _tile_zero(3);
  for (int64_t t = 0; t < num_tiles; ++t) {
    for (int64_t line = 0; line < 1024; line += 64) {
      _mm_prefetch(a[0] + (t + kAhead) * 1024 + line, _MM_HINT_T0);
      if constexpr (R == 2) _mm_prefetch(a[1] + (t + kAhead) * 1024 + line, _MM_HINT_T0);
    }
    _tile_loadd(6, b[0] + t * kTileWords, 64);
    _tile_loadd(4, a[0] + t * 1024, 64);
    HEADRACE_MULTIPLY_TILE(0, 4, 6);
    if constexpr (R == 2) {
      _tile_loadd(5, a[1] + t * 1024, 64);
      HEADRACE_MULTIPLY_TILE(2, 5, 6);
    }
    if constexpr (N == 2) {
      _tile_loadd(7, b[1] + t * kTileWords, 64);
      HEADRACE_MULTIPLY_TILE(1, 4, 7);
    }
    if constexpr (R == 2 && N == 2) HEADRACE_MULTIPLY_TILE(3, 5, 7);
  }
  _tile_stored(0, sums[0][0], 64);
  if constexpr (N == 2) _tile_stored(1, sums[0][1], 64);
  if constexpr (R == 2) _tile_stored(2, sums[1][0], 64);
  if constexpr (R == 2 && N == 2) _tile_stored(3, sums[1][1], 64);
}

// Inputs k and k + 1 of the 16 outputs whose codes lie at `words`, as bfloat16 pairs.
inline __m512i join_pair(__m512i even, __m512i odd, __m512 scale, __m512 least) {
  const __m512 low = _mm512_fmadd_ps(_mm512_cvtepi32_ps(even), scale, least), high = _mm512_fmadd_ps(_mm512_cvtepi32_ps(odd), scale, least);
  const __m512i low_half = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
  const __m512i high_half = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
  return _mm512_or_si512(low_half, _mm512_slli_epi32(high_half, 16));
}

// A panel of a group format as a panel of bfloat16.
void expand_panel(const Weight& weight, int64_t p, uint32_t* out) {
  const int64_t groups = weight.groups();
  const uint32_t* at = weight.panel(p);
  const __m512i nibble = _mm512_set1_epi32(15);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t place = (p * groups + g) * kPanel;
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight.group_scales + place)));
    const __m512 least = weight.group_mins == nullptr
                             ? _mm512_setzero_ps()
                             : _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight.group_mins + place)));
    if (weight.format == Format::kInt4Group) {
      for (int w = 0; w < 4; ++w, at += kPanel, out += 4 * kPanel) {
        const __m512i words = _mm512_loadu_si512(at);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {  // nibbles lie 0 4 1 5 2 6 3 7 from the low end
          const int shift = i % 2 * 16 + i / 2 * 4;
          const __m512i even = _mm512_and_si512(_mm512_srli_epi32(words, shift), nibble);
          const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(words, shift + 8), nibble);
          _mm512_storeu_si512(out + i * kPanel, join_pair(even, odd, scale, least));
        }
      }
    } else {
      for (int w = 0; w < 8; ++w, at += kPanel, out += 2 * kPanel) {
        const __m512i words = _mm512_loadu_si512(at);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(words, 24 - 16 * i), 24);
          const __m512i odd = _mm512_srai_epi32(_mm512_slli_epi32(words, 16 - 16 * i), 24);
          _mm512_storeu_si512(out + i * kPanel, join_pair(even, odd, scale, least));
        }
      }
    }
  }
}

// The bias of a panel's outputs; zeros where there is none.
inline __m512 load_bias(const Output& out, int64_t n, __mmask16 known) {
  if (out.bias == nullptr) return _mm512_setzero_ps();
  if (!out.is_bias_half) return _mm512_maskz_loadu_ps(known, static_cast<const float*>(out.bias) + n);
  const __m256i halves = _mm256_maskz_loadu_epi16(known, static_cast<const uint16_t*>(out.bias) + n);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// `count` rows of 16 sums into rows m and on of the output; as long as short sums take, so nothing here is done one by one.
void store_block(const Weight& weight, const Rows& rows, const Output& out, int64_t m, int64_t p, int64_t count, const uint32_t* words) {
  const int64_t n = p * kPanel, left = weight.outputs - n;
  const __mmask16 known = left < kPanel ? static_cast<__mmask16>((1u << left) - 1) : static_cast<__mmask16>(0xffff);
  const __m512 bias = load_bias(out, n, known);
  const bool is_scaled = rows.form == RowForm::kInt8Tile;
  const __m512 scale = is_scaled ? _mm512_loadu_ps(weight.scales + n) : _mm512_setzero_ps();
  for (int64_t r = 0; r < count; ++r) {
    const __m512i sums = _mm512_loadu_si512(words + r * kPanel);
    const __m512 values = is_scaled ? _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[m + r])), bias)
                                    : _mm512_add_ps(_mm512_castsi512_ps(sums), bias);
    const int64_t at = (m + r) * out.stride + n;
    if (out.is_half) _mm256_mask_storeu_epi16(static_cast<uint16_t*>(out.data) + at, known, (__m256i)_mm512_cvtneps_pbh(values));
    else _mm512_mask_storeu_ps(static_cast<float*>(out.data) + at, known, values);
  }
}

template <bool kIsHalf>
void multiply_tiles(const Weight& weight, const Rows& rows, const Output& out, int64_t first_row, int64_t last_row, int64_t first, int64_t last) {
  const Tiles tiles;
  const bool is_grouped = weight.format >= Format::kInt8Group;
  const int64_t padded = weight.padded(), num_tiles = padded / (kIsHalf ? 32 : 64);
  std::vector<uint32_t> expanded(is_grouped ? padded * kPanel : 0);  // two panels of bfloat16
  alignas(64) uint32_t sums[2][2][kTileWords];
  for (int64_t p = first; p < last; p += 2) {
    const int64_t num_panels = last - p < 2 ? last - p : 2;
    const uint32_t* b[2] = {};
    for (int64_t i = 0; i < num_panels; ++i) {
      b[i] = is_grouped ? expanded.data() + i * padded / 2 * kPanel : weight.panel(p + i);
      if (is_grouped) expand_panel(weight, p + i, expanded.data() + i * padded / 2 * kPanel);
    }
    settle();
    for (int64_t m = first_row; m < last_row; m += 32) {
      const char* start = static_cast<const char*>(rows.values) + m / 16 * num_tiles * 1024;
      const char* a[2] = {start, start + num_tiles * 1024};
      const bool is_tall = last_row - m > 16;
      if (num_panels == 2) {
        is_tall ? multiply_block<kIsHalf, 2, 2>(a, b, num_tiles, sums) : multiply_block<kIsHalf, 1, 2>(a, b, num_tiles, sums);
      } else {
        is_tall ? multiply_block<kIsHalf, 2, 1>(a, b, num_tiles, sums) : multiply_block<kIsHalf, 1, 1>(a, b, num_tiles, sums);
      }
      for (int64_t i = 0; i < (is_tall ? 2 : 1); ++i) {
        const int64_t at = m + 16 * i, count = last_row - at < 16 ? last_row - at : 16;
        for (int64_t j = 0; j < num_panels; ++j) store_block(weight, rows, out, at, p + j, count, sums[i][j]);
      }
    }
  }
}

void multiply(const Weight& weight, const Rows& rows, const Output& out, int64_t first_row, int64_t last_row, int64_t first, int64_t last) {
  if (rows.form == RowForm::kBfloat16Tile) return multiply_tiles<true>(weight, rows, out, first_row, last_row, first, last);
  if (rows.form == RowForm::kInt8Tile) return multiply_tiles<false>(weight, rows, out, first_row, last_row, first, last);
  avx512::packed_kernels.multiply(weight, rows, out, first_row, last_row, first, last);
}

}  // namespace

extern const PackedKernels packed_kernels;
const PackedKernels packed_kernels = {choose_form, prepare, multiply};

}  // namespace headrace::HEADRACE_ISA
