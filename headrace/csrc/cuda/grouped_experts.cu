// One of the two products of experts in MXFP4 with few rows each, on Hopper: rows x [M, K] in bfloat16, by expert,
// times that expert's weight: e2m1 codes, two to a byte, with a power of two per 32 inputs. Gate and up with the
// activation, rows gathered from those of tokens; or with DOWN the second product times routing weights, in float32 by
// pair. Bound by reading each chosen expert once. Sums are float32 in a fixed order.
//
// A block is persistent, alone on its multiprocessor, and takes an even share of all items in a row: an item is TILES
// times 16 rows of an expert's weight and up to 8 of its rows of x. 2 * TILES warps copy whole rows of codes
// into a ring of stages, one item each, by bulk copies. The others share the inputs of every item, at most UNITS times
// 128 each: inputs of a warp are the same in all items, so that its part of x stays in registers while the expert does.
// Codes become bfloat16 in registers and are the left operand of mma.m16n8k16. Each warp leaves its sums where it has
// read its codes, and warps in turns add them up, store, and free the stage.
//
// A row of codes takes 32 bytes more than it has: a thread reads 8 bytes of one of eight rows at a time, and rows must
// lie in other banks. Which inputs a thread holds does not matter as long as both operands agree.
//
// Layouts are those of `DeviceCodes`: a byte has input b in its low half and input b + 64 in its high half.
//
// Compiled by NVRTC. Macros: DOWN 0 or 1; GATE 1 silu, 2 gelu_tanh, 3 clamped (0 with DOWN); WARPS that multiply, a
// multiple of 4; UNITS; WHOLE 1: each of them has as many; TILES 1 or 2; EXPERTS.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int EIGHTS = 2 * TILES, THREADS = 32 * WARPS + 128;
constexpr int OUTPUTS = DOWN ? 16 * TILES : 8 * TILES, ROWS = 8, MOST_STAGES = 16;
// A code at the end of a bfloat16 is its number times 2**-126. Numbers of x are multiplied by 2**64, so that products
// are normal numbers. A power's byte, as a float32 exponent, is the power times 2**126.
constexpr uint32 X_LIFT = 0x5F805F80u;  // 2**64 twice
constexpr float LIFT = 0x1p-64f;

struct Call {
  const uint16 *x, *bias;
  void *out;                // [M, N] bfloat16 in the order of rows, or with DOWN [pairs, N] float32
  const char *codes, *scales;
  const int *order, *ends;  // of `GROUP_PAIRS`: pairs by row; one past each expert's last row
  const float *factors;     // by pair
  int64 x_stride;
  int top_k, inputs, outputs, units, stages;  // outputs: a gate and its up count once; units of 128 inputs
  float limit, alpha, up_offset;
};

#include "sorted_experts.cuh"

struct Shared {
  uint64 full[MOST_STAGES], added[MOST_STAGES], empty[MOST_STAGES];  // barriers of stages
  int ends[EXPERTS];
};

struct Item {
  int expert, first, last, tile;  // rows from `first`, of which those before `last` are the expert's
};

// Item number `index` of `total`. All lanes of a warp take part.
__device__ __forceinline__ Item find_item(const int *ends, int tiles, int index, int &total) {
  constexpr int EACH = (EXPERTS + 31) / 32;
  const int lane = threadIdx.x % 32, begin = lane * EACH;
  int own = 0, start = begin > 0 && begin <= EXPERTS ? ends[begin - 1] : 0;
  for (int i = begin, before = start; i < begin + EACH && i < EXPERTS; before = ends[i++])
    own += (ends[i] - before + ROWS - 1) / ROWS;
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  total = __shfl_sync(~0u, sum, 31) * tiles;
  const int wanted = index / max(tiles, 1);
  Item item = {0, 0, 0, index - wanted * tiles};
  const uint32 beyond = __ballot_sync(~0u, sum > wanted);
  if (!beyond) return item;
  const int holder = __ffs(beyond) - 1;
  int left = wanted - (sum - own), before = start;
  for (int i = begin; i < begin + EACH && i < EXPERTS; before = ends[i++]) {
    const int chunks = (ends[i] - before + ROWS - 1) / ROWS;
    if (left >= 0 && left < chunks) item.expert = i, item.first = before + left * ROWS, item.last = ends[i];
    left -= chunks;
  }
  item.expert = __shfl_sync(~0u, item.expert, holder);
  item.first = __shfl_sync(~0u, item.first, holder);
  item.last = __shfl_sync(~0u, item.last, holder);
  return item;
}

