// Chosen experts' products of one to eight tokens with MXFP4 weights, in two launches: gate and up with the
// activation, then down with the sum over a token's experts. Bound by reading each chosen expert once.
//
// A block takes tiles of 8 outputs, each of two sides of 8 rows of the weight: gate and up of an expert, or for DOWN the
// same outputs of two experts after one another. Its warps share all steps (tiles, experts, STEP units of inputs) evenly:
// a warp adds up its run of steps by itself, keeps a sum for each tile that it touches, and only at the end do warps meet.
// Each warp has a ring in shared memory of its own, of DEPTH steps, whose codes come by TMA, so that nothing in between
// waits for other warps, and asking for weights takes no time of the units that read x.
//
// Codes become float16 in registers and are the left operand of mma.m16n8k16; columns of the right one are rows of x.
// A thread's 16 bytes of e2m1 codes are of two groups with a scale each, and lanes of an mma hold two groups' inputs at
// once: columns 4 to 7 repeat columns 0 to 3, and each sees the inputs of one of the groups, zeros for the other. With
// DOWN columns of different experts lie side by side in the same way, and half of the sums are not used.
//
// x is staged as float16 times a power of two of each row, so that its largest number is near 2**15: of bfloat16's
// numbers only those below 2**-29 of the largest lose bits.
//
// Layouts are those of `DeviceCodes`: of e2m1 a byte has input b in its low half and input b + 64 in its high half.
//
// Compiled by NVRTC (Hopper). Macros: DOWN 0 or 1; COLUMNS eights of columns; WARPS; DEPTH; STEP; BIAS 1: with biases.
// Without them fewer registers are needed, and the next kernel finds room beside this one.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int UNIT = 128;  // inputs of 64 bytes
constexpr int THREADS = 32 * WARPS, N = COLUMNS;
constexpr int MOST_PAIRS = 64, MOST_TOKENS = 8;
constexpr int TOKENS = DOWN ? 2 : 4;         // of eight columns, which repeat them
constexpr int TABLES = DOWN ? 1 : 2;         // scales that a thread needs: of one side or of both
constexpr int SIDE = STEP * 512;             // bytes of a step's codes of a side: of each unit eight rows of 64
constexpr int STAGE = 2 * SIDE, TABLE = STEP * 32;  // of both, and of a side's scales, of each row STEP words
constexpr int RING = WARPS * DEPTH * STAGE, SCALES = WARPS * DEPTH * 2 * TABLE;
constexpr int SLOT = N * (DOWN ? 64 : 128);  // floats of a tile's sums
constexpr uint32 X_EXPONENT = 14;  // largest numbers of rows of x are scaled to this power of two

struct Call {
  const uint16 *x, *bias;
  uint16 *out;
  const char *scales;
  const int64 *ids;      // [T, top_k] of experts, -1 for none
  const float *factors;  // [T, top_k]
  int64 x_stride;
  int tokens, top_k, inputs, outputs, rows_each;
  int table;           // words of scales of a row
  int x_pitch, slots;  // bytes of a row of x in shared memory; sums of a warp
  int gate;            // 1 silu, 2 gelu_tanh, 3 clamped
  float limit, alpha, up_offset;
};

struct Shared {
  int count;                           // of distinct experts
  int experts[MOST_PAIRS];
  int pairs[MOST_PAIRS][MOST_TOKENS];  // of expert and token; -1 for none
  float factors[MOST_PAIRS];           // of pairs
  uint32 largest[MOST_PAIRS + 1];      // of rows of x; of a row of zeros none
};

