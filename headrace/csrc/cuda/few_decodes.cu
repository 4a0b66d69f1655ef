// Attention of decodes of a few requests over pages of bfloat16 or e4m3, together with what is between it and the product
// before: norms of queries and keys, rotation, and the write of the new keys and values.
//
// A cluster has a request and kv head, and its blocks have equal parts of the keys, in units of 16. A warp copies its
// own units into its part of a ring in shared memory and multiplies them by itself; the first DEPTH of them it asks for
// before the previous kernel has ended, as only this kernel writes keys and values of the step. After that remain the
// queries, which every block rotates by itself, the products of what has come, and the sums: of a block's warps through
// its shared memory, of the blocks through that of each other, where each completes a part of the dims.
//
// A request may have several rows, its last token and drafts behind it. Keys of the step's tokens, which its other
// clusters write, are recognised by their slots, and computed where they are needed instead of read.
//
// Hazard: lengths, page tables, positions and slots are read before the wait. They must have been written before the
// kernel that the previous one waited for ended, as must all pages; see `wait_for_previous` in headrace/kernels/launch.py.
//
// Compiled by NVRTC. Macros: E, 64 or 128; G query heads of a kv head, up to 16; PAGE tokens; CLUSTER blocks; ROTARY dims
// that are rotated, INTERLEAVED; NORM; SOFTCAP; FP8: pages of e4m3, and queries in float16 instead of bfloat16.

#include "numbers.cuh"
#include "cluster_sums.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, UNIT = 16;
constexpr int KEYS = UNIT;                          // of a tile
#if FP8
#include "e4m3_keys.cuh"
using Stored = uint8;
#else
#include "bf16_keys.cuh"
using Stored = uint16;
#endif
constexpr int RING = 16 << 10, DEPTH = RING / (2 * TILE);  // of a warp: bytes; units that are on their way
constexpr int ROW = 2 * E;                          // bytes of a query
constexpr int PER = 16 / sizeof(Stored);            // dims of 16 bytes of a key
constexpr int PAIRS = E / 64;                       // of dims that a lane rotates
constexpr int SLICE = E / CLUSTER;                  // dims that a block completes
constexpr int EACH = (G + WARPS - 1) / WARPS;       // heads that a warp rotates
static_assert(E % 64 == 0 && G <= 16 && ROTARY <= E && RING >= HEADS * PADDED * 4, "");
static_assert(SLICE % 4 == 0 && G * SLICE / 2 <= THREADS, "");

struct Call {
  const uint16 *qkv, *q_norm, *k_norm;  // [T, (H + 2K) E], [E]
  const float *cos_sin;                 // [L, ROTARY]
  const int64 *positions, *slots;       // [T]
  const int *kv_lens, *table;           // [T], [T, pages]
  Stored *k, *v;                        // pages [P, PAGE, K, E]
  uint16 *out;                          // [T, H, E]
  const void *sinks;                    // [H] float32, or bfloat16, or null
  int64 qkv_stride, table_stride, k_stride, v_stride;
  int rows, kv_heads, window, has_wide_sinks;
  float scale, softcap, eps, offset;    // scale includes log2(e), with a soft cap the division by it instead
};

