// Hyper-connections of four streams for some tens of tokens: from one sublayer's output to the next one's input in one
// kernel, whose blocks all run at once.
//
// A group has TOKENS tokens and SPLITS blocks, each of which has 16 * WARPS columns of all their streams: a warp has 16
// columns, a thread 8 of one token. What is behind the wait is a chain of latencies: all of it that memory has is asked
// for at once, and threads have little of it to compute, as a warp that is nearly alone on its scheduler takes two to
// three cycles an instruction.
//
// Weights are float32 as the sum of two bfloat16, an error of 2 ** -17, for fragments of `mma` (see streams.cu). As no
// kernel writes them, they are asked for before the wait, by asynchronous copies to shared memory. No thread waits for
// these until it has asked for its columns: behind a kernel that takes whole multiprocessors blocks begin only when that
// ends. One warp more of a block brings the weights by token of what is pending meanwhile.
//
// A thread reads its columns, writes back what is pending (with -DWRITES=1), and multiplies; two lanes swap halves of
// two tokens for that. Streams stay in its registers, and are stored once sums have been sent. Besides the products of
// a token a block needs those of its streams with each other: from these follow both what the streams are normalised by
// and, once their weights are known, the norm of their weighted sum, so that blocks exchange sums once. The warp more
// of a block balances the S x S matrices of some tokens.
//
// Clusters would have as many columns in 16 blocks, but not all GPUs run eight such clusters at once. Blocks exchange
// sums through the L2 instead: each word is there when it is not zero, so that nobody waits for a fence. There are two
// places for them, in turn: a call clears what the call before has used, which nobody reads any more, as that has ended
// and the next has not begun. Calls that may run at once have different slots.
//
// What the next product takes may also be rounded to FP8, where a block has the 128 columns of a scale.
//
// With -DWORLD of 2 to 8 what is pending is one rank's part of a sum, which is added up first, as in streams_few.cu.
//
// Everything but the products is float32. Compiled by NVRTC. -DSLOTS: calls at once; -DGROUPS: of a call, at most;
// -DTYPE=1 for mailboxes.

#include "mailbox.cuh"
#include "stream_weights.cuh"

constexpr int TOKENS = 16, WORKERS = 32 * WARPS, THREADS = WORKERS + 32, COLUMNS = 16 * WARPS;
constexpr int TILES = WEIGHTS / 8;  // of 8 weights, as `mma` takes them
constexpr int PAIRS = S * (S + 1) / 2;
// Sums of a token: first what all blocks of its group read, the products of `pre` and of pairs of streams, each with
// itself first, and two words of no meaning; then the other products. The latter are sent with those of streams with
// themselves behind them.
constexpr int NEAR = 16, FAR = WEIGHTS, ROW = NEAR + FAR - S, VECTORS = (NEAR + FAR) / 4;
constexpr int CODE_COLUMNS = 128;  // that have a scale in FP8
constexpr float LEAST_SCALE = 7.8886e-31f;  // 2 ** -100
constexpr int EACH = 2;                   // tokens whose sums a warp adds up
constexpr int ROUNDS = (SPLITS + 7) / 8;  // of eight blocks' sums of a token
static_assert(TOKENS * VECTORS <= WORKERS, "a thread sends one vector");
static_assert(TOKENS <= EACH * WARPS, "warps add up all tokens");

struct __align__(16) Exchange {  // of a group, zero at first
  float near[2][TOKENS][SPLITS][NEAR];
  float far[2][TOKENS][SPLITS][FAR];
  uint32 turns[SPLITS];  // calls so far, by block
};
__device__ Exchange exchanges[SLOTS][GROUPS];

struct Shared {
  union {
    float4 weights[TILES][S][32];  // four columns of a lane's weight of each tile
    uint2 fine[TILES][S][32][2];   // in their place, the first of two: what they have beyond registers
    float parts[TOKENS][ROW];
  } own[WARPS];
  float4 pending[TOKENS][1 + S];  // post, then rows of mix: shares of one stream as it was
  float sums[TOKENS][NEAR];
  float pre[TOKENS][S];
  float factors[TOKENS];
};