__device__ __forceinline__ uint32 to_halves(float low, float high) {
  uint32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ void copy4(uint32 to, const char *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }

__device__ __forceinline__ void multiply(float *sum, const uint32 *a, uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four codes as e4m3, 2**-6 times an e2m1; `plane` 1: the high halves of bytes.
__device__ __forceinline__ uint32 to_e4m3(uint32 word, int plane) {
  if (plane) return (word & 0x80808080u) | ((word >> 2) & 0x1C1C1C1Cu);
  return ((word << 4) & 0x80808080u) | ((word << 2) & 0x1C1C1C1Cu);
}
__device__ __forceinline__ void unpack(uint32 codes, uint32 &low, uint32 &high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
      : "=r"(low), "=r"(high) : "r"(codes));
}

#include "chosen_experts.cuh"

// Rows of x are read in pieces of 256 inputs, which warps take in turns, with BATCH of them on their way.
constexpr int BATCH = 4;

struct Pieces {
  int rows, each, total, eights;  // pieces of a row and of all; eights of inputs of a row
};

__device__ __forceinline__ void read_pieces(uint4 *v, const Call &call, const Pieces &pieces, int first) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    const int piece = first + i * WARPS, row = piece / pieces.each;
    const int at = (piece - row * pieces.each) * 32 + threadIdx.x % 32;
    v[i] = uint4{0, 0, 0, 0};
    if (piece < pieces.total && at < pieces.eights) v[i] = *(const uint4 *)(call.x + row * call.x_stride + at * 8);
  }
}

// The largest numbers of rows of x, as bits of bfloat16; `v` has the first batch.
__device__ __forceinline__ void find_largest(uint4 *v, Shared &s, const Call &call, const Pieces &pieces) {
  for (int first = threadIdx.x / 32; first < pieces.total; first += WARPS * BATCH) {
    if (first >= WARPS) read_pieces(v, call, pieces, first);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      uint32 most = __vmaxu2(__vmaxu2(v[i].x & 0x7FFF7FFFu, v[i].y & 0x7FFF7FFFu),
                             __vmaxu2(v[i].z & 0x7FFF7FFFu, v[i].w & 0x7FFF7FFFu));
      most = __reduce_max_sync(~0u, max(most >> 16, most & 0xFFFF));
      if (threadIdx.x % 32 == 0 && most) atomicMax(&s.largest[(first + i * WARPS) / pieces.each], most);
    }
  }
}

__device__ __forceinline__ uint32 exponent_of(uint32 largest) {
  return min(max(largest >> 7, X_EXPONENT + 1u), 254u);
}
// What undoes the power of two of a row.
__device__ __forceinline__ float unlift(uint32 largest) {
  return __uint_as_float((exponent_of(largest) - X_EXPONENT) << 23);
}

// Rows of x to shared memory as float16, zeros beyond the inputs, and a row of zeros; `v` has the last batch.
__device__ __forceinline__ void stage_rows(
    char *x, uint4 *v, const Shared &s, const Call &call, const Pieces &pieces, int width) {
  for (int first = threadIdx.x / 32; first < pieces.total; first += WARPS * BATCH) {
    if (pieces.total > WARPS * BATCH) read_pieces(v, call, pieces, first);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int piece = first + i * WARPS, row = piece / pieces.each;
      const int at = (piece - row * pieces.each) * 32 + threadIdx.x % 32;
      if (piece >= pieces.total || at >= width / 8) continue;
      const float lift = __uint_as_float((254u + X_EXPONENT - exponent_of(s.largest[row])) << 23);
      uint32 *words = (uint32 *)&v[i];
#pragma unroll
      for (int j = 0; j < 4; j++)
        words[j] = to_halves(widen(words[j] & 0xFFFF) * lift, __uint_as_float(words[j] & 0xFFFF0000u) * lift);
      *(uint4 *)(x + row * call.x_pitch + at * 16) = v[i];
    }
  }
}

struct Work {  // of a block: tiles from `first` on, of which each has `each` steps, `steps` of each couple of experts
  int first, end, tiles, each, units, steps, experts, total;
};

__device__ __forceinline__ Work share_work(const Call &call, const Shared &s) {
  Work work;
  const int units = (call.inputs + UNIT - 1) / UNIT;
  work.units = units, work.steps = (units + STEP - 1) / STEP;
  if (DOWN) {  // outputs
    work.first = int(int64(call.outputs) * blockIdx.x / gridDim.x);
    work.end = int(int64(call.outputs) * (blockIdx.x + 1) / gridDim.x);
    work.tiles = (work.end - work.first + 7) / 8;
    work.experts = (s.count + 1) / 2;
  } else {  // eights of outputs of all experts
    const int all = s.count * (call.outputs / 8);
    work.first = int(int64(all) * blockIdx.x / gridDim.x);
    work.end = int(int64(all) * (blockIdx.x + 1) / gridDim.x);
    work.tiles = work.end - work.first;
    work.experts = 1;
  }
  work.each = work.experts * work.steps;
  work.total = work.tiles * work.each;
  return work;
}
__device__ __forceinline__ int begin_of(const Work &work, int warp) { return work.total * warp / WARPS; }