// So many of 16 bytes, 0 or 16; the rest becomes zero.
__device__ __forceinline__ void copy(uint32 to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }
// Relaxed: releasing memory would be a fence of the GPU's memory, and wait for keys and values that were just written.
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void await() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <class T>
__device__ __forceinline__ void send(const float *own, uint32 bar, int block, T v) { send(address(own), bar, block, v); }
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(~0u, v, step);
  return v;
}
// Queries lie in rows of ROW bytes; 16 bytes are where they do not conflict with those of the next rows.
__device__ __forceinline__ uint32 place_of_query(int row, int eight) { return row * ROW + ((eight ^ (row & 7)) << 4); }
#if FP8
__device__ __forceinline__ uint16 as_query(float v) { return uint16(pack_cut(v, 0.f)); }
__device__ __forceinline__ Stored as_stored(float v) {  // no larger than 448
  uint16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(0.f), "f"(v));
  return Stored(out);
}
__device__ __forceinline__ void load_queries(Queries &q, uint32 from, int lane) {
#pragma unroll
  for (int r = 0; r < HALVES; r++)
#pragma unroll
    for (int s = 0; s < STEPS; s += 2) {
      const uint4 two = load_four(from + place_of_query(lane / 4 + 8 * r, lane % 4 * (E / 32) + s / 2));
      q[s][r][0] = two.x, q[s][r][1] = two.y, q[s + 1][r][0] = two.z, q[s + 1][r][1] = two.w;
    }
}
#else
__device__ __forceinline__ uint16 as_query(float v) { return narrow(v); }
__device__ __forceinline__ Stored as_stored(float v) { return narrow(v); }
__device__ __forceinline__ void load_queries(Queries &q, uint32 from, int lane) {
  if (HEADS > 8) {
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      load_matrices(q[step], from + place_of_query(lane % 16, 2 * step + lane / 16));
  } else {
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
      uint32 two[4];
      load_matrices(two, from + place_of_query(lane % 8, 2 * step + lane / 8));
      q[step][0] = two[0], q[step][1] = two[1], q[step + 1][0] = two[2], q[step + 1][1] = two[3];
    }
  }
}
#endif

// Two dims of each pair of a head that lane l has: pairs l, l + 32.
struct Head { float a[PAIRS], b[PAIRS]; };
__device__ __forceinline__ int first_of(int pair) {
  return pair >= ROTARY / 2 ? 2 * pair : INTERLEAVED ? 2 * pair : pair;
}
__device__ __forceinline__ int second_of(int pair) {
  return pair >= ROTARY / 2 ? 2 * pair + 1 : INTERLEAVED ? 2 * pair + 1 : pair + ROTARY / 2;
}
__device__ __forceinline__ Head load_head(const uint16 *from) {
  Head head;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int pair = threadIdx.x % 32 + 32 * i;
    head.a[i] = widen(__ldcg(from + first_of(pair))), head.b[i] = widen(__ldcg(from + second_of(pair)));
  }
  return head;
}
__device__ __forceinline__ Head load_angles(const Call &call, int row) {  // cosines and sines; 1 and 0 of the rest
  Head head;
  const float *from = ROTARY ? call.cos_sin + __ldcg(call.positions + row) * ROTARY : nullptr;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int pair = threadIdx.x % 32 + 32 * i;
    head.a[i] = pair < ROTARY / 2 ? __ldcg(from + pair) : 1.f;
    head.b[i] = pair < ROTARY / 2 ? __ldcg(from + ROTARY / 2 + pair) : 0.f;
  }
  return head;
}
__device__ __forceinline__ Head load_norm(const uint16 *from, float offset) {
  Head head = {};
  if (NORM) {
    head = load_head(from);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) head.a[i] += offset, head.b[i] += offset;
  }
  return head;
}
__device__ __forceinline__ Head rotate(Head x, const Head &norm, const Head &angles, float eps) {
  if (NORM) {
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) square += x.a[i] * x.a[i] + x.b[i] * x.b[i];
    const float factor = rsqrtf(sum_of_warp(square) / E + eps);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) x.a[i] *= factor * norm.a[i], x.b[i] *= factor * norm.b[i];
  }
  Head out;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    out.a[i] = x.a[i] * angles.a[i] - x.b[i] * angles.b[i];
    out.b[i] = x.b[i] * angles.a[i] + x.a[i] * angles.b[i];
  }
  return out;
}
__device__ __forceinline__ void put_query(char *rows, int row, const Head &head) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int pair = threadIdx.x % 32 + 32 * i, a = first_of(pair), b = second_of(pair);
    *(uint16 *)(rows + place_of_query(row, a / 8) + a % 8 * 2) = as_query(head.a[i]);
    *(uint16 *)(rows + place_of_query(row, b / 8) + b % 8 * 2) = as_query(head.b[i]);
  }
}
__device__ __forceinline__ void put_key(char *tile, int key, const Head &head) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int pair = threadIdx.x % 32 + 32 * i, a = first_of(pair), b = second_of(pair);
    *(Stored *)(tile + place_of(key, a / PER) + a % PER * sizeof(Stored)) = as_stored(head.a[i]);
    *(Stored *)(tile + place_of(key, b / PER) + b % PER * sizeof(Stored)) = as_stored(head.b[i]);
  }
}
__device__ __forceinline__ void store_key(Stored *to, const Head &head) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int pair = threadIdx.x % 32 + 32 * i;
    to[first_of(pair)] = as_stored(head.a[i]), to[second_of(pair)] = as_stored(head.b[i]);
  }
}

