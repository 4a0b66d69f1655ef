// Queries over keys and values in 8 bits (codes.h). Queries are rounded to 8 bits once, the weights of each 32 keys,
// times the scales of their values, to 7 bits of the greatest of them: products of bytes then add up to whole numbers
// without loss, on all instruction sets alike. A chunk is blocks of 32 keys, whose sums are rescaled from one to the
// next.
#pragma once

#include "attention_decode.h"
#include "codes.h"
#include "lanes.h"

namespace headrace::HEADRACE_ISA {

static_assert(kDecodeKeys == 2 * kMostLot, "a block is two lots");

// A lot: 16 tokens of one kv head, laid out as in codes.h.
struct Lot {
  const int8_t *keys, *values;
  const float *key_scales, *value_scales;
};

HEADRACE_INLINE int64_t page_size_of(const Attention& a) { return int64_t{1} << a.page_bits; }

// The lot that begins at a position, or what a smaller page holds.
HEADRACE_INLINE Lot lot_at(const Attention& a, const int32_t* table, int64_t position, int64_t kv_head) {
  const int64_t page = table[position >> a.page_bits], place = position & (page_size_of(a) - 1);
  const float* scales = a.scales + page * a.scale_strides.page + kv_head * page_size_of(a) + place;
  return {static_cast<const int8_t*>(a.k) + page * a.k_strides.page + place * a.k_strides.token +
              kv_head * a.k_strides.head,
          static_cast<const int8_t*>(a.v) + page * a.v_strides.page + place * a.v_strides.token +
              kv_head * a.v_strides.head,
          scales, scales + a.scale_strides.values};
}

HEADRACE_INLINE Lot next_head(const Attention& a, const Lot& lot, int64_t heads) {
  return {lot.keys + heads * a.k_strides.head, lot.values + heads * a.v_strides.head,
          lot.key_scales + heads * page_size_of(a), lot.value_scales + heads * page_size_of(a)};
}

// Scratch for a lot gathered from pages of fewer than 16 tokens, up to position `end`.
struct LotRoom {
  int8_t *keys, *values;
  float* scales;  // [2, 16]

  static int64_t floats(const Attention& a) { return 4 * padded(a.head_dim) + 4 * padded(a.value_dim) + 32; }
  explicit LotRoom(const Attention& a, float* at)
      : keys(reinterpret_cast<int8_t*>(at)), values(keys + 16 * padded(a.head_dim)),
        scales(reinterpret_cast<float*>(values + 16 * padded(a.value_dim))) {}

