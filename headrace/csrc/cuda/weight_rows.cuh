// Products whose left operand is the weight, so that a thread's sums are of neighbouring rows of x: the ring of a block
// with a warp that copies and GROUPS warpgroups of 64 rows of the weight each, and how sums are stored. After
// sorted_experts.cuh. Needs of the source: macros ROWS, GROUPS, STAGES; X_BYTES, CODE_BYTES; `Call` with bias, out.

// If `wanted`. Without branches, behind which ptxas would take what is the same for a warp for different numbers, also
// addresses of operands in loops long before.
__device__ __forceinline__ void store_if(int wanted, uint16 *to, const uint32 (&words)[4]) {
  asm volatile("{ .reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4}; }"
               ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(wanted) : "memory");
}
__device__ __forceinline__ void store_if(int wanted, uint16 *to, uint32 first, uint32 second) {
  asm volatile("{ .reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p st.global.v2.b32 [%0], {%1, %2}; }"
               ::"l"(to), "r"(first), "r"(second), "r"(wanted) : "memory");
}

// Store the sums of a warp's 16 rows of the weight: numbers[j] are, of 8 outputs from `column` on, those of output
// lane / 4 and rows 8 * j + lane % 4 * 2 (low half) and one more (high half) of the tile. EVENS_FIRST: of each 16
// outputs the even ones come first; their number is then a multiple of 16. Outputs from `end` on are not there.
template <bool EVENS_FIRST, int EIGHTS>
__device__ __forceinline__ void store(
    const Call &call, const uint32 (&numbers)[EIGHTS], const Tile &tile, int column, int end
) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < EIGHTS; j += 4) {
    int there = EIGHTS - j < 4 ? EIGHTS - j : 4;
    uint32 words[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (j + i < EIGHTS) words[i] = turn(numbers[j + i]);
    transpose(words);  // the lane now has 8 outputs of row 8 * (j + lane % 4) + lane / 4
    int m = tile.first + 8 * (j + lane % 4) + lane / 4;
    const int wanted = lane % 4 < there && m < tile.last && column < end;
    uint16 *to = call.out + (uint64)m * call.outputs;
    if (EVENS_FIRST) {
      to += column / 16 * 16 + column % 16 / 2;
      store_if(wanted, to, __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410));
      store_if(wanted, to + 8, __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
    } else {
      store_if(wanted, to + column, words);
    }
  }
}

// Bias, activation, and storing. A thread has sums[4 * j + 2 * half + i]: row lane / 4 + 8 * half of its warp's 16 rows
// of the weight, and row 8 * j + lane % 4 * 2 + i of x. EVENS_FIRST, for outputs of an activation, and `end`: see `store`.
template <bool EVENS_FIRST, int SUMS>
__device__ __forceinline__ void finish(
    const Call &call, float (&sums)[SUMS], const Tile &tile, const int (&own)[2], int warp, int end
) {
  float bias[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) bias[half] = call.bias && own[half] >= 0 ? widen(call.bias[own[half]]) : 0.0f;
  uint32 numbers[SUMS / 4];
#if GATE
#pragma unroll
  for (int j = 0; j < SUMS / 4; ++j) {
    float out[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      out[i] = apply_gate(call, sums[4 * j + i] + bias[0], sums[4 * j + 2 + i] + bias[1]);
    numbers[j] = narrow(out[0], out[1]);
  }
  store<EVENS_FIRST>(call, numbers, tile, tile.output + warp * 8, end);
#else
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j)
      numbers[j] = narrow(sums[4 * j + 2 * half] + bias[half], sums[4 * j + 2 * half + 1] + bias[half]);
    store<false>(call, numbers, tile, tile.output + warp * 16 + half * 8, end);
  }
#endif
}

struct Ring {  // of stages in shared memory: a step's rows of x and rows of the weight, and their barriers
  uint32 x_tiles, code_tiles, bars;  // bars of each stage: full, then empty
  int stage;
  uint32 phase;

  // of `blocks` that multiply what one of them copies; so many bytes for rows of the weight; of `parts` of each stage
  __device__ __forceinline__ explicit Ring(
      const void *storage, int blocks = 1, uint32 code_room = STAGES * CODE_BYTES, int parts = 1
  ) : stage(0), phase(0) {
    // tiles swizzled by 128 bytes begin at multiples of 1,024
    x_tiles = (shared_address(storage) + 1023) & ~1023u, code_tiles = x_tiles + STAGES * X_BYTES;
    bars = code_tiles + code_room;
    if (threadIdx.x == 0) {
      for (int nth = 0; nth < STAGES * parts; ++nth) {
        init_barrier(bars + 16 * nth, 1);
        init_barrier(bars + 16 * nth + 8, 4 * GROUPS * blocks);  // warps that multiply
      }
      asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
  }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};
