// Types, bfloat16, fast powers and reciprocals, and activations, as kernels share them.

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

__device__ __forceinline__ float widen(uint32 half) { return __uint_as_float(half << 16); }
__device__ __forceinline__ float widen_high(uint32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ uint32 narrow(float low, float high) {
  uint32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ uint16 narrow(float v) {
  uint16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(v));
  return out;
}
__device__ __forceinline__ float rounded(float v) { return widen(narrow(v, 0.f) & 0xffff); }
__device__ __forceinline__ float half_of(uint32 word, bool high) {  // one of two float16
  float out;
  uint16 bits = uint16(high ? word >> 16 : word & 0xffff);
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}

__device__ __forceinline__ float exp2_fast(float v) {  // 2**v
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}
__device__ __forceinline__ float invert(float v) {  // 1 / v
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}

// d [16, 8] += a [16, 16] b [8, 16]^T in bfloat16
__device__ __forceinline__ void multiply(float *d, uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Activations of gate and up, rounded as if stored: 1 silu, 2 gelu_tanh.
__device__ __forceinline__ float gated(int kind, float gate, float up) {
  gate = rounded(gate), up = rounded(up);
  if (kind == 1) return gate / (1.f + __expf(-gate)) * up;
  float u = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate * (1.f - 1.f / (__expf(2.f * u) + 1.f)) * up;
}
// 3: clamped, unrounded; its numbers are the call's.
template <class Call>
__device__ __forceinline__ float gated_by(const Call &call, int kind, float gate, float up) {
  if (kind != 3) return gated(kind, gate, up);
  gate = fminf(gate, call.limit);
  return gate / (1.f + __expf(-call.alpha * gate)) * (fminf(fmaxf(up, -call.limit), call.limit) + call.up_offset);
}
