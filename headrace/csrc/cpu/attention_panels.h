// Tiles of bfloat16 by products of pairs (AVX-512 BF16). As in attention_tile.h query rows lie side by side in the
// lanes, a panel of two vectors of them at a time. A key is a row of words of two bfloat16 (four codes in
// attention_code_panels.h), of two values another; a word is multiplied with those of all rows at once, and logits stay
// in registers until they are weights: those of attention_pairs.h, where decodes find the same ones.
#pragma once

#include "attention_pairs.h"
#include "attention_tile.h"
#include "unroll.h"

namespace headrace::HEADRACE_ISA {

// Layout of a tile's scratch. M rows, padded to whole panels of W; N packed keys; V padded to whole turns.
struct PanelBuffers {
  int64_t rows, words, width;     // M, words of a key, V
  uint32_t *q, *keys, *values;    // [M / W, words, W], [N / 16, words, 16], [V / 16, N / 2, 16], or of codes [N / 4, V]
  uint32_t* weights;              // [N / 2, W]: of two keys each
  float *sums, *total, *tops;     // [M / W, V, W], [M], [M]
  float* scales;                  // [M]: what makes products logits
  float *shifts, *chains;         // of a panel and chunk: [W], what makes logits weights; [16, W], totals
  float* factors;                 // [2, W]: see Factors
  float *key_scales, *value_scales, *part;  // of codes: [N], [N], [V, W], a chunk's sums
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
    return m * (w + v + 4) + kPairKeys * (w + 2) + v * kWide + kPairKeys / 2 * (padded(v) + kWide) +
           16 * padded(w > v ? w : v) + padded(a.head_dim) + 19 * kWide;
  }
  PanelBuffers(const Attention& a, int64_t num_rows, float* scratch)
      : rows(padded(num_rows, kWide)), words(words_of(a)), width(padded(a.value_dim, kTurn)) {
    float* at = scratch;
    const auto take = [&](int64_t size) { return (at += size) - size; };
    const auto take_words = [&](int64_t size) { return reinterpret_cast<uint32_t*>(take(size)); };
    q = take_words(rows * words), keys = take_words(kPairKeys * words),
    values = take_words(kPairKeys / 2 * padded(width)), weights = take_words(kPairKeys / 2 * kWide);
    sums = take(rows * width), total = take(rows), tops = take(rows), scales = take(rows);
    shifts = take(kWide), chains = take(16 * kWide), factors = take(2 * kWide);
    starts = reinterpret_cast<int32_t*>(take(rows)), key_scales = take(kPairKeys),
    value_scales = take(kPairKeys), part = take(width * kWide),
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

// Where one of keys [j, j + 16) is NaN its value becomes NaN, since weights do not carry it.
static void spoil_values(const PanelBuffers& t, const Attention& a, const bf16* const (&keys)[16], int64_t j) {
  for (int64_t i = 0; i < 16; ++i) {
    bool is_none = false;
    for (int64_t e = 0; e < a.head_dim && keys[i]; ++e) is_none |= (keys[i][e].bits & 0x7f80) == 0x7f80;
    for (int64_t e = 0; e < t.width && is_none; ++e)
      t.values[e / 16 * 16 * (kPairKeys / 2) + (j + i) / 2 * 16 + e % 16] |= 0x7fffu << i % 2 * 16;
  }
}

// Keys [at + low, at + n) and their values, zeros around them up to whole lots of 16.
static void pack_pairs(const PanelBuffers& t, const Attention& a, const Tile& tile, int64_t at, int64_t low,
                       int64_t n) {
  const int32_t* table = a.table + tile.request * a.table_stride;
  const __m512i size = _mm512_set1_epi16(0x7fff);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  // The values of two vectors take turns.
  const __m512i first_half =
      _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(32)), 16));
  const __m512i second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(16));
  for (int64_t j = low / 16 * 16; j < n; j += 16) {
    const bf16 *keys[16], *values[16];
    for (int64_t i = 0; i < 16; ++i) {
      const bool is_in = j + i >= low && j + i < n;
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
      for (int64_t e = 0; e < t.width; e += 32, out += 2 * 16 * (kPairKeys / 2)) {
        const __m512i even = values[i] ? load_bits(values[i] + e, a.value_dim - e) : _mm512_setzero_si512();
        const __m512i odd = values[i + 1] ? load_bits(values[i + 1] + e, a.value_dim - e) : _mm512_setzero_si512();
        _mm512_storeu_si512(out, _mm512_permutex2var_epi16(even, first_half, odd));
        if (e + 16 < t.width)
          _mm512_storeu_si512(out + 16 * (kPairKeys / 2), _mm512_permutex2var_epi16(even, second_half, odd));
      }
    }
    if (_mm512_cmp_epu16_mask(most, _mm512_set1_epi16(0x7f80), _MM_CMPINT_NLT)) spoil_values(t, a, keys, j);
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
      t.scales[r] = product_scale(a), t.tops[r] = kMasked, t.total[r] = 0.0f, t.starts[r] = 0;
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

// A panel of rows, and what it has of a chunk of keys.
struct Panel {
  int64_t row, words, width;
  const uint32_t *q, *keys, *values;
  uint32_t* weights;
  float *sums, *total, *tops, *scales, *shifts, *chains, *factors, *key_scales, *value_scales, *part;
  const int32_t* starts;
  const Attention& a;
  const Span& span;
  int64_t begin, first, end;        // positions: of the chunk; of the first key that some row sees, and behind the last
  int64_t low_of_all, seen_by_all;  // positions of keys that all rows see, and need no soft-cap

  Panel(const PanelBuffers& t, const Attention& a, const Tile& tile, const Span& span, int64_t m, int64_t begin,
        int64_t low, int64_t n)
      : row(m), words(t.words), width(t.width), q(t.q + m * t.words), keys(t.keys), values(t.values),
        weights(t.weights), sums(t.sums + m * t.width), total(t.total + m), tops(t.tops + m), scales(t.scales + m),
        shifts(t.shifts), chains(t.chains), factors(t.factors), key_scales(t.key_scales),
        value_scales(t.value_scales), part(t.part), starts(t.starts + m), a(a), span(span), begin(begin) {
    const int64_t last = span.position(m + kWide <= tile.num_rows ? m + kWide - 1 : tile.num_rows - 1),
                  position = span.position(m), behind = begin + n;
    first = begin + low, end = last + 1 < behind ? last + 1 : behind;
    if (a.window > 0 && position - a.window + 1 > first) first = position - a.window + 1;
    seen_by_all = a.softcap > 0.0f ? begin : position + 1 < behind ? position + 1 : behind;
    low_of_all = a.window > 0 && last - a.window + 1 > first ? last - a.window + 1 : first;
  }
};

// Logits of keys [at, at + 8) of which some rows may not see all, capped where there is a soft-cap.
static void settle_logits(const Panel& p, int64_t at, float (&logits)[kTurn][kWide]) {
  for (int64_t j = 0; j < kTurn; ++j) {
    uint64_t seen = 0;
    const int64_t position = p.begin + at + j;
    if (position >= p.first && position < p.end) {
      seen = ~((uint64_t{1} << clamp(p.span.row_at(position) - p.row, 0, kWide)) - 1);
      if (p.a.window > 0) seen &= (uint64_t{1} << clamp(p.span.row_at(position + p.a.window) - p.row, 0, kWide)) - 1;
    }
    for (int64_t m = 0; m < kWide; m += kLanes) {
      const Vec x = load(logits[j] + m);
      store(logits[j] + m,
            by_bits(seen >> m & 0xffff, p.a.softcap > 0.0f ? cap(p.a, x, load(p.scales + m)) : x,
                    Vec(-INFINITY)));
    }
  }
}

// Those of keys [at, at + 8) of the chunk that some rows do not see are masked, all are capped if there is a soft-cap.
HEADRACE_INLINE void settle_products(const Panel& p, int64_t at, __m512 (&x)[kTurn][2]) {
  if (p.begin + at >= p.low_of_all && p.begin + at + kTurn <= p.seen_by_all) return;
  alignas(64) float logits[kTurn][kWide];
  HEADRACE_EACH(j, kTurn) _mm512_store_ps(logits[j], x[j][0]), _mm512_store_ps(logits[j] + kLanes, x[j][1]);
  settle_logits(p, at, logits);
  HEADRACE_EACH(j, kTurn) x[j][0] = _mm512_load_ps(logits[j]), x[j][1] = _mm512_load_ps(logits[j] + kLanes);
}

// Logits of keys [at, at + 8) of the chunk, yet without their row's factor where there is no soft-cap.
HEADRACE_INLINE void find_logits(const Panel& p, int64_t at, __m512 (&x)[kTurn][2]) {
  const uint32_t *key = p.keys + at / 16 * 16 * p.words + at % 16, *q = p.q;
  HEADRACE_EACH(j, kTurn) x[j][0] = x[j][1] = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int64_t w = 0; w < p.words; ++w, key += 16, q += kWide) {
    const __m512bh low = (__m512bh)_mm512_loadu_si512(q), high = (__m512bh)_mm512_loadu_si512(q + kLanes);
    HEADRACE_EACH(j, kTurn) {
      const __m512bh word = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(key[j]));
      x[j][0] = _mm512_dpbf16_ps(x[j][0], word, low), x[j][1] = _mm512_dpbf16_ps(x[j][1], word, high);
    }
  }
  settle_products(p, at, x);
}

