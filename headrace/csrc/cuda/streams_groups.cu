// Hyper-connections of four streams for some tens of tokens: from one sublayer's output to the next one's input in one
// kernel, whose blocks all run at once.
//
// A group has TOKENS tokens and SPLITS blocks, each of which has 32 * WARPS columns of all their streams: a warp has 32,
// a thread 8 of two tokens, which are at once what it stores and its fragments of `mma` (see streams.cu). Weights are
// float32 as the sum of two bfloat16, an error of 2 ** -17. As no kernel writes them, they are there before the wait: one
// part in registers, the other in shared memory, so that a block finds room beside one of the kernel before.
//
// After the wait a thread reads its columns, writes back what is pending (with -DWRITES=1), and multiplies; streams stay
// in its registers. Besides the products of a token a block needs those of its streams with each other: from these follow
// both what the streams are normalised by and, once their weights are known, the norm of their weighted sum, so that
// blocks exchange sums once. One warp more of a block balances the S x S matrices of some tokens.
//
// Clusters would have as many columns in 16 blocks, but not all GPUs run eight such clusters at once. Blocks exchange
// sums through the L2 instead: each word is there when it is not zero, so that nobody waits for a fence. There are two
// places for them, in turn: a call clears what the call before has used, which nobody reads any more, as that has ended
// and the next has not begun. Calls that may run at once have different slots.
//
// With -DWORLD of 2 to 8 what is pending is one rank's part of a sum, which is added up first, as in streams_few.cu.
//
// Everything but the products is float32. Compiled by NVRTC. -DSLOTS: calls at once; -DGROUPS: of a call, at most;
// -DTYPE=1 for mailboxes.

#include "mailbox.cuh"
#include "stream_weights.cuh"

constexpr int TOKENS = 16, WORKERS = 32 * WARPS, THREADS = WORKERS + 32, COLUMNS = 32 * WARPS;
constexpr int TILES = WEIGHTS / 8;  // of 8 weights, as `mma` takes them
constexpr int PAIRS = S * (S + 1) / 2;
// Sums of a token: first what all blocks of its group read, the products of `pre` and of pairs of streams, each with
// itself first, and two words of no meaning; then the other products.
constexpr int NEAR = 16, FAR = WEIGHTS - S, ROW = NEAR + FAR, VECTORS = ROW / 4;
constexpr int EACH = (TOKENS + WARPS - 1) / WARPS;  // tokens whose sums a warp adds up
constexpr int ROUNDS = (SPLITS + 7) / 8;            // of eight blocks' sums of a token
static_assert(TOKENS * VECTORS <= THREADS, "a thread sends one vector");

struct __align__(16) Exchange {  // of a group, zero at first
  float near[2][TOKENS][SPLITS][NEAR];
  float far[2][TOKENS][SPLITS][FAR];
  uint32 turns[SPLITS];  // calls so far, by block
};
__device__ Exchange exchanges[SLOTS][GROUPS];

struct Shared {
  float parts[WARPS][TOKENS][ROW];
  float sums[TOKENS][NEAR];
  float4 pre[TOKENS];
  uint4 fine[TILES][S][WORKERS];  // what weights have beyond their registers, of each thread
  float factors[TOKENS];
};

__device__ __forceinline__ float low(uint32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high(uint32 word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ uint32 &word_of(uint4 &v, int w) { return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w; }
__device__ __forceinline__ float part_of(const float4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ float4 load_weights(const float *from) {  // volatile: on its way before the wait
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from)
               : "memory");
  return v;
}

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

// Of a thread: row lane / 4 of each tile, its 8 columns of each stream.
__device__ __forceinline__ void load_weights(
    const Call &call, Shared &shared, uint4 (&coarse)[TILES][S], int row, int column) {
  float4 own[TILES][S][2];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int k = 0; k < S; k++) {
      const float *from = call.fn + (int64(t * 8 + row) * S + k) * call.width + column;
      own[t][k][0] = load_weights(from), own[t][k][1] = load_weights(from + 4);
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int k = 0; k < S; k++) {
      uint4 fine;
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const float a = part_of(own[t][k][w / 2], w % 2 * 2), b = part_of(own[t][k][w / 2], w % 2 * 2 + 1);
        const uint32 word = narrow(a, b);
        word_of(coarse[t][k], w) = word;
        word_of(fine, w) = narrow(a - low(word), b - high(word));
      }
      shared.fine[t][k][threadIdx.x] = fine;
    }
  }
}

