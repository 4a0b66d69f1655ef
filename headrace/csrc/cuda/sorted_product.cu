// Products of rows and experts in bfloat16 on Hopper, for many rows an expert: rows x [M, K], sorted by expert, times
// that expert's weight [N, K]. With a gate, the activation of its two halves. Sums are float32 in a fixed order, the
// same whatever the rows beside a row.
//
// The weight is the left operand of wgmma and rows of x are its columns: so a tile has as many as there are, in steps of
// GRAIN, and an expert's rows are divided evenly among as few tiles of at most ROWS as hold them.
//
// Two blocks with neighbouring rows of the weight are a cluster, and have the same rows of x: each copies every other box
// of them for both. A block is persistent; of its three warpgroups the first asks the copy engine (TMA) for tiles of 64
// inputs into a ring of STAGES, the other two multiply 64 rows of the weight each. Sums leave by shared memory, so that a
// row is written 64 (with a gate 32) outputs at a time.
//
// Macros: STAGES, GATE (0, or a kind of activation: a tile then has half as many outputs, its rows of the weight alternate
// 8 of gate, 8 of up), EXPERTS (their number). Compiled by NVRTC.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int ROWS = 256, GROUPS = 2, CLUSTER = 2, DEPTH = 64, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE;
constexpr int GRAIN = 16, BOX = 64;  // rows of a step of sizes, and of a box of x
constexpr uint32 X_BYTES = ROWS * DEPTH * 2, CODE_BYTES = WIDE * DEPTH * 2, BOX_BYTES = BOX * DEPTH * 2;
constexpr int EACH = OUTPUTS / GROUPS;           // outputs of a warpgroup
constexpr int PART = GATE ? ROWS : ROWS / 2;     // rows that leave at a time
constexpr uint32 OUT_BYTES = PART * EACH * 2;    // of a warpgroup
constexpr int CHUNKS = EACH / 8;                 // pieces of 16 bytes of a row that a warpgroup writes

struct Call {
  const uint16 *bias;  // [rows of the weight] bfloat16, or null
  const int *ends;     // [EXPERTS]
  uint16 *out;         // [M, N] bfloat16
  int outputs, inputs;  // N (after the activation), K
  float limit, alpha, up_offset;
};

#include "sorted_experts.cuh"
#include "weight_rows.cuh"

// Rows of x and outputs of a block with number `rank` in its cluster; false beyond the last. All lanes of a warp take part.
__device__ __forceinline__ bool locate(const Call &call, int index, uint32 rank, Tile &tile) {
  if (!find_tile<ROWS, CLUSTER * OUTPUTS>(call, index, tile)) return false;
  even_out<ROWS>(call, tile);
  tile.output += rank * OUTPUTS;
  return true;
}

// The warp that copies: the stages of all tiles of this block.
__device__ __forceinline__ void fetch_tiles(
    const Call &call, const TensorMap *x_map, const TensorMap *weight_map, Ring &ring, uint32 rank
) {
  const int steps = (call.inputs + DEPTH - 1) / DEPTH;
  Tile tile;
  for (int index = blockIdx.x / CLUSTER; locate(call, index, rank, tile); index += gridDim.x / CLUSTER) {
    const int row = tile.expert * (GATE ? 2 : 1) * call.outputs + tile.output;
    const int boxes = (tile.last - tile.first + BOX - 1) / BOX;
    for (int step = 0; step < steps; ++step) {
      if (threadIdx.x == 0) {
        const uint32 full = ring.bars + 16 * ring.stage, to = ring.x_tiles + ring.stage * X_BYTES;
        const uint32 weight = ring.code_tiles + ring.stage * CODE_BYTES;
        wait_for(full + 8, ring.phase ^ 1);
        expect_bytes(full, CODE_BYTES + boxes * BOX_BYTES);
        if (GATE)
          load_gated_box(weight, weight_map, full, step * DEPTH, row);
        else
          load_box(weight, weight_map, full, step * DEPTH, row);
        for (int box = rank; box < boxes; box += CLUSTER)
          load_box_for(3, to + box * BOX_BYTES, x_map, full, step * DEPTH, tile.first + box * BOX);
      }
      ring.advance();
    }
    __syncwarp();
  }
}

#define PRODUCT "k16.f32.bf16.bf16"
#define MODES ", p, 1, 1, 0, 0;"
#include "shared_products.cuh"

// This warp has read a stage: both blocks are told.
__device__ __forceinline__ void release(const Ring &ring, int stage) {
  if (threadIdx.x % 32 < CLUSTER) arrive_at(ring.bars + 16 * stage + 8, threadIdx.x % 32);
}

