// Between two products with low-rank additions of adapters: what the first one's adapters add, the residual addition
// with the norm behind it, and what the second one's adapters begin, in one launch. See kernels/lora. bfloat16.
//
// A cluster of eight programs has a block of at most 16 rows, all of one adapter, and each program an eighth of the
// inputs, then of the outputs. 64 columns of a block are a group, of which a thread has 16 neighbours in two rows, r and
// r + 8 with r = lane / 4, the 16 of quarter lane % 4: 32 bytes. The order of columns in a matrix product is free as
// long as both operands have the same, so these registers are its operands as they are, and its result is laid out so.
//
// Compiled by NVRTC. -DRANKS: of the first bank, and of each part of the next; -DCOLUMNS: ranks of
// all parts of the next bank, 0 without one; -DGROUPS: most groups of a warp.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int WARPS = 8, CLUSTER = 8, ROWS = 16, WIDTH = 64, ALL_WARPS = WARPS * CLUSTER;
constexpr int TILES = RANKS / 8, NEXT_TILES = COLUMNS / 8;

struct alignas(16) Wide { uint32 v[4]; };

__device__ Wide load(const void *place) { return *static_cast<const Wide *>(place); }

__device__ void store(void *place, const uint32 *v) { *static_cast<Wide *>(place) = {{v[0], v[1], v[2], v[3]}}; }

__device__ void prefetch(const void *place) { asm volatile("prefetch.global.L2 [%0];" ::"l"(place)); }

// 16 values of bfloat16
__device__ void load_values(uint32 (&values)[8], const uint16 *place, bool is_there) {
  Wide low = {}, high = {};
  if (is_there) { low = load(place); high = load(place + 8); }
#pragma unroll
  for (int i = 0; i < 4; i++) { values[i] = low.v[i]; values[4 + i] = high.v[i]; }
}

__device__ float sum_of_all(const float *own) {
  float sum = 0.0f;
#pragma unroll
  for (int program = 0; program < CLUSTER; program++) sum += load_of(own, program);
  return sum;
}

__device__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// A group of two rows times `TILES_` * 8 rows of `a`, of which row n + 8 t of tile t is at `a` + 8 t rows; ``mask``: bit
// t says that it is there.
template <int TILES_>
__device__ void shrink(float (&sums)[TILES_ ? TILES_ : 1][4], const uint32 (&low)[8], const uint32 (&high)[8],
                       const uint16 *a, int64 inputs, uint32 mask) {
#pragma unroll
  for (int t = 0; t < TILES_; t++) {
    uint32 w[8];
    load_values(w, a + 8 * t * inputs, mask >> t & 1);
#pragma unroll
    for (int s = 0; s < 8; s += 2) multiply(sums[t], low[s], high[s], low[s + 1], high[s + 1], w[s], w[s + 1]);
  }
}

// The sums of all warps [WARPS, ROWS, columns] to those of the program [ROWS, columns].
__device__ void add_warps(const float *parts, float *sums, int count) {
  for (int i = threadIdx.x; i < count; i += 32 * WARPS) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += parts[warp * count + i];
    sums[i] = sum;
  }
}

template <int TILES_>
__device__ void keep(float *parts, const float (&sums)[TILES_ ? TILES_ : 1][4], int warp, int r, int c) {
  float *own = parts + warp * ROWS * TILES_ * 8;
#pragma unroll
  for (int t = 0; t < TILES_; t++) {
    own[r * TILES_ * 8 + 8 * t + 2 * c] = sums[t][0];
    own[r * TILES_ * 8 + 8 * t + 2 * c + 1] = sums[t][1];
    own[(r + 8) * TILES_ * 8 + 8 * t + 2 * c] = sums[t][2];
    own[(r + 8) * TILES_ * 8 + 8 * t + 2 * c + 1] = sums[t][3];
  }
}

