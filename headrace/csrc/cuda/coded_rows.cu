// Products of few rows of x with a weight in codes: out [M, N] = x [M, K] times the weight [N, K] transposed, also with
// the norm before it or the gated activation after it. Bound by reading the weight once.
//
// A warp takes 16 rows of the weight and units of 64 bytes of each: codes become bfloat16 in registers and are the left
// operand of mma.m16n8k16, rows of x the right one. Which inputs a thread holds does not matter as long as both
// operands agree, so a thread reads 16 bytes that lie next to one another (8 where 32 inputs share a scale), and x is
// put into shared memory in the order in which codes come out of a word. The warps of a block share the units of a tile
// of 16 rows and add up their sums in a fixed order. Blocks are persistent; a warp always has DEPTH steps of codes on
// their way, the first of which it asks for before the previous kernel has ended.
//
// Layouts are those of `DeviceCodes`: of codes of 4 bits a byte has input b in its low half and input b + 64 in its
// high half; scales are float32, pairs of a float16 scale and zero point, or powers of two.
//
// Compiled by NVRTC for bfloat16 x. Macros: CODE 0 unsigned 4 bits, 1 e4m3, 2 e2m1, 3 int8, 4 uint8;
// TABLE 0 float32, 1 pairs, 2 powers; ZEROS 1: float32 zero points; GROUP inputs of a scale, 0: all; VECTOR 1: a unit's
// scales are aligned to their size; WARPS, BLOCKS on a multiprocessor, DEPTH.

#include "numbers.cuh"

constexpr bool SHORT = CODE == 0 || CODE == 2;
constexpr bool POWERS = TABLE == 2, PAIRS = TABLE == 1;
constexpr bool HAS_ZEROS = PAIRS || ZEROS;
constexpr bool CORRECTS = CODE == 0 || HAS_ZEROS;          // subtracts a multiple of the sum of x
constexpr bool AT_END = GROUP == 0 && !CORRECTS;           // one scale for a row, applied to its sum
constexpr int UNIT = SHORT ? 128 : 64;                     // inputs of 64 bytes
constexpr int PIECE = GROUP == 32 && !POWERS ? 8 : 16;     // bytes that a thread reads at a time
constexpr int HALVES = 16 / PIECE, PLANES = SHORT ? 2 : 1; // low and high codes of bytes
constexpr int GROUPS = POWERS || GROUP == 0 || GROUP >= UNIT ? 1 : UNIT / GROUP;  // scales of a unit
constexpr int QUANTUM = UNIT / GROUPS;                     // inputs whose sum is kept
constexpr int WORDS = AT_END ? 0 : GROUPS;
constexpr int THREADS = 32 * WARPS, RED = 20;              // floats of a column of partial sums: no bank conflicts
// numbers of x are multiplied by this, so that products with lifted codes are normal numbers
constexpr bool LIFTED = CODE == 1 || (CODE == 2 && !POWERS);
constexpr float X_LIFT = LIFTED ? 18446744073709551616.f : 1.f;                           // 2**64
constexpr float LIFT = CODE == 1 ? 72057594037927936.f : LIFTED ? 4611686018427387904.f : 1.f;  // 2**56, 2**62
constexpr float BASE = CODE == 0 ? 128.f : 0.f;            // what decoded codes are more than the code

struct Call {
  const uint16 *x, *residual, *norm, *bias;
  uint16 *out, *total;
  const char *codes, *scales;
  const float *zeros;
  int64 x_stride, residual_stride, row_bytes;
  int rows, outputs, inputs, table, shared;  // table: words of scales of a row
  int padded;  // bytes of a row of x in shared memory
  int gate;  // 0 none, 1 silu, 2 gelu_tanh, 3 clamped; the weight then has `outputs` rows of gate, then of up
  float eps, offset, limit, alpha, up_offset;
};

struct Stage {
  uint32 codes[2][4];
  uint32 scales[2][WORDS ? WORDS : 1];
  float zeros[2][!PAIRS && ZEROS && WORDS ? WORDS : 1];
};

__device__ __forceinline__ void read_codes(uint32 *to, const char *from) {
  if (PIECE == 16)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
  else
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}

