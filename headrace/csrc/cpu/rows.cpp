// compiled for: scalar avx2 avx512
#include "rows.h"

#include "vector.h"

namespace headrace::HEADRACE_ISA {

// RMS norm: Zhang & Sennrich, arXiv:1910.07467.
template <class T, class W>
static void norm_rows(const NormRows& a, int64_t begin, int64_t end) {
  const W* weight = static_cast<const W*>(a.weight);
  const Vec offset(a.offset);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* out = static_cast<T*>(a.out) + row * a.width;
    Vec squares(0.0f);
    if (a.residual) {
      T* residual = static_cast<T*>(a.residual) + row * a.residual_stride;
      over_lanes(a.width, [&](int64_t i, auto part) {
        part.store(residual + i, part.load(residual + i) + part.load(x + i));
        const Vec total = part.load(residual + i);  // rounded: the norm sees what the next layer will
        squares = fma(total, total, squares);
      });
      x = residual;
    } else {
      over_lanes(a.width, [&](int64_t i, auto part) {
        const Vec value = part.load(x + i);
        squares = fma(value, value, squares);
      });
    }
    const Vec scale(1.0f / sqrtf(sum(squares) / static_cast<float>(a.width) + a.eps));
    over_lanes(a.width, [&](int64_t i, auto part) {
      part.store(out + i, part.load(x + i) * scale * (part.load(weight + i) + offset));
    });
  }
}

#if defined(HEADRACE_IS_AVX512)
// The same of bfloat16 alone: 32 numbers as those at even and those at odd places, which takes no instruction that
// moves them across.
static void norm_halves(const NormRows& a, int64_t begin, int64_t end) {
  const bf16* weight = static_cast<const bf16*>(a.weight);
  const Vec offset(a.offset);
  for (int64_t row = begin; row < end; ++row) {
    const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride;
    bf16* const residual = a.residual ? static_cast<bf16*>(a.residual) + row * a.residual_stride : nullptr;
    bf16* const out = static_cast<bf16*>(a.out) + row * a.width;
    Vec even_squares(0.0f), odd_squares(0.0f);
    for (int64_t i = 0; i < a.width; i += 32) {
      const __mmask32 inside = first_halves(a.width - i);
      Halves total(x + i, inside);
      if (residual) {
        const Halves before(residual + i, inside);
        const __m512i sum = Halves(before.even + total.even, before.odd + total.odd).narrow();
        _mm512_mask_storeu_epi16(residual + i, inside, sum);
        total = Halves(sum);  // rounded: the norm sees what the next layer will
      }
      even_squares = fma(total.even, total.even, even_squares), odd_squares = fma(total.odd, total.odd, odd_squares);
    }
    if (residual) x = residual;
    const Vec scale(1.0f / sqrtf(sum(even_squares + odd_squares) / static_cast<float>(a.width) + a.eps));
    for (int64_t i = 0; i < a.width; i += 32) {
      const __mmask32 inside = first_halves(a.width - i);
      const Halves value(x + i, inside), factor(weight + i, inside);
      _mm512_mask_storeu_epi16(
          out + i, inside,
          Halves(value.even * scale * (factor.even + offset), value.odd * scale * (factor.odd + offset)).narrow());
    }
  }
}
#endif

template <class T>
static void norm_of_type(const NormRows& a, int64_t begin, int64_t end) {
  if (a.weight_type == kFloat32) return norm_rows<T, float>(a, begin, end);
  a.weight_type == kBFloat16 ? norm_rows<T, bf16>(a, begin, end) : norm_rows<T, fp16>(a, begin, end);
}

static void norm(int type, const NormRows& a, int64_t begin, int64_t end) {
#if defined(HEADRACE_IS_AVX512)
  if (type == kBFloat16 && a.weight_type == kBFloat16) return norm_halves(a, begin, end);
#endif
  type == kFloat32    ? norm_of_type<float>(a, begin, end)
  : type == kBFloat16 ? norm_of_type<bf16>(a, begin, end)
                      : norm_of_type<fp16>(a, begin, end);
}

template <class T, class F>
static void gate_rows(const GatedRows& a, int64_t begin, int64_t end, const F& activate) {
  const int64_t out_stride = a.out_stride ? a.out_stride : a.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* out = static_cast<T*>(a.out) + row * out_stride;
    over_lanes(a.width, [&](int64_t i, auto part) {
      part.store(out + i, activate(part.load(x + i), part.load(x + a.width + i)));
    });
  }
}

// To about one unit in the last place of T.
template <class T> HEADRACE_INLINE Vec sigmoid_of_type(Vec x) { return sigmoid_coarse(x); }
template <> HEADRACE_INLINE Vec sigmoid_of_type<float>(Vec x) { return sigmoid(x); }

template <class T>
static void gate_of_type(const GatedRows& a, int64_t begin, int64_t end) {
  if (a.activation == kSilu)
    return gate_rows<T>(a, begin, end, [](Vec x, Vec up) { return x * sigmoid_of_type<T>(x) * up; });
  if (a.activation == kGeluTanh)
    return gate_rows<T>(a, begin, end, [](Vec x, Vec up) { return x * sigmoid_of_type<T>(gelu_argument(x)) * up; });
  const Vec most(a.clamp.limit), least(-a.clamp.limit), alpha(a.clamp.alpha), offset(a.clamp.up_offset);
  gate_rows<T>(a, begin, end, [&](Vec x, Vec up) {
    x = minimum(most, x);
    return x * sigmoid(x * alpha) * (maximum(least, minimum(most, up)) + offset);
  });
}

static void gate(int type, const GatedRows& a, int64_t begin, int64_t end) {
  type == kFloat32    ? gate_of_type<float>(a, begin, end)
  : type == kBFloat16 ? gate_of_type<bf16>(a, begin, end)
                      : gate_of_type<fp16>(a, begin, end);
}

template <class T>
static void weigh_rows(const WeighedRows& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int32_t* places = a.places + row * a.count;
    const float* weights = a.weights + row * a.count;
    T* out = static_cast<T*>(a.out) + row * a.width;
    over_lanes(a.width, [&](int64_t i, auto part) {
      Vec total(0.0f);
      for (int64_t c = 0; c < a.count; ++c)
        if (places[c] >= 0) total = fma(Vec(weights[c]), part.load(a.x + places[c] * a.width + i), total);
      part.store(out + i, total);
    });
  }
}

static void weigh(int type, const WeighedRows& a, int64_t begin, int64_t end) {
  type == kFloat32    ? weigh_rows<float>(a, begin, end)
  : type == kBFloat16 ? weigh_rows<bf16>(a, begin, end)
                      : weigh_rows<fp16>(a, begin, end);
}

extern const RowKernels row_kernels;
const RowKernels row_kernels = {norm, gate, weigh};

}  // namespace headrace::HEADRACE_ISA
