// As expand_norm.cu, for hundreds and thousands of rows: out [T, D] = norm(residual + x + additions), and residual
// becomes that sum. See additions.cuh and kernels/lora. bfloat16.
//
// A cluster has a block of up to 32 rows of one adapter, or of none, eight at a time, and its warps together all
// columns. It keeps the adapter's b, and asks for the next eight rows (cp.async) before it has those at hand: else a
// cluster's rows would wait for memory, and then for each other, in turns.
//
// Compiled by NVRTC. Macros: MANY, see additions.cuh; CLUSTER, its blocks, at most 4; GROUPS, of 64 columns that a warp
// has at most.

#include "numbers.cuh"
#include "hopper.cuh"
#include "cluster_sums.cuh"
#include "additions.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS, STAGES = 2;
constexpr uint32 SUMS_BYTES = CLUSTER * ROWS * 4;
static_assert(CLUSTER * ROWS <= 32, "a warp sends all sums");

struct Call {
  Additions added;
  const uint16 *x;       // [T, D]
  uint16 *residual;      // [T, D]
  const uint16 *weight;  // [D]
  uint16 *out;           // [T, D]
  int x_stride, residual_stride;
  float eps, offset;
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, GROUPS > 1 ? 1 : 2)
    expand_norm_many(const __grid_constant__ Call call) {
  extern __shared__ Eight staged[];  // [STAGES, GROUPS, residual and x, 2 rows, THREADS]
  __shared__ float squares[WARPS][ROWS], all_squares[STAGES][CLUSTER][ROWS];  // of warps, and of blocks
  __shared__ uint64 barriers[STAGES];
  const Additions &in = call.added;
  const int block = blockIdx.x / CLUSTER, program = blockIdx.x % CLUSTER, warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64 slot = in.blocks[block];
  const int first = int(in.blocks[in.num_blocks + block]), count = int(in.blocks[2 * in.num_blocks + block]);
  // what has no rows ends at once, but for one: the grid must not end before the kernel in front
  if (block > 0 && count <= 0) return;  // alike in a cluster
  const int own = (program * WARPS + warp) * COLUMNS + lane / 4 * 8;  // the first of its columns
  const int mine = row_of_lane(in, first, count);
  const int rank = slot < 0 ? 0 : int(in.ranks[slot]);
  Eight b[GROUPS][4], weight[GROUPS];  // no kernel writes additions
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    const int column = own + group * CLUSTER * WARPS * COLUMNS;
    load_b(b[group], in, max(slot, int64(0)), 0, column, column < in.width && slot >= 0);  // before the rank is known
    weight[group] = load(call.weight + column, column < in.width);
  }
  if (threadIdx.x == 0) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(shared_address(&barriers[stage]), 1);
      expect_bytes(shared_address(&barriers[stage]), SUMS_BYTES);
    }
    publish_barriers();
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // the barriers may be used
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  if (count <= 0) return;

  const auto place = [&](int step, int group, int is_x, int half) {
    return staged + (((step % STAGES * GROUPS + group) * 2 + is_x) * 2 + half) * THREADS + threadIdx.x;
  };
  const auto ask = [&](int step) {
    const Rows rows(slot, first, count, mine, step * ROWS);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const int column = own + group * CLUSTER * WARPS * COLUMNS;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (rows.has[half] && column < in.width) {
          const int64 row = rows.pair[half];
          copy_eight(place(step, group, 0, half), call.residual + row * call.residual_stride + column);
          copy_eight(place(step, group, 1, half), call.x + row * call.x_stride + column);
        }
    }
  };
  const int steps = (count + ROWS - 1) / ROWS;
  uint32 sums[2];
  ask(0);
  commit_copies();
  load_sums(sums, in, Rows(slot, first, count, mine, 0), 0, 0, rank > 0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    uint32 next_sums[2] = {};
    if (step + 1 < steps) {
      ask(step + 1);
      load_sums(next_sums, in, Rows(slot, first, count, mine, (step + 1) * ROWS), 0, 0, rank > 0);
    }
    commit_copies();
    wait_for_copies<STAGES - 1>();
    const Rows rows(slot, first, count, mine, step * ROWS);
    Eight total[GROUPS][2] = {};
    float square[2] = {};
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const int column = own + group * CLUSTER * WARPS * COLUMNS;
      const bool is_there = column < in.width;
      float d[4][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (is_there && rows.has[half]) {
          const Eight x = *place(step, group, 1, half);
#pragma unroll
          for (int j = 0; j < 4; ++j) d[j][half] = widen(x.v[j]), d[j][2 + half] = widen_high(x.v[j]);
        }
      add_part(d, b[group], sums, in, rows, 0, rank, column, is_there);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (is_there && rows.has[half]) {
          const Eight before = *place(step, group, 0, half);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint32 rounded = narrow(d[j][half], d[j][2 + half]);  // as if the product had stored it
            const uint32 sum = narrow(widen(rounded) + widen(before.v[j]),
                                      widen_high(rounded) + widen_high(before.v[j]));
            total[group][half].v[j] = sum;
            square[half] += widen(sum) * widen(sum) + widen_high(sum) * widen_high(sum);
          }
          *(Eight *)(call.residual + int64(rows.pair[half]) * call.residual_stride + column) = total[group][half];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) square[half] += __shfl_xor_sync(~0u, square[half], apart);
      if (lane < 4) squares[warp][2 * lane + half] = square[half];
    }
    // Two sets of sums and barriers in turns: who sends those of step + 2 has all of step + 1, which each block sent
    // behind its last read of those of this step.
    const uint32 bar = shared_address(&barriers[step % STAGES]);
    __syncthreads();
    if (threadIdx.x < CLUSTER * ROWS) {  // a lane for each row and block
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += squares[i][lane % ROWS];
      send(shared_address(&all_squares[step % STAGES][program][lane % ROWS]), bar, lane / ROWS, sum);
    }
    wait_for_sums(bar, step / STAGES & 1);  // of all blocks, so that nobody writes to one that has ended
    if (threadIdx.x == 0 && step + STAGES < steps) expect_bytes(bar, SUMS_BYTES);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < CLUSTER; ++i) sum += all_squares[step % STAGES][i][lane % 4 * 2 + half];
      const float scale = rsqrtf(sum / in.width + call.eps);
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        const int column = own + group * CLUSTER * WARPS * COLUMNS;
        const Eight normed = apply_norm(total[group][half], weight[group], scale, call.offset);
        if (column < in.width && rows.has[half])
          *(Eight *)(call.out + int64(rows.pair[half]) * in.width + column) = normed;
      }
    }
    sums[0] = next_sums[0], sums[1] = next_sums[1];
  }
}
