// Products of rows in FP8 and experts in MXFP4 on Hopper: rows x [M, K] in e4m3 with a scale each, sorted by expert,
// times that expert's weight [N, K]: e2m1 codes, two to a byte, with a power of two per 32 inputs. With a gate, the
// activation of its two halves. Sums are float32 in a fixed order, the same whatever the rows beside a row.
//
// Codes become e5m2 numbers together with their power of two, exactly for powers from 2**-25 to 2; lower ones count as
// 2**-26. So sums of all inputs stay in the tensor cores, and are scaled once at the end.
//
// A block is persistent and takes tiles of 64 * GROUPS of the weight's rows by ROWS rows of x. Its first warp finds them
// and asks the copy engine (TMA) for codes and rows of 128 inputs into a ring of STAGES. The other GROUPS warpgroups
// decode 64 rows of codes each to operands of wgmma in registers; x comes from shared memory. While products with low
// codes of the bytes (inputs 0 to 63) run, high ones (64 to 127) are decoded, and the other way round. An expert's rows
// are divided evenly among as few tiles as hold them, and a tile is multiplied with LEAST rows or GRAIN more, and so on;
// boxes of BOX rows that it does not have are not copied.
//
// Macros: FP8 (1, for weight_operand.cuh), ROWS (16, 32, 48, 64, 96, 128, 224), GROUPS (2 or 4; ROWS * GROUPS at most
// 512), STAGES, BOX (a divisor of ROWS and a multiple of GRAIN, or ROWS), GATE (0, or a kind of activation: a tile then
// has half as many outputs, its rows alternate 8 of gate, 8 of up), EXPERTS (their number). Compiled by NVRTC.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE;
constexpr int LEAST = ROWS <= 64 ? 16 : ROWS > 128 ? 128 : ROWS / 2, GRAIN = ROWS <= 96 ? 16 : 32;
static_assert((ROWS - LEAST) % GRAIN == 0, "the largest is a whole tile");
static_assert(BOX == ROWS || (ROWS % BOX == 0 && BOX % GRAIN == 0), "boxes hold what is multiplied");
constexpr uint32 BOX_BYTES = BOX * DEPTH, X_BYTES = ROWS * DEPTH, CODE_BYTES = WIDE * DEPTH / 2;
constexpr int THREADS = 128 * (GROUPS + 1);
// Whether codes are read a step ahead. Of three stages that would leave one to be copied, late in each step.
constexpr bool AHEAD = STAGES > 3;

struct Call {
  const uint32 *scales;  // [rows of the weight, words]: a byte for each 32 inputs, as `DeviceCodes` keeps powers of two
  const uint16 *bias;  // [rows of the weight] bfloat16, or null
  const int *ends;    // [EXPERTS]
  uint16 *out;           // [M, N] bfloat16
  int outputs, inputs, words;  // N (after the activation), K
  float limit, alpha, up_offset;
  const float *x_scales;  // [M]
};

#include "weight_operand.cuh"
#include "sorted_experts.cuh"
#include "weight_rows.cuh"
#include "mxfp4_steps.cuh"

// What a tile's first stage says of it, behind the barriers; an expert of -1 ends the work of a block. Found by the warp
// that copies alone: in the others, its registers would be taken from products.
__device__ __forceinline__ uint32 notice_of(uint32 bars, int stage) { return bars + 16 * (STAGES + stage); }
__device__ __forceinline__ void announce(const Ring &ring, const Tile &tile) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"r"(notice_of(ring.bars, ring.stage)), "r"(tile.expert), "r"(tile.first), "r"(tile.last),
                 "r"(tile.output) : "memory");
}

