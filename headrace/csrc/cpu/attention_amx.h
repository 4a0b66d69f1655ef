// Tiles of bfloat16 by AMX: 32 query rows at a time against a block of keys that is packed once for all rows of the tile.
// Intel's software developer's manual, volume 1, chapter 18. TDPBF16PS multiplies a tile [16, 32] by one of 32 inputs by 16
// outputs whose rows hold two inputs each: (input 2i, input 2i + 1) of output 0, of output 1, ...
#pragma once

#include "amx_tiles.h"
#include "attention_tile.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kAmxKeys = 256;  // of a block
constexpr int64_t kAmxRows = 32;   // of a pass
constexpr int64_t kTileValues = 512;

struct AmxBuffers {
  int64_t rows, dim, width;  // M, E and V, padded to 32
  bf16 *q, *keys, *values;   // [M, E]; [N / 16, E / 32] and [V / 16, N / 32] tiles of 512
  float* logits;             // [32, N]
  bf16* weights;             // [32, N]
  float *sums, *top, *total; // [M, V], [M], [M]

  static int64_t floats(const Attention& a, int64_t num_rows) {
    const int64_t m = padded(num_rows, kAmxRows), e = padded(a.head_dim, 32), v = padded(a.value_dim, 32);
    return m * e / 2 + kAmxKeys * (e + v) / 2 + kAmxRows * kAmxKeys * 3 / 2 + m * v + 2 * m;
  }
  AmxBuffers(const Attention& a, int64_t num_rows, float* scratch) : rows(padded(num_rows, kAmxRows)), dim(padded(a.head_dim, 32)), width(padded(a.value_dim, 32)) {
    q = reinterpret_cast<bf16*>(scratch), keys = q + rows * dim, values = keys + kAmxKeys * dim;
    logits = reinterpret_cast<float*>(values + kAmxKeys * width);
    weights = reinterpret_cast<bf16*>(logits + kAmxRows * kAmxKeys);
    sums = reinterpret_cast<float*>(weights + kAmxRows * kAmxKeys), top = sums + rows * width, total = top + rows;
  }
};

// Transposes 16 x 16 words of 32 bits and stores them row after row.
static void store_transposed(__m512i (&r)[16], void* out) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  // Rows 4i ... 4i + 3; of each lane of 128 bits, words 0 (r[4i]) to 3 (r[4i + 3]).
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i even_low = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd_low = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), odd_high = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);       // lane 0 of all: word i
    t[4 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);     // lane 1: word 4 + i
    t[8 + i] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);   // lane 2
    t[12 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);    // lane 3
  }
  for (int i = 0; i < 16; ++i) _mm512_store_si512(static_cast<char*>(out) + 64 * i, t[i]);
}

HEADRACE_INLINE __m512i load_bits(const bf16* p, int64_t n) {  // up to 32 values, zeros beyond n
  return n >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1), p);
}

HEADRACE_INLINE const bf16* key_at(const Attention& a, const int32_t* table, int64_t position, int64_t kv_head) {
  return static_cast<const bf16*>(row_at(a.k, a.k_strides, a, table, position, kv_head));
}
HEADRACE_INLINE const bf16* value_at(const Attention& a, const int32_t* table, int64_t position, int64_t kv_head) {
  return static_cast<const bf16*>(row_at(a.v, a.v_strides, a, table, position, kv_head));
}

// Keys [at, at + n) and their values, zeros beyond up to whole tiles.
static void pack_block(const AmxBuffers& t, const Attention& a, const Tile& tile, int64_t at, int64_t n) {
  const int32_t* table = a.table + tile.request * a.table_stride;
  const int64_t padded_n = padded(n, 32);
  for (int64_t j = 0; j < padded_n; j += 16) {
    const bf16* rows[16];
    for (int64_t i = 0; i < 16; ++i) rows[i] = j + i < n ? key_at(a, table, at + j + i, tile.kv_head) : nullptr;
    for (int64_t e = 0; e < t.dim; e += 32) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = rows[i] ? load_bits(rows[i] + e, a.head_dim - e) : _mm512_setzero_si512();
      store_transposed(r, t.keys + (j / 16 * (t.dim / 32) + e / 32) * kTileValues);
    }
  }
  for (int64_t j = 0; j < padded_n; j += 2) {
    const bf16* even = j < n ? value_at(a, table, at + j, tile.kv_head) : nullptr;
    const bf16* odd = j + 1 < n ? value_at(a, table, at + j + 1, tile.kv_head) : nullptr;
    for (int64_t e = 0; e < t.width; e += 16) {
      const __mmask16 inside = first(static_cast<int>(clamp(a.value_dim - e, 0, 16)));
      const __m512i low = even ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, even + e)) : _mm512_setzero_si512();
      const __m512i high = odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, odd + e)) : _mm512_setzero_si512();
      bf16* out = t.values + (e / 16 * (kAmxKeys / 32) + j / 32) * kTileValues + j % 32 * 16;
      _mm512_store_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