// NaN apart.
HEADRACE_INLINE __m512 greatest(const __m512 (&x)[kTurn][2], int u) {
  __m512 most = _mm512_set1_ps(-INFINITY);
  HEADRACE_EACH(j, kTurn) most = _mm512_max_ps(x[j][u], most);
  return most;
}

// Weights of keys [at, at + 8) of the chunk, of which `chains` keep account: of pair i modulo 16 the i-th. Rows without
// a shift get one from these keys. Returns the rows of which some weight would be too large.
HEADRACE_INLINE uint32_t weigh_keys(const Panel& p, int64_t at) {
  __m512 x[kTurn][2];
  find_logits(p, at, x);
  __mmask16 over[2];
  HEADRACE_EACH(u, 2) {
    const Vec units = logit_units(p.a, load(p.scales + u * kLanes)), most = greatest(x, u);
    Vec shift = load(p.shifts + u * kLanes);
    const __mmask16 is_new = _mm512_cmp_ps_mask(shift.v, _mm512_set1_ps(kNoTop), _CMP_EQ_OQ);
    if (is_new) {
      shift = by_bits(is_new & _mm512_cmp_ps_mask(most.v, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ),
                      shift_of(most, units), shift);
      store(p.shifts + u * kLanes, shift);
    }
    HEADRACE_EACH(j, kTurn) x[j][u] = _mm512_fmadd_ps(x[j][u], units.v, shift.v);
    over[u] = is_over(most, units, shift);
  }
  // Of each four lanes, those of two keys take turns.
  const __m512i turns = _mm512_set4_epi32(0x0f0e0706, 0x0d0c0504, 0x0b0a0302, 0x09080100);
  const Arcs arcs;
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  uint32_t* out = p.weights + at / 2 * kWide;
  float* chain = p.chains + at / 2 % 16 * kWide;
  HEADRACE_EACH(i, kTurn / 2)
    HEADRACE_EACH(u, 2) {
      const __m512i whole = _mm512_packus_epi32(_mm512_cvtps_epi32(x[2 * i][u]), _mm512_cvtps_epi32(x[2 * i + 1][u])),
                    weight = arcs.weights(_mm512_shuffle_epi8(whole, turns));
      _mm512_storeu_si512(out + i * kWide + u * kLanes, weight);
      float* const total = chain + i * kWide + u * kLanes;  // as rounded: they must add up to 1
      _mm512_storeu_ps(total, _mm512_dpbf16_ps(_mm512_loadu_ps(total), (__m512bh)weight, one));
    }
  return over[0] | static_cast<uint32_t>(over[1]) << kLanes;
}

