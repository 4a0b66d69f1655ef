// Products of few rows of x with a weight in e4m3: out [M, O] = x [M, K] times the weight [O, K] transposed, also with
// the norm before it or the gated activation after it (Hopper). Bound by reading the weight once.
//
// The weight is the left operand of wgmma (m64nNk32) and x, rounded to e4m3 with a scale for each 128 inputs of a row,
// the right one; both come from shared memory, so no code is ever decoded. wgmma multiplies 8 or 16 rows of x; missing
// ones are whatever lies behind, as if it were rows; their sums are not stored. One thread copies tiles of 64 outputs by
// UNIT blocks of 128 inputs into a ring by TMA; it begins before the previous kernel has ended, as no kernel writes
// weights. Meanwhile GROUPS warpgroups round x; then they share the blocks of a tile and multiply sums of a block by its
// scales in float32. SPLITS programs, a cluster, share the inputs of a tile, the first of them adds up in a fixed order:
// the same input gives the same output.
//
// Gated, a tile has 32 outputs: of each 16 rows 8 are of gate and 8 of up, so that a thread holds both of an output.
//
// A tile may have 48 or 32 outputs, where more of 64 would come unevenly to multiprocessors. wgmma still multiplies 64 rows:
// the others are what lies behind in shared memory, at least sums of warpgroups, and are not stored.
//
// Compiled by NVRTC for bfloat16 x. Macros: COLUMNS, rows of x rounded up to 8 or 16; UNIT; STAGES of the ring; GROUPS;
// SPLITS; HEIGHT of a tile; GATE 0 none, 1 silu, 2 gelu_tanh, 3 clamped; NORM; TABLES 1: the weight has a scale for each 128 inputs.

#include "numbers.cuh"
#include "hopper.cuh"
#include "cluster_sums.cuh"

constexpr int BLOCK = 128, TILE = HEIGHT, BLOCK_BYTES = TILE * BLOCK, STAGE_BYTES = UNIT * BLOCK_BYTES;
constexpr int TILE_OUTPUTS = GATE ? TILE / 2 : TILE;
constexpr int MATH = GROUPS * 128, WARPS = MATH / 32, THREADS = MATH + 32;
constexpr int EACH = UNIT / GROUPS;      // blocks of a stage that a warpgroup multiplies
constexpr int SUMS = COLUMNS / 2;        // that a thread holds: rows lane / 4 and 8 more of its warp's 16, of columns
                                         // 8 j + 2 (lane % 4) and the next
constexpr float LARGEST = 448.f, LEAST = 1e-30f;
static_assert(TILE % 16 == 0 && TILE <= 64 && 64 * BLOCK - BLOCK_BYTES <= 2 * (GROUPS - 1) * SUMS * 512, "");
static_assert(UNIT % GROUPS == 0 && GROUPS > 1 && (COLUMNS == 8 || COLUMNS == 16), "");

struct Call {
  const uint16 *x, *residual, *norm, *bias;
  uint16 *out, *total;
  const float *scales;
  int64 x_stride, residual_stride, group_stride;
  int group;                                 // outputs of a group, whose x is group_stride on; 0: all have one x
  int rows, outputs, inputs, table, shared;  // outputs: of the result; table: scales of a row; shared: rows of a scale
  int chunks;                                // stages of a tile that a program multiplies
  float eps, offset, limit, alpha, up_offset;
};

__device__ __forceinline__ void sync_math() { asm volatile("bar.sync 1, %0;" ::"n"(MATH) : "memory"); }

// copies of tiles: UNIT blocks from `block` on of the weight's rows of a tile

__device__ __forceinline__ void load_tile(uint32 to, const TensorMap *map, uint32 bar, int tile, int block) {
  if (GATE)
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %3, "
                 "%4, %5}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(tile * (TILE / 16)), "r"(block) : "memory");
  else
    load_pieces(to, map, bar, tile * TILE, block);
}

