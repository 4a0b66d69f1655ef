// Chosen experts' products of a few tokens with e4m3 weights (Hopper), in two launches: gate and up with the activation,
// then down with the sum over a token's experts. Bound by reading each chosen expert once.
//
// As in `fp8_rows.cu`, the weight is the left operand of wgmma as TMA copies it, and x in e4m3 with a scale for each 128
// inputs of a row the right one. Columns 0 to 3 are tokens, zeros for those that did not choose the expert; columns 4 to 7
// have what rounding them left, times 16: together they are as exact as the bfloat16 that they came from. A tile has
// 64 rows of the weight, 32 of gate and the same of up, or for DOWN 64 outputs, of all experts in turn. SPLITS blocks, a
// cluster, share a tile's inputs, or its experts; each of GROUPS warpgroups keeps sums of its own and sends those of a
// tile to one of the blocks, which adds up all in a fixed order.
//
// Compiled by NVRTC for bfloat16 x. Macros: DOWN 0 or 1; UNIT blocks of 128 inputs in a stage; STAGES of
// the ring; GROUPS; SPLITS.

#include "numbers.cuh"
#include "hopper.cuh"
#include "cluster_sums.cuh"

constexpr int BLOCK = 128, TILE = 64, TILE_OUTPUTS = DOWN ? TILE : TILE / 2;
constexpr int BLOCK_BYTES = TILE * BLOCK, STAGE_BYTES = UNIT * BLOCK_BYTES, COLUMNS = 8, X_BLOCK = COLUMNS * BLOCK;
constexpr int MATH = GROUPS * 128, WARPS = MATH / 32, THREADS = MATH + 32, EACH = UNIT / GROUPS;
constexpr int MOST_PAIRS = 64, MOST_TOKENS = 4;
constexpr float LARGEST = 448.f, LEAST = 1e-30f, REST = 16.f;
static_assert(UNIT % GROUPS == 0, "");

struct Call {
  const uint16 *x, *bias;
  uint16 *out;
  const float *scales;
  const int64 *ids;      // [T, top_k] of experts, -1 for none
  const float *factors;  // [T, top_k]
  int64 x_stride;
  int tokens, top_k, inputs, outputs, rows_each;
  int table, shared, x_blocks;  // scales of a row; rows that share them; blocks of x that a program has room for
  int gate;                     // 1 silu, 2 gelu_tanh, 3 clamped
  float limit, alpha, up_offset;
};

struct Shared {
  uint64 full[STAGES], empty[STAGES], there;    // there: waits for the bytes of all sums
  int count;                                    // of distinct experts
  int experts[MOST_PAIRS];
  signed char pairs[MOST_PAIRS][MOST_TOKENS];   // of expert and token; -1 for none
  float factors[MOST_PAIRS];                    // of pairs
};

__device__ __forceinline__ void sync_math() { asm volatile("bar.sync 1, %0;" ::"n"(MATH) : "memory"); }

// UNIT blocks from `block` on of 64 rows of the weight from `row` on, or of 32 of gate and of up
__device__ __forceinline__ void load_tile(uint32 to, const TensorMap *map, uint32 bar, int row, int block) {
  if (DOWN)
    load_pieces(to, map, bar, row, block);
  else
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %3, "
                 "%5}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(row), "r"(block) : "memory");
}

// d [64, 8] = a [64, 32] b [8, 32]^T, plus d if `keeps`
__device__ __forceinline__ void multiply(float (&d)[4], uint64 a, uint64 b, int keeps) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {" S4 "}, %4, %5, p, 1, 1; }"
               : F4(d, 0) : "l"(a), "l"(b), "r"(keeps));
}

#include "chosen_experts.cuh"

__device__ __forceinline__ uint32 to_codes(const float *v) {  // four numbers to e4m3
  uint32 codes;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high}; }" : "=r"(codes) : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));
  return codes;
}
__device__ __forceinline__ void to_floats(float *v, uint32 codes) {  // and back
  asm("{ .reg .b16 low, high, a, b, c, d; .reg .b32 first, second; mov.b32 {low, high}, %4;\n"
      "cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;\n"
      "mov.b32 {a, b}, first; mov.b32 {c, d}, second;\n"
      "cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; cvt.f32.f16 %2, c; cvt.f32.f16 %3, d; }"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(codes));
}