// x [T, K], the first product's input; pending [T, D], its output, or `partials` sums [S, T, D] float32 of it if that is
// not 0; residual [T, D], which becomes the sum; out [T, D], its norm; next_sums [T, COLUMNS] float32, by places.
struct Arguments {
  const uint16 *x, *a, *b;
  const int64 *ranks;
  const void *pending;
  uint16 *residual;
  const uint16 *weight;
  uint16 *out;
  const uint16 *next_a;
  const int64 *next_ranks;
  float *next_sums;
  const int64 *order, *blocks;
  int64 x_stride, pending_stride, partial_stride, residual_stride;
  int K, D, num_blocks, partials;
  float eps, offset;
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * WARPS, GROUPS * RANKS > 16 ? 1 : 2)
    adapted_norm(const __grid_constant__ Arguments in) {
  extern __shared__ float shared[];
  constexpr int PARTS = WARPS * ROWS * (COLUMNS > RANKS ? COLUMNS : RANKS);
  float *parts = shared, *sums = parts + PARTS, *next_sums = sums + ROWS * RANKS, *squares = next_sums + ROWS * COLUMNS;
  float *own_squares = squares + WARPS * ROWS, *scale = own_squares + ROWS;
  uint32 *reduced = reinterpret_cast<uint32 *>(scale + ROWS);  // [ROWS, RANKS / 2] pairs
  const int block = blockIdx.x / CLUSTER, warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  int program;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(program));
  const int64 slot = in.blocks[block];
  const int first = int(in.blocks[in.num_blocks + block]), count = int(in.blocks[2 * in.num_blocks + block]);
  const int me = program * WARPS + warp;
  if (slot >= 0 && me * WIDTH < in.D) {  // no kernel writes additions: ask for them before the one in front has ended
    const uint16 *b = in.b + (slot * RANKS + 2 * c) * in.D + me * WIDTH + 8 * r;
    prefetch(b);
    prefetch(b + in.D);
    prefetch(b + 8 * int64(in.D));
    prefetch(b + 9 * int64(in.D));
#pragma unroll
    for (int t = 0; t < NEXT_TILES; t++)
      prefetch(in.next_a + (slot * COLUMNS + 8 * t + r) * in.D + me * WIDTH + 16 * c);
#pragma unroll
    for (int t = 0; t < TILES && me * WIDTH < in.K; t++)
      prefetch(in.a + (slot * RANKS + 8 * t + r) * in.K + me * WIDTH + 16 * c);
  }
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
  if (count == 0) return;  // all programs of the cluster
  const bool has_low = r < count, has_high = r + 8 < count;
  const int64 row_low = has_low ? in.order[first + r] : 0, row_high = has_high ? in.order[first + r + 8] : 0;
  const int rank = slot < 0 ? 0 : int(in.ranks[slot]);

  if (rank > 0) {  // alike in the whole cluster
    uint32 mask = 0;
#pragma unroll
    for (int t = 0; t < TILES; t++) mask |= uint32(8 * t < (rank + 15) / 16 * 16) << t;
    float d[TILES][4] = {};
    const uint16 *a = in.a + (slot * RANKS + r) * in.K + 16 * c;
#pragma unroll 4
    for (int k = me * WIDTH; k < in.K; k += ALL_WARPS * WIDTH) {
      uint32 low[8], high[8];
      load_values(low, in.x + row_low * in.x_stride + k + 16 * c, has_low);
      load_values(high, in.x + row_high * in.x_stride + k + 16 * c, has_high);
      shrink<TILES>(d, low, high, a + k, in.K, mask);
    }
    keep<TILES>(parts, d, warp, r, c);
    __syncthreads();
    add_warps(parts, sums, ROWS * RANKS);
    sync_cluster();
    for (int i = threadIdx.x; i < ROWS * RANKS / 2; i += 32 * WARPS)
      reduced[i] = narrow(sum_of_all(sums + 2 * i), sum_of_all(sums + 2 * i + 1));
    __syncthreads();
  }

  uint32 next_mask = 0;
