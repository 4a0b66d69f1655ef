// Decode attention (one query token): all query heads of a kv head at once, so that keys and values are read once.
#pragma once

#include "attention_rows.h"
#include "unroll.h"

namespace headrace::HEADRACE_ISA {

// Four dimensions of kLanes keys, `stride` apart, a key to a lane.
HEADRACE_INLINE void turn_keys(const float* keys, int64_t stride, Vec (&out)[4]) {
#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
  __m512 r[4];
  HEADRACE_EACH(i, 4) {  // keys i, i + 4, i + 8, i + 12
    const float* key = keys + i * stride;
    r[i] = _mm512_castps128_ps512(_mm_loadu_ps(key));
    r[i] = _mm512_mask_broadcast_f32x4(r[i], 0x00f0, _mm_loadu_ps(key + 4 * stride));
    r[i] = _mm512_mask_broadcast_f32x4(r[i], 0x0f00, _mm_loadu_ps(key + 8 * stride));
    r[i] = _mm512_mask_broadcast_f32x4(r[i], 0xf000, _mm_loadu_ps(key + 12 * stride));
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1])),
                b = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1])),
                c = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3])),
                d = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)), out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)), out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
#elif defined(HEADRACE_IS_AVX2)
  __m256 r[4];
  HEADRACE_EACH(i, 4)
  r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(keys + i * stride)),
                              _mm_loadu_ps(keys + (i + 4) * stride), 1);
  const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r[0], r[1])),
                b = _mm256_castps_pd(_mm256_unpackhi_ps(r[0], r[1])),
                c = _mm256_castps_pd(_mm256_unpacklo_ps(r[2], r[3])),
                d = _mm256_castps_pd(_mm256_unpackhi_ps(r[2], r[3]));
  out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c)), out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
  out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d)), out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
#else
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < kLanes; ++j) out[i].v[j] = keys[j * stride + i];
#endif
}

#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
// Transposes 4 x 4 lanes of 128 bits by themselves: of the first four vectors, and of the others.
HEADRACE_INLINE void turn_lanes(__m512 (&r)[8]) {
  HEADRACE_EACH(i, 2) {
    const __m512* x = r + 4 * i;
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1])),
                  b = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1])),
                  c = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3])),
                  d = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)), r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
}

