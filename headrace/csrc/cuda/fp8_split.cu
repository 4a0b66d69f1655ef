// Products of tens to hundreds of rows in FP8 with an e4m3 weight on Hopper: out [M, N] = x [M, K] times the weight
// [N, K] transposed, with a scale for each row of x and of the weight, or for each 128 inputs of a row of x and each
// 128 x 128 of the weight. Sums are float32 in a fixed order.
//
// The weight is the left operand of wgmma and rows of x are its columns, so that a tile has as many rows as there are,
// in steps of 16. A block multiplies 64 * GROUPS outputs by `tile_rows` rows. A thread asks the copy engine (TMA) for
// stages of 128 inputs of both into a ring, for the weight also before the previous kernel has ended; GROUPS warpgroups
// multiply. The `splits` blocks of a cluster have the same tile and a share of K each, and add up their sums in each
// other's shared memory, of which each then has some rows.
//
// Sizes are numbers of a call, not macros: a few kernels serve all weights. With one split a block is persistent. With
// TABLES a weight may be of groups of `each` outputs, a multiple of a tile's, each with K inputs of its own: a row of x
// then has those of all groups.
// Macros: GROUPS (1, 2), TABLES (1: scales of 128 inputs, 128 rows of a tile at most; 0: of rows, 256 at most).
// Compiled by NVRTC.

#include "numbers.cuh"
#include "hopper.cuh"
#include "cluster_sums.cuh"

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, MATH = 128 * GROUPS, IDLE = 128;
constexpr int MOST_ROWS = TABLES ? 128 : 256, SUMS = MOST_ROWS / 2;
constexpr int MOST_PAIRED = 64;  // rows of a tile of which registers hold the sums of two stages
constexpr uint32 WEIGHT_BYTES = WIDE * DEPTH;
constexpr uint32 TABLE_BYTES = TABLES ? 1024 : 0;  // of a stage: scales of 128 rows, then of each warpgroup's outputs
constexpr int LEAVING = 64, OUT_BYTES = LEAVING * 128;  // rows of x that leave at a time, and bytes of a warpgroup's

struct Call {
  const float *x_scales;      // [M], or [K / 128, M]
  const float *scales;        // [N], or [N / 128, K / 128]
  const uint16 *bias;         // [N] bfloat16, or null
  uint16 *out;                // [M, N] bfloat16
  int rows, outputs, inputs;  // M, N, K
  int tile_rows, splits;      // rows of a tile, a multiple of 8 where it is not all; blocks of a cluster
  int stages;                 // of the ring
  int each;                   // outputs of a group, N if there are no others
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

struct Place {  // of a block: its cluster's number and how many there are, and its own numbers in it
  int cluster, clusters, split;
  __device__ __forceinline__ explicit Place(const Call &call)
      : cluster(blockIdx.x / call.splits), clusters(gridDim.x / call.splits), split(blockIdx.x % call.splits) {}
};

struct Work {
  int output, first;  // output and row of x
  int begin, end;     // stages of 128 inputs
  int before;         // of a row of x, those of groups before
};

// Item number `index` of a cluster; false beyond the last. Those at work at once share weights, if there are several
// tiles of rows. The last of these overlaps the one before: rows that are not there are copied slowly.
__device__ __forceinline__ bool find_work(const Call &call, const Place &place, int index, Work &work) {
  const int row_tiles = divide_up(call.rows, call.tile_rows), steps = divide_up(call.inputs, DEPTH);
  const int across = divide_up(call.outputs, WIDE), rest = index / row_tiles;
  if (rest >= across) return false;
  work.first = max(min(index % row_tiles * call.tile_rows, call.rows - call.tile_rows), 0);
  work.output = rest * WIDE;
  work.before = work.output / call.each * steps;
  work.begin = place.split * steps / call.splits, work.end = (place.split + 1) * steps / call.splits;
  return true;
}

struct Memory {  // shared: the ring, of which a stage has rows of the weight, rows of x and scales; and what is behind it
  unsigned char *at;                              // the ring as a pointer
  uint32 ring, stage_bytes, x_bytes, bars, sums;  // bars of each stage: full, then empty; of sums of other blocks
  unsigned char *out;                             // rows that leave, of each warpgroup
  float *x_scales;                                // [MOST_ROWS + 64] of rows, unless these come with stages