  Lot collect(const Attention& a, const int32_t* table, int64_t position, int64_t end, int64_t kv_head) const {
    const CodeOrder order(page_size_of(a));
    for (int64_t t = 0; t < kMostLot && position + t < end; t += order.lot) {
      const Lot part = lot_at(a, table, position + t, kv_head);
      for (int64_t e = 0; e < a.head_dim; e += 4)
        memcpy(keys + e * kMostLot + 4 * t, part.keys + e * order.lot, 4 * order.lot);
      for (int64_t i = 0; i < order.lot * a.value_dim; ++i) {
        const int64_t token = t + i / (order.quad * a.value_dim) * order.quad + i % order.quad,
                      e = i / order.quad % a.value_dim;
        values[token / 4 * 4 * a.value_dim + 4 * e + token % 4] = part.values[i];
      }
      memcpy(scales + t, part.key_scales, order.lot * sizeof(float)),
          memcpy(scales + 16 + t, part.value_scales, order.lot * sizeof(float));
    }
    return {keys, values, scales, scales + 16};
  }
};

HEADRACE_INLINE Vec from_whole(const int32_t* p) {
#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
  return _mm512_cvtepi32_ps(_mm512_loadu_si512(p));
#elif defined(HEADRACE_IS_AVX2)
  return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  Vec out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = static_cast<float>(p[i]);
  return out;
#endif
}

HEADRACE_INLINE int32_t word_at(const void* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return word;
}
HEADRACE_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// multiply_codes: products of `kHeads` queries, `width` bytes apart, with the 32 keys of a block, to [kHeads, 32].
// add_codes: sums [kHeads, padded V] = rescale * sums + weights (bytes [kHeads, 32]) * values of the block. Both
// prefetch the next block.
#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
// VPDPBUSD takes unsigned bytes first: keys plus 128, so that each product begins at -128 times the sum of the query's
// codes.
template <int kHeads>
HEADRACE_INLINE void multiply_codes(const int8_t* q, int64_t width, const int32_t* query_sums, const Lot (&lots)[2],
                                    const Lot (&next)[2], int64_t dim, int32_t* products) {
  const __m512i shift = _mm512_set1_epi8(-128);
  __m512i sums[kHeads][2];
  for (int h = 0; h < kHeads; ++h) sums[h][0] = sums[h][1] = _mm512_set1_epi32(-128 * query_sums[h]);
  for (int64_t e = 0; e < dim; e += 4) {
    fetch(next[0].keys + 16 * e), fetch(next[1].keys + 16 * e);
    const __m512i first = _mm512_xor_si512(_mm512_loadu_si512(lots[0].keys + 16 * e), shift),
                  second = _mm512_xor_si512(_mm512_loadu_si512(lots[1].keys + 16 * e), shift);
    for (int h = 0; h < kHeads; ++h) {
      const __m512i query = _mm512_set1_epi32(word_at(q + h * width + e));
      sums[h][0] = _mm512_dpbusd_epi32(sums[h][0], first, query);
      sums[h][1] = _mm512_dpbusd_epi32(sums[h][1], second, query);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < 2; ++i) _mm512_storeu_si512(products + h * kDecodeKeys + 16 * i, sums[h][i]);
}

template <int kHeads, int kVecs>
HEADRACE_INLINE void add_codes_at(int64_t e, __mmask16 inside, const uint8_t* weights, const Lot (&lots)[2],
                                  const Lot (&next)[2], int64_t dim, float* sums, int64_t width, const float* fades,
                                  const float* steps) {
  __m512i acc[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kVecs; ++u) acc[h][u] = _mm512_setzero_si512();
  for (int64_t i = 0; i < 8; ++i) {
    const int8_t* values = lots[i / 4].values + (i % 4 * dim + e) * 4;
    const int8_t* later = next[i / 4].values + (i % 4 * dim + e) * 4;
    __m512i value[kVecs];
    for (int u = 0; u < kVecs; ++u) {
      value[u] = kVecs > 1 ? _mm512_loadu_si512(values + 64 * u) : _mm512_maskz_loadu_epi32(inside, values);
      fetch(later + 64 * u);
    }
    for (int h = 0; h < kHeads; ++h) {
      const __m512i weight = _mm512_set1_epi32(word_at(weights + h * kDecodeKeys + 4 * i));
      for (int u = 0; u < kVecs; ++u) acc[h][u] = _mm512_dpbusd_epi32(acc[h][u], weight, value[u]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kVecs; ++u) {
      float* sum = sums + h * width + e + 16 * u;
      store(sum, fma(Vec(_mm512_cvtepi32_ps(acc[h][u])), Vec(steps[h]), load(sum) * Vec(fades[h])));
    }
}

template <int kHeads>
HEADRACE_INLINE void add_codes(const uint8_t* weights, const Lot (&lots)[2], const Lot (&next)[2], int64_t dim,
                               float* sums, int64_t width, const float* fades, const float* steps) {
  int64_t e = 0;
  for (; e + 64 <= dim; e += 64)
    add_codes_at<kHeads, 4>(e, 0xffff, weights, lots, next, dim, sums, width, fades, steps);
  for (; e < dim; e += 16)
    add_codes_at<kHeads, 1>(e, first(static_cast<int>(dim - e < 16 ? dim - e : 16)), weights, lots, next, dim, sums,
                            width, fades, steps);
}

#elif defined(HEADRACE_IS_AVX2)
// VPMADDUBSW adds two products of an unsigned and a signed byte in 16 bits, which 2 * 127 * 127 fit: the key's sign
// goes to the query.
template <int kHeads>
HEADRACE_INLINE void multiply_codes(const int8_t* q, int64_t width, const int32_t*, const Lot (&lots)[2],
                                    const Lot (&next)[2], int64_t dim, int32_t* products) {
  const __m256i one = _mm256_set1_epi16(1);
  for (int i = 0; i < 2; ++i) {
    __m256i sums[kHeads][2];
    for (int h = 0; h < kHeads; ++h) sums[h][0] = sums[h][1] = _mm256_setzero_si256();
    for (int64_t e = 0; e < dim; e += 4) {
      fetch(next[i].keys + 16 * e);
      const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lots[i].keys + 16 * e)),
                    second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lots[i].keys + 16 * e + 32));
      const __m256i sizes[2] = {_mm256_abs_epi8(first), _mm256_abs_epi8(second)};
      for (int h = 0; h < kHeads; ++h) {
        const __m256i query = _mm256_set1_epi32(word_at(q + h * width + e));
        sums[h][0] = _mm256_add_epi32(
            sums[h][0], _mm256_madd_epi16(_mm256_maddubs_epi16(sizes[0], _mm256_sign_epi8(query, first)), one));
        sums[h][1] = _mm256_add_epi32(
            sums[h][1], _mm256_madd_epi16(_mm256_maddubs_epi16(sizes[1], _mm256_sign_epi8(query, second)), one));
      }
    }
    for (int h = 0; h < kHeads; ++h)
      for (int j = 0; j < 2; ++j)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(products + h * kDecodeKeys + 16 * i + 8 * j), sums[h][j]);
  }
}

