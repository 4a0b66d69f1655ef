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

constexpr int PRODUCTS = 2;  // of 32 inputs each in half a step
constexpr uint32 HIGH = 64 / 16;  // from inputs 0 to 64 of a stage, as operands count
constexpr bool SHIFTS = false;  // all four bytes of a word are decoded at once
#include "mxfp4_sums.cuh"

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

// The tile whose first stage comes next.
__device__ __forceinline__ void find_next(Tile &tile, const Window &window) {
  window.await(window.at, 1);
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile.expert), "=r"(tile.first), "=r"(tile.last), "=r"(tile.output)
               : "r"(notice_of(window.bars, window.at)) : "memory");
}

// The warps that multiply.
__device__ __forceinline__ void multiply_tiles(const Call &call, const Ring &ring) {
  int steps = (call.inputs + DEPTH - 1) / DEPTH;
  Window window(ring);
  Scales scales;
  Place place(ring);
  Tile tile, next;
  int own[2];
  find_next(tile, window);
  if (tile.expert >= 0) find_rows(call, tile, own), scales.begin(call, own, steps);
#pragma unroll 1
  for (; tile.expert >= 0; tile = next) {
    float sums[ROWS / 2] = {};
    // the same for the whole warp, which ptxas does not know
    int rows = __reduce_max_sync(~0u, tile.last - tile.first);
    add_up_rows<LEAST>(sums, window, place, scales, rows, steps);
    find_next(next, window);
    if (next.expert >= 0) find_rows(call, next, own), scales.begin(call, own, steps);  // on their way while this tile ends
    scale_rows(call, sums, tile);
    find_rows(call, tile, own);
    finish<false>(call, sums, tile, own, threadIdx.x / 32 - 4, call.outputs);
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