// The part of the keys that a warp has: units `next`, `next` + WARPS... before `end`.
struct Share {
  int len, first;  // of the request: its length, its first key that is seen
  int next, end;

  __device__ bool sees(int key) const { return key >= first && key + UNIT <= len; }  // all of a unit
};
__device__ __forceinline__ Share find_share(const Call &call, int row, int rank) {
  Share share;
  share.len = __ldcg(call.kv_lens + row);
  share.first = call.window ? max(0, share.len - call.window) : 0;
  const int begin = share.first / UNIT, end = (share.len + UNIT - 1) / UNIT, each = (end - begin + CLUSTER - 1) / CLUSTER;
  share.end = min(begin + (rank + 1) * each, end);
  share.next = begin + rank * each + threadIdx.x / 32;
  return share;
}

// Where key `lane` % 16 of a unit is.
constexpr int ABSENT = -1, STORED = -2;
struct Place {
  int page;
  int source;  // the row whose key it is, if that is of this step; ABSENT: not seen; STORED: in the page
};
__device__ __forceinline__ Place locate(const Call &call, const Share &share, int row, int unit) {
  Place place{0, ABSENT};
  const int position = unit * UNIT + threadIdx.x % UNIT;
  if (unit >= share.end || position < share.first || position >= share.len) return place;
  place.page = __ldcg(call.table + row * call.table_stride + position / PAGE), place.source = STORED;
  if (position == share.len - 1) {
    place.source = row;
  } else if (position >= share.len - call.rows) {
    const int64 slot = int64(place.page) * PAGE + position % PAGE;
    for (int other = 0; other < call.rows; other++)
      if (__ldcg(call.slots + other) == slot) place.source = other;
  }
  return place;
}
// Ask for keys and values of a unit, but for those of this step.
__device__ __forceinline__ void ask(const Call &call, const Place &place, int unit, int head, uint32 to) {
  constexpr int PIECES = E / PER;
#pragma unroll
  for (int i = 0; i < UNIT * PIECES / 32; i++) {
    const int at = i * 32 + threadIdx.x % 32, key = at / PIECES, piece = at % PIECES;
    const int64 page = __shfl_sync(~0u, place.page, key), within =
        int64((unit * UNIT + key) % PAGE) * (call.kv_heads * E) + head * E + piece * PER;
    const int source = __shfl_sync(~0u, place.source, key), bytes = source == STORED ? 16 : 0;
    if (source >= 0) continue;
    copy(to + place_of(key, piece), call.k + page * call.k_stride + within, bytes);
    copy(to + TILE + place_of(key, piece), call.v + page * call.v_stride + within, bytes);
  }
}

// What is of a block's own in shared memory, behind the rings.
struct Room {
  char q[HEADS * ROW];
  float2 own[WARPS][G];                  // maximum and sum of each warp
  float stats[CLUSTER][G][2];            // of each block of the cluster
  float values[CLUSTER][G][SLICE];
  uint64 there;                          // a barrier that waits for the bytes of both
};

