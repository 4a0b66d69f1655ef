// A product of many rows with its gated activation, on Hopper: out [M, F] = act(x Wg^T) * (x Wu^T), where W [2F, K]
// stacks Wg and Wu and x is [M, K], all of them in half precision, sums in float32, gate and up rounded as if stored.
//
// Programs stay and take one tile of 128 rows by 128 outputs after the other. One warp copies tiles of x and W into a
// ring of shared memory; two warpgroups of 64 rows each multiply, and hold gate and up of an output in the same thread.
// Two programs whose rows follow each other are a cluster: each copies half of W's tile for both.
//
// ADAPTED: behind a tile's last inputs each warpgroup multiplies what its rows' adapters have made of x with their b, some
// ranks of an adapter at a time: for rows of others these are zero. b of the first adapter comes while x is multiplied.
//
// Compiled by NVRTC. -DGELU: gelu_tanh instead of silu; -DFP16: float16 instead of bfloat16; -DADAPTED=1.

#include "numbers.cuh"
#include "hopper.cuh"
#include "half_pairs.cuh"

#ifdef GELU
constexpr bool IS_GELU = true;
#else
constexpr bool IS_GELU = false;
#endif

constexpr int ROWS = 128, OUTPUTS = 128, DEPTH = 64;  // of a tile; DEPTH inputs are 128 bytes, one swizzled row
constexpr int X_BYTES = ROWS * DEPTH * 2, W_BYTES = 2 * OUTPUTS * DEPTH * 2, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int STAGES = 4, OUT_BYTES = 64 * OUTPUTS * 2;        // what a warpgroup stores, in boxes of 64 by 64
constexpr int THREADS = 384, MATH_GROUPS = 2, CLUSTER = 2;

#if ADAPTED
constexpr int RANKS = 16, NONE = 0x7FFFFFFF, BEYOND = 0x7FFFFFF0;  // of a product; no adapter, no row of a map
constexpr int B_BOX = RANKS * 128, B_BYTES = 8 * B_BOX;  // 16 ranks of 64 outputs; of both parts for a tile's gate and up
static_assert(B_BYTES <= OUT_BYTES, "they come to where results are stored from");

struct Added {
  const uint16 *sums;  // [M, 2, R]: of gate and up, of the adapter of each row
  const int *owners;   // [M]: its slot, -1 for none
  const int64 *ranks;  // [S, 2]
  int most_ranks;      // R
};
#define MORE , const __grid_constant__ TensorMap b_map, const __grid_constant__ Added added
#else
#define MORE
#endif

__device__ void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

// copies of boxes between global and shared memory

__device__ void store_box(const TensorMap *map, uint32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row)
               : "memory");
}

// d [64, 256] += a [64, 16] b [256, 16]^T; a thread holds rows r and r + 8, r = lane / 4, of columns 8 j + 2 (lane % 4)
// and the next
__device__ void multiply(float (&d)[128], uint64 a, uint64 b, int keeps) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" S128 "}, %128, %129, p, 1, 1, 0, 0; }"
      : F128(d, 0) : "l"(a), "l"(b), "r"(keeps));
}

