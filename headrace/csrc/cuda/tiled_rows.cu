// Products of few rows of x with integers of 4, 6 or 8 bits in tiles: out [M, N] = x [M, K] times the weight [N, K]
// transposed, also with the norm before it and the gated activation after it. Bound by reading the weight once.
//
// A unit of a row of the weight is 64 bytes of codes: 128 inputs of 4 bits, of which byte b has input b in its low half
// and input b + 64 in its high half, or 64 of 8 bits. Codes [N / 8, units, 8, 64] and scales [N / 8, groups, 8] hold
// eight rows together, so that a part of them is one piece of memory. A block computes 16 outputs at a time. One warp
// copies CHUNK units of both eights into a ring in shared memory, as far ahead as the ring is long, and begins before
// the previous kernel has ended, where that leaves room. The others share the units of a chunk and add up their sums in a
// fixed order.
//
// Codes are the left operand of mma.m16n8k32 for integers as they come out of a word: no code is converted. Numbers of x
// become integers q of 15 bits times a power of two for each quantum, the inputs of a scale within a unit, and these two
// digits of 8 bits, 256 * high + low, which are two columns of the right operand. So numbers of bfloat16 from a 64th of
// the largest of a quantum on are multiplied exactly, and others are wrong by at most 2**-14 of the largest; sums of a
// quantum are exact. Which inputs a thread holds does not matter as long as both operands agree, so that a thread reads
// 16 bytes at a time.
//
// Of super-blocks (super_blocks.cuh) a quantum is a unit, and a thread has 16 inputs of each plane that share a scale
// with none of its neighbours'. Each row of x is multiplied by itself: of the eight columns, two are for the inputs of
// each of the four threads of a quad and zero for those of the others. So a thread gets the sums of its own inputs, which
// it multiplies by their scales as integers, and the four meet at the end of a tile.
//
// Compiled by NVRTC for bfloat16 x. Macros: CODE 0 unsigned 4 bits, 3 int8, 4 uint8; PAIRS 1: scales are
// pairs of float16, with zero points, else float32; GROUP: inputs of a scale, 0: all; WARPS that multiply;
// CHUNK: units, a multiple of what shares a scale. SUPER_FORM: 0, or the form of super-blocks, with CODE, PAIRS and GROUP
// 0; TAIL_FORM: 0, or that of rows that follow; MOST: rows of x of super-blocks at most, 1, 2, 4 or 8, else 0.

#include "numbers.cuh"
#include "hopper.cuh"
#include "super_blocks.cuh"

constexpr bool SHORT = CODE == 0;
constexpr int UNIT = SHORT ? 128 : 64, PLANES = SHORT ? 2 : 1;
constexpr int PIECE = GROUP == 32 ? 8 : 16, HALVES = 16 / PIECE;  // bytes that a thread reads at a time
constexpr int GROUPS = GROUP == 0 || GROUP >= UNIT ? 1 : UNIT / GROUP;  // scales of a unit
constexpr int QUANTUM = UNIT / GROUPS;                     // inputs of x that share a power of two
constexpr int EACH = GROUP > UNIT ? GROUP / UNIT : 1;      // units that share a scale
constexpr int THREADS = 32 * WARPS, RED = 20;              // that multiply; floats of a column of partial sums
constexpr bool HAS_MINS = SUPER_FORM == 1 || SUPER_FORM == 2 || TAIL_FORM == 1 || TAIL_FORM == 2;
static_assert(!SUPER_FORM || (WARPS % 2 == 0 && CHUNK % 2 == 0), "a warp has units of one half of super-blocks");
constexpr int SPANS = 8;                                   // of a unit, of 16 inputs whose sum mins multiply