// A thread's columns of its two tokens, `first` and 8 behind it: what is pending is written back, in the dtype of the
// streams. All loads are on their way at once.
__device__ __forceinline__ void read_columns(
    const Call &call, uint4 (&x)[2][S], int64 first, int column, uint32 number) {
  bool there[2];
#if WRITES
  uint4 out[2];
  float4 post[2], mix[2][S];  // a row of mix has shares of one stream as it was
#endif
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int64 token = first + 8 * i;
    there[i] = token < call.tokens;
#if WRITES
    out[i] = {0, 0, 0, 0}, post[i] = {0.f, 0.f, 0.f, 0.f};
    if (there[i]) {
      out[i] = *(const uint4 *)(call.out + token * call.out_stride + column);
      if (call.more) out[i] = add_two(out[i], *(const uint4 *)(call.more + token * call.more_stride + column));
    }
#endif
  }
#if WORLD > 1
  const uint64 each = call.width / 8;  // vectors of a token
  Patience patience(call.ranks);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (there[i])
      sum_vector<true, false>(
          call.ranks, number, call.tokens * each, (first + 8 * i) * each + column / 8, out[i], patience);
  }
#endif
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int64 token = first + 8 * i;
#pragma unroll
    for (int k = 0; k < S; k++) {
      x[i][k] = {0, 0, 0, 0};
      if (there[i])
        x[i][k] = *(const uint4 *)(call.streams + token * call.token_stride + k * call.stream_stride + column);
#if WRITES
      mix[i][k] = {0.f, 0.f, 0.f, 0.f};
      if (there[i]) mix[i][k] = ((const float4 *)call.mix)[token * S + k];
#endif
    }
#if WRITES
    if (there[i]) post[i] = ((const float4 *)call.post)[token];
#endif
  }
#if WORLD > 1
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (there[i])
      out[i] = sum_vector<false, true>(
          call.ranks, number, call.tokens * each, (first + 8 * i) * each + column / 8, out[i], patience);
  }
#endif
#if WRITES
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int w = 0; w < 4; w++) {
      uint32 before[S];
#pragma unroll
      for (int j = 0; j < S; j++) before[j] = word_of(x[i][j], w);
#pragma unroll
      for (int k = 0; k < S; k++) {
        float a = part_of(post[i], k) * low(word_of(out[i], w)), b = part_of(post[i], k) * high(word_of(out[i], w));
#pragma unroll
        for (int j = 0; j < S; j++)
          a += part_of(mix[i][j], k) * low(before[j]), b += part_of(mix[i][j], k) * high(before[j]);
        word_of(x[i][k], w) = narrow(a, b);  // rounded first: the next sublayer sees what is written
      }
    }
#pragma unroll
    for (int k = 0; k < S; k++)
      if (there[i]) *(uint4 *)(call.fresh + ((first + 8 * i) * S + k) * call.width + column) = x[i][k];
  }
#endif
}

// Sums of a warp's columns, to `shared.parts`.
__device__ __forceinline__ void multiply(const uint4 (&weights)[TILES][S], Shared &shared, uint4 (&x)[2][S]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quarter = lane % 4;
  float total[TILES][4] = {}, pairs[2][PAIRS] = {};
#pragma unroll
  for (int k = 0; k < S; k++) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const uint4 a = x[0][k], b = x[1][k], coarse = weights[t][k], fine = shared.fine[t][k][threadIdx.x];
      multiply(total[t], a.x, b.x, a.y, b.y, coarse.x, coarse.y);
      multiply(total[t], a.z, b.z, a.w, b.w, coarse.z, coarse.w);
      multiply(total[t], a.x, b.x, a.y, b.y, fine.x, fine.y);
      multiply(total[t], a.z, b.z, a.w, b.w, fine.z, fine.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int w = 0; w < 4; w++) {
#pragma unroll
      for (int j = 0, at = S; j < S; j++) {
        const float a = low(word_of(x[i][j], w)), b = high(word_of(x[i][j], w));
        pairs[i][j] += a * a, pairs[i][j] += b * b;
#pragma unroll
        for (int k = j + 1; k < S; k++, at++)
          pairs[i][at] += a * low(word_of(x[i][k], w)), pairs[i][at] += b * high(word_of(x[i][k], w));
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int weight = t * 8 + quarter * 2, at = weight < S ? weight : weight - S + NEAR;
#pragma unroll
    for (int i = 0; i < 2; i++)
      *(float2 *)&shared.parts[warp][row + 8 * i][at] = {total[t][2 * i], total[t][2 * i + 1]};
  }
  // the four lanes of a row have its columns: each gets the sums of half the pairs of one token
  const bool is_second = quarter & 1, is_upper = quarter & 2;
  float half[PAIRS];
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    const float give = is_second ? pairs[0][p] : pairs[1][p], keep = is_second ? pairs[1][p] : pairs[0][p];
    half[p] = keep + __shfl_xor_sync(~0u, give, 1);
  }
#pragma unroll
  for (int p = 0; p < PAIRS / 2; p++) {
    const float give = is_upper ? half[p] : half[p + PAIRS / 2], keep = is_upper ? half[p + PAIRS / 2] : half[p];
    shared.parts[warp][row + 8 * is_second][S + is_upper * (PAIRS / 2) + p] = keep + __shfl_xor_sync(~0u, give, 2);
  }
}

