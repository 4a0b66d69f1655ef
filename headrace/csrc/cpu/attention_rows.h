// Shared by decode and tiles: addresses of keys in pages, logits, weights, and how chunks are merged.
#pragma once

#include "attention.h"
#include "convert.h"
#include "lanes.h"

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

constexpr int64_t kChunkKeys = 96;   // of a chunk in float32: whole blocks of tiles and of decodes
constexpr float kMasked = -1.0e38f;  // finite: a row whose keys are all masked must not become NaN

// Weights of logits; none of masked ones. NaN stays NaN.
template <bool kMayBeMasked>
HEADRACE_INLINE Vec weigh(Vec logits, Vec top) {
  const Vec weights = exp(logits - top);
  return kMayBeMasked ? by_bits(~at_least(Vec(kMasked), logits), weights, Vec(0.0f)) : weights;
}

// The compiler may not fuse the product of which `a` is the result with a sum: decodes and tiles must round alike.
HEADRACE_INLINE Vec rounded(Vec a) {
#if defined(__x86_64__)
  asm("" : "+v"(a.v));
#elif defined(__aarch64__)
  asm("" : "+w"(a.v));
#endif
  return a;
}

// How a chunk is added to the chunks before it: both sides are multiplied with a factor each.
struct Factors {
  Vec top, here, there;
  HEADRACE_INLINE Factors(Vec into_top, Vec from_top)
      : top(maximum(into_top, from_top)), here(exp(into_top - top)), there(exp(from_top - top)) {}
  static HEADRACE_INLINE Vec add(Vec into, Vec here, Vec from, Vec there) {
    return fma(from, there, rounded(into * here));
  }
};

HEADRACE_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// Whether products are of pairs of bfloat16 or of codes, where processors have such.
HEADRACE_INLINE bool is_narrow(const Attention& a) {
  return a.kv_type == kCodes || (a.kv_type == kBFloat16 && a.q_type != kFloat16);
}

// Weights that are found in 16 bits: of a logit in units of log2 a number near the row's top is taken away and 8 bits
// are kept below the point, which are the exponent and the mantissa of a bfloat16 with a bit more, but for the distance
// of an arc from its chord.
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kFixedOne = 256.0f, kFixedTop = 127 * kFixedOne + 0.5f;  // a factor of two, the weight 1

// That distance, 1 + f - 2^f, which is f (1 - f) (0.344 + 0.073 (f - 1/2)) to 0.0004, in units of 1 / 256: one number
// for four of 8 bits.
template <class T>
struct alignas(64) Arc {
  T heights[64] = {};
  constexpr Arc() {
    for (int i = 0; i < 64; ++i) {
      const double f = (4 * i + 1) / 256.0;
      heights[i] = static_cast<T>(256.0 * f * (1.0 - f) * (0.344 + 0.073 * (f - 0.5)) + 0.5);
    }
  }
};

// n numbers of queries as bfloat16. Where pages are bfloat16 products of pairs take queries so, whatever their type.
inline void halve_queries(const Attention& a, const void* q, bf16* out, int64_t n) {
  if (a.q_type == kBFloat16) memcpy(out, q, n * sizeof(bf16));
  else narrow_values(static_cast<const float*>(q), out, n, Vec(1.0f));
}

HEADRACE_INLINE float product_scale(const Attention& a) { return a.softcap > 0.0f ? a.scale / a.softcap : a.scale; }

}  // namespace headrace::HEADRACE_ISA