// Bytes of eight rows.
template <int FORM>
struct Piece {
  static constexpr int UNIT = FORM ? Supers<FORM>::UNIT_BYTES : 512;
  __host__ __device__ static constexpr int count_table(int units) {
    if (FORM) return units / 2 * Supers<FORM>::TABLE_BYTES;
    return GROUP ? (units * GROUPS + EACH - 1) / EACH * 32 : 0;
  }
  static constexpr int CODE_BYTES = CHUNK * UNIT, TABLE_BYTES = count_table(CHUNK);
  static constexpr int STAGE = 2 * (CODE_BYTES + TABLE_BYTES);
};
constexpr int CODE_BYTES = Piece<SUPER_FORM>::CODE_BYTES, TABLE_BYTES = Piece<SUPER_FORM>::TABLE_BYTES;
constexpr int TAIL_STAGE = TAIL_FORM ? Piece<TAIL_FORM>::STAGE : 0;
constexpr int STAGE = TAIL_STAGE > Piece<SUPER_FORM>::STAGE ? TAIL_STAGE : Piece<SUPER_FORM>::STAGE;
// Codes in the high half of a byte count 16 times, so sums do, by SHIFT bits, and quanta undo it.
constexpr int SHIFT = SHORT ? 4 : 0;
constexpr uint32 X_EXPONENT = 13;                          // the largest number of a quantum becomes 2**13 to 2**14
constexpr int BUFFERS = 2;                                 // of sums of tiles
constexpr int EACH_WARP = CHUNK > WARPS ? CHUNK / WARPS : 1;  // units of a chunk

struct Call {
  const uint16 *x, *residual, *norm, *bias;
  uint16 *out, *total;
  const char *codes;
  const uint32 *scales;
  const char *tail_codes, *tail_scales;
  int64 x_stride, residual_stride;
  int rows, outputs, inputs, padded, stages;  // padded: bytes of a row's digits in shared memory; stages of the ring
  int gate;  // 0 none, 1 silu, 2 gelu_tanh; the weight then has `outputs` rows of gate, then of up
  int wide;  // 1: `out` is float32
  int head_tiles;  // of 16 rows of the weight, before those of the other form
  float eps, offset;
};

// All threads that multiply.
__device__ __forceinline__ void synchronise() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// sum [16, 8] += codes [16, 32] times digits [32, 8].
template <bool SIGNED>
__device__ __forceinline__ void multiply(
    int *sum, uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
#define MULTIPLY(TYPE)                                                                              \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." TYPE ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
      "{%8, %9}, {%0, %1, %2, %3};"                                                                 \
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])                                      \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if (SIGNED)
    MULTIPLY("s8");
  else
    MULTIPLY("u8");
#undef MULTIPLY
}

// Four codes of a word as bytes; those of the high plane count 16 times.
__device__ __forceinline__ uint32 pick(uint32 word, int plane) {
  return SHORT ? word & (plane ? 0xF0F0F0F0u : 0x0F0F0F0Fu) : word;
}

// A quantum of x is told in a word: its power of two as the sign and exponent of a float, and in the mantissa, plus 2**22,
// the sum of its integers. An infinity or a NaN in x makes it a NaN. Of super-blocks it is a float, 2**-SHIFT times the
// power.
__device__ __forceinline__ uint32 tell_quantum(uint32 exponent, int sum) {
  const uint32 power = exponent >= 255 ? 255 : exponent - X_EXPONENT - SHIFT;
  if (SUPER_FORM) return exponent >= 255 ? 0x7FC00000u : power << 23;
  return power << 23 | uint32(sum + (1 << 22));
}
__device__ __forceinline__ float power_of(uint32 quantum) {
  const uint32 bits = quantum & 0x7F800000u;
  return __uint_as_float(bits == 0x7F800000u ? 0x7FC00000u : bits);
}
__device__ __forceinline__ float sum_of(uint32 quantum) {  // times 2**SHIFT
  constexpr float ONES = 8388608.f + 4194304.f, UNITS = float(1 << SHIFT);
  return (__uint_as_float(quantum & 0x7FFFFFu | 0x4B000000u) - ONES) * UNITS;
}