// A vector of a block's sums to all blocks of its group; the place of the call before is cleared.
__device__ __forceinline__ void send_sums(const Shared &shared, Exchange &exchange, int split, int turn) {
  if (threadIdx.x >= TOKENS * VECTORS) return;
  const int t = threadIdx.x / VECTORS, v = threadIdx.x % VECTORS;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) {
    const float4 part = ((const float4 *)shared.parts[warp][t])[v];
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

// Weights `pre` and the norm's factor of EACH tokens, by each warp: to shared memory.
__device__ __forceinline__ void weigh_near(
    const Call &call, Shared &shared, const Exchange &exchange, int turn, float own_scale, float own_base) {
  const int lane = threadIdx.x % 32, begin = threadIdx.x / 32 * EACH;
  // One vector is waited for before all are asked for: those who wait would keep the L2 from those who are late.
  const int some = (threadIdx.x / 32 * 8 + lane / 4) % SPLITS;
  Looks looks;
  while (!has_arrived(look(exchange.near[turn][begin < TOKENS ? begin : 0][some] + lane % 4 * 4))) looks.count();
  uint4 parts[EACH][ROUNDS];
  bool waits = true;
  while (waits) {
    looks.count();
    waits = false;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
#pragma unroll
      for (int r = 0; r < ROUNDS; r++) {
        const int split = r * 8 + lane / 4;
        parts[e][r] = {0, 0, 0, 0};
        if (split < SPLITS && begin + e < TOKENS) parts[e][r] = look(exchange.near[turn][begin + e][split] + lane % 4 * 4);
      }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
      for (int r = 0; r < ROUNDS; r++)
        waits |= r * 8 + lane / 4 < SPLITS && begin + e < TOKENS && !has_arrived(parts[e][r]);
  }
  __syncwarp();
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    float sum[4] = {};
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
      for (int w = 0; w < 4; w++) sum[w] += __uint_as_float(word_of(parts[e][r], w));
#pragma unroll
    for (int w = 0; w < 4; w++)
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum[w] += __shfl_xor_sync(~0u, sum[w], step);
    if (lane < 4 && begin + e < TOKENS) *(float4 *)&shared.sums[begin + e][lane * 4] = {sum[0], sum[1], sum[2], sum[3]};
  }
  __syncwarp();
  const float scale = __shfl_sync(~0u, own_scale, 0);
  float base[S];
#pragma unroll
  for (int k = 0; k < S; k++) base[k] = __shfl_sync(~0u, own_base, k);
  if (lane >= EACH || begin + lane >= TOKENS) return;
  const float(&own)[NEAR] = shared.sums[begin + lane];
  const float(&pairs)[NEAR - S] = *(const float(*)[NEAR - S])(own + S);
  float squares = 0.f, pre[S], norm = 0.f;
#pragma unroll
  for (int k = 0; k < S; k++) squares += pairs[k];
  // the streams are normalised as one vector, after the products
  const float factor = rsqrtf(squares / (float(S) * call.width) + call.norm_eps);
#pragma unroll
  for (int k = 0; k < S; k++) pre[k] = sigmoid(own[k] * factor * scale + base[k]) + call.eps;
#pragma unroll
  for (int j = 0, at = S; j < S; j++) {
    norm += pre[j] * pre[j] * pairs[j];
#pragma unroll
    for (int k = j + 1; k < S; k++, at++) norm += 2.f * pre[j] * pre[k] * pairs[at];
  }
  shared.pre[begin + lane] = {pre[0], pre[1], pre[2], pre[3]};
  // streams that cancel leave a sum near 0, of either sign
  shared.factors[begin + lane] = rsqrtf(fmaxf(norm, 0.f) / call.width + call.norm_eps);
}

