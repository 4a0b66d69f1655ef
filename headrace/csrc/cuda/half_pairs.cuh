// Pairs of half-precision numbers, bfloat16 or (FP16 defined) float16, and activations of them. After numbers.cuh.

#ifdef FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 both;
  asm("cvt.rn." TYPE "x2.f32 %0, %2, %1;" : "=r"(both) : "f"(low), "f"(high));
  return both;
}

__device__ __forceinline__ void round_both(float &low, float &high) {
  const uint32 both = pack(low, high);
#ifdef FP16
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(low), "=f"(high)
      : "r"(both));
#else
  low = __uint_as_float(both << 16);
  high = __uint_as_float(both & 0xFFFF0000u);
#endif
}

// silu or gelu_tanh of gate, times up
template <bool IS_GELU>
__device__ __forceinline__ float activate(float gate, float up) {
  float steep = gate;
  if (IS_GELU)  // (1 + tanh(u)) / 2 is sigmoid(2 u)
    steep = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate * invert(1.0f + exp2_fast(-1.4426950408889634f * steep)) * up;
}
