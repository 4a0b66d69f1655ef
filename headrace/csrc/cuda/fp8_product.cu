// Products of FP8 rows and FP8 weights for many rows on Hopper: out [M, N] = x [M, K] times weight [N, K], each with
// its scales, and for a gated weight the activation of its two halves. One weight, or experts stacked, each with the
// rows that are sorted to it. Sums are float32 in a fixed order.
//
// A block is persistent and takes tiles of 128 rows by BLOCK_N of the weight's rows. Of its three warpgroups the first
// asks the copy engine (TMA) for tiles of 128 inputs into a ring of STAGES, the other two multiply 64 rows each
// (wgmma). `full` barriers tell that a stage has arrived, `empty` barriers that all warps are done with it. With
// CLUSTER 2, two blocks with neighbouring rows share a weight's tile: each fetches half of it for both.
//
// Macros: BLOCK_N (128, 256), STAGES, CLUSTER (1, 2), GATE (0, or a kind of activation: a tile then has half as many
// outputs, its rows of the weight alternate 8 of gate, 8 of up), GROUPS (1: rows have a scale per 128 inputs, the weight
// one per 128 x 128; 0: a scale per row, and per row of the weight), EXPERTS (their number; 0: one weight), CODES (1:
// the output is FP8 with a scale per row and 128 outputs; with GATE and BLOCK_N 256 only).
// Compiled by NVRTC.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int BLOCK_M = 128, DEPTH = 128;
constexpr int PARTS = GROUPS ? BLOCK_N / 128 : 1;  // sums of a group are held for so many parts of the tile in turn
constexpr int OUTPUTS = GATE ? BLOCK_N / 2 : BLOCK_N;
constexpr uint32 X_BYTES = BLOCK_M * DEPTH, WEIGHT_BYTES = BLOCK_N * DEPTH, STAGE_BYTES = X_BYTES + WEIGHT_BYTES;
// tiles of rows that blocks work on at the same time, so that both operands stay in the L2
constexpr int ROW_TILES_AT_ONCE = 16;

struct Call {
  const float *x_scales;  // [M], or [K / 128, M]
  const float *scales;    // [rows of the weight], or [rows / 128, K / 128]
  const uint16 *bias;     // [rows of the weight] bfloat16, or null
  const int *ends;        // [EXPERTS]
  void *out;              // [M, N] bfloat16 or FP8
  float *out_scales;      // [N / 128, M]
  int rows, outputs, inputs, groups;  // M, N (after the activation), K, scales of a row of the weight
  float limit, alpha, up_offset;
};

// One arrival at the barrier of this block, or at that of every block of the cluster.
__device__ __forceinline__ void release(uint32 bar) {
#if CLUSTER == 1
  arrive(bar);
#else
#pragma unroll
  for (uint32 rank = 0; rank < CLUSTER; ++rank)
    asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(rank) : "memory");
#endif
}

