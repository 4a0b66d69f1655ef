// Products of tens to hundreds of rows of x [M, K] on Hopper with integers of 4 bits in tiles: out [M, N] = x times the
// weight [N, K] transposed, also with the gated activation of its halves, or partial sums of shares of K. Numbers of
// the weight are computed in float32 and rounded once to bfloat16; sums are float32 in a fixed order.
//
// The layout of the weight is that of tiled_rows.cu: a unit is 128 inputs of eight rows, 512 bytes. A block is
// persistent and takes 64 * GROUPS rows of the weight by ROWS rows of x, of a share of the units. Its first warp asks
// the copy engine (TMA) for units and rows of x into a ring of STAGES, codes also before the previous kernel has ended.
// The other GROUPS warpgroups decode 64 rows of codes each to operands of wgmma in registers, PIECES of 16 inputs at a
// time while the products before run; x comes from shared memory. The two blocks of a cluster have the same rows of x
// and copy half of them each, for both.
//
// Macros: ROWS (64, 128, 192, 256), GROUPS (2 or 4; ROWS * GROUPS at most 512), PIECES (2 or 4), STAGES, GATE (0, or a
// kind of activation: a block then has half as many outputs, its rows alternate 8 of gate, 8 of up), PAIRS (1: scales
// are pairs of float16, with zero points, else float32), SCALE (inputs that share one, 0: all). Compiled by NVRTC.

#define EXPERTS 1
#include "numbers.cuh"
#include "hopper.cuh"

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE, EIGHTS = WIDE / 8;
constexpr int WORDS = SCALE == 32 ? 4 : SCALE == 64 ? 2 : 1;    // scales of a unit of a row
constexpr int EACH = SCALE > DEPTH ? SCALE / DEPTH : 1;         // units that share one
constexpr uint32 X_BYTES = ROWS * DEPTH * 2, CODE_BYTES = WIDE * DEPTH / 2, TABLE_BYTES = WIDE * WORDS * 4;
constexpr uint32 STAGE_BYTES = X_BYTES + CODE_BYTES + TABLE_BYTES;
constexpr int CLUSTER = 2, THREADS = 128 * (GROUPS + 1);
constexpr int IDLE_REGISTERS = GROUPS == 2 ? 40 : 32, REGISTERS = GROUPS == 2 ? 232 : 112;
// A code at bits 12 to 15 of a float of this exponent is its number plus 2048, one at bits 16 to 19 plus 128.
constexpr uint32 LOW_BITS = 0x45000000u, HIGH_BITS = 0x43000000u;
constexpr float LOW_BASE = 2048.f, HIGH_BASE = 128.f;

struct Call {
  const uint32 *scales;  // [rows of the weight / 8, words, 8]
  const uint16 *bias;    // [rows of the weight] bfloat16, or null
  uint16 *out;           // [M, N] bfloat16
  float *parts;          // [splits, M, N] of partial sums, or null: of one split, to `out`
  int rows, outputs, inputs, words;  // M, N (after the activation), K; scales of a row
  int splits, units_each;            // shares of K, none empty, and their units
};

#include "weight_operand.cuh"
#include "sorted_experts.cuh"
#include "weight_rows.cuh"

struct Place {  // of a block: its cluster's number, and its own in the cluster
  int cluster, rank;
  __device__ __forceinline__ Place() : cluster(blockIdx.x / CLUSTER), rank(blockIdx.x % CLUSTER) {}
};

struct Work {
  Tile tile;
  int split, first, last;  // units from `first` to before `last`
};

// Item number `index` of a block; false beyond the last. Blocks at work at once share weights, if there
// are several tiles of rows of x. The last of these overlaps the one before: rows that are not there are copied slowly.
__device__ __forceinline__ bool find_work(const Call &call, int index, const Place &place, Work &work) {
  int row_tiles = (call.rows + ROWS - 1) / ROWS, units = call.inputs / DEPTH;
  int across = (call.outputs + OUTPUTS * CLUSTER - 1) / (OUTPUTS * CLUSTER);
  if (index >= across * row_tiles * call.splits) return false;
  work.split = index % call.splits;
  int tile = index / call.splits;
  work.tile.expert = 0;
  work.tile.first = max(min(tile % row_tiles * ROWS, call.rows - ROWS), 0), work.tile.last = call.rows;
  work.tile.output = (tile / row_tiles * CLUSTER + place.rank) * OUTPUTS;
  work.first = work.split * call.units_each, work.last = min(work.first + call.units_each, units);
  return true;
}

