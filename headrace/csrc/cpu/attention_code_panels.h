// Tiles of codes by products of four bytes (AVX-512 VNNI), laid out as in attention_panels.h: what attention_codes.h
// defines, for a panel of query rows at once.
#pragma once

#include "attention_panels.h"

namespace headrace::HEADRACE_ISA {

// Keys [at + low, at + n) plus 128, as VPDPBUSD takes one side unsigned, values as they are, and the scales of both.
static void pack_codes(const PanelBuffers& t, const Attention& a, const Tile& tile, int64_t at, int64_t low, int64_t n,
                       const LotRoom& room) {
  const int32_t* table = a.table + tile.request * a.table_stride;
  for (int64_t j = low / 16 * 16; j < n; j += 16) {
    const Lot lot = page_size_of(a) < kMostLot ? room.collect(a, table, at + j, at + n, tile.kv_head)
                                               : lot_at(a, table, at + j, tile.kv_head);
    for (int64_t w = 0; w < t.words; ++w)
      _mm512_storeu_si512(t.keys + (j * t.words + w * 16), _mm512_xor_si512(_mm512_loadu_si512(lot.keys + 64 * w),
                                                                            _mm512_set1_epi8(static_cast<char>(0x80))));
    store(t.key_scales + j, load(lot.key_scales)), store(t.value_scales + j, load(lot.value_scales));
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t e = 0; e < t.width; e += 16)
        _mm512_mask_storeu_epi32(
            t.values + (j / 4 + i) * t.width + e, first(static_cast<int>(clamp(t.width - e, 0, 16))),
            _mm512_maskz_loadu_epi32(first(static_cast<int>(clamp(a.value_dim - e, 0, 16))),
                                     lot.values + (i * a.value_dim + e) * 4));
  }
}

// Products with keys [at, at + 8) of the chunk times the scales of these, or capped logits.
HEADRACE_INLINE void find_products(const Panel& p, int64_t at, __m512 (&x)[kTurn][2]) {
  const uint32_t *key = p.keys + at / 16 * 16 * p.words + at % 16, *q = p.q;
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
  settle_products(p, at, x);
}

