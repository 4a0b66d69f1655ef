// Lane masks as bits: select, compare, NaN tests.
#pragma once

#include "vector.h"

namespace headrace::HEADRACE_ISA {

#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
// `a` where the lane's bit is set, counted from the least significant, else `b`.
HEADRACE_INLINE Vec by_bits(uint32_t bits, Vec a, Vec b) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), b.v, a.v);
}
HEADRACE_INLINE uint32_t at_least(Vec a, Vec b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
}  // a bit a lane; not for NaN
HEADRACE_INLINE uint32_t not_numbers(Vec a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
#elif defined(HEADRACE_IS_AVX2)
HEADRACE_INLINE Vec by_bits(uint32_t bits, Vec a, Vec b) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lanes), lanes);
  return _mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(chosen));
}
HEADRACE_INLINE uint32_t at_least(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)));
}
HEADRACE_INLINE uint32_t not_numbers(Vec a) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)));
}
#else
HEADRACE_INLINE Vec by_bits(uint32_t bits, Vec a, Vec b) {
  for (int i = 0; i < kLanes; ++i)
    if (!(bits >> i & 1)) a.v[i] = b.v[i];
  return a;
}
HEADRACE_INLINE uint32_t at_least(Vec a, Vec b) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
  return bits;
}
HEADRACE_INLINE uint32_t not_numbers(Vec a) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(a.v[i] != a.v[i]) << i;
  return bits;
}
#endif

}  // namespace headrace::HEADRACE_ISA
