// Products of tens of rows of x with integers of 4, 6 or 8 bits in tiles: out [M, N] = x [M, K] times the weight [N, K]
// transposed, or partial sums of shares of K. Codes are decoded once for all rows of a block.
//
// The layout of the weight is that of tiled_rows.cu. A block computes 16 outputs a warp and 8 * COLUMNS rows over a share
// of the inputs, CHUNK units at a time. Codes and scales of a warp's two eights of rows, and the inputs of the rows of x,
// come by asynchronous copies, STAGES chunks at a time; codes, which no kernel writes, before the previous kernel has
// ended. Codes become bfloat16 in registers, plus 128 where they have 4 bits, and are the left operand of mma.m16n8k16;
// sums of a group of inputs, less zero points times the sums of x, are multiplied by its scales in float32. Of super-blocks
// (super_blocks.cuh) they become the numbers of the weight, rounded once.
//
// Compiled by NVRTC for bfloat16 x. Macros: CODE 0 unsigned 4 bits, 3 int8, 4 uint8; PAIRS 1: scales are
// pairs of float16, with zero points, else float32; GROUP: inputs of a scale, 0: all; COLUMNS; WARPS; BLOCKS on a
// multiprocessor; CHUNK; STAGES. SUPER_FORM: 0, or the form of super-blocks, with CODE, PAIRS and GROUP 0.

#include "numbers.cuh"
#include "super_blocks.cuh"

constexpr bool SHORT = CODE == 0, CORRECTS = !SUPER_FORM && (SHORT || PAIRS);  // subtracts a multiple of the sum of x
constexpr int UNIT = SHORT ? 128 : 64, PLANES = SHORT ? 2 : 1;
constexpr int PIECE = GROUP == 32 ? 8 : 16, HALVES = 16 / PIECE;  // bytes that a thread reads at a time
constexpr int GROUPS = GROUP == 0 || GROUP >= UNIT ? 1 : UNIT / GROUP;  // scales of a unit
constexpr int QUANTUM = UNIT / GROUPS;                     // inputs whose sum is kept
constexpr int EACH = GROUP > UNIT ? GROUP / UNIT : 1;      // units that share a scale
constexpr int THREADS = 32 * WARPS;
constexpr float BASE = SHORT ? 128.f : 0.f;                // what decoded codes are more than the code
constexpr int ROWS = 8 * COLUMNS, CHUNK_INPUTS = CHUNK * UNIT, PITCH = CHUNK_INPUTS * 2 + 16;
constexpr int QUANTA = CHUNK * GROUPS;
constexpr int UNIT_BYTES = SUPER_FORM ? Supers<SUPER_FORM>::UNIT_BYTES : 512, SUPER_BYTES = Supers<SUPER_FORM>::TABLE_BYTES;
constexpr int TABLE = SUPER_FORM ? (CHUNK + 1) / 2 * SUPER_BYTES : GROUP ? (QUANTA + EACH - 1) / EACH * 32 : 0;  // of eight rows
constexpr int WARP_BYTES = 2 * (CHUNK * UNIT_BYTES + TABLE), X_BYTES = ROWS * PITCH;
constexpr int STAGE = WARPS * WARP_BYTES + X_BYTES;

struct Call {
  const uint16 *x, *bias;
  uint16 *out;
  float *parts;  // [splits, rows, columns] of partial sums, or null: of one split, to `out`
  const char *codes;
  const uint32 *scales;
  int64 x_stride;
  int rows, outputs, inputs, columns;  // columns: outputs of a row of `out` and of `parts`
  int units_each, splits, tiles;  // units of a split, a multiple of CHUNK; tiles of outputs come first in a block's
                                  // number, then splits, then tiles of rows
};

__device__ __forceinline__ uint32 find_address(const void *shared) {
  uint32 at;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(shared));
  return at;
}
__device__ __forceinline__ void copy16(uint32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// A word of codes to two pairs of bfloat16: inputs 0 and 1, 2 and 3. Of codes of 4 bits, bytes come as 0, 2, 1, 3.
__device__ __forceinline__ void decode(uint32 word, int plane, uint32 &low, uint32 &high) {
  if (SHORT) {
    uint32 first = plane ? word >> 4 : word;
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(low) : "r"(first));
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(high) : "r"(first >> 8));
  } else {
    const uint32 bits = CODE == 3 ? word ^ 0x80808080u : word;
    const float least = 8388608.f + (CODE == 3 ? 128.f : 0.f);
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __uint_as_float(__byte_perm(bits, 0x4B000000u, 0x7650 + i)) - least;
    low = narrow(v[0], v[1]), high = narrow(v[2], v[3]);
  }
}

