// Products of few rows of x with integers of 4 or 8 bits in tiles: out [M, N] = x [M, K] times the weight [N, K]
// transposed, also with the norm before it and the gated activation after it. Bound by reading the weight once.
//
// A unit of a row of the weight is 64 bytes of codes: 128 inputs of 4 bits, of which byte b has input b in its low half
// and input b + 64 in its high half, or 64 of 8 bits. Codes [N / 8, units, 8, 64] and scales [N / 8, groups, 8] hold
// eight rows together, so that a part of them is one piece of memory. A block computes 16 outputs at a time. One warp
// copies CHUNK units of both eights into a ring in shared memory, as far ahead as the ring is long, and begins before
// the previous kernel has ended, where that leaves room. The others share the units of a chunk and add up their sums in a
// fixed order. Codes become bfloat16 in registers and are the left operand of mma.m16n8k16, rows of x the right one.
// Which inputs a thread holds does not matter as long as both operands agree, so that a thread reads 16 bytes at a time,
// and x is put into shared memory in the order in which codes come out of a word.
//
// Compiled by NVRTC for bfloat16 x. Macros: CODE 0 unsigned 4 bits, 3 int8, 4 uint8; PAIRS 1: scales are
// pairs of float16, with zero points, else float32; GROUP: inputs of a scale, 0: all; WARPS that multiply;
// CHUNK: units, a multiple of what shares a scale.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr bool SHORT = CODE == 0, CORRECTS = CODE == 3 || PAIRS;  // subtracts a multiple of the sum of x
constexpr int UNIT = SHORT ? 128 : 64, PLANES = SHORT ? 2 : 1;
constexpr int PIECE = GROUP == 32 ? 8 : 16, HALVES = 16 / PIECE;  // bytes that a thread reads at a time
constexpr int GROUPS = GROUP == 0 || GROUP >= UNIT ? 1 : UNIT / GROUP;  // scales of a unit
constexpr int QUANTUM = UNIT / GROUPS;                     // inputs whose sum is kept
constexpr int EACH = GROUP > UNIT ? GROUP / UNIT : 1;      // units that share a scale
constexpr int THREADS = 32 * WARPS, RED = 20;              // that multiply; floats of a column of partial sums
constexpr int CODE_BYTES = CHUNK * 512, TABLE_BYTES = GROUP ? CHUNK * GROUPS / EACH * 32 : 0;  // of eight rows
constexpr int STAGE = 2 * (CODE_BYTES + TABLE_BYTES);
constexpr float BASE = CODE == 3 ? 128.f : 0.f;            // what decoded codes are more than the code
constexpr int CHAINS = SHORT && GROUPS == 1 ? 4 : 2;       // of sums of a unit: products of one wait for one another
// A code at the end of a bfloat16, of which it is a part of the mantissa and the last bit of the exponent, is its number
// times 2**-133, and 16 times as much four bits further. Numbers of x are multiplied by 2**64, or by 2**60 for codes in
// the high half of a byte, so that products are normal numbers; sums are so small until the end.
constexpr float X_LIFT = 18446744073709551616.f, HIGH_X_LIFT = 1152921504606846976.f;
constexpr float LIFT = 590295810358705651712.f;            // 2**69
constexpr int BUFFERS = 2;                                 // of sums of tiles
constexpr int EACH_WARP = CHUNK > WARPS ? CHUNK / WARPS : 1;  // units of a chunk

struct Call {
  const uint16 *x, *residual, *norm, *bias;
  uint16 *out, *total;
  const char *codes;
  const uint32 *scales;
  int64 x_stride, residual_stride;
  int rows, outputs, inputs, padded, stages;  // padded: bytes of a row of x in shared memory; stages of the ring
  int gate;  // 0 none, 1 silu, 2 gelu_tanh; the weight then has `outputs` rows of gate, then of up
  float eps, offset;
};

// All threads that multiply.
__device__ __forceinline__ void synchronise() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// A word of codes to two pairs of bfloat16: inputs 0 and 2, 1 and 3; times 2**-133, or 16 * 2**-133 of the high plane.
__device__ __forceinline__ void decode(uint32 word, int plane, uint32 &even, uint32 &odd) {
  if (SHORT) {
    const uint32 mask = plane ? 0x00F000F0u : 0x000F000Fu;
    even = word & mask, odd = (word >> 8) & mask;
  } else {
    const uint32 flip = CODE == 3 ? 0x00800080u : 0u;
    even = (word ^ flip) & 0x00FF00FFu, odd = ((word >> 8) ^ flip) & 0x00FF00FFu;
  }
}

