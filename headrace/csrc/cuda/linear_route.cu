// A router's product and its choice of experts in one launch, for up to some hundred tokens whose norm another kernel
// computed. bfloat16; scores in float32.
//
// A cluster has TOKENS tokens, and each of its blocks some of the experts. Warps divide the inputs: each keeps its part
// of the router's rows in registers, as the left operand of `mma`, from before the previous kernel ends; the tokens' rows
// come as the right operand straight from memory. Of 16 tokens they wait in shared memory, where registers would not hold
// what is on its way. Warps add up in shared memory. Logits of a token go to the block that chooses for it, whose barrier
// counts the bytes that have come, and a warp chooses.
//
// Compiled by NVRTC. Macros: EXPERTS; TILES of 16 experts of a block; WARPS; STEPS of 32 inputs of a warp; TOKENS, 8 or 16;
// SCORE and RENORMALISE of route_choice.cuh.

#include "numbers.cuh"
#include "cluster_sums.cuh"
#include "route_choice.cuh"

constexpr int THREADS = 32 * WARPS, OWN = 16 * TILES, EIGHTS = TOKENS / 8;
constexpr int CLUSTER = (EXPERTS + OWN - 1) / OWN;
constexpr int ROOM = (TOKENS + CLUSTER - 1) / CLUSTER;  // tokens that a block chooses for, at most

struct Call {
  const uint16 *x, *weight, *bias;  // [T, D], [X, D], [X] or null
  const float *choice_bias;         // [X] or null
  int64 *ids;                       // [T, k]
  float *weights;
  int64 x_stride, weight_stride;
  int tokens, inputs, top_k;
  float scale, least_sum;
};

struct Room {
  uint64 there;  // counts bytes of logits
  float logits[ROOM][EXPERTS];
  float parts[WARPS][OWN][TOKENS];
};

__device__ __forceinline__ uint32 address(const void *p) { return uint32(__cvta_generic_to_shared(p)); }
// So many of 16 bytes, 0 or 16; the rest becomes zero.
__device__ __forceinline__ void copy(uint32 to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ int find_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, WARPS > 8 ? 1 : 2) linear_route(
    const __grid_constant__ Call call) {
  __shared__ Room room;
  extern __shared__ __align__(16) uint4 kept[];  // of 16 tokens: [EIGHTS, STEPS, THREADS], each thread's own
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, column = lane % 4, rank = find_rank();
  const int first = blockIdx.x / CLUSTER * TOKENS, count = min(TOKENS, call.tokens - first), eights = call.inputs / 8;
  const int own = (count - rank + CLUSTER - 1) / CLUSTER;  // tokens `rank`, `rank` + CLUSTER...; none where negative
  const uint32 barrier = address(&room.there);
  if (threadIdx.x == 0 && own > 0) {
    expect_sums(barrier, own * EXPERTS * 4);
    publish_barriers();
  }
  __syncwarp();
  // no block sends to another before that one's barrier is there
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  // Inputs of a step are in any order that both operands have: a lane has eight side by side, four for each of two `mma`.
  const int at = warp * 4 + column;
  uint4 rows[TILES][STEPS][2];
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int expert = rank * OWN + tile * 16 + half * 8 + row, eight = step * (4 * WARPS) + at;
        rows[tile][step][half] = expert < EXPERTS && eight < eights
            ? *(const uint4 *)(call.weight + expert * call.weight_stride + eight * 8) : uint4{0, 0, 0, 0};
      }
  const bool chooses = warp < own;
  const Biases biases = load_biases(chooses ? call.bias : nullptr, chooses ? call.choice_bias : nullptr);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if constexpr (EIGHTS > 1) {
#pragma unroll
    for (int i = 0; i < EIGHTS * STEPS; i++) {
      const int token = i / STEPS * 8 + row, eight = i % STEPS * (4 * WARPS) + at;
      const bool is_there = token < count && eight < eights;
      copy(address(kept + i * THREADS + threadIdx.x),
           call.x + (is_there ? (first + token) * call.x_stride + eight * 8 : 0), is_there ? 16 : 0);
    }
    wait_for_copies();
  }
#pragma unroll
  for (int n = 0; n < EIGHTS; n++) {
    const int token = n * 8 + row;
    uint4 x[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int eight = step * (4 * WARPS) + at;
      if constexpr (EIGHTS > 1) {
        x[step] = kept[(n * STEPS + step) * THREADS + threadIdx.x];
      } else {
        x[step] = token < count && eight < eights
            ? *(const uint4 *)(call.x + (first + token) * call.x_stride + eight * 8) : uint4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float low[4] = {}, high[4] = {};  // two chains
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        const uint4 a = rows[tile][step][0], b = rows[tile][step][1];
        multiply(low, a.x, b.x, a.y, b.y, x[step].x, x[step].y);
        multiply(high, a.z, b.z, a.w, b.w, x[step].z, x[step].w);
      }
#pragma unroll
      for (int half = 0; half < 2; half++)
        *(float2 *)&room.parts[warp][tile * 16 + half * 8 + row][n * 8 + column * 2] =
            float2{low[2 * half] + high[2 * half], low[2 * half + 1] + high[2 * half + 1]};
    }
  }
  __syncthreads();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  for (int i = threadIdx.x; i < OWN * TOKENS; i += THREADS) {
    const int token = i % TOKENS, expert = rank * OWN + i / TOKENS;
    if (token >= count || expert >= EXPERTS) continue;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += room.parts[w][i / TOKENS][token];
    send(address(&room.logits[token / CLUSTER][expert]), barrier, token % CLUSTER, sum);
  }
  if (!chooses) return;
  __syncwarp();
  wait_for_sums(barrier);
  for (int slot = warp; slot < own; slot += WARPS) {
    float logits[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) logits[j] = j * 32 + lane < EXPERTS ? room.logits[slot][j * 32 + lane] : 0.f;
    const int64 to = int64(first + rank + slot * CLUSTER) * call.top_k;
    choose(logits, biases, call.ids + to, call.weights + to, call.top_k, call.scale, call.least_sum);
  }
}