HEADRACE_INLINE __mmask16 are_seen(__m512 logits) {
  return _mm512_cmp_ps_mask(logits, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
}

// What a block of 32 keys makes of a panel's rows: tops and totals so far, factors of its sums.
struct CodeState {
  alignas(64) float top[kWide], total[kWide], fade[kWide], step[kWide];
};

// Weights of keys [at, at + 32) of the chunk in 7 bits, four keys to a word [8, W]; `logits` [32, W] is room.
static void weigh_codes(const Panel& p, int64_t at, float* logits, uint32_t* words, CodeState& s) {
  Vec most[2] = {Vec(-INFINITY), Vec(-INFINITY)};
  for (int64_t t = 0; t < kDecodeKeys; t += kTurn) {
    __m512 x[kTurn][2];
    find_products(p, at + t, x);
    HEADRACE_EACH(u, 2) {
      const __m512 scale = p.a.softcap > 0.0f ? _mm512_set1_ps(1.0f) : _mm512_loadu_ps(p.scales + u * kLanes);
      HEADRACE_EACH(j, kTurn) {
        const Vec logit = _mm512_mask_mul_ps(x[j][u], are_seen(x[j][u]), x[j][u], scale);
        most[u] = maximum(logit, most[u]);
        store(logits + (t + j) * kWide + u * kLanes, logit);
      }
    }
  }
  HEADRACE_EACH(u, 2) {
    const int64_t m = u * kLanes;
    const Vec old = load(s.top + m), top = maximum(old, most[u]), zero(0.0f), fade = exp(old - top);
    Vec added[16], heaviest(0.0f);
    HEADRACE_EACH(i, 16) added[i] = zero;
    HEADRACE_EACH(j, kDecodeKeys) {
      float* const place = logits + j * kWide + m;
      const Vec x = load(place);
      const __mmask16 seen = are_seen(x.v);
      const Vec weight = by_bits(seen, exp_coarse(x - top), zero),
                valued = _mm512_maskz_mul_ps(seen, weight.v, _mm512_set1_ps(p.value_scales[at + j]));
      store(place, valued);
      added[j % 16] = added[j % 16] + fma(valued, zero, weight);  // NaN where a scale is NaN
      heaviest = maximum(valued, heaviest);
    }
#pragma GCC unroll 4
    for (int step = 8; step > 0; step /= 2)  // in the order of sum()
      HEADRACE_EACH(i, step) added[i] = added[i] + added[i + step];
    const __mmask16 has_weight = _mm512_cmp_ps_mask(heaviest.v, _mm512_set1_ps(kLeastCoded), _CMP_GT_OQ);
    const __m512 coded = _mm512_maskz_div_ps(has_weight, _mm512_set1_ps(kMostCode), heaviest.v);
    store(s.top + m, top), store(s.fade + m, fade);
    store(s.total + m, fma(load(s.total + m), fade, added[0]));
    store(s.step + m, _mm512_maskz_div_ps(has_weight, heaviest.v, _mm512_set1_ps(kMostCode)));
    HEADRACE_EACH(i, kDecodeKeys / 4) {
      __m512i word = _mm512_setzero_si512();
      HEADRACE_EACH(j, 4) {
        const Vec code = load(logits + (4 * i + j) * kWide + m) * Vec(coded);
        const __m512i byte = _mm512_and_si512(_mm512_cvtps_epi32(code.v), _mm512_set1_epi32(0xff));
        word = _mm512_or_si512(word, _mm512_slli_epi32(byte, 8 * j));
      }
      _mm512_storeu_si512(words + i * kWide + m, word);
    }
  }
}

// Adds their values to the chunk's sums.
static void add_codes_of_panel(const Panel& p, int64_t at, const uint32_t* words, const CodeState& s) {
  const Vec fade[2] = {load(s.fade), load(s.fade + kLanes)}, step[2] = {load(s.step), load(s.step + kLanes)};
  for (int64_t e = 0; e < p.width; e += kTurn) {
    const uint32_t* value = p.values + at / 4 * p.width + e;
    __m512i acc[kTurn][2];
    HEADRACE_EACH(k, kTurn) acc[k][0] = acc[k][1] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int64_t i = 0; i < kDecodeKeys / 4; ++i, value += p.width) {
      const __m512i low = _mm512_loadu_si512(words + i * kWide), high = _mm512_loadu_si512(words + i * kWide + kLanes);
      HEADRACE_EACH(k, kTurn) {
        const __m512i word = _mm512_set1_epi32(static_cast<int32_t>(value[k]));
        acc[k][0] = _mm512_dpbusd_epi32(acc[k][0], low, word), acc[k][1] = _mm512_dpbusd_epi32(acc[k][1], high, word);
      }
    }
    HEADRACE_EACH(k, kTurn)
      HEADRACE_EACH(u, 2) {
        float* const sum = p.part + (e + k) * kWide + u * kLanes;
        store(sum, fma(Vec(_mm512_cvtepi32_ps(acc[k][u])), step[u], load(sum) * fade[u]));
      }
  }
}

// All that a panel sees of a chunk.
static void pass_codes(const Panel& p) {
  float* const logits = reinterpret_cast<float*>(p.weights);
  uint32_t* const words = p.weights + kDecodeKeys * kWide;
  CodeState s;
  for (int64_t r = 0; r < kWide; ++r) s.top[r] = kMasked, s.total[r] = 0.0f;
  memset(p.part, 0, p.width * kWide * sizeof(float));
  for (int64_t at = (p.first - p.begin) / kDecodeKeys * kDecodeKeys; at < p.end - p.begin; at += kDecodeKeys) {
    weigh_codes(p, at, logits, words, s);
    add_codes_of_panel(p, at, words, s);
  }
  HEADRACE_EACH(u, 2) {
    const int64_t m = u * kLanes;
    const Factors f(load(p.tops + m), load(s.top + m));
    store(p.tops + m, f.top), store(p.total + m, f.add(load(p.total + m), f.here, load(s.total + m), f.there));
    for (int64_t e = 0; e < p.width; ++e) {
      float* const sum = p.sums + e * kWide + m;
      store(sum, f.add(load(sum), f.here, load(p.part + e * kWide + m), f.there));
    }
  }
}

static void tile_of_codes(const Attention& a, const Tile& tile, float* scratch) {
  const PanelBuffers t(a, tile.num_rows, scratch);
  const LotRoom room(a, scratch + PanelBuffers::floats(a, tile.num_rows));
  pack_queries<true>(t, a, tile);
  over_panels(
      t, a, tile, [&](int64_t at, int64_t low, int64_t n) { pack_codes(t, a, tile, at, low, n, room); },
      [](const Panel& panel) { pass_codes(panel); });
}

}  // namespace headrace::HEADRACE_ISA
