// Products of tens to hundreds of rows of x [M, K] on Hopper with integers of 4 bits in tiles: out [M, N] = x times the
// weight [N, K] transposed, also with the gated activation of its halves, or partial sums of shares of K. Numbers of
// the weight are rounded once to bfloat16; sums are float32 in a fixed order.
//
// The layout of the weight is that of tiled_rows.cu: a unit is 128 inputs of eight rows, 512 bytes. A block is
// persistent and takes 64 * GROUPS rows of the weight by ROWS rows of x, of a share of the units. A thread asks the
// copy engine (TMA) for units and rows of x into a ring of STAGES, codes and scales also before the previous kernel has
// ended: three copies a stage, as asking for one takes some 75 cycles whatever its size. The other GROUPS warpgroups
// decode 64 rows of codes each to operands of wgmma in registers, PIECES of 16 inputs at a time while the products
// before run; x comes from shared memory. The two blocks of a cluster have the same rows of x and copy half of them
// each, for both.
//
// Macros: ROWS (64, 96, 128, 192, 256), GROUPS (2 or 4; ROWS * GROUPS at most 512), PIECES (2 or 4), STAGES, GATE (0,
// or a kind of activation: a block then has half as many outputs, its rows alternate 8 of gate, 8 of up), PAIRS (1:
// scales are pairs of float16, with zero points, else float32), WHOLE (1: zero points are whole numbers below 128),
// SCALE (inputs that share a scale, 0: all), SUPER_FORM (1: codes of 4 bits in super-blocks with mins, see
// super_blocks.cuh, with PAIRS 0, WHOLE 0 and SCALE 32; else 0). Compiled by NVRTC.

#define EXPERTS 1
#include "numbers.cuh"
#include "hopper.cuh"
#include "super_blocks.cuh"

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE;
constexpr int WORDS = SCALE == 32 ? 4 : SCALE == 64 ? 2 : 1;    // scales of a unit of a row
constexpr int EACH = SCALE > DEPTH ? SCALE / DEPTH : 1;         // units that share one
static_assert(SUPER_FORM == 0 || (SUPER_FORM == 1 && SCALE == 32), "a super-block's table has 16 bytes, like 4 words");
constexpr uint32 X_BYTES = ROWS * DEPTH * 2, TABLE_BYTES = WIDE * WORDS * 4, UNIT_BYTES = WIDE * DEPTH / 2;
constexpr uint32 CODE_BYTES = UNIT_BYTES + TABLE_BYTES, STAGE_BYTES = X_BYTES + CODE_BYTES;  // codes, then scales
static_assert(X_BYTES % 1024 == 0 && CODE_BYTES % 512 == 0, "swizzles begin with each stage");
static_assert(UNIT_BYTES % 128 == 0 && STAGE_BYTES < 1 << 20, "a copy's place is aligned, a barrier counts its bytes");
constexpr int CLUSTER = 2, THREADS = 128 * (GROUPS + 1);
constexpr int IDLE_REGISTERS = GROUPS == 2 ? 40 : 32, REGISTERS = GROUPS == 2 ? 232 : 112;

struct Call {
  const uint16 *bias;         // [rows of the weight] bfloat16, or null
  uint16 *out;                // [M, N] bfloat16
  float *parts;               // [splits, M, N] of partial sums, or null: of one split, to `out`
  int rows, outputs, inputs;  // M, N (after the activation), K
  int splits, units_each;     // shares of K, none empty, and their units
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

struct Maps {  // of tensors; of codes [pairs of eights, 2, units, 8, 64 bytes], of scales [.., 2, words, 1, 32 bytes],
               // or of super-blocks [.., 2, super-blocks, 4, 32 bytes]
  const TensorMap *x, *codes, *scales;
};

// Pairs of eights of rows from `pair` on: a unit of codes, or its scales.
__device__ __forceinline__ void load_pairs(uint32 to, const TensorMap *map, uint32 bar, int unit, int pair) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %3, %4, %3, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(unit), "r"(pair) : "memory");
}

// Ask for a unit's codes and scales, zeros beyond the last outputs; the stage then also waits for rows of x.
__device__ __forceinline__ void ask_codes(const Maps &maps, const Ring &ring, const Work &work, int unit) {
  uint32 full = ring.bars + 16 * ring.stage, to = ring.code_tiles + ring.stage * CODE_BYTES;
  int pair = work.tile.output / (GATE ? 8 : 16), word = SUPER_FORM ? unit / 2 : SCALE == 0 ? 0 : unit * WORDS / EACH;
  expect_bytes(full, STAGE_BYTES);
  load_pairs(to, maps.codes, full, unit, pair);
  load_pairs(to + UNIT_BYTES, maps.scales, full, word, pair);
}

