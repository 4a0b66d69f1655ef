// Products of a few rows and experts in MXFP4 on Hopper, at the rate of the weight's bytes: rows x [M, K], sorted by
// expert, times that expert's weight [N, K]: e2m1 codes, two to a byte, with a power of two per 32 inputs. With a gate,
// the activation of its two halves. Sums are in a fixed order, the same whatever the rows beside a row.
//
// Codes become e4m3 numbers of 2**-6 the size, the left operand of wgmma in FP8: three or four instructions for four of
// them, where bfloat16 takes two for each. A row of x is the sum of two e4m3 parts, high and low, times a power of two:
// exactly its bfloat16 numbers, but for those below 2**-9 of its largest, whose errors are at most 2**-17 of that.
// A product of wgmma has 32 inputs, which share a scale of the weight: its sums are multiplied by that, in float32, as
// they are added up. BESIDE: parts are columns of one product. Else a product of low parts adds to that of the high
// ones: half as many sums, twice as many products.
//
// A block is persistent and takes tiles of 64 * GROUPS of the weight's rows by ROWS rows of x. Its first warp asks the
// copy engine (TMA) for codes and parts of 128 inputs into a ring of STAGES, for codes before the previous kernel ends.
// Each of the other GROUPS warpgroups multiplies 64 rows of codes. While products with low codes of the bytes (inputs 0
// to 63) run, high ones (64 to 127) are decoded, and the other way round.
//
// Macros: ROWS (8, 16 or 32; with BESIDE at most 16), GROUPS (2 to 4), STAGES, BESIDE (0 or 1), GATE (0, or a
// kind of activation: a tile then has half as many outputs, its rows alternate 8 of gate, 8 of up), EXPERTS (their
// number), TILES (the most tiles of rows of a launch). Compiled by NVRTC.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE;
constexpr uint32 PART_BYTES = ROWS * DEPTH, X_BYTES = 2 * PART_BYTES, CODE_BYTES = WIDE * DEPTH / 2;
constexpr uint32 STAGE_BYTES = X_BYTES + CODE_BYTES;
constexpr int THREADS = 128 * (GROUPS + 1), COLUMNS = BESIDE ? 2 * ROWS : ROWS;
// Scales are kept 253 above their power, and codes decoded 6 below theirs: so much less is a float's exponent.
constexpr uint32 EXCESS = 253 - 6 - 127;

struct Call {
  const float *x_scales;  // [M]
  const uint32 *scales;   // [rows of the weight, words]: a byte for each 32 inputs, as `DeviceCodes` keeps powers of two
  const uint16 *bias;     // [rows of the weight] bfloat16, or null
  const int *ends;        // [EXPERTS]
  uint16 *out;            // [M, N] bfloat16
  int outputs, inputs, words;  // N (after the activation), K
  float limit, alpha, up_offset;
};

#include "sorted_experts.cuh"
#include "weight_rows.cuh"
#include "mxfp4_steps.cuh"

// d [64, N] = codes [64, 32] (a fragment in registers) times parts [N, 32]; plus d if `adds`
#define MULTIPLY(N, SUMS, NAMES, A0, A1, A2, A3, B, P) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" N "k32.f32.e4m3.e4m3 {" NAMES "}, {" A0 "," A1 "," A2 "," A3 "}, " B \
      ", p, 1, 1;\n}" \
      : SUMS(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(adds))

template <int N>
__device__ __forceinline__ void multiply(float (&d)[COLUMNS / 2], const uint32 (&a)[4], uint64 rows, int adds) {
  static_assert(N == 8 || N == 16 || N == 32, "no product");
  if constexpr (N == 8)
    MULTIPLY("8", F4, S4, "%4", "%5", "%6", "%7", "%8", "%9");
  if constexpr (N == 16)
    MULTIPLY("16", F8, S8, "%8", "%9", "%10", "%11", "%12", "%13");
  if constexpr (N == 32)
    MULTIPLY("32", F16, S16, "%16", "%17", "%18", "%19", "%20", "%21");
}

// What of rows was found: of each tile its first row, and its expert (upper half) and number of rows.
struct Plan {
  int count;
  uint2 tiles[TILES];
};

// Finds all tiles of rows, in the order of experts. By one warp. Ends were written before the previous kernel started:
// they are read from the L2 before that one has ended, where a multiprocessor may still have older ones.
__device__ __forceinline__ void find_tiles(const Call &call, Plan &plan) {
  constexpr int ROUNDS = (EXPERTS + 31) / 32;
  int lane = threadIdx.x, ends[ROUNDS], count = 0, before = 0;
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    int expert = 32 * i + lane;
    ends[i] = 0;
    if (expert < EXPERTS)
      asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(ends[i]) : "l"(call.ends + expert) : "memory");
  }
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    int start = __shfl_up_sync(~0u, ends[i], 1);
    if (lane == 0) start = before;
    int rows = max(ends[i] - start, 0), tiles = (rows + ROWS - 1) / ROWS, sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    for (int nth = 0; nth < tiles; ++nth)
      plan.tiles[count + sum - tiles + nth] =
          uint2{uint32(start + nth * ROWS), uint32((32 * i + lane) << 16 | min(ROWS, rows - nth * ROWS))};
    count += __shfl_sync(~0u, sum, 31), before = __shfl_sync(~0u, ends[i], 31);
  }
  if (lane == 0) plan.count = count;
}