// x (or, with a norm, x plus the residual, times the norm's weight) to shared memory: of each four inputs 0, 2, 1, 3.
// `sums` [M, quanta] of them; `squares` [M, WARPS]. Rows are `width` inputs long there. A thread has as many loads on
// their way as BATCH.
template <bool NORM, int BATCH>
__device__ __forceinline__ void stage_rows(const Call &call, char *x, float *sums, float *squares, int width) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quanta = width / QUANTUM;
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
        float sum = 0.f;
        const float lift = SHORT && at / 64 % 2 ? HIGH_X_LIFT : X_LIFT;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float low = widen(v[j]), high = __uint_as_float(v[j] & 0xffff0000u);
          if (NORM) {
            v[j] = narrow(low + widen(r[j]), high + __uint_as_float(r[j] & 0xffff0000u));
            r[j] = v[j];
            low = widen(v[j]), high = __uint_as_float(v[j] & 0xffff0000u);
            square += low * low + high * high;
            v[j] = narrow(low * (widen(w[j]) + call.offset),
                          high * (__uint_as_float(w[j] & 0xffff0000u) + call.offset));
            low = widen(v[j]), high = __uint_as_float(v[j] & 0xffff0000u);
          }
          if (CORRECTS) sum += low + high;
          v[j] = narrow(low * lift, high * lift);
        }
        if (NORM && blockIdx.x == 0 && at < call.inputs)
          *(uint4 *)(call.total + int64(m) * call.inputs + at) = *(uint4 *)r;
        if (at < width) {
          uint4 put = {__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[0], v[1], 0x7632),
                       __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[2], v[3], 0x7632)};
          *(uint4 *)(x + m * call.padded + at * 2) = put;
        }
        if (CORRECTS) {
#pragma unroll
          for (int step = QUANTUM / 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
          if (at < width && lane % (QUANTUM / 8) == 0) sums[m * quanta + at / QUANTUM] = sum * (1.f / LIFT);
        }
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
  const char *ring, *x;  // in shared memory, like the sums of quanta of x, squares for the norm, and partial sums
  float *sums, *squares, *parts;
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
  p.sums = (float *)(p.x + call.rows * call.padded);
  p.squares = p.sums + (CORRECTS ? call.rows * p.units * GROUPS : 0);
  p.parts = p.squares + (call.norm ? call.rows * WARPS : 0);  // [BUFFERS, WARPS, rows, RED]
  return p;
}

// The eight rows of the weight that are half `i` of a tile; those of gate and of up lie apart. Beyond the last, the last.
__device__ __forceinline__ int find_eight(const Call &call, int tile, int i) {
  return call.gate ? tile + i * (call.outputs >> 3) : min(2 * tile + i, (call.outputs - 1) >> 3);
}

// Keep the ring full: one thread.
__device__ __forceinline__ void produce(const Call &call, const Place &p) {
  const int groups = GROUP == 0 ? 0 : (p.units * GROUPS + EACH - 1) / EACH;
  uint32 slot = 0, parity = 1;
  const int64 policy = read_once();
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int eights[2] = {find_eight(call, tile, 0), find_eight(call, tile, 1)};
    for (int chunk = 0; chunk < p.chunks; chunk++) {
      const uint32 full = p.full + 8 * slot, stage = shared_address(p.ring) + slot * STAGE;
      const int here = min(CHUNK, p.units - chunk * CHUNK);
      const int words = GROUP == 0 ? 0 : (here * GROUPS + EACH - 1) / EACH;
      wait_for(p.empty + 8 * slot, parity);
      expect_bytes(full, 2 * (here * 512 + words * 32));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        copy_bytes(stage + i * CODE_BYTES, call.codes + (int64(eights[i]) * p.units + chunk * CHUNK) * 512, here * 512, full,
             policy);
        if (GROUP)
          copy_bytes(stage + 2 * CODE_BYTES + i * TABLE_BYTES,
               call.scales + (int64(eights[i]) * groups + chunk * (CHUNK * GROUPS / EACH)) * 8, words * 32, full, policy);
      }
      if (++slot == call.stages) slot = 0, parity ^= 1;
    }
  }
}