// The next item, of those that are there.
__device__ __forceinline__ void move_on(Item &item, const int *ends, int tiles) {
  if (++item.tile < tiles) return;
  item.tile = 0, item.first += ROWS;
  if (item.first < item.last) return;
  item.first = item.last;
  while (item.expert + 1 < EXPERTS && item.first == item.last) item.last = ends[++item.expert];
}

struct Sizes {
  int pitch, table, eight, stage;  // bytes of a row of codes, of its scales, of eight rows of both, of a stage
  __device__ __forceinline__ explicit Sizes(const Call &call) {
    pitch = call.units * 64 + 32, table = call.units * 4, eight = 8 * (pitch + table), stage = EIGHTS * eight;
  }
};

__device__ __forceinline__ uint64 load_eight(uint32 at) {
  uint64 v;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint32 load_four(uint32 at) {
  uint32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_two(uint32 at, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ float2 load_two(uint32 at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}

// A warp that copies every item's eight rows number `eight`.
__device__ __forceinline__ void fetch_items(
    const Call &call, const Shared &s, const Sizes &sizes, uint32 ring, Item item, int count, int tiles, int eight
) {
  const int lane = threadIdx.x % 32;
  const int64 policy = read_once(), row_bytes = call.units * 64;
  const int offset = DOWN ? eight * 8 : eight / 2 * 8;  // of its first output
  uint32 phase = 1;
  int stage = 0;
  for (int i = 0; i < count; i++, move_on(item, s.ends, tiles)) {
    const uint32 full = shared_address(&s.full[stage]);
    const int output = item.tile * OUTPUTS + offset;
    const bool is_there = output < call.outputs;
    wait_for(shared_address(&s.empty[stage]), phase);
    if (lane == 0) {
      if (is_there)
        expect_bytes(full, uint32(8 * (row_bytes + sizes.table)));
      else
        arrive(full);
    }
    __syncwarp();
    const int matrix = DOWN ? item.expert : 2 * item.expert + eight % 2;
    const int64 row = int64(matrix) * call.outputs + output;
    const uint32 to = ring + stage * sizes.stage + eight * sizes.eight;
    if (is_there && lane < 8)
      copy_bytes(to + lane * sizes.pitch, call.codes + (row + lane) * row_bytes, uint32(row_bytes), full, policy);
    if (is_there && lane == 8)
      copy_bytes(to + 8 * sizes.pitch, call.scales + row * sizes.table, 8 * sizes.table, full, policy);
    if (++stage == call.stages) stage = 0, phase ^= 1;
  }
}

// A warp's inputs of rows of x: unit, plane (low or high halves of bytes), half of its bytes, word, register.
using Rows = uint32[UNITS][2][2][2][2];

__device__ __forceinline__ void load_rows(Rows &b, const Call &call, const Item &item, int first_unit, int units) {
  const int lane = threadIdx.x % 32, quad = lane / 4, part = lane % 4;
  const int row = item.first + quad;
  const bool is_there = row < item.last;
  const int at = !is_there ? 0 : DOWN ? row : call.order[row] / call.top_k;
  const uint16 *x = call.x + at * call.x_stride;
#pragma unroll
  for (int u = 0; u < UNITS; u++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int input = (first_unit + u) * 128 + i * 32 + part * 8;
      uint4 v = {0, 0, 0, 0};
      if (is_there && u < units && input < call.inputs) v = *(const uint4 *)(x + input);
      const uint32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const uint32 pair = __byte_perm(words[2 * j], words[2 * j + 1], k ? 0x7632 : 0x5410);
          asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(b[u][i / 2][i % 2][j][k]) : "r"(pair), "r"(X_LIFT));
        }
    }
}

// Two codes, spread to the halves of a register, at the end of two bfloat16: sign at bit 15, the rest at bits 8 to 6.
__device__ __forceinline__ uint32 decode(uint32 word, int plane) {
  return (plane ? (word & 0x00F000F0u) * 0x0104u : (word & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
}

// Sums of a warp's inputs, of which `sums[m]` are rows quad and quad + 8 of sixteen, columns part * 2 and one more.
// `at`: where this thread's codes of its first unit are.
__device__ __forceinline__ void multiply_item(
    float (&sums)[TILES][4], const Rows &b, const Sizes &sizes, uint32 at, uint32 table, int units
) {
#pragma unroll
  for (int m = 0; m < TILES; m++) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums[m][i] = 0.f;
    uint32 tables[2][UNITS];  // of rows and units
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (WHOLE && UNITS % 2 == 0) {  // words of eight rows may lie in one bank: take two at a time
#pragma unroll
        for (int u = 0; u < UNITS; u += 2) {
          const uint64 v = load_eight(table + (2 * m + r) * sizes.eight + u * 4);
          tables[r][u] = uint32(v), tables[r][u + 1] = uint32(v >> 32);
        }
      } else {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
          tables[r][u] = WHOLE || u < units ? load_four(table + (2 * m + r) * sizes.eight + u * 4) : 0;
      }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      if (!WHOLE && u >= units) break;
      uint32 words[2][2][2];  // rows, halves of bytes, words
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint32 from = at + (2 * m + r) * sizes.eight + u * 64;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint64 v = load_eight(from + h * 32);
          words[r][h][0] = uint32(v), words[r][h][1] = uint32(v >> 32);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int plane = 0; plane < 2; plane++) {
          float own[4] = {};
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const uint32 a0 = decode(words[0][h][j], plane), a1 = decode(words[1][h][j], plane);
            const uint32 a2 = decode(words[0][h][j] >> 8, plane), a3 = decode(words[1][h][j] >> 8, plane);
            multiply(own, a0, a1, a2, a3, b[u][plane][h][j][0], b[u][plane][h][j][1]);
          }
          const int group = plane * 2 + h;
          float powers[2];
#pragma unroll
          for (int r = 0; r < 2; r++)
            powers[r] = __uint_as_float(
                (group == 3 ? tables[r][u] >> 1 : tables[r][u] << (23 - 8 * group)) & 0x7F800000u);
#pragma unroll
          for (int i = 0; i < 4; i++) sums[m][i] += powers[i / 2] * own[i];
        }
    }
  }
}