// post and the balanced matrix of one token of the group, by one warp: lane w has weight w, if it is one of these.
__device__ __forceinline__ void weigh_far(
    const Call &call, const Exchange &exchange, int turn, int t, int64 token, float scale, float base) {
  const int lane = threadIdx.x % 32;
  const bool is_square = lane >= WEIGHTS && lane < WEIGHTS + S;  // of streams with themselves
  const bool is_there = lane >= S && lane < WEIGHTS + S;
  const float *from = is_square ? exchange.near[turn][t][0] + S + lane - WEIGHTS : exchange.far[turn][t][0] + lane - S;
  uint32 parts[SPLITS];
  bool waits = is_there;
  Looks looks;
  do {
    looks.count();
#pragma unroll
    for (int split = 0; split < SPLITS; split++)
      parts[split] = is_there ? look_word(from + split * (is_square ? NEAR : FAR)) : 0;
    waits = false;
#pragma unroll
    for (int split = 0; split < SPLITS; split++) waits |= is_there && !parts[split];
  } while (waits);
  __syncwarp();
  float own = 0.f, squares = 0.f;
#pragma unroll
  for (int split = 0; split < SPLITS; split++) own += __uint_as_float(parts[split]);
#pragma unroll
  for (int k = 0; k < S; k++) squares += __shfl_sync(~0u, own, WEIGHTS + k);
  own *= rsqrtf(squares / (float(S) * call.width) + call.norm_eps);
  balance(call, own * scale + base, token, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, WARPS > 4 || WORLD > 2 ? 1 : 2) pass_groups(const __grid_constant__ Call call, int slot) {
  extern __shared__ __align__(16) char memory[];
  Shared &shared = *(Shared *)memory;
  const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  const int split = blockIdx.x % SPLITS, group = blockIdx.x / SPLITS;
  const int64 first = int64(group) * TOKENS;
  const bool is_worker = threadIdx.x < WORKERS;
  const int column = split * COLUMNS + threadIdx.x % WORKERS / 32 * 32 + quarter * 8;
  Exchange &exchange = exchanges[slot][group];
  uint4 weights[TILES][S];
  if (is_worker) load_weights(call, shared, weights, row, column);
  uint4 norm = *(const uint4 *)(call.norm + column);
  // lane w has those of weight w
  const float scale = call.scale[lane < S ? 0 : lane < 2 * S ? 1 : 2], base = call.base[lane < WEIGHTS ? lane : 0];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  uint32 number = 0;
#if WORLD > 1
  uint32 *calls = ((Control *)call.ranks.mailboxes[call.ranks.rank])->sums;
  number = peek_word(&calls[blockIdx.x]);
#endif
  const uint32 turns = peek_word(&exchange.turns[split]);
  uint4 x[2][S];
  if (is_worker) {
    read_columns(call, x, first + row, column, number);
    multiply(weights, shared, x);
  }
  __syncthreads();
  send_sums(shared, exchange, split, turns % 2);
#if WORLD > 1
  count_call(calls, number);
#endif
  if (threadIdx.x == 0) put_word(&exchange.turns[split], turns + 1);
  if (!is_worker) {
    for (int t = split; t < TOKENS && first + t < call.tokens; t += SPLITS)
      weigh_far(call, exchange, turns % 2, t, first + t, scale, base);
    return;
  }
  weigh_near(call, shared, exchange, turns % 2, scale, base);
  sync_workers();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float4 pre = shared.pre[row + 8 * i];
    const float factor = shared.factors[row + 8 * i];
    uint4 y;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      float a = 0.f, b = 0.f;
#pragma unroll
      for (int k = 0; k < S; k++)
        a += part_of(pre, k) * low(word_of(x[i][k], w)), b += part_of(pre, k) * high(word_of(x[i][k], w));
      const uint32 sum = narrow(a, b), weight = word_of(norm, w);
      word_of(y, w) = narrow(low(sum) * factor * low(weight), high(sum) * factor * high(weight));
    }
    if (first + row + 8 * i < call.tokens) *(uint4 *)(call.x + (first + row + 8 * i) * call.width + column) = y;
  }
}