// `total` plus the products of a unit, whose codes lie at `codes` and whose scales at `scales` for this thread's rows.
__device__ __forceinline__ void add_unit(
    float *total, const char *codes, const uint32 *scales, const uint32 *whole, const Call &call, const Place &p,
    int unit) {
  const char *x = p.x + min(p.quad, call.rows - 1) * call.padded + (unit * UNIT + p.part * PIECE) * 2;
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
  float sum[CHAINS][4] = {};
#pragma unroll
  for (int plane = 0; plane < PLANES; plane++) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
#pragma unroll
      for (int pair = 0; pair < PIECE / 8; pair++) {
        const uint4 b = *(const uint4 *)(x + (plane * 64 + h * 32 + pair * 8) * 2);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          uint32 a[4];
          const int word = h * (PIECE / 4) + pair * 2 + j;
          decode(own[0][word], plane, a[0], a[2]);
          decode(own[1][word], plane, a[1], a[3]);
          multiply(sum[(plane * 2 + j) % CHAINS], a[0], a[1], a[2], a[3], j ? b.z : b.x, j ? b.w : b.y);
        }
      }
      const bool ends = GROUPS > PLANES || (h == HALVES - 1 && (GROUPS == PLANES || plane == PLANES - 1));
      if (!ends) continue;
      const int group = GROUPS == 1 ? 0 : plane * (GROUPS / PLANES) + (GROUPS == PLANES ? 0 : h);
      float x_sums[2] = {0.f, 0.f};
#pragma unroll
      for (int c = 0; c < 2; c++)
        if (CORRECTS) x_sums[c] = p.sums[(min(p.part * 2 + c, call.rows - 1) * p.units + unit) * GROUPS + group];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32 word = GROUP ? scales[i * (TABLE_BYTES / 4) + group * 8] : whole[i];
        const float scale = PAIRS ? half_of(word, false) : __uint_as_float(word);
        const float zero = BASE + (PAIRS ? half_of(word, true) : 0.f);
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float all = sum[0][2 * i + c] + sum[1][2 * i + c];
          if (CHAINS == 4) all += sum[CHAINS - 2][2 * i + c] + sum[CHAINS - 1][2 * i + c];
          total[2 * i + c] += scale * (CORRECTS ? all - zero * x_sums[c] : all);
          sum[0][2 * i + c] = sum[1][2 * i + c] = 0.f;
        }
      }
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
    float value[2] = {0.f, 0.f}, factor = LIFT;
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
    call.out[int64(m) * call.outputs + output] = uint16(narrow(out, 0.f));
  }
  __syncwarp();
  if (lane == 0) arrive(p.read + 8 * buffer);
}

// Multiply what `produce` copies. The warps take turns in finishing tiles, each after the next chunk.
__device__ __forceinline__ void consume(const Call &call, const Place &p) {
  uint32 slot = 0, parity = 0;
  int count = 0, pending = -1;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, count++) {
    float total[4] = {0.f, 0.f, 0.f, 0.f};
    uint32 whole[2] = {0, 0};
    if (GROUP == 0) {
#pragma unroll
      for (int i = 0; i < 2; i++) whole[i] = __ldg(call.scales + find_eight(call, tile, i) * 8 + p.quad);
    }
    for (int chunk = 0; chunk < p.chunks; chunk++) {
      const int here = min(CHUNK, p.units - chunk * CHUNK);
      const char *stage = p.ring + slot * STAGE;
      wait_for(p.full + 8 * slot, parity);
#pragma unroll EACH_WARP
      for (int u = p.warp; u < here; u += WARPS)
        add_unit(
            total, stage + u * 512 + p.quad * 64 + p.part * PIECE,
            (const uint32 *)(stage + 2 * CODE_BYTES) + u * GROUPS / EACH * 8 + p.quad, whole, call, p, chunk * CHUNK + u);
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(p.empty + 8 * slot);
      if (++slot == call.stages) slot = 0, parity ^= 1;
      if (pending >= 0) finish(call, p, pending, count - 1), pending = -1;
    }
    const int buffer = count % BUFFERS;
    wait_for(p.read + 8 * buffer, count / BUFFERS & 1 ^ 1);
    float *own = p.parts + ((buffer * WARPS + p.warp) * call.rows) * RED;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      if (p.part * 2 + c < call.rows) {
        own[(p.part * 2 + c) * RED + p.quad] = total[c];
        own[(p.part * 2 + c) * RED + p.quad + 8] = total[2 + c];
      }
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
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int width = p.units * UNIT;
    if (call.norm)
      stage_rows<true, 2>(call, (char *)p.x, p.sums, p.squares, width);
    else
      stage_rows<false, 7>(call, (char *)p.x, p.sums, p.squares, width);
    synchronise();
    consume(call, p);
  }
}
