// What kernels that decode MXFP4 to operands of wgmma share: waits between batches of products, where a thread's codes
// are, and scales of its rows. After weight_rows.cuh. Needs of the source: `Call` with scales and words, X_BYTES.

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

// At a barrier of any block of the cluster.
__device__ __forceinline__ void arrive_there_if(int wanted, uint32 bar) {
  asm volatile("{ .reg .pred p;\nsetp.ne.s32 p, %1, 0;\n@p mbarrier.arrive.shared::cluster.b64 _, [%0]; }"
               ::"r"(bar), "r"(wanted) : "memory");
}

__device__ __forceinline__ void pin(uint32 &value) { asm volatile("" : "+r"(value)); }  // is not computed again

// Where a thread's codes are in the first stage, and rows of x as an operand; whether a lane is one of its warp's first
// `blocks`.
struct Place {
  uint32 codes, rows;  // of inputs 0 to 31 of a byte's low half; those of 32 to 63 are at `codes ^ 32`
  int leads;

  __device__ __forceinline__ explicit Place(const Ring &ring, int blocks = 1) {
    int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    // rows of 64 bytes, swizzled by 64 bytes: the 16 bytes of inputs 16 * piece and on are exchanged by row / 2 % 4
    codes = ring.code_tiles + (warp * 16 + matrix % 2 * 8 + row) * 64 + (matrix / 2 * 16 ^ row / 2 * 16);
    pin(codes);
    rows = (uint32)describe_operand(ring.x_tiles), leads = lane < blocks;
  }
  __device__ __forceinline__ uint64 rows_of(int stage) const {  // its upper half is the same everywhere
    return describe_operand(0) >> 32 << 32 | (rows + stage * (X_BYTES / 16));
  }
};

// Scales of this thread's two rows: four lanes have the same rows, and words of every fourth step each.
struct Scales {
  const uint32 *table;
  uint32 from[2];  // in the table, this lane's
  uint32 now[2], next[2];
  int last;  // of this lane

  __device__ __forceinline__ void begin(const Call &call, const int (&own)[2], int steps) {
    int lane = threadIdx.x % 4;
    last = steps - 1 - lane, table = call.scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      from[half] = max(own[half], 0) * call.words + lane;
      now[half] = next[half] = 0;
      if (last >= 0) now[half] = table[from[half]];
      if (last >= 4) next[half] = table[from[half] + 4];
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
      if (step + 5 <= last) next[half] = table[from[half] + step + 5];
    }
  }
};
