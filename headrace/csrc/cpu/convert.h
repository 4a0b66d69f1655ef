// Values of a float type known at run time, to and from float32.
#pragma once

#include "vector.h"

namespace headrace::HEADRACE_ISA {

HEADRACE_INLINE int64_t size_of(int type) { return type == kFloat32 ? 4 : type == kCodes ? 1 : 2; }

// `out` has room for whole vectors; what lies beyond n in the last one becomes zero.
template <class T>
HEADRACE_INLINE void widen_values(const T* x, float* out, int64_t n, Vec factor) {
  over_lanes(n, [&](int64_t i, auto part) { store(out + i, part.load(x + i) * factor); });
}
inline void widen_values(int type, const void* x, float* out, int64_t n, float factor = 1.0f) {
  if (type == kFloat32) return widen_values(static_cast<const float*>(x), out, n, Vec(factor));
  if (type == kBFloat16) return widen_values(static_cast<const bf16*>(x), out, n, Vec(factor));
  widen_values(static_cast<const fp16*>(x), out, n, Vec(factor));
}

template <class T>
HEADRACE_INLINE void narrow_values(const float* x, T* out, int64_t n, Vec factor) {
  over_lanes(n, [&](int64_t i, auto part) { part.store(out + i, part.load(x + i) * factor); });
}
inline void narrow_values(int type, const float* x, void* out, int64_t n, float factor = 1.0f) {
  if (type == kFloat32) return narrow_values(x, static_cast<float*>(out), n, Vec(factor));
  if (type == kBFloat16) return narrow_values(x, static_cast<bf16*>(out), n, Vec(factor));
  narrow_values(x, static_cast<fp16*>(out), n, Vec(factor));
}

}  // namespace headrace::HEADRACE_ISA