template <int kHeads, int kVecs>
HEADRACE_INLINE void add_codes_at(int64_t e, __m256i inside, const uint8_t* weights, const Lot (&lots)[2],
                                  const Lot (&next)[2], int64_t dim, float* sums, int64_t width, const float* fades,
                                  const float* steps) {
  const __m256i one = _mm256_set1_epi16(1);
  __m256i acc[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kVecs; ++u) acc[h][u] = _mm256_setzero_si256();
  for (int64_t i = 0; i < 8; ++i) {
    const int8_t* values = lots[i / 4].values + (i % 4 * dim + e) * 4;
    fetch(next[i / 4].values + (i % 4 * dim + e) * 4);
    __m256i value[kVecs];
    for (int u = 0; u < kVecs; ++u)
      value[u] = kVecs > 1 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 32 * u))
                           : _mm256_maskload_epi32(reinterpret_cast<const int*>(values), inside);
    for (int h = 0; h < kHeads; ++h) {
      const __m256i weight = _mm256_set1_epi32(word_at(weights + h * kDecodeKeys + 4 * i));
      for (int u = 0; u < kVecs; ++u)
        acc[h][u] = _mm256_add_epi32(acc[h][u], _mm256_madd_epi16(_mm256_maddubs_epi16(weight, value[u]), one));
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kVecs; ++u) {
      float* sum = sums + h * width + e + 8 * u;
      store(sum, fma(Vec(_mm256_cvtepi32_ps(acc[h][u])), Vec(steps[h]), load(sum) * Vec(fades[h])));
    }
}

template <int kHeads>
HEADRACE_INLINE void add_codes(const uint8_t* weights, const Lot (&lots)[2], const Lot (&next)[2], int64_t dim,
                               float* sums, int64_t width, const float* fades, const float* steps) {
  constexpr int kVecs = kHeads > 2 ? 2 : 4;
  int64_t e = 0;
  for (; e + 8 * kVecs <= dim; e += 8 * kVecs)
    add_codes_at<kHeads, kVecs>(e, first(8), weights, lots, next, dim, sums, width, fades, steps);
  for (; e < dim; e += 8)
    add_codes_at<kHeads, 1>(e, first(static_cast<int>(dim - e < 8 ? dim - e : 8)), weights, lots, next, dim, sums,
                            width, fades, steps);
}

#else
template <int kHeads>
HEADRACE_INLINE void multiply_codes(const int8_t* q, int64_t width, const int32_t*, const Lot (&lots)[2],
                                    const Lot (&next)[2], int64_t dim, int32_t* products) {
  memset(products, 0, kHeads * kDecodeKeys * sizeof(int32_t));
  for (int64_t e = 0; e < dim; e += 4)
    for (int64_t j = 0; j < kDecodeKeys; ++j) {
      const int8_t* key = lots[j / 16].keys + 16 * e + j % 16 * 4;
      for (int h = 0; h < kHeads; ++h)
        for (int i = 0; i < 4; ++i) products[h * kDecodeKeys + j] += key[i] * q[h * width + e + i];
    }
}

template <int kHeads>
HEADRACE_INLINE void add_codes(const uint8_t* weights, const Lot (&lots)[2], const Lot (&next)[2], int64_t dim,
                               float* sums, int64_t width, const float* fades, const float* steps) {
  for (int h = 0; h < kHeads; ++h)
    for (int64_t e = 0; e < dim; ++e) {
      int32_t sum = 0;
      for (int64_t j = 0; j < kDecodeKeys; ++j)
        sum += weights[h * kDecodeKeys + j] * lots[j / 16].values[(j % 16 / 4 * dim + e) * 4 + j % 4];
      sums[h * width + e] = sums[h * width + e] * fades[h] + steps[h] * static_cast<float>(sum);
    }
}
#endif

