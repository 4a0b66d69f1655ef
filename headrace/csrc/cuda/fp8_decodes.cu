// Attention of decodes over pages of e4m3: q [T, H, E], pages of keys and values [P, PAGE, K, E], out [T, H, E].
//
// A block has a kv head and a request, or a share of its keys; its warps have tiles of KEYS keys in turn. A warp copies
// its own tiles into its own ring and multiplies them by itself, with a softmax of its own; warps meet at the end. The
// first DEPTH tiles it asks for before the previous kernel has ended, but for keys that this may still write.
//
// Shares are equal over all requests, as those of `_share_out` in headrace/kernels/attention/decodes.py: each block finds
// its own from the lengths. The last block of a request and kv head adds up all parts, in order.
//
// Hazard: lengths, page tables, `query_start` and all keys but the last FRESH of a request are read before the wait, see
// `wait_for_previous` in headrace/kernels/launch.py: only the previous kernel may write keys of this step.
//
// Compiled by NVRTC. Macros: E, 64 or 128; G query heads of a kv head, up to 16; PAGE, a multiple of 16; KV_HEADS; FP16:
// queries and results in float16 instead of bfloat16; SOFTCAP 0 or 1; FRESH; KEYS of a tile, WARPS, DEPTH, BLOCKS (on a
// multiprocessor).

#include "numbers.cuh"
#include "e4m3_keys.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int ROW = KV_HEADS * E;                    // bytes between keys
constexpr int RING = DEPTH * 2 * TILE;                // bytes: of a warp's ring
constexpr int CHUNKS = E / 16;                       // of 16 bytes, of a key
constexpr int PIECES = KEYS * CHUNKS / 32;           // that a lane copies of a tile's keys
constexpr int STRIDE = KEYS * WARPS;                 // keys of a unit of shares
constexpr int LOOKUPS = KEYS > PAGE ? KEYS / PAGE : 1;  // pages of a tile
constexpr int HELD = 32 / LOOKUPS;                   // tiles whose pages a warp holds
constexpr int QUADS = G * E / 4;                     // of four sums each, of a block
static_assert((E == 64 || E == 128) && G <= 16 && PAGE % 16 == 0 && KEYS % 16 == 0, "");
static_assert(RING >= HEADS * PADDED * 4 && (LOOKUPS == 1 ? PAGE % KEYS == 0 : KEYS == 2 * PAGE), "");

struct Call {
  const uint16 *q;
  const uint8 *k, *v;
  uint16 *out;
  float *partial, *stats;          // of shares: [K, slots, G, E], and maxima and sums [K, slots, G, 2]
  int *counters;                   // [R, K], zero between launches
  const int *query_start;          // [R + 1]: only requests of one token are decodes, or null: all
  const int *kv_lens, *table;      // [R], [R, *]
  const void *sinks;               // [H] float32, or as q, or null
  uint32 k_stride, v_stride;       // between pages, in units of 16 bytes
  int table_stride, requests, slots, window, has_wide_sinks;  // slots: 0: a block has all keys of a request
  float scale, softcap;            // scale includes log2(e), with a soft cap the division by it instead
};

