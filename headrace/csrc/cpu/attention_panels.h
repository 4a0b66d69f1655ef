// Tiles of bfloat16, or of codes, by products of two or four at a time (AVX-512 BF16 and VNNI). As in attention_tile.h
// query rows lie side by side in the lanes, a panel of two vectors of them at a time. A key is a row of words, of two
// bfloat16 or four codes each, of two values another; a word is multiplied with those of all rows at once, and logits
// stay in registers until they are weights.
//
// Weights are computed in 16 bits and may be up to 2^64; where one would be larger, the row's maximum is raised and its
// sums are rescaled.
#pragma once

#include "attention_tile.h"
#include "unroll.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kTurn = 8;          // keys, or dimensions of values, whose sums fill the registers
constexpr int64_t kPackedKeys = 192;  // keys of a block: whole lots of 16
constexpr float kLogitUnits = kFixedOne / kLn2;               // a factor of e
constexpr float kFixedMost = kFixedTop + 64 * kFixedOne;     // the weight 2^64
constexpr float kNoTop = 1.0e30f;     // shift of a row without any key yet

static constexpr Arc<uint16_t> kArc;

// Layout of a tile's scratch. M rows, padded to whole panels of W; N packed keys; V padded to whole turns.
struct PanelBuffers {
  int64_t rows, words, width;     // M, words of a key, V
  uint32_t *q, *keys, *values;    // [M / W, words, W], [N / 16, words, 16], [V / 16, N / 2, 16]
  uint32_t* weights;              // [N / 2, W]: of two keys each
  float *sums, *total;            // [M / W, V, W], [M]
  float *scales, *shifts;         // [M]: what makes products of codes logits, what makes logits weights
  float* key_scales;              // [N]; of codes
  int32_t* starts;                // [M]: where sums of codes begin
  float *lines, *line;            // [16, V padded to 16], or the codes of as many queries; a query

  static int64_t words_of(const Attention& a) {
    return a.kv_type == kCodes ? (a.head_dim + 3) / 4 : (a.head_dim + 1) / 2;
  }
  // Rows that share one packing of keys and values: as many as the L2 cache holds.
  static int64_t most_rows(const Attention& a) {
    return clamp(196608 / (a.head_dim + a.value_dim) / 32 * 32, 96, 1536);
  }
  static int64_t floats(const Attention& a, int64_t num_rows) {
    const int64_t m = padded(num_rows, kWide), w = words_of(a), v = padded(a.value_dim, kTurn);
    return m * (w + v + 4) + kPackedKeys * (w + 1) + kPackedKeys / 2 * (padded(v) + kWide) +
           16 * padded(w > v ? w : v) + padded(a.head_dim);
  }
  PanelBuffers(const Attention& a, int64_t num_rows, float* scratch)
      : rows(padded(num_rows, kWide)), words(words_of(a)), width(padded(a.value_dim, kTurn)) {
    float* at = scratch;
    const auto take = [&](int64_t size) { return (at += size) - size; };
    const auto take_words = [&](int64_t size) { return reinterpret_cast<uint32_t*>(take(size)); };
    q = take_words(rows * words), keys = take_words(kPackedKeys * words),
    values = take_words(kPackedKeys / 2 * padded(width)), weights = take_words(kPackedKeys / 2 * kWide);
    sums = take(rows * width), total = take(rows), scales = take(rows), shifts = take(rows);
    starts = reinterpret_cast<int32_t*>(take(rows)), key_scales = take(kPackedKeys),
    lines = take(16 * padded(words > width ? words : width)), line = take(0);
  }
};

// Transposes 16 x 16 words.
HEADRACE_INLINE void transpose(__m512i (&r)[16]) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int d = 1; d < 16; d *= 2) {  // bits of the numbers of rows and lanes change places
    const __mmask16 odd = d == 1 ? 0xaaaa : d == 2 ? 0xcccc : d == 4 ? 0xf0f0 : 0xff00;
    const __m512i low = _mm512_mask_add_epi32(lanes, odd, lanes, _mm512_set1_epi32(16 - d));
    const __m512i high =
        _mm512_mask_add_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(d)), odd, lanes, _mm512_set1_epi32(16));
    HEADRACE_EACH(i, 16)
      if (!(i & d)) {
        const __m512i a = r[i], b = r[i + d];
        r[i] = _mm512_permutex2var_epi32(a, low, b), r[i + d] = _mm512_permutex2var_epi32(a, high, b);
      }
  }
}