struct Place {  // of a warp: tile, couple of experts, step of inputs
  int tile, couple, step;
  __device__ __forceinline__ Place(const Work &work, int nth) {
    tile = work.each ? nth / work.each : 0;
    couple = work.each ? (nth - tile * work.each) / work.steps : 0;
    step = nth - tile * work.each - couple * work.steps;
  }
};

struct Reader {  // what a warp asks for next
  Place at;
  int64 rows[2];  // the first ones of the sides
  bool is_there;  // the second side
};

__device__ __forceinline__ void locate(Reader &reader, const Call &call, const Shared &s, const Work &work) {
  reader.is_there = true;
  if (DOWN) {
    const int output = work.first + reader.at.tile * 8;
    reader.is_there = 2 * reader.at.couple + 1 < s.count;
#pragma unroll
    for (int i = 0; i < 2; i++)
      reader.rows[i] = int64(s.experts[2 * reader.at.couple + (reader.is_there ? i : 0)]) * call.rows_each + output;
  } else {
    const int tile = work.first + reader.at.tile, tiles = call.outputs / 8, nth = tile / tiles;
    reader.rows[0] = int64(s.experts[nth]) * call.rows_each + (tile - nth * tiles) * 8;
    reader.rows[1] = reader.rows[0] + call.outputs;
  }
}

struct Ring {  // of a warp, in shared memory: codes [DEPTH, 2, SIDE], scales [DEPTH, 2, TABLE], barriers
  const char *codes, *scales;
  uint32 codes_address, scales_address, full;
};

// Ask for a step, if `is_left`, to a place of the ring that no lane reads any more, and move on.
__device__ __forceinline__ void fetch(
    Reader &reader, const TensorMap *map, const Call &call, const Shared &s, const Work &work, const Ring &ring, int slot,
    bool is_left) {
  if (is_left) {
    const int lane = threadIdx.x % 32, unit = reader.at.step * STEP;
    if (lane == 0) {
      const uint32 to = ring.codes_address + slot * STAGE, bar = ring.full + 8 * slot;
      expect_bytes(bar, reader.is_there ? 2 * SIDE : SIDE);
      load_pieces(to, map, bar, int(reader.rows[0]), unit);
      if (reader.is_there) load_pieces(to + SIDE, map, bar, int(reader.rows[1]), unit);
    }
    const int row = lane / STEP, word = unit + lane % STEP;
    if (row < 8 && word < work.units) {
      // rows beyond a block's last output may be beyond the weight's last as well
      const int inside = DOWN ? min(row, work.end - 1 - work.first - reader.at.tile * 8) : row;
#pragma unroll
      for (int i = 0; i < 2; i++)
        copy4(ring.scales_address + (slot * 2 + i) * TABLE + lane * 4,
              call.scales + ((reader.rows[i] + inside) * call.table + word) * 4);
    }
    if (++reader.at.step == work.steps) {
      reader.at.step = 0;
      if (++reader.at.couple == work.experts) reader.at.couple = 0, reader.at.tile++;
      if (reader.at.tile < work.tiles) locate(reader, call, s, work);
    }
  }
  commit_copies();
}

// The scale of a unit's plane, with the 2**6 of e4m3.
__device__ __forceinline__ float scale_of(uint32 word, int plane) {
  const uint32 moved = (word - 0x78787878u) >> (threadIdx.x % 4 / 2 * 8);
  return __uint_as_float((plane ? moved << 7 : moved << 23) & 0x7F800000u);
}