// Scales of a unit, of which a row may have but `left`.
__device__ __forceinline__ void read_words(uint32 *to, const uint32 *from, int left) {
  if (VECTOR && WORDS == 4) {
    uint4 v = __ldg((const uint4 *)from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if (VECTOR && WORDS == 2) {
    uint2 v = __ldg((const uint2 *)from);
    to[0] = v.x, to[1] = v.y;
  } else {
#pragma unroll
    for (int q = 0; q < WORDS; q++) to[q] = q < left ? __ldg(from + q) : 0;
  }
}

// A word of codes to two pairs of bfloat16: inputs 0 and 2, 1 and 3.
__device__ __forceinline__ void decode(uint32 word, int plane, uint32 power, uint32 &even, uint32 &odd) {
  if (CODE == 0) {
    uint32 low = plane ? word >> 4 : word, high = low >> 8;
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(even) : "r"(low));
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(odd) : "r"(high));
  } else if (CODE == 1) {
    even = ((word << 4) & 0x07F007F0u) | ((word << 8) & 0x80008000u);
    odd = ((word >> 4) & 0x07F007F0u) | (word & 0x80008000u);
  } else if (CODE == 2) {
    uint32 next = word >> 8, mask = plane ? 0x00F000F0u : 0x000F000Fu, spread = plane ? 0x0104u : 0x1040u;
    even = ((word & mask) * spread) & 0x81C081C0u;
    odd = ((next & mask) * spread) & 0x81C081C0u;
    if (POWERS) {
      asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(even) : "r"(power));
      asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(odd) : "r"(power));
    }
  } else {
    uint32 bits = CODE == 3 ? word ^ 0x80808080u : word;
    const float least = 8388608.f + (CODE == 3 ? 128.f : 0.f);
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __uint_as_float(__byte_perm(bits, 0x4B000000u, 0x7650 + i)) - least;
    even = narrow(v[0], v[2]), odd = narrow(v[1], v[3]);
  }
}

// x (or, with a norm, x plus the residual, times the norm's weight) to shared memory: of each four inputs 0, 2, 1, 3.
// `sums` [M, quanta] of them; `squares` [M, WARPS].
__device__ __forceinline__ void stage_rows(const Call &call, char *x, float *sums, float *squares, int quanta) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = quanta * QUANTUM;
  for (int m = 0; m < call.rows; m++) {
    float square = 0.f;
    for (int at = threadIdx.x * 8; at - lane * 8 < width; at += THREADS * 8) {
      uint32 v[4] = {0, 0, 0, 0};
      float sum = 0.f;
      if (at < call.inputs) {
        *(uint4 *)v = *(const uint4 *)(call.x + m * call.x_stride + at);
        uint32 r[4], w[4];
        if (call.norm) {
          *(uint4 *)r = *(const uint4 *)(call.residual + m * call.residual_stride + at);
          *(uint4 *)w = *(const uint4 *)(call.norm + at);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float low = widen(v[i]), high = __uint_as_float(v[i] & 0xffff0000u);
          if (call.norm) {
            v[i] = narrow(low + widen(r[i]), high + __uint_as_float(r[i] & 0xffff0000u));
            r[i] = v[i];
            low = widen(v[i]), high = __uint_as_float(v[i] & 0xffff0000u);
            square += low * low + high * high;
            low *= widen(w[i]) + call.offset, high *= __uint_as_float(w[i] & 0xffff0000u) + call.offset;
          }
          if (X_LIFT != 1.f || call.norm) v[i] = narrow(low * X_LIFT, high * X_LIFT);
          if (CORRECTS) sum += widen(v[i]) + __uint_as_float(v[i] & 0xffff0000u);
        }
        if (call.norm && blockIdx.x == 0) *(uint4 *)(call.total + int64(m) * call.inputs + at) = *(uint4 *)r;
      }
      if (at < width) {
        uint4 put = {__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[0], v[1], 0x7632),
                     __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[2], v[3], 0x7632)};
        *(uint4 *)(x + m * call.padded + at * 2) = put;
      }
      if (CORRECTS) {
#pragma unroll
        for (int step = QUANTUM / 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        if (at < width && lane % (QUANTUM / 8) == 0) sums[m * quanta + at / QUANTUM] = sum;
      }
    }
    if (call.norm) {
#pragma unroll
      for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
      if (lane == 0) squares[m * WARPS + warp] = square;
    }
  }
}

