// Chosen experts' products of a few tokens with bfloat16 weights, in two launches: gate and up with the activation, then
// down with the sum over a token's experts. Bound by reading each chosen expert once.
//
// A unit of work is EACH neighbouring outputs of one expert, whose rows of the weight are one piece of memory (two for
// gate and up), for all pairs of token and expert that chose it. Gate and up: units of all experts are dealt evenly to
// blocks. Down: outputs are, and a block takes its outputs of every expert. Warps take a block's units in turns. Each has
// a ring in shared memory of its own, of `stages` units, which it fills itself by bulk copies: no warp waits for another
// in the loop. Blocks keep the inputs of all tokens or pairs in shared memory.
//
// Down reads the choices, and begins to copy, before gate and up has ended: the choices were written before that began
// (gate and up waits for it before it lets down start), and both kernels' blocks fit a multiprocessor at once. A pair's
// products, and sums over a token's choices in their order, do not depend on other tokens.
//
// Compiled by NVRTC (Hopper). Macros: DOWN 0 or 1; EACH.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int MOST_PAIRS = 32;  // one a lane
constexpr int MOST_WARPS = 16;
constexpr int KINDS = DOWN ? 1 : 2, ROWS = KINDS * EACH;  // rows of the weight in a unit

struct Call {
  const uint16 *x, *weight, *bias;
  uint16 *out;
  const int64 *ids;      // [T, top_k] of experts, -1 for none
  const float *factors;  // [T, top_k]
  int64 x_stride;
  int tokens, top_k, inputs, outputs;
  int x_rows, stages;  // tokens, for DOWN pairs; units of a warp's ring
  int most;            // outputs of a block of DOWN, at most
  int ahead;           // units of a warp beyond its ring that the L2 is asked for before the previous kernel has ended
  int gate;            // 1 silu, 2 gelu_tanh, 3 clamped
  float limit, alpha, up_offset;
};

struct Chosen {
  int id;
  uint32 pairs;  // bits
};

struct Place {  // of a block: its work, and what lies in shared memory
  int first, last;  // outputs of DOWN, else units
  int groups;       // units of an expert, for DOWN of the block
  int units;        // of the block
  uint32 ring, full, unit_bytes;  // of this warp: units and their barriers
  const char *rows, *x;  // the ring again; inputs [x_rows, inputs]
  Chosen *chosen;
  float *factors, *parts;  // [MOST_PAIRS]; of DOWN, products [pairs, most]
};

struct Unit {
  int expert, output, here;  // a place in `chosen`, the first output, how many
};

// Waits until earlier kernels have finished, then lets the next one start: in this order, see kernels/launch.py.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void copy16(uint32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void ask_cache(const void *from, uint32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

__device__ __forceinline__ void widen_all(const uint4 &vector, float (&out)[8]) {
  const uint32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int j = 0; j < 4; j++) out[2 * j] = widen(words[j]), out[2 * j + 1] = widen_high(words[j]);
}

// As kernels/rowwise/triton.py has it, of sums that are not rounded.
__device__ __forceinline__ float activate(const Call &call, float gate, float up) {
  if (call.gate == 3) return gated_by(call, 3, gate, up);
  if (call.gate == 1) return gate / (1.f + __expf(-gate)) * up;
  const float u = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate * (1.f - 1.f / (__expf(2.f * u) + 1.f)) * up;
}

__device__ __forceinline__ Place find_place(const Call &call, char *memory) {
  Place p;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
  p.unit_bytes = (ROWS * call.inputs * 2 + 127) / 128 * 128;
  p.rows = memory + warp * call.stages * p.unit_bytes, p.ring = shared_address(p.rows);
  memory += warps * call.stages * p.unit_bytes;
  p.x = memory, memory += call.x_rows * call.inputs * 2;
  p.full = shared_address(memory) + 8 * warp * call.stages, memory += (8 * warps * call.stages + 15) / 16 * 16;
  p.chosen = (Chosen *)memory, memory += sizeof(Chosen) * MOST_PAIRS;
  p.factors = (float *)memory, p.parts = p.factors + MOST_PAIRS;
  return p;
}

