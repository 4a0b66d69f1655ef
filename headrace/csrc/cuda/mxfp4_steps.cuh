// What kernels that decode MXFP4 to operands of wgmma share: waits between batches of products, and scales of a thread's
// rows. After hopper.cuh. Needs of the source: `Call` with scales and words.

// As `wait_for` and `arrive`, if `wanted`. Without branches outside of the text: between two batches of products ptxas
// would make all of them wait for each other.
__device__ __forceinline__ void wait_if(int wanted, uint32 bar, uint32 parity) {
  asm volatile("{ .reg .pred done;\nsetp.eq.s32 done, %2, 0;\n@done bra OVER;\n"
               "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\nOVER: }"
               ::"r"(bar), "r"(parity), "r"(wanted) : "memory");
}
__device__ __forceinline__ void arrive_if(int wanted, uint32 bar) {
  asm volatile("{ .reg .pred p;\nsetp.ne.s32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0]; }"
               ::"r"(bar), "r"(wanted) : "memory");
}

__device__ __forceinline__ void pin(uint32 &value) { asm volatile("" : "+r"(value)); }  // is not computed again

// Scales of this thread's two rows: four lanes have the same rows, and words of every fourth step each.
struct Scales {
  const uint32 *tables[2];  // from this lane's on
  uint32 now[2], next[2];
  int last;  // of this lane

  __device__ __forceinline__ void begin(const Call &call, const int (&own)[2], int steps) {
    int lane = threadIdx.x % 4;
    last = steps - 1 - lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tables[half] = call.scales + (uint64)max(own[half], 0) * call.words + lane;
      now[half] = next[half] = 0;
      if (last >= 0) now[half] = tables[half][0];
      if (last >= 4) next[half] = tables[half][4];
    }
  }
  // Those of a step; steps are asked for one after the other.
  __device__ __forceinline__ void get(int step, uint32 (&words)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) words[half] = __shfl_sync(~0u, now[half], step % 4, 4);
  }
  // After the step is asked for.
  __device__ __forceinline__ void advance(int step) {
    if (step % 4 != 3) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      now[half] = next[half];
      if (step + 5 <= last) next[half] = tables[half][step + 5];
    }
  }
};