// Ask for this block's half of the rows of x of a unit, for both.
__device__ __forceinline__ void ask_rows(
    const Maps &maps, const Ring &ring, const Work &work, int unit, const Place &place
) {
  uint32 full = ring.bars + 16 * ring.stage, to = ring.x_tiles + ring.stage * X_BYTES;
  load_box_for(3, to + place.rank * (X_BYTES / 2), maps.x, full, unit * DEPTH + place.rank * (DEPTH / 2),
               work.tile.first);
}

// The thread that copies: the stages of all items of this block.
__device__ __forceinline__ void fetch_work(const Call &call, const Maps &maps, Ring &ring, const Place &place) {
  Work work;
  int begin = place.cluster, stride = gridDim.x / CLUSTER, ahead = 0;
  if (find_work(call, begin, place, work)) ahead = min(work.last - work.first, STAGES);
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) {  // stages that were never used are empty
    ask_codes(maps, ring, work, work.first + step);
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
        ask_codes(maps, ring, work, unit);
      }
      ask_rows(maps, ring, work, unit, place);
      ring.advance();
    }
  }
}

__device__ __forceinline__ uint32 load_word(uint32 from) {
  uint32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
  return word;
}

// A scale and its zero point, for the numbers (code - zero) * scale of two codes of a row.
struct Scale {
#if WHOLE
  // A code at the end of a bfloat16, of which it is a part of the mantissa and the last bit of the exponent, is its
  // number times 2**-133, and 16 times as much four bits further: times these it is its number divided by LIFT.
  static constexpr uint32 LOW_LIFT = 0x7F007F00u, HIGH_LIFT = 0x7D007D00u;
  static constexpr float LIFT = 64.f;
  uint32 high, low, zero;  // pairs of the same bfloat16: a scale is the sum of two, times LIFT

  __device__ __forceinline__ void set(uint32 word) {
    float scale = (PAIRS ? half_of(word, false) : __uint_as_float(word)) * LIFT;
    float offset = PAIRS ? half_of(word, true) * (-1.f / LIFT) : 0.f;
    high = narrow(scale, scale), zero = narrow(offset, offset);
    scale -= widen_high(high);
    low = narrow(scale, scale);
  }
  // The difference is exact, and so is its product with `low` but for its last bits, 16 below the number's first.
  template <bool LOW>
  __device__ __forceinline__ uint32 decode(uint32 codes) const {
    uint32 number = fma_pairs(codes & (LOW ? 0x000F000Fu : 0x00F000F0u), LOW ? LOW_LIFT : HIGH_LIFT, zero);
    return fma_pairs(number, high, product_of_pairs(number, low));
  }
#else
  // A code at bits 12 to 15 of a float of this exponent is its number plus BASE.
  static constexpr uint32 BITS = 0x45000000u;
  static constexpr float BASE = 2048.f;
  float scale, offset;

  __device__ __forceinline__ void set(uint32 word) {
    scale = PAIRS ? half_of(word, false) : __uint_as_float(word);
    offset = -(BASE + (PAIRS ? half_of(word, true) : 0.f)) * scale;
  }
  // Of a unit of a super-block of a row, its factors and 24 bits for each half of a plane.
  uint32 factors, six[2];

  __device__ __forceinline__ void load(uint32 table, bool odd) {
    uint32 words[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(table));
    factors = words[0];
    const uint32 low = odd ? words[2] : words[1], high = odd ? words[3] : words[2];
    six[0] = odd ? __byte_perm(low, high, 0x5432) : low;
    six[1] = odd ? high >> 8 : __byte_perm(low, high, 0x6543);
  }
  __device__ __forceinline__ void choose(int plane, int half) {
    SuperScales<SUPER_FORM> own;
    own.set(six[half]);
    scale = half_of(factors, false) * float(own.scale[plane]);
    offset = -(BASE * scale + half_of(factors, true) * float(own.min[plane]));
  }
  template <bool LOW>
  __device__ __forceinline__ uint32 decode(uint32 codes) const {
    uint32 bits[2] = {codes << (LOW ? 12 : 8), LOW ? codes >> 4 : codes >> 8};
#pragma unroll
    for (int i = 0; i < 2; ++i)  // (a & b) | c, in one instruction
      asm("lop3.b32 %0, %0, 0xF000, %1, 0xEA;" : "+r"(bits[i]) : "r"(BITS));
    return narrow(fmaf(__uint_as_float(bits[0]), scale, offset), fmaf(__uint_as_float(bits[1]), scale, offset));
  }
#endif
};

// Operands of PIECES times 16 inputs from piece FIRST of a half of a unit: codes[piece][2 * h + half] are two codes of
// row 8 * half, inputs 8 * h and on, and two of the other half; `scales` of rows 8 apart, if a unit has one, else those
// at `table`.
template <bool LOW, int FIRST>
__device__ __forceinline__ void decode_all(
    uint32 (&a)[PIECES][4], const uint32 (&codes)[PIECES][4], Scale (&scales)[2], uint32 table
) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#if SUPER_FORM
      if (piece % 2 == 0) scales[half].choose(!LOW, (FIRST + piece) / 2);