#if ADAPTED
// d [64, 256] += a [64, 16] (in registers) b [16, 256], of which outputs lie together
__device__ __forceinline__ void add_ranks(float (&d)[128], const uint32 (&a)[4], uint64 b) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" S128 "}, {%128, %129, %130, %131}, %132, "
      "p, 1, 1, 1; }"
      : F128(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// b as its boxes have it: the next 64 outputs are two boxes further, the next 8 ranks 1024 bytes.
__device__ __forceinline__ uint64 describe_columns(uint32 address) {
  return uint64((address & 0x3FFFF) >> 4) | (uint64(2 * B_BOX >> 4) << 16) | (uint64(1024 >> 4) << 32) | (1ull << 62);
}

// Whose the 64 rows of a warpgroup are; all lanes of a warp take part.
struct Owners {
  int low, high;  // of rows `lane` and `lane` + 32
  __device__ Owners(const Added &added, int first, int M) {
    const int row = first + threadIdx.x % 32;
    low = row < M ? added.owners[row] : -1, high = row + 32 < M ? added.owners[row + 32] : -1;
  }
  // The first slot of theirs above `slot`, or NONE.
  __device__ int find_next(int slot) const {
    return __reduce_min_sync(~0u, min(low > slot ? low : NONE, high > slot ? high : NONE));
  }
  __device__ int of_row(int r) const { return __shfl_sync(~0u, r < 32 ? low : high, r % 32); }
};

// Ranks from `rank` on of an adapter's b for the outputs of a tile: [gate, 0] of gate's ranks, [0, up] of up's behind them,
// zeros for ranks that there are not. Rows beyond the map's last come as zeros. By one thread.
__device__ __forceinline__ void fetch_ranks(const TensorMap *map, uint32 to, uint32 bar, const Added &added, int slot,
                                            int rank, int output, int F) {
  expect_bytes(bar, B_BYTES);
#pragma unroll
  for (int part = 0; part < 2; part++) {
    const bool is_there = rank < int(added.ranks[2 * slot + part]);
#pragma unroll
    for (int box = 0; box < 4; box++)
      load_box(to + (2 * box + part) * B_BOX, map, bar, output + box / 2 * F + box % 2 * 64,
               is_there && box / 2 == part ? slot * added.most_ranks + rank : BEYOND);
  }
}

// What a thread has of its rows' sums of a part, for ranks from `rank` on of an adapter; zeros of others' rows.
__device__ __forceinline__ void load_sums(uint32 (&a)[4], const Added &added, const Owners &owners, int first, int slot,
                                          int part, int rank) {
  const int lane = threadIdx.x % 32, r = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const bool is_there = rank < int(added.ranks[2 * slot + part]);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const bool is_own = owners.of_row(r + 8 * half) == slot && is_there;
    const uint16 *own = added.sums + (2 * (first + r + 8 * half) + part) * int64(added.most_ranks) + rank + lane % 4 * 2;
    a[half] = is_own ? *(const uint32 *)own : 0;
    a[half + 2] = is_own ? *(const uint32 *)(own + 8) : 0;
  }
}

// All that adapters add to a warpgroup's sums, from the slot on whose first ranks have been asked for.
__device__ __forceinline__ void add_adapters(float (&d)[128], const Added &added, const TensorMap *b_map, uint32 to,
                                             uint32 bar, uint32 &parity, int first, int output, int M, int F, int slot) {
  const Owners owners(added, first, M);
#pragma unroll 1
  for (int rank = 0; slot != NONE;) {  // alike in a warpgroup
    uint32 a[2][4];
#pragma unroll
    for (int part = 0; part < 2; part++) load_sums(a[part], added, owners, first, slot, part, rank);
    wait_for(bar, parity);
    parity ^= 1;
    begin_products();
    add_ranks(d, a[0], describe_columns(to));
    add_ranks(d, a[1], describe_columns(to + B_BOX));
    commit_products();
    wait_products<0>();
    rank += RANKS;
    if (rank >= int(max(added.ranks[2 * slot], added.ranks[2 * slot + 1]))) slot = owners.find_next(slot), rank = 0;
    sync_group(threadIdx.x / 128 - 1);  // all of b has been read
    if (threadIdx.x % 128 == 0 && slot != NONE) fetch_ranks(b_map, to, bar, added, slot, rank, output, F);
  }
}
#endif