// Of the warps' sums, each in its ring, to the blocks that complete them.
__device__ __forceinline__ void send_sums(const char *rings, const Room &room, int rank) {
  for (int at = threadIdx.x; at < G * E / 4; at += THREADS) {
    const int g = at / (E / 4), dim = at % (E / 4) * 4;
    float top = room.own[0][g].x;
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, room.own[w][g].x);
    float4 sum{0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float fade = exp2_fast(room.own[w][g].x - top);
      const float4 part = *(const float4 *)(rings + w * RING + (g * PADDED + dim) * 4);
      sum.x += fade * part.x, sum.y += fade * part.y, sum.z += fade * part.z, sum.w += fade * part.w;
    }
    send(&room.values[rank][g][dim % SLICE], address(&room.there), dim / SLICE, sum);
  }
  for (int at = threadIdx.x; at < G * CLUSTER; at += THREADS) {
    const int g = at % G;
    float top = room.own[0][g].x, total = 0.f;
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, room.own[w][g].x);
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += room.own[w][g].y * exp2_fast(room.own[w][g].x - top);
    send(&room.stats[rank][g][0], address(&room.there), at / G, float2{top, total});
  }
}

// The sink of the head whose dims this thread completes, as bits. Volatile, to be asked for where it is called: it comes
// from memory.
__device__ __forceinline__ uint32 read_sink(const Call &call, int head) {
  const int g = threadIdx.x / (SLICE / 2), query_head = head * G + g;
  uint32 bits = 0;
  if (!call.sinks || g >= G) return bits;
  if (call.has_wide_sinks) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(bits) : "l"((const float *)call.sinks + query_head));
  } else {
    uint16 half;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"((const uint16 *)call.sinks + query_head));
    bits = uint32(half) << 16;
  }
  return bits;
}