__device__ __forceinline__ float low(uint32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high(uint32 word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ uint32 &word_of(uint4 &v, int w) { return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w; }
__device__ __forceinline__ float part_of(const float4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ uint4 load(const void *from) {  // volatile: on its way before what is behind it
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void copy(void *to, const void *from) {  // 16 bytes, asynchronously
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               ::"r"(static_cast<uint32>(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ uint32 nonzero(float x) { return x == 0.f ? 0x80000000u : __float_as_uint(x); }

__device__ __forceinline__ void store(float *to, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 look(const float *from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint32 look_word(const float *from) {
  uint32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// An address that is kept in registers: ptxas would compute it again for each load under a condition.
__device__ __forceinline__ const float *keep(const float *at) {
  asm volatile("" : "+l"(at));
  return at;
}

// Blocks that do not all run at once, as where others take multiprocessors for ever, would wait for each other without
// end: after many looks, which take some ten minutes, the launch fails. Ranks have given up before.
struct Looks {
  uint32 number = 0;
  __device__ __forceinline__ void count() {
    if (++number == 1u << 30) __trap();
  }
};

__device__ __forceinline__ void sync_workers() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// c [16, 8] += a [16, 16] * b [16, 8]
__device__ __forceinline__ void multiply(
    float (&c)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Ask for weights of a thread: row lane / 4 of each tile, four columns of each stream.
__device__ __forceinline__ void ask_weights(const Call &call, Shared &shared, int column) {
  const int lane = threadIdx.x % 32;
  const float *from = call.fn + int64(lane / 4) * S * call.width + column + lane % 4 * 4;
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int k = 0; k < S; k++)
      copy(&shared.own[threadIdx.x / 32].weights[t][k][lane], from + (int64(t * 8) * S + k) * call.width);
}

// Those that a thread has asked for itself: one part in registers, the other where they were.
__device__ __forceinline__ void read_weights(Shared &shared, uint2 (&weights)[TILES][S]) {
  wait_for_copies();
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int k = 0; k < S; k++) {
      const float4 own = shared.own[threadIdx.x / 32].weights[t][k][threadIdx.x % 32];
      const uint2 coarse = {narrow(own.x, own.y), narrow(own.z, own.w)};
      weights[t][k] = coarse;
      shared.own[threadIdx.x / 32].fine[t][k][threadIdx.x % 32][0] = {
          narrow(own.x - low(coarse.x), own.y - high(coarse.x)), narrow(own.z - low(coarse.y), own.w - high(coarse.y))};
    }
  }
}

// A thread's columns of its token as they are in memory: what is pending, of all ranks, and streams.
struct Columns {
  uint4 out, more, streams[S];
};

// Ask for a thread's columns, all at once, and for its weights to become fragments meanwhile.
__device__ __forceinline__ void read_columns(
    const Call &call, Shared &shared, Columns &own, uint2 (&weights)[TILES][S], int64 token, int column,
    uint32 number) {
  const bool is_there = token < call.tokens;
  own.out = own.more = {0, 0, 0, 0};
#pragma unroll
  for (int k = 0; k < S; k++) own.streams[k] = {0, 0, 0, 0};
#if WORLD > 1
  const uint64 vectors = call.tokens * (call.width / 8), vector = token * (call.width / 8) + column / 8;
  Patience patience(call.ranks);
#endif
  if (is_there) {
#if WRITES
    own.out = load(call.out + token * call.out_stride + column);
    if (call.more) own.more = load(call.more + token * call.more_stride + column);
#endif
#pragma unroll
    for (int k = 0; k < S; k++)
      own.streams[k] = load(call.streams + token * call.token_stride + k * call.stream_stride + column);
#if WORLD > 1
    if (call.more) own.out = add_two(own.out, own.more);
    sum_vector<true, false>(call.ranks, number, vectors, vector, own.out, patience);
#endif
  }
  read_weights(shared, weights);
#if WORLD > 1
  if (is_there) own.out = sum_vector<false, true>(call.ranks, number, vectors, vector, own.out, patience);
#elif WRITES
  if (call.more) own.out = add_two(own.out, own.more);
#endif
}

// What is pending, written to a thread's columns of streams in their dtype. `t`: its token of the group.
__device__ __forceinline__ void write_back(const Shared &shared, Columns &own, int t) {
  float4 mix[S];
  const float4 post = shared.pending[t][0];
#pragma unroll
  for (int j = 0; j < S; j++) mix[j] = shared.pending[t][1 + j];
#pragma unroll
  for (int w = 0; w < 4; w++) {
    uint32 before[S];
    const uint32 out = word_of(own.out, w);
#pragma unroll
    for (int j = 0; j < S; j++) before[j] = word_of(own.streams[j], w);
#pragma unroll
    for (int k = 0; k < S; k++) {
      float a = part_of(post, k) * low(out), b = part_of(post, k) * high(out);
#pragma unroll
      for (int j = 0; j < S; j++) a += part_of(mix[j], k) * low(before[j]), b += part_of(mix[j], k) * high(before[j]);
      word_of(own.streams[k], w) = narrow(a, b);  // rounded first: the next sublayer sees what is written
    }
  }
}

// Sums of a warp's columns, to its `parts`.
__device__ __forceinline__ void multiply(const uint2 (&weights)[TILES][S], Shared &shared, Columns &own, int t) {
  const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  const bool is_odd = lane & 1, is_upper = lane & 2;
  float coarse[TILES][4] = {}, fine[TILES][4] = {};
#pragma unroll
  for (int k = 0; k < S; k++) {
    // Even lanes have `row`, odd ones 8 further, of the same columns: the former take the first four of both.
    const uint4 x = own.streams[k];
    const uint2 keep = is_odd ? uint2{x.z, x.w} : uint2{x.x, x.y}, give = is_odd ? uint2{x.x, x.y} : uint2{x.z, x.w};
    const uint2 got = {__shfl_xor_sync(~0u, give.x, 1), __shfl_xor_sync(~0u, give.y, 1)};
    const uint2 a = is_odd ? got : keep, b = is_odd ? keep : got;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const uint2 more = shared.own[threadIdx.x / 32].fine[tile][k][lane][0];
      multiply(coarse[tile], a.x, b.x, a.y, b.y, weights[tile][k].x, weights[tile][k].y);
      multiply(fine[tile], a.x, b.x, a.y, b.y, more.x, more.y);
    }
  }
  float pairs[PAIRS] = {};
#pragma unroll
  for (int w = 0; w < 4; w++) {
#pragma unroll
    for (int j = 0, at = S; j < S; j++) {
      const float a = low(word_of(own.streams[j], w)), b = high(word_of(own.streams[j], w));
      pairs[j] += a * a, pairs[j] += b * b;
#pragma unroll
      for (int k = j + 1; k < S; k++, at++)
        pairs[at] += a * low(word_of(own.streams[k], w)), pairs[at] += b * high(word_of(own.streams[k], w));
    }
  }
  float(&parts)[TOKENS][ROW] = shared.own[threadIdx.x / 32].parts;
  __syncwarp();  // all lanes have read what was there
#pragma unroll
  for (int p = 0; p < PAIRS / 2; p++) {  // each of the two lanes of a token gets the sums of half the pairs
    const float give = is_upper ? pairs[p] : pairs[p + PAIRS / 2], keep = is_upper ? pairs[p + PAIRS / 2] : pairs[p];
    parts[t][S + is_upper * (PAIRS / 2) + p] = keep + __shfl_xor_sync(~0u, give, 2);
  }
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const int weight = tile * 8 + quarter * 2, at = weight < S ? weight : weight - S + NEAR;
#pragma unroll
    for (int i = 0; i < 2; i++)
      *(float2 *)&parts[row + 8 * i][at] = {coarse[tile][2 * i] + fine[tile][2 * i],
                                            coarse[tile][2 * i + 1] + fine[tile][2 * i + 1]};
  }
}

// A vector of a block's sums to all blocks of its group; the place of the call before is cleared.
__device__ __forceinline__ void send_sums(const Shared &shared, Exchange &exchange, int split, int turn) {
  if (threadIdx.x >= TOKENS * VECTORS) return;
  const int t = threadIdx.x / VECTORS, v = threadIdx.x % VECTORS;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) {
    const float4 part = ((const float4 *)shared.own[warp].parts[t])[v < ROW / 4 ? v : 1];
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  if (v == NEAR / 4 - 1) sum.z = sum.w = 1.f;  // of no meaning, and nobody's sums
  float *to[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    to[i] = v < NEAR / 4 ? exchange.near[i][t][split] + 4 * v : exchange.far[i][t][split] + 4 * v - NEAR;
  store(turn ? to[1] : to[0], {nonzero(sum.x), nonzero(sum.y), nonzero(sum.z), nonzero(sum.w)});
  store(turn ? to[0] : to[1], {0, 0, 0, 0});
}

// Weights `pre` and the norm's factor of EACH tokens, by each warp: to shared memory. Lane k of any four has the scale
// and the base of `pre` of stream k; `share`: 1 / width.
__device__ __forceinline__ void weigh_near(
    const Call &call, Shared &shared, const Exchange &exchange, int turn, float scale, float base, float share) {
  const int lane = threadIdx.x % 32, begin = threadIdx.x / 32 * EACH;
  if (begin >= TOKENS) return;
  const float *from = keep(exchange.near[turn][begin][lane / 4] + lane % 4 * 4);
  uint4 parts[EACH][ROUNDS] = {};
  bool waits = true;
  Looks looks;
  while (waits) {  // for those that are not there: those who wait would keep the L2 from those who are late
    looks.count();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
#pragma unroll
      for (int r = 0; r < ROUNDS; r++) {
        if (r * 8 + lane / 4 < SPLITS && !has_arrived(parts[e][r]))
          parts[e][r] = look(from + (e * SPLITS + r * 8) * NEAR);
      }
    }
    waits = false;
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
      for (int r = 0; r < ROUNDS; r++) waits |= r * 8 + lane / 4 < SPLITS && !has_arrived(parts[e][r]);
  }
  __syncwarp();
  // Sums over lanes with the same words: each lane is left with one word of one token.
  float sum[EACH][4], words[4];
#pragma unroll
  for (int w = 0; w < 4; w++) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      sum[e][w] = 0.f;
#pragma unroll
      for (int r = 0; r < ROUNDS; r++) sum[e][w] += __uint_as_float(word_of(parts[e][r], w));
    }
    words[w] = (lane & 16 ? sum[1][w] : sum[0][w]) + __shfl_xor_sync(~0u, lane & 16 ? sum[0][w] : sum[1][w], 16);
  }
#pragma unroll
  for (int w = 0; w < 2; w++)
    words[w] = (lane & 8 ? words[w + 2] : words[w]) + __shfl_xor_sync(~0u, lane & 8 ? words[w] : words[w + 2], 8);
  words[0] = (lane & 4 ? words[1] : words[0]) + __shfl_xor_sync(~0u, lane & 4 ? words[0] : words[1], 4);
  shared.sums[begin + lane / 16][lane % 4 * 4 + lane / 4 % 4] = words[0];
  __syncwarp();
  const int t = begin + lane / 4 % EACH;
  const float4 *totals = (const float4 *)shared.sums[t];
  const float4 squares = totals[1], more[2] = {totals[2], totals[3]};
  const float pairs[PAIRS] = {squares.x, squares.y, squares.z, squares.w, more[0].x,
                              more[0].y, more[0].z, more[0].w, more[1].x, more[1].y};
  // the streams are normalised as one vector, after the products
  const float square = (squares.x + squares.y) + (squares.z + squares.w);
  const float factor = rsqrtf(square * share * (1.f / S) + call.norm_eps);
  const float own = sigmoid(shared.sums[t][lane % 4] * factor * scale + base) + call.eps;
  float pre[S], norm = 0.f;
#pragma unroll
  for (int k = 0; k < S; k++) pre[k] = __shfl_sync(~0u, own, k, 4);
#pragma unroll
  for (int j = 0, at = S; j < S; j++) {
    float rest = pre[j] * pairs[j];
#pragma unroll
    for (int k = j + 1; k < S; k++, at++) rest += 2.f * pre[k] * pairs[at];
    norm += pre[j] * rest;
  }
  if (lane >= 4 * EACH) return;
  shared.pre[t][lane % 4] = own;
  // streams that cancel leave a sum near 0, of either sign
  if (lane % 4 == 0) shared.factors[t] = rsqrtf(fmaxf(norm, 0.f) * share + call.norm_eps);
}

// post and the balanced matrix of one token of the group, by one warp: lane w has weight w, if it is one of these.
__device__ __forceinline__ void weigh_far(
    const Call &call, const Exchange &exchange, int turn, int t, int64 token, float scale, float base, float share) {
  const int lane = threadIdx.x % 32;
  const bool is_there = lane >= S && lane < S + FAR;  // the last S of streams with themselves
  const float *from = keep(exchange.far[turn][t][0] + (is_there ? lane - S : 0));
  uint32 parts[SPLITS] = {};
  bool waits = is_there;
  Looks looks;
  while (waits) {
    looks.count();
#pragma unroll
    for (int split = 0; split < SPLITS; split++)
      if (!parts[split]) parts[split] = look_word(from + split * FAR);
    waits = false;
#pragma unroll
    for (int split = 0; split < SPLITS; split++) waits |= !parts[split];
  }
  __syncwarp();
  float sums[4] = {}, squares = 0.f;
#pragma unroll
  for (int split = 0; split < SPLITS; split++) sums[split % 4] += __uint_as_float(parts[split]);
  float own = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
  for (int k = 0; k < S; k++) squares += __shfl_sync(~0u, own, WEIGHTS + k);
  own *= rsqrtf(squares * share * (1.f / S) + call.norm_eps);
  balance(call, own * scale + base, token, lane);
}

// Weights of what is pending of the group's tokens, by one warp.
__device__ __forceinline__ void read_pending(const Call &call, Shared &shared, int64 first) {
  constexpr int VECTORS = TOKENS * (1 + S), ROUNDS = (VECTORS + 31) / 32;
  const int lane = threadIdx.x % 32;
  uint4 found[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int at = i * 32 + lane, j = at % (1 + S);
    const int64 token = first + at / (1 + S);
    found[i] = {0, 0, 0, 0};
    if (at < VECTORS && token < call.tokens)
      found[i] = load(j ? call.mix + (token * S + j - 1) * S : call.post + token * S);
  }
#pragma unroll
  for (int i = 0; i < ROUNDS; i++)
    if (i * 32 + lane < VECTORS) ((uint4 *)shared.pending)[i * 32 + lane] = found[i];
}

__device__ __forceinline__ uint16 round_two(float low, float high) {
  uint16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// Eight columns of a token once more, in FP8 with the scale of a block's 128 columns. Where warps' parts were is free.
__device__ __forceinline__ void store_codes(
    const Call &call, Shared &shared, uint4 y, int t, int64 token, int column, int split) {
  const int warp = threadIdx.x / 32;
  const bool is_upper = threadIdx.x & 2;  // of the two lanes of a token
  float largest = 0.f;
#pragma unroll
  for (int w = 0; w < 4; w++) largest = fmaxf(largest, fmaxf(fabsf(low(word_of(y, w))), fabsf(high(word_of(y, w)))));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  if (!is_upper) shared.own[warp].parts[t][0] = largest;
  sync_workers();
#pragma unroll
  for (int other = 0; other < WARPS; other++) largest = fmaxf(largest, shared.own[other].parts[t][0]);
  float scale = largest * (1.f / 448.f);
  if (!(scale > LEAST_SCALE)) scale = 1.f;
  const float inverse = reciprocal(scale);
  uint32 codes[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32 a = word_of(y, 2 * i), b = word_of(y, 2 * i + 1);
    codes[i] = round_two(low(a) * inverse, high(a) * inverse);
    codes[i] |= uint32(round_two(low(b) * inverse, high(b) * inverse)) << 16;
  }
  if (token >= call.tokens) return;
  *(uint2 *)(call.codes + token * call.width + column) = {codes[0], codes[1]};
  if (warp == 0 && !is_upper) call.code_scales[int64(split) * call.tokens + token] = scale;
}

__device__ __forceinline__ void sync_block() { asm volatile("bar.sync 0;" ::: "memory"); }

// What kernels write is read behind it.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// The warp more of a block.
__device__ __forceinline__ void run_aside(
    const Call &call, Shared &shared, Exchange &exchange, int split, int64 first, float share) {
  const int lane = threadIdx.x % 32, weight = lane < WEIGHTS ? lane : 0;  // lane w has those of weight w
  const float scale = call.scale[weight < S ? 0 : weight < 2 * S ? 1 : 2], base = call.base[weight];
  wait_for_previous();
  if (WRITES) {
    read_pending(call, shared, first);
    sync_block();
  }
  const uint32 turns = peek_word(&exchange.turns[split]);
  sync_block();
#pragma unroll 1
  for (int t = split; t < TOKENS && first + t < call.tokens; t += SPLITS)
    weigh_far(call, exchange, turns % 2, t, first + t, scale, base, share);
}

__device__ __forceinline__ void run_worker(
    const Call &call, Shared &shared, Exchange &exchange, int split, int64 first, float share) {
  const int lane = threadIdx.x % 32, t = lane / 4 + lane % 2 * 8;  // of the thread's token in the group
  const int begin = split * COLUMNS + threadIdx.x / 32 * 16, column = begin + lane % 4 / 2 * 8;
  const int64 token = first + t;
  ask_weights(call, shared, begin);
  uint4 norm = load(call.norm + column);
  const float scale = call.scale[0], base = call.base[lane % S];
  wait_for_previous();
  uint32 number = 0;
#if WORLD > 1
  uint32 *calls = ((Control *)call.ranks.mailboxes[call.ranks.rank])->sums;
  number = peek_word(&calls[blockIdx.x]);
#endif
  Columns own;
  uint2 weights[TILES][S];
  read_columns(call, shared, own, weights, token, column, number);
  const uint32 turns = peek_word(&exchange.turns[split]);
#if WRITES
  sync_block();
  write_back(shared, own, t);
#endif
  multiply(weights, shared, own, t);
  sync_block();
  send_sums(shared, exchange, split, turns % 2);
#if WORLD > 1
  count_call(calls, number);
#endif
  if (threadIdx.x == 0) put_word(&exchange.turns[split], turns + 1);
#if WRITES
#pragma unroll
  for (int k = 0; k < S; k++)
    if (token < call.tokens) *(uint4 *)(call.fresh + (token * S + k) * call.width + column) = own.streams[k];
#endif
  weigh_near(call, shared, exchange, turns % 2, scale, base, share);
  sync_workers();
  const float4 pre = *(const float4 *)shared.pre[t];
  const float factor = shared.factors[t];
  uint4 y;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int k = 0; k < S; k++)
      a += part_of(pre, k) * low(word_of(own.streams[k], w)), b += part_of(pre, k) * high(word_of(own.streams[k], w));
    const uint32 sum = narrow(a, b), weight = word_of(norm, w);
    word_of(y, w) = narrow(low(sum) * factor * low(weight), high(sum) * factor * high(weight));
  }
  if (token < call.tokens) *(uint4 *)(call.x + token * call.width + column) = y;
  if (COLUMNS == CODE_COLUMNS && call.codes) store_codes(call, shared, y, t, token, column, split);
}

extern "C" __global__ void __launch_bounds__(THREADS, WARPS > 8 || WORLD > 2 ? 1 : 2) pass_groups(
    const __grid_constant__ Call call, int slot) {
  extern __shared__ __align__(16) char memory[];
  Shared &shared = *(Shared *)memory;
  const int split = blockIdx.x % SPLITS, group = blockIdx.x / SPLITS;
  const float share = reciprocal(call.width);
  if (threadIdx.x < WORKERS)
    run_worker(call, shared, exchanges[slot][group], split, int64(group) * TOKENS, share);
  else
    run_aside(call, shared, exchanges[slot][group], split, int64(group) * TOKENS, share);
}
