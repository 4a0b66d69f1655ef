// Products of few rows of x with a bfloat16 weight: out [M, N] = x [M, K] times the weight [N, K] transposed, also with
// the norm before it and the gated activation after it. Bound by reading the weight once.
//
// A block has a range of outputs, whose rows of the weight are one piece of memory. One warp copies EACH rows at a time
// into a ring in shared memory, as far ahead as the ring is long, and begins before the previous kernel has ended. The
// others keep x in registers: a thread has the same VECS vectors of eight inputs of all rows, so that nothing but the
// weight is read in the loop. Their sums of all outputs are added up at the end, in a fixed order; with a norm the sums
// are multiplied by 1 / rms then, so that products need not wait for it.
//
// Compiled by NVRTC. Macros: ROWS of x; VECS of a thread, 2048 * VECS >= K; NORM 1: x plus the residual is normalised;
// GATED 1: the weight has N rows of gate, then N of up; WARPS that multiply.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int THREADS = 32 * WARPS;  // that multiply
constexpr int KINDS = GATED ? 2 : 1;
constexpr bool NARROW = !NORM && ROWS * VECS > 8;  // x stays in bfloat16, for want of registers
constexpr int WORDS = NARROW ? 4 : 8;              // registers of a vector of x

struct Call {
  const uint16 *x, *residual, *norm, *bias, *weight;
  uint16 *out, *total;
  int64 x_stride, residual_stride;
  int outputs, inputs, each, stages;  // each: outputs of a stage of the ring
  int gate;                           // 1 silu, 2 gelu_tanh
  float eps, offset;
};

// All threads that multiply.
__device__ __forceinline__ void synchronise() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ void widen_all(const uint4 &vector, float (&out)[8]) {
  const uint32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int j = 0; j < 4; j++) out[2 * j] = widen(words[j]), out[2 * j + 1] = widen_high(words[j]);
}

struct Place {  // of a block: its outputs, and what lies in shared memory
  int first, last;
  uint32 full, empty;  // barriers of the ring's stages
  const char *ring;
  float *squares, *parts;  // [ROWS, WARPS] for the norm; sums [outputs of the block, KINDS, ROWS, WARPS]
};

__device__ __forceinline__ Place find_place(const Call &call, char *memory) {
  Place p;
  p.first = int(int64(call.outputs) * blockIdx.x / gridDim.x);
  p.last = int(int64(call.outputs) * (blockIdx.x + 1) / gridDim.x);
  p.ring = memory;
  memory += call.stages * call.each * KINDS * call.inputs * 2;
  p.full = shared_address(memory), p.empty = p.full + 8 * call.stages;
  p.squares = (float *)(memory + 16 * call.stages);
  p.parts = p.squares + (NORM ? ROWS * WARPS : 0);
  return p;
}

// Keep the ring full: one thread.
__device__ __forceinline__ void produce(const Call &call, const Place &p) {
  const uint32 row_bytes = call.inputs * 2, stage_bytes = call.each * KINDS * row_bytes;
  uint32 slot = 0, parity = 1;
  const int64 policy = read_once();
  for (int n = p.first; n < p.last; n += call.each) {
    const uint32 full = p.full + 8 * slot, stage = shared_address(p.ring) + slot * stage_bytes;
    const uint32 bytes = min(call.each, p.last - n) * row_bytes;
    wait_for(p.empty + 8 * slot, parity);
    expect_bytes(full, KINDS * bytes);
#pragma unroll
    for (int kind = 0; kind < KINDS; kind++)
      copy_bytes(stage + kind * call.each * row_bytes, call.weight + (int64(kind) * call.outputs + n) * call.inputs, bytes,
           full, policy);
    if (++slot == call.stages) slot = 0, parity ^= 1;
  }
}