// Up to 32 values, zeros beyond n.
HEADRACE_INLINE __m512i load_bits(const bf16* p, int64_t n) {
  return _mm512_maskz_loadu_epi16(first_halves(n), p);
}

// Where one of keys [j, j + 16) is NaN its value becomes NaN, since weights do not carry it.
static void spoil_values(const PanelBuffers& t, const Attention& a, const bf16* const (&keys)[16], int64_t j) {
  for (int64_t i = 0; i < 16; ++i) {
    bool is_none = false;
    for (int64_t e = 0; e < a.head_dim && keys[i]; ++e) is_none |= (keys[i][e].bits & 0x7f80) == 0x7f80;
    for (int64_t e = 0; e < t.width && is_none; ++e)
      t.values[e / 16 * 16 * (kPackedKeys / 2) + (j + i) / 2 * 16 + e % 16] |= 0x7fffu << i % 2 * 16;
  }
}

// Keys [at, at + n) and their values, zeros beyond up to whole lots of 16.
static void pack_pairs(const PanelBuffers& t, const Attention& a, const Tile& tile, int64_t at, int64_t n) {
  const int32_t* table = a.table + tile.request * a.table_stride;
  const __m512i size = _mm512_set1_epi16(0x7fff);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  // The values of two vectors take turns.
  const __m512i first_half =
      _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(32)), 16));
  const __m512i second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(16));
  for (int64_t j = 0; j < n; j += 16) {
    const bf16 *keys[16], *values[16];
    for (int64_t i = 0; i < 16; ++i) {
      const bool is_in = j + i < n;
      keys[i] =
          is_in ? static_cast<const bf16*>(row_at(a.k, a.k_strides, a, table, at + j + i, tile.kv_head)) : nullptr;
      values[i] =
          is_in ? static_cast<const bf16*>(row_at(a.v, a.v_strides, a, table, at + j + i, tile.kv_head)) : nullptr;
    }
    __m512i most = _mm512_setzero_si512();
    for (int64_t w = 0; w < t.words; w += 16) {
      __m512i r[16];
      HEADRACE_EACH(i, 16) {
        r[i] = keys[i] ? load_bits(keys[i] + 2 * w, a.head_dim - 2 * w) : _mm512_setzero_si512();
        most = _mm512_max_epu16(most, _mm512_and_si512(r[i], size));
      }
      transpose(r);
      uint32_t* out = t.keys + (j * t.words + w * 16);
      HEADRACE_EACH(i, 16)
        if (w + i < t.words) _mm512_storeu_si512(out + i * 16, r[i]);
    }
    for (int64_t i = 0; i < 16; i += 2) {
      uint32_t* out = t.values + (j + i) / 2 * 16;
      for (int64_t e = 0; e < t.width; e += 32, out += 2 * 16 * (kPackedKeys / 2)) {
        const __m512i even = values[i] ? load_bits(values[i] + e, a.value_dim - e) : _mm512_setzero_si512();
        const __m512i odd = values[i + 1] ? load_bits(values[i + 1] + e, a.value_dim - e) : _mm512_setzero_si512();
        _mm512_storeu_si512(out, _mm512_permutex2var_epi16(even, first_half, odd));
        if (e + 16 < t.width)
          _mm512_storeu_si512(out + 16 * (kPackedKeys / 2), _mm512_permutex2var_epi16(even, second_half, odd));
      }
    }
    if (_mm512_cmp_epu16_mask(most, _mm512_set1_epi16(0x7f80), _MM_CMPINT_NLT)) spoil_values(t, a, keys, j);
  }
}

// Codes in the top bytes of words times a scale, rounded to bfloat16 in the top halves.
HEADRACE_INLINE __m512i scale_codes(__m512i codes, float scale) {
  return _mm512_add_epi32(
      _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(scale * 0x1p-24f))),
      _mm512_set1_epi32(0x8000));
}

HEADRACE_INLINE __m512i pair_of_codes(__m512i even, float even_scale, __m512i odd, float odd_scale) {
  const __m512i top = _mm512_set1_epi32(static_cast<int>(0xff000000));
  return _mm512_mask_blend_epi16(0xaaaaaaaa,
                                 _mm512_srli_epi32(scale_codes(_mm512_and_si512(even, top), even_scale), 16),
                                 scale_codes(_mm512_and_si512(odd, top), odd_scale));
}