// Add up what warps have left of sixteen rows of the weight, number `m` of an item, and store the results. `at`: where
// this thread's sums of inputs from 0 on are.
__device__ __forceinline__ void finish(
    const Call &call, const Sizes &sizes, const Item &item, uint32 at, int m, const int (&pairs)[2],
    const float (&factors)[2]
) {
  const int lane = threadIdx.x % 32, quad = lane / 4, part = lane % 4;
  float sums[4] = {};
#pragma unroll 4
  for (int warp = 0; warp < WARPS; warp++) {
    const uint32 from = at + 2 * m * sizes.eight + call.units * warp / WARPS * 64;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float2 v = load_two(from + r * 32);
      sums[2 * r] += v.x, sums[2 * r + 1] += v.y;
    }
  }
  const int output = item.tile * OUTPUTS + m * (DOWN ? 16 : 8) + quad;
#if DOWN
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int own = output + 8 * r;
    if (own >= call.outputs) continue;
    const float bias = call.bias ? widen(call.bias[int64(item.expert) * call.outputs + own]) : 0.f;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (item.first + part * 2 + i < item.last)
        ((float *)call.out)[int64(pairs[i]) * call.outputs + own] = (sums[2 * r + i] * LIFT + bias) * factors[i];
  }
#else
  if (output >= call.outputs) return;
  float bias[2] = {0.f, 0.f};
  if (call.bias)
