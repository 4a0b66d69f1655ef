// The residual addition and norm before an MLP of experts, the router's product and its choice of experts, for a few
// tokens in one launch. bfloat16; scores in float32.
//
// A cluster of eight blocks has a token. Each block normalises the whole row by itself, which is cheaper than to tell the
// others, and multiplies it with an eighth of the router's rows, which it copied into shared memory before the previous
// kernel ended. Products go to the first block, whose first warp chooses; the second one stores the row.
//
// Compiled by NVRTC. Macros: EXPERTS; CHUNKS of 2,048 inputs; SCORE 0 softmax, 1 sigmoid, 2
// sqrt_softplus; RENORMALISE.

#include "numbers.cuh"
#include "cluster_sums.cuh"
#include "route_choice.cuh"

constexpr int CLUSTER = 8, WARPS = 8, THREADS = 32 * WARPS;
constexpr int OWN = (EXPERTS + CLUSTER - 1) / CLUSTER;                // experts of a block
constexpr int SHARES = OWN >= WARPS ? 1 : WARPS / OWN;                // warps that share an expert's inputs
constexpr int EACH = OWN >= WARPS ? (OWN + WARPS - 1) / WARPS : 1;    // experts of a warp

struct Call {
  const void *pending;       // [T, D], or `partials` sums [S, T, D] float32
  uint16 *residual;          // [T, D], which becomes the sum
  const uint16 *norm, *weight, *bias;  // [D], [X, D], [X] or null
  const float *choice_bias;  // [X] or null
  uint16 *out;               // [T, D]
  int64 *ids;                // [T, k]
  float *weights;
  int64 pending_stride, partial_stride, residual_stride, weight_stride;
  int inputs, top_k, partials;
  float eps, offset, scale, least_sum;
};

__device__ __forceinline__ uint32 address(const void *p) { return uint32(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void copy16(uint32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Relaxed: releasing memory would be a fence of the GPU's memory, and wait for rows that were just written.
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void await() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ int find_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) norm_route(
    const __grid_constant__ Call call) {
  extern __shared__ __align__(16) char memory[];
  const int token = blockIdx.x / CLUSTER, rank = find_rank(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ __align__(8) uint64 there;
  const uint32 bar = address(&there);
  if (rank == 0 && threadIdx.x == 0) {
    expect_sums(bar, EXPERTS * SHARES * 4);
    publish_barriers();
  }
  __syncthreads();
  arrive();  // a block's memory may be written once it has started
  const int eights = call.inputs / 8, num_own = max(0, min(OWN, EXPERTS - rank * OWN));
  float *parts = (float *)memory, *squares = parts + EXPERTS * SHARES;  // [X, SHARES] in the first block
  uint4 *x = (uint4 *)(memory + (EXPERTS * SHARES + WARPS + 3) / 4 * 16), *rows = x + eights;  // [OWN, D]
  for (int at = threadIdx.x; at < num_own * eights; at += THREADS) {
    const int row = at / eights, column = at - row * eights;
    copy16(address(rows + at), call.weight + (rank * OWN + row) * call.weight_stride + column * 8);
  }
  uint4 norm[CHUNKS], total[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int at = i * THREADS + threadIdx.x;
    norm[i] = at < eights ? ((const uint4 *)call.norm)[at] : uint4{0, 0, 0, 0};
  }
  const bool chooses = rank == 0 && warp == 0;
  const Biases biases = load_biases(chooses ? call.bias : nullptr, chooses ? call.choice_bias : nullptr);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int at = i * THREADS + threadIdx.x;
    total[i] = uint4{0, 0, 0, 0};
    if (at >= eights) continue;
    uint32 *words = (uint32 *)&total[i], pending[4];
    *(uint4 *)words = *(const uint4 *)(call.residual + token * call.residual_stride + at * 8);
    if (call.partials) {
      float sums[8] = {};
      for (int s = 0; s < call.partials; s++) {
        const float4 *from =
            (const float4 *)((const float *)call.pending + s * call.partial_stride + token * call.pending_stride + at * 8);
        const float4 low = from[0], high = from[1];
        sums[0] += low.x, sums[1] += low.y, sums[2] += low.z, sums[3] += low.w;
        sums[4] += high.x, sums[5] += high.y, sums[6] += high.z, sums[7] += high.w;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) pending[j] = narrow(sums[2 * j], sums[2 * j + 1]);
    } else {
      *(uint4 *)pending = *(const uint4 *)((const uint16 *)call.pending + token * call.pending_stride + at * 8);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      words[j] = narrow(widen(words[j]) + widen(pending[j]), widen_high(words[j]) + widen_high(pending[j]));
      square += widen(words[j]) * widen(words[j]) + widen_high(words[j]) * widen_high(words[j]);
    }
  }
  square = sum_of_warp(square);
  if (lane == 0) squares[warp] = square;
  __syncthreads();
  square = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) square += squares[i];
  const float factor = rsqrtf(square / call.inputs + call.eps);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at >= eights) continue;
    const uint32 *words = (const uint32 *)&total[i], *scale = (const uint32 *)&norm[i];
    uint32 put[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      put[j] = narrow(widen(words[j]) * factor * (widen(scale[j]) + call.offset),
                      widen_high(words[j]) * factor * (widen_high(scale[j]) + call.offset));
    x[at] = *(const uint4 *)put;
    if (rank == 1) ((uint4 *)(call.out + int64(token) * call.inputs))[at] = *(const uint4 *)put;
  }
  wait_for_copies();
  __syncthreads();
  const int first = SHARES > 1 ? warp / SHARES : warp * EACH, share = warp % SHARES;
  float sums[EACH] = {};
  for (int at = share * 32 + lane; at < eights; at += 32 * SHARES) {
    const uint4 v = x[at];
    const uint32 *values = (const uint32 *)&v;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      if (first + e >= num_own) break;
      const uint4 w = rows[(first + e) * eights + at];
      const uint32 *words = (const uint32 *)&w;
#pragma unroll
      for (int j = 0; j < 4; j++)
        sums[e] += widen(values[j]) * widen(words[j]) + widen_high(values[j]) * widen_high(words[j]);
    }
  }
  await();   // all blocks have begun
  arrive();  // this one has read the row: the sum of its squares is known
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const float sum = sum_of_warp(sums[e]);
    if (lane == 0 && first + e < num_own) send(address(parts + (rank * OWN + first + e) * SHARES + share), bar, 0, sum);
  }
  if (chooses) {
    wait_for_sums(bar);
    __syncwarp();
    float logits[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      const int expert = j * 32 + lane;
      logits[j] = 0.f;
#pragma unroll
      for (int share = 0; share < SHARES; share++)
        logits[j] += expert < EXPERTS ? parts[expert * SHARES + share] : 0.f;
    }
    const int64 at = int64(token) * call.top_k;
    choose(logits, biases, call.ids + at, call.weights + at, call.top_k, call.scale, call.least_sum);
    __syncwarp();
  }
  await();
  if (rank == 1) {  // the other blocks have read the row
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int at = i * THREADS + threadIdx.x;
      if (at < eights) *(uint4 *)(call.residual + token * call.residual_stride + at * 8) = total[i];
    }
  }
}