// `sum` plus a step's products, of so many `units`. Of sums, sides are i / 2, columns i % 2; for DOWN only i < 2, of the
// thread's own side.
__device__ __forceinline__ void add_step(
    float (*sum)[4], const char *codes, const char *scales, const char *const *x, int units) {
  const int lane = threadIdx.x % 32, quad = lane / 4, part = lane % 4, own_side = part % 2;
  const char *own_codes = codes + quad * 64 + (part ^ quad / 2) * 16;  // swizzled by 64 bytes
#pragma unroll
  for (int u = 0; u < STEP; u++) {
    if (u >= units) break;
    uint32 words[2][4], tables[TABLES];
#pragma unroll
    for (int i = 0; i < 2; i++) *(uint4 *)words[i] = *(const uint4 *)(own_codes + i * SIDE + u * 512);
#pragma unroll
    for (int i = 0; i < TABLES; i++)
      tables[i] = *(const uint32 *)(scales + (DOWN ? own_side : i) * TABLE + (quad * STEP + u) * 4);
#pragma unroll
    for (int plane = 0; plane < 2; plane++) {
      float own[N][4] = {};
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint4 b[N];
#pragma unroll
        for (int n = 0; n < N; n++)
          b[n] = *(const uint4 *)(x[n] + u * (UNIT * 2) + plane * 128 + part * 32 + h * 16);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          uint32 a[4];
          unpack(to_e4m3(words[0][2 * h + j], plane), a[0], a[2]);
          unpack(to_e4m3(words[1][2 * h + j], plane), a[1], a[3]);
#pragma unroll
          for (int n = 0; n < N; n++) multiply(own[n], a, j ? b[n].z : b[n].x, j ? b[n].w : b[n].y);
        }
      }
      float factors[TABLES];
#pragma unroll
      for (int i = 0; i < TABLES; i++) factors[i] = scale_of(tables[i], plane);
#pragma unroll
      for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < (DOWN ? 2 : 4); i++)
          sum[n][i] += factors[DOWN ? 0 : i / 2] * (DOWN && own_side ? own[n][2 + i % 2] : own[n][i]);
      }
    }
  }
}

// Rows of x in shared memory that this thread's quad multiplies, and for DOWN factors of its sums.
__device__ __forceinline__ void choose_rows(
    const char **rows, float (*factors)[2], const Call &call, const Shared &s, const char *x, int couple) {
  const int lane = threadIdx.x % 32, quad = lane / 4, part = lane % 4;
  const int num_rows = DOWN ? call.tokens * call.top_k : call.tokens;
  const int half = quad / 4, side = DOWN ? quad / 2 % 2 : 0, own_side = part % 2;
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int token = n * TOKENS + quad % TOKENS, expert = 2 * couple + side;
    int row = token < call.tokens && half == part / 2 ? token : -1;
    if (DOWN && row >= 0) row = expert < s.count ? s.pairs[expert][token] : -1;
    rows[n] = x + (row < 0 ? num_rows : row) * call.x_pitch;
    if (!DOWN) continue;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int column = n * TOKENS + (part * 2 + j) % TOKENS, chosen = 2 * couple + own_side;
      const int pair = column < call.tokens && chosen < s.count ? s.pairs[chosen][column] : -1;
      factors[n][j] = pair < 0 ? 0.f : s.factors[pair] * unlift(s.largest[pair]);
    }
  }
}

__device__ __forceinline__ void keep_sums(float *slot, float (*total)[4]) {
  const int lane = threadIdx.x % 32, quad = lane / 4, part = lane % 4;
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int i = 0; i < (DOWN ? 2 : 4); i++) {
      slot[((DOWN ? n : n * 2 + i / 2) * 8 + part * 2 + i % 2) * 8 + quad] = total[n][i];
      total[n][i] = 0.f;
    }
  }
}