__device__ __forceinline__ void load_units(uint32 to, const TensorMap *map, uint32 bar, int unit, int pair) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %3, %4, %3, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(unit), "r"(pair) : "memory");
}
__device__ __forceinline__ void copy(uint32 to, const void *from, uint32 bytes, uint32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// Ask for a unit's codes and scales; the stage then also waits for rows of x. All lanes of a warp take part.
__device__ __forceinline__ void ask_codes(
    const Call &call, const TensorMap *code_map, const Ring &ring, uint32 tables, const Work &work, int unit
) {
  int lane = threadIdx.x % 32, eights = call.outputs / 8;
  uint32 full = ring.bars + 16 * ring.stage;
  if (lane == 0) {
    expect_bytes(full, STAGE_BYTES);
    load_units(ring.code_tiles + ring.stage * CODE_BYTES, code_map, full, unit, work.tile.output / (GATE ? 8 : 16));
  }
  __syncwarp();
  if (lane < EIGHTS) {  // beyond the last outputs, those of the last
    int eight = work.tile.output / 8 + (GATE ? lane / 2 : lane);
    eight = min(eight, eights - 1) + (GATE ? lane % 2 * eights : 0);
    int word = SCALE == 0 ? 0 : unit * WORDS / EACH;
    copy(tables + ring.stage * TABLE_BYTES + lane * (WORDS * 32), call.scales + ((int64)eight * call.words + word) * 8,
         WORDS * 32, full);
  }
}

// Ask for this block's half of the rows of x of a unit, for both: one thread.
__device__ __forceinline__ void ask_rows(
    const TensorMap *x_map, const Ring &ring, const Work &work, int unit, const Place &place
) {
  uint32 full = ring.bars + 16 * ring.stage, to = ring.x_tiles + ring.stage * X_BYTES;
  load_box_for(3, to + place.rank * (X_BYTES / 2), x_map, full, unit * DEPTH + place.rank * (DEPTH / 2),
               work.tile.first);
}

// The warp that copies: the stages of all items of this block.
__device__ __forceinline__ void fetch_work(
    const Call &call, const TensorMap *x_map, const TensorMap *code_map, Ring &ring, uint32 tables,
    const Place &place
) {
  Work work;
  int begin = place.cluster, stride = gridDim.x / CLUSTER, ahead = 0;
  if (find_work(call, begin, place, work)) ahead = min(work.last - work.first, STAGES);
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) {  // stages that were never used are empty
    ask_codes(call, code_map, ring, tables, work, work.first + step);
    ring.advance();
  }
  ring.stage = 0, ring.phase = 0;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int index = begin; find_work(call, index, place, work); index += stride) {
#pragma unroll 1
    for (int unit = work.first; unit < work.last; ++unit) {
      bool asked = index == begin && unit - work.first < ahead;
      if (!asked) {
        wait_for(ring.bars + 16 * ring.stage + 8, ring.phase ^ 1);
        ask_codes(call, code_map, ring, tables, work, unit);
      }
      if (threadIdx.x == 0) ask_rows(x_map, ring, work, unit, place);
      __syncwarp();
      ring.advance();
    }
  }
}

// Two codes of a row, and the same bytes' high ones, to bfloat16 numbers: (code - zero) * scale.
template <bool LOW>
__device__ __forceinline__ uint32 decode(uint32 bytes, float scale, float offset) {
  uint32 bits[2] = {bytes << 12, bytes << 4};
#pragma unroll
  for (int i = 0; i < 2; ++i)  // (a & b) | c, in one instruction
    asm("lop3.b32 %0, %0, %1, %2, 0xEA;"
        : "+r"(bits[i]) : "n"(LOW ? 0xF000u : 0xF0000u), "r"(LOW ? LOW_BITS : HIGH_BITS));
  float first = __uint_as_float(bits[0]), second = __uint_as_float(bits[1]);
  return narrow(fmaf(first, scale, offset), fmaf(second, scale, offset));
}

// Operands of PIECES times 16 inputs from piece FIRST of a half of a unit: codes[piece][2 * h + half] are the bytes of
// row 8 * half, inputs 8 * h and on; `table`: of scales of this thread's first row.
template <bool LOW, int FIRST>
__device__ __forceinline__ void decode_all(uint32 (&a)[PIECES][4], const uint32 (&codes)[PIECES][4], uint32 table) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scale, offset;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      if (piece == 0 || (WORDS == 4 && (FIRST + piece) % 2 == 0)) {
        int word = WORDS == 1 ? 0 : WORDS == 2 ? !LOW : (LOW ? 0 : 2) + (FIRST + piece) / 2;
        uint32 own;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(own) : "r"(table + (half * WORDS + word) * 32));
        scale = PAIRS ? half_of(own, false) : __uint_as_float(own);
        offset = -((LOW ? LOW_BASE : HIGH_BASE) + (PAIRS ? half_of(own, true) : 0.f)) * scale;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) a[piece][2 * h + half] = decode<LOW>(codes[piece][2 * h + half], scale, offset);
    }
  }
}

__device__ __forceinline__ void multiply_all(
    float (&sums)[ROWS / 2], const uint32 (&a)[PIECES][4], uint64 rows, bool adds
) {
  begin_products();
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) multiply(sums, a[piece], rows + 2 * piece, adds || piece > 0);
  commit_products();
}

