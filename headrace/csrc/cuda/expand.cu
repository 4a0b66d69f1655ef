// Adds what adapters add to a product's output [T, N], or with GATE makes of it act(gate) * up [T, F] of all rows, of an
// output [T, 2 F] that stacks gate and up, each rounded as if stored. See additions.cuh and kernels/lora.
//
// A block has up to 16 or 32 rows of one adapter, or of none, and each of its warps 64 columns, with a gate the same of
// both. What bounds it is how many bytes are asked for at a time: warps share nothing and wait for nobody, and eight rows
// are multiplied while sixteen are on their way to shared memory.
//
// Compiled by NVRTC. Macros: MANY, see additions.cuh; GATE (0; 1 silu, 2 gelu_tanh).

#include "numbers.cuh"
#include "half_pairs.cuh"
#include "additions.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, PARTS = GATE ? 2 : 1;
constexpr int STAGES = 3;  // eight rows each: what is multiplied, and what is on its way

struct Call {
  Additions added;
  const uint16 *x;       // [T, N]
  uint16 *out;           // the same, or [T, F]
  const int64 *tiles;    // [3, num_tiles] without a gate: of each its part, first column, and end
  int x_stride, out_stride;
  int outputs, num_tiles, programs;  // F; of 128 columns at most; blocks of threads for a block of rows
};

extern "C" __global__ void __launch_bounds__(THREADS, GATE ? 5 : 6) expand(const __grid_constant__ Call call) {
  const Additions &in = call.added;
  const int block = blockIdx.x / call.programs, nth = blockIdx.x % call.programs * WARPS + threadIdx.x / 32;
  const int64 slot = in.blocks[block];
  const int first = int(in.blocks[in.num_blocks + block]), count = int(in.blocks[2 * in.num_blocks + block]);
  // unused blocks end at once, but for one: the grid must not end before the kernel in front
  if (block > 0 && (GATE ? count == 0 : slot < 0)) return;
  int part = 0, begin = nth * COLUMNS, end = call.outputs;
#if !GATE
  const int tile = min(nth / 2, call.num_tiles - 1);
  part = int(call.tiles[tile]), begin = int(call.tiles[call.num_tiles + tile]) + nth % 2 * COLUMNS;
  end = nth / 2 < call.num_tiles ? int(call.tiles[2 * call.num_tiles + tile]) : 0;
#endif
  const int column = begin + threadIdx.x % 32 / 4 * 8;
  const bool is_there = column < end;
  int rank[PARTS] = {};
  Eight b[PARTS][4] = {};
  if (slot >= 0 && count > 0) {  // no kernel writes additions
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      rank[i] = int(in.ranks[slot * in.parts + part + i]);
      load_b(b[i], in, slot, 0, column + i * call.outputs, is_there);
    }
  }
  const int mine = row_of_lane(in, first, count);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (begin >= end || (!GATE && rank[0] == 0)) return;  // alike in a warp

  const auto own = [&](const Rows &rows, int i, int half) {
    return call.x + int64(rows.pair[half]) * call.x_stride + column + i * call.outputs;
  };
  extern __shared__ Eight staged[];
  const RowsAhead<STAGES, PARTS, THREADS, decltype(own)> ahead{staged, own, slot, first, count, mine, is_there};
  ahead.begin();
  uint32 next_sums[PARTS][2];
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
    load_sums(next_sums[i], in, Rows(slot, first, count, mine, 0), part + i, 0, rank[i] > 0);
#pragma unroll 1
  for (int at = 0; at < count; at += ROWS) {
    const Rows rows(slot, first, count, mine, at);
    Eight x[PARTS][2];
    ahead.ask(at + (STAGES - 1) * ROWS);
    wait_for_copies<STAGES - 1>();
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (is_there && rows.has[half]) x[i][half] = *ahead.place(at, i, half);
    uint32 sums[PARTS][2];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      sums[i][0] = next_sums[i][0], sums[i][1] = next_sums[i][1];
      if (at + ROWS < count)
        load_sums(next_sums[i], in, Rows(slot, first, count, mine, at + ROWS), part + i, 0, rank[i] > 0);
    }
    float d[PARTS][4][4] = {};
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      add_part(d[i], b[i], sums[i], in, rows, part + i, rank[i], column + i * call.outputs, is_there);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Eight done;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float own[PARTS][2];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          own[i][0] = widen(x[i][half].v[j]) + d[i][j][half];
          own[i][1] = widen_high(x[i][half].v[j]) + d[i][j][2 + half];
        }
#if GATE
        round_both(own[0][0], own[0][1]);
        round_both(own[1][0], own[1][1]);
        done.v[j] = pack(activate<GATE == 2>(own[0][0], own[1][0]), activate<GATE == 2>(own[0][1], own[1][1]));
#else
        done.v[j] = pack(own[0][0], own[0][1]);
#endif
      }
      if (is_there && rows.has[half])
        *(Eight *)(call.out + int64(rows.pair[half]) * call.out_stride + column) = done;
    }
  }
}