// Tile number `index`; false beyond the last.
__device__ __forceinline__ bool take_tile(const Call &call, const Plan &plan, int index, Tile &tile) {
  int across = (call.outputs + OUTPUTS - 1) / OUTPUTS, nth = index / across;
  if (nth >= plan.count) return false;
  uint2 found = plan.tiles[nth];
  tile.expert = found.y >> 16, tile.first = found.x, tile.last = found.x + (found.y & 0xffff);
  tile.output = (index - nth * across) * OUTPUTS;
  return true;
}

// The thread that copies: the stages of all tiles of this block.
struct Copier {
  const Call &call;
  const TensorMap *x_map, *code_map;

  __device__ __forceinline__ void copy_codes(const Ring &ring, int stage, const Tile &tile, int step) const {
    int row = tile.expert * (GATE ? 2 : 1) * call.outputs + tile.output;
    uint32 to = ring.code_tiles + stage * CODE_BYTES, full = ring.bars + 16 * stage;
    expect_bytes(full, STAGE_BYTES);
    if (GATE)
      load_gated_box(to, code_map, full, step * (DEPTH / 2), row);
    else
      load_box(to, code_map, full, step * (DEPTH / 2), row);
  }
  __device__ __forceinline__ void copy_rows(const Ring &ring, int stage, const Tile &tile, int step) const {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5}], [%2];"
                 ::"r"(ring.x_tiles + stage * X_BYTES), "l"(x_map), "r"(ring.bars + 16 * stage), "r"(step * DEPTH),
                   "r"(tile.first), "r"(0) : "memory");
  }
  __device__ __forceinline__ void run(Ring &ring, const Plan &plan) const {
    int steps = (call.inputs + DEPTH - 1) / DEPTH, ahead = 0;
    Tile tile;
    prefetch_map(x_map);  // it comes from memory as well
    if (take_tile(call, plan, blockIdx.x, tile)) {
      ahead = min(steps, STAGES);
      for (int step = 0; step < ahead; ++step) copy_codes(ring, step, tile, step);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    for (int step = 0; step < ahead; ++step) copy_rows(ring, step, tile, step);
    ring.stage = ahead == STAGES ? 0 : ahead, ring.phase = ahead == STAGES;
    for (int index = blockIdx.x; take_tile(call, plan, index, tile); index += gridDim.x, ahead = 0)
      for (int step = ahead; step < steps; ++step) {
        wait_for(ring.bars + 16 * ring.stage + 8, ring.phase ^ 1);
        copy_codes(ring, ring.stage, tile, step);
        copy_rows(ring, ring.stage, tile, step);
        ring.advance();
      }
  }
};

// Codes of a thread: words[i][r] are bytes 32 * i + 16 * (r / 2) + 4 * (lane % 4) and on of row lane / 4 + 8 * (r % 2),
// just as an operand of 32 inputs has them. Low codes are of inputs 32 * i and on, high ones of 64 more.
struct Operands { uint32 words[2][4], low[2][4], high[2][4]; };

// A code's sign goes to bit 7 of its byte, the rest to bits 4 to 2: an exponent's end and a mantissa's first bit.
__device__ __forceinline__ void decode_low(Operands &codes) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32 word = codes.words[i / 4][i % 4];
    codes.low[i / 4][i % 4] = (word << 4 & 0x80808080u) | (word << 2 & 0x1C1C1C1Cu);
  }
}
__device__ __forceinline__ void decode_high(Operands &codes) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32 word = codes.words[i / 4][i % 4];
    codes.high[i / 4][i % 4] = (word & 0x80808080u) | (word >> 2 & 0x1C1C1C1Cu);
  }
}

// Products of two groups of 32 inputs each, whose parts begin at `rows`.
__device__ __forceinline__ void start(float (&products)[2][COLUMNS / 2], uint32 (&a)[2][4], uint64 rows) {
#pragma unroll
  for (int i = 0; i < 8; ++i) pin(a[i / 4][i % 4]);  // nothing is decoded behind the fence
  begin_products();
#pragma unroll
  for (int part = 0; part < (BESIDE ? 1 : 2); ++part)
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply<COLUMNS>(products[i], a[i], rows + 2 * i + part * (PART_BYTES / 16), part);
  commit_products();
}

