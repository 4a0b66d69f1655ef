// Shared by decode and tiles: addresses of keys in pages, and the online softmax of a row of logits.
#pragma once

#include "attention.h"
#include "convert.h"

namespace headrace::HEADRACE_ISA {

HEADRACE_INLINE const void* row_at(const void* pages, const PageStrides& strides, const Attention& a,
                                   const int32_t* table, int64_t position, int64_t kv_head) {
  const int64_t page = table[position >> a.page_bits], place = position & ((int64_t{1} << a.page_bits) - 1);
  return static_cast<const char*>(pages) +
         (page * strides.page + place * strides.token + kv_head * strides.head) * size_of(a.kv_type);
}

// Prefetch rows of keys and values of positions [at, end), at most n: they are strided, which hardware does not
// predict.
inline void fetch_rows(const Attention& a, const int32_t* table, int64_t at, int64_t n, int64_t end, int64_t kv_head) {
  const int64_t size = size_of(a.kv_type);
  if (a.kv_type == kCodes) return;
  for (int64_t j = 0; j < n && at + j < end; ++j) {
    const char* key = static_cast<const char*>(row_at(a.k, a.k_strides, a, table, at + j, kv_head));
    const char* value = static_cast<const char*>(row_at(a.v, a.v_strides, a, table, at + j, kv_head));
    for (int64_t i = 0; i < a.head_dim * size; i += 64) __builtin_prefetch(key + i, 0, 2);
    for (int64_t i = 0; i < a.value_dim * size; i += 64) __builtin_prefetch(value + i, 0, 2);
  }
}

// Logits from products that hold the scale already (divided by the soft-cap where there is one).
inline void cap_logits(float* logits, int64_t n, float softcap) {
  over_lanes(n, [&](int64_t i, auto part) { part.store(logits + i, Vec(softcap) * tanh(part.load(logits + i))); });
}

// One step of online softmax over n logits, which become weights e^(logit - top); those up to `padded_n`, a whole
// number of vectors, become 0. Returns the factor that rescales the sums so far.
inline float soften(float* logits, int64_t n, int64_t padded_n, float& top, float& total) {
  for (int64_t i = n; i < padded_n; ++i) logits[i] = -INFINITY;
  Vec most(-INFINITY);
  for (int64_t i = 0; i < padded_n; i += kLanes) most = maximum(load(logits + i), most);
  const float old = top, found = largest(most);
  top = found > old ? found : old;
  const Vec shift(top);
  Vec added(0.0f);
  for (int64_t i = 0; i < padded_n; i += kLanes) {
    const Vec weight = exp(load(logits + i) - shift);
    store(logits + i, weight);
    added = added + weight;
  }
  for (int64_t i = n; i < padded_n; ++i) logits[i] = 0.0f;
  const float fade = expf(old - top);
  total = total * fade + sum(added);
  return fade;
}

// n numbers of queries as bfloat16. Where pages are bfloat16 products of pairs take queries so, whatever their type.
inline void halve_queries(const Attention& a, const void* q, bf16* out, int64_t n) {
  if (a.q_type == kBFloat16) memcpy(out, q, n * sizeof(bf16));
  else narrow_values(static_cast<const float*>(q), out, n, Vec(1.0f));
}

HEADRACE_INLINE float product_scale(const Attention& a) { return a.softcap > 0.0f ? a.scale / a.softcap : a.scale; }

}  // namespace headrace::HEADRACE_ISA
