// Products of some hundred rows on Hopper in one wave of tiles: out [M, F] = x [M, K] times weight [N, K], N = F, or
// with GATE act(x Wg^T) * (x Wu^T) of a weight that stacks Wg and Wu, N = 2 F. Half precision, or FP8 with a scale for
// each row of x and of the weight; sums in float32, gate and up rounded as if stored.
//
// A block has one tile, all rows by WIDTH of the weight's, with a gate half of them of gate and half the same of up.
// WIDTH is free in steps of 16: it is chosen so that all tiles run at once. Each of WARPGROUPS multiplies HIGH times 64
// rows (wgmma). A thread of the first warpgroup asks for tiles of 128 bytes of inputs (TMA), into a ring of x and one of
// the weight, of STAGES each, as soon as all have read their place: registers are full of sums, which leaves none for a
// warp of its own. Clusters of two share an operand, and each block copies half of it for both: with SHARES_X they have
// the same rows and two tiles of the weight, else half of the rows each and the same tile. A copy brings `box` rows of
// x, the least that M needs. Rows of a tile beyond are what the memory happens to hold; their sums are not stored.
//
// Compiled by NVRTC. Macros: FP16 or FP8 (neither: bfloat16); WARPGROUPS; HIGH (1, 2); WIDTH (16 to 256); SUMS (WIDTH
// / 2, of a thread and 64 rows), SUMS_1 and SUMS_2 (one and two more: the preprocessor does not add); STAGES; SHARES_X
// (0, 1); GATE (0; 1 silu, 2 gelu_tanh).

#include "numbers.cuh"
#include "hopper.cuh"
#include "half_pairs.cuh"

#ifdef FP8
#define INSTRUCTION(n) "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 "
#define MODES ", p, 1, 1; }"
constexpr int DEPTH = 128;
#else
#define INSTRUCTION(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." TYPE "." TYPE " "
#define MODES ", p, 1, 1, 0, 0; }"
constexpr int DEPTH = 64;  // inputs of a stage: 128 bytes, one swizzled row
#endif
#define TEXT_(n) #n
#define TEXT(n) TEXT_(n)
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

constexpr int CLUSTER = 2, HALF = WIDTH / 2, THREADS = 128 * WARPGROUPS;
constexpr int ASKS = 0;  // the thread that asks for tiles
constexpr uint32 ROW_BYTES = 128, BLOCK_BYTES = 64 * ROW_BYTES;
constexpr uint32 X_BYTES = WARPGROUPS * HIGH * BLOCK_BYTES, WEIGHT_BYTES = WIDTH * ROW_BYTES;
constexpr uint16 BOTH = (1 << CLUSTER) - 1;
static_assert(WIDTH % 16 == 0 && WIDTH == 2 * SUMS, "gate and up are of whole eights");

struct Call {
  const float *x_scales, *scales;  // [M], [N]: of FP8
  uint16 *out;                     // [M, F] in half precision
  int rows, outputs, inputs, box;  // M, F, K; rows of x of a copy, a multiple of 8
};

// d [64, WIDTH] += rows [64, 32 bytes] times weight [WIDTH, 32 bytes]; `adds` 0: = instead. A thread holds rows r and
// r + 8, r = lane / 4, of columns 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ void multiply(float (&d)[SUMS], uint64 rows, uint64 weight, int adds) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" TEXT(SUMS_2) ", 0;\n"
               INSTRUCTION(TEXT(WIDTH)) "{" PASTE(S, SUMS) "}, %" TEXT(SUMS) ", %" TEXT(SUMS_1) MODES
               : PASTE(F, SUMS)(d, 0)
               : "l"(rows), "l"(weight), "r"(adds));
}

// Places of tiles in shared memory, at step % STAGES. Barriers say that a tile has come, `full`, and that it has been
// read, `empty`: IS_SHARED by both blocks, as each writes to both.
template <uint32 BYTES, bool IS_SHARED>
struct Ring {
  uint32 tiles, barriers;

