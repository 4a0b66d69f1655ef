// Decode attention (one query token): all query heads of a kv head at once, so that keys and values are read once.
#pragma once

#include "attention_rows.h"

namespace headrace::HEADRACE_ISA {

// Products of `kHeads` queries [*, padded E] with four keys. Rows of keys end where they end: nothing beyond is read.
template <int kHeads, class T>
HEADRACE_INLINE void multiply_keys(const float* q, int64_t q_width, const T* const* keys, int64_t dim, float* logits,
                                   int64_t logits_stride) {
  Vec sums[kHeads][4];
  for (int h = 0; h < kHeads; ++h)
    for (int j = 0; j < 4; ++j) sums[h][j] = Vec(0.0f);
  over_lanes(dim, [&](int64_t e, auto part) {
    Vec key[4];
    for (int j = 0; j < 4; ++j) key[j] = part.load(keys[j] + e);
    for (int h = 0; h < kHeads; ++h) {
      const Vec query = load(q + h * q_width + e);
      for (int j = 0; j < 4; ++j) sums[h][j] = fma(query, key[j], sums[h][j]);
    }
  });
  for (int h = 0; h < kHeads; ++h) store_sums(logits + h * logits_stride, sums[h]);
}

// sums [kHeads, padded V] = rescale * sums + weights * n rows of values.
template <int kHeads, int kVecs, class T, class Part>
HEADRACE_INLINE void add_values_at(int64_t e, Part part, const float* weights, int64_t weights_stride,
                                   const T* const* values, int64_t n, float* sums, int64_t width, const float* fades) {
  Vec acc[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kVecs; ++u) acc[h][u] = load(sums + h * width + e + u * kLanes) * Vec(fades[h]);
  for (int64_t j = 0; j < n; ++j) {
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

template <int kHeads, class T>
HEADRACE_INLINE void add_values(const float* weights, int64_t weights_stride, const T* const* values, int64_t n,
                                float* sums, int64_t dim, int64_t width, const float* fades) {
  constexpr int kVecs = kHeads > 2 && kLanes < 16 ? 2 : 4;  // as many sums as there are registers for
  int64_t e = 0;
  for (; e + kVecs * kLanes <= dim; e += kVecs * kLanes)
    add_values_at<kHeads, kVecs>(e, Whole{}, weights, weights_stride, values, n, sums, width, fades);
  for (; e + kLanes <= dim; e += kLanes)
    add_values_at<kHeads, 1>(e, Whole{}, weights, weights_stride, values, n, sums, width, fades);
  if (e < dim)
    add_values_at<kHeads, 1>(e, Rest{static_cast<int>(dim - e)}, weights, weights_stride, values, n, sums, width,
                             fades);
}

inline int64_t decode_scratch_of_floats(const Attention& a, int64_t num_kv_heads) {
  return num_kv_heads * a.group() * padded(a.head_dim) + kMostDecodeGroup * kDecodeKeys;
}

// f.template operator()<n>(first) for heads in lots of at most three.
template <class F>
HEADRACE_INLINE void over_heads(int64_t num_heads, const F& f) {
  int64_t head = 0;
  for (; num_heads - head >= 3 && num_heads - head != 4; head += 3) f.template operator()<3>(head);
  for (; num_heads - head >= 2; head += 2) f.template operator()<2>(head);
  if (head < num_heads) f.template operator()<1>(head);
}

// Partial results and queries of a range, in memory of the caller.
struct DecodeState {
  int64_t group, heads, q_width, v_width;
  float *top, *total, *sums, *q, *logits;

  DecodeState(const Attention& a, int64_t num_kv_heads, float* partial, float* scratch)
      : group(a.group()), heads(num_kv_heads * group), q_width(padded(a.head_dim)), v_width(padded(a.value_dim)) {
    const Partial at = partial_at(a, partial, heads);
    top = at.top, total = at.total, sums = at.sums, q = scratch, logits = q + heads * q_width;
  }
};

// Rows of keys and values of a block, of the first kv head of a range; those beyond the last are the last.
template <class T>
struct BlockRows {
  int64_t n = 0;
  const T *keys[kDecodeKeys], *values[kDecodeKeys];

  void find(const Attention& a, const KeyRange& range, const int32_t* table, int64_t at) {
    const int64_t page = int64_t{1} << a.page_bits, last = at < range.last ? range.last : range.fetched;
    n = last - at < kDecodeKeys ? last - at : kDecodeKeys;
    for (int64_t j = 0; j < n; ++j) {
      const bool is_new = j == 0 || (at + j) % page == 0;
      keys[j] = is_new ? static_cast<const T*>(row_at(a.k, a.k_strides, a, table, at + j, range.first_head))
                       : keys[j - 1] + a.k_strides.token;
      values[j] = is_new ? static_cast<const T*>(row_at(a.v, a.v_strides, a, table, at + j, range.first_head))
                         : values[j - 1] + a.v_strides.token;
    }
    for (int64_t j = n; n > 0 && j < kDecodeKeys; ++j) keys[j] = keys[n - 1], values[j] = values[n - 1];
  }
};

// Prefetches the rows of the next block, spread evenly over `slots` calls while this one is computed: a core tracks
// only a few outstanding lines.
template <class T>
struct Fetching {
  const T* const* rows;
  int64_t count, slots, width;  // values of a row, from the first head to the last
  int64_t row = 0, credit = 0;

  HEADRACE_INLINE void advance() {
    for (credit += count; credit >= slots; credit -= slots, ++row)
      for (int64_t e = 0; e < width; e += 64 / sizeof(T)) __builtin_prefetch(rows[row] + e, 0, 2);
  }
};

// n rows of keys and values of one kv head, whose first query head is `head`; meanwhile the next block is prefetched.
template <class T>
HEADRACE_INLINE void decode_block(const Attention& a, const DecodeState& s, int64_t head, const T* const* keys,
                                  const T* const* values, int64_t n, Fetching<T>& next_keys, Fetching<T>& next_values) {
  const float* q = s.q + head * s.q_width;
  for (int64_t j = 0; j < n; j += 4) {
    next_keys.advance(), next_values.advance();
    over_heads(s.group, [&]<int kHeads>(int64_t h) {
      multiply_keys<kHeads>(q + h * s.q_width, s.q_width, keys + j, a.head_dim, s.logits + h * kDecodeKeys + j,
                            kDecodeKeys);
    });
  }
  float fades[kMostDecodeGroup];
  for (int64_t h = 0; h < s.group; ++h) {
    float* row = s.logits + h * kDecodeKeys;
    if (a.softcap > 0.0f) cap_logits(row, n, a.softcap);
    fades[h] = soften(row, n, padded(n, kLanes), s.top[head + h], s.total[head + h]);
  }
  over_heads(s.group, [&]<int kHeads>(int64_t h) {
    add_values<kHeads>(s.logits + h * kDecodeKeys, kDecodeKeys, values, n, s.sums + (head + h) * s.v_width, a.value_dim,
                       s.v_width, fades + h);
  });
}

// f(kv head of the range, rows, rows of keys and of values of the next block), block by block of keys, and in each head
// by head: pages are read in the order in which they lie. In each call, f lets the next block's keys advance
// `key_slots` times, and so on.
template <class T, class F>
HEADRACE_INLINE void over_blocks(const Attention& a, const KeyRange& range, int64_t key_slots, int64_t value_slots,
                                 const F& f) {
  const int32_t* table = a.table + range.request * a.table_stride;
  const int64_t key_width = (range.num_heads - 1) * a.k_strides.head + a.head_dim,
                value_width = (range.num_heads - 1) * a.v_strides.head + a.value_dim;
  BlockRows<T> blocks[2];
  blocks[0].find(a, range, table, range.first);
  for (int64_t at = range.first, i = 0; at < range.last; at += kDecodeKeys, i ^= 1) {
    const BlockRows<T>&rows = blocks[i], &next = blocks[i ^ 1];
    blocks[i ^ 1].find(a, range, table, at + kDecodeKeys);
    const int64_t known = next.n > 0 ? next.n : 0;
    Fetching<T> next_keys{next.keys, known, range.num_heads * key_slots, key_width},
        next_values{next.values, known, range.num_heads * value_slots, value_width};
    for (int64_t k = 0; k < range.num_heads; ++k) f(k, rows, next_keys, next_values);
  }
}

template <class T>
static void decode_type(const Attention& a, const KeyRange& range, float* partial, float* scratch) {
  const DecodeState s(a, range.num_heads, partial, scratch);
  const int64_t first_query_head = range.first_head * s.group;
  const char* q = static_cast<const char*>(a.q) +
                  (a.query_start[range.request] * a.q_stride + first_query_head * a.head_dim) * size_of(a.q_type);
  for (int64_t h = 0; h < s.heads; ++h) {
    widen_values(a.q_type, q + h * a.head_dim * size_of(a.q_type), s.q + h * s.q_width, a.head_dim, product_scale(a));
    s.top[h] = -INFINITY, s.total[h] = 0.0f;
  }
  memset(s.sums, 0, s.heads * s.v_width * sizeof(float));
  over_blocks<T>(a, range, kDecodeKeys / 4, kDecodeKeys / 4,
                 [&](int64_t k, const BlockRows<T>& rows, Fetching<T>& next_keys, Fetching<T>& next_values) {
                   const T *keys[kDecodeKeys], *values[kDecodeKeys];
                   for (int64_t j = 0; j < kDecodeKeys; ++j)
                     keys[j] = rows.keys[j] + k * a.k_strides.head, values[j] = rows.values[j] + k * a.v_strides.head;
                   decode_block(a, s, k * s.group, keys, values, rows.n, next_keys, next_values);
                 });
}

static void decode_of_floats(const Attention& a, const KeyRange& range, float* partial, float* scratch) {
  if (a.kv_type == kFloat32) return decode_type<float>(a, range, partial, scratch);
  if (a.kv_type == kBFloat16) return decode_type<bf16>(a, range, partial, scratch);
  decode_type<fp16>(a, range, partial, scratch);
}

static void merge(const Attention& a, int64_t num_rows, const Partial& into, const Partial& from) {
  const int64_t width = padded(a.value_dim);
  for (int64_t r = 0; r < num_rows; ++r) {
    const float top = from.top[r] > into.top[r] ? from.top[r] : into.top[r];
    const float here = expf(into.top[r] - top), there = expf(from.top[r] - top);
    into.top[r] = top;
    into.total[r] = into.total[r] * here + from.total[r] * there;
    float* sums = into.sums + r * width;
    const float* others = from.sums + r * width;
    for (int64_t e = 0; e < width; e += kLanes)
      store(sums + e, fma(load(others + e), Vec(there), load(sums + e) * Vec(here)));
  }
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