// The block's part of the dims, of what all blocks have sent.
__device__ __forceinline__ void complete(
    const Call &call, const Room &room, int row, int head, int rank, uint32 sink_bits) {
  constexpr int PAIRS_OF_SLICE = SLICE / 2;
  if (threadIdx.x >= G * PAIRS_OF_SLICE) return;
  const int g = threadIdx.x / PAIRS_OF_SLICE, dim = threadIdx.x % PAIRS_OF_SLICE * 2, query_head = head * G + g;
  float top = MASKED, total = 0.f, low = 0.f, high = 0.f;
  if (call.sinks) {  // as if there were a key with this logit and a value of zero
    top = LOG2_E * __uint_as_float(sink_bits);
    total = 1.f;
  }
  const float sink = top;
#pragma unroll
  for (int block = 0; block < CLUSTER; block++) top = fmaxf(top, room.stats[block][g][0]);
  total *= exp2_fast(sink - top);
#pragma unroll
  for (int block = 0; block < CLUSTER; block++) {
    const float fade = exp2_fast(room.stats[block][g][0] - top);
    total += fade * room.stats[block][g][1];
    low += fade * room.values[block][g][dim], high += fade * room.values[block][g][dim + 1];
  }
  const float factor = total > 0.f ? 1.f / total : 0.f;  // of length 0, which pads a captured graph: zeros
  *(uint32 *)(call.out + (int64(row) * call.kv_heads * G + query_head) * E + rank * SLICE + dim) =
      narrow(low * factor, high * factor);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) few_decodes(
    const __grid_constant__ Call call) {
  extern __shared__ __align__(128) char memory[];
  Room &room = *(Room *)(memory + WARPS * RING);
  const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER, head = tile % call.kv_heads, row = tile / call.kv_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = call.kv_heads * G;
  if (threadIdx.x == 0) {
    expect_sums(address(&room.there), sizeof(room.stats) + sizeof(room.values));
    publish_barriers();
  }
  arrive();  // a block's memory may be written once it has started
  char *ring = memory + warp * RING;
  const uint32 ring_at = address(ring);
  const Share share = find_share(call, row, rank);
  // of the request's last key, which is the row's own; the warp that has its unit writes it
  const int last = (share.len - 1) / UNIT;
  const bool is_last = share.len > 0 && last < share.end && last >= share.next && (last - share.next) % WARPS == 0;
  Place places[DEPTH + 1];
#pragma unroll
  for (int i = 0; i <= DEPTH; i++) places[i] = locate(call, share, row, share.next + i * WARPS);
#pragma unroll
  for (int i = 0; i < DEPTH; i++) {
    if (share.next + i * WARPS < share.end)
      ask(call, places[i], share.next + i * WARPS, head, ring_at + i * 2 * TILE);
    commit_copies();
  }
  Place next = places[DEPTH];
  // units with keys of this step are the last two at most, which two warps have; while the first ones are located
  int sources = ABSENT;  // of this warp's
#pragma unroll
  for (int i = 0; i <= DEPTH; i++)
    if (__any_sync(~0u, places[i].source >= 0)) sources = places[i].source;
  const Head angles = load_angles(call, row), q_norm = load_norm(call.q_norm, call.offset),
             k_norm = load_norm(call.k_norm, call.offset);
  const int64 slot = __ldcg(call.slots + row);
  const uint32 sink = read_sink(call, head);
  const Reader reader{};

  wait_for_previous();
  const uint16 *from = call.qkv + row * call.qkv_stride;
  Head queries[EACH], own_key = {}, own_value = {};
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int g = warp + i * WARPS;
    if (g < G) queries[i] = load_head(from + (head * G + g) * E);
  }
  if (is_last) own_key = load_head(from + (heads + head) * E), own_value = load_head(from + (heads + call.kv_heads + head) * E);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int g = warp + i * WARPS;
    if (g < G) put_query(room.q, g, rotate(queries[i], q_norm, angles, call.eps));
  }
  for (int g = G + warp; g < HEADS; g += WARPS) put_query(room.q, g, Head{});
  if (is_last) {
    own_key = rotate(own_key, k_norm, angles, call.eps);
    const int64 page = slot / PAGE, within = slot % PAGE * (call.kv_heads * E) + head * E;
    store_key(call.k + page * call.k_stride + within, own_key);
    store_key(call.v + page * call.v_stride + within, own_value);
  }
  __syncthreads();
  Queries q;
  load_queries(q, address(room.q), lane);
  Sums sums = no_sums();
  for (int unit = share.next, stage = 0; unit < share.end; unit += WARPS, stage = stage + 1 == DEPTH ? 0 : stage + 1) {
    wait_for_copies();
    __syncwarp();
    char *there = ring + stage * 2 * TILE;
    if ((unit + 1) * UNIT > share.len - call.rows) {
      uint32 fresh = __ballot_sync(~0u, sources >= 0) & 0xffff;
      for (; fresh; fresh &= fresh - 1) {
        const int key = __ffs(fresh) - 1, source = __shfl_sync(~0u, sources, key);
        if (source == row) {
          put_key(there, key, own_key), put_key(there + TILE, key, own_value);
        } else {
          const uint16 *other = call.qkv + source * call.qkv_stride + (heads + head) * E;
          put_key(there, key, rotate(load_head(other), k_norm, load_angles(call, source), call.eps));
          put_key(there + TILE, key, load_head(other + call.kv_heads * E));
        }
      }
      __syncwarp();
    }
    attend(call, share, reader, unit * UNIT, address(there), q, sums);
    __syncwarp();
    const int coming = unit + DEPTH * WARPS;
    if (coming < share.end) ask(call, next, coming, head, address(there));
    commit_copies();
    if (coming + WARPS < share.end) {  // located here, as the table takes as long as the keys
      next = locate(call, share, row, coming + WARPS);
      if (__any_sync(~0u, next.source >= 0)) sources = next.source;
    }
  }

  put_sums<G>((float *)ring, room.own[warp], sums, lane);
  __syncthreads();
  await();
  send_sums(memory, room, rank);
  wait_for_sums(address(&room.there));  // then nobody sends to a block that has ended
  complete(call, room, row, head, rank, sink);
}