// 16 bytes, to and from so much further.
template <int TO, int FROM>
__device__ __forceinline__ void copy(uint32 to, const uint8 *from) {
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(to), "l"(from), "n"(TO), "n"(FROM) : "memory");
}
// So many of 16 bytes, 0 or 16; the rest becomes zero.
__device__ __forceinline__ void copy_some(uint32 to, const uint8 *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ float widen_own(uint32 pair, bool high) {
#ifdef FP16
  return half_of(pair, high);
#else
  return high ? widen_high(pair) : widen(pair & 0xffff);
#endif
}
__device__ __forceinline__ uint32 narrow_own(float low, float high) {
#ifdef FP16
  return pack(low, high);
#else
  return narrow(low, high);
#endif
}
// Two queries as float16, which is finer than bfloat16; larger ones are cut.
__device__ __forceinline__ uint32 as_halves(uint32 pair) {
  const float low = widen_own(pair, false), high = widen_own(pair, true);
  return pack_cut(low, high);
}

// The keys that a block has: of `request`, tiles `begin` to `end`.
struct Share {
  int request, len, first;   // request -1: none; its length, its first key that is seen
  int begin, end;
  int split, count;          // which of so many shares of the request

  __device__ bool sees(int key) const { return key >= first && key + KEYS <= len; }  // all of a tile
};
__device__ __forceinline__ void find_tiles(Share &share, int window, int each) {  // each: units
  share.first = window ? max(0, share.len - window) : 0;
  const int from = share.first / STRIDE + share.split * each, tiles = (share.len + KEYS - 1) / KEYS;
  share.begin = max(from * WARPS, share.first / KEYS);
  share.end = share.split + 1 < share.count ? (from + each) * WARPS : tiles;
}
__device__ __forceinline__ int sum_of_warp(int v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(~0u, v, step);
  return v;
}
// Every warp by itself, from the same lengths; `units` has room for as many numbers as there are requests.
__device__ __forceinline__ Share share_out(const Call &call, int slot, int *units) {
  const int lane = threadIdx.x % 32;
  int sum = 0;
  for (int at = lane; at < call.requests; at += 32) {
    const int len = __ldcg(call.kv_lens + at);
    int own = (len + STRIDE - 1) / STRIDE - (call.window ? max(0, len - call.window) / STRIDE : 0);
    own = max(own, 1);  // a request of length 0 has a block that writes its output
    units[at] = own, sum += own;
  }
  int each = (sum_of_warp(sum) + call.slots - 1) / call.slots;
  // Rounding each request up may take more slots than there are. Ends, as there are at least as many as requests.
  for (;; each += (each + 7) / 8) {
    int taken = 0;
    for (int at = lane; at < call.requests; at += 32) taken += (units[at] + each - 1) / each;
    if (sum_of_warp(taken) <= call.slots) break;
  }
  Share share{-1, 0, 0, 0, 0, 0, 1};
  int before = 0;  // slots of requests before
  for (int at = 0; at < call.requests; at += 32) {
    const int own = at + lane < call.requests ? (units[at + lane] + each - 1) / each : 0;
    int until = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(~0u, until, step);
      if (lane >= step) until += other;
    }
    until += before;
    const uint32 found = __ballot_sync(~0u, until > slot);
    if (found) {
      const int source = __ffs(found) - 1;
      share.request = at + source, share.count = __shfl_sync(~0u, own, source);
      share.split = slot - (__shfl_sync(~0u, until, source) - share.count);
      break;
    }
    before = __shfl_sync(~0u, until, 31);
  }
  if (share.request >= 0) share.len = __ldcg(call.kv_lens + share.request), find_tiles(share, call.window, each);
  return share;
}

// Of a warp: its tiles are `share.begin` + warp, WARPS further, and so on.
struct Pages {
  const int *table;
  int now, next;  // pages of HELD tiles, by lane, and of as many behind
  int base, end;  // the warp's first tile; behind the last key

  __device__ int look_up(int first) const {  // from tile number `first` of the warp on
    const int lane = threadIdx.x % 32, tile = base + (first + lane / LOOKUPS) * WARPS;
    const int position = tile * KEYS + lane % LOOKUPS * PAGE;
    return position < end ? __ldcg(table + position / PAGE) : 0;
  }
  __device__ void begin() { now = look_up(0), next = look_up(HELD); }
  __device__ void advance(int i) {  // to what tile number i needs, one after the other
    if (i && i % HELD == 0) now = next, next = look_up(i + HELD);
  }
};

// What a lane copies and reads.
struct Lane : Reader {
  uint32 offset;              // bytes from a page's first key
  uint32 to[2];               // of its pieces in a tile, even and odd ones; piece j lies 32 j pieces further

  __device__ Lane() {
    const int lane = threadIdx.x % 32;
    offset = lane / CHUNKS * ROW + blockIdx.x % KV_HEADS * E + lane % CHUNKS * 16;
    to[0] = place_of(lane / CHUNKS, lane % CHUNKS), to[1] = place_of(lane / CHUNKS + 32 / CHUNKS, lane % CHUNKS) - 512;
  }
};