// Two by two tiles: c (16 rows, then 16 more, `c_row` floats apart) + a b. Tiles of b: `first` and `second` columns of 16,
// `b_step` values from one lot of 32 inputs to the next.
template <bool kAccumulates>
HEADRACE_INLINE void multiply_tiles(const bf16* a, int64_t a_row, const bf16* first, const bf16* second, int64_t b_step, float* c, int64_t c_row, int64_t lots) {
  const int64_t a_bytes = a_row * 2, c_bytes = c_row * 4;
  if (kAccumulates) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
    _tile_loadd(2, c + 16 * c_row, c_bytes);
    _tile_loadd(3, c + 16 * c_row + 16, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < lots; ++i) {
    _tile_loadd(4, a + 32 * i, a_bytes);
    _tile_loadd(5, a + 16 * a_row + 32 * i, a_bytes);
    _tile_loadd(6, first + i * b_step, 64);
    _tile_loadd(7, second + i * b_step, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  _tile_stored(2, c + 16 * c_row, c_bytes);
  _tile_stored(3, c + 16 * c_row + 16, c_bytes);
  settle();
}

// 2^x for x <= 0 to about 1e-4, which is finer than bfloat16: a Chebyshev fit of degree 3 on [-1/2, 1/2].
HEADRACE_INLINE __m512 exp2_coarse(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(0.0559220f), _mm512_set1_ps(0.2426401f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931210f));
  return _mm512_scalef_ps(_mm512_fmadd_ps(p, r, _mm512_set1_ps(0.9999245f)), n);
}

HEADRACE_INLINE __mmask16 between(int64_t low, int64_t n, int64_t i) {
  return first(static_cast<int>(clamp(n - i, 0, 16))) & ~first(static_cast<int>(clamp(low - i, 0, 16)));
}

// The greatest of logits [low, n). This and what follows take most of the time of a prefill: no masks where none are needed.
HEADRACE_INLINE float most_of(const float* logits, int64_t low, int64_t n) {
  __m512 most = _mm512_set1_ps(-INFINITY), other = most;
  int64_t i = low / 16 * 16;
  if (low == i) {
    for (; i + 32 <= n; i += 32) {
      most = _mm512_max_ps(most, _mm512_loadu_ps(logits + i));
      other = _mm512_max_ps(other, _mm512_loadu_ps(logits + i + 16));
    }
  }
  for (; i < n; i += 16) most = _mm512_mask_max_ps(most, between(low, n, i), most, _mm512_loadu_ps(logits + i));
  return _mm512_reduce_max_ps(_mm512_max_ps(most, other));
}

HEADRACE_INLINE __m512 weigh(const float* logits, bf16* weights, __m512 scale, __m512 shift) {
  const __m512 weight = exp2_coarse(_mm512_fmadd_ps(_mm512_loadu_ps(logits), scale, shift));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights), (__m256i)_mm512_cvtneps_pbh(weight));
  return weight;
}

// One step of the running softmax for a row of n logits: bfloat16 weights, zeros beyond n up to `padded_n`. `factor` brings
// logits to units of log2; `top` is in those. Sums fade in place.
static void soften_row(const AmxBuffers& t, const float* logits, bf16* weights, int64_t low, int64_t n, int64_t padded_n, float factor, float& top, float& total, float* sums) {
  const float old = top, found = low < n ? most_of(logits, low, n) * factor : kMasked;
  top = found > old ? found : old;
  const __m512 scale = _mm512_set1_ps(factor), shift = _mm512_set1_ps(-top);
  __m512 added = _mm512_setzero_ps(), other = added;
  int64_t i = 0;
  if (low == 0) {
    for (; i + 32 <= n; i += 32) {
      added = _mm512_add_ps(added, weigh(logits + i, weights + i, scale, shift));
      other = _mm512_add_ps(other, weigh(logits + i + 16, weights + i + 16, scale, shift));
    }
  }
  for (; i < padded_n; i += 16) {
    const __m512 weight = _mm512_maskz_mov_ps(between(low, n, i), exp2_coarse(_mm512_fmadd_ps(_mm512_loadu_ps(logits + i), scale, shift)));
    added = _mm512_add_ps(added, weight);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i), (__m256i)_mm512_cvtneps_pbh(weight));
  }
  const float fade = exp2f(old - top);
  total = total * fade + _mm512_reduce_add_ps(_mm512_add_ps(added, other));
  if (fade == 1.0f) return;
  for (int64_t e = 0; e < t.width; e += 16) _mm512_storeu_ps(sums + e, _mm512_mul_ps(_mm512_loadu_ps(sums + e), _mm512_set1_ps(fade)));
}