// Eight numbers of x, of one row, as digits to shared memory, and what tells their quantum, of which the first lane of
// those that share it writes, like the first of two the sum of their `span` times 2**SHIFT. All lanes of the quantum take part.
__device__ __forceinline__ void put_digits(
    const uint32 *v, char *high, char *low, uint32 *quantum, int *span, bool is_there) {
  constexpr float MAGIC = 12582912.f;  // 1.5 * 2**23: the sum's last bits are the rounded integer
  uint32 most = __vmaxu2(__vmaxu2(v[0] & 0x7FFF7FFFu, v[1] & 0x7FFF7FFFu),
                         __vmaxu2(v[2] & 0x7FFF7FFFu, v[3] & 0x7FFF7FFFu));
  most = max(most >> 16, most & 0xFFFF);
#pragma unroll
  for (int step = QUANTUM / 16; step; step >>= 1) most = max(most, __shfl_xor_sync(~0u, most, step));
  const uint32 exponent = max(most >> 7, X_EXPONENT + SHIFT + 1);
  const float lift = __uint_as_float((254 + X_EXPONENT - min(exponent, 254u)) << 23);
  uint32 bits[8], packed[4];
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float first = __fmaf_rn(widen(v[j] & 0xFFFF), lift, MAGIC);
    const float second = __fmaf_rn(__uint_as_float(v[j] & 0xFFFF0000u), lift, MAGIC);
    bits[2 * j] = __float_as_uint(first), bits[2 * j + 1] = __float_as_uint(second);
    if (PAIRS || HAS_MINS) sum += (first - MAGIC) + (second - MAGIC);
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const uint32 *b = bits + 4 * j;
    packed[j] = __byte_perm(__byte_perm(b[0], b[1], 0x0040), __byte_perm(b[2], b[3], 0x0040), 0x5410);
    // low digits are from -128 on: the high ones are rounded
    packed[2 + j] = __byte_perm(__byte_perm(b[0] + 128, b[1] + 128, 0x0051),
                                __byte_perm(b[2] + 128, b[3] + 128, 0x0051), 0x5410);
  }
  if (PAIRS) {
#pragma unroll
    for (int step = QUANTUM / 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  }
  if (HAS_MINS) sum += __shfl_xor_sync(~0u, sum, 1);
  if (!is_there) return;
  if (HAS_MINS && threadIdx.x % 2 == 0) *span = int(sum) << SHIFT;
  *(uint2 *)low = {packed[0], packed[1]};
  *(uint2 *)high = {packed[2], packed[3]};
  if (threadIdx.x % (QUANTUM / 8) == 0) *quantum = tell_quantum(exponent, int(sum));
}

// x (or, with a norm, x plus the residual, times the norm's weight) to shared memory as digits. `quanta` [M, quanta] tells
// of them, `spans` [M, units, 4, 2] has sums, by part of a plane and plane; `squares` [M, WARPS]. Rows are `width` inputs long there. A thread has as many loads on their way as BATCH.
template <bool NORM, int BATCH>
__device__ __forceinline__ void stage_rows(
    const Call &call, char *x, uint32 *quanta, int *spans, float *squares, int width) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int m = 0; m < call.rows; m++) {
    float square = 0.f;
    for (int first = threadIdx.x * 8; first - lane * 8 < width; first += BATCH * THREADS * 8) {
      uint4 values[BATCH], residuals[NORM ? BATCH : 1], weights[NORM ? BATCH : 1];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int at = first + i * THREADS * 8;
        values[i] = {0, 0, 0, 0};
        if (NORM) residuals[i] = weights[i] = {0, 0, 0, 0};
        if (at >= call.inputs) continue;
        values[i] = *(const uint4 *)(call.x + m * call.x_stride + at);
        if (NORM) {
          residuals[i] = *(const uint4 *)(call.residual + m * call.residual_stride + at);
          weights[i] = __ldg((const uint4 *)(call.norm + at));
        }
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int at = first + i * THREADS * 8;
        if (at - lane * 8 >= width) break;
        uint32 v[4] = {values[i].x, values[i].y, values[i].z, values[i].w}, r[4], w[4];
        if (NORM) *(uint4 *)r = residuals[i], *(uint4 *)w = weights[i];
        if (NORM) {
#pragma unroll
          for (int j = 0; j < 4; j++) {
            r[j] = narrow(widen(v[j]) + widen(r[j]), widen_high(v[j]) + widen_high(r[j]));
            const float low = widen(r[j]), high = widen_high(r[j]);
            square += low * low + high * high;
            v[j] = narrow(low * (widen(w[j]) + call.offset), high * (widen_high(w[j]) + call.offset));
          }
          if (blockIdx.x == 0 && at < call.inputs) *(uint4 *)(call.total + int64(m) * call.inputs + at) = *(uint4 *)r;
        }
        char *high = x + 2 * m * call.padded + at;
        const int span = at / 16 % 4 * 2 + at / 64 % 2;
        put_digits(v, high, high + call.padded, quanta + (m * width + at) / QUANTUM,
                   spans + (m * width + at) / 128 * SPANS + span, at < width);
      }
    }
    if (NORM) {
#pragma unroll
      for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
      if (lane == 0) squares[m * WARPS + warp] = square;
    }
  }
}