#pragma unroll
    for (int r = 0; r < 2; r++) bias[r] = widen(call.bias[(int64(item.expert) * 2 + r) * call.outputs + output]);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = item.first + part * 2 + i;
    if (row < item.last)
      ((uint16 *)call.out)[int64(row) * call.outputs + output] =
          narrow(apply_gate(call, sums[i] * LIFT + bias[0], sums[2 + i] * LIFT + bias[1]));
  }
#endif
}

// A warp that multiplies.
__device__ __forceinline__ void multiply_items(
    const Call &call, const Shared &s, const Sizes &sizes, uint32 ring, Item item, int count, int tiles
) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, part = lane % 4;
  const int first_unit = call.units * warp / WARPS, units = call.units * (warp + 1) / WARPS - first_unit;
  const uint32 place = ring + quad * sizes.pitch + part * 8;
  const uint32 table = ring + 8 * sizes.pitch + quad * sizes.table + first_unit * 4;
  Rows b;
  int pairs[2] = {};
  float factors[2] = {};
  uint32 phase = 0;
  int stage = 0, loaded = -1, turn_of = 0;  // the first row of those that are loaded; the warp whose turn it is
  for (int i = 0; i < count; i++, move_on(item, s.ends, tiles)) {
    if (item.first != loaded) {
      loaded = item.first;
      load_rows(b, call, item, first_unit, units);
#if DOWN
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int row = item.first + part * 2 + k;
        pairs[k] = row < item.last ? call.order[row] : 0;
        factors[k] = row < item.last ? call.factors[pairs[k]] : 0.f;
      }
#endif
    }
    const uint32 moved = stage * sizes.stage, at = place + moved + first_unit * 64;
    wait_for(shared_address(&s.full[stage]), phase);
    float sums[TILES][4];
    multiply_item(sums, b, sizes, at, table + moved, units);
    // over codes that no other thread reads
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        store_two(at + 2 * m * sizes.eight + r * 32, sums[m][2 * r], sums[m][2 * r + 1]);
    __syncwarp();
    const uint32 added = shared_address(&s.added[stage]), empty = shared_address(&s.empty[stage]);
    if (lane == 0) arrive(added);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      if (warp == turn_of) {
        wait_for(added, phase);
        finish(call, sizes, item, place + moved, m, pairs, factors);
        // of all sums, before the copy engine writes over them
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) arrive(empty);
      }
      if (++turn_of == WARPS) turn_of = 0;
    }
    if (++stage == call.stages) stage = 0, phase ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_experts(const __grid_constant__ Call call) {
  extern __shared__ __align__(128) char memory[];
  Shared &s = *(Shared *)memory;
  const uint32 ring = shared_address(memory + (sizeof(Shared) + 127) / 128 * 128);
  const Sizes sizes(call);
  if (threadIdx.x == 0) {
    for (int i = 0; i < call.stages; i++) {
      init_barrier(shared_address(&s.full[i]), EIGHTS);
      init_barrier(shared_address(&s.added[i]), WARPS);
      init_barrier(shared_address(&s.empty[i]), TILES);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  // Pairs were sorted before the first product began: the second one reads weights at once. All else waits.
  if (!DOWN) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
  for (int at = threadIdx.x; at < EXPERTS; at += THREADS) s.ends[at] = call.ends[at];
  __syncthreads();
  const int tiles = (call.outputs + OUTPUTS - 1) / OUTPUTS;
  int total;
  find_item(s.ends, tiles, 0, total);
  const int first = int(int64(total) * blockIdx.x / gridDim.x);
  const int count = int(int64(total) * (blockIdx.x + 1) / gridDim.x) - first;
  const Item item = find_item(s.ends, tiles, first, total);
  const int producer = int(threadIdx.x / 32) - WARPS;
  if (producer >= 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(32));
    if (producer < EIGHTS) fetch_items(call, s, sizes, ring, item, count, tiles, producer);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WARPS == 16 ? 112 : WARPS == 12 ? 160 : 232));
  if (DOWN) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
  multiply_items(call, s, sizes, ring, item, count, tiles);
}
