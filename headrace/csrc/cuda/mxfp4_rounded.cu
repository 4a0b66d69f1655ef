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
// are divided evenly among as few tiles as hold them, and a tile is multiplied with LEAST rows or some steps more;
// boxes of BOX rows that it does not have are not copied. With two groups, two blocks of a cluster share rows of x.
//
// Macros: FP8 (1, for weight_operand.cuh), ROWS (a multiple of 16 up to 64, of 32 up to 256), GROUPS (2 or 4; ROWS *
// GROUPS at most 512), STAGES, BOX (a divisor of ROWS and a multiple of GRAIN, or ROWS), GATE (0, or a kind of
// activation: a tile then has half as many outputs, its rows alternate 8 of gate, 8 of up). Compiled by NVRTC.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE;
constexpr uint32 X_BYTES = ROWS * DEPTH, CODE_BYTES = WIDE * DEPTH / 2;
constexpr int THREADS = 128 * (GROUPS + 1);

struct Call {
  const uint32 *scales;  // [rows of the weight, words]: a byte for each 32 inputs, as `DeviceCodes` keeps powers of two
  const uint16 *bias;    // [rows of the weight] bfloat16, or null
  const int *ends;       // [experts]
  uint16 *out;           // [M, N] bfloat16
  int outputs, inputs, words, experts;  // N (after the activation), K
  float limit, alpha, up_offset;
  const float *x_scales;  // [M]
};

#define EXPERTS call.experts
#include "weight_operand.cuh"
#include "sorted_experts.cuh"
#include "weight_rows.cuh"
#include "mxfp4_steps.cuh"

constexpr int PRODUCTS = 2;  // of 32 inputs each in half a step
constexpr uint32 HIGH = 64 / 16;  // from inputs 0 to 64 of a stage, as operands count
constexpr int SIDES = 1;
constexpr bool EVENS_FIRST = false;
constexpr bool SHIFTS = false;  // all four bytes of a word are decoded at once
#include "mxfp4_sums.cuh"

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

template <int N>
__device__ __forceinline__ void scale_rows(const Call &call, float (&sums)[N / 2], const Tile &tile) {
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile.first + 8 * j + threadIdx.x % 4 * 2 + i;
      const float scale = call.x_scales[min(row, tile.last - 1)] * UNIT;
      sums[4 * j + i] *= scale, sums[4 * j + 2 + i] *= scale;
    }
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) mxfp4_rounded(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap code_map,
    const __grid_constant__ Call call
) {
  run_block(call, &x_map, &code_map);
}