struct Place {  // of a thread; and sizes of the whole call
  int warp, quad, part;  // of a warp's 8 quads of 4 threads
  int units, chunks, tiles, tile_shift;
  uint32 full, empty;  // barriers of the ring's stages
  uint32 added, read;  // barriers of the buffers of sums
  const char *ring, *x;  // in shared memory, like what tells of quanta of x, squares for the norm, and partial sums
  uint32 *quanta;
  int *spans;
  float *squares, *parts;
};

__device__ __forceinline__ Place find_place(const Call &call, char *memory) {
  Place p;
  const int lane = threadIdx.x % 32;
  p.warp = threadIdx.x / 32, p.quad = lane / 4, p.part = lane % 4;
  p.units = (call.inputs + UNIT - 1) / UNIT;
  p.chunks = (p.units + CHUNK - 1) / CHUNK;
  p.tile_shift = call.gate ? 3 : 4;
  p.tiles = ((call.outputs - 1) >> p.tile_shift) + 1;
  p.ring = memory;
  memory += call.stages * STAGE;
  p.full = shared_address(memory), p.empty = p.full + 8 * call.stages;
  p.added = p.full + 16 * call.stages, p.read = p.added + 8 * BUFFERS;
  p.x = memory + 16 * (call.stages + BUFFERS);
  p.quanta = (uint32 *)(p.x + 2 * call.rows * call.padded);
  p.spans = (int *)(p.quanta + call.rows * p.units * GROUPS);
  p.squares = (float *)(p.spans + (HAS_MINS ? call.rows * p.units * SPANS : 0));
  p.parts = p.squares + (call.norm ? call.rows * WARPS : 0);  // [BUFFERS, WARPS, rows, RED]
  return p;
}

// The eight rows of the weight that are half `i` of a tile; those of gate and of up lie apart. Beyond the last, the last.
__device__ __forceinline__ int find_eight(const Call &call, int tile, int i) {
  return call.gate ? tile + i * (call.outputs >> 3) : min(2 * tile + i, (call.outputs - 1) >> 3);
}

// Ask the L2 for the norm's weight and for biases, by the threads that multiply.
__device__ __forceinline__ void prefetch_rows(const Call &call, const Place &p) {
  constexpr int LINE = 64;
  if (call.norm)
    for (int at = threadIdx.x * LINE; at < call.inputs; at += THREADS * LINE) prefetch_line(call.norm + at);
  if (!call.bias) return;
  for (int tile = blockIdx.x + threadIdx.x * gridDim.x; tile < p.tiles; tile += THREADS * gridDim.x) {
    prefetch_line(call.bias + (tile << p.tile_shift));
    if (call.gate) prefetch_line(call.bias + call.outputs + (tile << p.tile_shift));
  }
}

// Ask for units of two eights of rows, in which others have `codes` and `scales` in front, and for their scales.
template <int FORM>
__device__ __forceinline__ void copy_chunk(
    const char *codes, const char *scales, const int (&eights)[2], const Place &p, int chunk, uint32 stage, uint32 full,
    int64 policy) {
  using Own = Piece<FORM>;
  const int here = min(CHUNK, p.units - chunk * CHUNK), table = Own::count_table(here);
  const int64 whole = Own::count_table(p.units);
  expect_bytes(full, 2 * (here * Own::UNIT + table));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    copy_bytes(stage + i * Own::CODE_BYTES, codes + (int64(eights[i]) * p.units + chunk * CHUNK) * Own::UNIT,
               here * Own::UNIT, full, policy);
    if (FORM || GROUP)
      copy_bytes(stage + 2 * Own::CODE_BYTES + i * Own::TABLE_BYTES,
                 scales + eights[i] * whole + chunk * Own::TABLE_BYTES, table, full, policy);
  }
}