  __device__ __forceinline__ Memory(unsigned char *storage, const Call &call) {
    // tiles swizzled by 128 bytes begin at multiples of 1,024
    ring = (shared_address(storage) + 1023) & ~1023u;
    at = storage + (ring - shared_address(storage));
    x_bytes = (call.tile_rows + 15) / 16 * 16 * DEPTH;  // products read whole sixteens
    stage_bytes = WEIGHT_BYTES + x_bytes + TABLE_BYTES;
    bars = ring + call.stages * stage_bytes, sums = bars + 16 * call.stages;
    out = at + (sums + 16 - ring);
    x_scales = (float *)(out + GROUPS * OUT_BYTES);
  }
};

struct Stage {  // of the ring, and how often it has been used
  int index;
  uint32 phase;
  __device__ __forceinline__ Stage() : index(0), phase(0) {}
  __device__ __forceinline__ void advance(int stages) {
    if (++index == stages) index = 0, phase ^= 1;
  }
  __device__ __forceinline__ uint32 full(const Memory &s) const { return s.bars + 16 * index; }
  __device__ __forceinline__ uint32 empty(const Memory &s) const { return full(s) + 8; }
  __device__ __forceinline__ uint32 tile(const Memory &s) const { return s.ring + index * s.stage_bytes; }
  // scales that come with it: of rows of x, then of each warpgroup's outputs
  __device__ __forceinline__ float *table(const Memory &s) const {
    return (float *)(s.at + index * s.stage_bytes + WEIGHT_BYTES + s.x_bytes);
  }
};

// Of the sums of a tile, in eights of rows: how many each block of a cluster adds up.
__device__ __forceinline__ int count_eights(const Call &call) { return divide_up(min(call.tile_rows, call.rows), 8); }

// The bytes of a thread's sums of eight rows and 16 outputs of each warp, from each of the other splits.
__device__ __forceinline__ uint32 count_sum_bytes(const Call &call, int split) {
  const int eights = count_eights(call), each = divide_up(eights, call.splits);
  return max(min(each, eights - split * each), 0) * (call.splits - 1) * MATH * 16;
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void sync_math() { asm volatile("bar.sync 1, %0;" ::"n"(MATH) : "memory"); }
__device__ __forceinline__ void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); }

// Ask for a stage's rows of the weight, zeros beyond the last; the stage then also waits for rows of x.
__device__ __forceinline__ void ask_weight(
    const Call &call, const TensorMap *map, const Memory &s, const Stage &stage, const Work &work, int step
) {
  expect_bytes(stage.full(s), WEIGHT_BYTES + call.tile_rows * DEPTH);
  load_box(stage.tile(s), map, stage.full(s), step * DEPTH, work.output);
}

// Ask for a stage's rows of x.
__device__ __forceinline__ void ask_rows(
    const TensorMap *map, const Memory &s, const Stage &stage, const Work &work, int step
) {
  load_box(stage.tile(s) + WEIGHT_BYTES, map, stage.full(s), (work.before + step) * DEPTH, work.first);
}

// The thread that copies: the stages of all items of this block.
__device__ __forceinline__ void fetch_work(
    const Call &call, const Place &place, const TensorMap *x_map, const TensorMap *weight_map, const Memory &s
) {
  Work work;
  Stage stage;
  int ahead = 0;
  if (find_work(call, place, place.cluster, work)) ahead = min(work.end - work.begin, call.stages);
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) {  // stages that were never used are empty
    ask_weight(call, weight_map, s, stage, work, work.begin + step);
    stage.advance(call.stages);
  }
  stage = Stage();
  prefetch_map(x_map);
  wait_for_previous();
#pragma unroll 1
  for (int index = place.cluster; find_work(call, place, index, work); index += place.clusters) {
#pragma unroll 1
    for (int step = work.begin; step < work.end; ++step) {
      if (index != place.cluster || step - work.begin >= ahead) {
        wait_for(stage.empty(s), stage.phase ^ 1);
        ask_weight(call, weight_map, s, stage, work, step);
      }
      ask_rows(x_map, s, stage, work, step);
      stage.advance(call.stages);
    }
  }
}

#if TABLES
constexpr int FETCHERS = IDLE / 32 - 1;