// A stage of both blocks, whose barrier is `empty`, may be filled again.
__device__ __forceinline__ void release(uint32 empty) {
  int lane = threadIdx.x % 32;
  if (lane < CLUSTER) arrive_at(empty, lane);
}

// Both halves' products of PIECES pieces from FIRST on. At most one batch of products is on its way when the next one
// is decoded, to the registers of the one before.
template <int FIRST>
__device__ __forceinline__ void add_pieces(
    float (&sums)[ROWS / 2], uint32 (&low)[PIECES][4], uint32 (&high)[PIECES][4], uint32 at, uint32 turned,
    uint32 table, uint64 rows, bool adds, uint32 empty
) {
  uint32 codes[PIECES][4];
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows differ by 8, which changes no swizzle
      uint16 bytes;
      uint32 from = at + ((FIRST + piece) * 16 ^ turned) + i % 2 * 512 + i / 2 * 8;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(from));
      codes[piece][i] = bytes;
    }
  wait_products<1>();
  decode_all<true, FIRST>(low, codes, table);
  multiply_all(sums, low, rows + 2 * FIRST, adds || FIRST > 0);
  wait_products<1>();
  // all products of the stage before have ended
  if (FIRST == 0 && empty) release(empty);
  decode_all<false, FIRST>(high, codes, table);
  multiply_all(sums, high, rows + X_BYTES / 2 / 16 + 2 * FIRST, true);
}

// The sums of an item, of this thread's row `row` of the block's and the one 8 further.
__device__ __forceinline__ void add_up(
    float (&sums)[ROWS / 2], Ring &ring, uint32 tables, uint32 row, int steps
) {
  int lane = threadIdx.x % 32;
  // rows of 64 bytes, swizzled by 64 bytes: the 16 bytes of a piece are exchanged by row / 2 % 4
  uint32 bytes = ring.code_tiles + row * 64 + lane % 4 * 2, turned = row / 2 % 4 * 16;
  uint32 table = tables + row / 8 * (WORDS * 32) + lane / 4 * 4, before = 0;
  uint32 low[PIECES][4], high[PIECES][4];
  for (int step = 0; step < steps; ++step) {
    wait_for(ring.bars + 16 * ring.stage, ring.phase);
    uint64 rows = describe_operand(ring.x_tiles + ring.stage * X_BYTES);
    uint32 at = bytes + ring.stage * CODE_BYTES, own = table + ring.stage * TABLE_BYTES;
    add_pieces<0>(sums, low, high, at, turned, own, rows, step > 0, before);
    if (PIECES == 2) add_pieces<4 - PIECES>(sums, low, high, at, turned, own, rows, true, 0);
    before = ring.bars + 16 * ring.stage + 8;
    ring.advance();
  }
  wait_products<0>();
  fence_sums(sums);
  release(before);
}

// A thread has sums[4 * j + 2 * half + i]: row lane / 4 + 8 * half of its warp's 16 rows of the weight, and row
// 8 * j + lane % 4 * 2 + i of x.
__device__ __forceinline__ void store_sums(const Call &call, const float (&sums)[ROWS / 2], const Work &work, int row) {
  int m = work.tile.first + threadIdx.x % 4 * 2, n = work.tile.output + row;
  float *to = call.parts + ((int64)work.split * call.rows + m) * call.outputs + n;
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (m + 8 * j + i < work.tile.last && n + 8 * half < call.outputs)
          to[(int64)(8 * j + i) * call.outputs + 8 * half] = sums[4 * j + 2 * half + i];
}

// What follows the sums of an item.
__device__ __forceinline__ void finish_work(const Call &call, float (&sums)[ROWS / 2], const Work &work, int row) {
  int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, own[2];
  if (call.parts) {
    store_sums(call, sums, work, row);
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int output = work.tile.output + (GATE ? warp * 8 + lane / 4 : row + 8 * half);
    own[half] = output < call.outputs ? (GATE ? half * call.outputs : 0) + output : -1;
  }
  finish(call, sums, work.tile, own, warp);
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The warps that multiply.
__device__ __forceinline__ void multiply_work(const Call &call, Ring &ring, uint32 tables, const Place &place) {
  int row = (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4;
  float sums[ROWS / 2];
  Work work;
  for (int index = place.cluster; find_work(call, index, place, work); index += gridDim.x / CLUSTER) {
    add_up(sums, ring, tables, row, work.last - work.first);
    finish_work(call, sums, work, row);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) tiled_many(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap code_map,
    const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  Ring ring(storage, CLUSTER);
  uint32 tables = ring.bars + 16 * STAGES;
  Place place;
  meet_cluster();  // before anything is copied to another's memory, its barriers are there
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(IDLE_REGISTERS));
    if (threadIdx.x < 32) fetch_work(call, &x_map, &code_map, ring, tables, place);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    multiply_work(call, ring, tables, place);
  }
  meet_cluster();  // nobody copies to, or arrives at, a block that has ended
}