// Which tile comes when: `band` pairs of row tiles together go through all outputs, so that x's part stays in the
// second-level cache while W passes by.
struct Tile {
  int row, output;
  __device__ Tile(int nth, int pairs, int columns, int band, int rank) {
    const int first = nth / (band * columns) * band, here = min(pairs - first, band), within = nth - first * columns;
    row = ((first + within % here) * CLUSTER + rank) * ROWS;
    output = within / here * OUTPUTS;
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    gated_product(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                  const __grid_constant__ TensorMap out_map, int M, int F, int K, int band MORE) {
  extern __shared__ char unaligned[];
  const uint32 stages = (shared_address(unaligned) + 1023) & ~1023u, outs = stages + STAGES * STAGE_BYTES;
  const uint32 full = outs + MATH_GROUPS * OUT_BYTES, empty = full + 8 * STAGES;
  const int thread = threadIdx.x, group = thread / 128 - 1;
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (thread == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(full + 8 * stage, 1);
      init_barrier(empty + 8 * stage, MATH_GROUPS * CLUSTER);  // what one program copies is for both
    }
#if ADAPTED
    for (int i = 0; i < MATH_GROUPS; i++) init_barrier(empty + 8 * (STAGES + i), 1);
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");

  const int pairs = (M + CLUSTER * ROWS - 1) / (CLUSTER * ROWS), columns = (F + OUTPUTS - 1) / OUTPUTS,
            steps = (K + DEPTH - 1) / DEPTH;
  const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  int stage = 0;
  uint32 parity = 0;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == 0) {
      for (int nth = first; nth < pairs * columns; nth += stride) {
        const Tile tile(nth, pairs, columns, band, rank);
        for (int step = 0; step < steps; step++) {
          const uint32 to = stages + stage * STAGE_BYTES, bar = full + 8 * stage;
          wait_for(empty + 8 * stage, parity ^ 1);
          expect_bytes(bar, STAGE_BYTES);
          load_box(to, &x_map, bar, step * DEPTH, tile.row);
          load_box_for(3, to + X_BYTES + rank * (W_BYTES / 2), &w_map, bar, step * DEPTH,
                            tile.output + rank * F);  // gate, or up
          if (++stage == STAGES) { stage = 0; parity ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int lane = thread % 32, mine = thread % 128, r = mine / 32 * 16 + lane / 4;
    const uint32 out = outs + group * OUT_BYTES;
    float d[128];
#if ADAPTED
    const uint32 bar = empty + 8 * (STAGES + group);
    uint32 added_parity = 0;
#endif
    for (int nth = first; nth < pairs * columns; nth += stride) {
      const Tile tile(nth, pairs, columns, band, rank);
      int before = 0;
#if ADAPTED
      const int slot = Owners(added, tile.row + group * 64, M).find_next(-1);
#endif
      for (int step = 0; step < steps; step++) {
#if ADAPTED
        if (step == min(2, steps - 1) && mine == 0 && slot != NONE) {  // to where the tile before was stored from
          asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
          fetch_ranks(&b_map, out, bar, added, slot, 0, tile.output, F);
        }
#endif
        wait_for(full + 8 * stage, parity);
        const uint64 a = describe_operand(stages + stage * STAGE_BYTES + group * (X_BYTES / 2));
        const uint64 b = describe_operand(stages + stage * STAGE_BYTES + X_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply(d, a, b, step > 0);
        multiply(d, a + 2, b + 2, 1);
        multiply(d, a + 4, b + 4, 1);
        multiply(d, a + 6, b + 6, 1);
        asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0 && mine < CLUSTER) arrive_at(empty + 8 * before, mine);  // the step before has been computed
        before = stage;
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (mine < CLUSTER) arrive_at(empty + 8 * before, mine);

#if ADAPTED
      if (slot != NONE) add_adapters(d, added, &b_map, out, bar, added_parity, tile.row + group * 64, tile.output, M, F, slot);
#endif
      if (mine == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the tile before has left
      sync_group(group);
#pragma unroll
      for (int j = 0; j < OUTPUTS / 8; j++) {
#pragma unroll
        for (int low = 0; low < 4; low += 2) {
          float gate[2] = {d[4 * j + low], d[4 * j + low + 1]}, up[2] = {d[4 * j + low + 64], d[4 * j + low + 65]};
          round_both(gate[0], gate[1]);
          round_both(up[0], up[1]);
          const uint32 place = out + j / 8 * (64 * 128) + (r + 4 * low) * 128 + ((j % 8 ^ r % 8) * 16 + lane % 4 * 4);
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(place),
                       "r"(pack(activate<IS_GELU>(gate[0], up[0]), activate<IS_GELU>(gate[1], up[1])))
                       : "memory");
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      sync_group(group);
      if (mine == 0) {
        store_box(&out_map, out, tile.output, tile.row + group * 64);
        store_box(&out_map, out + OUT_BYTES / 2, tile.output + 64, tile.row + group * 64);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
    if (mine == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::
                   : "memory");  // nobody writes to a program that has ended
}