// The same for codes, plus 128, as VPDPBUSD takes one side unsigned; tokens before `low` get scale 0.
static void pack_codes(const PanelBuffers& t, const Attention& a, const Tile& tile, int64_t low, int64_t at, int64_t n,
                       const LotRoom& room) {
  const int32_t* table = a.table + tile.request * a.table_stride;
  for (int64_t j = 0; j < n; j += 16) {
    const __mmask16 seen = static_cast<__mmask16>(seen_of_block(low, at + n, at + j));
    const Lot lot = page_size_of(a) < kMostLot ? room.collect(a, table, at + j, at + n, tile.kv_head)
                                               : lot_at(a, table, at + j, tile.kv_head);
    for (int64_t w = 0; w < t.words; ++w)
      _mm512_storeu_si512(t.keys + (j * t.words + w * 16), _mm512_xor_si512(_mm512_loadu_si512(lot.keys + 64 * w),
                                                                            _mm512_set1_epi8(static_cast<char>(0x80))));
    const __m512 key_scales = _mm512_maskz_loadu_ps(seen, lot.key_scales),
                 value_scales = _mm512_maskz_loadu_ps(seen, lot.value_scales);
    alignas(64) float scales[16];
    _mm512_store_ps(
        scales, _mm512_fmadd_ps(key_scales, _mm512_setzero_ps(), value_scales));  // NaN where the key scale is NaN
    _mm512_storeu_ps(t.key_scales + j, key_scales);
    for (int64_t i = 0; i < 16; i += 4) {
      uint32_t* out = t.values + (j + i) / 2 * 16;
      for (int64_t e = 0; e < t.width; e += 16, out += 16 * (kPackedKeys / 2)) {
        const __m512i codes = _mm512_maskz_loadu_epi32(first(static_cast<int>(clamp(a.value_dim - e, 0, 16))),
                                                       lot.values + (i / 4 * a.value_dim + e) * 4);
        _mm512_storeu_si512(
            out, pair_of_codes(_mm512_slli_epi32(codes, 24), scales[i], _mm512_slli_epi32(codes, 16), scales[i + 1]));
        _mm512_storeu_si512(out + 16, pair_of_codes(_mm512_slli_epi32(codes, 8), scales[i + 2], codes, scales[i + 3]));
      }
    }
  }
}

// Queries as they are, or as codes; zeros beyond the last.
template <bool kIsBytes>
static void pack_queries(const PanelBuffers& t, const Attention& a, const Tile& tile) {
  for (int64_t m = 0; m < t.rows; m += 16) {
    const bf16* rows[16];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t r = m + i;
      rows[i] = r < tile.num_rows ? reinterpret_cast<const bf16*>(query_row(a, tile, r)) : nullptr;
      if (!kIsBytes && rows[i] && a.q_type != kBFloat16) {
        bf16* const line = reinterpret_cast<bf16*>(t.lines + i * padded(t.words));
        halve_queries(a, rows[i], line, a.head_dim);
        rows[i] = line;
      }
      t.scales[r] = product_scale(a), t.shifts[r] = kNoTop, t.total[r] = 0.0f, t.starts[r] = 0;
      if (!kIsBytes || !rows[i]) continue;
      widen_values(a.q_type, rows[i], t.line, a.head_dim);
      int8_t* codes = reinterpret_cast<int8_t*>(t.lines + i * padded(t.words));
      t.scales[r] *= encode(t.line, a.head_dim, codes);
      for (int64_t e = 0; e < a.head_dim; ++e) t.starts[r] -= 128 * codes[e];
    }
    for (int64_t w = 0; w < t.words; w += 16) {
      __m512i r[16];
      HEADRACE_EACH(i, 16)
      r[i] = !rows[i]   ? _mm512_setzero_si512()
             : kIsBytes ? _mm512_loadu_si512(t.lines + i * padded(t.words) + w)
                        : load_bits(rows[i] + 2 * w, a.head_dim - 2 * w);
      transpose(r);
      uint32_t* out = t.q + m / kWide * kWide * t.words + w * kWide + m % kWide;
      HEADRACE_EACH(i, 16)
        if (w + i < t.words) _mm512_storeu_si512(out + i * kWide, r[i]);
    }
  }
}

// A panel of rows, and what it has of a block of keys.
struct Panel {
  int64_t row, words, width;
  const uint32_t *q, *keys, *values;
  uint32_t* weights;
  float *sums, *total, *scales, *shifts, *key_scales;
  const int32_t* starts;
  const Attention& a;
  const Span& span;
  int64_t begin, end;               // the position of the first packed key; that behind the last key that some row sees
  int64_t low_of_all, seen_by_all;  // positions of keys that all rows see, and need no soft-cap