// Eight numbers, of 16 lanes a block of a row, to e4m3 with the block's scale, which is returned, and what that left.
__device__ __forceinline__ float round_block(float *v, uint32 *codes, uint32 *rest) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(v[i]));
#pragma unroll
  for (int step = 8; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  const float scale = largest > LEAST ? largest / LARGEST : 1.f, inverse = 1.f / scale;
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= inverse;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float kept[4];
    codes[i] = to_codes(v + 4 * i);
    to_floats(kept, codes[i]);
#pragma unroll
    for (int j = 0; j < 4; j++) kept[j] = (v[4 * i + j] - kept[j]) * REST;
    rest[i] = to_codes(kept);
  }
  return scale;
}

struct Work {  // of a program
  int split, own_experts, chunks, first_chunk, count;  // chunks of a row; the program's part of them
  int first, apart, items, each;                       // tiles; steps of each
};

__device__ __forceinline__ Work share_work(const Call &call, const Shared &s) {
  Work w;
  const int blocks = call.inputs / BLOCK, tiles = call.outputs / TILE_OUTPUTS;
  w.split = blockIdx.x % SPLITS, w.first = blockIdx.x / SPLITS, w.apart = gridDim.x / SPLITS;
  w.chunks = (blocks + UNIT - 1) / UNIT;
  const int part = DOWN ? w.chunks : (w.chunks + SPLITS - 1) / SPLITS;
  w.first_chunk = DOWN ? 0 : min(w.split * part, w.chunks);
  w.count = min(part, w.chunks - w.first_chunk);
  w.own_experts = DOWN ? max((s.count - w.split + SPLITS - 1) / SPLITS, 0) : 1;
  const int all = DOWN ? tiles : tiles * s.count;
  w.items = max((all - w.first + w.apart - 1) / w.apart, 0);
  w.each = w.own_experts * w.count;
  return w;
}

struct Step {  // expert among the distinct ones, its tile, chunk
  int expert, tile, chunk;
  __device__ __forceinline__ Step(const Call &call, const Work &w, int nth) {
    const int round = nth / w.each, within = nth - round * w.each, item = w.first + round * w.apart;
    if (DOWN) {
      const int own = within / w.count;
      expert = w.split + own * SPLITS, tile = item, chunk = within - own * w.count;
    } else {
      const int tiles = call.outputs / TILE_OUTPUTS;
      expert = item / tiles, tile = item - expert * tiles, chunk = w.first_chunk + within;
    }
  }
};

__device__ __forceinline__ void fill(
    const TensorMap *map, const Call &call, const Shared &s, const Work &w, uint32 ring, int nth, int slot) {
  const Step step(call, w, nth);
  const uint32 bar = shared_address(&s.full[slot]);
  expect_bytes(bar, STAGE_BYTES);
  load_tile(ring + slot * STAGE_BYTES, map, bar, s.experts[step.expert] * call.rows_each + step.tile * TILE_OUTPUTS,
            step.chunk * UNIT);
}

// The row of the weight of a step that is `local` in the tile.
__device__ __forceinline__ int row_of(const Call &call, const Shared &s, const Step &step, int local) {
  return s.experts[step.expert] * call.rows_each + step.tile * TILE_OUTPUTS +
         (DOWN || local < 32 ? local : local - 32 + call.outputs);
}

// Ask for the scales of all steps into the L2: they come from memory, and a stage ahead is too late for that.
__device__ __forceinline__ void prefetch_scales(const Call &call, const Shared &s, const Work &w, int total) {
  for (int at = threadIdx.x; at < 2 * total; at += MATH) {  // halves of 32 rows
    const Step step(call, w, at / 2);
    const int first = row_of(call, s, step, at % 2 * 32), last = (first + 31) / call.shared;
    for (int row = first / call.shared; row <= last; row++)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(
                       call.scales + int64(row) * call.table + min(step.chunk * UNIT, call.table - 1)) : "memory");
  }
}

