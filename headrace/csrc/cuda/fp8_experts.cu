// Products of FP8 rows and FP8 experts on Hopper for tens of rows each, where reading weights bounds a step: rows x
// [M, K], sorted by expert, times that expert's weight [N, K], each with a scale per 128 inputs (the weight's also of 128
// outputs). With a gate, the activation of its two halves. Sums are float32 in a fixed order.
//
// A block is persistent and takes tiles of 64 * GROUPS of the weight's rows by ROWS rows of x. Its first warp asks the
// copy engine (TMA) for tiles of 128 inputs into a ring of STAGES, also of the next tiles while one is finished; the
// other GROUPS warpgroups multiply 64 rows of the weight each (wgmma, both operands from shared memory).
//
// Macros: ROWS (16, 32, 64), GROUPS (2 or 4), STAGES, GATE (0, or a kind of activation: a tile then has half as many
// outputs, its rows alternate 8 of gate, 8 of up), EXPERTS (their number). Compiled by NVRTC, without any header.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE;
constexpr u32 X_BYTES = ROWS * DEPTH, CODE_BYTES = WIDE * DEPTH, STAGE_BYTES = X_BYTES + CODE_BYTES;
constexpr int THREADS = 128 * (GROUPS + 1);

struct alignas(64) TensorMap { unsigned char bytes[128]; };

struct Call {
  const float *x_scales;  // [K / 128, M]
  const float *scales;    // [rows of the weight / 128, K / 128]
  const u16 *bias;    // [rows of the weight] bfloat16, or null
  const int *ends;    // [EXPERTS]
  u16 *out;           // [M, N] bfloat16
  int rows, outputs, inputs;  // M, N (after the activation), K
  float limit, alpha, up_offset;
};

__device__ __forceinline__ u32 shared_address(const void *place) {
  u32 address;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(place));
  return address;
}

__device__ __forceinline__ void init_barrier(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 bar, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(bar), "r"(phase) : "memory");
}

__device__ __forceinline__ void release(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void fetch(const TensorMap *map, u32 bar, u32 to, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row) : "memory");
}

// Codes from byte `column` on of the tile that begins at `row`; of a gated one at that row of gate, with those of up.
__device__ __forceinline__ void fetch_codes(const TensorMap *map, u32 bar, u32 to, int column, int row) {
#if GATE
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5}], [%2];"
      ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(0), "r"(row / 8) : "memory");
#else
  fetch(map, bar, to, column, row);
#endif
}

// A matrix descriptor of wgmma: rows of 128 bytes in shared memory, swizzled by 128 bytes, 8 rows every 1,024 bytes.
__device__ __forceinline__ u64 describe(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8(d, i) F4(d, i), F4(d, i + 4)
#define F16(d, i) F8(d, i), F8(d, i + 8)
#define F32(d, i) F16(d, i), F16(d, i + 16)
#define S8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define S16 S8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define S32 S16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"

// sums [64, ROWS] += the weight's [64, 32] times rows of x [ROWS, 32]; `adds` 0: = instead
#define MULTIPLY(N, SUMS, NAMES, A, B, P) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" N "k32.f32.e4m3.e4m3 {" NAMES "}, " A ", " B ", p, 1, 1;\n}" \
      : SUMS(d, 0) : "l"(weight), "l"(rows), "r"(adds))

__device__ __forceinline__ void multiply(float (&d)[ROWS / 2], u64 weight, u64 rows, int adds) {
#if ROWS == 16
  MULTIPLY("16", F8, S8, "%8", "%9", "%10");
#elif ROWS == 32
  MULTIPLY("32", F16, S16, "%16", "%17", "%18");
#else
  MULTIPLY("64", F32, S32, "%32", "%33", "%34");
#endif
}

template <int N>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

struct Tile {
  int expert, first, last, output;  // rows from `first`, of which those before `last` are there; first output
};

