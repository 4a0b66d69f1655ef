// Products of pairs of bfloat16 (AVX-512 BF16): weights of 16 bits, which decodes and tiles find alike, and decodes.
//
// A chunk's weights are up to 2^64, of a top that is a whole power of two: that of the greatest of the first eight keys
// that the row sees, or, where a weight would be larger, of the greatest of the chunk.
#pragma once

#include "attention_decode.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kPairKeys = 192;    // of a chunk
constexpr int64_t kTurn = 8;          // keys, or dimensions of values, whose sums fill the registers of a tile
constexpr float kLogitUnits = kFixedOne / kLn2;            // a factor of e
constexpr float kFixedMost = kFixedTop + 64 * kFixedOne;  // the weight 2^64
constexpr float kNoTop = 1.0e30f;     // shift of a row without any key yet

static constexpr Arc<uint16_t> kArc;

struct Arcs {
  __m512i low = _mm512_load_si512(kArc.heights), high = _mm512_load_si512(kArc.heights + 32);

  // Of logits in fixed point.
  HEADRACE_INLINE __m512i weights(__m512i logits) const {
    return _mm512_srli_epi16(
        _mm512_subs_epu16(logits, _mm512_permutex2var_epi16(low, _mm512_srli_epi16(logits, 2), high)), 1);
  }
};

HEADRACE_INLINE Vec cap(const Attention& a, Vec products, Vec scale) {
  return Vec(a.softcap) * tanh(rounded(products * scale));
}
// What makes products, or capped logits, fixed-point numbers; of the row's greatest, the shift that makes them weights;
// and whether one of them would be too large.
HEADRACE_INLINE Vec logit_units(const Attention& a, Vec scale) {
  return a.softcap > 0.0f ? Vec(kLogitUnits) : scale * Vec(kLogitUnits);
}
HEADRACE_INLINE Vec shift_of(Vec most, Vec units) {
  const Vec top = _mm512_ceil_ps((rounded(most * units) * Vec(1.0f / kFixedOne)).v);
  return Vec(kFixedTop) - top * Vec(kFixedOne);  // exact
}
HEADRACE_INLINE __mmask16 is_over(Vec most, Vec units, Vec shift) {
  return _mm512_cmp_ps_mask(fma(most, units, shift).v, _mm512_set1_ps(kFixedMost), _CMP_GT_OQ);
}
HEADRACE_INLINE Vec top_of(Vec shift) {
  return by_bits(_mm512_cmp_ps_mask(shift.v, _mm512_set1_ps(kNoTop), _CMP_LT_OQ),
                 (Vec(kFixedTop) - shift) * Vec(kLn2 / kFixedOne), Vec(kMasked));
}

// Up to 32 values, zeros beyond n.
HEADRACE_INLINE __m512i load_bits(const bf16* p, int64_t n) {
  return _mm512_maskz_loadu_epi16(first_halves(n), p);
}

// Eight words of 16 keys, a key to a lane: of every eight keys from `keys` on the first four.
HEADRACE_INLINE void turn_words(const bf16* const* keys, int64_t w, __m512i (&out)[8]) {
  __m512 r[8];
  HEADRACE_EACH(i, 8) {
    const bf16* const* key = keys + i / 4 * 16 + i % 4;
    r[i] = _mm512_mask_broadcast_f32x8(
        _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(key[0] + 2 * w))), 0xff00,
        _mm256_loadu_ps(reinterpret_cast<const float*>(key[8] + 2 * w)));
  }
  turn_lanes(r);
  HEADRACE_EACH(i, 4) {
    out[i] = _mm512_castps_si512(_mm512_shuffle_f32x4(r[i], r[4 + i], 0x88));
    out[4 + i] = _mm512_castps_si512(_mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd));
  }
}