  Panel(const PanelBuffers& t, const Attention& a, const Tile& tile, const Span& span, int64_t m, int64_t begin,
        int64_t n)
      : row(m), words(t.words), width(t.width), q(t.q + m * t.words), keys(t.keys), values(t.values),
        weights(t.weights), sums(t.sums + m * t.width), total(t.total + m), scales(t.scales + m), shifts(t.shifts + m),
        key_scales(t.key_scales), starts(t.starts + m), a(a), span(span), begin(begin) {
    const int64_t last = span.position(m + kWide <= tile.num_rows ? m + kWide - 1 : tile.num_rows - 1),
                  first = span.position(m);
    end = last + 1 < begin + n ? last + 1 : begin + n;
    seen_by_all = a.softcap > 0.0f ? begin : first + 1 < begin + n ? first + 1 : begin + n;
    low_of_all = a.window > 0 ? last - a.window + 1 : begin;
  }
};

// Logits of keys [at, at + 8) of which some rows may not see all, capped where there is a soft-cap.
static void settle_logits(const Panel& p, int64_t at, float (&logits)[kTurn][kWide]) {
  for (int64_t j = 0; j < kTurn; ++j) {
    uint64_t seen = 0;
    const int64_t position = p.begin + at + j;
    if (position < p.end) {
      seen = ~((uint64_t{1} << clamp(p.span.row_at(position) - p.row, 0, kWide)) - 1);
      if (p.a.window > 0) seen &= (uint64_t{1} << clamp(p.span.row_at(position + p.a.window) - p.row, 0, kWide)) - 1;
    }
    for (int64_t m = 0; m < kWide; m += kLanes) {
      const Vec x = load(logits[j] + m);
      store(logits[j] + m,
            by_bits(seen >> m & 0xffff, p.a.softcap > 0.0f ? Vec(p.a.softcap) * tanh(x * load(p.scales + m)) : x,
                    Vec(-INFINITY)));
    }
  }
}

// Logits of keys [at, at + 8) of the block in fixed-point units, plus shifts [W].
template <bool kIsBytes>
HEADRACE_INLINE void find_logits(const Panel& p, int64_t at, const __m512 (&shifts)[2], __m512 (&x)[kTurn][2]) {
  const uint32_t *key = p.keys + at / 16 * 16 * p.words + at % 16, *q = p.q;
  if constexpr (kIsBytes) {
    __m512i acc[kTurn][2];
    const __m512i start[2] = {_mm512_loadu_si512(p.starts), _mm512_loadu_si512(p.starts + kLanes)};
    HEADRACE_EACH(j, kTurn) acc[j][0] = start[0], acc[j][1] = start[1];
#pragma GCC unroll 2
    for (int64_t w = 0; w < p.words; ++w, key += 16, q += kWide) {
      const __m512i low = _mm512_loadu_si512(q), high = _mm512_loadu_si512(q + kLanes);
      HEADRACE_EACH(j, kTurn) {
        const __m512i word = _mm512_set1_epi32(static_cast<int32_t>(key[j]));
        acc[j][0] = _mm512_dpbusd_epi32(acc[j][0], word, low), acc[j][1] = _mm512_dpbusd_epi32(acc[j][1], word, high);
      }
    }
    HEADRACE_EACH(j, kTurn) {
      const __m512 scale = _mm512_set1_ps(p.key_scales[at + j]);
      x[j][0] = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[j][0]), scale),
      x[j][1] = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[j][1]), scale);
    }
  } else {
    HEADRACE_EACH(j, kTurn) x[j][0] = x[j][1] = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int64_t w = 0; w < p.words; ++w, key += 16, q += kWide) {
      const __m512bh low = (__m512bh)_mm512_loadu_si512(q), high = (__m512bh)_mm512_loadu_si512(q + kLanes);
      HEADRACE_EACH(j, kTurn) {
        const __m512bh word = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(key[j]));
        x[j][0] = _mm512_dpbf16_ps(x[j][0], word, low), x[j][1] = _mm512_dpbf16_ps(x[j][1], word, high);
      }
    }
  }
  if (p.begin + at < p.low_of_all || p.begin + at + kTurn > p.seen_by_all) {
    alignas(64) float logits[kTurn][kWide];
    HEADRACE_EACH(j, kTurn) _mm512_store_ps(logits[j], x[j][0]), _mm512_store_ps(logits[j] + kLanes, x[j][1]);
    settle_logits(p, at, logits);
    HEADRACE_EACH(j, kTurn) x[j][0] = _mm512_load_ps(logits[j]), x[j][1] = _mm512_load_ps(logits[j] + kLanes);
  }
  HEADRACE_EACH(u, 2) {
    const __m512 units = p.a.softcap > 0.0f
                             ? _mm512_set1_ps(kLogitUnits)
                             : _mm512_mul_ps(_mm512_loadu_ps(p.scales + u * kLanes), _mm512_set1_ps(kLogitUnits));
    HEADRACE_EACH(j, kTurn) x[j][u] = _mm512_fmadd_ps(x[j][u], units, shifts[u]);
  }
}

