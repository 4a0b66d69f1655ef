// Vectors of floats, one class for all instruction sets: `Vec` holds kLanes float32, loads and stores any float type,
// and rounds to nearest even. Included by kernels; everything is in the namespace of the instruction set, so that
// objects compiled with different flags share no function (the linker would keep one of them for all).
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "types.h"

#if defined(HEADRACE_IS_AVX2) || defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
#include <immintrin.h>
#endif

#define HEADRACE_INLINE inline __attribute__((always_inline))

namespace headrace::HEADRACE_ISA {

HEADRACE_INLINE float to_float(float x) { return x; }
HEADRACE_INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

template <class T> HEADRACE_INLINE T from_float(float x);
template <> HEADRACE_INLINE float from_float<float>(float x) { return x; }
template <> HEADRACE_INLINE bf16 from_float<bf16>(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{0x7fc0};
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

#if defined(HEADRACE_IS_SCALAR)
HEADRACE_INLINE float to_float(fp16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  uint32_t bits;
  float out;
  if (magnitude >= 0x7c00u) {
    bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
  } else {  // the exponent is shifted by a product, which also makes subnormal numbers normal
    bits = magnitude << 13;
    memcpy(&out, &bits, 4);
    out *= 0x1p112f;
    memcpy(&bits, &out, 4);
    bits |= sign;
  }
  memcpy(&out, &bits, 4);
  return out;
}
template <> HEADRACE_INLINE fp16 from_float<fp16>(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return fp16{static_cast<uint16_t>(sign | 0x7e00u)};
  if (bits >= 0x477ff000u) return fp16{static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and more
  if (bits < 0x38800000u) {  // subnormal: let a float addition round at the right place
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return fp16{static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  return fp16{static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + (bits >> 13 & 1)) >> 13))};
}
#else
HEADRACE_INLINE float to_float(fp16 x) { return _cvtsh_ss(x.bits); }
template <> HEADRACE_INLINE fp16 from_float<fp16>(float x) { return fp16{static_cast<uint16_t>(_cvtss_sh(x, 0))}; }
#endif

#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
constexpr int kLanes = 16;

struct Vec {
  __m512 v;
  HEADRACE_INLINE Vec() {}
  HEADRACE_INLINE Vec(__m512 x) : v(x) {}
  HEADRACE_INLINE explicit Vec(float x) : v(_mm512_set1_ps(x)) {}
};
HEADRACE_INLINE Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.v, b.v); }
HEADRACE_INLINE Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.v, b.v); }
HEADRACE_INLINE Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.v, b.v); }
HEADRACE_INLINE Vec operator/(Vec a, Vec b) { return _mm512_div_ps(a.v, b.v); }
HEADRACE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
// Of maximum and minimum, b where either is NaN.
HEADRACE_INLINE Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
HEADRACE_INLINE Vec minimum(Vec a, Vec b) { return _mm512_min_ps(a.v, b.v); }
HEADRACE_INLINE float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
HEADRACE_INLINE float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
HEADRACE_INLINE Vec round(Vec a) { return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HEADRACE_INLINE Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a.v, n.v); }  // a * 2^n, n whole

HEADRACE_INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
HEADRACE_INLINE Vec widen(__m256i bits, bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
HEADRACE_INLINE Vec widen(__m256i bits, fp16) { return _mm512_cvtph_ps(bits); }
HEADRACE_INLINE __m256i narrow(Vec a, bf16) { return (__m256i)_mm512_cvtneps_pbh(a.v); }
HEADRACE_INLINE __m256i narrow(Vec a, fp16) {
  return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

HEADRACE_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
HEADRACE_INLINE Vec load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
template <class T>
HEADRACE_INLINE Vec load(const T* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
}
template <class T>
HEADRACE_INLINE Vec load(const T* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first(n), p), T{});
}
HEADRACE_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
HEADRACE_INLINE void store(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
template <class T>
HEADRACE_INLINE void store(T* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a, T{}));
}
template <class T>
HEADRACE_INLINE void store(T* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first(n), narrow(a, T{}));
}

// 32 numbers in bfloat16, as those at even and those at odd places.
struct Halves {
  Vec even, odd;
  HEADRACE_INLINE Halves(Vec at_even, Vec at_odd) : even(at_even), odd(at_odd) {}
  HEADRACE_INLINE explicit Halves(__m512i bits)
      : even(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))),
        odd(_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))))) {}
  HEADRACE_INLINE Halves(const bf16* p, __mmask32 inside) : Halves(_mm512_maskz_loadu_epi16(inside, p)) {}
  // Rounded to nearest, in their order.
  HEADRACE_INLINE __m512i narrow() const {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v));
  }
};
HEADRACE_INLINE __mmask32 first_halves(int64_t n) { return n >= 32 ? ~0u : n > 0 ? (1u << n) - 1 : 0; }

#elif defined(HEADRACE_IS_AVX2)
constexpr int kLanes = 8;

