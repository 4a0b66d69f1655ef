// KV cache in 8 bits: codes from -127 to 127 with a float32 scale per token and kv head. E dims of a key, a multiple of
// 4, V of a value. A page is stored in the order in which byte products read it: lots of L = min(16, page size) tokens;
//   keys   [lots, K, E / 4, L, 4]
//   values [lots, K, L / F, V, F], F = min(4, L)
//   scales [2, K, page], keys first.
// So a lot of keys is an AMX tile, and a vector holds what one 32-bit word of a query is multiplied with.
#pragma once

#include "convert.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kMostLot = 16;
constexpr float kMostCode = 127.0f, kLeastCoded = 1.0e-30f;  // rows without anything larger get code 0

// Of pages with `page_size` tokens, a power of two.
struct CodeOrder {
  int64_t lot, quad;
  explicit CodeOrder(int64_t page_size) : lot(page_size < kMostLot ? page_size : kMostLot), quad(lot < 4 ? lot : 4) {}
};

// 1 / scale.
HEADRACE_INLINE float coding(float most) { return most > kLeastCoded ? kMostCode / most : 0.0f; }

// A vector of whole numbers of at most 8 bits, to bytes.
HEADRACE_INLINE void store_bytes(int8_t* p, Vec a) {
#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
#elif defined(HEADRACE_IS_AVX2)
  const __m256i words = _mm256_cvtps_epi32(a.v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
#else
  const Vec whole = round(a);
  for (int i = 0; i < kLanes; ++i) p[i] = whole.v[i] == whole.v[i] ? static_cast<int8_t>(whole.v[i]) : 0;
#endif
}

// Quantises n numbers, in room for whole vectors; returns their scale, NaN if one of them is NaN.
inline float encode(const float* x, int64_t n, int8_t* codes) {
  Vec most(0.0f), odd(0.0f);
  over_lanes(n, [&](int64_t i, auto part) {
    const Vec value = part.load(x + i);
    most = maximum(most, maximum(value, Vec(0.0f) - value));
    odd = fma(value, Vec(0.0f), odd);
  });
  const float top = largest(most);
  const Vec factor(coding(top));
  over_lanes(n, [&](int64_t i, auto part) { store_bytes(codes + i, part.load(x + i) * factor); });
  return top / kMostCode + sum(odd);
}

// Where a token's code lies in its lot, in steps of a word (keys) or a value.
inline void place_key(const int8_t* codes, int64_t dim, int64_t lot, int64_t token, int8_t* out) {
  for (int64_t e = 0; e < dim; e += 4) memcpy(out + e * lot + 4 * token, codes + e, 4);
}
inline void place_value(const int8_t* codes, int64_t dim, const CodeOrder& order, int64_t token, int8_t* out) {
  out += token / order.quad * order.quad * dim + token % order.quad;
  for (int64_t e = 0; e < dim; ++e) out[e * order.quad] = codes[e];
}

}  // namespace headrace::HEADRACE_ISA