__device__ __forceinline__ void sync_cluster() {
#if CLUSTER == 1
  __syncthreads();
#else
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The tile of a weight that begins at `row`; of a gated one at that row of gate, with the same rows of up. With a
// cluster, this block's half of it, to all blocks.
__device__ __forceinline__ void fetch_weight(const TensorMap *map, uint32 bar, uint32 to, int k, int row, uint32 rank) {
  to += rank * (WEIGHT_BYTES / CLUSTER);
  row += rank * (OUTPUTS / CLUSTER);
#if CLUSTER == 1
#if GATE
  load_gated_box(to, map, bar, k, row);
#else
  load_box(to, map, bar, k, row);
#endif
#else
  uint16 all = (1 << CLUSTER) - 1;
#if GATE
  asm volatile(
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
    "[%1, {%3, %4, %4, %5}], [%2], %6;"
    ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(0), "r"(row / 8), "h"(all) : "memory");
#else
  asm volatile(
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
    "[%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"(all) : "memory");
#endif
#endif
}

// sums [64, N] += rows [64, 32] times the weight's [N, 32]; `adds` 0: = instead
__device__ __forceinline__ void multiply(float (&d)[64], uint64 rows, uint64 weight, int adds) {
  asm volatile(
    "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" S64 "}, %64, %65, p, 1, 1;\n}"
    : F64(d, 0) : "l"(rows), "l"(weight), "r"(adds));
}

__device__ __forceinline__ void multiply(float (&d)[128], uint64 rows, uint64 weight, int adds) {
  asm volatile(
    "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" S128 "}, %128, %129, p, 1, 1;\n}"
    : F128(d, 0) : "l"(rows), "l"(weight), "r"(adds));
}

// Products with a stage of 128 inputs.
template <int N>
__device__ __forceinline__ void multiply_stage(float (&d)[N], uint64 rows, uint64 weight, bool adds) {
  fence_sums(d);
  begin_products();
#pragma unroll
  for (int piece = 0; piece < DEPTH / 32; ++piece) multiply(d, rows + 2 * piece, weight + 2 * piece, adds || piece > 0);
  commit_products();
}

#include "sorted_experts.cuh"

// The tile of a block with number `rank` in its cluster; false beyond the last. All lanes of a warp take part.
__device__ __forceinline__ bool locate(const Call &call, int index, uint32 rank, Tile &tile) {
#if EXPERTS
  return find_tile<BLOCK_M, OUTPUTS>(call, index, tile);
#else
  // neighbouring tiles of rows first, `ROW_TILES_AT_ONCE` of them, then across the outputs
  int across = (call.outputs + OUTPUTS - 1) / OUTPUTS;
  int down = ((call.rows + BLOCK_M - 1) / BLOCK_M + CLUSTER - 1) / CLUSTER;
  constexpr int AT_ONCE = ROW_TILES_AT_ONCE / CLUSTER;
  if (index >= across * down) return false;
  int each = AT_ONCE * across, group = index / each, inside = index % each;
  int high = min(AT_ONCE, down - group * AT_ONCE);
  tile.expert = 0;
  tile.first = ((group * AT_ONCE + inside % high) * CLUSTER + (int)rank) * BLOCK_M;
  tile.last = call.rows;
  tile.output = inside / high * OUTPUTS;
  return true;
#endif
}

__device__ __forceinline__ uint32 pack_codes(float low, float high) {
  uint16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

// Scale, gate and store the sums of 64 rows. A thread has rows lane / 4 and 8 more of its warp's 16, and of each 8
// columns the pair at 2 * (lane % 4): sums[4 * j + 2 * half + i] is row + 8 * half, column 8 * j + pair + i.
__device__ __forceinline__ void finish(const Call &call, float (&sums)[BLOCK_N / 2], const Tile &tile, int row) {
  int lane = threadIdx.x % 32, pair = lane % 4 * 2;
  int weight_rows = GATE ? 2 * call.outputs : call.outputs, base = tile.expert * weight_rows;
#if !GROUPS
  float row_scales[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    row_scales[half] = row + 8 * half < tile.last ? call.x_scales[row + 8 * half] : 0.0f;
#endif
#pragma unroll
  for (int j = 0; j < BLOCK_N / 8; ++j) {
    int column = tile.output + (GATE ? j / 2 : j) * 8 + pair;
    bool is_there = column < call.outputs;
    int at = base + column + (GATE ? j % 2 * call.outputs : 0);
#if !GROUPS
    float2 scale = is_there ? *(const float2 *)(call.scales + at) : float2{0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[4 * j + 2 * half] *= scale.x * row_scales[half];
      sums[4 * j + 2 * half + 1] *= scale.y * row_scales[half];
    }
#endif
    if (call.bias && is_there) {
      uint32 bias = *(const uint32 *)(call.bias + at);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums[4 * j + 2 * half] += widen(bias & 0xFFFF);
        sums[4 * j + 2 * half + 1] += widen(bias >> 16);
      }
    }
  }
#if GATE
#pragma unroll
  for (int j = 0; j < OUTPUTS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[4 * j + i] = apply_gate(call, sums[8 * j + i], sums[8 * j + 4 + i]);
#endif
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int m = row + 8 * half;
    bool is_there = m < tile.last;
#if CODES
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < OUTPUTS / 8; ++j)
      largest = fmaxf(largest, fmaxf(fabsf(sums[4 * j + 2 * half]), fabsf(sums[4 * j + 2 * half + 1])));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    float scale = largest > 0.0f ? largest / 448.0f : 1.0f, inverse = 1.0f / scale;
    if (is_there && lane % 4 == 0) call.out_scales[(uint64)(tile.output / 128) * call.rows + m] = scale;
    unsigned char *out = (unsigned char *)call.out + (uint64)m * call.outputs + tile.output;
#pragma unroll
    for (int j = 0; j < OUTPUTS / 8; j += 8) {
      uint32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *low = sums + 4 * (j + i) + 2 * half, *high = low + 16;
        words[i] = pack_codes(low[0] * inverse, low[1] * inverse)
          | pack_codes(high[0] * inverse, high[1] * inverse) << 16;
      }
      transpose(words);  // the lane now has 8 codes of column j + lane % 4, and of 4 columns further
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int column = (j + 4 * i + lane % 4) * 8;
        uint32 select = i ? 0x7632 : 0x5410;
        uint2 codes = {__byte_perm(words[0], words[1], select), __byte_perm(words[2], words[3], select)};
        if (is_there && tile.output + column < call.outputs) *(uint2 *)(out + column) = codes;
      }
    }
#else
    uint16 *out = (uint16 *)call.out + (uint64)m * call.outputs + tile.output;
#pragma unroll
    for (int j = 0; j < OUTPUTS / 8; j += 4) {
      uint32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = narrow(sums[4 * (j + i) + 2 * half], sums[4 * (j + i) + 2 * half + 1]);
      transpose(words);  // the lane now has the 8 columns of number j + lane % 4
      int column = (j + lane % 4) * 8;
      if (is_there && tile.output + column < call.outputs)
        *(uint4 *)(out + column) = uint4{words[0], words[1], words[2], words[3]};
    }
#endif
  }
}