// NaN apart.
HEADRACE_INLINE __m512 greatest(const __m512 (&x)[kTurn][2], int u) {
  __m512 most = _mm512_set1_ps(-INFINITY);
  HEADRACE_EACH(j, kTurn) most = _mm512_max_ps(x[j][u], most);
  return most;
}

// Weights of keys [at, at + 8) of the block, of which `total` keeps account. False, and nothing is done, where a top
// has to rise before.
template <bool kIsBytes>
static bool weigh_keys(const Panel& p, int64_t at, bool has_risen) {
  __m512 x[kTurn][2];
  const __m512 shifts[2] = {_mm512_loadu_ps(p.shifts), _mm512_loadu_ps(p.shifts + kLanes)},
               most = _mm512_set1_ps(kFixedMost);
  find_logits<kIsBytes>(p, at, shifts, x);
  const __mmask16 over =
      _mm512_cmp_ps_mask(greatest(x, 0), most, _CMP_GT_OQ) | _mm512_cmp_ps_mask(greatest(x, 1), most, _CMP_GT_OQ);
  if (over && !has_risen) return false;
  // Of each four lanes, those of two keys take turns.
  const __m512i turns = _mm512_set4_epi32(0x0f0e0706, 0x0d0c0504, 0x0b0a0302, 0x09080100);
  const __m512i low_arc = _mm512_load_si512(kArc.heights), high_arc = _mm512_load_si512(kArc.heights + 32);
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  uint32_t* out = p.weights + at / 2 * kWide;
  __m512 total[2] = {_mm512_loadu_ps(p.total), _mm512_loadu_ps(p.total + kLanes)};
  HEADRACE_EACH(i, kTurn / 2)
    HEADRACE_EACH(u, 2) {
      const __m512i whole = _mm512_packus_epi32(_mm512_cvtps_epi32(x[2 * i][u]), _mm512_cvtps_epi32(x[2 * i + 1][u])),
                    both = _mm512_shuffle_epi8(whole, turns);
      const __m512i weight = _mm512_srli_epi16(
          _mm512_subs_epu16(both, _mm512_permutex2var_epi16(low_arc, _mm512_srli_epi16(both, 2), high_arc)), 1);
      _mm512_storeu_si512(out + i * kWide + u * kLanes, weight);
      total[u] = _mm512_dpbf16_ps(total[u], (__m512bh)weight, one);  // as rounded: they must add up to 1
    }
  _mm512_storeu_ps(p.total, total[0]), _mm512_storeu_ps(p.total + kLanes, total[1]);
  return true;
}