// Distinct experts in order of first choice, and who chose them, to `chosen`: all warps find and write the same, so that
// none waits for another. Returns the pairs that have an expert.
__device__ __forceinline__ uint32 find_chosen(const Call &call, const Place &p, int &count) {
  const int lane = threadIdx.x % 32;
  // from the L2: another kernel wrote them while this block was already there
  const int id = lane < call.tokens * call.top_k ? int(__ldcg(call.ids + lane)) : -1;
  if (DOWN && threadIdx.x < call.tokens * call.top_k) p.factors[lane] = __ldcg(call.factors + lane);
  const uint32 same = __match_any_sync(~0u, id), before = (1u << lane) - 1;
  const bool leads = id >= 0 && !(same & before);
  const uint32 leaders = __ballot_sync(~0u, leads);
  count = __popc(leaders);
  if (leads) p.chosen[__popc(leaders & before)] = Chosen{id, same};
  const uint32 there = __ballot_sync(~0u, id >= 0);
  __syncwarp();
  return there;
}

__device__ __forceinline__ void share_work(const Call &call, Place &p, int count) {
  if (!DOWN) p.groups = (call.outputs + EACH - 1) / EACH;
  const int all = DOWN ? call.outputs : count * p.groups;
  p.first = int(int64(all) * blockIdx.x / gridDim.x);
  p.last = int(int64(all) * (blockIdx.x + 1) / gridDim.x);
  if (DOWN) p.groups = (p.last - p.first + EACH - 1) / EACH;
  p.units = DOWN ? count * p.groups : p.last - p.first;
}

__device__ __forceinline__ Unit find_unit(const Call &call, const Place &p, int n) {
  Unit unit;
  const int nth = DOWN ? n : p.first + n;
  unit.expert = nth / p.groups;
  unit.output = (DOWN ? p.first : 0) + (nth - unit.expert * p.groups) * EACH;
  unit.here = min(EACH, (DOWN ? p.last : call.outputs) - unit.output);
  return unit;
}

// Ask for a unit, to a place of the ring that no lane reads any more, or with `slot` -1 for the L2: one lane.
__device__ __forceinline__ void fetch(const Call &call, const Place &p, int n, int slot, int64 policy) {
  const Unit unit = find_unit(call, p, n);
  const uint32 row_bytes = call.inputs * 2, bytes = unit.here * row_bytes, full = p.full + 8 * slot;
  const uint16 *from =
      call.weight + (int64(p.chosen[unit.expert].id) * KINDS * call.outputs + unit.output) * call.inputs;
  if (slot >= 0) expect_bytes(full, KINDS * bytes);
#pragma unroll
  for (int kind = 0; kind < KINDS; kind++) {
    const uint16 *piece = from + int64(kind) * call.outputs * call.inputs;
    if (slot < 0)
      ask_cache(piece, bytes);
    else
      copy_bytes(p.ring + slot * p.unit_bytes + kind * EACH * row_bytes, piece, bytes, full, policy);
  }
}

// Of row `lane` of a unit; 0 where there is none.
__device__ __forceinline__ float load_bias(const Call &call, const Place &p, int n) {
  const int lane = threadIdx.x % 32;
  if (!call.bias || n >= p.units || lane >= ROWS) return 0.f;
  const Unit unit = find_unit(call, p, n);
  const int64 first = (int64(p.chosen[unit.expert].id) * KINDS + lane / EACH) * call.outputs + unit.output;
  return lane % EACH < unit.here ? widen(call.bias[first + lane % EACH]) : 0.f;
}

// Inputs to shared memory, which `wait_for_copies` and a barrier complete.
__device__ __forceinline__ void stage_inputs(const Call &call, const Place &p) {
  const int eights = call.inputs / 8;
  for (int row = 0; row < call.x_rows; row++)
    for (int at = threadIdx.x; at < eights; at += blockDim.x)
      copy16(shared_address(p.x) + (row * eights + at) * 16, call.x + row * call.x_stride + at * 8);
}