// x: pieces of 16 inputs, of each piece all `rows`; eight of them are 128 bytes, not swizzled.
__device__ __forceinline__ uint64 describe_x(uint32 address, int rows) {
  return uint64((address & 0x3FFFF) >> 4) | (uint64(rows) << 16) | (uint64(COLUMNS == 8 ? rows : 128 >> 4) << 32);
}

// d [64, COLUMNS] = a [64, 32] b [COLUMNS, 32]^T, plus d if `keeps`
__device__ __forceinline__ void multiply(float (&d)[SUMS], uint64 a, uint64 b, int keeps) {
#if COLUMNS == 8
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {" S4 "}, %4, %5, p, 1, 1; }"
               : F4(d, 0) : "l"(a), "l"(b), "r"(keeps));
#else
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {" S8 "}, %8, %9, p, 1, 1; }"
               : F8(d, 0) : "l"(a), "l"(b), "r"(keeps));
#endif
}

struct Memory {  // shared; addresses, and pointers to floats
  uint32 ring, x, full, empty, there;  // there: a barrier that waits for the bytes of `others`
  float *x_scales, *parts, *others;    // [blocks, COLUMNS], [2, GROUPS - 1, SUMS, 128], [SPLITS - 1, SUMS / 4, 128, 4]
  float *factors, *squares;          // of rows, for the norm; of all blocks of rows
};

// Eight numbers, of 16 lanes a block of a row, to e4m3 with the block's scale, which is returned.
__device__ __forceinline__ float round_block(const float *v, uint32 *codes) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(v[i]));
#pragma unroll
  for (int step = 8; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  const float scale = largest > LEAST ? largest / LARGEST : 1.f, inverse = 1.f / scale;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high}; }"
        : "=r"(codes[i]) : "f"(v[4 * i] * inverse), "f"(v[4 * i + 1] * inverse), "f"(v[4 * i + 2] * inverse),
          "f"(v[4 * i + 3] * inverse));
  }
  return scale;
}

// Eight codes of row m and inputs from `at` on, counted from the program's first, to the operand, and a block's scale.
__device__ __forceinline__ void store_codes(
    const Memory &s, int rows, int m, int at, const uint32 *codes, float scale) {
  const uint32 to = s.x + (at / 16 * rows + m) * 16 + at % 16;
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(codes[0]), "r"(codes[1]) : "memory");
  if (at % BLOCK == 0) s.x_scales[at / BLOCK * COLUMNS + m] = scale;
}

