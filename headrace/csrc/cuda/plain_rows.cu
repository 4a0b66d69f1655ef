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
// GATED 1: the weight has N rows of gate, then N of up; ADAPTED 1: adapters add to the product; WARPS that multiply.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int THREADS = 32 * WARPS;  // that multiply
constexpr int KINDS = GATED ? 2 : 1;
constexpr bool NARROW = !NORM && ROWS * VECS > 8;  // x stays in bfloat16, for want of registers
constexpr int WORDS = NARROW ? 4 : 8;              // registers of a vector of x
constexpr int MOST_PARTS = 4;

struct Call {
  const uint16 *x, *residual, *norm, *bias, *weight;
  uint16 *out, *total;
  int64 x_stride, residual_stride;
  int outputs, inputs, each, stages;  // each: outputs of a stage of the ring
  int gate;                           // 1 silu, 2 gelu_tanh
  float eps, offset;
  // ADAPTED: a [slots, PARTS, R, K] and b [slots, R, N of all kinds]; ranks [slots, PARTS] and, by place, row and slot;
  // `launches` counts blocks and launches, `sums` [ROWS, PARTS, R] are published ones; part p ends at output ends[p]
  const uint16 *a, *b;
  const int64 *ranks, *order, *slots;
  uint64 *launches, *sums;
  int parts, most_ranks, ends[MOST_PARTS];
};

// All threads that multiply.
__device__ __forceinline__ void synchronise() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ void widen_all(const uint4 &vector, float (&out)[8]) {
  const uint32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int j = 0; j < 4; j++) out[2 * j] = widen(words[j]), out[2 * j + 1] = widen_high(words[j]);
}

// The jth of eight inputs.
__device__ __forceinline__ float input_of(const uint32 (&vector)[WORDS], int j) {
  if (!NARROW) return __uint_as_float(vector[j % WORDS]);
  const uint32 pair = vector[j / 2 % WORDS];
  return j % 2 ? widen_high(pair) : widen(pair);
}

struct Place {  // of a block: its outputs, and what lies in shared memory
  int first, last;
  uint32 full, empty;  // barriers of the ring's stages
  const char *ring;
  float *squares, *parts;  // [ROWS, WARPS] for the norm; sums [outputs of the block, KINDS, ROWS, WARPS]
  float *reduced, *pieces;  // ADAPTED: sums of all ranks [ROWS, PARTS, R]; of this block's, [own ranks, WARPS]
  uint32 *launch;           // and the number of this launch
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
  if (ADAPTED) {
    p.reduced = p.parts + (p.last - p.first) * KINDS * ROWS * WARPS;
    const int sums = ROWS * call.parts * call.most_ranks;
    p.pieces = p.reduced + sums;
    p.launch = (uint32 *)(p.pieces + (sums + gridDim.x - 1) / gridDim.x * WARPS);
  }
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

// A row of x and its adapter.
struct Adapted {
  int64 slot;  // -1: none
  int ranks[MOST_PARTS];  // of each part, in multiples of 16
};

__device__ __forceinline__ Adapted find_adapter(const Call &call, int row) {
  Adapted found{-1, {}};
#pragma unroll
  for (int place = 0; place < ROWS; place++)
    if (call.order[place] == row) found.slot = call.slots[place];
#pragma unroll
  for (int part = 0; part < MOST_PARTS; part++)
    if (found.slot >= 0 && part < call.parts)
      found.ranks[part] = int(call.ranks[found.slot * call.parts + part] + 15) / 16 * 16;
  return found;
}

// One row of a for one row of x.
struct Rank {
  int row, part, index;
  __device__ Rank(const Call &call, int sum) {
    index = sum % call.most_ranks, sum /= call.most_ranks;
    part = sum % call.parts, row = sum / call.parts;
  }
};

template <class Of, int COUNT>
__device__ __forceinline__ Of pick(const Of (&of)[COUNT], int index) {  // of registers, which have constant indices alone
  Of found = of[0];
#pragma unroll
  for (int i = 1; i < COUNT; i++)
    if (index == i) found = of[i];
  return found;
}

__device__ __forceinline__ const uint16 *find_row(const Call &call, const Adapted &own, const Rank &rank) {  // of a
  return call.a + ((own.slot * call.parts + rank.part) * call.most_ranks + rank.index) * int64(call.inputs);
}

// Ask the L2 for this block's part of a and of b, by `lanes` threads.
__device__ __forceinline__ void ask_for_factors(
    const Call &call, const Place &p, const Adapted (&adapted)[ROWS], int lane, int lanes) {
  for (int index = blockIdx.x; index < ROWS * call.parts * call.most_ranks; index += gridDim.x) {
    const Rank rank(call, index);
    const Adapted own = pick(adapted, rank.row);
    if (own.slot >= 0 && rank.index < pick(own.ranks, rank.part))
      for (int k = lane * 64; k < call.inputs; k += lanes * 64) prefetch_line(find_row(call, own, rank) + k);
  }
  for (int row = 0; row < ROWS; row++) {
    const Adapted own = pick(adapted, row);
    int most = 0;
    for (int part = 0; part < MOST_PARTS; part++) most = max(most, own.ranks[part]);
    for (int r = lane; r < most * KINDS; r += lanes) {
      const uint16 *from = call.b + ((own.slot * call.most_ranks + r / KINDS) * KINDS + r % KINDS) * call.outputs;
      for (int n = p.first; n < p.last + 63; n += 64) prefetch_line(from + min(n, p.last - 1));
    }
  }
}

// This launch's number, the same for all blocks: the upper half of `launches`, whose lower half counts its blocks.
__device__ __forceinline__ void count_launch(const Call &call, const Place &p) {
  const uint64 before = atomicAdd(call.launches, 1ull);
  if (uint32(before) == gridDim.x - 1) *call.launches = ((before >> 32) + 1) << 32;  // the last one
  *p.launch = uint32(before >> 32) + 1;
}

__device__ __forceinline__ void publish(uint64 *to, float sum, uint32 launch) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(uint64(launch) << 32 | __float_as_uint(sum))
               : "memory");
}
__device__ __forceinline__ float await_sum(const uint64 *from, uint32 launch) {
  uint64 word;
  do {
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  } while (uint32(word >> 32) != launch);
  return __uint_as_float(uint32(word));
}