// Rows of x in FP8: of tokens the program's part of inputs, or for DOWN of pairs all inputs, for each own expert.
__device__ __forceinline__ void stage_rows(const Call &call, const Shared &s, const Work &w, uint32 x, float *x_scales) {
  const int from = w.first_chunk * UNIT * BLOCK, width = min(w.count * UNIT * BLOCK, call.inputs - from);
  const int lanes = width / 8, rows = w.own_experts * call.tokens;  // lanes: a multiple of 16
  for (int at = threadIdx.x; at - int(threadIdx.x % 32) < rows * lanes; at += MATH) {
    const int row = at / lanes, column = (at - row * lanes) * 8, own = row / call.tokens, token = row - own * call.tokens;
    const int pair = !DOWN ? token : at < rows * lanes ? s.pairs[w.split + own * SPLITS][token] : -1;
    uint4 loaded = {0, 0, 0, 0};
    if (at < rows * lanes && pair >= 0) loaded = *(const uint4 *)(call.x + pair * call.x_stride + from + column);
    const uint32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    float v[8];
    uint32 codes[2][2];
#pragma unroll
    for (int j = 0; j < 4; j++) v[2 * j] = widen(words[j]), v[2 * j + 1] = widen_high(words[j]);
    const float scale = round_block(v, codes[0], codes[1]) * (DOWN && pair >= 0 ? s.factors[pair] : 1.f);
    if (at >= rows * lanes || pair < 0) continue;
    const int block = own * w.count * UNIT + column / BLOCK, byte = column % BLOCK;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int m = token + i * MOST_TOKENS;
      const uint32 to = x + block * X_BLOCK + m * 128 + (((byte / 16) ^ m) * 16) + byte % 16;
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(codes[i][0]), "r"(codes[i][1]) : "memory");
      if (byte == 0) x_scales[block * COLUMNS + m] = i ? scale / REST : scale;
    }
  }
}

// Where the sum of a row and token is kept by the program that adds up: of its items, programs and warpgroups.
__device__ __forceinline__ int place_of(int tokens, int own, int split, int group, int token, int row) {
  return (((own * SPLITS + split) * GROUPS + group) * tokens + token) * TILE + row;
}
// Sums of all programs and warpgroups, in a fixed order.
__device__ __forceinline__ float add_parts(const float *parts, int tokens, int own, int token, int row) {
  float value = 0.f;
#pragma unroll
  for (int split = 0; split < SPLITS; split++)
#pragma unroll
    for (int group = 0; group < GROUPS; group++) value += parts[place_of(tokens, own, split, group, token, row)];
  return value;
}

// Programs of a cluster take its tiles in turns; so many.
__device__ __forceinline__ int count_own(const Work &w) { return (w.items - w.split + SPLITS - 1) / SPLITS; }