// A tile's sum of one output and token over warps, groups of scales and experts, in a fixed order.
__device__ __forceinline__ float add_sums(
    const float *parts, const Call &call, const Work &work, int tile, int token, int side, int row) {
  float value = 0.f;
  const int begin = tile * work.each, end = begin + work.each, n = token / TOKENS;
  for (int warp = ((begin + 1) * WARPS - 1) / max(work.total, 1); warp < WARPS && begin_of(work, warp) < end; warp++) {
    if (begin_of(work, warp) == begin_of(work, warp + 1)) continue;  // fewer steps than warps: it kept no sum
    const int nth = tile - begin_of(work, warp) / work.each;
    const int column = (DOWN ? n : n * 2 + side) * 8 + token % TOKENS;
    const float *slot = parts + (warp * call.slots + nth) * SLOT + column * 8 + row;
#pragma unroll
    for (int again = 0; again < 8 / TOKENS; again++) value += slot[again * TOKENS * 8];
  }
  return value;
}

constexpr int KEPT = DOWN ? 4 : 2;  // biases that a thread has on their way: of experts, or of gate and up
struct Result {  // what a thread stores
  int row, token, tile, expert, output;  // expert among the distinct ones, unless DOWN
  bool is_there;
  __device__ __forceinline__ Result(const Call &call, const Work &work, int at) {
    row = at % 8, token = at / 8 % call.tokens, tile = at / 8 / call.tokens, expert = 0;
    output = work.first + tile * 8 + row;
    is_there = tile < work.tiles && (!DOWN || output < work.end);
    if (DOWN) return;
    const int tiles = call.outputs / 8;
    expert = (work.first + tile) / tiles, output = (work.first + tile - expert * tiles) * 8 + row;
  }
};

// Ask for biases of a result. Volatile, to be asked for where it is called: they come from memory.
__device__ __forceinline__ void read_biases(uint16 (&bias)[KEPT], const Call &call, const Shared &s, const Result &at) {
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    bias[i] = 0;
    if (!at.is_there || (DOWN && i >= s.count)) continue;
    const int64 place = int64(s.experts[DOWN ? i : at.expert]) * call.rows_each + at.output + (DOWN ? 0 : i * call.outputs);
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bias[i]) : "l"(call.bias + place));
  }
}