// This thread's part of x, or with a norm of x plus the residual times the norm's weight; `squares` of each warp.
__device__ __forceinline__ void load_rows(const Call &call, const Place &p, uint32 (&x)[ROWS][VECS][WORDS]) {
  const int warp = threadIdx.x / 32;
  uint4 weights[NORM ? VECS : 1];
  if (NORM) {  // which no kernel writes
#pragma unroll
    for (int i = 0; i < VECS; i++) {
      const int k = (threadIdx.x + i * THREADS) * 8;
      weights[i] = k < call.inputs ? __ldg((const uint4 *)(call.norm + k)) : uint4{0, 0, 0, 0};
    }
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  uint4 values[ROWS][VECS], residuals[NORM ? ROWS : 1][NORM ? VECS : 1];
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
#pragma unroll
    for (int i = 0; i < VECS; i++) {
      const int k = (threadIdx.x + i * THREADS) * 8;
      const bool inside = k < call.inputs;
      values[m][i] = inside ? *(const uint4 *)(call.x + m * call.x_stride + k) : uint4{0, 0, 0, 0};
      if (NORM)
        residuals[m][i] = inside ? *(const uint4 *)(call.residual + m * call.residual_stride + k) : uint4{0, 0, 0, 0};
    }
  }
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
      if (NARROW) {
        x[m][i][0] = values[m][i].x, x[m][i][1] = values[m][i].y, x[m][i][2] = values[m][i].z,
        x[m][i][3] = values[m][i].w;
        continue;
      }
      float v[8];
      widen_all(values[m][i], v);
      if (NORM) {
        const int k = (threadIdx.x + i * THREADS) * 8;
        float r[8], w[8];
        uint32 sums[4];
        widen_all(residuals[m][i], r), widen_all(weights[i], w);
#pragma unroll
        for (int j = 0; j < 4; j++) {  // rounded first: the norm sees what the next layer will read
          sums[j] = narrow(v[2 * j] + r[2 * j], v[2 * j + 1] + r[2 * j + 1]);
          v[2 * j] = widen(sums[j]), v[2 * j + 1] = widen_high(sums[j]);
        }
        if (blockIdx.x == 0 && k < call.inputs)
          *(uint4 *)(call.total + int64(m) * call.inputs + k) = uint4{sums[0], sums[1], sums[2], sums[3]};
#pragma unroll
        for (int j = 0; j < 8; j++) {
          square += v[j] * v[j];
          v[j] = k < call.inputs ? v[j] * (w[j] + call.offset) : 0.f;
        }
      }
#pragma unroll
      for (int j = 0; j < 8; j++) x[m][i][j % WORDS] = __float_as_uint(v[j]);
    }
    if (NORM) {
#pragma unroll
      for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
      if (threadIdx.x % 32 == 0) p.squares[m * WARPS + warp] = square;
    }
  }
}

// Sums over the lanes of COUNT values: lane i has value i / (32 / COUNT).
template <int COUNT>
__device__ __forceinline__ float add_lanes(float (&values)[COUNT]) {
  const int lane = threadIdx.x % 32;
  int step = 16;
#pragma unroll
  for (int half = COUNT / 2; half; half >>= 1, step >>= 1) {
#pragma unroll
    for (int j = 0; j < half; j++) {
      const bool upper = lane & step;
      const float sent = upper ? values[j] : values[j + half], kept = upper ? values[j + half] : values[j];
      values[j] = kept + __shfl_xor_sync(~0u, sent, step);
    }
  }
  float sum = values[0];
#pragma unroll
  for (; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// The sums of this warp of BATCH outputs, whose rows of the weight begin at `rows`, and of up `apart` bytes behind them.
template <int BATCH>
__device__ __forceinline__ void multiply_rows(
    const Call &call, const char *rows, int64 apart, const uint32 (&x)[ROWS][VECS][WORDS], float *parts) {
  constexpr int M = ROWS == 3 ? 4 : ROWS, COUNT = BATCH * KINDS * M;
  float sums[COUNT] = {};
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    const int k = (threadIdx.x + i * THREADS) * 8;
    if (k >= call.inputs) break;
#pragma unroll
    for (int r = 0; r < BATCH * KINDS; r++) {
      float w[8];
      widen_all(*(const uint4 *)(rows + r % KINDS * apart + (int64(r / KINDS) * call.inputs + k) * 2), w);
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float own = NARROW ? (j % 2 ? widen_high(x[m][i][j / 2 % WORDS]) : widen(x[m][i][j / 2 % WORDS]))
                                   : __uint_as_float(x[m][i][j % WORDS]);
          sums[r * M + m] += w[j] * own;
        }
      }
    }
  }
  const float sum = add_lanes(sums);
  const int lane = threadIdx.x % 32, index = lane / (32 / COUNT);
  if (lane % (32 / COUNT) == 0 && index % M < ROWS)
    parts[(index / M * ROWS + index % M) * WARPS + threadIdx.x / 32] = sum;
}