// The warp that copies: the stages of all tiles of this block.
__device__ __forceinline__ void fetch_tiles(
    const Call &call, const TensorMap *x_map, const TensorMap *code_map, Ring &ring
) {
  int steps = (call.inputs + DEPTH - 1) / DEPTH;
  Tile tile;
  for (int index = blockIdx.x; find_tile<ROWS, OUTPUTS>(call, index, tile); index += gridDim.x) {
    even_out<ROWS>(call, tile);
    int row = tile.expert * (GATE ? 2 : 1) * call.outputs + tile.output, boxes = (tile.last - tile.first + BOX - 1) / BOX;
    for (int step = 0; step < steps; ++step) {
      if (threadIdx.x == 0) {
        uint32 full = ring.bars + 16 * ring.stage, to = ring.x_tiles + ring.stage * X_BYTES;
        uint32 codes = ring.code_tiles + ring.stage * CODE_BYTES;
        wait_for(full + 8, ring.phase ^ 1);
        if (step == 0) announce(ring, tile);
        expect_bytes(full, CODE_BYTES + boxes * BOX_BYTES);
        if (GATE)
          load_gated_box(codes, code_map, full, step * (DEPTH / 2), row);
        else
          load_box(codes, code_map, full, step * (DEPTH / 2), row);
        for (int box = 0; box < boxes; ++box)
          load_box(to + box * BOX_BYTES, x_map, full, step * DEPTH, tile.first + box * BOX);
      }
      ring.advance();
    }
    __syncwarp();
  }
  if (threadIdx.x == 0) {
    tile.expert = -1;
    wait_for(ring.bars + 16 * ring.stage + 8, ring.phase ^ 1);
    announce(ring, tile);
    arrive(ring.bars + 16 * ring.stage);
  }
}

// Operands of half a step: of two products of 32 inputs four registers each.
using Half = uint32[2][4];

// The products of half a step with rows of x, of which the first N count.
template <int N>
__device__ __forceinline__ void multiply_half(float (&sums)[ROWS / 2], Half &a, uint64 rows) {
#pragma unroll
  for (int i = 0; i < 8; ++i) pin(a[i / 4][i % 4]);  // nothing is decoded behind the fence
  begin_products();
#pragma unroll
  for (int nth = 0; nth < 2; ++nth) multiply<N>(sums, a[nth], rows + 2 * nth, 1);
  commit_products();
}

// words[piece][half]: bytes of row 8 * half, inputs 16 * piece + lane % 4 * 4 + {0, 1, 2, 3} in their low halves, and
// 64 further in their high ones.
struct Codes {
  uint32 words[4][2], scales[2];

  // Of a step, of a stage that is there. Beyond the last step what was there before is read, and not used.
  __device__ __forceinline__ void read(const Scales &from, int stage, const Place &place, int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[2 * i][0]), "=r"(words[2 * i][1]), "=r"(words[2 * i + 1][0]), "=r"(words[2 * i + 1][1])
                   : "r"(place.codes[i] + stage * CODE_BYTES));
    from.get(step, scales);
  }
};

// The least power as scales keep it, 253 above its exponent, and twelve below the exponent of what becomes of it.
constexpr uint32 LOWEST = 253 - 26;
constexpr float UNIT = 1.0f / 4096;

// Operands of half a step: LOW or high codes. Bits of the numbers 0, 0.5, 1, 1.5 (`few`) and 2, 3, 4, 6 (`many`) times a
// power of two in e5m2 are a table of eight bytes; three bits of four codes select of it. Codes of two words are side by
// side in one, from which come bytes 0 and 2 of what belongs to the first, 1 and 3 to the second.
template <bool LOW>
__device__ __forceinline__ void decode_all(Half &a, const Codes &codes) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int nth = 0; nth < 2; ++nth) {
      const uint32 power = max(__byte_perm(codes.scales[half], 0, 0x4440 + (LOW ? nth : 2 + nth)), LOWEST);
      const uint32 few = power * 0x04040400u + (0x06040000u - LOWEST * 0x04040400u);
      const uint32 many = power * 0x04040404u + (0x0E0C0A08u - LOWEST * 0x04040404u);
      const uint32 first = codes.words[2 * nth][half], second = codes.words[2 * nth + 1][half];
      const uint32 low = LOW ? first : first >> 4, high = LOW ? second << 4 : second;
      const uint32 selected = (low & 0x07070707u) | (high & 0x70707070u);
      const uint32 ends = __byte_perm(few, many, selected), others = __byte_perm(few, many, selected >> 16);
      a[nth][half] = __byte_perm(ends, others, 0x6420) | ((LOW ? first << 4 : first) & 0x80808080u);
      a[nth][half + 2] = __byte_perm(ends, others, 0x7531) | (high & 0x80808080u);
    }
}

// A thread has sums[4 * j + 2 * half + i] of row 8 * j + lane % 4 * 2 + i of x.
__device__ __forceinline__ void scale_rows(const Call &call, float (&sums)[ROWS / 2], const Tile &tile) {
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile.first + 8 * j + threadIdx.x % 4 * 2 + i;
      const float scale = row < tile.last ? call.x_scales[row] * UNIT : 0.0f;
      sums[4 * j + i] *= scale, sums[4 * j + 2 + i] *= scale;
    }
}