// Keep the ring full: one thread.
__device__ __forceinline__ void produce(const Call &call, const Place &p) {
  uint32 slot = 0, parity = 1;
  const int64 policy = read_once();
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const bool is_tail = TAIL_FORM && tile >= call.head_tiles;
    const int before = is_tail ? 2 * call.head_tiles : 0;
    const int eights[2] = {find_eight(call, tile, 0) - before, find_eight(call, tile, 1) - before};
    for (int chunk = 0; chunk < p.chunks; chunk++) {
      const uint32 full = p.full + 8 * slot, stage = shared_address(p.ring) + slot * STAGE;
      wait_for(p.empty + 8 * slot, parity);
      if (is_tail)
        copy_chunk<TAIL_FORM>(call.tail_codes, call.tail_scales, eights, p, chunk, stage, full, policy);
      else
        copy_chunk<SUPER_FORM>(call.codes, (const char *)call.scales, eights, p, chunk, stage, full, policy);
      if (++slot == call.stages) slot = 0, parity ^= 1;
    }
  }
}

// `total` plus the products of a unit, whose codes lie at `codes` and whose scales at `scales` for this thread's rows. Of
// each four rows of x, TILES of them, a thread has the sums of one, with both of its rows of the weight.
template <int TILES>
__device__ __forceinline__ void add_unit(
    float (*total)[2], const char *codes, const uint32 *scales, const uint32 *whole, const Call &call, const Place &p,
    int unit) {
  const char *x[TILES];
#pragma unroll
  for (int n = 0; n < TILES; n++)
    x[n] = p.x + min(n * 8 + p.quad, 2 * call.rows - 1) * call.padded + unit * UNIT + p.part * PIECE;
  uint32 own[2][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const char *from = codes + i * CODE_BYTES + h * 32;
      if (PIECE == 16)
        *(uint4 *)own[i] = *(const uint4 *)from;
      else
        *(uint2 *)&own[i][2 * h] = *(const uint2 *)from;
    }
  }
  int sum[TILES][PLANES][4] = {};
#pragma unroll
  for (int plane = 0; plane < PLANES; plane++) {
    uint32 b[TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        const char *from = x[n] + plane * 64 + h * 32;
        if (PIECE == 16)
          *(uint4 *)b[n] = *(const uint4 *)from;
        else
          *(uint2 *)&b[n][2 * h] = *(const uint2 *)from;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int n = 0; n < TILES; n++)
        multiply<CODE == 3>(sum[n][plane], pick(own[0][2 * h], plane), pick(own[1][2 * h], plane),
                            pick(own[0][2 * h + 1], plane),
                            pick(own[1][2 * h + 1], plane), b[n][2 * h], b[n][2 * h + 1]);
      const bool ends = GROUPS > PLANES || (h == 1 && (GROUPS == PLANES || plane == PLANES - 1));
      if (!ends) continue;
      const int group = GROUPS == 1 ? 0 : plane * (GROUPS / PLANES) + (GROUPS == PLANES ? 0 : h);
      float scale[2], zero[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32 word = GROUP ? scales[i * (TABLE_BYTES / 4) + group * 8] : whole[i];
        scale[i] = PAIRS ? half_of(word, false) : __uint_as_float(word);
        zero[i] = PAIRS ? half_of(word, true) : 0.f;
      }
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const uint32 quantum = p.quanta[(min(n * 4 + p.part, call.rows - 1) * p.units + unit) * GROUPS + group];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          int all = 0;
#pragma unroll
          for (int q = GROUPS == 1 ? 0 : plane; q <= plane; q++) {
            all += ((sum[n][q][2 * i] << 8) + sum[n][q][2 * i + 1]) << (SHORT && q == 0 ? SHIFT : 0);
            sum[n][q][2 * i] = sum[n][q][2 * i + 1] = 0;
          }
          const float value = PAIRS ? float(all) - zero[i] * sum_of(quantum) : float(all);
          total[n][i] += scale[i] * power_of(quantum) * value;
        }
      }
    }
  }
}

