// One query token: all query heads of a kv head at once, so that keys and values are read once.
#pragma once

#include "attention_rows.h"

namespace headrace::HEADRACE_ISA {

// Products of `kHeads` queries [*, padded E] with four keys. Rows of keys end where they end: nothing beyond is read.
template <int kHeads, class T>
HEADRACE_INLINE void multiply_keys(const float* q, int64_t q_width, const T* const* keys, int64_t dim, float* logits, int64_t logits_stride) {
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

// Adds the weighted sum of n rows of values to `kHeads` sums [*, padded V], after fading what they hold.
template <int kHeads, int kVecs, class T, class Part>
HEADRACE_INLINE void add_values_at(int64_t e, Part part, const float* weights, int64_t weights_stride, const T* const* values, int64_t n, float* sums, int64_t width, const float* fades) {
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
HEADRACE_INLINE void add_values(const float* weights, int64_t weights_stride, const T* const* values, int64_t n, float* sums, int64_t dim, int64_t width, const float* fades) {
  constexpr int kVecs = kHeads > 2 && kLanes < 16 ? 2 : 4;  // as many sums as there are registers for
  int64_t e = 0;
  for (; e + kVecs * kLanes <= dim; e += kVecs * kLanes) add_values_at<kHeads, kVecs>(e, Whole{}, weights, weights_stride, values, n, sums, width, fades);
  for (; e + kLanes <= dim; e += kLanes) add_values_at<kHeads, 1>(e, Whole{}, weights, weights_stride, values, n, sums, width, fades);
  if (e < dim) add_values_at<kHeads, 1>(e, Rest{static_cast<int>(dim - e)}, weights, weights_stride, values, n, sums, width, fades);
}

inline int64_t decode_scratch(const Attention& a) { return kMostDecodeGroup * (padded(a.head_dim) + kDecodeKeys); }

// f.template operator()<n>(first) for heads in lots of at most three.
template <class F>
HEADRACE_INLINE void over_heads(int64_t num_heads, const F& f) {
  int64_t head = 0;
  for (; num_heads - head >= 3 && num_heads - head != 4; head += 3) f.template operator()<3>(head);
  for (; num_heads - head >= 2; head += 2) f.template operator()<2>(head);
  if (head < num_heads) f.template operator()<1>(head);
}

template <class T>
static void decode_type(const Attention& a, int64_t request, int64_t kv_head, int64_t first, int64_t last, float* partial, float* scratch) {
  const int64_t group = a.group(), q_width = padded(a.head_dim), v_width = padded(a.value_dim);
  float *top = partial, *total = partial + group, *sums = partial + padded(2 * group);
  float *q = scratch, *logits = scratch + kMostDecodeGroup * q_width;
  const char* q_row = static_cast<const char*>(a.q) + (a.query_start[request] * a.q_stride + kv_head * group * a.head_dim) * size_of(a.q_type);
  for (int64_t h = 0; h < group; ++h) {
    widen_values(a.q_type, q_row + h * a.head_dim * size_of(a.q_type), q + h * q_width, a.head_dim, product_scale(a));
    top[h] = -INFINITY, total[h] = 0.0f;
  }
  memset(sums, 0, group * v_width * sizeof(float));
  const int32_t* table = a.table + request * a.table_stride;
  const T *keys[kDecodeKeys], *values[kDecodeKeys];
  for (int64_t at = first; at < last; at += kDecodeKeys) {
    const int64_t n = last - at < kDecodeKeys ? last - at : kDecodeKeys;
    for (int64_t j = 0; j < n; ++j) {
      keys[j] = static_cast<const T*>(row_at(a.k, a.k_strides, a, table, at + j, kv_head));
      values[j] = static_cast<const T*>(row_at(a.v, a.v_strides, a, table, at + j, kv_head));
    }
    for (int64_t j = n; j < padded(n, 4); ++j) keys[j] = keys[n - 1];
    float fades[kMostDecodeGroup];
    over_heads(group, [&]<int kHeads>(int64_t h) {
      for (int64_t j = 0; j < n; j += 4) multiply_keys<kHeads>(q + h * q_width, q_width, keys + j, a.head_dim, logits + h * kDecodeKeys + j, kDecodeKeys);
    });
    for (int64_t h = 0; h < group; ++h) {
      float* row = logits + h * kDecodeKeys;
      if (a.softcap > 0.0f) cap_logits(row, n, a.softcap);
      fades[h] = soften(row, n, padded(n, kLanes), top[h], total[h]);
    }
    over_heads(group, [&]<int kHeads>(int64_t h) {
      add_values<kHeads>(logits + h * kDecodeKeys, kDecodeKeys, values, n, sums + h * v_width, a.value_dim, v_width, fades + h);
    });
  }
}

static void decode(const Attention& a, int64_t request, int64_t kv_head, int64_t first, int64_t last, float* partial, float* scratch) {
  if (a.kv_type == kFloat32) return decode_type<float>(a, request, kv_head, first, last, partial, scratch);
  if (a.kv_type == kBFloat16) return decode_type<bf16>(a, request, kv_head, first, last, partial, scratch);
  decode_type<fp16>(a, request, kv_head, first, last, partial, scratch);
}

static void merge(const Attention& a, float* into, const float* from) {
  const int64_t group = a.group(), width = padded(a.value_dim), start = padded(2 * group);
  for (int64_t h = 0; h < group; ++h) {
    const float top = from[h] > into[h] ? from[h] : into[h];
    const float here = expf(into[h] - top), there = expf(from[h] - top);
    into[h] = top;
    into[group + h] = into[group + h] * here + from[group + h] * there;
    float* sums = into + start + h * width;
    const float* others = from + start + h * width;
    for (int64_t e = 0; e < width; e += kLanes) store(sums + e, fma(load(others + e), Vec(there), load(sums + e) * Vec(here)));
  }
}

static void finish(const Attention& a, int64_t request, int64_t kv_head, float* partial) {
  const int64_t group = a.group(), width = padded(a.value_dim), size = size_of(a.q_type);
  char* out = static_cast<char*>(a.out) + (a.query_start[request] * a.num_heads + kv_head * group) * a.value_dim * size;
  for (int64_t h = 0; h < group; ++h) {
    float total = partial[group + h];
    if (a.sinks) total += expf(a.sinks[kv_head * group + h] - partial[h]);
    narrow_values(a.q_type, partial + padded(2 * group) + h * width, out + h * a.value_dim * size, a.value_dim, 1.0f / total);
  }
}

}  // namespace headrace::HEADRACE_ISA