// Waits for products, and adds them up times their scales: of groups from the byte FIRST of `powers` on.
template <int FIRST>
__device__ __forceinline__ void add(
    float (&sums)[COLUMNS / 2], float (&products)[2][COLUMNS / 2], const uint32 (&powers)[2]
) {
  wait_products<0>();
#pragma unroll
  for (int i = 0; i < 2; ++i) fence_sums(products[i]);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int byte = FIRST + i;
      uint32 bits = byte < 3 ? powers[half] << (23 - 8 * byte) : powers[half] >> 1;
      float scale = __uint_as_float(bits & 0x7F800000u);
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
        for (int k = 4 * j + 2 * half; k < 4 * j + 2 * half + 2; ++k) sums[k] += products[i][k] * scale;
    }
}

__device__ __forceinline__ void read_codes(Operands &to, const Place &place, int stage) {
  const uint32 at = place.codes + stage * CODE_BYTES;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.words[i][0]), "=r"(to.words[i][1]), "=r"(to.words[i][2]), "=r"(to.words[i][3])
                 : "r"(at ^ 32 * i));
}

// The sums of a tile. After the last step the stage that follows is read too, and not used.
__device__ __forceinline__ void add_up(
    float (&sums)[COLUMNS / 2], Ring &ring, const Place &place, Scales &scales, int steps
) {
  Operands codes;
  float products[2][COLUMNS / 2];
  wait_for(ring.bars + 16 * ring.stage, ring.phase);
  read_codes(codes, place, ring.stage);
  decode_low(codes);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    uint32 powers[2];
    uint64 rows = place.rows_of(ring.stage);
    uint32 empty = ring.bars + 16 * ring.stage + 8;
    scales.get(step, powers);
    scales.advance(step);
    // of all four bytes; of inputs that are not there bytes are zero, and what is borrowed reaches no others
#pragma unroll
    for (int half = 0; half < 2; ++half) powers[half] -= EXCESS * 0x01010101u;
    start(products, codes.low, rows);
    decode_high(codes);
    add<0>(sums, products, powers);
    start(products, codes.high, rows + 4);
    ring.advance();
    wait_if(step + 1 < steps, ring.bars + 16 * ring.stage, ring.phase);
    read_codes(codes, place, ring.stage);
    decode_low(codes);
    add<2>(sums, products, powers);
    arrive_if(place.leads, empty);
  }
}

struct Work {  // of a block: its tile, and what its thread needs of it
  Tile tile;
  int own[2];  // rows of the weight of this thread, 8 apart in the tile; -1 beyond the expert's
  bool is_there;

  __device__ __forceinline__ void find(const Call &call, const Plan &plan, int index, Scales &scales, int steps) {
    is_there = take_tile(call, plan, index, tile);
    if (!is_there) return;
    int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int output = tile.output + (GATE ? warp * 8 + lane / 4 : warp * 16 + lane / 4 + 8 * half);
      int matrix = tile.expert * (GATE ? 2 : 1) + (GATE ? half : 0);
      own[half] = output < call.outputs ? matrix * call.outputs + output : -1;
      if (call.bias && own[half] >= 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(call.bias + own[half]) : "memory");
    }
    scales.begin(call, own, steps);
  }
};

// The warps that multiply.
__device__ __forceinline__ void multiply_tiles(const Call &call, const Plan &plan, Ring &ring) {
  int steps = (call.inputs + DEPTH - 1) / DEPTH;
  Scales scales;
  Place place(ring);
  Work work;
  work.find(call, plan, blockIdx.x, scales, steps);
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 1
  for (int index = blockIdx.x; work.is_there;) {
    index += gridDim.x;
    float parts[COLUMNS / 2] = {}, sums[ROWS / 2];
    add_up(parts, ring, place, scales, steps);
    Tile done = work.tile;
    int own[2] = {work.own[0], work.own[1]};
    work.find(call, plan, index, scales, steps);  // its first scales are on their way while this one ends
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int row = done.first + 8 * j + threadIdx.x % 4 * 2 + i;
        float scale = row < done.last ? call.x_scales[row] : 0.0f;
#pragma unroll
        for (int k = 4 * j + i; k < 4 * j + 4; k += 2)
          sums[k] = (BESIDE ? parts[k] + parts[BESIDE * (ROWS / 2) + k] : parts[k]) * scale;
      }
    finish<false>(call, sums, done, own, threadIdx.x / 32 - 4, call.outputs);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mxfp4_parts(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap code_map,
    const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  Plan &plan = *(Plan *)storage;  // the ring is behind it
  if (threadIdx.x < 32) find_tiles(call, plan);
  Ring ring(storage + sizeof(Plan));
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(32));
    if (threadIdx.x == 0) Copier{call, &x_map, &code_map}.run(ring, plan);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 224 : GROUPS == 3 ? 152 : 112));
    multiply_tiles(call, plan, ring);
  }
}