// Round the program's inputs, `first` to `first + width`, of all rows.
__device__ __forceinline__ void stage_rows(const Call &call, const Memory &s, const uint16 *x, int first, int width) {
  constexpr int BATCH = 4;
  const int length = call.rows * width;  // a multiple of 128: 16 lanes have a block
  for (int begin = threadIdx.x * 8; begin - int(threadIdx.x % 32) * 8 < length; begin += BATCH * MATH * 8) {
    uint4 loaded[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int place = begin + i * MATH * 8, m = place / width;
      loaded[i] = {0, 0, 0, 0};
      if (place < length) loaded[i] = *(const uint4 *)(x + m * call.x_stride + first + place - m * width);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int place = begin + i * MATH * 8, m = place / width;
      if (place - int(threadIdx.x % 32) * 8 >= length) break;
      const uint32 pairs[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
      float v[8];
      uint32 codes[2];
#pragma unroll
      for (int j = 0; j < 4; j++) v[2 * j] = widen(pairs[j]), v[2 * j + 1] = widen_high(pairs[j]);
      const float scale = round_block(v, codes);
      if (place < length) store_codes(s, call.rows, m, place - m * width, codes, scale);
    }
  }
}

// The same of x plus the residual, times the norm's weight, with sums of squares of all blocks. The first program stores
// the sums.
__device__ __forceinline__ void stage_normalised(const Call &call, const Memory &s, int first, int width) {
  constexpr int BATCH = 4;
  const int lane = threadIdx.x % 32, length = call.rows * call.inputs;
  for (int begin = threadIdx.x * 8; begin - lane * 8 < length; begin += BATCH * MATH * 8) {
    uint4 x[BATCH], residual[BATCH], norm[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int place = begin + i * MATH * 8, m = place / call.inputs, at = place - m * call.inputs;
      x[i] = residual[i] = norm[i] = {0, 0, 0, 0};
      if (place >= length) continue;
      x[i] = *(const uint4 *)(call.x + m * call.x_stride + at);
      residual[i] = *(const uint4 *)(call.residual + m * call.residual_stride + at);
      norm[i] = __ldg((const uint4 *)(call.norm + at));
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int place = begin + i * MATH * 8, m = place / call.inputs, at = place - m * call.inputs;
      if (place - lane * 8 >= length) break;
      const uint32 a[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
      const uint32 r[4] = {residual[i].x, residual[i].y, residual[i].z, residual[i].w};
      const uint32 w[4] = {norm[i].x, norm[i].y, norm[i].z, norm[i].w};
      uint32 sums[4], codes[2];
      float v[8], square = 0.f;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        sums[j] = narrow(widen(a[j]) + widen(r[j]), widen_high(a[j]) + widen_high(r[j]));
        const float low = widen(sums[j]), high = widen_high(sums[j]);
        square += low * low + high * high;
        v[2 * j] = low * (widen(w[j]) + call.offset), v[2 * j + 1] = high * (widen_high(w[j]) + call.offset);
      }
#pragma unroll
      for (int step = 8; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
      const float scale = round_block(v, codes);
      if (place >= length) continue;
      if (lane % 16 == 0) s.squares[place / BLOCK] = square;
      if (at >= first && at < first + width) store_codes(s, call.rows, m, at - first, codes, scale);
      if (blockIdx.x == 0) *(uint4 *)(call.total + place) = {sums[0], sums[1], sums[2], sums[3]};
    }
  }
}

// Factors of rows from the sums of squares.
__device__ __forceinline__ void find_factors(const Call &call, const Memory &s) {
  const int lane = threadIdx.x % 32, blocks = call.inputs / BLOCK;
  for (int m = threadIdx.x / 32; m < call.rows; m += WARPS) {
    float square = 0.f;
    for (int block = lane; block < blocks; block += 32) square += s.squares[m * blocks + block];
#pragma unroll
    for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
    if (lane == 0) s.factors[m] = rsqrtf(square / call.inputs + call.eps);
  }
}

// Store a tile's sums, of warpgroup 0.
__device__ __forceinline__ void finish(const Call &call, const Memory &s, const float (&sum)[SUMS], int tile,
                                       const float (&row_scale)[2], const int (&row)[2]) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x / 32 >= TILE / 16) return;  // rows behind the tile
  float bias[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (call.bias) bias[i] = widen(call.bias[row[i]]);
  const int output = GATE ? row[0] : tile * TILE + (threadIdx.x / 32) * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int m = 8 * j + 2 * (lane % 4) + c;
      if (m >= call.rows) continue;
      const float factor = NORM ? s.factors[m] : 1.f;
      const float low = sum[4 * j + c] * factor * row_scale[0] + bias[0];
      const float high = sum[4 * j + 2 + c] * factor * row_scale[1] + bias[1];
      uint16 *to = call.out + int64(m) * call.outputs + output;
      if (GATE) {
        const int own = tile * TILE_OUTPUTS + (threadIdx.x / 32) * 8 + lane / 4;
        if (own < call.outputs) *to = narrow(gated_by(call, GATE, low, high));
      } else {
        if (output < call.outputs) to[0] = uint16(narrow(low, 0.f));
        if (output + 8 < call.outputs) to[8] = uint16(narrow(high, 0.f));
      }
    }
  }
}

