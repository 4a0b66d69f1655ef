// Products of plain rows and experts in MXFP4 on Hopper: rows x [M, K] in bfloat16, sorted by expert, times that
// expert's weight [N, K]: e2m1 codes, two to a byte, with a power of two per 32 inputs. With a gate, the activation of
// its two halves. Sums are float32 in a fixed order, the same whatever the rows beside a row.
//
// A block is persistent and takes tiles of 64 * GROUPS of the weight's rows by ROWS rows of x. Its first warp asks the
// copy engine (TMA) for codes and rows of 128 inputs into a ring of STAGES. The other GROUPS warpgroups decode 64 rows
// of codes each to operands of wgmma in registers; x comes from shared memory. While products with low codes of the
// bytes (inputs 0 to 63) run, high ones (64 to 127) are decoded, and the other way round.
//
// Macros: ROWS (16, 32, 48, 64, 96, 128, 256), GROUPS (2 or 4; ROWS * GROUPS at most 512), STAGES, GATE (0, or a kind of
// activation: a tile then has half as many outputs, its rows alternate 8 of gate, 8 of up), EXPERTS (their number).
// Compiled by NVRTC.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE;
constexpr uint32 X_BYTES = ROWS * DEPTH * 2, CODE_BYTES = WIDE * DEPTH / 2, STAGE_BYTES = X_BYTES + CODE_BYTES;
constexpr int THREADS = 128 * (GROUPS + 1);

struct Call {
  const uint32 *scales;  // [rows of the weight, words]: a byte for each 32 inputs, as `DeviceCodes` keeps powers of two
  const uint16 *bias;  // [rows of the weight] bfloat16, or null
  const int *ends;    // [EXPERTS]
  uint16 *out;           // [M, N] bfloat16
  int outputs, inputs, words;  // N (after the activation), K
  float limit, alpha, up_offset;
};

#include "weight_operand.cuh"
#include "sorted_experts.cuh"
#include "weight_rows.cuh"

// Two bytes of codes to bfloat16 numbers times a power of two: LOW or high codes. Two codes are spread to the halves of
// a register, multiplied by 2**12 + 2**6 (high codes: 2**8 + 2**2), which puts the sign at bit 15 and the rest at bits 8
// to 6, and cleared of other bits: bfloat16 numbers 2**126 too small, which the powers make good.
template <bool LOW>
__device__ __forceinline__ uint32 decode(uint32 spread, uint32 powers) {
  uint32 bits = LOW ? (spread & 0x000F000Fu) * 0x1040u : (spread & 0x00F000F0u) * 0x0104u;
  bits &= 0x81C081C0u;
  uint32 numbers;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(numbers) : "r"(bits), "r"(powers));
  return numbers;
}

// Operands of half a stage: codes[piece][2 * h + half] are the bytes of row 8 * half, inputs 16 * piece + 8 * h and on.
template <bool LOW>
__device__ __forceinline__ void decode_all(uint32 (&a)[4][4], const uint32 (&codes)[4][4], const uint32 (&words)[2]) {
  uint32 powers[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32 byte = words[half] >> (8 * i + (LOW ? 0 : 16)) & 255;
      powers[half][i] = byte * 0x00800080u;  // exponents of two bfloat16
    }
#pragma unroll
  for (int piece = 0; piece < 4; ++piece)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[piece][i] = decode<LOW>(codes[piece][i], powers[i % 2][piece / 2]);
}

__device__ __forceinline__ void multiply_half(
    float (&sums)[ROWS / 2], const uint32 (&a)[4][4], uint64 rows, bool adds
) {
  begin_products();
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) multiply(sums, a[piece], rows + 2 * piece, adds || piece > 0);
  commit_products();
}

__device__ __forceinline__ void add_up(
    const Call &call, float (&sums)[ROWS / 2], const int (&own)[2], uint32 row, Ring &ring
) {
  int steps = (call.inputs + DEPTH - 1) / DEPTH, before = 0, lane = threadIdx.x % 32;
  // rows of 64 bytes, swizzled by 64 bytes: the 16 bytes of inputs 16 * piece and on are exchanged by row / 2 % 4
  uint32 at = ring.code_tiles + row * 64 + lane % 4 * 2, turned = row / 2 % 4 * 16;
  uint32 low[4][4], high[4][4];
  const uint32 *tables[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) tables[half] = call.scales + (uint64)max(own[half], 0) * call.words;
  uint32 next[2] = {tables[0][0], tables[1][0]}, later[2] = {0, 0};
  if (steps > 1) later[0] = tables[0][1], later[1] = tables[1][1];
  for (int step = 0; step < steps; ++step) {
    uint32 words[2] = {next[0], next[1]};
    next[0] = later[0], next[1] = later[1];
    if (step + 2 < steps) later[0] = tables[0][step + 2], later[1] = tables[1][step + 2];
    wait_for(ring.bars + 16 * ring.stage, ring.phase);
    uint32 codes[4][4], place = at + ring.stage * CODE_BYTES;
#pragma unroll
    for (int piece = 0; piece < 4; ++piece)
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows differ by 8, which changes no swizzle
        uint16 bytes;
        uint32 from = place + (piece * 16 ^ turned) + i % 2 * 512 + i / 2 * 8;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(from));
        codes[piece][i] = __byte_perm(bytes, 0, 0x4140);
      }
    uint64 rows = describe_operand(ring.x_tiles + ring.stage * X_BYTES);
    wait_products<1>();  // those with the low codes of the step before
    decode_all<true>(low, codes, words);
    multiply_half(sums, low, rows, step > 0);
    wait_products<1>();
    if (step && lane == 0) arrive(ring.bars + 16 * before + 8);  // all products of the step before have ended
    decode_all<false>(high, codes, words);
    multiply_half(sums, high, rows + X_BYTES / 2 / 16, true);
    before = ring.stage;
    ring.advance();
  }
  wait_products<0>();
  fence_sums(sums);
  if (lane == 0) arrive(ring.bars + 16 * before + 8);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mxfp4_product(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap code_map,
    const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  Ring ring(storage);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 40 : 32));
    if (threadIdx.x < 32) fetch_tiles<DEPTH / 2, 2>(call, &x_map, &code_map, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 232 : 112));
    multiply_tiles(call, [&](float (&sums)[ROWS / 2], const Tile &tile, const int (&own)[2], uint32 row) {
      add_up(call, sums, own, row, ring);
    });
  }
}