  __device__ __forceinline__ uint32 place(uint32 step) const { return tiles + step % STAGES * BYTES; }
  __device__ __forceinline__ uint32 full(uint32 step) const { return barriers + 8 * (step % STAGES); }
  __device__ __forceinline__ uint32 empty(uint32 step) const { return full(step) + 8 * STAGES; }
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(full(stage), 1);
      init_barrier(empty(stage), WARPGROUPS * (IS_SHARED ? CLUSTER : 1));
    }
  }
  __device__ __forceinline__ void wait_full(uint32 step) const { wait_for(full(step), step / STAGES & 1); }
  __device__ __forceinline__ void wait_empty(uint32 step) const { wait_for(empty(step), step / STAGES & 1); }
  // A warpgroup has read the tile.
  __device__ __forceinline__ void release(uint32 step) const {
    const int thread = threadIdx.x % 128;
    if (IS_SHARED) {
      if (thread < CLUSTER) arrive_at(empty(step), thread);
    } else {
      if (thread == 0) arrive(empty(step));
    }
  }
};
using XRing = Ring<X_BYTES, SHARES_X>;
using WeightRing = Ring<WEIGHT_BYTES, !SHARES_X>;

// The tile that a block has, and how it is copied.
struct Tile {
  const TensorMap *x_map, *weight_map;
  int box, row, output, up;  // first row and output; from a row of the weight to that of its other half
  uint32 rank;
  XRing x;
  WeightRing weight;

  // This block's part of the tile of x of a step, and of the weight.
  __device__ __forceinline__ void copy_x(int step) const {
    const uint32 to = x.place(step), bar = x.full(step);
    expect_bytes(bar, (SHARES_X ? CLUSTER : 1) * box * ROW_BYTES);
    if (SHARES_X) load_box_for(BOTH, to + rank * box * ROW_BYTES, x_map, bar, step * DEPTH, rank * box);
    else load_box(to, x_map, bar, step * DEPTH, row);
  }
  __device__ __forceinline__ void copy_weight(int step) const {
    const uint32 to = weight.place(step), bar = weight.full(step);
    expect_bytes(bar, WEIGHT_BYTES);
    if (SHARES_X) {
      load_box(to, weight_map, bar, step * DEPTH, output);
      load_box(to + HALF * ROW_BYTES, weight_map, bar, step * DEPTH, output + up);
    } else {
      load_box_for(BOTH, to + rank * (HALF * ROW_BYTES), weight_map, bar, step * DEPTH, output + rank * up);
    }
  }
  // Fill the places that a step has read, once they are empty: first those that do not depend on the other block.
  __device__ __forceinline__ void refill(int step, int steps) const {
#pragma unroll
    for (int shared = 0; shared < 2; ++shared)
      if (shared == SHARES_X) {
        if (step + STAGES < steps) x.wait_empty(step), copy_x(step + STAGES);
      } else {
        if (step + STAGES < steps) weight.wait_empty(step), copy_weight(step + STAGES);
      }
  }
  // They are released for steps alone that come: then nothing reaches a block that has ended.
  __device__ __forceinline__ void release(int step, int steps) const {
    if (step + STAGES >= steps) return;
    x.release(step);
    weight.release(step);
  }
};

// Scales of FP8 in shared memory, as the end has no registers to ask for many at once: of the tile's rows of the weight
// and of x.
struct Scales {
  float weight[WIDTH], rows[WARPGROUPS * HIGH * 64];

  __device__ __forceinline__ void load_weight(const Call &call, int output) {
    for (int i = threadIdx.x; i < WIDTH; i += THREADS) {
      const int column = output + (GATE ? i % HALF : i);
      weight[i] = column < call.outputs ? call.scales[column + (GATE ? i / HALF * call.outputs : 0)] : 0.0f;
    }
  }
  __device__ __forceinline__ void load_rows(const Call &call, int first, int last) {
    for (int i = threadIdx.x; i < WARPGROUPS * HIGH * 64; i += THREADS)
      rows[i] = first + i < last ? call.x_scales[first + i] : 0.0f;
  }
};