// Eight dimensions of 16 keys, of which 4 to 7 and 8 to 11 have changed places.
HEADRACE_INLINE void turn_keys(const float* keys, int64_t stride, Vec (&out)[8]) {
  __m512 r[8];
  HEADRACE_EACH(i, 8) {  // keys i and i + 8
    const float* key = keys + i * stride;
    r[i] = _mm512_mask_broadcast_f32x8(_mm512_castps256_ps512(_mm256_loadu_ps(key)), 0xff00,
                                       _mm256_loadu_ps(key + 8 * stride));
  }
  turn_lanes(r);
  HEADRACE_EACH(i, 4)
  out[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88), out[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
}
HEADRACE_INLINE Vec in_order(Vec a) { return _mm512_shuffle_f32x4(a.v, a.v, 0xd8); }
#endif

// Products of `kHeads` queries [*, padded E] with kVecs times kLanes keys, `stride` apart, as tiles add them up: a
// dimension after the other. Rows of keys end where they end: nothing beyond is read. Lines of 64 bytes are read as a
// whole, or else by halves, with more sums under way.
template <int kHeads, int kVecs, class F>
HEADRACE_INLINE void multiply_keys(const float* q, int64_t q_width, const float* const (&keys)[kVecs], int64_t stride,
                                   int64_t dim, bool are_lines_whole, float* const (&logits)[kVecs],
                                   int64_t logits_stride, F& next) {
  Vec sums[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h)
    for (int g = 0; g < kVecs; ++g) sums[h][g] = Vec(0.0f);
  const auto add = [&](int64_t e, int g, Vec key) {
    for (int h = 0; h < kHeads; ++h) sums[h][g] = fma(Vec(q[h * q_width + e]), key, sums[h][g]);
  };
  int64_t e = 0;
#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
  const auto add_turns = [&]<int kTurns>() {
    for (; e + 8 * kTurns <= dim; e += 8 * kTurns)
      HEADRACE_EACH(g, kVecs) {
        HEADRACE_EACH(t, kTurns) {
          next.advance();
          Vec key[8];
          turn_keys(keys[g] + e + 8 * t, stride, key);
          HEADRACE_EACH(i, 8) add(e + 8 * t + i, g, key[i]);
        }
      }
  };
  if (are_lines_whole) add_turns.template operator()<2>();
  add_turns.template operator()<1>();
  for (int h = 0; h < kHeads; ++h)
    for (int g = 0; g < kVecs; ++g) sums[h][g] = in_order(sums[h][g]);
#endif
  for (; e + 4 <= dim; e += 4) {
    if (e % 8 == 0) next.advance();
    HEADRACE_EACH(g, kVecs) {
      Vec key[4];
      turn_keys(keys[g] + e, stride, key);
      HEADRACE_EACH(i, 4) add(e + i, g, key[i]);
    }
  }
  for (; e < dim; ++e)
    for (int g = 0; g < kVecs; ++g) {
      float room[kLanes];
      for (int j = 0; j < kLanes; ++j) room[j] = keys[g][j * stride + e];
      add(e, g, load(room));
    }
  for (int h = 0; h < kHeads; ++h)
    for (int g = 0; g < kVecs; ++g) store(logits[g] + h * logits_stride, sums[h][g]);
}

// sums [kHeads, padded V] = weights * rows [first, last) of values.
template <int kHeads, int kVecs, class T, class Part, class F>
HEADRACE_INLINE void add_values_at(int64_t e, Part part, const float* weights, int64_t weights_stride,
                                   const T* const* values, int64_t first, int64_t last, float* sums, int64_t width,
                                   F& next) {
  Vec acc[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kVecs; ++u) acc[h][u] = Vec(0.0f);
  for (int64_t j = first; j < last; ++j) {
    if (j % 4 == 0) next.advance();
    Vec value[kVecs];
    for (int u = 0; u < kVecs; ++u) value[u] = part.load(values[j] + e + u * kLanes);
    for (int h = 0; h < kHeads; ++h) {
      const Vec weight(weights[h * weights_stride + j]);
      for (int u = 0; u < kVecs; ++u) acc[h][u] = fma(weight, value[u], acc[h][u]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kVecs; ++u) store(sums + h * width + e + u * kLanes, acc[h][u]);
}

template <int kHeads, class T, class F>
HEADRACE_INLINE void add_values(const float* weights, int64_t weights_stride, const T* const* values, int64_t first,
                                int64_t last, float* sums, int64_t dim, int64_t width, F& next) {
  constexpr int kVecs = kHeads > (kLanes < 16 ? 2 : 3) ? 2 : 4;  // as many sums as there are registers for
  int64_t e = 0;
  for (; e + kVecs * kLanes <= dim; e += kVecs * kLanes)
    add_values_at<kHeads, kVecs>(e, Whole{}, weights, weights_stride, values, first, last, sums, width, next);
  for (; e + kLanes <= dim; e += kLanes)
    add_values_at<kHeads, 1>(e, Whole{}, weights, weights_stride, values, first, last, sums, width, next);
  if (e < dim)
    add_values_at<kHeads, 1>(e, Rest{static_cast<int>(dim - e)}, weights, weights_stride, values, first, last, sums,
                             width, next);
}

// f.template operator()<n>(first) for heads in lots of at most three.
template <class F>
HEADRACE_INLINE void over_heads(int64_t num_heads, const F& f) {
  int64_t head = 0;
  for (; num_heads - head >= 3 && num_heads - head != 4; head += 3) f.template operator()<3>(head);
  for (; num_heads - head >= 2; head += 2) f.template operator()<2>(head);
  if (head < num_heads) f.template operator()<1>(head);
}

// The same for all heads of a group at once, as long as registers hold two sums for each: keys are turned once.
template <class F>
HEADRACE_INLINE void over_more_heads(int64_t num_heads, const F& f) {
  if (kLanes < 16 || num_heads <= 3) return over_heads(num_heads, f);
  if constexpr (kLanes == 16) {
    static_assert(kMostDecodeGroup == 8);
    switch (num_heads) {
      case 4: return f.template operator()<4>(0);
      case 5: return f.template operator()<5>(0);
      case 6: return f.template operator()<6>(0);
      case 7: return f.template operator()<7>(0);
      default: return f.template operator()<8>(0);
    }
  }
}

// Prefetches rows [at, end) of keys, or of values, of all heads of a range, spread evenly over `slots` calls while
// others are computed with: a core tracks only a few outstanding lines.
struct RowFetch {
  const Attention& a;
  const void* pages;
  const PageStrides& strides;
  const int32_t* table;
  int64_t first_head, bytes, at, end, slots;
  int64_t count = end - at, credit = 0;

  HEADRACE_INLINE void advance() {
    for (credit += count; credit >= slots && at < end; credit -= slots, ++at) {
      const char* row = static_cast<const char*>(row_at(pages, strides, a, table, at, first_head));
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
  }
};
// One after the other.
struct TwoFetches {
  RowFetch first, second;
  HEADRACE_INLINE void advance() { first.at < first.end ? first.advance() : second.advance(); }
};
struct NoFetch {
  HEADRACE_INLINE void advance() {}
};

HEADRACE_INLINE RowFetch fetch_keys(const Attention& a, const KeyRange& range, int64_t at, int64_t end, int64_t slots) {
  const int64_t bytes = ((range.num_heads - 1) * a.k_strides.head + a.head_dim) * size_of(a.kv_type);
  return {a, a.k, a.k_strides, a.table + range.request * a.table_stride, range.first_head, bytes, at, end, slots};
}
HEADRACE_INLINE RowFetch fetch_values(const Attention& a, const KeyRange& range, int64_t at, int64_t end,
                                      int64_t slots) {
  const int64_t bytes = ((range.num_heads - 1) * a.v_strides.head + a.value_dim) * size_of(a.kv_type);
  return {a, a.v, a.v_strides, a.table + range.request * a.table_stride, range.first_head, bytes, at, end, slots};
}

// Some kv heads of a range and one of its chunks, whose keys and values stay in the L2 cache, and what is read next:
// other heads of the chunk, or the next chunk.
struct HeadSet {
  KeyRange range, next;
  int64_t first_query;  // the number of its first query head in the whole range
  bool is_first;        // of the whole range: nobody has prefetched its keys

  // While there are products with keys, `slots` times: values; before them keys, if not there yet, well ahead of
  // the first head.
  HEADRACE_INLINE TwoFetches fetch_own(const Attention& a, int64_t slots) const {
    const int64_t ahead = range.first + kDecodeKeys, begin = is_first && ahead < range.last ? ahead : range.last,
                  soon = begin < range.last ? slots / (2 * range.num_heads) + 1 : 0;
    return {fetch_keys(a, range, begin, range.last, soon),
            fetch_values(a, range, range.first, range.last, slots - soon > 0 ? slots - soon : 1)};
  }
  HEADRACE_INLINE RowFetch next_keys(const Attention& a, int64_t slots) const {
    return fetch_keys(a, next, next.first, next.last, slots);
  }
};

// f(set) for the kv heads of a range and keys [first, last), which are of one chunk.
template <class F>
HEADRACE_INLINE void over_sets(const Attention& a, const KeyRange& range, int64_t chunk_keys, int64_t first,
                               int64_t last, const F& f) {
  constexpr int64_t kRowBytes = 512;
  const int64_t fitting = kRowBytes / (a.head_dim * size_of(a.kv_type)), most = fitting > 1 ? fitting : 1,
                behind = last + chunk_keys < range.last ? last + chunk_keys : range.last;
  for (int64_t head = 0; head < range.num_heads; head += most) {
    const int64_t left = range.num_heads - head, count = left < most ? left : most, after = left - count;
    KeyRange here{range.request, range.first_head + head, count, first, last}, next = here;
    next.first_head = after > 0 ? here.first_head + count : range.first_head;
    next.num_heads = after > 0 ? (after < most ? after : most) : (range.num_heads < most ? range.num_heads : most);
    if (after == 0) next.first = last, next.last = behind;
    f(HeadSet{here, next, head * a.group(), head == 0 && first == range.first});
  }
}

// Queries and logits of a range, in memory of the caller; partial results of a chunk that is not the first.
struct DecodeState {
  int64_t group, heads, q_width, v_width, chunk_keys;
  float *q, *logits, *wide, *spare;  // [heads, padded E], [heads, chunk], [chunk, padded E]

  static int64_t floats(const Attention& a, int64_t num_kv_heads, int64_t chunk_keys) {
    const int64_t heads = num_kv_heads * a.group();
    return (heads + chunk_keys) * padded(a.head_dim) + heads * chunk_keys + partial_size(a, heads);
  }
  DecodeState(const Attention& a, int64_t num_kv_heads, int64_t chunk_keys, float* scratch)
      : group(a.group()), heads(num_kv_heads * group), q_width(padded(a.head_dim)), v_width(padded(a.value_dim)),
        chunk_keys(chunk_keys) {
    q = scratch, logits = q + heads * q_width, wide = logits + heads * chunk_keys, spare = wide + chunk_keys * q_width;
  }
};

static void merge(const Attention& a, int64_t num_rows, const Partial& into, const Partial& from) {
  const int64_t width = padded(a.value_dim);
  for (int64_t r = 0; r < num_rows; ++r) {
    const Factors f(Vec(into.top[r]), Vec(from.top[r]));
    store(into.total + r, f.add(Vec(into.total[r]), f.here, Vec(from.total[r]), f.there), 1);
    store(into.top + r, f.top, 1);
    float* sums = into.sums + r * width;
    const float* others = from.sums + r * width;
    for (int64_t e = 0; e < width; e += kLanes)
      store(sums + e, f.add(load(sums + e), f.here, load(others + e), f.there));
  }
}

// f(first key, end, partial results) chunk by chunk; each goes to a place of its own, or they are merged.
template <class F>
HEADRACE_INLINE void over_chunks(const Attention& a, const KeyRange& range, int64_t chunk_keys, float* partials,
                                 int64_t step, float* spare, const F& f) {
  const int64_t rows = range.num_heads * a.group();
  for (int64_t first = range.first, last; first < range.last; first = last, partials += step) {
    last = (first / chunk_keys + 1) * chunk_keys;
    if (last > range.last) last = range.last;
    const bool is_merged = step == 0 && first > range.first;
    const Partial into = partial_at(a, is_merged ? spare : partials, rows);
    f(first, last, into);
    if (is_merged) merge(a, rows, partial_at(a, partials, rows), into);
  }
}

// The softmax of logits [low, n) of a chunk, which become weights; what is left of whole vectors weighs nothing.
inline void soften(float* logits, int64_t low, int64_t n, float& top, float& total) {
  const int64_t begin = low / kLanes * kLanes, end = padded(n, kLanes);
  for (int64_t i = begin; i < low; ++i) logits[i] = kMasked;
  for (int64_t i = n; i < end; ++i) logits[i] = kMasked;
  Vec most(kMasked), added(0.0f);
  for (int64_t i = begin; i < end; i += kLanes) most = maximum(load(logits + i), most);
  const Vec shift(top = largest(most));
  for (int64_t i = begin; i < end; i += kLanes) {
    const Vec x = load(logits + i), weight = i < low || i + kLanes > n ? weigh<true>(x, shift) : weigh<false>(x, shift);
    store(logits + i, weight);
    added = added + weight;
  }
  total = sum(added);
}

// Whether rows of keys lie such that few of them are in the L1 cache together: they would share its sets.
HEADRACE_INLINE bool share_places(const Attention& a) { return a.k_strides.token * size_of(a.kv_type) % 2048 == 0; }

// Products of the queries of a kv head with keys [low, n) of the chunk at `begin`.
template <class T>
HEADRACE_INLINE void multiply_chunk(const Attention& a, const DecodeState& s, const int32_t* table, int64_t kv_head,
                                    const float* q, int64_t begin, int64_t low, int64_t n, float* logits,
                                    TwoFetches& next) {
  const bool is_direct = sizeof(T) == sizeof(float) && int64_t{1} << a.page_bits >= kLanes;
  const auto key_at = [&](int64_t j) { return row_at(a.k, a.k_strides, a, table, begin + j, kv_head); };
  for (int64_t j = is_direct ? n : low; j < n; ++j)
    widen_values(static_cast<const T*>(key_at(j)), s.wide + j * s.q_width, a.head_dim, Vec(1.0f));
  over_more_heads(s.group, [&]<int kHeads>(int64_t h) {
    constexpr int kVecs = kHeads == 1 ? 6 : kLanes < 16 ? (kHeads == 2 ? 3 : 2) : kHeads == 2 ? 6 : kHeads < 6 ? 3 : 2;
    for (int64_t j = low / kLanes * kLanes; j < n; j += kVecs * kLanes) {
      const float* keys[kVecs];
      float* out[kVecs];
      for (int64_t i = 0; i < kVecs; ++i) {  // beyond the last key the last vector is taken again
        const int64_t own = j + i * kLanes, place = own < n ? own : (n - 1) / kLanes * kLanes;
        keys[i] = is_direct ? static_cast<const float*>(key_at(place)) : s.wide + place * s.q_width;
        out[i] = logits + h * s.chunk_keys + place;
      }
      const auto run = [&](auto& meanwhile) {
        multiply_keys<kHeads, kVecs>(q + h * s.q_width, s.q_width, keys, is_direct ? a.k_strides.token : s.q_width,
                                     a.head_dim, is_direct && share_places(a), out, s.chunk_keys, meanwhile);
      };
      NoFetch nothing;
      h == 0 ? run(next) : run(nothing);
    }
  });
}

template <class T>
static void decode_chunk(const Attention& a, const HeadSet& set, const DecodeState& s, const Partial& out) {
  const KeyRange& range = set.range;
  const int32_t* table = a.table + range.request * a.table_stride;
  const int64_t begin = range.first / kChunkKeys * kChunkKeys, low = range.first - begin, n = range.last - begin,
                page = int64_t{1} << a.page_bits, end = set.first_query + range.num_heads * s.group;
  TwoFetches own = set.fetch_own(a, range.num_heads * ((n - low) / kLanes + 1) * ((a.head_dim + 7) / 8));
  for (int64_t k = 0; k < range.num_heads; ++k) {
    const int64_t head = set.first_query + k * s.group;
    multiply_chunk<T>(a, s, table, range.first_head + k, s.q + head * s.q_width, begin, low, n,
                      s.logits + head * kChunkKeys, own);
  }
  for (int64_t h = set.first_query; h < end; ++h) {
    float* row = s.logits + h * kChunkKeys;
    if (a.softcap > 0.0f) cap_logits(row + low, n - low, a.softcap);
    soften(row, low, n, out.top[h], out.total[h]);
  }
  const T* rows[kChunkKeys];
  for (int64_t j = low; j < n; ++j)
    rows[j] = j == low || (begin + j) % page == 0
                  ? static_cast<const T*>(row_at(a.v, a.v_strides, a, table, begin + j, range.first_head))
                  : rows[j - 1] + a.v_strides.token;
  const int64_t value_lots = (a.value_dim + 4 * kLanes - 1) / (4 * kLanes) * (s.group > 3 ? 2 : 1);
  RowFetch keys = set.next_keys(a, range.num_heads * ((n - low) / 4 + 1) * value_lots);
  for (int64_t k = 0; k < range.num_heads; ++k) {
    over_more_heads(s.group, [&]<int kHeads>(int64_t h) {
      const int64_t head = set.first_query + k * s.group + h;
      const auto run = [&](auto& meanwhile) {
        add_values<kHeads>(s.logits + head * kChunkKeys, kChunkKeys, rows, low, n, out.sums + head * s.v_width,
                           a.value_dim, s.v_width, meanwhile);
      };
      NoFetch nothing;
      h == 0 ? run(keys) : run(nothing);
    });
    for (int64_t j = low; j < n; ++j) rows[j] += a.v_strides.head;
  }
}

template <class T>
static void decode_type(const Attention& a, const KeyRange& range, float* partials, int64_t step, float* scratch) {
  const DecodeState s(a, range.num_heads, kChunkKeys, scratch);
  const char* q = static_cast<const char*>(a.q) + (a.query_start[range.request] * a.q_stride +
                                                   range.first_head * s.group * a.head_dim) *
                                                      size_of(a.q_type);
  for (int64_t h = 0; h < s.heads; ++h)
    widen_values(a.q_type, q + h * a.head_dim * size_of(a.q_type), s.q + h * s.q_width, a.head_dim, product_scale(a));
  over_chunks(a, range, kChunkKeys, partials, step, s.spare, [&](int64_t first, int64_t last, const Partial& into) {
    over_sets(a, range, kChunkKeys, first, last, [&](const HeadSet& set) { decode_chunk<T>(a, set, s, into); });
  });
}

static void decode_of_floats(const Attention& a, const KeyRange& range, float* partials, int64_t step, float* scratch) {
  if (a.kv_type == kFloat32) return decode_type<float>(a, range, partials, step, scratch);
  if (a.kv_type == kBFloat16) return decode_type<bf16>(a, range, partials, step, scratch);
  decode_type<fp16>(a, range, partials, step, scratch);
}

static void finish(const Attention& a, const PartialRows& rows, const Partial& partial) {
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t head = rows.head + r % rows.per_token,
                  place = ((rows.token + r / rows.per_token) * a.num_heads + head) * a.value_dim;
    float total = partial.total[r];
    if (a.sinks) total += expf(a.sinks[head] - partial.top[r]);
    narrow_values(a.q_type, partial.sums + r * padded(a.value_dim),
                  static_cast<char*>(a.out) + place * size_of(a.q_type), a.value_dim, 1.0f / total);
  }
}

}  // namespace headrace::HEADRACE_ISA