// Shifts of these rows by their greatest logits of keys [first, last) of the chunk.
static void raise_tops(const Panel& p, int64_t first, int64_t last, uint32_t rows) {
  Vec most[2] = {Vec(-INFINITY), Vec(-INFINITY)};
  for (int64_t at = first; at < last; at += kTurn) {
    __m512 x[kTurn][2];
    find_logits(p, at, x);
    HEADRACE_EACH(u, 2) most[u] = maximum(greatest(x, u), most[u]);
  }
  HEADRACE_EACH(u, 2)
  store(p.shifts + u * kLanes, by_bits(rows >> u * kLanes & 0xffff,
                                       shift_of(most[u], logit_units(p.a, load(p.scales + u * kLanes))),
                                       load(p.shifts + u * kLanes)));
}

// Adds the weighted values of keys [first, last) of the chunk to what there is.
static void add_values(const Panel& p, int64_t first, int64_t last) {
  const uint32_t* const end = p.weights + last / 2 * kWide;
  const Vec here[2] = {load(p.factors), load(p.factors + kLanes)},
            there[2] = {load(p.factors + kWide), load(p.factors + kWide + kLanes)};
  float* sums = p.sums;
  for (int64_t e = 0; e < p.width; e += kTurn, sums += kTurn * kWide) {
    const uint32_t* value = p.values + e / 16 * 16 * (kPairKeys / 2) + first / 2 * 16 + e % 16;
    __m512 acc[kTurn][2];
    HEADRACE_EACH(i, kTurn) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (const uint32_t* weight = p.weights + first / 2 * kWide; weight < end; weight += kWide, value += 16) {
      const __m512bh low = (__m512bh)_mm512_loadu_si512(weight), high = (__m512bh)_mm512_loadu_si512(weight + kLanes);
      HEADRACE_EACH(i, kTurn) {
        const __m512bh word = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(value[i]));
        acc[i][0] = _mm512_dpbf16_ps(acc[i][0], word, low), acc[i][1] = _mm512_dpbf16_ps(acc[i][1], word, high);
      }
    }
    HEADRACE_EACH(i, kTurn)
      HEADRACE_EACH(u, 2) {
        float* const sum = sums + i * kWide + u * kLanes;
        store(sum, Factors::add(load(sum), here[u], acc[i][u], there[u]));
      }
  }
}