// The same of super-blocks, for ROWS rows of x: of unit number `here` of a stage. A thread has sums of its own inputs.
template <int FORM, int ROWS>
__device__ __forceinline__ void add_supers(
    float (*total)[2], const char *stage, int here, const Call &call, const Place &p, int unit) {
  using Own = Piece<FORM>;
  const bool has_column = p.quad >> 1 == p.part, odd = p.warp & 1;  // the unit is as odd as the warp
  SuperScales<FORM> scales[2];
  uint32 a[2][2][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    SuperCodes<FORM> codes;
    codes.load(stage + i * Own::CODE_BYTES + here * Own::UNIT, p.quad, p.part);
    scales[i].load(stage + 2 * Own::CODE_BYTES + i * Own::TABLE_BYTES + Own::count_table(here), p.quad, p.part, odd);
#pragma unroll
    for (int plane = 0; plane < 2; plane++) {
#pragma unroll
      for (int j = 0; j < 4; j++) a[i][plane][j] = codes.pick(plane, j);
    }
  }
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    const int row = min(m, call.rows - 1), quantum = row * p.units + unit;
    const char *x = p.x + (2 * row + p.quad % 2) * call.padded + unit * UNIT + p.part * 16;
    int high[2] = {0, 0}, low[2] = {0, 0};
#pragma unroll
    for (int plane = 0; plane < 2; plane++) {
      uint4 b = {0, 0, 0, 0};
      if (has_column) b = *(const uint4 *)(x + plane * 64);
      int sum[4] = {0, 0, 0, 0};
      multiply<!Supers<FORM>::MINS>(
          sum, a[0][plane][0], a[1][plane][0], a[0][plane][1], a[1][plane][1], b.x, b.y);
      multiply<!Supers<FORM>::MINS>(
          sum, a[0][plane][2], a[1][plane][2], a[0][plane][3], a[1][plane][3], b.z, b.w);
#pragma unroll
      for (int i = 0; i < 2; i++) {  // both fit an integer, but not the two together
        high[i] += scales[i].lifted(plane) * sum[2 * i];
        low[i] += scales[i].lifted(plane) * sum[2 * i + 1];
      }
    }
    const float power = __uint_as_float(p.quanta[quantum]), lifted = power * float(1 << SHIFT >> Supers<FORM>::SHIFT);
    int2 spans = {0, 0};
    if (Supers<FORM>::MINS) spans = *(const int2 *)(p.spans + quantum * SPANS + p.part * 2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      total[m][i] += scales[i].factor * lifted * fmaf(float(high[i]), 256.f, float(low[i]));
      if (Supers<FORM>::MINS)
        total[m][i] -= scales[i].min_factor * power * float(scales[i].min[0] * spans.x + scales[i].min[1] * spans.y);
    }
  }
}

// Add up the sums of all warps of a tile, number `count` of this block's, in a fixed order, and store what follows them:
// one warp, while the others go on.
__device__ __forceinline__ void finish(const Call &call, const Place &p, int tile, int count) {
  const int buffer = count % BUFFERS, lane = threadIdx.x % 32;
  wait_for(p.added + 8 * buffer, count / BUFFERS & 1);
  for (int at = lane; at < call.rows << p.tile_shift; at += 32) {
    const int m = at >> p.tile_shift, n = at - (m << p.tile_shift), output = (tile << p.tile_shift) + n;
    const float *from = p.parts + (buffer * WARPS * call.rows + m) * RED + n;
    float value[2] = {0.f, 0.f}, factor = 1.f;
    if (call.norm) {
      float square = 0.f;
#pragma unroll 8
      for (int w = 0; w < WARPS; w++) square += p.squares[m * WARPS + w];
      factor *= rsqrtf(square / call.inputs + call.eps);
    }
    if (output >= call.outputs) continue;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (i && !call.gate) break;
#pragma unroll 8
      for (int w = 0; w < WARPS; w++) value[i] += from[w * call.rows * RED + 8 * i];
      value[i] *= factor;
      if (call.bias) value[i] += widen(call.bias[output + i * call.outputs]);
    }
    const float out = call.gate ? gated(call.gate, value[0], value[1]) : value[0];
    const int64 to = int64(m) * call.outputs + output;
    if (call.wide)
      ((float *)call.out)[to] = out;
    else
      call.out[to] = uint16(narrow(out, 0.f));
  }
  __syncwarp();
  if (lane == 0) arrive(p.read + 8 * buffer);
}