// This thread's part of x, or with a norm of x plus the residual times the norm's weight; `squares` of each warp.
__device__ __forceinline__ void load_rows(const Call &call, const Place &p, uint32 (&x)[ROWS][VECS][WORDS]) {
  const int warp = threadIdx.x / 32;
  uint4 weights[NORM ? VECS : 1];
  if (NORM) {  // which no kernel writes; a load by __ldg would be moved behind the wait
#pragma unroll
    for (int i = 0; i < VECS; i++) {
      const int k = (threadIdx.x + i * THREADS) * 8;
      weights[i] = k < call.inputs ? *(const uint4 *)(call.norm + k) : uint4{0, 0, 0, 0};
    }
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (ADAPTED && threadIdx.x == 0) count_launch(call, p);
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
          sums[r * M + m] += w[j] * input_of(x[m][i], j);
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

// 1 / rms of a row, once all warps have left their squares.
__device__ __forceinline__ float find_factor(const Call &call, const Place &p, int m) {
  float square = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) square += p.squares[m * WARPS + w];
  return rsqrtf(square / call.inputs + call.eps);
}

// This block's rows of a times x, published.
__device__ __forceinline__ void reduce(
    const Call &call, const Place &p, const Adapted (&adapted)[ROWS], const uint32 (&x)[ROWS][VECS][WORDS]) {
  const int sums = ROWS * call.parts * call.most_ranks;
  int own = 0;
  for (int index = blockIdx.x; index < sums; index += gridDim.x, own++) {
    const Rank rank(call, index);
    const Adapted mine = pick(adapted, rank.row);
    const bool is_there = mine.slot >= 0 && rank.index < pick(mine.ranks, rank.part);
    const uint16 *row = find_row(call, mine, rank);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
      const int k = (threadIdx.x + i * THREADS) * 8;
      if (!is_there || k >= call.inputs) break;
      float w[8];
      widen_all(*(const uint4 *)(row + k), w);
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
          sum += m == rank.row ? w[j] * input_of(x[m][i], j) : 0.f;
        }
      }
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) p.pieces[own * WARPS + threadIdx.x / 32] = sum;
  }
  synchronise();  // also for the launch's number
  if (threadIdx.x < own) {
    const int index = blockIdx.x + threadIdx.x * gridDim.x;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += p.pieces[threadIdx.x * WARPS + w];
    if (NORM) sum *= find_factor(call, p, Rank(call, index).row);
    publish(call.sums + index, sum, *p.launch);
  }
}

