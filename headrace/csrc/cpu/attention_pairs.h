// One query token over pages of bfloat16, by products of pairs (AVX-512 BF16): logits need no widened keys, and of
// values two keys are taken at a time, so that weights are rounded to bfloat16. Sums of 32 dimensions lie in the order
// in which values are interleaved until all keys are done: those whose number modulo 8 is below 4 come first.
#pragma once

#include "attention_decode.h"

namespace headrace::HEADRACE_ISA {

HEADRACE_INLINE bool is_for_pairs(const Attention& a) {
  return a.kv_type == kBFloat16 && a.q_type != kFloat16 && a.head_dim % 32 == 0 && a.value_dim % 32 == 0;
}

// The sums of 16 vectors, each to a lane.
HEADRACE_INLINE __m512 sum_each(const __m512 (&x)[16]) {
  __m512 fours[4];
  for (int i = 0; i < 4; ++i) {  // lane 4k + j: of vector 4i + j, what its 128 bits k add up to
    __m512 twos[2];
    for (int j = 0; j < 2; ++j) {
      const __m512 a = x[4 * i + 2 * j], b = x[4 * i + 2 * j + 1];
      twos[j] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    const __m512d a = _mm512_castps_pd(twos[0]), b = _mm512_castps_pd(twos[1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const __m512 low =
      _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
  const __m512 high =
      _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88), _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// Products of a query with 16 keys, which begin `offset` values after `keys`.
HEADRACE_INLINE __m512 multiply_keys_of_pairs(const bf16* q, const bf16* const* keys, int64_t offset, int64_t dim) {
  __m512 sums[16];
  for (int j = 0; j < 16; ++j) sums[j] = _mm512_setzero_ps();
  int64_t e = 0;
  for (; e + 64 <= dim; e += 64) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(q + e), second = (__m512bh)_mm512_loadu_si512(q + e + 32);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      const bf16* key = keys[j] + offset + e;
      sums[j] = _mm512_dpbf16_ps(sums[j], first, (__m512bh)_mm512_loadu_si512(key));
      sums[j] = _mm512_dpbf16_ps(sums[j], second, (__m512bh)_mm512_loadu_si512(key + 32));
    }
  }
  if (e < dim) {
    const __m512bh rest = (__m512bh)_mm512_loadu_si512(q + e);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j)
      sums[j] = _mm512_dpbf16_ps(sums[j], rest, (__m512bh)_mm512_loadu_si512(keys[j] + offset + e));
  }
  return sum_each(sums);
}

// One step of online softmax over n of 32 products; weights become pairs of bfloat16, zeros beyond n. Returns the
// factor that rescales the sums so far.
HEADRACE_INLINE float soften_pairs(const Attention& a, Vec low, Vec high, int64_t n, float& top, float& total,
                                   uint32_t* weights) {
  const Vec scale(product_scale(a)), forbidden(-INFINITY);
  const __mmask32 seen = static_cast<__mmask32>((uint64_t{1} << n) - 1);
  low = low * scale, high = high * scale;
  if (a.softcap > 0.0f) low = Vec(a.softcap) * tanh(low), high = Vec(a.softcap) * tanh(high);
  low = _mm512_mask_mov_ps(forbidden.v, static_cast<__mmask16>(seen), low.v);
  high = _mm512_mask_mov_ps(forbidden.v, static_cast<__mmask16>(seen >> 16), high.v);
  const float old = top, found = largest(maximum(low, high));
  float fade = 1.0f;
  if (found > old) top = found, fade = expf(old - top);
  const Vec shift(top);
  const __m512i rounded =
      _mm512_maskz_mov_epi16(seen, (__m512i)_mm512_cvtne2ps_pbh(exp_coarse(high - shift).v, exp_coarse(low - shift).v));
  _mm512_storeu_si512(weights, rounded);
  const __m512 added = _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)rounded, (__m512bh)_mm512_set1_epi16(0x3f80));
  total = total * fade + _mm512_reduce_add_ps(added);
  return fade;
}

