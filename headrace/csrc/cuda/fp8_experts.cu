// Products of FP8 rows and FP8 experts on Hopper for tens of rows each, where reading weights bounds a step: rows x
// [M, K], sorted by expert, times that expert's weight [N, K], each with a scale per 128 inputs (the weight's also of 128
// outputs). With a gate, the activation of its two halves. Sums are float32 in a fixed order.
//
// A block is persistent and takes tiles of 64 * GROUPS of the weight's rows by ROWS rows of x. Its first warp asks the
// copy engine (TMA) for tiles of 128 inputs into a ring of STAGES, also of the next tiles while one is finished; the
// other GROUPS warpgroups multiply 64 rows of the weight each (wgmma, both operands from shared memory).
//
// Macros: ROWS (16, 32, 64), GROUPS (2 or 4), STAGES, GATE (0, or a kind of activation: a tile then has half as many
// outputs, its rows alternate 8 of gate, 8 of up), EXPERTS (their number). Compiled by NVRTC.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE;
constexpr uint32 X_BYTES = ROWS * DEPTH, CODE_BYTES = WIDE * DEPTH, STAGE_BYTES = X_BYTES + CODE_BYTES;
constexpr int THREADS = 128 * (GROUPS + 1);

struct Call {
  const float *x_scales;  // [K / 128, M]
  const float *scales;    // [rows of the weight / 128, K / 128]
  const uint16 *bias;  // [rows of the weight] bfloat16, or null
  const int *ends;    // [EXPERTS]
  uint16 *out;           // [M, N] bfloat16
  int rows, outputs, inputs;  // M, N (after the activation), K
  float limit, alpha, up_offset;
};

// sums [64, ROWS] += the weight's [64, 32] times rows of x [ROWS, 32]; `adds` 0: = instead
#define MULTIPLY(N, SUMS, NAMES, A, B, P) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" N "k32.f32.e4m3.e4m3 {" NAMES "}, " A ", " B ", p, 1, 1;\n}" \
      : SUMS(d, 0) : "l"(weight), "l"(rows), "r"(adds))

__device__ __forceinline__ void multiply(float (&d)[ROWS / 2], uint64 weight, uint64 rows, int adds) {
#if ROWS == 16
  MULTIPLY("16", F8, S8, "%8", "%9", "%10");
#elif ROWS == 32
  MULTIPLY("32", F16, S16, "%16", "%17", "%18");
#else
  MULTIPLY("64", F32, S32, "%32", "%33", "%34");
#endif
}

#include "sorted_experts.cuh"
#include "weight_rows.cuh"

__device__ __forceinline__ void add_up(
    const Call &call, float (&sums)[ROWS / 2], const Tile &tile, uint32 row, Ring &ring
) {
  int steps = call.inputs / DEPTH, lane = threadIdx.x % 32, base = tile.expert * (GATE ? 2 : 1) * call.outputs;
  // a warp's 16 rows: 8 of gate and 8 of up, or 16 of the same 128 outputs
  const float *tables[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int output = tile.output + (GATE ? 0 : min((int)row / 128 * 128, call.outputs - 1 - tile.output));
    tables[half] = call.scales + (uint64)((base + (GATE ? half * call.outputs : 0) + output) / 128) * steps;
  }
  const float *x_scales = call.x_scales + tile.first + lane % 4 * 2;
  int left = tile.last - tile.first - lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0.0f;
  float part[ROWS / 2];
  for (int step = 0; step < steps; ++step) {
    float scales[2] = {tables[0][step], tables[1][step]}, own[ROWS / 4];
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        own[2 * j + i] = 8 * j + i < left ? x_scales[(uint64)step * call.rows + 8 * j + i] : 0.0f;
    wait_for(ring.bars + 16 * ring.stage, ring.phase);
    uint64 weight = describe_operand(ring.code_tiles + ring.stage * CODE_BYTES + row / 64 * 64 * DEPTH);
    uint64 rows = describe_operand(ring.x_tiles + ring.stage * X_BYTES);
    fence_sums(part);
    begin_products();
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) multiply(part, weight + 2 * piece, rows + 2 * piece, piece > 0);
    commit_products();
    wait_products<0>();
    fence_sums(part);
    if (lane == 0) arrive(ring.bars + 16 * ring.stage + 8);
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[4 * j + i] += part[4 * j + i] * (scales[i / 2] * own[2 * j + i % 2]);
    ring.advance();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_experts(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap code_map,
    const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  Ring ring(storage);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x < 128) {
    if (threadIdx.x < 32) fetch_tiles<DEPTH, 1>(call, &x_map, &code_map, ring);
  } else {
    multiply_tiles(call, [&](float (&sums)[ROWS / 2], const Tile &tile, const int (&own)[2], uint32 row) {
      add_up(call, sums, tile, row, ring);
    });
  }
}