// A warp, number `nth` of FETCHERS, that brings scales of every so many stages; each takes a trip to the L2.
__device__ __forceinline__ void fetch_scales(const Call &call, const Place &place, const Memory &s, int nth) {
  const int lane = threadIdx.x % 32, groups = divide_up(call.inputs, DEPTH);
  const int count = min(call.tile_rows, call.rows);
  Work work;
  Stage stage;
  int turn = 0;
  wait_for_previous();
#pragma unroll 1
  for (int index = place.cluster; find_work(call, place, index, work); index += place.clusters) {
#pragma unroll 1
    for (int step = work.begin; step < work.end; ++step) {
      if (turn == nth) {
        float *to = stage.table(s) + lane;
        const float *from = call.x_scales + (int64)(work.before + step) * call.rows + work.first;
        const int output = work.output + 64 * lane;
        float found[MOST_ROWS / 32], own = 0.f;
#pragma unroll
        for (int i = 0; i < MOST_ROWS / 32; ++i) found[i] = 32 * i + lane < count ? from[32 * i + lane] : 0.f;
        if (lane < GROUPS && output < call.outputs) own = call.scales[(int64)(output / 128) * groups + step];
        wait_for(stage.empty(s), stage.phase ^ 1);
#pragma unroll
        for (int i = 0; i < MOST_ROWS / 32; ++i) to[32 * i] = found[i];
        if (lane < GROUPS) to[MOST_ROWS] = own;
        __syncwarp();
        if (lane == 0) arrive(stage.full(s));
      }
      turn = turn + 1 == FETCHERS ? 0 : turn + 1;
      stage.advance(call.stages);
    }
  }
}
#endif

#define PRODUCT "k32.f32.e4m3.e4m3"
#define MODES ", p, 1, 1;"
#include "shared_products.cuh"

// This warp has read a stage.
__device__ __forceinline__ void release(uint32 empty) {
  if (threadIdx.x % 32 == 0) arrive(empty);
}

// Begin the products of a stage.
template <int N, int SIZE>
__device__ __forceinline__ void multiply_stage(float (&d)[SIZE], const Memory &s, const Stage &stage, bool adds) {
  const uint32 tile = stage.tile(s), group = threadIdx.x / 128 - 1;
  const uint64 weight = describe_operand(tile + group * (64 * DEPTH)), rows = describe_operand(tile + WEIGHT_BYTES);
  begin_products();
#pragma unroll
  for (int piece = 0; piece < DEPTH / 32; ++piece)
    multiply<N>(d, weight + 2 * piece, rows + 2 * piece, adds || piece > 0);
  commit_products();
}

#if TABLES
// Scale the sums of a stage, whose products have ended, and add them in float32.
template <int N>
__device__ __forceinline__ void scale_stage(
    float (&sums)[SUMS], float (&part)[N / 2], const Memory &s, const Stage &stage
) {
  const float *table = stage.table(s), scale = table[MOST_ROWS + threadIdx.x / 128 - 1];
  fence_sums(part);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 rows = *(const float2 *)(table + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[4 * j + 2 * half] += part[4 * j + 2 * half] * (rows.x * scale);
      sums[4 * j + 2 * half + 1] += part[4 * j + 2 * half + 1] * (rows.y * scale);
    }
  }
  __syncwarp();  // all lanes have read their scales
  release(stage.empty(s));
}

// Begin the products of the next stage.
template <int N>
__device__ __forceinline__ Stage begin_next(float (&part)[N / 2], const Call &call, const Memory &s, Stage stage) {
  stage.advance(call.stages);
  wait_for(stage.full(s), stage.phase);
  multiply_stage<N>(part, s, stage, false);
  return stage;
}