// Products of `kHeads` queries, `q_width` values apart, with kBlocks times 32 keys, of `words` pairs each. The first 16
// of 32 results are those of the first four of every eight keys. Lines of 64 bytes are read as a whole, or else by
// halves, with more sums under way.
template <int kHeads, int kBlocks, class F>
HEADRACE_INLINE void multiply_pairs(const bf16* q, int64_t q_width, const bf16* const* keys, int64_t words,
                                    bool are_lines_whole, float* logits, int64_t logits_stride, F& next) {
  __m512 sums[kHeads][2 * kBlocks];
  for (int h = 0; h < kHeads; ++h)
    for (int g = 0; g < 2 * kBlocks; ++g) sums[h][g] = _mm512_setzero_ps();
  const auto add = [&]<int kTurns>(int64_t from) {
    HEADRACE_EACH(g, 2 * kBlocks) {
      HEADRACE_EACH(t, kTurns) {
        next.advance();
        const int64_t w = from + 8 * t;
        __m512i key[8];
        turn_words(keys + g / 2 * kDecodeKeys + g % 2 * 4, w, key);
        HEADRACE_EACH(i, 8)
          for (int h = 0; h < kHeads; ++h) {
            int32_t word;
            memcpy(&word, q + h * q_width + 2 * (w + i), 4);
            sums[h][g] = _mm512_dpbf16_ps(sums[h][g], (__m512bh)_mm512_set1_epi32(word), (__m512bh)key[i]);
          }
      }
    }
  };
  int64_t w = 0;
  for (; are_lines_whole && w + 8 < words; w += 16) add.template operator()<2>(w);
  for (; w < words; w += 8) add.template operator()<1>(w);
  for (int h = 0; h < kHeads; ++h)
    for (int g = 0; g < 2 * kBlocks; ++g) _mm512_storeu_ps(logits + h * logits_stride + g * 16, sums[h][g]);
}

// The softmax of products with keys [low, n) of a chunk, which become pairs of weights in their order, at half of the
// place; they begin with whole blocks, and beside the keys weigh nothing.
HEADRACE_INLINE void soften_pairs(const Attention& a, float* logits, int64_t low, int64_t n, float& top, float& total) {
  const Vec scale(product_scale(a)), units = logit_units(a, scale), none(-INFINITY);
  const __m512i places = _mm512_set_epi32(27, 26, 25, 24, 19, 18, 17, 16, 11, 10, 9, 8, 3, 2, 1, 0);
  const int64_t first_turn = low / kTurn * kTurn, first_block = low / kDecodeKeys * kDecodeKeys;
  Vec most = none, first = none, odd(0.0f);
  for (int64_t b = first_block; b < n; b += kDecodeKeys)
    HEADRACE_EACH(g, 2) {
      Vec x = load(logits + b + 16 * g);
      if (a.softcap > 0.0f) x = cap(a, x, scale);
      const __m512i key = _mm512_add_epi32(places, _mm512_set1_epi32(static_cast<int>(b) + 4 * g));
      if (b < low || b + kDecodeKeys > n)
        x = by_bits(_mm512_cmp_epi32_mask(key, _mm512_set1_epi32(static_cast<int>(low)), _MM_CMPINT_NLT) &
                        _mm512_cmp_epi32_mask(key, _mm512_set1_epi32(static_cast<int>(n)), _MM_CMPINT_LT),
                    x, none);
      else odd = fma(x, Vec(0.0f), odd);
      if (b == first_block)
        first = maximum(by_bits(_mm512_cmp_epi32_mask(key, _mm512_set1_epi32(static_cast<int>(first_turn) + kTurn),
                                                      _MM_CMPINT_LT),
                                x, none),
                        first);
      most = maximum(x, most);
      store(logits + b + 16 * g, x);
    }
  const Vec greatest(largest(most));
  Vec shift = shift_of(Vec(largest(first)), units), added(0.0f);
  if (is_over(greatest, units, shift)) shift = shift_of(greatest, units);
  const Arcs arcs;
  for (int64_t b = first_block; b < n; b += kDecodeKeys) {
    const Vec low_keys = fma(load(logits + b), units, shift), high_keys = fma(load(logits + b + 16), units, shift);
    const __m512i weight =
        arcs.weights(_mm512_packus_epi32(_mm512_cvtps_epi32(low_keys.v), _mm512_cvtps_epi32(high_keys.v)));
    _mm512_storeu_si512(logits + b / 2, weight);
    added = _mm512_dpbf16_ps(added.v, (__m512bh)weight, (__m512bh)_mm512_set1_epi16(0x3f80));
  }
  store(&top, top_of(shift), 1);
  total = sum(added) + sum(odd);  // NaN where a logit is none
}