// Activate and store the sums of `row` of the tile, which begins at row `first`, and of 8 more; of those before `last`.
__device__ __forceinline__ void finish(
    const Call &call, float (&d)[SUMS], const Scales &scales, int output, int first, int row, int last
) {
  constexpr int OUTPUTS = GATE ? HALF : WIDTH;
  const int lane = threadIdx.x % 32;
#ifdef FP8
  const float row_scales[2] = {scales.rows[row], scales.rows[row + 8]};
#endif
  row += first;
#pragma unroll
  for (int j = 0; j < OUTPUTS / 8; j += 4) {
    uint32 words[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (j + i >= OUTPUTS / 8) break;
      float *sums = d + 4 * (j + i);  // of the row and the row 8 further, two columns each
#ifdef FP8
#pragma unroll
      for (int part = 0; part < (GATE ? 2 : 1); ++part) {
        const float2 scale = *(const float2 *)(scales.weight + part * HALF + (j + i) * 8 + lane % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sums[part * (SUMS / 2) + 2 * half] *= scale.x * row_scales[half];
          sums[part * (SUMS / 2) + 2 * half + 1] *= scale.y * row_scales[half];
        }
      }
#endif
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float *gate = sums + 2 * half;
#if GATE
        float *up = gate + SUMS / 2;
        round_both(gate[0], gate[1]);
        round_both(up[0], up[1]);
        words[half][i] = pack(activate<GATE == 2>(gate[0], up[0]), activate<GATE == 2>(gate[1], up[1]));
#else
        words[half][i] = pack(gate[0], gate[1]);
#endif
      }
    }
    const int column = (j + lane % 4) * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      transpose(words[half]);  // the lane now has the 8 outputs from `column` on
      const uint32 *own = words[half];
      if (column < OUTPUTS && output + column < call.outputs && row + 8 * half < last)
        *(uint4 *)(call.out + (uint64)(row + 8 * half) * call.outputs + output + column) =
            uint4{own[0], own[1], own[2], own[3]};
    }
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    wave_product(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                 const __grid_constant__ Call call) {
  extern __shared__ unsigned char storage[];
  // tiles swizzled by 128 bytes begin at multiples of 1,024
  const uint32 tiles = (shared_address(storage) + 1023) & ~1023u,
               barriers = tiles + STAGES * (X_BYTES + WEIGHT_BYTES);
  const int group = threadIdx.x / 128, steps = (call.inputs + DEPTH - 1) / DEPTH;
  const uint32 rank = blockIdx.x % CLUSTER;
  const int nth = SHARES_X ? blockIdx.x : blockIdx.x / CLUSTER;
  const int output = nth * (GATE ? HALF : WIDTH);
  const Tile tile = {
      &x_map, &weight_map, call.box, SHARES_X ? 0 : int(rank) * call.box, output, GATE ? call.outputs : HALF, rank,
      {tiles, barriers}, {tiles + STAGES * X_BYTES, barriers + 16 * STAGES}
  };
  if (threadIdx.x == ASKS) {
    tile.x.init();
    tile.weight.init();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  const int last = min(call.rows, tile.row + (SHARES_X ? CLUSTER : 1) * call.box);
  Scales &scales = *(Scales *)(storage + (barriers + 32 * STAGES - shared_address(storage)));
  // no kernel writes weights, the one before may write x
  if (threadIdx.x == ASKS)
    for (int step = 0; step < min(STAGES, steps); ++step) tile.copy_weight(step);
#ifdef FP8
  __syncwarp();
  scales.load_weight(call, output);
#endif
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == ASKS)
    for (int step = 0; step < min(STAGES, steps); ++step) tile.copy_x(step);
  __syncwarp();
#ifdef FP8
  scales.load_rows(call, tile.row, last);
  __syncthreads();
#endif

  float d[HIGH][SUMS];
  for (int step = 0; step < steps; ++step) {
    tile.x.wait_full(step);
    tile.weight.wait_full(step);
    const uint64 rows = describe_operand(tile.x.place(step) + group * (HIGH * BLOCK_BYTES));
    const uint64 weight = describe_operand(tile.weight.place(step));
    begin_products();
#pragma unroll
    for (int piece = 0; piece < 4; ++piece)
#pragma unroll
      for (int high = 0; high < HIGH; ++high)
        multiply(d[high], rows + high * (BLOCK_BYTES / 16) + 2 * piece, weight + 2 * piece, step > 0 || piece > 0);
    commit_products();
    wait_products<1>();
    if (step == 0) continue;
    tile.release(step - 1, steps);  // it has been computed
    if (threadIdx.x == ASKS) tile.refill(step - 1, steps);
    __syncwarp();
  }
  wait_products<0>();
#pragma unroll
  for (int high = 0; high < HIGH; ++high) fence_sums(d[high]);
#pragma unroll
  for (int high = 0; high < HIGH; ++high) {
    const int row = (group * HIGH + high) * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    finish(call, d[high], scales, output, tile.row, row, last);
  }
}