// A thread's rows of the weight in a tile, and where their scales begin.
__device__ __forceinline__ void find_rows(const Call &call, int tile, int (&row)[2], const float *(&table)[2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int first = GATE ? tile * TILE_OUTPUTS + warp * 8 + lane / 4 : tile * TILE + warp * 16 + lane / 4;
  row[0] = min(first, call.outputs - 1), row[1] = GATE ? call.outputs + row[0] : min(first + 8, call.outputs - 1);
#pragma unroll
  for (int i = 0; i < 2; i++) table[i] = call.scales + int64(row[i] / call.shared) * call.table;
}

// Ask for the scales of the program's first tiles into the L2, by one warp.
__device__ __forceinline__ void prefetch_scales(
    const Call &call, int first_tile, int tiles_apart, int own_tiles, int first_block, int own_blocks) {
  constexpr int SECTOR = 8, MOST = 4;  // scales that come together, and tiles
  const int pieces = TABLES ? own_blocks / SECTOR + 1 : 1;
  for (int nth = 0; nth < 2 * min(own_tiles, MOST); nth++) {
    if (!GATE && nth % 2) continue;
    const int first = (first_tile + nth / 2 * tiles_apart) * TILE_OUTPUTS, up = nth % 2 * call.outputs;
    const int begin = (up + first) / call.shared;
    const int rows = (up + min(first + TILE_OUTPUTS, call.outputs) - 1) / call.shared - begin + 1;
    for (int at = threadIdx.x % 32; at < rows * pieces; at += 32) {
      const int row = at / pieces, block = TABLES ? first_block + min(at % pieces * SECTOR, own_blocks - 1) : 0;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(call.scales + int64(begin + row) * call.table + block) : "memory");
    }
  }
}

// The same of the norm's weight and of biases.
__device__ __forceinline__ void prefetch_rows(const Call &call, int first_tile, int tiles_apart, int own_tiles) {
  constexpr int LINE = 64;
  const int lane = threadIdx.x % 32;
  if (NORM)
    for (int at = lane * LINE; at < call.inputs; at += 32 * LINE) prefetch_line(call.norm + at);
  if (!call.bias) return;
  for (int nth = lane; nth < own_tiles; nth += 32) {
    const int output = (first_tile + nth * tiles_apart) * TILE_OUTPUTS;
    prefetch_line(call.bias + output);
    if (GATE) prefetch_line(call.bias + call.outputs + output);
  }
}

// The scales of a thread's rows and of its warpgroup's blocks of a stage. Volatile, to be asked for where it is called.
__device__ __forceinline__ void load_scales(
    const float *const (&table)[2], int first_block, int last, float (&scales)[2][EACH]) {
  const int group = threadIdx.x / 128;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int e = 0; e < EACH; e++)
      asm volatile("ld.global.f32 %0, [%1];"
                   : "=f"(scales[i][e]) : "l"(table[i] + min(first_block + e * GROUPS + group, last)));
}