// Ask for the codes and scales of a warp's eights.
__device__ __forceinline__ void fetch_codes(
    const Call &call, uint32 stage, int tile, int first, int units, int groups) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 own = stage + warp * WARP_BYTES;
  const int last = (call.outputs - 1) >> 3;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int64 eight = min(tile * (2 * WARPS) + 2 * warp + i, last);
    const char *from = call.codes + (eight * units + first) * UNIT_BYTES;
#pragma unroll
    for (int u = 0; u < CHUNK; u++) {
#pragma unroll
      for (int at = lane * 16; at < UNIT_BYTES; at += 512)
        if (first + u < units) copy16(own + (i * CHUNK + u) * UNIT_BYTES + at, from + u * UNIT_BYTES + at);
    }
    if (GROUP || SUPER_FORM) {
      const int64 whole = SUPER_FORM ? int64(units / 2) * SUPER_BYTES : groups * 32;  // of eight rows
      const int begin = SUPER_FORM ? first / 2 * SUPER_BYTES : first * GROUPS / EACH * 32;
      const char *table = (const char *)call.scales + eight * whole + begin;
      for (int at = lane * 16; at < min(int64(TABLE), whole - begin); at += 512)
        copy16(own + 2 * CHUNK * UNIT_BYTES + i * TABLE + at, table + at);
    }
  }
}

// Ask for the inputs of the rows of x from `row` on.
__device__ __forceinline__ void fetch_rows(const Call &call, uint32 stage, int row, int first) {
  const uint32 to = stage + WARPS * WARP_BYTES;
#pragma unroll
  for (int at = threadIdx.x; at < ROWS * CHUNK_INPUTS / 8; at += THREADS) {
    const int m = at / (CHUNK_INPUTS / 8), k = at % (CHUNK_INPUTS / 8) * 8;
    if (first * UNIT + k < call.inputs)
      copy16(to + m * PITCH + k * 2, call.x + min(row + m, call.rows - 1) * call.x_stride + first * UNIT + k);
  }
}

// Sums of each row's quanta of a chunk, [ROWS, QUANTA]: a thread adds up SPAN inputs.
__device__ __forceinline__ void add_rows(const char *x, float *sums) {
  constexpr int SPAN = QUANTUM < 32 ? QUANTUM : 32, SHARE = QUANTUM / SPAN;
#pragma unroll
  for (int at = threadIdx.x; at < ROWS * CHUNK_INPUTS / SPAN; at += THREADS) {
    const int m = at / (CHUNK_INPUTS / SPAN), k = at % (CHUNK_INPUTS / SPAN) * SPAN;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < SPAN / 8; i++) {
      const uint4 v = *(const uint4 *)(x + m * PITCH + (k + i * 8) * 2);
      sum += widen(v.x) + __uint_as_float(v.x & 0xffff0000u) + widen(v.y) + __uint_as_float(v.y & 0xffff0000u);
      sum += widen(v.z) + __uint_as_float(v.z & 0xffff0000u) + widen(v.w) + __uint_as_float(v.w & 0xffff0000u);
    }
#pragma unroll
    for (int step = SHARE / 2; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (at % SHARE == 0) sums[m * QUANTA + k / QUANTUM] = sum;
  }
}