#if GROUPS
// Sums of a tile, scaled after every 128 inputs: what tensor cores add up is that short.
__device__ __forceinline__ void add_up(
    const Call &call, float (&sums)[BLOCK_N / 2], const Tile &tile, int row, uint32 x_tiles, uint32 weights,
    uint32 bars, int &stage, uint32 &phase
) {
  int steps = (call.inputs + DEPTH - 1) / DEPTH;
  int first = tile.expert * (GATE ? 2 : 1) * call.outputs + tile.output;
  const float *tables[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)  // of gate and of up, or of the first and the second 128 of a tile
    tables[i] = call.scales + (uint64)((first + (GATE ? i * call.outputs : i * 128 % BLOCK_N)) / 128) * call.groups;
  if (!GATE && tile.output + 128 >= call.outputs) tables[1] = tables[0];  // the second is beyond the last
  bool is_there[2] = {row < tile.last, row + 8 < tile.last};
  float part[64];
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) sums[i] = 0.0f;
  // scales of a step: of rows `row` and 8 more, then of the weight; asked for a step before they are needed
  const float *x_scales = call.x_scales + row;
  float next[4] = {
      is_there[0] ? x_scales[0] : 0.0f, is_there[1] ? x_scales[8] : 0.0f, tables[0][0], tables[1][0]
  };
  for (int step = 0; step < steps; ++step) {
    float x0 = next[0], x1 = next[1], weight_scales[2] = {next[2], next[3]};
    if (step + 1 < steps) {
      x_scales += call.rows;
      next[0] = is_there[0] ? x_scales[0] : 0.0f, next[1] = is_there[1] ? x_scales[8] : 0.0f;
      next[2] = tables[0][step + 1], next[3] = tables[1][step + 1];
    }
    wait_for(bars + 16 * stage, phase);
    uint64 rows = describe_operand(x_tiles + stage * X_BYTES);
#pragma unroll
    for (int nth = 0; nth < PARTS; ++nth) {
      multiply_stage(part, rows, describe_operand(weights + stage * WEIGHT_BYTES + nth * 128 * DEPTH), false);
      fence_sums(part);
      wait_products<0>();
      fence_sums(part);
      if (nth == PARTS - 1 && threadIdx.x % 32 == 0) release(bars + 16 * stage + 8);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float scale = weight_scales[GATE ? j % 2 : nth];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[64 * nth + 4 * j + i] += part[4 * j + i] * (scale * (i < 2 ? x0 : x1));
      }
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
}
#else
__device__ __forceinline__ void add_up(
    const Call &call, float (&sums)[BLOCK_N / 2], const Tile &tile, int row, uint32 x_tiles, uint32 weights,
    uint32 bars, int &stage, uint32 &phase
) {
  int steps = (call.inputs + DEPTH - 1) / DEPTH, before = 0;
  for (int step = 0; step < steps; ++step) {
    wait_for(bars + 16 * stage, phase);
    uint64 rows = describe_operand(x_tiles + stage * X_BYTES);
    multiply_stage(sums, rows, describe_operand(weights + stage * WEIGHT_BYTES), step > 0);
    wait_products<1>();
    if (step && threadIdx.x % 32 == 0) release(bars + 16 * before + 8);  // products of the stage before have ended
    before = stage;
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  wait_products<0>();
  fence_sums(sums);
  if (threadIdx.x % 32 == 0) release(bars + 16 * before + 8);
}
#endif

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1) fp8_product(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
    const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  // tiles swizzled by 128 bytes begin at multiples of 1,024
  uint32 x_tiles = (shared_address(storage) + 1023) & ~1023u, weights = x_tiles + STAGES * X_BYTES;
  uint32 bars = weights + STAGES * WEIGHT_BYTES;  // of each stage: full, then empty
  uint32 rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(bars + 16 * stage, 1);
      init_barrier(bars + 16 * stage + 8, 8 * CLUSTER);  // warps that multiply
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  sync_cluster();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  int index = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER, stage = 0;
  uint32 phase = 0;
  Tile tile;
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) {
      int steps = (call.inputs + DEPTH - 1) / DEPTH;
      for (; locate(call, index, rank, tile); index += step) {
        int row = tile.expert * (GATE ? 2 : 1) * call.outputs + tile.output;
        for (int k = 0; k < steps; ++k) {
          if (threadIdx.x == 0) {
            uint32 full = bars + 16 * stage;
            wait_for(full + 8, phase ^ 1);
            expect_bytes(full, STAGE_BYTES);
            load_box(x_tiles + stage * X_BYTES, &x_map, full, k * DEPTH, tile.first);
            fetch_weight(&weight_map, full, weights + stage * WEIGHT_BYTES, k * DEPTH, row, rank);
          }
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        __syncwarp();
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int group = threadIdx.x / 128 - 1, inside = threadIdx.x % 128;
    float sums[BLOCK_N / 2];
    for (; locate(call, index, rank, tile); index += step) {
      int row = tile.first + group * 64 + inside / 32 * 16 + inside % 32 / 4;
      add_up(call, sums, tile, row, x_tiles + group * 64 * DEPTH, weights, bars, stage, phase);
      finish(call, sums, tile, row);
    }
  }
#if CLUSTER > 1
  __syncwarp();
  sync_cluster();  // others may still write to this block's shared memory
#endif
}