// `first` has biases of the thread's first result.
__device__ __forceinline__ void finish(
    const float *parts, const uint16 (&first)[KEPT], const Call &call, const Shared &s, const Work &work) {
  uint16 bias[KEPT];
#pragma unroll
  for (int i = 0; i < KEPT; i++) bias[i] = first[i];
  for (int nth = threadIdx.x; nth < work.tiles * call.tokens * 8; nth += THREADS) {
    const Result at(call, work, nth);
    if (BIAS && nth >= THREADS) read_biases(bias, call, s, at);
    if (!at.is_there) continue;
    if (DOWN) {
      float value = work.each ? add_sums(parts, call, work, at.tile, at.token, 0, at.row) : 0.f;
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        const int pair = BIAS && i < s.count ? s.pairs[i][at.token] : -1;
        if (pair >= 0) value += s.factors[pair] * widen(bias[i]);
      }
      if (BIAS)
        for (int j = KEPT; j < s.count; j++)
          if (s.pairs[j][at.token] >= 0)
            value += s.factors[s.pairs[j][at.token]] *
                     widen(call.bias[int64(s.experts[j]) * call.rows_each + at.output]);
      call.out[int64(at.token) * call.outputs + at.output] = narrow(value);
    } else {
      const int pair = s.pairs[at.expert][at.token];
      if (pair < 0) continue;
      const float unit = unlift(s.largest[at.token]);
      const float gate = add_sums(parts, call, work, at.tile, at.token, 0, at.row) * unit + widen(bias[0]);
      const float up = add_sums(parts, call, work, at.tile, at.token, 1, at.row) * unit + widen(bias[1]);
      call.out[int64(pair) * call.outputs + at.output] = narrow(gated_by(call, call.gate, gate, up));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    coded_experts(const __grid_constant__ TensorMap map, const __grid_constant__ Call call) {
  extern __shared__ char unaligned[];
  char *memory = unaligned + (-shared_address(unaligned) & 1023);
  const int warp = threadIdx.x / 32, rows = DOWN ? call.tokens * call.top_k : call.tokens;
  Ring ring;
  ring.codes = memory + warp * DEPTH * STAGE, ring.codes_address = shared_address(ring.codes);
  ring.scales = memory + RING + warp * DEPTH * 2 * TABLE, ring.scales_address = shared_address(ring.scales);
  ring.full = shared_address(memory + RING + SCALES) + warp * DEPTH * 8;
  Shared &s = *(Shared *)(memory + RING + SCALES + (WARPS * DEPTH * 8 + 15) / 16 * 16);
  char *x = (char *)&s + (sizeof(Shared) + 127) / 128 * 128;
  float *parts = (float *)(x + (rows + 1) * call.x_pitch);
  const int width = (call.inputs + UNIT - 1) / UNIT * UNIT, each = (width + 255) / 256;
  const Pieces pieces = {rows, each, rows * each, call.inputs / 8};
  uint4 v[BATCH];
  if (threadIdx.x % 32 == 0) {
    for (int slot = 0; slot < DEPTH; slot++) init_barrier(ring.full + 8 * slot, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
  }
  for (int at = threadIdx.x; at <= MOST_PAIRS; at += THREADS) s.largest[at] = 0;
  for (int at = threadIdx.x; at < MOST_PAIRS * MOST_TOKENS; at += THREADS)
    s.pairs[at / MOST_TOKENS][at % MOST_TOKENS] = -1;
  for (int at = threadIdx.x; at < width / 8; at += THREADS)
    *(uint4 *)(x + rows * call.x_pitch + at * 16) = uint4{0, 0, 0, 0};
  __syncthreads();
  // Ids were written before the first kernel started: the second one may read them at once, and the weights that they
  // choose. All else waits.
  if (!DOWN) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    read_pieces(v, call, pieces, warp);
  }
  find_experts(call, s);
  const Work work = share_work(call, s);
  int nth = begin_of(work, warp), next = nth;
  const int end = begin_of(work, warp + 1);
  Reader reader = {Place(work, nth)};
  if (nth < end) locate(reader, call, s, work);
#pragma unroll 1  // fewer instructions to read before the first copy
  for (int slot = 0; slot < DEPTH; slot++, next++) fetch(reader, &map, call, s, work, ring, slot, next < end);
  uint16 bias[KEPT] = {};  // no kernel writes it
  if (BIAS) read_biases(bias, call, s, Result(call, work, threadIdx.x));
  if (DOWN) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    read_pieces(v, call, pieces, warp);
  }
  find_largest(v, s, call, pieces);
  __syncthreads();
  stage_rows(x, v, s, call, pieces, width);
  __syncthreads();

  Place at(work, nth);
  const int first_tile = at.tile;
  const char *own[N];
  float factors[N][2], sum[N][4] = {}, total[N][4] = {};
  choose_rows(own, factors, call, s, x, at.couple);
  uint32 parity = 0;
  for (int slot = 0; nth < end; nth++, next++) {
    const char *there[N];
#pragma unroll
    for (int n = 0; n < N; n++) there[n] = own[n] + at.step * (STEP * UNIT * 2);
    wait_for_copies();
    wait_for(ring.full + 8 * slot, parity);
    __syncwarp();  // a lane reads scales that others have copied
    add_step(sum, ring.codes + slot * STAGE, ring.scales + slot * 2 * TABLE, there, work.units - at.step * STEP);
    __syncwarp();  // all lanes have read what is now overwritten
    fetch(reader, &map, call, s, work, ring, slot, next < end);
    if (++slot == DEPTH) slot = 0, parity ^= 1;
    const bool ends = ++at.step == work.steps;
    if (!ends && nth + 1 < end) continue;
    if (DOWN) {
#pragma unroll
      for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) total[n][i] += factors[n][i] * sum[n][i], sum[n][i] = 0.f;
      }
    }
    const int tile = at.tile;
    at.step = 0;
    if (ends && ++at.couple == work.experts) at.couple = 0, at.tile++;
    if (at.tile != tile || nth + 1 == end)
      keep_sums(parts + (warp * call.slots + tile - first_tile) * SLOT, DOWN ? total : sum);
    if (DOWN && nth + 1 < end) choose_rows(own, factors, call, s, x, at.couple);
  }
  __syncthreads();
  finish(parts, bias, call, s, work);
}