// All that a panel sees of a chunk.
static void pass_panel(const Panel& p) {
  const int64_t first = (p.first - p.begin) / kTurn * kTurn, last = padded(p.end - p.begin, kTurn);
  const auto weigh = [&] {
    uint32_t over = 0;
    memset(p.chains, 0, 16 * kWide * sizeof(float));
    for (int64_t at = first; at < last; at += kTurn) over |= weigh_keys(p, at);
    return over;
  };
  for (int64_t r = 0; r < kWide; ++r) p.shifts[r] = kNoTop;
  if (const uint32_t over = weigh()) raise_tops(p, first, last, over), weigh();
  HEADRACE_EACH(u, 2) {
    const int64_t m = u * kLanes;
    Vec total[16];
    HEADRACE_EACH(i, 16) total[i] = load(p.chains + i * kWide + m);
#pragma GCC unroll 4
    for (int step = 8; step > 0; step /= 2)  // in the order of sum()
      HEADRACE_EACH(i, step) total[i] = total[i] + total[i + step];
    const Factors f(load(p.tops + m), top_of(load(p.shifts + m)));
    store(p.factors + m, f.here), store(p.factors + kWide + m, f.there), store(p.tops + m, f.top);
    store(p.total + m, f.add(load(p.total + m), f.here, total[0], f.there));
  }
  add_values(p, first, last);
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
      write_row(a, tile, r, t.lines + (r - m) * width, t.tops[r], t.total[r]);
  }
}

// pack(first key of a chunk, keys of it that are seen: from, to) lays out keys and values; pass(panel) adds them up.
template <class Pack, class Pass>
static void over_panels(const PanelBuffers& t, const Attention& a, const Tile& tile, const Pack& pack,
                        const Pass& pass) {
  const Span span(a, tile);
  memset(t.sums, 0, t.rows * t.width * sizeof(float));
  for (int64_t at = span.low / kPairKeys * kPairKeys; at < span.end; at += kPairKeys) {
    const int64_t low = span.low > at ? span.low - at : 0, n = span.end - at < kPairKeys ? span.end - at : kPairKeys;
    pack(at, low, n);
    for (int64_t m = 0; m < tile.num_rows; m += kWide) {
      const Panel panel(t, a, tile, span, m, at, low, n);
      if (panel.first < panel.end) pass(panel);
    }
  }
  write_rows(t, a, tile);
}

static void tile_of_pairs(const Attention& a, const Tile& tile, float* scratch) {
  const PanelBuffers t(a, tile.num_rows, scratch);
  pack_queries<false>(t, a, tile);
  over_panels(
      t, a, tile, [&](int64_t at, int64_t low, int64_t n) { pack_pairs(t, a, tile, at, low, n); },
      [](const Panel& panel) { pass_panel(panel); });
}

}  // namespace headrace::HEADRACE_ISA