// Adds kLots times 32 dimensions of the weighted sum of 2 * pairs values, `offset` after `values`, to `kHeads` sums,
// after fading what they hold.
template <int kHeads, int kLots, class F>
HEADRACE_INLINE void add_pairs_at(const uint32_t (*weights)[kDecodeKeys / 2], const bf16* const* values, int64_t offset,
                                  int64_t pairs, float* sums, int64_t width, const float* fades, const F& meanwhile) {
  __m512 acc[kHeads][2 * kLots];
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < 2 * kLots; ++u)
      acc[h][u] = _mm512_mul_ps(_mm512_loadu_ps(sums + h * width + 16 * u), _mm512_set1_ps(fades[h]));
  for (int64_t i = 0; i < pairs; ++i) {
    __m512bh both[2 * kLots];
    for (int u = 0; u < kLots; ++u) {
      const __m512i even = _mm512_loadu_si512(values[2 * i] + offset + 32 * u),
                    odd = _mm512_loadu_si512(values[2 * i + 1] + offset + 32 * u);
      both[2 * u] = (__m512bh)_mm512_unpacklo_epi16(even, odd),
               both[2 * u + 1] = (__m512bh)_mm512_unpackhi_epi16(even, odd);
    }
    meanwhile();
    for (int h = 0; h < kHeads; ++h) {
      const __m512bh weight = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(weights[h][i]));
      for (int u = 0; u < 2 * kLots; ++u) acc[h][u] = _mm512_dpbf16_ps(acc[h][u], weight, both[u]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < 2 * kLots; ++u) _mm512_storeu_ps(sums + h * width + 16 * u, acc[h][u]);
}

// The rows of a block times the queries of the k-th kv head of the range; meanwhile the next block is prefetched.
static void decode_pairs_of_block(const Attention& a, const DecodeState& s, const bf16* q, int64_t k,
                                  const BlockRows<bf16>& rows, Fetching<bf16>& next_keys, Fetching<bf16>& next_values) {
  alignas(64) uint32_t weights[kMostDecodeGroup][kDecodeKeys / 2];
  float fades[kMostDecodeGroup];
  const int64_t head = k * s.group, key_offset = k * a.k_strides.head, value_offset = k * a.v_strides.head,
                pairs = (rows.n + 1) / 2;
  for (int64_t h = 0; h < s.group; ++h) {
    const bf16* query = q + (head + h) * a.head_dim;
    next_keys.advance();
    const Vec low = multiply_keys_of_pairs(query, rows.keys, key_offset, a.head_dim);
    next_keys.advance();
    const Vec high = rows.n > 16 ? multiply_keys_of_pairs(query, rows.keys + 16, key_offset, a.head_dim) : Vec(0.0f);
    fades[h] = soften_pairs(a, low, high, rows.n, s.top[head + h], s.total[head + h], weights[h]);
  }
  const auto fetch = [&] { next_values.advance(); };
  const auto rest = [] {};
  over_heads(s.group, [&]<int kHeads>(int64_t h) {
    float* sums = s.sums + (head + h) * s.v_width;
    for (int64_t e = 0; e < a.value_dim;) {
      const auto add = [&](const auto& meanwhile) {
        if (e + 64 <= a.value_dim)
          return add_pairs_at<kHeads, 2>(weights + h, rows.values, value_offset + e, pairs, sums + e, s.v_width,
                                         fades + h, meanwhile),
                 void(e += 64);
        add_pairs_at<kHeads, 1>(weights + h, rows.values, value_offset + e, pairs, sums + e, s.v_width, fades + h,
                                meanwhile),
            e += 32;
      };
      h == 0 && e == 0 ? add(fetch) : add(rest);
    }
  });
}

static void order_sums(float* sums, int64_t dim) {
  for (int64_t e = 0; e < dim; e += 32) {
    const __m512 first = _mm512_loadu_ps(sums + e), second = _mm512_loadu_ps(sums + e + 16);
    const __m512 low = _mm512_shuffle_f32x4(first, second, 0x44), high = _mm512_shuffle_f32x4(first, second, 0xee);
    _mm512_storeu_ps(sums + e, _mm512_shuffle_f32x4(low, low, 0xd8));
    _mm512_storeu_ps(sums + e + 16, _mm512_shuffle_f32x4(high, high, 0xd8));
  }
}

static void decode_pairs(const Attention& a, const KeyRange& range, float* partial, float* scratch) {
  const DecodeState s(a, range.num_heads, partial, scratch);
  for (int64_t h = 0; h < s.heads; ++h) s.top[h] = -INFINITY, s.total[h] = 0.0f;
  memset(s.sums, 0, s.heads * s.v_width * sizeof(float));
  bf16* const q = reinterpret_cast<bf16*>(s.q);
  halve_queries(a,
                static_cast<const char*>(a.q) + (a.query_start[range.request] * a.q_stride +
                                                 range.first_head * s.group * a.head_dim) *
                                                    size_of(a.q_type),
                q, s.heads * a.head_dim);
  over_blocks<bf16>(
      a, range, 2 * s.group, kDecodeKeys / 2,
      [&](int64_t k, const BlockRows<bf16>& rows, Fetching<bf16>& next_keys, Fetching<bf16>& next_values) {
        decode_pairs_of_block(a, s, q, k, rows, next_keys, next_values);
      });
  for (int64_t h = 0; h < s.heads; ++h) order_sums(s.sums + h * s.v_width, a.value_dim);
}

}  // namespace headrace::HEADRACE_ISA