// One step of online softmax over 32 products, a bit set for each unmasked key; logit = product * key scale * `factor`.
// Weights times the values' scales become bytes in units of `step`. Returns the factor that rescales the sums so far.
HEADRACE_INLINE float soften_codes(const Attention& a, const int32_t* products, const Lot (&lots)[2], uint32_t seen,
                                   float factor, float& top, float& total, uint8_t* weights, float& step) {
  constexpr int kVecs = kDecodeKeys / kLanes;
  constexpr uint32_t kAllLanes = (uint32_t{1} << kLanes) - 1;
  Vec x[kVecs], most(-INFINITY);
  for (int i = 0; i < kVecs; ++i) {
    const Vec scaled = from_whole(products + i * kLanes) * load(lots[i * kLanes / 16].key_scales + i * kLanes % 16),
              logit = rounded(scaled * Vec(factor));
    x[i] = by_bits(seen >> i * kLanes & kAllLanes, a.softcap > 0.0f ? Vec(a.softcap) * tanh(logit) : logit,
                   Vec(-INFINITY));
    most = maximum(x[i], most);
  }
  const float old = top, found = largest(most);
  if (found > old) top = found;
  const Vec shift(top), zero(0.0f), fade = exp(Vec(old) - shift);
  Vec added(0.0f), heaviest(0.0f);
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t here = seen >> i * kLanes & kAllLanes;
    const Vec weight = by_bits(here, exp_coarse(x[i] - shift), zero);
    x[i] = by_bits(here, weight * load(lots[i * kLanes / 16].value_scales + i * kLanes % 16), zero);
    added = added + fma(x[i], zero, weight);  // NaN where a scale is NaN
    heaviest = maximum(x[i], heaviest);
  }
  store(&total, fma(Vec(total), fade, Vec(sum(added))), 1);
  const float heavy = largest(heaviest);
  const Vec coded(coding(heavy));
  for (int i = 0; i < kVecs; ++i) store_bytes(reinterpret_cast<int8_t*>(weights) + i * kLanes, x[i] * coded);
  step = heavy > kLeastCoded ? heavy / kMostCode : 0.0f;
  float out;
  store(&out, fade, 1);
  return out;
}

// Queries of a range in 8 bits. Codes of a head are `width` bytes apart, with zeros at the end.
struct CodeQueries {
  int64_t width;
  int8_t* codes;
  int32_t* sums;   // of each head's codes
  float* factors;  // by which a product times the key's scale becomes a logit

  static int64_t floats(const Attention& a, int64_t heads) { return heads * (padded(a.head_dim) / 4 + 2); }
  CodeQueries(const Attention& a, int64_t heads, float* at)
      : width(padded(a.head_dim)), codes(reinterpret_cast<int8_t*>(at)),
        sums(reinterpret_cast<int32_t*>(codes + heads * width)), factors(reinterpret_cast<float*>(sums + heads)) {}

  // Of one head, by way of floats with room for whole vectors.
  void encode_head(const Attention& a, int64_t h, const void* q, float* room) const {
    widen_values(a.q_type, q, room, a.head_dim);
    int8_t* at = codes + h * width;
    factors[h] = encode(room, a.head_dim, at) * product_scale(a);
    memset(at + a.head_dim, 0, width - a.head_dim);
    sums[h] = 0;
    for (int64_t e = 0; e < a.head_dim; ++e) sums[h] += at[e];
  }
  CodeQueries from(int64_t head) const {
    CodeQueries out = *this;
    out.codes += head * width, out.sums += head, out.factors += head;
    return out;
  }
};
// Room of a chunk's lots.
inline int64_t floats_of_lots(const Attention& a) { return 2 * padded(LotRoom::floats(a)); }

inline int64_t decode_scratch_of_codes(const Attention& a, int64_t num_kv_heads) {
  const int64_t heads = num_kv_heads * a.group();
  return padded(CodeQueries::floats(a, heads)) + padded(a.head_dim) + floats_of_lots(a) +
         partial_size(a, heads);
}

// Keys [first, last) of a block that begins at `at`, as bits.
HEADRACE_INLINE uint32_t seen_of_block(int64_t first, int64_t last, int64_t at) {
  const uint32_t before = first > at ? (uint32_t{1} << (first - at)) - 1 : 0;
  return (last - at >= kDecodeKeys ? ~uint32_t{0} : (uint32_t{1} << (last - at)) - 1) & ~before;
}

// Where the lots of a block begin; instead of one whose keys are not seen comes the other.
HEADRACE_INLINE int64_t lot_begin(const KeyRange& range, int64_t at, int i) {
  const bool has_first = at + kMostLot > range.first, has_second = at + kMostLot < range.last;
  return (i == 0 ? has_first : !has_second) ? at : at + kMostLot;
}