// The stage of the next step's codes has been waited for, that of the step after it is. In the first step nothing is on
// its way: a wait there would let ptxas think that products of other loops may be, and keep their registers.
template <int N, bool IS_FIRST>
__device__ __forceinline__ void add_step(
    float (&sums)[ROWS / 2], Half &low, Half &high, Codes &codes, Window &window, const Place &place, Scales &scales,
    int step, int steps
) {
  uint64 rows = place.rows_of(window.at);
  if (!AHEAD) codes.read(scales, window.at, place, step);
  if (!IS_FIRST) wait_products<1>();  // those with low codes of the step before
  decode_all<true>(low, codes);
  multiply_half<N>(sums, low, rows);
  if (!IS_FIRST) {
    wait_products<1>();
    window.leave(window.before, place.leads);  // all products of the step before have ended
  }
  decode_all<false>(high, codes);
  if (AHEAD) codes.read(scales, window.next, place, step + 1);
  multiply_half<N>(sums, high, rows + 64 / 16);  // inputs 64 and on, as operands count
  if (AHEAD)
    window.await_further(step + 2 < steps);
  else
    window.await(window.next, step + 1 < steps);
  scales.advance(step + AHEAD);
  window.advance();
}

// The sums of a tile with at most N rows.
template <int N>
__device__ __forceinline__ void add_up(
    float (&sums)[ROWS / 2], Window &window, const Place &place, Scales &scales, int steps
) {
  Half low, high;
  Codes codes = {};
  if (AHEAD) {
    window.await(window.next, steps > 1);
    codes.read(scales, window.at, place, 0);
  }
  add_step<N, true>(sums, low, high, codes, window, place, scales, 0, steps);
#pragma unroll 1
  for (int step = 1; step < steps; ++step)
    add_step<N, false>(sums, low, high, codes, window, place, scales, step, steps);
  wait_products<0>();
  fence_sums(sums);
  window.leave(window.before, place.leads);
}

// The sums of a tile with at most N rows, or of one with more.
template <int N>
__device__ __forceinline__ void add_up_rows(
    float (&sums)[ROWS / 2], Window &window, const Place &place, Scales &scales, int rows, int steps
) {
  if constexpr (N < ROWS)
    if (rows > N) return add_up_rows<N + GRAIN>(sums, window, place, scales, rows, steps);
  add_up<N>(sums, window, place, scales, steps);
}

// The tile whose first stage comes next.
__device__ __forceinline__ void find_next(Tile &tile, const Window &window) {
  window.await(window.at, 1);
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile.expert), "=r"(tile.first), "=r"(tile.last), "=r"(tile.output)
               : "r"(notice_of(window.bars, window.at)) : "memory");
}

// Rows of the weight of this thread, 8 apart in a tile; -1 beyond the expert's.
struct Own {
  int rows[2];

  __device__ __forceinline__ Own(const Call &call, const Tile &tile) {
    int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int output = tile.output + (GATE ? warp * 8 + lane / 4 : warp * 16 + lane / 4 + 8 * half);
      int matrix = tile.expert * (GATE ? 2 : 1) + (GATE ? half : 0);
      rows[half] = output < call.outputs ? matrix * call.outputs + output : -1;
    }
  }
};

// The warps that multiply.
__device__ __forceinline__ void multiply_tiles(const Call &call, const Ring &ring) {
  int steps = (call.inputs + DEPTH - 1) / DEPTH;
  Window window(ring);
  Scales scales;
  Place place(ring);
  Tile tile, next;
  find_next(tile, window);
  if (tile.expert >= 0) scales.begin(call, Own(call, tile).rows, steps);
#pragma unroll 1
  for (; tile.expert >= 0; tile = next) {
    float sums[ROWS / 2] = {};
    // the same for the whole warp, which ptxas does not know
    int rows = __reduce_max_sync(~0u, tile.last - tile.first);
    add_up_rows<LEAST>(sums, window, place, scales, rows, steps);
    find_next(next, window);
    if (next.expert >= 0) scales.begin(call, Own(call, next).rows, steps);  // on their way while this tile ends
    scale_rows(call, sums, tile);
    finish<false>(call, sums, tile, Own(call, tile).rows, threadIdx.x / 32 - 4, call.outputs);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mxfp4_rounded(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap code_map,
    const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  Ring ring(storage);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 40 : 32));
    if (threadIdx.x < 32) fetch_tiles(call, &x_map, &code_map, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 232 : 112));
    multiply_tiles(call, ring);
  }
}
