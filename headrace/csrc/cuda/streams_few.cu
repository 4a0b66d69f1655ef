// Hyper-connections of four streams for few tokens: from one sublayer's output to the next one's input in one kernel.
//
// A cluster of CLUSTER blocks has a token; each block has COLUMNS of the hidden size of all streams, a thread one
// column. Weights are loaded before the wait, as no kernel writes them: to shared memory, a third of them to registers,
// so that a block finds room beside one of the kernel before (fp8_rows.cu takes 140 KB and 72 registers a
// thread) and does not begin only when that has ended. After the wait a thread reads its column, writes back what is
// pending (with -DWRITES=1), and multiplies; sums of all blocks meet in each block's shared memory, so that each knows
// the weights of the streams; the same once more for the norm. One warp more of a block balances the S x S matrix of a
// token meanwhile, all of it in the registers of each of its lanes.
//
// With -DWORLD of 2 to 8 what is pending is one rank's part of a sum, which is added up first, by the threads that need
// it: one kernel instead of two, and nothing goes to memory between them. Each block has the same columns on all ranks.
//
// Everything is float32. Compiled by NVRTC. -DHELD: rows of a thread's weights that are in registers; -DTYPE=1 for
// mailboxes.

#include "mailbox.cuh"
#include "stream_weights.cuh"
#include "cluster_sums.cuh"

constexpr int ROW = 32;  // a row of sums: WEIGHTS products, then the sum of squares
constexpr int WORKERS = COLUMNS, WARPS = WORKERS / 32, THREADS = WORKERS + 32;  // whole warps
constexpr int PIECES = COLUMNS / 4;  // of 16 bytes of a row of weights
constexpr int EIGHTS = COLUMNS / 8;  // vectors of a block's columns
constexpr bool SUMS = WORLD > 1;

struct Shared {
  float sums[CLUSTER][ROW], squares[CLUSTER];  // written by all blocks
  float parts[WARPS][ROW];
  float pre[S], post[S], mix[S][S];
  uint4 totals[SUMS ? EIGHTS : 1];   // what is pending, of all ranks
  uint64 sums_there, squares_there;  // barriers that wait for their bytes, once
};

__device__ __forceinline__ float widen(uint16 x) { return __uint_as_float(uint32(x) << 16); }

__device__ __forceinline__ uint16 narrow(float x) {  // to nearest, ties to even
  uint16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32 address_of(const void *at) {
  return static_cast<uint32>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ void sync_workers() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// Sums over a warp's lanes of 32 values each: lane i gets that of value i.
template <int STEP>
__device__ __forceinline__ float scatter_sums(float (&v)[2 * STEP], int lane) {
  const bool is_upper = lane & STEP;
  float kept[STEP];
#pragma unroll
  for (int i = 0; i < STEP; i++) {
    const float give = is_upper ? v[i] : v[i + STEP], keep = is_upper ? v[i + STEP] : v[i];
    kept[i] = keep + __shfl_xor_sync(~0u, give, STEP);
  }
  if constexpr (STEP > 1)
    return scatter_sums<STEP / 2>(kept, lane);
  else
    return kept[0];
}

// Lane w: weight w of the token, before sigmoid and balance. `scale` and `base` are those of the weight, and were loaded
// before the wait.
__device__ __forceinline__ float weigh(
    const Call &call, const Shared &shared, int lane, float scale, float base) {
  float own = 0.f;
#pragma unroll
  for (int block = 0; block < CLUSTER; block++) own += shared.sums[block][lane];
  // the streams are normalised as one vector, after the products
  own *= rsqrtf(__shfl_sync(~0u, own, WEIGHTS) / (float(S) * call.width) + call.norm_eps);
  return own * scale + base;
}

#if WORLD > 1
// What is pending, of all ranks: a vector for each of the first threads.
__device__ __forceinline__ void sum_ranks(const Call &call, Shared &shared, uint32 number, int64 token, int rank) {
  const int eight = threadIdx.x;
  if (eight >= EIGHTS) return;
  const int column = rank * COLUMNS + eight * 8;
  uint4 own = *(const uint4 *)(call.out + token * call.out_stride + column);
  if (call.more) own = add_two(own, *(const uint4 *)(call.more + token * call.more_stride + column));
  Patience patience(call.ranks);
  const uint64 each = call.width / 8;  // vectors of a token
  shared.totals[eight] = sum_vector(call.ranks, number, call.tokens * each, token * each + column / 8, own, patience);
}
#endif

// A thread's column of all streams: what is pending is written back, in the dtype of the streams. All loads are on their
// way at once.
__device__ __forceinline__ void read_column(
    const Call &call, Shared &shared, float (&x)[S], int64 token, int column, uint32 number) {
  constexpr int FACTORS = S * (1 + S);  // of post and mix
  static_assert(FACTORS <= WORKERS, "a thread reads one");
  uint16 own[S];
  const int k = threadIdx.x;
  float factor = 0.f;
  if (WRITES && k < FACTORS) factor = k < S ? call.post[token * S + k] : call.mix[token * S * S + k - S];
#pragma unroll
  for (int s = 0; s < S; s++) own[s] = call.streams[token * call.token_stride + s * call.stream_stride + column];
  uint16 out = WRITES && !SUMS ? call.out[token * call.out_stride + column] : 0;
  const uint16 more = WRITES && !SUMS && call.more ? call.more[token * call.more_stride + column] : 0;
#if WORLD > 1
  sum_ranks(call, shared, number, token, column / COLUMNS);
#endif
  if (WRITES && k < FACTORS) (k < S ? &shared.post[k] : &shared.mix[0][0] + (k - S))[0] = factor;
  if (WRITES) sync_workers();  // post and mix, and totals, are in shared memory
  if (SUMS) out = ((const uint16 *)shared.totals)[threadIdx.x];
  const float written = widen(narrow(widen(out) + widen(more)));
#pragma unroll
  for (int k = 0; k < S; k++) {
    x[k] = widen(own[k]);
    if (!WRITES) continue;
    float sum = shared.post[k] * written;
#pragma unroll
    for (int j = 0; j < S; j++) sum += shared.mix[j][k] * widen(own[j]);
    const uint16 rounded = narrow(sum);  // first: the next sublayer sees what is written
    x[k] = widen(rounded);
    call.fresh[(token * S + k) * call.width + column] = rounded;
  }
}

struct Weights {  // of all streams, rows of WEIGHTS x S
  float held[HELD];  // of the thread's column
  float *shared;     // [WEIGHTS * S - HELD, COLUMNS], of the block's
};

// Ask for the weights. Loads are volatile, so that they are on their way before the wait.
__device__ __forceinline__ void load_weights(const Call &call, Weights &weights, int rank) {
  if (threadIdx.x < WORKERS) {
    const float *from = call.fn + rank * COLUMNS + threadIdx.x;
#pragma unroll
    for (int row = 0; row < HELD; row++)
      asm volatile("ld.global.f32 %0, [%1];"
                   : "=f"(weights.held[row]) : "l"(from + int64(row) * call.width) : "memory");
  }
  for (int at = threadIdx.x; at < (WEIGHTS * S - HELD) * PIECES; at += THREADS) {
    const int row = HELD + at / PIECES, piece = at % PIECES;
    const float *from = call.fn + int64(row) * call.width + rank * COLUMNS + piece * 4;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address_of(weights.shared + at * 4)), "l"(from)
                 : "memory");
  }
}