// `total` plus the products of a unit, whose codes lie at `codes` and scales at `table` for a warp's first eight rows.
__device__ __forceinline__ void add_supers(
    float (*total)[4], const char *codes, const char *table, const char *x, bool odd, int quad, int part) {
  SuperCodes<SUPER_FORM> own[2];
  SuperScales<SUPER_FORM> scales[2];
  SuperNumbers<SUPER_FORM> numbers[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    own[i].load(codes + i * CHUNK * UNIT_BYTES, quad, part);
    scales[i].load(table + i * TABLE, quad, part, odd);
  }
#pragma unroll
  for (int plane = 0; plane < 2; plane++) {
#pragma unroll
    for (int i = 0; i < 2; i++) numbers[i].set(scales[i], plane);
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      uint32 a[2][4];
#pragma unroll
      for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) numbers[i].decode(own[i], plane, 2 * pair + j, a[j][i], a[j][2 + i]);
      }
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const uint4 b = *(const uint4 *)(x + (8 * c + quad) * PITCH + (plane * 64 + part * 16 + pair * 8) * 2);
        multiply(total[c], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
        multiply(total[c], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tiled_block(const Call call) {
  extern __shared__ __align__(128) char memory[];
  __shared__ float sums[2][ROWS * QUANTA];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, part = lane % 4;
  const int units = call.inputs / UNIT, groups = GROUP == 0 ? 0 : (units * GROUPS + EACH - 1) / EACH;
  const int tile = blockIdx.x % call.tiles, split = blockIdx.x / call.tiles % call.splits;
  const int row = blockIdx.x / call.tiles / call.splits * ROWS, begin = split * call.units_each;
  const int chunks = (min(units - begin, call.units_each) + CHUNK - 1) / CHUNK;
  const uint32 base = find_address(memory);
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < chunks) fetch_codes(call, base + s * STAGE, tile, begin + s * CHUNK, units, groups);
  }
  commit();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < chunks) fetch_rows(call, base + s * STAGE, row, begin + s * CHUNK);
    commit();
  }
  const int output = (tile * WARPS + warp) * 16 + quad;
  uint32 whole[2] = {0, 0};
  if (GROUP == 0 && !SUPER_FORM) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      whole[i] = __ldg(call.scales + min(output + 8 * i, ((call.outputs + 7) & ~7) - 8 + quad));
  }
  float total[COLUMNS][4] = {};
  int slot = 0;
  for (int chunk = 0; chunk < chunks; chunk++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    const int next = chunk + STAGES - 1;
    if (next < chunks) {
      const uint32 to = base + (slot == 0 ? STAGES - 1 : slot - 1) * STAGE;
      fetch_codes(call, to, tile, begin + next * CHUNK, units, groups);
      fetch_rows(call, to, row, begin + next * CHUNK);
    }
    commit();
    const char *stage = memory + slot * STAGE, *x = stage + WARPS * WARP_BYTES;
    if (CORRECTS) {
      add_rows(x, sums[chunk & 1]);
      __syncthreads();
    }
    const char *own = stage + warp * WARP_BYTES;
#pragma unroll
    for (int u = 0; u < CHUNK; u++) {
      const int unit = begin + chunk * CHUNK + u;
      if (unit >= units) break;
      if (SUPER_FORM) {
        const char *table = own + 2 * CHUNK * UNIT_BYTES + (unit / 2 - (unit - u) / 2) * SUPER_BYTES;
        add_supers(total, own + u * UNIT_BYTES, table, x + u * UNIT * 2, unit & 1, quad, part);
        continue;
      }
      uint32 words[2][4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
          const char *from = own + (i * CHUNK + u) * UNIT_BYTES + quad * 64 + h * 32 + part * PIECE;
          if (PIECE == 16)
            *(uint4 *)words[i] = *(const uint4 *)from;
          else
            *(uint2 *)&words[i][2 * h] = *(const uint2 *)from;
          if (SHORT) {
#pragma unroll
            for (int j = 0; j < PIECE / 4; j++) {
              uint32 &word = words[i][h * (PIECE / 4) + j];
              word = __byte_perm(word, 0, 0x3120);
            }
          }
        }
      }
      float sum[COLUMNS][4] = {};
#pragma unroll
      for (int plane = 0; plane < PLANES; plane++) {
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
#pragma unroll
          for (int pair = 0; pair < PIECE / 8; pair++) {
            uint32 a[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++) {
              const int word = h * (PIECE / 4) + pair * 2 + j;
              decode(words[0][word], plane, a[j][0], a[j][2]);
              decode(words[1][word], plane, a[j][1], a[j][3]);
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
              const uint4 b = *(const uint4 *)(
                  x + (8 * c + quad) * PITCH + (u * UNIT + plane * 64 + h * 32 + part * PIECE + pair * 8) * 2);
              multiply(sum[c], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
              multiply(sum[c], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
            }
          }
          const bool ends = GROUPS > PLANES || (h == HALVES - 1 && (GROUPS == PLANES || plane == PLANES - 1));
          if (!ends) continue;
          const int group = GROUPS == 1 ? 0 : plane * (GROUPS / PLANES) + (GROUPS == PLANES ? 0 : h);
          const uint32 *table = (const uint32 *)(own + 2 * CHUNK * UNIT_BYTES) + (u * GROUPS / EACH + group) * 8 + quad;
          float scale[2], zero[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const uint32 word = GROUP ? table[i * (TABLE / 4)] : whole[i];
            scale[i] = PAIRS ? half_of(word, false) : __uint_as_float(word);
            zero[i] = BASE + (PAIRS ? half_of(word, true) : 0.f);
          }
#pragma unroll
          for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const int quantum = (8 * c + part * 2 + e) * QUANTA + u * GROUPS + group;
              const float own_sum = CORRECTS ? sums[chunk & 1][quantum] : 0.f;
#pragma unroll
              for (int i = 0; i < 2; i++) {
                const float product = sum[c][2 * i + e];
                total[c][2 * i + e] += scale[i] * (CORRECTS ? product - zero[i] * own_sum : product);
                sum[c][2 * i + e] = 0.f;
              }
            }
          }
        }
      }
    }
    if (++slot == STAGES) slot = 0;
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int m = row + 8 * c + part * 2 + e % 2, n = output + 8 * (e / 2);
      if (m >= call.rows || n >= call.outputs) continue;
      const int64 at = int64(m) * call.columns + n;
      if (call.parts)
        call.parts[int64(split) * call.rows * call.columns + at] = total[c][e];
      else
        call.out[at] = uint16(narrow(total[c][e] + (call.bias ? widen(call.bias[n]) : 0.f), 0.f));
    }
  }
}
