// What adapters add to a product's output, the residual addition, and the norm behind it, in one launch: out [T, D] =
// norm(residual + x + additions), and residual becomes that sum. See additions.cuh and kernels/lora. bfloat16.
//
// A cluster has up to 8 rows of one adapter, or of none, and its warps together all columns: an adapter's b is read
// once for 8 rows, where a block for each row would read it for each. Clusters with the first 8 rows of blocks come
// first: of many adapters with few rows each the others are empty, and would take turns with them.
//
// Compiled by NVRTC. Macros: MANY, see additions.cuh; GROUPS, of 64 columns that a warp has at most.

#include "numbers.cuh"
#include "hopper.cuh"
#include "cluster_sums.cuh"
#include "additions.cuh"

constexpr int WARPS = 16, CLUSTER = 4;
static_assert(CLUSTER * ROWS == 32, "a warp sends all sums");

struct Call {
  Additions added;
  const void *x;         // [T, D], or `partials` sums [S, T, D] float32 if that is not 0
  uint16 *residual;      // [T, D]
  const uint16 *weight;  // [D]
  uint16 *out;           // [T, D]
  int64 partial_stride;
  int x_stride, residual_stride, partials;
  float eps, offset;
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * WARPS, GROUPS > 1 ? 1 : 2)
    expand_norm(const __grid_constant__ Call call) {
  __shared__ float squares[WARPS][ROWS], all_squares[CLUSTER][ROWS];  // of warps, and of blocks
  __shared__ uint64 barrier;
  const uint32 bar = shared_address(&barrier);
  const Additions &in = call.added;
  const int unit = blockIdx.x / CLUSTER, program = blockIdx.x % CLUSTER, warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32, block = unit % in.num_blocks, at = unit / in.num_blocks * ROWS;
  const int64 slot = in.blocks[block];
  const int first = int(in.blocks[in.num_blocks + block]) + at;
  const int count = int(in.blocks[2 * in.num_blocks + block]) - at;
  // what has no rows ends at once, but for one: the grid must not end before the kernel in front
  if (unit > 0 && count <= 0) return;  // alike in a cluster
  const int own = (program * WARPS + warp) * COLUMNS + lane / 4 * 8;  // the first of its columns
  const int rank = slot < 0 ? 0 : int(in.ranks[slot]);
  Eight b[GROUPS][4];  // no kernel writes additions
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    const int column = own + group * CLUSTER * WARPS * COLUMNS;
    load_b(b[group], in, max(slot, int64(0)), 0, column, column < in.width && slot >= 0);  // before the rank is known
  }
  const Rows rows(in, slot, first, count);  // nor which rows are whose
  if (threadIdx.x == 0) {
    init_barrier(bar, 1);
    publish_barriers();
    expect_bytes(bar, CLUSTER * ROWS * 4);
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // the barrier may be used
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (count <= 0) {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    return;
  }

  uint32 sums[2];
  load_sums(sums, in, rows, 0, 0, rank > 0);
  Eight total[GROUPS][2];
  float square[2] = {};
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    const int column = own + group * CLUSTER * WARPS * COLUMNS;
    const bool is_there = column < in.width;
    Eight before[2];
    float d[4][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
      before[half] = load(call.residual + int64(rows.pair[half]) * call.residual_stride + column,
                          is_there && rows.has[half]);
    if (!call.partials) {
      Eight x[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        x[half] = load((const uint16 *)call.x + int64(rows.pair[half]) * call.x_stride + column,
                       is_there && rows.has[half]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 4; ++j) d[j][half] = widen(x[half].v[j]), d[j][2 + half] = widen_high(x[half].v[j]);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float *more = (const float *)call.x + int64(rows.pair[half]) * call.x_stride + column;
#pragma unroll 1
        for (int split = 0; split < (is_there && rows.has[half] ? call.partials : 0); ++split) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 two = *(const float2 *)(more + 2 * j);
            d[j][half] += two.x, d[j][2 + half] += two.y;
          }
          more += call.partial_stride;
        }
      }
    }
    add_part(d, b[group], sums, in, rows, 0, rank, column, is_there);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32 rounded = narrow(d[j][half], d[j][2 + half]);  // as if the product had stored it
        const uint32 sum = narrow(widen(rounded) + widen(before[half].v[j]),
                                  widen_high(rounded) + widen_high(before[half].v[j]));
        total[group][half].v[j] = sum;
        square[half] += widen(sum) * widen(sum) + widen_high(sum) * widen_high(sum);
      }
      if (is_there && rows.has[half])
        *(Eight *)(call.residual + int64(rows.pair[half]) * call.residual_stride + column) = total[group][half];
    }
  }

  Eight weight[GROUPS];  // asked for before all wait for each other
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    const int column = own + group * CLUSTER * WARPS * COLUMNS;
    weight[group] = load(call.weight + column, column < in.width);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) square[half] += __shfl_xor_sync(~0u, square[half], apart);
    if (lane < 4) squares[warp][2 * lane + half] = square[half];
  }
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  __syncthreads();
  if (threadIdx.x < CLUSTER * ROWS) {  // a lane for each row and block
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += squares[i][lane % ROWS];
    send(shared_address(&all_squares[program][lane % ROWS]), bar, lane / ROWS, sum);
  }
  wait_for_sums(bar);  // of all blocks, so that nobody writes to one that has ended
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    const int column = own + group * CLUSTER * WARPS * COLUMNS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < CLUSTER; ++i) sum += all_squares[i][lane % 4 * 2 + half];
      const float scale = rsqrtf(sum / in.width + call.eps);
      const Eight normed = apply_norm(total[group][half], weight[group], scale, call.offset);
      if (column < in.width && rows.has[half])
        *(Eight *)(call.out + int64(rows.pair[half]) * in.width + column) = normed;
    }
  }
}