// Tile number `index`; false beyond the last. All lanes of a warp take part.
__device__ __forceinline__ bool find_tile(const Call &call, int index, Tile &tile) {
  int across = (call.outputs + OUTPUTS - 1) / OUTPUTS;
  int wanted = index / across, lane = threadIdx.x % 32, before = 0;
  tile.output = index % across * OUTPUTS;
  for (int base = 0; base < EXPERTS; base += 32) {
    int expert = base + lane;
    int end = expert < EXPERTS ? call.ends[expert] : 0;
    int start = expert < EXPERTS && expert > 0 ? call.ends[expert - 1] : 0;
    int tiles = expert < EXPERTS ? (end - start + ROWS - 1) / ROWS : 0, sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    u32 beyond = __ballot_sync(~0u, before + sum > wanted);
    if (beyond) {
      int mine = __ffs(beyond) - 1;
      tile.expert = base + mine;
      tile.last = __shfl_sync(~0u, end, mine);
      int skipped = wanted - before - __shfl_sync(~0u, sum - tiles, mine);
      tile.first = __shfl_sync(~0u, start, mine) + skipped * ROWS;
      return true;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  return false;
}

__device__ __forceinline__ float apply_gate(const Call &call, float gate, float up) {
#if GATE == 3
  gate = fminf(gate, call.limit);
  up = fminf(fmaxf(up, -call.limit), call.limit) + call.up_offset;
  return __fdividef(gate, 1.0f + __expf(-call.alpha * gate)) * up;
#elif GATE == 2
  float u = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate * (1.0f - __fdividef(1.0f, __expf(2.0f * u) + 1.0f)) * up;
#else
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
#endif
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Transposes an 8 x 8 matrix of 16-bit numbers: a lane has two of row lane / 4, before and after.
__device__ __forceinline__ u32 turn(u32 pair) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// Transposes the 4 x 4 words of 4 neighbouring lanes: word i of lane l becomes word l of lane i.
__device__ __forceinline__ void transpose(u32 (&v)[4]) {
  bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    u32 other = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
    v[i] = odd ? other : v[i];
    v[i + 1] = odd ? v[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 other = __shfl_xor_sync(~0u, high ? v[i] : v[i + 2], 2);
    v[i] = high ? other : v[i];
    v[i + 2] = high ? v[i + 2] : other;
  }
}

// Store the sums of a warp's 16 rows of the weight: numbers[j] are, of 8 outputs from `column` on, those of output
// lane / 4 and rows 8 * j + lane % 4 * 2 (low half) and one more (high half) of the tile.
__device__ __forceinline__ void store(const Call &call, const u32 (&numbers)[ROWS / 8], const Tile &tile, int column) {
  int lane = threadIdx.x % 32;
  constexpr int AT_ONCE = ROWS < 32 ? ROWS / 8 : 4;
#pragma unroll
  for (int j = 0; j < ROWS / 8; j += AT_ONCE) {
    u32 words[4] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) words[i] = turn(numbers[j + i]);
    transpose(words);  // the lane now has 8 outputs of row 8 * (j + lane % 4) + lane / 4
    int m = tile.first + 8 * (j + lane % 4) + lane / 4;
    if (lane % 4 < AT_ONCE && m < tile.last && column < call.outputs)
      *(uint4 *)(call.out + (u64)m * call.outputs + column) = uint4{words[0], words[1], words[2], words[3]};
  }
}

// Bias, activation, and storing. A thread has sums[4 * j + 2 * half + i]: row lane / 4 + 8 * half of its warp's 16 rows
// of the weight, and row 8 * j + lane % 4 * 2 + i of x.
__device__ __forceinline__ void finish(
    const Call &call, float (&sums)[ROWS / 2], const Tile &tile, const int (&own)[2], int warp
) {
  float bias[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    bias[half] = call.bias && own[half] >= 0 ? __uint_as_float((u32)call.bias[own[half]] << 16) : 0.0f;
  u32 numbers[ROWS / 8];
#if GATE
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j) {
    float out[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      out[i] = apply_gate(call, sums[4 * j + i] + bias[0], sums[4 * j + 2 + i] + bias[1]);
    numbers[j] = pack(out[0], out[1]);
  }
  store(call, numbers, tile, tile.output + warp * 8);
#else
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
      numbers[j] = pack(sums[4 * j + 2 * half] + bias[half], sums[4 * j + 2 * half + 1] + bias[half]);
    store(call, numbers, tile, tile.output + warp * 16 + half * 8);
  }
#endif
}

__device__ __forceinline__ void add_up(
    const Call &call, float (&sums)[ROWS / 2], const Tile &tile, u32 row, u32 x_tiles, u32 code_tiles, u32 bars,
    int &stage, u32 &phase
) {
  int steps = call.inputs / DEPTH, lane = threadIdx.x % 32, base = tile.expert * (GATE ? 2 : 1) * call.outputs;
  // a warp's 16 rows: 8 of gate and 8 of up, or 16 of the same 128 outputs
  const float *tables[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int output = tile.output + (GATE ? 0 : min((int)row / 128 * 128, call.outputs - 1 - tile.output));
    tables[half] = call.scales + (u64)((base + (GATE ? half * call.outputs : 0) + output) / 128) * steps;
  }
  const float *x_scales = call.x_scales + tile.first + lane % 4 * 2;
  int left = tile.last - tile.first - lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0.0f;
  float part[ROWS / 2];
  for (int step = 0; step < steps; ++step) {
    float scales[2] = {tables[0][step], tables[1][step]}, own[ROWS / 4];
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) own[2 * j + i] = 8 * j + i < left ? x_scales[(u64)step * call.rows + 8 * j + i] : 0.0f;
    wait_barrier(bars + 16 * stage, phase);
    u64 weight = describe(code_tiles + stage * CODE_BYTES + row / 64 * 64 * DEPTH);
    u64 rows = describe(x_tiles + stage * X_BYTES);
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(part[i])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) multiply(part, weight + 2 * piece, rows + 2 * piece, piece > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    wait_products<0>();
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(part[i])::"memory");
    if (lane == 0) release(bars + 16 * stage + 8);
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[4 * j + i] += part[4 * j + i] * (scales[i / 2] * own[2 * j + i % 2]);
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_experts(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap code_map,
    const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  // tiles swizzled by 128 bytes begin at multiples of 1,024
  u32 x_tiles = (shared_address(storage) + 1023) & ~1023u, code_tiles = x_tiles + STAGES * X_BYTES;
  u32 bars = code_tiles + STAGES * CODE_BYTES;  // of each stage: full, then empty
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(bars + 16 * stage, 1);
      init_barrier(bars + 16 * stage + 8, 4 * GROUPS);  // warps that multiply
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  int index = blockIdx.x, stage = 0;
  u32 phase = 0;
  Tile tile;
  if (threadIdx.x < 128) {
    if (threadIdx.x < 32) {
      int steps = (call.inputs + DEPTH - 1) / DEPTH;
      for (; find_tile(call, index, tile); index += gridDim.x) {
        int row = tile.expert * (GATE ? 2 : 1) * call.outputs + tile.output;
        for (int step = 0; step < steps; ++step) {
          if (threadIdx.x == 0) {
            u32 full = bars + 16 * stage, to = x_tiles + stage * X_BYTES;
            wait_barrier(full + 8, phase ^ 1);
            expect_bytes(full, STAGE_BYTES);
            fetch_codes(&code_map, full, code_tiles + stage * CODE_BYTES, step * DEPTH, row);
            fetch(&x_map, full, to, step * DEPTH, tile.first);
          }
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        __syncwarp();
      }
    }
  } else {
    int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
    float sums[ROWS / 2];
    for (; find_tile(call, index, tile); index += gridDim.x) {
      int own[2];  // the weight's rows of this thread, -1 beyond the expert's
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int output = tile.output + (GATE ? warp * 8 + lane / 4 : row + 8 * half);
        int matrix = tile.expert * (GATE ? 2 : 1) + (GATE ? half : 0);
        own[half] = output < call.outputs ? matrix * call.outputs + output : -1;
      }
      add_up(call, sums, tile, row, x_tiles, code_tiles, bars, stage, phase);
      finish(call, sums, tile, own, warp);
    }
  }
}