struct Vec {
  __m256 v;
  HEADRACE_INLINE Vec() {}
  HEADRACE_INLINE Vec(__m256 x) : v(x) {}
  HEADRACE_INLINE explicit Vec(float x) : v(_mm256_set1_ps(x)) {}
};
HEADRACE_INLINE Vec operator+(Vec a, Vec b) { return _mm256_add_ps(a.v, b.v); }
HEADRACE_INLINE Vec operator-(Vec a, Vec b) { return _mm256_sub_ps(a.v, b.v); }
HEADRACE_INLINE Vec operator*(Vec a, Vec b) { return _mm256_mul_ps(a.v, b.v); }
HEADRACE_INLINE Vec operator/(Vec a, Vec b) { return _mm256_div_ps(a.v, b.v); }
HEADRACE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
HEADRACE_INLINE Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a.v, b.v); }
HEADRACE_INLINE Vec minimum(Vec a, Vec b) { return _mm256_min_ps(a.v, b.v); }
HEADRACE_INLINE float sum(Vec a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
HEADRACE_INLINE float largest(Vec a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
HEADRACE_INLINE Vec round(Vec a) { return _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HEADRACE_INLINE Vec scale_by_power(Vec a, Vec n) {  // a * 2^n for whole n that leave the result normal
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(a.v), _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23)));
}

HEADRACE_INLINE Vec widen(__m128i bits, bf16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
HEADRACE_INLINE Vec widen(__m128i bits, fp16) { return _mm256_cvtph_ps(bits); }
HEADRACE_INLINE __m128i narrow(Vec a, bf16) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0),
                               _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  return _mm256_castsi256_si128(packed);
}
HEADRACE_INLINE __m128i narrow(Vec a, fp16) {
  return _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

HEADRACE_INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
HEADRACE_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
HEADRACE_INLINE Vec load(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
template <class T>
HEADRACE_INLINE Vec load(const T* p) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{});
}
template <class T> HEADRACE_INLINE Vec load(const T* p, int n) {
  T room[8] = {};
  for (int i = 0; i < n; ++i) room[i] = p[i];
  return load(room);
}
HEADRACE_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
HEADRACE_INLINE void store(float* p, Vec a, int n) { _mm256_maskstore_ps(p, first(n), a.v); }
template <class T>
HEADRACE_INLINE void store(T* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a, T{}));
}
template <class T> HEADRACE_INLINE void store(T* p, Vec a, int n) {
  T room[8];
  store(room, a);
  for (int i = 0; i < n; ++i) p[i] = room[i];
}

#else  // plain C++ on four floats, which every compiler knows how to add
constexpr int kLanes = 4;

typedef float Four __attribute__((vector_size(16)));

struct Vec {
  Four v;
  HEADRACE_INLINE Vec() {}
  HEADRACE_INLINE Vec(Four x) : v(x) {}
  HEADRACE_INLINE explicit Vec(float x) : v{x, x, x, x} {}
};
HEADRACE_INLINE Vec operator+(Vec a, Vec b) { return a.v + b.v; }
HEADRACE_INLINE Vec operator-(Vec a, Vec b) { return a.v - b.v; }
HEADRACE_INLINE Vec operator*(Vec a, Vec b) { return a.v * b.v; }
HEADRACE_INLINE Vec operator/(Vec a, Vec b) { return a.v / b.v; }
HEADRACE_INLINE Vec fma(Vec a, Vec b, Vec c) { return a.v * b.v + c.v; }
HEADRACE_INLINE Vec maximum(Vec a, Vec b) { return a.v > b.v ? a.v : b.v; }
HEADRACE_INLINE Vec minimum(Vec a, Vec b) { return a.v < b.v ? a.v : b.v; }
HEADRACE_INLINE Vec round(Vec a) { return (a.v + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23; for |a| < 2^22
HEADRACE_INLINE float sum(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
HEADRACE_INLINE float largest(Vec a) {
  const float low = a.v[0] > a.v[2] ? a.v[0] : a.v[2], high = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
  return low > high ? low : high;
}
HEADRACE_INLINE Vec scale_by_power(Vec a, Vec n) {
  Vec out;
  for (int i = 0; i < 4; ++i) {
    int32_t bits;
    memcpy(&bits, &a.v[i], 4);
    bits += static_cast<int32_t>(n.v[i]) * (1 << 23);
    memcpy(&out.v[i], &bits, 4);
  }
  return out;
}
template <class T> HEADRACE_INLINE Vec load(const T* p) {
  Vec out;
  for (int i = 0; i < 4; ++i) out.v[i] = to_float(p[i]);
  return out;
}
template <class T> HEADRACE_INLINE Vec load(const T* p, int n) {
  Vec out(0.0f);
  for (int i = 0; i < n; ++i) out.v[i] = to_float(p[i]);
  return out;
}
template <class T> HEADRACE_INLINE void store(T* p, Vec a) {
  for (int i = 0; i < 4; ++i) p[i] = from_float<T>(a.v[i]);
}
template <class T> HEADRACE_INLINE void store(T* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = from_float<T>(a.v[i]);
}
#endif

// The sums of four vectors, to four floats.
HEADRACE_INLINE void store_sums(float* out, const Vec (&a)[4]) {
#if defined(HEADRACE_IS_AVX2)
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a[0].v, a[1].v), _mm256_hadd_ps(a[2].v, a[3].v));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#elif !defined(HEADRACE_IS_SCALAR)
  __m256 half[4];
  for (int i = 0; i < 4; ++i)
    half[i] = _mm256_add_ps(_mm512_castps512_ps256(a[i].v), _mm512_extractf32x8_ps(a[i].v, 1));
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(a[i]);
#endif
}

// A whole vector, or the first `n` lanes of one, as over_lanes passes them on.
struct Whole {
  template <class T> HEADRACE_INLINE Vec load(const T* p) const { return HEADRACE_ISA::load(p); }
  template <class T> HEADRACE_INLINE void store(T* p, Vec a) const { HEADRACE_ISA::store(p, a); }
};
struct Rest {
  int n;
  template <class T> HEADRACE_INLINE Vec load(const T* p) const { return HEADRACE_ISA::load(p, n); }
  template <class T> HEADRACE_INLINE void store(T* p, Vec a) const { HEADRACE_ISA::store(p, a, n); }
};

// f(at, part) over [0, size): whole vectors first, then the rest, whose other lanes load as zero.
template <class F>
HEADRACE_INLINE void over_lanes(int64_t size, const F& f) {
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) f(at, Whole{});
  if (at < size) f(at, Rest{static_cast<int>(size - at)});
}