// Wait for the sums of all rows of a.
__device__ __forceinline__ void await_reduced(const Call &call, const Place &p) {
  for (int index = threadIdx.x; index < ROWS * call.parts * call.most_ranks; index += THREADS)
    p.reduced[index] = await_sum(call.sums + index, *p.launch);
}

// What the row's adapter adds to an output of all kinds.
__device__ __forceinline__ float expand(const Call &call, const Place &p, const Adapted &own, int m, int output) {
  if (own.slot < 0) return 0.f;
  int part = 0;
#pragma unroll
  for (int i = 0; i < MOST_PARTS - 1; i++) part += i < call.parts - 1 && output >= call.ends[i];
  const int64 width = int64(call.outputs) * KINDS;
  const uint16 *b = call.b + own.slot * call.most_ranks * width + output;
  const float *a = p.reduced + (m * call.parts + part) * call.most_ranks;
  const int ranks = pick(own.ranks, part);
  float sum = 0.f;
  for (int first = 0; first < ranks; first += 16) {
    uint16 factors[16];
#pragma unroll
    for (int r = 0; r < 16; r++) factors[r] = b[(first + r) * width];
#pragma unroll
    for (int r = 0; r < 16; r++) sum += a[first + r] * widen(factors[r]);
  }
  return sum;
}

// Biases of a result. Volatile, to be asked for where it is called: they come from memory.
__device__ __forceinline__ void read_biases(uint16 (&bias)[KINDS], const Call &call, const Place &p, int at) {
  if (!call.bias || at >= (p.last - p.first) * ROWS) return;
#pragma unroll
  for (int kind = 0; kind < KINDS; kind++)
    asm volatile("ld.global.u16 %0, [%1];"
                 : "=h"(bias[kind]) : "l"(call.bias + p.first + at / ROWS + kind * call.outputs));
}

// Add up the warps' sums, and store what follows them. `bias`: of the thread's first result.
__device__ __forceinline__ void finish(
    const Call &call, const Place &p, const Adapted (&adapted)[ROWS], uint16 (&bias)[KINDS]) {
  for (int at = threadIdx.x; at < (p.last - p.first) * ROWS; at += THREADS) {
    if (at >= THREADS) read_biases(bias, call, p, at);
    const int index = at / ROWS, m = at - index * ROWS, output = p.first + index;
    float factor = 1.f, value[KINDS];
    if (NORM) factor = find_factor(call, p, m);
#pragma unroll
    for (int kind = 0; kind < KINDS; kind++) {
      const float *from = p.parts + ((index * KINDS + kind) * ROWS + m) * WARPS;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += from[w];
      value[kind] = sum * factor;
      value[kind] += widen(bias[kind]);
      if (ADAPTED) value[kind] += expand(call, p, pick(adapted, m), m, output + kind * call.outputs);
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
  Adapted adapted[ROWS];
#pragma unroll
  for (int m = 0; m < ROWS; m++)
    if (ADAPTED) adapted[m] = find_adapter(call, m);  // written by no kernel that still runs
  if (threadIdx.x >= THREADS) {
    // weights, which no kernel writes, are asked for before the previous kernel has ended
    if (threadIdx.x == THREADS)
      produce(call, p);
    else if (ADAPTED)
      ask_for_factors(call, p, adapted, threadIdx.x - THREADS - 1, 31);
  } else {
    uint16 bias[KINDS] = {};
    read_biases(bias, call, p, threadIdx.x);
    uint32 x[ROWS][VECS][WORDS];
    load_rows(call, p, x);
    if (ADAPTED) reduce(call, p, adapted, x);
    consume(call, p, x);
    if (ADAPTED) await_reduced(call, p);
    synchronise();
    finish(call, p, adapted, bias);
  }
}