template <int J>
__device__ __forceinline__ void copy_pieces(const Lane &lane, uint32 at, const uint8 *const *k, const uint8 *const *v) {
  if constexpr (J < PIECES) {
    constexpr int KEY = J * (32 / CHUNKS), PART = LOOKUPS > 1 ? KEY / PAGE : 0, FROM = (KEY - PART * PAGE) * ROW;
    const uint32 to = at + lane.to[J % 2];
    copy<J * 512, FROM>(to, k[PART]), copy<TILE + J * 512, FROM>(to, v[PART]);
    copy_pieces<J + 1>(lane, at, k, v);
  }
}
// Ask for keys and values of tile number i of a warp. Keys that are not seen become zeros.
__device__ __forceinline__ void ask(
    const Call &call, const Share &share, const Pages &pages, const Lane &lane, int i, uint32 at
) {
  const int first = (pages.base + i * WARPS) * KEYS;
  const uint8 *k[LOOKUPS], *v[LOOKUPS];
#pragma unroll
  for (int n = 0; n < LOOKUPS; n++) {
    const uint32 page = __shfl_sync(~0u, pages.now, i % HELD * LOOKUPS + n);
    const uint32 offset = lane.offset + (LOOKUPS > 1 ? 0 : first % PAGE * ROW);
    k[n] = call.k + uint64(page) * call.k_stride * 16 + offset, v[n] = call.v + uint64(page) * call.v_stride * 16 + offset;
  }
  if (share.sees(first)) {
    copy_pieces<0>(lane, at, k, v);
    return;
  }
#pragma unroll 1
  for (int j = 0; j < PIECES; j++) {
    const int key = j * (32 / CHUNKS), position = first + key + threadIdx.x % 32 / CHUNKS;
    const int n = LOOKUPS > 1 ? key / PAGE : 0, from = (key - n * PAGE) * ROW;
    const int bytes = position >= share.first && position < share.len ? 16 : 0;
    const uint32 to = at + (j % 2 ? lane.to[1] : lane.to[0]) + j * 512;
    copy_some(to, (LOOKUPS > 1 && n ? k[LOOKUPS - 1] : k[0]) + from, bytes);
    copy_some(to + TILE, (LOOKUPS > 1 && n ? v[LOOKUPS - 1] : v[0]) + from, bytes);
  }
}

__device__ __forceinline__ void add(float4 &sum, float factor, const float4 &part) {
  sum.x += factor * part.x, sum.y += factor * part.y, sum.z += factor * part.z, sum.w += factor * part.w;
}
__device__ __forceinline__ float find_sink(const Call &call, int query_head) {
  if (call.has_wide_sinks) return LOG2_E * ((const float *)call.sinks)[query_head];
  return LOG2_E * widen_own(((const uint16 *)call.sinks)[query_head], false);
}
__device__ __forceinline__ void store(const Call &call, int64 token, int query_head, int dim, float4 sum, float total) {
  const float factor = total > 0.f ? 1.f / total : 0.f;  // of length 0, which pads a captured graph: zeros
  *(uint2 *)(call.out + (token * (KV_HEADS * G) + query_head) * E + dim) =
      uint2{narrow_own(sum.x * factor, sum.y * factor), narrow_own(sum.z * factor, sum.w * factor)};
}

