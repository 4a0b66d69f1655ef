// What adapters add to q, k and v [T, (H + 2 K) E], each rounded as if stored, and all that is between them and
// attention: norms of heads, rotation, and k and v into their pages. See additions.cuh, kernels/lora and
// kernels/rowwise. bfloat16.
//
// A block has up to 16 or 32 rows of one adapter, or of none, and each of its warps 64 pairs of columns that are rotated
// with each other, HALF apart in a head: a lane has both of eight pairs in two rows. Eight rows are computed while
// sixteen are on their way to shared memory.
//
// Compiled by NVRTC. Macros: MANY, see additions.cuh; HALF, of E; NORM (0, 1).

#include "numbers.cuh"
#include "additions.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, PARTS = 2, SIZE = 2 * HALF;
constexpr int STAGES = 3;  // eight rows each: what is computed, and what is on its way
static_assert(HALF % 8 == 0 && (!NORM || (COLUMNS % HALF == 0)), "a head's lanes are in a warp");

struct Call {
  Additions added;
  const uint16 *x;                  // [T, (H + 2 K) E]
  uint16 *q, *k, *v;                // [T, H, E], pages [P, page, K, E]
  const float *cos_sin;             // [L, E]: cosines, sines
  const int64 *positions, *slots;   // [T]: of a slot, its page * `page` + offset
  const uint16 *q_norm, *k_norm;    // [E], with NORM
  int64 k_stride, v_stride;         // of pages, numbers
  int x_stride, heads, kv_heads, page, programs;  // H, K; blocks of threads for a block of rows
  float eps, offset;
};

struct alignas(16) Four { float v[4]; };

// Norm weights of eight columns, as factors.
__device__ __forceinline__ float factor(const Eight &weight, int i, float offset) {
  return (i % 2 ? widen_high(weight.v[i / 2]) : widen(weight.v[i / 2])) + offset;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) expand_rope(const __grid_constant__ Call call) {
  const Additions &in = call.added;
  const int block = blockIdx.x / call.programs, nth = blockIdx.x % call.programs * WARPS + threadIdx.x / 32;
  const int64 slot = in.blocks[block];
  const int first = int(in.blocks[in.num_blocks + block]), count = int(in.blocks[2 * in.num_blocks + block]);
  // unused blocks end at once, but for one: the grid must not end before the kernel in front
  if (block > 0 && count == 0) return;
  const int pair = nth * COLUMNS + threadIdx.x % 32 / 4 * 8, head = pair / HALF, dim = pair % HALF;
  const int begin = nth * COLUMNS / HALF, end = call.heads + 2 * call.kv_heads;  // heads; all of a warp are of one part
  const int part = begin < call.heads ? 0 : begin < call.heads + call.kv_heads ? 1 : 2;
  const int column = head * SIZE + dim;
  const bool is_there = head < end;
  const bool has_rank = slot >= 0 && count > 0 && begin < end;
  const int rank = has_rank ? int(in.ranks[slot * in.parts + part]) : 0;
  Eight b[PARTS][4];  // no kernel writes additions
#pragma unroll
  for (int i = 0; i < PARTS; ++i) load_b(b[i], in, slot, 0, column + i * HALF, is_there && has_rank);
  Eight weight[PARTS] = {};
#if NORM
#pragma unroll
  for (int i = 0; i < PARTS; ++i) weight[i] = load((part ? call.k_norm : call.q_norm) + dim + i * HALF, part < 2);
#endif
  const int lane = threadIdx.x % 32, mine = row_of_lane(in, first, count);
  asm volatile("" ::: "memory");  // what follows waits for `mine`: not in front of factors
  // a step's positions and slots are there before the product in front begins
  const int my_position = lane < count ? int(call.positions[mine]) : 0;
  const int my_slot = lane < count ? int(call.slots[mine]) : 0;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (begin >= end) return;  // alike in a warp

  const auto own = [&](const Rows &rows, int i, int half) {
    return call.x + int64(rows.pair[half]) * call.x_stride + column + i * HALF;
  };
  extern __shared__ Eight staged[];
  const RowsAhead<STAGES, PARTS, THREADS, decltype(own)> ahead{staged, own, slot, first, count, mine, is_there};
  ahead.begin();
  uint32 next_sums[2];
  load_sums(next_sums, in, Rows(slot, first, count, mine, 0), part, 0, rank > 0);
#pragma unroll 1
  for (int at = 0; at < count; at += ROWS) {
    const Rows rows(slot, first, count, mine, at);
    Eight x[PARTS][2];
    uint32 sums[2];
    ahead.ask(at + (STAGES - 1) * ROWS);
    sums[0] = next_sums[0], sums[1] = next_sums[1];
    if (at + ROWS < count) load_sums(next_sums, in, Rows(slot, first, count, mine, at + ROWS), part, 0, rank > 0);
    wait_for_copies<STAGES - 1>();
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        x[i][half] = is_there && rows.has[half] ? *ahead.place(at, i, half) : Eight{};
    float d[PARTS][4][4] = {};
#pragma unroll
    for (int i = 0; i < PARTS; ++i) add_part(d[i], b[i], sums, in, rows, part, rank, column + i * HALF, is_there);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = __shfl_sync(~0u, my_position, at + lane % 4 * 2 + half);
      const int own_slot = __shfl_sync(~0u, my_slot, at + lane % 4 * 2 + half);
      const bool has = is_there && rows.has[half];
      float value[PARTS][8];
      float square = 0.0f;
#pragma unroll
      for (int i = 0; i < PARTS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32 pair = x[i][half].v[j];
          const uint32 both = narrow(widen(pair) + d[i][j][half], widen_high(pair) + d[i][j][2 + half]);
          value[i][2 * j] = widen(both), value[i][2 * j + 1] = widen_high(both);
          square += value[i][2 * j] * value[i][2 * j] + value[i][2 * j + 1] * value[i][2 * j + 1];
        }
      if (part < 2) {  // alike in a warp
#if NORM
#pragma unroll
        for (int apart = 4; apart < HALF / 2; apart *= 2) square += __shfl_xor_sync(~0u, square, apart);
        const float scale = rsqrtf(square / SIZE + call.eps);
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) value[i][j] *= scale * factor(weight[i], j, call.offset);
#endif
        const float *table = call.cos_sin + int64(position) * SIZE + dim;
#pragma unroll
        for (int four = 0; four < 8; four += 4) {
          const Four cosine = has ? *(const Four *)(table + four) : Four{};
          const Four sine = has ? *(const Four *)(table + HALF + four) : Four{};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float low = value[0][four + j], high = value[1][four + j];
            value[0][four + j] = low * cosine.v[j] - high * sine.v[j];
            value[1][four + j] = high * cosine.v[j] + low * sine.v[j];
          }
        }
      }
      uint16 *to = call.q + int64(rows.pair[half]) * call.heads * SIZE + column;
      if (part > 0) {
        const int64 page = own_slot / call.page;
        const int row = own_slot % call.page;
        to = (part == 1 ? call.k + page * call.k_stride : call.v + page * call.v_stride)
             + (row * call.kv_heads + head - call.heads - (part - 1) * call.kv_heads) * SIZE + dim;
      }
      if (has)
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          Eight done;
#pragma unroll
          for (int j = 0; j < 4; ++j) done.v[j] = narrow(value[i][2 * j], value[i][2 * j + 1]);
          *(Eight *)(to + i * HALF) = done;
        }
    }
  }
}