// Adds up kLots times 32 dimensions of the weighted values of pairs [first, last), `inside` those that there are.
template <int kHeads, int kLots, class F>
HEADRACE_INLINE void add_pairs_at(const float* weights, int64_t stride, const bf16* const* values, __mmask32 inside,
                                  int64_t first, int64_t last, float* sums, int64_t width, int64_t left, F& next) {
  __m512 acc[kHeads][2 * kLots];
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < 2 * kLots; ++u) acc[h][u] = _mm512_setzero_ps();
  for (int64_t i = first; i < last; ++i) {
    if (i % 2 == 0) next.advance();
    __m512bh both[2 * kLots];
    for (int u = 0; u < kLots; ++u) {
      const bf16 *a = values[2 * i] + 32 * u, *b = values[2 * i + 1] + 32 * u;
      const __m512i even = kLots > 1 ? _mm512_loadu_si512(a) : _mm512_maskz_loadu_epi16(inside, a),
                    odd = kLots > 1 ? _mm512_loadu_si512(b) : _mm512_maskz_loadu_epi16(inside, b);
      both[2 * u] = (__m512bh)_mm512_unpacklo_epi16(even, odd),
               both[2 * u + 1] = (__m512bh)_mm512_unpackhi_epi16(even, odd);
    }
    for (int h = 0; h < kHeads; ++h) {
      const __m512bh weight = (__m512bh)_mm512_set1_ps(weights[h * stride + i]);
      for (int u = 0; u < 2 * kLots; ++u) acc[h][u] = _mm512_dpbf16_ps(acc[h][u], weight, both[u]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kLots; ++u) {  // interleaved values: those whose number modulo 8 is below 4 came first
      const __m512 low = _mm512_shuffle_f32x4(acc[h][2 * u], acc[h][2 * u + 1], 0x44),
                   high = _mm512_shuffle_f32x4(acc[h][2 * u], acc[h][2 * u + 1], 0xee);
      _mm512_storeu_ps(sums + h * width + 32 * u, _mm512_shuffle_f32x4(low, low, 0xd8));
      if (32 * u + 16 < left) _mm512_storeu_ps(sums + h * width + 32 * u + 16, _mm512_shuffle_f32x4(high, high, 0xd8));
    }
}

template <int kHeads, class F>
HEADRACE_INLINE void add_pairs(const float* weights, int64_t stride, const bf16* const* values, int64_t first,
                               int64_t last, float* sums, int64_t dim, int64_t width, F& next) {
  const bf16* rows[kPairKeys];
  for (int64_t e = 0; e < dim;) {
    const bool is_wide = kHeads <= 3 && e + 64 <= dim;
    for (int64_t j = 2 * first; j < 2 * last && e > 0; ++j) rows[j] = values[j] + e;
    const bf16* const* at = e > 0 ? rows : values;
    if (is_wide)
      add_pairs_at<kHeads, kHeads <= 3 ? 2 : 1>(weights, stride, at, ~0u, first, last, sums + e, width, dim - e,
                                                next);
    else
      add_pairs_at<kHeads, 1>(weights, stride, at, first_halves(dim - e), first, last, sums + e, width, dim - e, next);
    e += is_wide ? 64 : 32;
  }
}

// Rows of keys [low, n) of the chunk at `begin`, around them the nearest of these up to whole blocks. Rows that do not
// end with whole turns of words are copied to `room`.
struct PairRows {
  const bf16 *keys[kPairKeys], *values[kPairKeys];

  PairRows(const Attention& a, const KeyRange& range, int64_t begin, int64_t low, int64_t n) {
    const int32_t* table = a.table + range.request * a.table_stride;
    const int64_t page = int64_t{1} << a.page_bits, first = low / kDecodeKeys * kDecodeKeys,
                  end = padded(n, kDecodeKeys);
    for (int64_t j = low; j < n; ++j) {
      const bool is_new = j == low || (begin + j) % page == 0;
      keys[j] = is_new ? static_cast<const bf16*>(row_at(a.k, a.k_strides, a, table, begin + j, range.first_head))
                       : keys[j - 1] + a.k_strides.token;
      values[j] = is_new ? static_cast<const bf16*>(row_at(a.v, a.v_strides, a, table, begin + j, range.first_head))
                         : values[j - 1] + a.v_strides.token;
    }
    for (int64_t j = first; j < low; ++j) keys[j] = keys[low], values[j] = values[low];
    for (int64_t j = n; j < end; ++j) keys[j] = keys[n - 1], values[j] = values[n - 1];
  }
};

// Of the kv heads of a set; meanwhile keys [at, end) of the next one are prefetched.
static void decode_pairs_of_chunk(const Attention& a, const HeadSet& set, const DecodeState& s, const Partial& out) {
  const KeyRange& range = set.range;
  const int64_t begin = range.first / kPairKeys * kPairKeys, low = range.first - begin, n = range.last - begin,
                first_block = low / kDecodeKeys * kDecodeKeys, words = (a.head_dim + 1) / 2;
  PairRows rows(a, range, begin, low, n);
  bf16* const copies = reinterpret_cast<bf16*>(s.wide);
  TwoFetches own = set.fetch_own(a, range.num_heads * ((n - low + 15) / 16) * ((words + 7) / 8));
  for (int64_t k = 0; k < range.num_heads; ++k) {
    const bf16* keys[kPairKeys];
    for (int64_t j = first_block; j < padded(n, kDecodeKeys); ++j) {
      keys[j] = rows.keys[j] + k * a.k_strides.head;
      if (a.head_dim % 16 == 0) continue;
      bf16* const copy = copies + j * s.q_width;
      memcpy(copy, keys[j], a.head_dim * sizeof(bf16));
      memset(copy + a.head_dim, 0, (s.q_width - a.head_dim) * sizeof(bf16));
      keys[j] = copy;
    }
    over_more_heads(s.group, [&]<int kHeads>(int64_t h) {
      const int64_t head = set.first_query + k * s.group + h;
      const bf16* const q = reinterpret_cast<const bf16*>(s.q) + head * s.q_width;
      NoFetch nothing;
      const auto run = [&]<int kBlocks>(int64_t b, auto& meanwhile) {
        multiply_pairs<kHeads, kBlocks>(q, s.q_width, keys + b, words, share_places(a),
                                        s.logits + head * kPairKeys + b, kPairKeys, meanwhile);
      };
      constexpr int kBlocks = kHeads <= 3 ? 2 : 1;
      for (int64_t b = first_block; b < n; b += kBlocks * kDecodeKeys) {
        if (kBlocks == 2 && b + kDecodeKeys >= n)
          h == 0 ? run.template operator()<1>(b, own) : run.template operator()<1>(b, nothing);
        else
          h == 0 ? run.template operator()<kBlocks>(b, own) : run.template operator()<kBlocks>(b, nothing);
      }
    });
  }
  for (int64_t h = set.first_query; h < set.first_query + range.num_heads * s.group; ++h)
    soften_pairs(a, s.logits + h * kPairKeys, low, n, out.top[h], out.total[h]);
  const int64_t value_lots = (a.value_dim + 63) / 64 * (s.group > 3 ? 2 : 1);
  RowFetch next = set.next_keys(a, range.num_heads * ((n - low) / 4 + 1) * value_lots);
  for (int64_t k = 0; k < range.num_heads; ++k) {
    over_more_heads(s.group, [&]<int kHeads>(int64_t h) {
      const int64_t head = set.first_query + k * s.group + h;
      const auto run = [&](auto& meanwhile) {
        add_pairs<kHeads>(s.logits + head * kPairKeys, kPairKeys, rows.values, low / 2, (n + 1) / 2,
                          out.sums + head * s.v_width, a.value_dim, s.v_width, meanwhile);
      };
      NoFetch nothing;
      h == 0 ? run(next) : run(nothing);
    });
    for (int64_t j = first_block; j < padded(n, kDecodeKeys); ++j) rows.values[j] += a.v_strides.head;
  }
}

static void decode_pairs(const Attention& a, const KeyRange& range, float* partials, int64_t step, float* scratch) {
  const DecodeState s(a, range.num_heads, kPairKeys, scratch);
  const char* q = static_cast<const char*>(a.q) + (a.query_start[range.request] * a.q_stride +
                                                   range.first_head * s.group * a.head_dim) *
                                                      size_of(a.q_type);
  for (int64_t h = 0; h < s.heads; ++h) {
    bf16* const at = reinterpret_cast<bf16*>(s.q) + h * s.q_width;
    halve_queries(a, q + h * a.head_dim * size_of(a.q_type), at, a.head_dim);
    memset(at + a.head_dim, 0, (s.q_width - a.head_dim) * sizeof(bf16));
  }
  over_chunks(a, range, kPairKeys, partials, step, s.spare, [&](int64_t first, int64_t last, const Partial& into) {
    over_sets(a, range, kPairKeys, first, last,
              [&](const HeadSet& set) { decode_pairs_of_chunk(a, set, s, into); });
  });
}

}  // namespace headrace::HEADRACE_ISA