// All parts of a request and kv head, from `base` on. `parts` has room for their maxima and sums.
__device__ __forceinline__ void combine(const Call &call, const Share &share, int64 token, int64 base, float2 *parts) {
  const int head = blockIdx.x % KV_HEADS;
  for (int at = threadIdx.x; at < share.count * G; at += THREADS)
    parts[at] = __ldcg((const float2 *)call.stats + base * G + at);
  __syncthreads();
  for (int at = threadIdx.x; at < QUADS; at += THREADS) {
    const int g = at / (E / 4), dim = at % (E / 4) * 4, query_head = head * G + g;
    float top = call.sinks ? find_sink(call, query_head) : MASKED, total = call.sinks ? 1.f : 0.f;
    const float sink = top;
    for (int i = 0; i < share.count; i++) top = fmaxf(top, parts[i * G + g].x);
    total *= exp2_fast(sink - top);
    float4 sum{0.f, 0.f, 0.f, 0.f};
    const float4 *from = (const float4 *)(call.partial + (base * G + g) * E + dim);
#pragma unroll 8
    for (int i = 0; i < share.count; i++) {
      const float fade = exp2_fast(parts[i * G + g].x - top);
      total += fade * parts[i * G + g].y;
      add(sum, fade, __ldcg(from + int64(i) * QUADS));
    }
    store(call, token, query_head, dim, sum, total);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fp8_decodes(const __grid_constant__ Call call) {
  extern __shared__ __align__(128) char memory[];
  __shared__ float2 own[WARPS][HEADS];  // maximum and sum of each warp
  __shared__ int arrived;
  const int head = blockIdx.x % KV_HEADS, slot = blockIdx.x / KV_HEADS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  char *ring = memory + warp * RING;
  const uint32 ring_at = address(ring);
  Share share{slot, 0, 0, 0, 0, 0, 1};
  if (call.slots) {
    share = share_out(call, slot, (int *)ring);
    __syncwarp();
  } else {
    share.len = __ldcg(call.kv_lens + slot);
    find_tiles(share, call.window, 0);
  }
  int64 token = share.request;
  if (call.query_start) {  // a mixed step: only requests of one token are decodes
    token = __ldcg(call.query_start + slot);
    if (__ldcg(call.query_start + slot + 1) - token != 1) share.request = -1;
  }
  if (share.request < 0) {
    wait_for_previous();
    return;
  }
  const Lane own_lane;
  Pages pages{call.table + int64(share.request) * call.table_stride};
  pages.base = share.begin + warp, pages.end = min(share.len, share.end * KEYS);
  pages.begin();
  int asked = 0;
  auto ask_next = [&](int before) {  // of the warp's tiles, if it lies before tile `before`
    const int tile = pages.base + asked * WARPS;
    if (tile >= before) return;
    pages.advance(asked);
    ask(call, share, pages, own_lane, asked, ring_at + asked % DEPTH * 2 * TILE);
    commit_copies();
    asked++;
  };
  const int old = min(share.end, max(0, share.len - FRESH) / KEYS);
#pragma unroll
  for (int i = 0; i < DEPTH; i++) ask_next(old);

  wait_for_previous();
  Queries q;
  {
    const uint16 *from = call.q + (token * (KV_HEADS * G) + head * G) * E + lane % 4 * (E / 4);
#pragma unroll
    for (int r = 0; r < HALVES; r++) {
      const int g = lane / 4 + 8 * r;
#pragma unroll
      for (int s = 0; s < STEPS; s += 2) {
        const uint4 two = g < G ? __ldcg((const uint4 *)(from + g * E + 4 * s)) : uint4{0, 0, 0, 0};
        q[s][r][0] = as_halves(two.x), q[s][r][1] = as_halves(two.y);
        q[s + 1][r][0] = as_halves(two.z), q[s + 1][r][1] = as_halves(two.w);
      }
    }
  }
  while (asked < DEPTH) {
    if (pages.base + asked * WARPS < share.end) {
      ask_next(share.end);
    } else {
      commit_copies(), asked++;
    }
  }
  Sums sums = no_sums();
  uint32 at = ring_at;
  for (int tile = pages.base; tile < share.end; tile += WARPS) {
    wait_for_copies();
    __syncwarp();
    attend(call, share, own_lane, tile * KEYS, at, q, sums);
    __syncwarp();
    if (tile + DEPTH * WARPS < share.end) {
      pages.advance(asked);
      ask(call, share, pages, own_lane, asked, at);
    }
    commit_copies();
    asked++;
    at = at + 2 * TILE == ring_at + RING ? ring_at : at + 2 * TILE;
  }

  put_sums<HEADS>((float *)ring, own[warp], sums, lane);
  __syncthreads();
  const int64 base = int64(head) * call.slots + slot - share.split;
  for (int at = threadIdx.x; at < QUADS; at += THREADS) {
    const int g = at / (E / 4), dim = at % (E / 4) * 4;
    float top = MASKED, total = 0.f;
    if (call.sinks && share.count == 1) top = find_sink(call, head * G + g), total = 1.f;
    const float sink = top;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, own[w][g].x);
    total *= exp2_fast(sink - top);
    float4 sum{0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float fade = exp2_fast(own[w][g].x - top);
      total += fade * own[w][g].y;
      add(sum, fade, *(const float4 *)(memory + w * RING + (g * PADDED + dim) * 4));
    }
    if (share.count == 1) {
      store(call, token, head * G + g, dim, sum, total);
    } else {
      const int64 part = (base + share.split) * G + g;
      *(float4 *)(call.partial + part * E + dim) = sum;
      if (dim == 0) *((float2 *)call.stats + part) = float2{top, total};
    }
  }
  if (share.count == 1) return;
  // The barrier orders the stores of all threads before the one atomic; after it, others' parts are visible.
  __syncthreads();
  int *counter = call.counters + share.request * KV_HEADS + head;
  if (threadIdx.x == 0)
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(arrived) : "l"(counter) : "memory");
  __syncthreads();
  if (arrived != share.count - 1) return;
  combine(call, share, token, base, (float2 *)memory);
  if (threadIdx.x == 0) *counter = 0;  // ready for the next launch, also under graph replay
}