struct Place {  // of a thread; and sizes of the whole call
  int warp, quad, part;  // of a warp's 8 quads of 4 threads
  int units, steps, tiles, tile_shift;
  const char *x;  // in shared memory, like the sums of quanta of x, squares for the norm, and partial sums
  float *sums, *squares, *parts;
};

__device__ __forceinline__ Place find_place(const Call &call, char *memory) {
  Place p;
  const int lane = threadIdx.x % 32;
  p.warp = threadIdx.x / 32, p.quad = lane / 4, p.part = lane % 4;
  p.units = (call.inputs + UNIT - 1) / UNIT;
  p.steps = (p.units + WARPS - 1) / WARPS;
  p.tile_shift = call.gate ? 3 : 4;
  p.tiles = ((call.outputs - 1) >> p.tile_shift) + 1;
  p.x = memory;
  p.sums = (float *)(memory + call.rows * call.padded);
  p.squares = p.sums + (CORRECTS ? call.rows * p.units * GROUPS : 0);
  p.parts = p.squares + (call.norm ? call.rows * WARPS : 0);  // [2, WARPS, columns, RED]
  return p;
}

struct Reader {  // where a warp reads next
  int tile, step;
  const char *codes[2];
  int64 table[2];
};

// The first word of a row's scales.
__device__ __forceinline__ int64 find_table(const Call &call, int64 row) {
  return int64(call.shared == 1 ? uint32(row) : uint32(row) / uint32(call.shared)) * call.table;
}

// Rows of the weight that this thread's quad reads for a tile of outputs.
__device__ __forceinline__ void locate(Reader &reader, const Call &call, const Place &p) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int output = min((reader.tile << p.tile_shift) + p.quad + (call.gate ? 0 : 8 * i), call.outputs - 1);
    const int64 row = output + (call.gate ? i * call.outputs : 0);
    reader.codes[i] = call.codes + row * call.row_bytes + p.part * PIECE;
    reader.table[i] = find_table(call, row);
  }
}

// Ask for the next step's codes and scales.
__device__ __forceinline__ void fetch(Stage &stage, Reader &reader, const Call &call, const Place &p) {
  const int unit = p.warp + reader.step * WARPS;
  if (reader.tile < p.tiles && unit < p.units) {
    if (reader.step == 0) locate(reader, call, p);
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        uint32 *to = stage.codes[i] + h * (PIECE / 4);
        const int byte = unit * 64 + h * 32;
        if (SHORT || byte + p.part * PIECE < call.inputs)
          read_codes(to, reader.codes[i] + byte);
        else
          for (int j = 0; j < PIECE / 4; j++) to[j] = 0;
      }
      if (WORDS) {
        const int first = POWERS ? unit : GROUP == 0 ? 0 : GROUP >= UNIT ? unit * UNIT / GROUP : unit * GROUPS;
        const int64 word = reader.table[i] + first;
        read_words(stage.scales[i], (const uint32 *)call.scales + word, call.table - first);
        if (ZEROS && !PAIRS)
          read_words((uint32 *)stage.zeros[i], (const uint32 *)call.zeros + word, call.table - first);
      }
    }
  }
  if (++reader.step == p.steps) reader.step = 0, reader.tile += gridDim.x;
}

// `total` plus a group's `sum`, less its zero points times the sum of x, times its scales; `sum` becomes zero.
__device__ __forceinline__ void add_group(
    float *total, float *sum, const Stage &stage, const Call &call, const Place &p, int unit, int group) {
  float x_sums[2] = {0.f, 0.f};
  if (CORRECTS) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int m = min(p.part * 2 + c, call.rows - 1);
      x_sums[c] = p.sums[(m * p.units + unit) * GROUPS + group];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32 raw = stage.scales[i][WORDS ? group : 0];
    const float scale = PAIRS ? half_of(raw, false) : __uint_as_float(raw);
    const float own = PAIRS ? half_of(raw, true) : ZEROS ? stage.zeros[i][ZEROS && !PAIRS && WORDS ? group : 0] : 0.f;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float more = CORRECTS ? sum[2 * i + c] - (BASE + own) * x_sums[c] : sum[2 * i + c];
      total[2 * i + c] += scale * more;
      sum[2 * i + c] = 0.f;
    }
  }
}