// Multiply what `produce` copies with up to 4 * COUNT rows, or of super-blocks with COUNT. The warps take turns in
// finishing tiles, each after the next chunk.
template <int COUNT>
__device__ __forceinline__ void consume(const Call &call, const Place &p) {
  constexpr int AT_ONCE = COUNT == 1 ? EACH_WARP : COUNT == 2 && EACH_WARP > 1 ? 2 : 1;  // independent units
  uint32 slot = 0, parity = 0;
  int count = 0, pending = -1;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, count++) {
    float total[COUNT][2] = {};
    uint32 whole[2] = {0, 0};
    if (GROUP == 0 && !SUPER_FORM) {
#pragma unroll
      for (int i = 0; i < 2; i++) whole[i] = __ldg(call.scales + find_eight(call, tile, i) * 8 + p.quad);
    }
    for (int chunk = 0; chunk < p.chunks; chunk++) {
      const int here = min(CHUNK, p.units - chunk * CHUNK);
      const char *stage = p.ring + slot * STAGE;
      wait_for(p.full + 8 * slot, parity);
      if (TAIL_FORM && tile >= call.head_tiles) {
#pragma unroll AT_ONCE
        for (int u = p.warp; u < here; u += WARPS)
          add_supers<TAIL_FORM, COUNT>(total, stage, u, call, p, chunk * CHUNK + u);
      } else if (SUPER_FORM) {
#pragma unroll AT_ONCE
        for (int u = p.warp; u < here; u += WARPS)
          add_supers<SUPER_FORM, COUNT>(total, stage, u, call, p, chunk * CHUNK + u);
      } else {
#pragma unroll EACH_WARP
        for (int u = p.warp; u < here; u += WARPS)
          add_unit<COUNT>(
              total, stage + u * 512 + p.quad * 64 + p.part * PIECE,
              (const uint32 *)(stage + 2 * CODE_BYTES) + u * GROUPS / EACH * 8 + p.quad, whole, call, p,
              chunk * CHUNK + u);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(p.empty + 8 * slot);
      if (++slot == call.stages) slot = 0, parity ^= 1;
      if (pending >= 0) finish(call, p, pending, count - 1), pending = -1;
    }
    const int buffer = count % BUFFERS;
    wait_for(p.read + 8 * buffer, count / BUFFERS & 1 ^ 1);
    float *own = p.parts + ((buffer * WARPS + p.warp) * call.rows) * RED;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      const int m = SUPER_FORM ? n : n * 4 + p.part;
      if (SUPER_FORM) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          total[n][i] += __shfl_xor_sync(~0u, total[n][i], 1);
          total[n][i] += __shfl_xor_sync(~0u, total[n][i], 2);
        }
      }
      const bool is_own = m < call.rows && (!SUPER_FORM || p.part == 0);
      if (is_own) own[m * RED + p.quad] = total[n][0], own[m * RED + p.quad + 8] = total[n][1];
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(p.added + 8 * buffer);
    if (p.warp == count % WARPS) pending = tile;
  }
  if (pending >= 0) finish(call, p, pending, count - 1);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) tiled_rows(const Call call) {
  extern __shared__ __align__(128) char memory[];
  const Place p = find_place(call, memory);
  if (threadIdx.x == 0) {
    for (int s = 0; s < call.stages; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(p.full + 8 * s) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(p.empty + 8 * s), "n"(WARPS) : "memory");
    }
    for (int b = 0; b < BUFFERS; b++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(p.added + 8 * b), "n"(WARPS) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(p.read + 8 * b) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (p.warp == WARPS) {
    // codes, which no kernel writes, are asked for before the previous kernel has ended
    if (threadIdx.x % 32 == 0) produce(call, p);
  } else {
    prefetch_rows(call, p);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int width = p.units * UNIT;
    if (call.norm)
      stage_rows<true, 2>(call, (char *)p.x, p.quanta, p.spans, p.squares, width);
    else
      stage_rows<false, 7>(call, (char *)p.x, p.quanta, p.spans, p.squares, width);
    synchronise();
#if SUPER_FORM
    consume<MOST>(call, p);
#else
    if (call.rows <= 4)
      consume<1>(call, p);
    else
      consume<2>(call, p);
#endif
  }
}