// This lane's part of the products of a unit's rows with a row of inputs.
__device__ __forceinline__ void multiply_rows(float (&sums)[ROWS], const char *rows, const char *x, int row_bytes) {
  float halves[ROWS][2] = {};
#pragma unroll(ROWS > 4 ? 1 : ROWS > 2 ? 2 : 4)
  for (int at = threadIdx.x % 32 * 16; at < row_bytes; at += 512) {
    float v[8];
    widen_all(*(const uint4 *)(x + at), v);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float w[8];
      widen_all(*(const uint4 *)(rows + r * row_bytes + at), w);
#pragma unroll
      for (int j = 0; j < 8; j++) halves[r][j % 2] += v[j] * w[j];
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) sums[r] = halves[r][0] + halves[r][1];
}

// Add up the lanes' parts, and store what follows them; lane r has row r's bias. Rows that are not there hold anything.
__device__ __forceinline__ void store_products(
    const Call &call, const Place &p, const Unit &unit, int pair, float bias, float (&sums)[ROWS]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    sums[r] = sum_of_warp(sums[r]);
    if (call.bias) sums[r] += __shfl_sync(~0u, bias, r);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (lane != i || i >= unit.here) continue;
    if (DOWN)
      p.parts[pair * call.most + unit.output - p.first + i] = sums[i];
    else
      call.out[int64(pair) * call.outputs + unit.output + i] = narrow(activate(call, sums[i], sums[ROWS - EACH + i]));
  }
}

// The weighted sums of each token's products.
__device__ __forceinline__ void add_choices(const Call &call, const Place &p, uint32 there) {
  const int own = p.last - p.first;
  for (int at = threadIdx.x; at < call.tokens * own; at += blockDim.x) {
    const int token = at / own, i = at - token * own;
    float sum = 0.f;
#pragma unroll 4
    for (int pair = token * call.top_k; pair < (token + 1) * call.top_k; pair++)
      if (there >> pair & 1) sum += p.factors[pair] * p.parts[pair * call.most + i];
    call.out[int64(token) * call.outputs + p.first + i] = narrow(sum);
  }
}

extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS, 2) plain_experts(const Call call) {
  extern __shared__ __align__(128) char memory[];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Place p = find_place(call, memory);
  if (lane == 0) {
    for (int s = 0; s < call.stages; s++) init_barrier(p.full + 8 * s, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  if (!DOWN) {
    wait_for_previous();
    stage_inputs(call, p);
  }
  int count;
  const uint32 there = find_chosen(call, p, count);
  share_work(call, p, count);
  const int64 policy = read_once();
  int next = warp;  // unit to ask for
  if (lane == 0) {
    for (int s = 0; s < call.stages && next < p.units; s++, next += warps) fetch(call, p, next, s, policy);
    for (int i = 0, n = next; i < call.ahead && n < p.units; i++, n += warps) fetch(call, p, n, -1, policy);
  }
  __syncwarp();
  float bias = load_bias(call, p, warp);
  if (DOWN) {
    wait_for_previous();
    stage_inputs(call, p);
  }
  wait_for_copies();
  __syncthreads();
  const int row_bytes = call.inputs * 2;
  int slot = 0;
  uint32 parity = 0;
  for (int n = warp; n < p.units; n += warps) {
    const Unit unit = find_unit(call, p, n);
    wait_for(p.full + 8 * slot, parity);
    for (uint32 rest = p.chosen[unit.expert].pairs; rest;) {
      const int pair = __ffs(rest) - 1;
      float sums[ROWS];
      multiply_rows(sums, p.rows + slot * p.unit_bytes, p.x + (DOWN ? pair : pair / call.top_k) * row_bytes, row_bytes);
      rest &= rest - 1;
      if (!rest) {
        __syncwarp();
        if (lane == 0 && next < p.units) fetch(call, p, next, slot, policy), next += warps;
      }
      store_products(call, p, unit, pair, bias, sums);
    }
    bias = load_bias(call, p, n + warps);  // long before it is needed
    if (++slot == call.stages) slot = 0, parity ^= 1;
  }
  if (DOWN) {
    __syncthreads();
    add_choices(call, p, there);
  }
}