// `total` plus a unit's products. Of sums, rows of the weight are i / 2, columns (rows of x) i % 2.
__device__ __forceinline__ void add_unit(
    float *total, const Stage &stage, const Call &call, const Place &p, int unit) {
  const char *x = p.x + min(p.quad, call.rows - 1) * call.padded + (unit * UNIT + p.part * PIECE) * 2;
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int plane = 0; plane < PLANES; plane++) {
    uint32 powers[2] = {0, 0};
    if (POWERS) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        powers[i] = ((stage.scales[i][0] >> (plane * 16 + (p.part >> 1) * 8)) & 255) * 0x00800080u;
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
#pragma unroll
      for (int pair = 0; pair < PIECE / 8; pair++) {
        const uint4 b = *(const uint4 *)(x + (plane * 64 + h * 32 + pair * 8) * 2);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          uint32 a[4];
          const int word = h * (PIECE / 4) + pair * 2 + j;
          decode(stage.codes[0][word], plane, powers[0], a[0], a[2]);
          decode(stage.codes[1][word], plane, powers[1], a[1], a[3]);
          float *to = AT_END || POWERS ? total : sum;
          multiply(to, a[0], a[1], a[2], a[3], j ? b.z : b.x, j ? b.w : b.y);
        }
      }
      const bool ends = GROUPS > PLANES || (h == HALVES - 1 && (GROUPS == PLANES || plane == PLANES - 1));
      if (!AT_END && !POWERS && ends) {
        const int group = GROUPS == 1 ? 0 : plane * (GROUPS / PLANES) + (GROUPS == PLANES ? 0 : h);
        add_group(total, sum, stage, call, p, unit, group);
      }
    }
  }
}

// The tile's sums of all warps, in a fixed order, and what follows them.
__device__ __forceinline__ void finish(const float *total, const Call &call, const Place &p, int tile, int buffer) {
  const int columns = call.rows;
  float *own = p.parts + ((buffer * WARPS + p.warp) * columns) * RED;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    if (p.part * 2 + c < columns) {
      own[(p.part * 2 + c) * RED + p.quad] = total[c];
      own[(p.part * 2 + c) * RED + p.quad + 8] = total[2 + c];
    }
  }
  __syncthreads();
  const int m = threadIdx.x >> p.tile_shift, n = threadIdx.x - (m << p.tile_shift);
  const int output = (tile << p.tile_shift) + n;
  if (m >= columns || output >= call.outputs) return;
  const float *from = p.parts + (buffer * WARPS * columns + m) * RED + n;
  float value[2] = {0.f, 0.f}, factor = LIFT;
  if (call.norm) {
    float square = 0.f;
#pragma unroll 8
    for (int w = 0; w < WARPS; w++) square += p.squares[m * WARPS + w];
    factor *= rsqrtf(square / call.inputs + call.eps);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (i && !call.gate) break;
#pragma unroll 8
    for (int w = 0; w < WARPS; w++) value[i] += from[w * columns * RED + 8 * i];
    const int64 at = output + i * call.outputs;
    value[i] *= factor;
    if (AT_END) value[i] *= ((const float *)call.scales)[find_table(call, at)];
    if (call.bias) value[i] += widen(call.bias[at]);
  }
  const float out = call.gate ? gated_by(call, call.gate, value[0], value[1]) : value[0];
  call.out[int64(m) * call.outputs + output] = uint16(narrow(out, 0.f));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) coded_rows(const Call call) {
  extern __shared__ __align__(16) char memory[];
  const Place p = find_place(call, memory);
  Reader reader = {int(blockIdx.x), 0};
  Stage ring[DEPTH];
  // Codes, which no kernel writes, are asked for before the previous kernel has ended.
#pragma unroll
  for (int s = 0; s < DEPTH; s++) fetch(ring[s], reader, call, p);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  stage_rows(call, memory, p.sums, p.squares, p.units * GROUPS);
  __syncthreads();

  float total[4] = {0.f, 0.f, 0.f, 0.f};
  int step = 0, tile = blockIdx.x, buffer = 0;
  while (tile < p.tiles) {
#pragma unroll
    for (int s = 0; s < DEPTH; s++) {
      if (tile >= p.tiles) break;
      const int unit = p.warp + step * WARPS;
      if (unit < p.units) add_unit(total, ring[s], call, p, unit);
      fetch(ring[s], reader, call, p);
      if (++step < p.steps) continue;
      finish(total, call, p, tile, buffer);
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] = 0.f;
      step = 0, tile += gridDim.x, buffer ^= 1;
    }
  }
}