__device__ __forceinline__ void consume(const Call &call, const Place &p, const uint32 (&x)[ROWS][VECS][WORDS]) {
  constexpr int BATCH = (ROWS > 2 ? 2 : 4) / KINDS, EACH = KINDS * ROWS * WARPS;
  const int row_bytes = call.inputs * 2, stage_bytes = call.each * KINDS * row_bytes;
  const int64 apart = int64(call.each) * row_bytes;
  uint32 slot = 0, parity = 0;
  for (int n = p.first; n < p.last; n += call.each) {
    const int here = min(call.each, p.last - n);
    const char *rows = p.ring + slot * stage_bytes;
    float *parts = p.parts + (n - p.first) * EACH;
    wait_for(p.full + 8 * slot, parity);
    int r = 0;
    for (; r + BATCH <= here; r += BATCH) multiply_rows<BATCH>(call, rows + r * row_bytes, apart, x, parts + r * EACH);
    if (BATCH > 2 && r + 2 <= here) {
      multiply_rows<2>(call, rows + r * row_bytes, apart, x, parts + r * EACH);
      r += 2;
    }
    if (BATCH > 1 && r < here) multiply_rows<1>(call, rows + r * row_bytes, apart, x, parts + r * EACH);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(p.empty + 8 * slot);
    if (++slot == call.stages) slot = 0, parity ^= 1;
  }
}

// Add up the warps' sums, and store what follows them.
__device__ __forceinline__ void finish(const Call &call, const Place &p) {
  for (int at = threadIdx.x; at < (p.last - p.first) * ROWS; at += THREADS) {
    const int index = at / ROWS, m = at - index * ROWS, output = p.first + index;
    float factor = 1.f, value[KINDS];
    if (NORM) {
      float square = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) square += p.squares[m * WARPS + w];
      factor = rsqrtf(square / call.inputs + call.eps);
    }
#pragma unroll
    for (int kind = 0; kind < KINDS; kind++) {
      const float *from = p.parts + ((index * KINDS + kind) * ROWS + m) * WARPS;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += from[w];
      value[kind] = sum * factor;
      if (call.bias) value[kind] += widen(call.bias[output + kind * call.outputs]);
    }
    const float out = GATED ? gated(call.gate, value[0], value[KINDS - 1]) : value[0];
    call.out[int64(m) * call.outputs + output] = narrow(out);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) plain_rows(const Call call) {
  extern __shared__ __align__(128) char memory[];
  const Place p = find_place(call, memory);
  if (threadIdx.x == THREADS) {
    for (int s = 0; s < call.stages; s++) {
      init_barrier(p.full + 8 * s, 1);
      init_barrier(p.empty + 8 * s, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    // weights, which no kernel writes, are asked for before the previous kernel has ended
    if (threadIdx.x == THREADS) produce(call, p);
  } else {
    uint32 x[ROWS][VECS][WORDS];
    load_rows(call, p, x);
    consume(call, p, x);
    synchronise();
    finish(call, p);
  }
}