#pragma unroll
  for (int t = 0; t < NEXT_TILES; t++) {
    const int next_rank = slot < 0 ? 0 : int(in.next_ranks[slot * (COLUMNS / RANKS) + 8 * t / RANKS]);
    next_mask |= uint32(8 * t % RANKS < (next_rank + 15) / 16 * 16) << t;
  }
  uint32 total[GROUPS][2][8];  // rows r and r + 8
  float square[2] = {}, next[NEXT_TILES ? NEXT_TILES : 1][4] = {};
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const int begin = (me + group * ALL_WARPS) * WIDTH, own = begin + 16 * c;
    if (begin < in.D) {
      float added[8][4] = {};
      for (int k = 0; k < rank; k += 16) {
        const uint16 *b = in.b + (slot * RANKS + k + 2 * c) * in.D + begin + 8 * r;
        const Wide b0 = load(b), b1 = load(b + in.D), b8 = load(b + 8 * int64(in.D)), b9 = load(b + 9 * int64(in.D));
        const uint32 *low = reduced + (r * RANKS + k) / 2 + c, *high = low + 8 * RANKS / 2;
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const uint32 halves = j % 2 ? 0x7632 : 0x5410;
          multiply(added[j], low[0], high[0], low[4], high[4], __byte_perm(b0.v[j / 2], b1.v[j / 2], halves),
                   __byte_perm(b8.v[j / 2], b9.v[j / 2], halves));
        }
      }
      uint32 weight[8], weighted[2][8];
      load_values(weight, in.weight + own, true);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const bool has = half ? has_high : has_low;
        const int64 row = half ? row_high : row_low;
        uint32 before[8];
        uint16 *residual = in.residual + row * in.residual_stride + own;
        load_values(before, residual, has);
        float x[16];
        if (in.partials == 0) {
          uint32 values[8];
          load_values(values, static_cast<const uint16 *>(in.pending) + row * in.pending_stride + own, has);
#pragma unroll
          for (int i = 0; i < 8; i++) { x[2 * i] = widen(values[i]); x[2 * i + 1] = widen_high(values[i]); }
        } else {
#pragma unroll
          for (int i = 0; i < 16; i++) x[i] = 0.0f;
          for (int s = 0; s < in.partials && has; s++) {
            const float *place =
                static_cast<const float *>(in.pending) + s * in.partial_stride + row * in.pending_stride + own;
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
              const Wide four = load(place + i);
#pragma unroll
              for (int k = 0; k < 4; k++) x[i + k] += __uint_as_float(four.v[k]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
          // column 16 c + 2 i: in the lower or upper eight of the thread's, see `multiply`
          const float first_ = added[2 * i % 8][2 * half + i / 4], second = added[2 * i % 8 + 1][2 * half + i / 4];
          const uint32 rounded = narrow(x[2 * i] + first_, x[2 * i + 1] + second);  // as if the product had stored it
          const uint32 sum = narrow(widen(rounded) + widen(before[i]), widen_high(rounded) + widen_high(before[i]));
          total[group][half][i] = sum;
          square[half] += widen(sum) * widen(sum) + widen_high(sum) * widen_high(sum);
          weighted[half][i] =
              narrow(widen(sum) * (widen(weight[i]) + in.offset),
                     widen_high(sum) * (widen_high(weight[i]) + in.offset));
        }
        if (has) { store(residual, total[group][half]); store(residual + 8, total[group][half] + 4); }
      }
      if (COLUMNS && slot >= 0)  // the norm's factor of a row comes last
        shrink<NEXT_TILES>(next, weighted[0], weighted[1],
                           in.next_a + (slot * COLUMNS + r) * in.D + own, in.D, next_mask);
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    square[half] += __shfl_xor_sync(0xFFFFFFFFu, square[half], 1);
    square[half] += __shfl_xor_sync(0xFFFFFFFFu, square[half], 2);
    if (c == 0) squares[warp * ROWS + r + 8 * half] = square[half];
  }
  if (COLUMNS && slot >= 0) keep<NEXT_TILES>(parts, next, warp, r, c);
  __syncthreads();
  add_warps(squares, own_squares, ROWS);
  if (COLUMNS && slot >= 0) add_warps(parts, next_sums, ROWS * COLUMNS);
  sync_cluster();
  if (threadIdx.x < ROWS) scale[threadIdx.x] = rsqrtf(sum_of_all(own_squares + threadIdx.x) / in.D + in.eps);
  __syncthreads();
  if (COLUMNS && slot >= 0) {
    constexpr int SHARE = ROWS * COLUMNS / CLUSTER;
    for (int i = program * SHARE + threadIdx.x; i < (program + 1) * SHARE; i += 32 * WARPS) {
      const int row = i / (COLUMNS ? COLUMNS : 1);
      if (row < count)
        in.next_sums[int64(first) * COLUMNS + i] = sum_of_all(next_sums + i) * scale[row];
    }
  }
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const int begin = (me + group * ALL_WARPS) * WIDTH, own = begin + 16 * c;
    if (begin < in.D) {
      uint32 weight[8];
      load_values(weight, in.weight + own, true);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float factor = scale[r + 8 * half];
        uint32 normed[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const uint32 sum = total[group][half][i];
          normed[i] = narrow(widen(sum) * factor * (widen(weight[i]) + in.offset),
                             widen_high(sum) * factor * (widen_high(weight[i]) + in.offset));
        }
        uint16 *out = in.out + (half ? row_high : row_low) * in.D + own;
        if (half ? has_high : has_low) { store(out, normed); store(out + 8, normed + 4); }
      }
    }
  }
  sync_cluster();  // others may still read what is shared here
}
