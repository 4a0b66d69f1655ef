// Products of plain rows and experts in MXFP4 on Hopper: rows x [M, K] in bfloat16, sorted by expert, times that
// expert's weight [N, K]: e2m1 codes, two to a byte, with a power of two per 32 inputs. With a gate, the activation of
// its two halves. Sums are float32 in a fixed order, the same whatever the rows beside a row.
//
// Of each 16 inputs of x the even ones come first, then the odd ones: a thread then finds two codes of one operand a
// byte apart in the four bytes that `ldmatrix` brings. With a gate, outputs are stored in the same order, for the next
// product.
//
// A block is persistent and takes tiles of 64 * GROUPS of the weight's rows by ROWS rows of x. Its first warp finds them
// and asks the copy engine (TMA) for codes and rows of 128 inputs into a ring of STAGES. The other GROUPS warpgroups
// decode 64 rows of codes each to operands of wgmma in registers; x comes from shared memory. While products with low
// codes of the bytes (inputs 0 to 63) run, high ones (64 to 127) are decoded, and the other way round. An expert's rows
// are divided evenly among as few tiles as hold them, and a tile is multiplied with LEAST rows or some steps more;
// boxes of BOX rows that it does not have are not copied. With two groups, two blocks of a cluster share rows of x.
//
// Macros: ROWS (a multiple of 16 up to 64, of 32 up to 256), GROUPS (2 or 4; ROWS * GROUPS at most 512), STAGES, BOX (a
// divisor of ROWS and a multiple of GRAIN, or ROWS), GATE (0, or a kind of activation: a tile then has half as many
// outputs, its rows alternate 8 of gate, 8 of up). Compiled by NVRTC. How many experts there are is not a macro: ptxas
// compiles products differently for code that is far from them.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE;
constexpr uint32 X_BYTES = ROWS * DEPTH * 2, CODE_BYTES = WIDE * DEPTH / 2;
constexpr int THREADS = 128 * (GROUPS + 1);

struct Call {
  const uint32 *scales;  // [rows of the weight, words]: a byte for each 32 inputs, as `DeviceCodes` keeps powers of two
  const uint16 *bias;    // [rows of the weight] bfloat16, or null
  const int *ends;       // [experts]
  uint16 *out;           // [M, N] bfloat16
  int outputs, inputs, words, experts;  // N (after the activation), K
  float limit, alpha, up_offset;
};

#define EXPERTS call.experts
#include "weight_operand.cuh"
#include "sorted_experts.cuh"
#include "weight_rows.cuh"
#include "mxfp4_steps.cuh"

constexpr int PRODUCTS = 4;  // of 16 inputs each in half a step
constexpr uint32 HIGH = X_BYTES / 2 / 16;  // from inputs 0 to 64 of a stage, as operands count
constexpr int SIDES = 2;
constexpr bool EVENS_FIRST = true;
constexpr bool SHIFTS = true;  // codes of odd inputs to where those of even ones are
#include "mxfp4_sums.cuh"

// Operands of half a step: LOW or high codes. Two codes are spread to the halves of a register, multiplied by
// 2**12 + 2**6 (high codes: 2**8 + 2**2), which puts the sign at bit 15 and the rest at bits 8 to 6, and cleared of
// other bits: bfloat16 numbers 2**126 too small, which the powers make good.
template <bool LOW>
__device__ __forceinline__ void decode_all(Half &a, const Codes &codes) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // a step's four scales as exponents of bfloat16: inputs 0 and 64 on, 32 and 96 on
    uint32 pairs[2] = {(codes.scales[half] * 128) & 0x7F807F80u, (codes.scales[half] >> 1) & 0x7F807F80u}, powers[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) powers[i] = __byte_perm(pairs[i], 0, LOW ? 0x1010 : 0x3232);
#pragma unroll
    for (int piece = 0; piece < 4; ++piece)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        uint32 word = odd ? codes.odd[piece][half] : codes.words[piece][half];
        uint32 bits = LOW ? (word & 0x000F000Fu) * 0x1040u : (word & 0x00F000F0u) * 0x0104u;
        bits &= 0x81C081C0u;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(a[piece][half + 2 * odd]) : "r"(bits), "r"(powers[piece / 2]));
      }
  }
}

template <int N>
__device__ __forceinline__ void scale_rows(const Call &, float (&)[N / 2], const Tile &) {}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) mxfp4_product(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap code_map,
    const __grid_constant__ Call call
) {
  run_block(call, &x_map, &code_map);
}