__device__ __forceinline__ void finish(const Call &call, const Shared &s, const Work &w, const float *parts) {
  const int each = call.tokens * TILE_OUTPUTS, mine = count_own(w);
  for (int at = threadIdx.x; at < mine * each; at += THREADS) {
    const int own = at / each, token = at % each / TILE_OUTPUTS, row = at % TILE_OUTPUTS;
    const int item = w.first + (own * SPLITS + w.split) * w.apart;
    if (DOWN) {
      const int output = item * TILE + row;
      float value = add_parts(parts, call.tokens, own, token, row);
      if (call.bias)
        for (int j = 0; j < s.count; j++)
          if (s.pairs[j][token] >= 0)
            value += s.factors[s.pairs[j][token]] * widen(call.bias[int64(s.experts[j]) * call.rows_each + output]);
      call.out[int64(token) * call.outputs + output] = narrow(value);
    } else {
      const int tiles = call.outputs / TILE_OUTPUTS, expert = item / tiles, pair = s.pairs[expert][token];
      if (pair < 0) continue;
      const int output = (item - expert * tiles) * TILE_OUTPUTS + row;
      float gate = add_parts(parts, call.tokens, own, token, row);
      float up = add_parts(parts, call.tokens, own, token, row + TILE_OUTPUTS);
      if (call.bias) {
        const uint16 *bias = call.bias + int64(s.experts[expert]) * call.rows_each + output;
        gate += widen(bias[0]), up += widen(bias[call.outputs]);
      }
      call.out[int64(pair) * call.outputs + output] = narrow(gated_by(call, call.gate, gate, up));
    }
  }
}

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(THREADS, 1)
    fp8_few(const __grid_constant__ TensorMap map, const __grid_constant__ Call call) {
  extern __shared__ char unaligned[];
  char *memory = unaligned + (-shared_address(unaligned) & 1023);
  const uint32 ring = shared_address(memory), x = ring + STAGES * STAGE_BYTES;
  uint4 *x_memory = (uint4 *)(memory + STAGES * STAGE_BYTES);
  float *x_scales = (float *)(memory + STAGES * STAGE_BYTES + call.x_blocks * X_BLOCK);
  Shared &s = *(Shared *)(x_scales + call.x_blocks * COLUMNS);
  float *parts = (float *)(&s + 1);
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  if (threadIdx.x == MATH) {
    for (int slot = 0; slot < STAGES; slot++) {
      init_barrier(shared_address(&s.full[slot]), 1);
      init_barrier(shared_address(&s.empty[slot]), WARPS);
    }
    init_barrier(shared_address(&s.there), 1);
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
  }
  // the map itself comes from memory as well
  if (threadIdx.x == MATH) prefetch_map(&map);
  for (int at = threadIdx.x; at < call.x_blocks * X_BLOCK / 16; at += THREADS) x_memory[at] = uint4{0, 0, 0, 0};
  for (int at = threadIdx.x; at < call.x_blocks * COLUMNS; at += THREADS) x_scales[at] = 0.f;
  for (int at = threadIdx.x; at < MOST_PAIRS * MOST_TOKENS; at += THREADS) s.pairs[at / MOST_TOKENS][at % MOST_TOKENS] = -1;
  __syncthreads();
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");  // the barrier may be used
  // Ids were written before the first kernel started: the second one may read them at once, and the weights that they
  // choose. All else waits.
  if (!DOWN) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
  find_experts(call, s);
  const Work w = share_work(call, s);
  const int total = w.items * w.each;
  if (group == GROUPS) {
    if (lane == 0) expect_bytes(shared_address(&s.there), count_own(w) * SPLITS * GROUPS * call.tokens * TILE * 4);
    int slot = 0;
    uint32 parity = 1;  // of an empty ring
    for (int nth = 0; nth < total; nth++) {
      if (lane == 0) {
        wait_for(shared_address(&s.empty[slot]), parity);
        fill(&map, call, s, w, ring, nth, slot);
      }
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    __syncwarp();
    if (DOWN) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
  } else {
    auto read_scales = [&](float (&to)[2][EACH], int nth) {
      if (nth >= total) return;
      const Step step(call, w, nth);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int local = warp * 16 + lane / 4 + 8 * i;
        const int row = row_of(call, s, step, local);
        const float *table = call.scales + int64(call.shared == 1 ? row : row / call.shared) * call.table;
#pragma unroll
        for (int e = 0; e < EACH; e++)
          asm volatile("ld.global.f32 %0, [%1];"  // volatile, to be asked for here
                       : "=f"(to[i][e]) : "l"(table + min(step.chunk * UNIT + e * GROUPS + group, call.table - 1)));
      }
    };
    float scales[2][EACH];
    read_scales(scales, 0);
    prefetch_scales(call, s, w, total);
    if (DOWN) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    sync_math();  // `pairs` of all warps
    stage_rows(call, s, w, x, x_scales);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what threads have written
    sync_math();
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all programs have begun
    int slot = 0;
    uint32 parity = 0;
    for (int nth_item = 0, nth = 0; nth_item < w.items; nth_item++) {
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      for (int within = 0; within < w.each; within++, nth++) {
        float now[2][EACH], part[EACH][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int e = 0; e < EACH; e++) now[i][e] = scales[i][e];
        read_scales(scales, nth + 1);
        wait_for(shared_address(&s.full[slot]), parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const int block = e * GROUPS + group;
          const uint64 a = describe_operand(ring + slot * STAGE_BYTES + block * BLOCK_BYTES);
          const uint64 b = describe_operand(x + (within * UNIT + block) * X_BLOCK);
#pragma unroll
          for (int k = 0; k < 4; k++) multiply(part[e], a + 2 * k, b + 2 * k, k > 0);
        }
        asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
          for (int i = 0; i < 4; i++) asm volatile("" : "+f"(part[e][i])::"memory");
        if (lane == 0) arrive(shared_address(&s.empty[slot]));
        if (++slot == STAGES) slot = 0, parity ^= 1;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const int block = within * UNIT + e * GROUPS + group;
          const float2 x_scale = *(const float2 *)(x_scales + block * COLUMNS + 2 * (lane % 4));
#pragma unroll
          for (int i = 0; i < 2; i++) {
            sum[2 * i] += part[e][2 * i] * (x_scale.x * now[i][e]);
            sum[2 * i + 1] += part[e][2 * i + 1] * (x_scale.y * now[i][e]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = 2 * (lane % 4) + i % 2;
        const float both = sum[i] + __shfl_xor_sync(~0u, sum[i], 2);  // and of what rounding left
        if (token < call.tokens) {
          const int row = warp * 16 + lane / 4 + 8 * (i / 2);
          const float *to = parts + place_of(call.tokens, nth_item / SPLITS, w.split, group, token, row);
          send(shared_address(to), shared_address(&s.there), nth_item % SPLITS, both);
        }
      }
    }
  }
  // No barrier of the cluster here: it would be a fence of the GPU's memory too. Who adds nothing up ends.
  if (group == GROUPS) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  if (count_own(w) == 0) return;
  wait_for_sums(shared_address(&s.there));
  finish(call, s, w, parts);
}
