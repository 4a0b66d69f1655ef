// Products whose left operand is the weight, so that a thread's sums are of neighbouring rows of x: a persistent block
// with a warp that copies and GROUPS warpgroups of 64 rows of the weight each. After sorted_experts.cuh. Needs of the
// source: macros ROWS, GROUPS, STAGES; DEPTH, OUTPUTS, X_BYTES, CODE_BYTES, STAGE_BYTES; `Call` with bias, out, inputs.

// Store the sums of a warp's 16 rows of the weight: numbers[j] are, of 8 outputs from `column` on, those of output
// lane / 4 and rows 8 * j + lane % 4 * 2 (low half) and one more (high half) of the tile.
__device__ __forceinline__ void store(
    const Call &call, const uint32 (&numbers)[ROWS / 8], const Tile &tile, int column
) {
  int lane = threadIdx.x % 32;
  constexpr int AT_ONCE = ROWS % 32 ? 2 : 4;
#pragma unroll
  for (int j = 0; j < ROWS / 8; j += AT_ONCE) {
    uint32 words[4] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) words[i] = turn(numbers[j + i]);
    transpose(words);  // the lane now has 8 outputs of row 8 * (j + lane % 4) + lane / 4
    int m = tile.first + 8 * (j + lane % 4) + lane / 4;
    if (lane % 4 < AT_ONCE && m < tile.last && column < call.outputs)
      *(uint4 *)(call.out + (uint64)m * call.outputs + column) = uint4{words[0], words[1], words[2], words[3]};
  }
}

// Bias, activation, and storing. A thread has sums[4 * j + 2 * half + i]: row lane / 4 + 8 * half of its warp's 16 rows
// of the weight, and row 8 * j + lane % 4 * 2 + i of x.
__device__ __forceinline__ void finish(
    const Call &call, float (&sums)[ROWS / 2], const Tile &tile, const int (&own)[2], int warp
) {
  float bias[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) bias[half] = call.bias && own[half] >= 0 ? widen(call.bias[own[half]]) : 0.0f;
  uint32 numbers[ROWS / 8];
#if GATE
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j) {
    float out[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      out[i] = apply_gate(call, sums[4 * j + i] + bias[0], sums[4 * j + 2 + i] + bias[1]);
    numbers[j] = narrow(out[0], out[1]);
  }
  store(call, numbers, tile, tile.output + warp * 8);
#else
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
      numbers[j] = narrow(sums[4 * j + 2 * half] + bias[half], sums[4 * j + 2 * half + 1] + bias[half]);
    store(call, numbers, tile, tile.output + warp * 16 + half * 8);
  }
#endif
}

struct Ring {  // of stages in shared memory: a step's rows of x and rows of the weight, and their barriers
  uint32 x_tiles, code_tiles, bars;  // bars of each stage: full, then empty
  int stage;
  uint32 phase;

  // of `blocks` that multiply what one of them copies
  __device__ __forceinline__ explicit Ring(const void *storage, int blocks = 1) : stage(0), phase(0) {
    // tiles swizzled by 128 bytes begin at multiples of 1,024
    x_tiles = (shared_address(storage) + 1023) & ~1023u, code_tiles = x_tiles + STAGES * X_BYTES;
    bars = code_tiles + STAGES * CODE_BYTES;
    if (threadIdx.x == 0) {
      for (int nth = 0; nth < STAGES; ++nth) {
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

// The warp that copies: the stages of all tiles of this block. A step has CODES columns of the weight's map, and
// X_BOXES boxes of rows of x.
template <int CODES, int X_BOXES>
__device__ __forceinline__ void fetch_tiles(
    const Call &call, const TensorMap *x_map, const TensorMap *code_map, Ring &ring
) {
  int steps = (call.inputs + DEPTH - 1) / DEPTH;
  Tile tile;
  for (int index = blockIdx.x; find_tile<ROWS, OUTPUTS>(call, index, tile); index += gridDim.x) {
    int row = tile.expert * (GATE ? 2 : 1) * call.outputs + tile.output;
    for (int step = 0; step < steps; ++step) {
      if (threadIdx.x == 0) {
        uint32 full = ring.bars + 16 * ring.stage, to = ring.x_tiles + ring.stage * X_BYTES;
        uint32 codes = ring.code_tiles + ring.stage * CODE_BYTES;
        wait_for(full + 8, ring.phase ^ 1);
        expect_bytes(full, STAGE_BYTES);
        if (GATE)
          load_gated_box(codes, code_map, full, step * CODES, row);
        else
          load_box(codes, code_map, full, step * CODES, row);
#pragma unroll
        for (int box = 0; box < X_BOXES; ++box)
          load_box(to + box * (X_BYTES / X_BOXES), x_map, full, step * DEPTH + box * (DEPTH / X_BOXES), tile.first);
      }
      ring.advance();
    }
    __syncwarp();
  }
}

// The warps that multiply: sums of each tile of this block by `add_up`, which takes the rows of the weight `own` of
// this thread, -1 beyond the expert's, and the first of them in the tile.
template <class AddUp>
__device__ __forceinline__ void multiply_tiles(const Call &call, AddUp add_up) {
  int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
  float sums[ROWS / 2];
  Tile tile;
  for (int index = blockIdx.x; find_tile<ROWS, OUTPUTS>(call, index, tile); index += gridDim.x) {
    int own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int output = tile.output + (GATE ? warp * 8 + lane / 4 : row + 8 * half);
      int matrix = tile.expert * (GATE ? 2 : 1) + (GATE ? half : 0);
      own[half] = output < call.outputs ? matrix * call.outputs + output : -1;
    }
    add_up(sums, tile, own, row);
    finish(call, sums, tile, own, warp);
  }
}