// e^x to about one unit in the last place; below -87 it stays at e^-87, above 88 at e^88. NaN stays NaN. The
// coefficients are those of the Cephes library's expf (Moshier), as is the splitting of ln 2.
HEADRACE_INLINE Vec exp(Vec x) {
  x = maximum(Vec(-87.0f), minimum(Vec(88.0f), x));  // of a NaN, the second operand
  const Vec n = round(x * Vec(1.44269504088896341f));
  const Vec r = fma(n, Vec(2.12194440e-4f), fma(n, Vec(-0.693359375f), x));
  Vec p = Vec(1.9875691500e-4f);
  p = fma(p, r, Vec(1.3981999507e-3f));
  p = fma(p, r, Vec(8.3334519073e-3f));
  p = fma(p, r, Vec(4.1665795894e-2f));
  p = fma(p, r, Vec(1.6666665459e-1f));
  p = fma(p, r, Vec(5.0000001201e-1f));
  return scale_by_power(fma(p, r * r, r + Vec(1.0f)), n);
}

// e^x to about 4e-6, 2^-126 below: a Chebyshev fit of 2^x of degree 4 on [-1/2, 1/2], or on [0, 1] where processors
// take the whole part away themselves. Above 87 it ends at 2^126, or in infinity.
HEADRACE_INLINE Vec exp_coarse(Vec x) {
#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
  const Vec power = maximum(Vec(-126.0f), x * Vec(1.44269504088896341f)),
            r = _mm512_reduce_ps(power.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p = fma(r, Vec(0.013534151949f), Vec(0.05201149359f));
  p = fma(p, r, Vec(0.2414427399f));
  p = fma(p, r, Vec(0.6930038333f));
  return _mm512_scalef_ps(fma(p, r, Vec(1.0000026226f)).v, power.v);
#else
  x = maximum(Vec(-126.0f), minimum(Vec(126.0f), x * Vec(1.44269504088896341f)));
  const Vec n = round(x), r = x - n;
  Vec p = fma(r, Vec(0.009666368515f), Vec(0.05592197584f));
  p = fma(p, r, Vec(0.2402234904f));
  p = fma(p, r, Vec(0.6931210452f));
  return scale_by_power(fma(p, r, Vec(1.0f)), n);
#endif
}

// To about 6e-5.
HEADRACE_INLINE Vec sigmoid_coarse(Vec x) {
  const Vec over = Vec(1.0f) + exp_coarse(Vec(0.0f) - x);
#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
  return _mm512_rcp14_ps(over.v);
#else
  return Vec(1.0f) / over;
#endif
}

HEADRACE_INLINE Vec sigmoid(Vec x) { return Vec(1.0f) / (Vec(1.0f) + exp(Vec(0.0f) - x)); }

// Hendrycks & Gimpel, arXiv:1606.08415: x / 2 * (1 + tanh(z)) = x * sigmoid(2z), z = sqrt(2 / pi) (x + 0.044715 x^3)
HEADRACE_INLINE Vec gelu_argument(Vec x) { return Vec(1.5957691216057308f) * fma(Vec(0.044715f) * x * x, x, x); }

HEADRACE_INLINE Vec tanh(Vec x) { return Vec(2.0f) * sigmoid(x + x) - Vec(1.0f); }

}  // namespace headrace::HEADRACE_ISA