// Raises maxima to logits of keys [at, at + 8) that are far above them, and rescales the sums.
template <bool kIsBytes>
static void raise_tops(const Panel& p, int64_t at) {
  __m512 x[kTurn][2];
  const __m512 none[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  find_logits<kIsBytes>(p, at, none, x);
  HEADRACE_EACH(u, 2) {
    const Vec most = greatest(x, u), old = load(p.shifts + u * kLanes),
              top = _mm512_ceil_ps(_mm512_mul_ps(most.v, _mm512_set1_ps(1.0f / kFixedOne)));
    const Vec shift = by_bits(_mm512_cmp_ps_mask((most + old).v, _mm512_set1_ps(kFixedMost), _CMP_GT_OQ),
                              Vec(kFixedTop) - top * Vec(kFixedOne), old);
    const Vec fade = exp((shift - old) * Vec(kLn2 / kFixedOne));
    store(p.shifts + u * kLanes, shift);
    store(p.total + u * kLanes, load(p.total + u * kLanes) * fade);
    for (int64_t e = 0; e < p.width; ++e)
      store(p.sums + e * kWide + u * kLanes, load(p.sums + e * kWide + u * kLanes) * fade);
  }
}

// Adds the weighted values of keys [first, last) of the block.
static void add_values(const Panel& p, int64_t first, int64_t last) {
  const uint32_t* const end = p.weights + last / 2 * kWide;
  float* sums = p.sums;
  for (int64_t e = 0; e < p.width; e += kTurn, sums += kTurn * kWide) {
    const uint32_t* value = p.values + e / 16 * 16 * (kPackedKeys / 2) + first / 2 * 16 + e % 16;
    __m512 acc[kTurn][2];
    HEADRACE_EACH(i, kTurn)
    acc[i][0] = _mm512_loadu_ps(sums + i * kWide),
    acc[i][1] = _mm512_loadu_ps(sums + i * kWide + kLanes);
#pragma GCC unroll 2
    for (const uint32_t* weight = p.weights + first / 2 * kWide; weight < end; weight += kWide, value += 16) {
      const __m512bh low = (__m512bh)_mm512_loadu_si512(weight), high = (__m512bh)_mm512_loadu_si512(weight + kLanes);
      HEADRACE_EACH(i, kTurn) {
        const __m512bh word = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(value[i]));
        acc[i][0] = _mm512_dpbf16_ps(acc[i][0], word, low), acc[i][1] = _mm512_dpbf16_ps(acc[i][1], word, high);
      }
    }
    HEADRACE_EACH(i, kTurn)
    _mm512_storeu_ps(sums + i * kWide, acc[i][0]), _mm512_storeu_ps(sums + i * kWide + kLanes, acc[i][1]);
  }
}

// All that a panel sees of a block.
template <bool kIsBytes>
static void pass_panel(const Panel& p) {
  const int64_t n = p.end - p.begin;
  int64_t added = p.a.window > 0
                      ? clamp((p.span.position(p.row) - p.a.window + 1 - p.begin) / kTurn * kTurn, 0, kPackedKeys)
                      : 0,
          at = added;
  while (at < n) {
    if (!weigh_keys<kIsBytes>(p, at, false)) {
      if (added < at) add_values(p, added, at);
      added = at;
      raise_tops<kIsBytes>(p, at);
      weigh_keys<kIsBytes>(p, at, true);
    }
    at += kTurn;
  }
  if (added < at) add_values(p, added, at);
}

static void write_rows(const PanelBuffers& t, const Attention& a, const Tile& tile) {
  const int64_t width = padded(t.width);
  for (int64_t m = 0; m < tile.num_rows; m += 16) {
    const float* sums = t.sums + m / kWide * kWide * t.width + m % kWide;
    for (int64_t e = 0; e < t.width; e += 16) {
      __m512i r[16];
      HEADRACE_EACH(i, 16) r[i] = e + i < t.width ? _mm512_loadu_si512(sums + (e + i) * kWide) : _mm512_setzero_si512();
      transpose(r);
      HEADRACE_EACH(i, 16) _mm512_storeu_si512(t.lines + i * width + e, r[i]);
    }
    for (int64_t r = m; r < m + 16 && r < tile.num_rows; ++r)
      write_row(a, tile, r, t.lines + (r - m) * width,
                t.shifts[r] < kNoTop ? (kFixedTop - t.shifts[r]) * (kLn2 / kFixedOne) : kMasked, t.total[r]);
  }
}

template <bool kIsBytes>
static void tile_of_panels(const Attention& a, const Tile& tile, float* scratch) {
  const PanelBuffers t(a, tile.num_rows, scratch);
  const Span span(a, tile);
  const LotRoom room(a, scratch + PanelBuffers::floats(a, tile.num_rows));
  pack_queries<kIsBytes>(t, a, tile);
  memset(t.sums, 0, t.rows * t.width * sizeof(float));
  for (int64_t at = kIsBytes ? span.low / kMostLot * kMostLot : span.low; at < span.end; at += kPackedKeys) {
    const int64_t n = span.end - at < kPackedKeys ? span.end - at : kPackedKeys;
    if constexpr (kIsBytes) pack_codes(t, a, tile, span.low, at, n, room);
    else pack_pairs(t, a, tile, at, n);
    for (int64_t m = 0; m < tile.num_rows; m += kWide) pass_panel<kIsBytes>(Panel(t, a, tile, span, m, at, n));
  }
  write_rows(t, a, tile);
}

}  // namespace headrace::HEADRACE_ISA