__device__ __forceinline__ void fill(const TensorMap *map, const Memory &s, int nth, int count, int tiles_apart,
                                     int first_tile, int first_chunk, int slot) {
  const int round = nth / count, tile = first_tile + round * tiles_apart;
  expect_bytes(s.full + 8 * slot, STAGE_BYTES);
  load_tile(s.ring + slot * STAGE_BYTES, map, s.full + 8 * slot, tile, (first_chunk + nth - round * count) * UNIT);
}

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(SPLITS, 1, 1)
#endif
__launch_bounds__(THREADS, 1) fp8_rows(const __grid_constant__ TensorMap map, const Call call) {
  extern __shared__ char unaligned[];
  const int blocks = (call.inputs + BLOCK - 1) / BLOCK, all_chunks = (blocks + UNIT - 1) / UNIT;
  const int split = blockIdx.x % SPLITS, first_chunk = min(split * call.chunks, all_chunks);
  const int count = min(call.chunks, all_chunks - first_chunk);  // stages of a tile
  const int own_blocks = max(min(count * UNIT, blocks - first_chunk * UNIT), 0);
  const int tiles = (call.outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
  const int first_tile = blockIdx.x / SPLITS, tiles_apart = gridDim.x / SPLITS;
  const int own_tiles = (tiles - first_tile + tiles_apart - 1) / tiles_apart, total = own_tiles * count;
  Memory s;
  char *memory = unaligned + (-shared_address(unaligned) & 1023);
  s.ring = shared_address(memory);
  s.x = s.ring + STAGES * STAGE_BYTES;
  memory += STAGES * STAGE_BYTES + call.chunks * UNIT * BLOCK * call.rows;
  s.full = shared_address(memory), s.empty = s.full + 8 * STAGES, s.there = s.empty + 8 * STAGES;
  s.x_scales = (float *)(memory + 16 * STAGES + 16);
  s.parts = s.x_scales + call.chunks * UNIT * COLUMNS;
  s.others = s.parts + 2 * (GROUPS - 1) * SUMS * 128;
  s.factors = s.others + (SPLITS - 1) * SUMS * 128;
  s.squares = s.factors + COLUMNS;

  const int group = threadIdx.x / 128;
  if (threadIdx.x == MATH) {
    for (int slot = 0; slot < STAGES; slot++) {
      init_barrier(s.full + 8 * slot, 1);
      init_barrier(s.empty + 8 * slot, WARPS);
    }
    if (SPLITS > 1) {
      init_barrier(s.there, 1);
      expect_bytes(s.there, (SPLITS - 1) * SUMS * 128 * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
    // weights are asked for before the previous kernel has ended
    for (int nth = 0; nth < min(STAGES, total); nth++)
      fill(&map, s, nth, count, tiles_apart, first_tile, first_chunk, nth);
  }
  __syncthreads();
  if (SPLITS > 1) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  [[maybe_unused]] float total_sum[SUMS] = {};
  int tile = first_tile, row[2] = {0, 0};
  float row_scale[2] = {1.f, 1.f};

  if (group == GROUPS) {
    prefetch_rows(call, first_tile, tiles_apart, own_tiles);
    if (count > 0) prefetch_scales(call, first_tile, tiles_apart, own_tiles, first_chunk * UNIT, own_blocks);
    if (threadIdx.x == MATH) {
      int slot = 0;
      uint32 parity = 0;
      for (int nth = STAGES; nth < total; nth++) {
        wait_for(s.empty + 8 * slot, parity);
        fill(&map, s, nth, count, tiles_apart, first_tile, first_chunk, slot);
        if (++slot == STAGES) slot = 0, parity ^= 1;
      }
    }
    __syncwarp();
  } else {
    // scales come from memory, which takes longer than most of what is behind the wait
    const float *table[2];
    float scales[2][EACH];  // of the next stage's blocks
    find_rows(call, tile, row, table);
    if (TABLES) load_scales(table, first_chunk * UNIT, blocks - 1, scales);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (NORM)
      stage_normalised(call, s, first_chunk * UNIT * BLOCK, own_blocks * BLOCK);
    else
      stage_rows(call, s, call.x + (call.group ? first_tile * TILE_OUTPUTS / call.group * call.group_stride : 0),
                 first_chunk * UNIT * BLOCK, own_blocks * BLOCK);  // a program has one tile where there are groups
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what threads have written
    sync_math();
    if (NORM) find_factors(call, s);  // for `finish`, which comes after the next barrier
    const int lane = threadIdx.x % 32;
    int slot = 0, buffer = 0;
    uint32 parity = 0;
    for (int nth_tile = 0; nth_tile < own_tiles; nth_tile++) {
      tile = first_tile + nth_tile * tiles_apart;
      if (nth_tile) {
        find_rows(call, tile, row, table);
        if (TABLES) load_scales(table, first_chunk * UNIT, blocks - 1, scales);
      }
      if (!TABLES) row_scale[0] = __ldg(table[0]), row_scale[1] = __ldg(table[1]);
      float sum[SUMS];
#pragma unroll
      for (int i = 0; i < SUMS; i++) sum[i] = 0.f;
      for (int chunk = 0; chunk < count; chunk++) {
        float now[2][EACH], part[EACH][SUMS];
        if (TABLES) {
#pragma unroll
          for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < EACH; e++) now[i][e] = scales[i][e];
          load_scales(table, (first_chunk + chunk + 1) * UNIT, blocks - 1, scales);
        }
        wait_for(s.full + 8 * slot, parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const int block = e * GROUPS + group;
          const uint64 a = describe_operand(s.ring + slot * STAGE_BYTES + block * BLOCK_BYTES);
          const uint64 b = describe_x(s.x + (chunk * UNIT + block) * BLOCK * call.rows, call.rows);
#pragma unroll
          for (int k = 0; k < 4; k++) multiply(part[e], a + 2 * k, b + 2 * k * call.rows, k > 0);
        }
        asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
          for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(part[e][i])::"memory");
        if (lane == 0) arrive(s.empty + 8 * slot);
        if (++slot == STAGES) slot = 0, parity ^= 1;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const int block = chunk * UNIT + e * GROUPS + group;
          if (block < own_blocks) {
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++) {
              const float2 x_scale = *(const float2 *)(s.x_scales + block * COLUMNS + 8 * j + 2 * (lane % 4));
#pragma unroll
              for (int i = 0; i < 2; i++) {
                const float own = TABLES ? now[i][e] : 1.f;
                sum[4 * j + 2 * i] += part[e][4 * j + 2 * i] * (x_scale.x * own);
                sum[4 * j + 2 * i + 1] += part[e][4 * j + 2 * i + 1] * (x_scale.y * own);
              }
            }
          }
        }
      }
      if (GROUPS > 1) {
        float *parts = s.parts + buffer * (GROUPS - 1) * SUMS * 128 + threadIdx.x % 128;
        if (group > 0) {
#pragma unroll
          for (int i = 0; i < SUMS; i++) parts[((group - 1) * SUMS + i) * 128] = sum[i];
        }
        sync_math();
        if (group == 0) {
#pragma unroll
          for (int g = 0; g < GROUPS - 1; g++)
#pragma unroll
            for (int i = 0; i < SUMS; i++) sum[i] += parts[(g * SUMS + i) * 128];
        }
        buffer ^= 1;
      }
      if (SPLITS == 1) {
        if (group == 0) finish(call, s, sum, tile, row_scale, row);
      } else {
#pragma unroll
        for (int i = 0; i < SUMS; i++) total_sum[i] = sum[i];
      }
    }
  }
#if SPLITS > 1
  // Sums go to the first program without a barrier of the cluster, which would be a fence of the GPU's memory too.
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all programs have begun
  if (group > 0) return;
  if (split > 0) {
#pragma unroll
    for (int i = 0; i < SUMS / 4; i++) {
      const int place = ((split - 1) * SUMS / 4 + i) * 128 + threadIdx.x;
      const float *part = total_sum + 4 * i;
      send(shared_address(s.others + 4 * place), s.there, 0, float4{part[0], part[1], part[2], part[3]});
    }
    return;
  }
  wait_for_sums(s.there);
#pragma unroll
  for (int other = 0; other < SPLITS - 1; other++)
#pragma unroll
    for (int i = 0; i < SUMS / 4; i++) {
      const float4 part = ((const float4 *)s.others)[(other * SUMS / 4 + i) * 128 + threadIdx.x];
      total_sum[4 * i] += part.x, total_sum[4 * i + 1] += part.y;
      total_sum[4 * i + 2] += part.z, total_sum[4 * i + 3] += part.w;
    }
  finish(call, s, total_sum, tile, row_scale, row);
#endif
}