// Rows [m, m + 32) of the tile against the packed block of keys [at, at + n).
static void pass_rows(const AmxBuffers& t, const Attention& a, const Tile& tile, const Span& span, int64_t m, int64_t at, int64_t n) {
  const int64_t last_row = m + kAmxRows < tile.num_rows ? m + kAmxRows : tile.num_rows;
  const int64_t seen = clamp(span.position(last_row - 1) + 1 - at, 0, n), padded_seen = padded(seen, 32), lots = t.dim / 32;
  if (seen == 0 || (a.window > 0 && at + n <= span.position(m) - a.window + 1)) return;
  for (int64_t j = 0; j < padded_seen; j += 32) {
    const bf16* keys = t.keys + j / 16 * lots * kTileValues;
    multiply_tiles<false>(t.q + m * t.dim, t.dim, keys, keys + lots * kTileValues, kTileValues, t.logits + j, kAmxKeys, lots);
  }
  constexpr float kLog2e = 1.44269504088896341f;
  float factor = product_scale(a) * kLog2e;
  if (a.softcap > 0.0f) {
    for (int64_t r = 0; r < kAmxRows; ++r) {
      float* row = t.logits + r * kAmxKeys;
      for (int64_t i = 0; i < padded_seen; i += kLanes) store(row + i, Vec(a.softcap) * tanh(load(row + i) * Vec(product_scale(a))));
    }
    factor = kLog2e;
  }
  for (int64_t r = 0; r < kAmxRows; ++r) {
    const int64_t position = span.position(m + r), end = m + r < tile.num_rows ? clamp(position + 1 - at, 0, seen) : 0;
    const int64_t low = a.window > 0 ? clamp(position - a.window + 1 - at, 0, end) : 0;
    soften_row(t, t.logits + r * kAmxKeys, t.weights + r * kAmxKeys, low, end, padded_seen, factor, t.top[m + r], t.total[m + r], t.sums + (m + r) * t.width);
  }
  settle();
  for (int64_t e = 0; e < t.width; e += 32) {
    const bf16* values = t.values + e / 16 * (kAmxKeys / 32) * kTileValues;
    multiply_tiles<true>(t.weights, kAmxKeys, values, values + kAmxKeys / 32 * kTileValues, kTileValues, t.sums + m * t.width + e, t.width, padded_seen / 32);
  }
}

static void tile_of_bfloat16(const Attention& a, const Tile& tile, float* scratch) {
  const AmxBuffers t(a, tile.num_rows, scratch);
  const Span span(a, tile);
  memset(t.q, 0, t.rows * t.dim * sizeof(bf16));
  memset(t.sums, 0, t.rows * t.width * sizeof(float));
  for (int64_t r = 0; r < t.rows; ++r) t.top[r] = kMasked, t.total[r] = 0.0f;
  for (int64_t r = 0; r < tile.num_rows; ++r) memcpy(t.q + r * t.dim, query_row(a, tile, r), a.head_dim * sizeof(bf16));
  _tile_loadconfig(&kTileConfig);
  for (int64_t at = span.low; at < span.end; at += kAmxKeys) {
    const int64_t n = span.end - at < kAmxKeys ? span.end - at : kAmxKeys;
    pack_block(t, a, tile, at, n);
    settle();
    fetch_rows(a, a.table + tile.request * a.table_stride, at + kAmxKeys, kAmxKeys, span.end, tile.kv_head);
    for (int64_t m = 0; m < tile.num_rows; m += kAmxRows) pass_rows(t, a, tile, span, m, at, n);
  }
  _tile_release();
  constexpr float kLn2 = 0.693147180559945309f;
  for (int64_t r = 0; r < tile.num_rows; ++r) write_row(a, tile, r, t.sums + r * t.width, t.top[r] * kLn2, t.total[r]);
}

}  // namespace headrace::HEADRACE_ISA