// Sums of a warp's columns, to `shared.parts`.
__device__ __forceinline__ void multiply(const Weights &weights, Shared &shared, const float (&x)[S]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float total[ROW] = {};
  const float *at = weights.shared + threadIdx.x;
#pragma unroll
  for (int w = 0; w < WEIGHTS; w++) {
#pragma unroll
    for (int k = 0; k < S; k++) {
      const int row = w * S + k;
      total[w] += (row < HELD ? weights.held[row % HELD] : at[(row - HELD) * COLUMNS]) * x[k];
    }
  }
#pragma unroll
  for (int k = 0; k < S; k++) total[WEIGHTS] += x[k] * x[k];
  shared.parts[warp][lane] = scatter_sums<ROW / 2>(total, lane);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) pass_streams(
    const __grid_constant__ Call call) {
  extern __shared__ __align__(16) float fn[];
  __shared__ Shared shared;
  const int lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
  const int64 token = blockIdx.x / CLUSTER;
  const bool is_worker = threadIdx.x < WORKERS;
  const int column = rank * COLUMNS + threadIdx.x % WORKERS;
  Weights weights;
  weights.shared = fn;
  load_weights(call, weights, rank);
  const float norm = widen(call.norm[column]);
  const bool is_weight = lane < WEIGHTS;
  const float scale = is_weight ? call.scale[lane < S ? 0 : lane < 2 * S ? 1 : 2] : 0.f;
  const float base = is_weight ? call.base[lane] : 0.f;
  if (threadIdx.x == 0) {
    expect_sums(address_of(&shared.sums_there), sizeof(shared.sums));
    expect_sums(address_of(&shared.squares_there), sizeof(shared.squares));
    publish_barriers();
  }
  __syncwarp();
  // no block sends to another before that one's barriers are there
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  float x[S];
  uint32 number = 0;
#if WORLD > 1
  uint32 *calls = ((Control *)call.ranks.mailboxes[call.ranks.rank])->sums;
  number = peek_word(&calls[blockIdx.x]);
#endif
  if (is_worker) read_column(call, shared, x, token, column, number);
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
#if WORLD > 1
  count_call(calls, number);
#endif
  if (is_worker) multiply(weights, shared, x);
  __syncthreads();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  for (int at = threadIdx.x; at < ROW / 4 * CLUSTER; at += THREADS) {
    const int four = at / CLUSTER;
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
      const float4 part = ((const float4 *)shared.parts[warp])[four];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    send(address_of((float4 *)shared.sums[rank] + four), address_of(&shared.sums_there), at % CLUSTER, sum);
  }
  wait_for_sums(address_of(&shared.sums_there));
  if (!is_worker) {
    if (rank == 0) balance(call, weigh(call, shared, lane, scale, base), token, lane);
    return;
  }
  if (threadIdx.x < 32) {
    const float own = weigh(call, shared, lane, scale, base);
    if (lane < S) shared.pre[lane] = sigmoid(own) + call.eps;
  }
  sync_workers();
  float total = 0.f;
#pragma unroll
  for (int k = 0; k < S; k++) total += shared.pre[k] * x[k];
  const uint16 sum = narrow(total);  // the norm sees the rounded sum
  float square = widen(sum) * widen(sum);
#pragma unroll
  for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
  if (lane == 0) shared.parts[threadIdx.x / 32][0] = square;
  sync_workers();
  if (threadIdx.x < CLUSTER) {
    float own = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) own += shared.parts[warp][0];
    send(address_of(&shared.squares[rank]), address_of(&shared.squares_there), threadIdx.x, own);
  }
  wait_for_sums(address_of(&shared.squares_there));
  float squares = 0.f;
#pragma unroll
  for (int block = 0; block < CLUSTER; block++) squares += shared.squares[block];
  const float factor = rsqrtf(squares / call.width + call.norm_eps);
  call.x[token * call.width + column] = narrow(widen(sum) * factor * norm);
}