// The sums of so many stages. Where registers hold two parts a stage is scaled while products of the next one run: of
// two and more there are at least two in the ring.
template <int N>
__device__ __forceinline__ void add_up(float (&sums)[SUMS], const Call &call, const Memory &s, Stage &stage, int steps) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[i] = 0.f;
  if constexpr (N <= MOST_PAIRED) {
    float even[N / 2], odd[N / 2];
    wait_for(stage.full(s), stage.phase);
    multiply_stage<N>(even, s, stage, false);
#pragma unroll 1
    for (; steps > 2; steps -= 2) {
      const Stage second = begin_next<N>(odd, call, s, stage);
      wait_products<1>();
      scale_stage<N>(sums, even, s, stage);
      stage = begin_next<N>(even, call, s, second);
      wait_products<1>();
      scale_stage<N>(sums, odd, s, second);
    }
    if (steps > 1) {
      const Stage second = begin_next<N>(odd, call, s, stage);
      wait_products<1>();
      scale_stage<N>(sums, even, s, stage);
      wait_products<0>();
      scale_stage<N>(sums, odd, s, second);
      stage = second;
    } else {
      wait_products<0>();
      scale_stage<N>(sums, even, s, stage);
    }
    stage.advance(call.stages);
  } else {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      float part[N / 2];
      wait_for(stage.full(s), stage.phase);
      multiply_stage<N>(part, s, stage, false);
      wait_products<0>();
      scale_stage<N>(sums, part, s, stage);
      stage.advance(call.stages);
    }
  }
}
#else
// The sums of so many stages.
template <int N>
__device__ __forceinline__ void add_up(float (&sums)[SUMS], const Call &call, const Memory &s, Stage &stage, int steps) {
  uint32 before = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_for(stage.full(s), stage.phase);
    multiply_stage<N>(sums, s, stage, step > 0);
    wait_products<1>();
    if (step > 0) release(before);  // products of the stage before have ended
    before = stage.empty(s);
    stage.advance(call.stages);
  }
  wait_products<0>();
  release(before);
}
#endif

// The same of a tile with at most N rows, or of one with more.
template <int N>
__device__ __forceinline__ void add_up_rows(
    float (&sums)[SUMS], const Call &call, const Memory &s, Stage &stage, int steps, int rows
) {
  if constexpr (N < MOST_ROWS)
    if (rows > N) return add_up_rows<N + 16>(sums, call, s, stage, steps, rows);
  add_up<N>(sums, call, s, stage, steps);
}

struct Eights { int first, count; };  // of rows of a tile

// `totals` of all splits of a cluster, of the rows that are returned, this block's share. Sums are sent to where the
// ring was, in the order of threads. All threads of the cluster have come to `meet_cluster` by then.
__device__ __forceinline__ Eights exchange(
    float (&totals)[SUMS / 2], const float (&sums)[SUMS], const Call &call, const Place &place, const Memory &s
) {
  const int eights = count_eights(call), each = divide_up(eights, call.splits), mine = threadIdx.x - IDLE;
  float4 *own = (float4 *)s.at + mine;  // of each number of a slot MATH
  int to = 0, nth = 0;
#pragma unroll
  for (int j = 0; j < MOST_ROWS / 8; ++j) {
    if (j < eights) {
      const float4 four = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
      const int slot = place.split * each + nth;
      if (to == place.split)
        own[slot * MATH] = four;
      else
        send(s.ring + (slot * MATH + mine) * 16, s.sums, to, four);
      if (++nth == each) nth = 0, ++to;
    }
  }
  const Eights found = {place.split * each, min(each, eights - place.split * each)};
  wait_for_sums(s.sums);
#pragma unroll
  for (int j = 0; j < MOST_ROWS / 16; ++j) {
    if (j < found.count) {
      float4 total = own[j * MATH];
#pragma unroll 1
      for (int split = 1; split < call.splits; ++split) {
        const float4 more = own[(split * each + j) * MATH];
        total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
      }
      totals[4 * j] = total.x, totals[4 * j + 1] = total.y, totals[4 * j + 2] = total.z, totals[4 * j + 3] = total.w;
    }
  }
  return found;
}

// Of a thread's outputs, 8 apart: their scales, and their bias.
struct Outputs {
  float scales[2], bias[2];
  __device__ __forceinline__ void load(const Call &call, const Work &work) {
    const int mine = threadIdx.x - IDLE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int output = work.output + mine / 32 * 16 + 8 * half + mine % 32 / 4;
      const bool is_there = output < call.outputs;
      scales[half] = !TABLES && is_there ? call.scales[output] : 1.f;
      bias[half] = call.bias && is_there ? widen(call.bias[output]) : 0.f;
    }
  }
};