// The lots of a block for the first kv head of a range.
HEADRACE_INLINE void find_lots(const Attention& a, const KeyRange& range, const int32_t* table, int64_t at,
                               Lot (&lots)[2]) {
  for (int i = 0; i < 2; ++i) lots[i] = lot_at(a, table, lot_begin(range, at, i), range.first_head);
}

// Keys up to `end` are read afterwards, and prefetched. `room` for two lots.
static void decode_codes_of_chunk(const Attention& a, const KeyRange& range, int64_t end, const CodeQueries& queries,
                                  const Partial& at_heads, float* room) {
  const int64_t group = a.group(), heads = range.num_heads * group, v_width = padded(a.value_dim);
  for (int64_t h = 0; h < heads; ++h) at_heads.top[h] = kMasked, at_heads.total[h] = 0.0f;
  memset(at_heads.sums, 0, heads * v_width * sizeof(float));
  const LotRoom rooms[2] = {LotRoom(a, room), LotRoom(a, room + padded(LotRoom::floats(a)))};
  const bool is_whole = page_size_of(a) >= kMostLot;
  const int32_t* table = a.table + range.request * a.table_stride;
  Lot found[2], later[2];
  const int64_t begin = range.first & ~(kDecodeKeys - 1);
  const KeyRange whole{range.request, range.first_head, range.num_heads, range.first, end};
  if (is_whole) find_lots(a, range, table, begin, later);
  for (int64_t at = begin; at < range.last; at += kDecodeKeys) {
    const uint32_t seen = seen_of_block(range.first, range.last, at);
    if (is_whole) {
      found[0] = later[0], found[1] = later[1];
      if (at + kDecodeKeys < end) find_lots(a, whole, table, at + kDecodeKeys, later);
    }
    for (int64_t k = 0; k < range.num_heads; ++k) {
      Lot lots[2], next[2];
      for (int i = 0; i < 2; ++i) {
        lots[i] = is_whole ? next_head(a, found[i], k)
                           : rooms[i].collect(a, table, lot_begin(range, at, i), range.last, range.first_head + k);
        next[i] = is_whole ? next_head(a, later[i], k) : lots[i];
        fetch(next[i].key_scales), fetch(next[i].value_scales);
      }
      alignas(64) int32_t products[kMostDecodeGroup * kDecodeKeys];
      alignas(64) uint8_t weights[kMostDecodeGroup * kDecodeKeys];
      float fades[kMostDecodeGroup], steps[kMostDecodeGroup];
      const int64_t head = k * group;
      over_heads(group, [&]<int kHeads>(int64_t h) {
        multiply_codes<kHeads>(queries.codes + (head + h) * queries.width, queries.width, queries.sums + head + h, lots,
                               next, a.head_dim, products + h * kDecodeKeys);
      });
      for (int64_t h = 0; h < group; ++h)
        fades[h] = soften_codes(a, products + h * kDecodeKeys, lots, seen, queries.factors[head + h],
                                at_heads.top[head + h], at_heads.total[head + h], weights + h * kDecodeKeys, steps[h]);
      over_heads(group, [&]<int kHeads>(int64_t h) {
        add_codes<kHeads>(weights + h * kDecodeKeys, lots, next, a.value_dim, at_heads.sums + (head + h) * v_width,
                          v_width, fades + h, steps + h);
      });
    }
  }
}

static void decode_of_codes(const Attention& a, const KeyRange& range, int64_t chunk_keys, float* partials,
                            int64_t step, float* scratch) {
  const int64_t heads = range.num_heads * a.group();
  float* const spare = scratch;
  const CodeQueries queries(a, heads, scratch + partial_size(a, heads));
  float* const room = scratch + partial_size(a, heads) + padded(CodeQueries::floats(a, heads));
  const char* q = static_cast<const char*>(a.q) + (a.query_start[range.request] * a.q_stride +
                                                   range.first_head * a.group() * a.head_dim) *
                                                      size_of(a.q_type);
  for (int64_t h = 0; h < heads; ++h) queries.encode_head(a, h, q + h * a.head_dim * size_of(a.q_type), room);
  over_chunks(a, range, chunk_keys, partials, step, spare, [&](int64_t first, int64_t last, const Partial& into) {
    decode_codes_of_chunk(a, {range.request, range.first_head, range.num_heads, first, last}, range.last, queries, into,
                          room + padded(a.head_dim));
  });
}

}  // namespace headrace::HEADRACE_ISA