#else
      int word = WORDS == 2 ? !LOW : (LOW ? 0 : 2) + (FIRST + piece) / 2;
      if (WORDS == 4 ? piece % 2 == 0 : WORDS == 2 && piece == 0)
        scales[half].set(load_word(table + (half * WORDS + word) * 32));
#endif
#pragma unroll
      for (int i = half; i < 4; i += 2) a[piece][i] = scales[half].template decode<LOW>(codes[piece][i]);
    }
  }
}

__device__ __forceinline__ void multiply_all(
    float (&sums)[ROWS / 2], const uint32 (&a)[PIECES][4], uint64 rows, bool adds
) {
  begin_products();
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) multiply<ROWS>(sums, a[piece], rows + 2 * piece, adds || piece > 0);
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
    float (&sums)[ROWS / 2], uint32 (&low)[PIECES][4], uint32 (&high)[PIECES][4], Scale (&scales)[2], uint32 at,
    uint32 turned, uint32 table, uint64 rows, bool adds, uint32 empty
) {
  uint32 codes[PIECES][4];
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows differ by 8, which changes no swizzle
      uint16 bytes;
      uint32 from = at + ((FIRST + piece) * 16 ^ turned) + i % 2 * 512 + i / 2 * 8;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(from));
      codes[piece][i] = __byte_perm(bytes, 0, 0x4140);  // a byte in each half
    }
  wait_products<1>();
  decode_all<true, FIRST>(low, codes, scales, table);
  multiply_all(sums, low, rows + 2 * FIRST, adds || FIRST > 0);
  wait_products<1>();
  // all products of the stage before have ended
  if (FIRST == 0 && empty) release(empty);
  decode_all<false, FIRST>(high, codes, scales, table);
  multiply_all(sums, high, rows + X_BYTES / 2 / 16 + 2 * FIRST, true);
}

// The sums of an item from unit `first` on, of this thread's row `row` of the block's and the one 8 further.
__device__ __forceinline__ void add_up(
    float (&sums)[ROWS / 2], Ring &ring, uint32 row, int first, int steps
) {
  int lane = threadIdx.x % 32;
  // rows of 64 bytes, swizzled by 64 bytes: the 16 bytes of a piece are exchanged by row / 2 % 4
  uint32 bytes = ring.code_tiles + row * 64 + lane % 4 * 2, turned = row / 2 % 4 * 16;
  uint32 table = ring.code_tiles + UNIT_BYTES + row / 8 * (WORDS * 32) + lane / 4 * (SUPER_FORM ? 16 : 4), before = 0;
  uint32 low[PIECES][4], high[PIECES][4];
  Scale scales[2];
  for (int step = 0; step < steps; ++step) {
    wait_for(ring.bars + 16 * ring.stage, ring.phase);
    uint64 rows = describe_operand(ring.x_tiles + ring.stage * X_BYTES);
    uint32 at = bytes + ring.stage * CODE_BYTES, own = table + ring.stage * CODE_BYTES;
#if SUPER_FORM
#pragma unroll
    for (int half = 0; half < 2; ++half) scales[half].load(own + half * 128, (first + step) & 1);
#endif
#pragma unroll
    for (int half = 0; half < (WORDS == 1 ? 2 : 0); ++half) scales[half].set(load_word(own + half * 32));
    add_pieces<0>(sums, low, high, scales, at, turned, own, rows, step > 0, before);
    if (PIECES == 2) add_pieces<4 - PIECES>(sums, low, high, scales, at, turned, own, rows, true, 0);
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
  finish<false>(call, sums, work.tile, own, warp);
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The warps that multiply.
__device__ __forceinline__ void multiply_work(const Call &call, Ring &ring, const Place &place) {
  int row = (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4;
  float sums[ROWS / 2];
  Work work;
  for (int index = place.cluster; find_work(call, index, place, work); index += gridDim.x / CLUSTER) {
    add_up(sums, ring, row, work.first, work.last - work.first);
    finish_work(call, sums, work, row);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) tiled_many(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap code_map,
    const __grid_constant__ TensorMap scale_map, const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  Ring ring(storage, CLUSTER);
  Place place;
  meet_cluster();  // before anything is copied to another's memory, its barriers are there
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(IDLE_REGISTERS));
    if (threadIdx.x == 0) fetch_work(call, {&x_map, &code_map, &scale_map}, ring, place);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    multiply_work(call, ring, place);
  }
  meet_cluster();  // nobody copies to, or arrives at, a block that has ended
}