// Where 8 outputs of a row that leaves are, of a warpgroup's 64, from the first on; eight rows are in different banks.
__device__ __forceinline__ uint32 place_of(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

// Scale and store the sums of `eights.count` times eight rows. A thread has sums[4 * j + 2 * half + i]: row lane / 4 +
// 8 * half of its warp's 16 rows of the weight, and row 8 * j + lane % 4 * 2 + i of x. They leave by shared memory, so
// that a row is written 64 outputs at a time.
template <int COUNT>
__device__ __forceinline__ void finish(
    const Call &call, const float (&sums)[COUNT], const Memory &s, const Work &work, const Outputs &own, Eights eights
) {
  const int group = threadIdx.x / 128 - 1, mine = threadIdx.x % 128, warp = mine / 32, lane = mine % 32;
  const int matrix = lane / 8, last = min(work.first + call.tile_rows, call.rows);
  const int column = work.output + group * 64 + mine % 8 * 8;
  unsigned char *out = s.out + group * OUT_BYTES;
#pragma unroll
  for (int begin = 0; begin < COUNT / 4; begin += LEAVING / 8) {
    if (begin >= eights.count) break;
    const int row = work.first + 8 * (eights.first + begin), end = min(row + 8 * (eights.count - begin), last);
    sync_group(group);  // what was there has left
#pragma unroll
    for (int nth = 0; nth < LEAVING / 8; nth += 2) {
      float scales[4] = {1.f, 1.f, 1.f, 1.f};  // of two rows, and of those 8 further
#pragma unroll
      for (int i = 0; i < (TABLES ? 0 : 4); ++i)  // beyond the last row whatever the memory holds
        scales[i] = s.x_scales[row + 8 * (nth + i / 2) + lane % 4 * 2 + i % 2];
      uint32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // both eights of outputs of a row are neighbours
        const float *pair = sums + 4 * (begin + nth + i / 2) + i % 2 * 2, *scale = scales + i / 2 * 2;
        words[i] = narrow(pair[0] * (own.scales[i % 2] * scale[0]) + own.bias[i % 2],
                          pair[1] * (own.scales[i % 2] * scale[1]) + own.bias[i % 2]);
      }
      put(shared_address(out + place_of((nth + matrix / 2) * 8 + lane % 8, warp * 2 + matrix % 2)), words);
    }
    sync_group(group);
#pragma unroll
    for (int at = 0; at < LEAVING; at += 16) {
      const int m = at + mine / 8;
      if (row + m < end && column < call.outputs)
        *(uint4 *)(call.out + (int64)(row + m) * call.outputs + column) = *(const uint4 *)(out + place_of(m, mine % 8));
    }
  }
}

// The warps that multiply.
__device__ __forceinline__ void multiply_work(const Call &call, const Place &place, const Memory &s) {
  Work work;
  Stage stage;
  Outputs own;
  bool is_there = find_work(call, place, place.cluster, work);
  if (is_there) own.load(call, work);
  wait_for_previous();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (!TABLES) {
    for (int i = threadIdx.x - IDLE; i < call.rows; i += MATH) s.x_scales[i] = call.x_scales[i];
    sync_math();
  }
  // the same for the whole warp, which ptxas does not know
  const int rows = __reduce_max_sync(~0u, min(call.tile_rows, call.rows));
  float sums[SUMS];
  for (int index = place.cluster; is_there; ) {
    add_up_rows<16>(sums, call, s, stage, work.end - work.begin, rows);
    fence_sums(sums);
    if (call.splits == 1) {
      finish(call, sums, s, work, own, {0, count_eights(call)});
    } else {
      float totals[SUMS / 2];
      meet_cluster();  // all have read their rings
      const Eights eights = exchange(totals, sums, call, place, s);
      finish(call, totals, s, work, own, eights);
    }
    index += place.clusters;
    is_there = find_work(call, place, index, work);
    if (is_there) own.load(call, work);
  }
}

extern "C" __global__ void __launch_bounds__(MATH + IDLE, 1) fp8_split(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
    const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  const Place place(call);
  const Memory s(storage, call);
  if (threadIdx.x == 0) {
    for (int nth = 0; nth < call.stages; ++nth) {
      init_barrier(s.bars + 16 * nth, 1 + TABLES);
      init_barrier(s.bars + 16 * nth + 8, 4 * GROUPS);  // warps that multiply
    }
    expect_sums(s.sums, count_sum_bytes(call, place.split));
    publish_barriers();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  meet_cluster();  // before anything is copied to another's memory, its barriers are there
  if (threadIdx.x < IDLE) {
#if GROUPS == 2
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    if (threadIdx.x == 0) fetch_work(call, place, &x_map, &weight_map, s);
#if TABLES
    if (threadIdx.x >= 32) fetch_scales(call, place, s, threadIdx.x / 32 - 1);
#endif
    __syncwarp();
    if (call.splits > 1) meet_cluster();
  } else {
#if GROUPS == 2
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
    multiply_work(call, place, s);
  }
}