// The sums of a tile with at most N rows.
template <int N>
__device__ __forceinline__ void add_up(float (&sums)[ROWS / 2], Ring &ring, int group, int steps) {
  int before = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_for(ring.bars + 16 * ring.stage, ring.phase);
    const uint64 weight = describe_operand(ring.code_tiles + ring.stage * CODE_BYTES + group * (CODE_BYTES / GROUPS));
    const uint64 rows = describe_operand(ring.x_tiles + ring.stage * X_BYTES);
    begin_products();
#pragma unroll
    for (int piece = 0; piece < DEPTH / 16; ++piece)
      multiply<N>(sums, weight + 2 * piece, rows + 2 * piece, step > 0 || piece > 0);
    commit_products();
    wait_products<1>();
    if (step > 0) release(ring, before);  // products of the stage before have ended
    before = ring.stage;
    ring.advance();
  }
  wait_products<0>();
  release(ring, before);
}

// The sums of a tile with at most N rows, or of one with more.
template <int N>
__device__ __forceinline__ void add_up_rows(float (&sums)[ROWS / 2], Ring &ring, int group, int rows, int steps) {
  if constexpr (N < ROWS)
    if (rows > N) return add_up_rows<N + GRAIN>(sums, ring, group, rows, steps);
  add_up<N>(sums, ring, group, steps);
}

// Where piece `chunk` of a row that leaves is, from the first on; exchanged so that eight rows are in different banks.
__device__ __forceinline__ uint32 place(int row, int chunk) {
  return row * (EACH * 2) + (chunk ^ (GATE ? row / 2 % CHUNKS : row % CHUNKS)) * 16;
}

// Bias, activation, and storing. A thread has sums[4 * j + 2 * half + i]: row lane / 4 + 8 * half of its warp's 16 rows
// of the weight, and row 8 * j + lane % 4 * 2 + i of x.
__device__ __forceinline__ void leave(const Call &call, float (&sums)[ROWS / 2], const Tile &tile, uint32 out, int group) {
  const int mine = threadIdx.x % 128, warp = mine / 32, lane = mine % 32, matrix = lane / 8;
  float bias[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int output = tile.output + group * EACH + (GATE ? warp * 8 : warp * 16 + half * 8) + lane / 4;
    if (call.bias && output < call.outputs)
      bias[half] = widen(call.bias[(tile.expert * (GATE ? 2 : 1) + (GATE ? half : 0)) * call.outputs + output]);
  }
  const int count = tile.last - tile.first;
#pragma unroll
  for (int part = 0; part < ROWS / PART; ++part) {
    if (part * PART >= count) break;
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");  // what was there has left
#pragma unroll
    for (int nth = 0; nth < PART / 8; nth += GATE ? 4 : 2) {
      const int j = part * (PART / 8) + nth;
      uint32 words[4];
#if GATE
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *d = sums + 4 * (j + i);
        words[i] = narrow(apply_gate(call, d[0] + bias[0], d[2] + bias[1]), apply_gate(call, d[1] + bias[0], d[3] + bias[1]));
      }
      put(out + place((nth + matrix) * 8 + lane % 8, warp), words);
#else
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // both eights of outputs of a row are neighbours
        const float *d = sums + 4 * (j + i / 2) + i % 2 * 2;
        words[i] = narrow(d[0] + bias[i % 2], d[1] + bias[i % 2]);
      }
      put(out + place((nth + matrix / 2) * 8 + lane % 8, warp * 2 + matrix % 2), words);
#endif
    }
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    const int chunk = mine % CHUNKS, column = tile.output + group * EACH + chunk * 8;
#pragma unroll
    for (int at = 0; at < PART; at += 128 / CHUNKS) {
      const int row = at + mine / CHUNKS;
      uint32 words[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(out + place(row, chunk)) : "memory");
      if (part * PART + row < count && column < call.outputs)
        *(uint4 *)(call.out + (uint64)(tile.first + part * PART + row) * call.outputs + column) =
            uint4{words[0], words[1], words[2], words[3]};
    }
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1) sorted_product(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
    const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  Ring ring(storage, CLUSTER);
  const uint32 rank = blockIdx.x % CLUSTER;
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) fetch_tiles(call, &x_map, &weight_map, ring, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = threadIdx.x / 128 - 1, steps = (call.inputs + DEPTH - 1) / DEPTH;
    const uint32 out = ring.code_tiles + STAGES * CODE_BYTES + 1024 + group * OUT_BYTES;  // behind the barriers
    float sums[ROWS / 2];
    Tile tile;
    for (int index = blockIdx.x / CLUSTER; locate(call, index, rank, tile); index += gridDim.x / CLUSTER) {
      // the same for the whole warp, which ptxas does not know
      const int rows = __reduce_max_sync(~0u, tile.last - tile.first);
      add_up_rows<GRAIN>(sums, ring, group, rows, steps);
      fence_sums(sums);
      leave(call, sums, tile, out, group);
    }
  }
  __syncwarp();
  // others may still write to this block's shared memory
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
