// Paged causal attention of ragged chunks on Hopper, in half precision: q [T, H, E], pages of keys and values
// [P, page_size, K, E], out [T, H, E].
//
// A tile is `tokens` tokens of a chunk with all H / K query heads of a kv head, 64 * GROUPS rows, heads fastest.
// Programs stay and claim one tile after the other, in the order of the plan. One warp claims; one asks for queries and
// keys and one for values, 128 keys at a time, by TMA into rings of STAGES; GROUPS warpgroups have 64 rows each. Blocks
// of keys come from the last one down. A warpgroup starts the logits of a block, be it the first one of the next tile,
// then the sums of the block before, and makes weights of these logits while the sums run. Weights never leave registers:
// what is a result of the first product is the left operand of the second one as it is.
//
// With SPLITS a plan may divide the blocks of keys of a tile, which is claimed once a split: see prefill_splits.cuh.
// Compiled by NVRTC. -DE: 64 or 128; -DGROUPS: 2, or 3 for 64 dims; -DFP16: float16 instead of bfloat16; -DSOFTCAP.

#include "numbers.cuh"
#include "hopper.cuh"
#include "attention_tiles.cuh"

constexpr int ROWS = 64 * GROUPS, STAGES = E == 64 ? 4 : 2;
constexpr int AHEAD = 6;   // tiles are claimed while fewer blocks of keys have been claimed and not been asked for
constexpr int SLOTS = 16;  // of tiles: more than AHEAD + STAGES + 3, see claim_tiles
constexpr int THREADS = 128 * (GROUPS + 1), MATH_WARPS = 4 * GROUPS;
constexpr uint32 Q_HALF = ROWS * 128, Q_BYTES = HALVES * Q_HALF;
constexpr float LOG2_E = 1.4426950408889634f;

#ifdef SPLITS
constexpr bool HAS_SPLITS = true;
typedef int4 Block;  // (request, first token of its chunk, split, number of splits): those with several come first
#else
constexpr bool HAS_SPLITS = false;
typedef int2 Block;  // (request, first token of its chunk)
#endif

struct Call {
  const Block *blocks;                           // [N], request -1 behind the last
  int *claims;                                   // [2] zeros, which the last program leaves as zeros; with SPLITS [3],
                                                 // and how many blocks there are with several splits
  const int *query_start, *kv_lens, *table;      // [R + 1], [R], [R, *]
  const void *sinks;                             // [H], or null
  char *out;
  int64 table_stride;
  int tiles, kv_heads, group, tokens;            // N * K, K, H / K, of a tile
  int page_size, window, has_wide_sinks;         // window: at most 2^30; sinks in float32, else as q
  float scale, softcap;                          // scale includes log2(e); with a soft-cap, 1 / softcap instead
#ifdef SPLITS
  float *parts;                                  // [splits * K, ROWS, E] sums
  float2 *stats;                                 // [splits * K, ROWS] (highest logit in base 2, total)
#endif
};

struct Tile {
  int request, first, head, begin, query_len, kv_len;  // request -1: no more; begin: of the chunk among all tokens
  int place, end, low;  // of the first token; behind the last key that any row sees; the first one
  int split, splits, slot;  // with SPLITS: which of so many shares of its blocks of keys, and its place in the workspace

  __device__ void find_keys(const Call &call) {
    place = kv_len - query_len + first;
    end = min(place + call.tokens, kv_len);
    low = max(place - call.window + 1, 0);
  }
  // The first block of a share. A plan has no more splits than a tile has blocks, so that none is empty.
  __device__ int find_share(int which) const {
    return (low / KEYS + ((end - 1) / KEYS - low / KEYS + 1) * which / splits) * KEYS;
  }
  __device__ int last_block() const {
    if constexpr (HAS_SPLITS) return find_share(split + 1) - KEYS;
    return (end - 1) / KEYS * KEYS;
  }
  __device__ int first_block() const {
    if constexpr (HAS_SPLITS) return find_share(split);
    return low / KEYS * KEYS;
  }
  __device__ int count_blocks() const { return (last_block() - first_block()) / KEYS + 1; }
  // Whether some row does not see all keys of a block.
  __device__ bool is_masked(const Call &call, int at) const {
    return at + KEYS - 1 > place || at + call.window < place + call.tokens;
  }
  // Whether a block has slots that may hold anything: behind the last key, or of pages before the window.
  __device__ bool is_ragged(int at) const { return at + KEYS > kv_len || at < low; }
};

constexpr int SLOT_BYTES = 32;  // of a tile in shared memory

using Places = PlacesOf<STAGES, Q_BYTES, SLOTS * SLOT_BYTES, 8>;  // counter: blocks of keys asked for
using Ring = RingOf<STAGES>;

__device__ void store_shared(uint32 to, int v) {
  asm volatile("st.volatile.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ int load_shared_int(uint32 from) {
  int v;
  asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
// The nth tile of this program.
__device__ Tile read_tile(const Call &call, const Places &in, int nth) {
  const int slot = nth % SLOTS;
  wait_for(in.tile_full + 8 * slot, nth / SLOTS % 2);
  const int4 a = load_shared(in.tiles + slot * SLOT_BYTES), b = load_shared(in.tiles + slot * SLOT_BYTES + 16);
  Tile tile{a.x, a.y, a.z, a.w, b.x, b.y};
  tile.split = b.z & 0xFFFF, tile.splits = b.z >> 16, tile.slot = b.w;
  tile.find_keys(call);
  return tile;
}

// The thread that claims tiles, soon enough for what they need to arrive, but not earlier: other programs may be free
// sooner. A slot is written again when its tile has been read: there are AHEAD tiles at most that no key has been asked
// for; keys have a stage when all have come to the tile of the block STAGES before; values, and the tile before, which
// is read again when it is stored, are behind that.
__device__ void claim_tiles(const Call &call, const Places &in) {
  int index = blockIdx.x, claimed = 0;
#ifdef SPLITS
  // Where tiles are divided not even the first one goes by the program's number, see `merge_splits`. All of this is
  // asked for at once.
  const Block own = call.blocks[index / call.kv_heads];
  const int order = atomicAdd(call.claims + 2, 1), divided = call.claims[3];
  if (divided) index = order;
#endif
  for (int nth = 0;; nth++) {
    Tile tile{-1};
    if (index < call.tiles) {
#ifdef SPLITS
      const Block block = nth || divided ? call.blocks[index / call.kv_heads] : own;
      tile.split = block.z, tile.splits = block.w, tile.slot = index;
#else
      const Block block = call.blocks[index / call.kv_heads];
#endif
      tile.request = block.x, tile.first = block.y, tile.head = index % call.kv_heads;
    }
    const uint32 slot = in.tiles + nth % SLOTS * SLOT_BYTES;
    if (tile.request >= 0) {
      tile.begin = call.query_start[tile.request];
      tile.query_len = call.query_start[tile.request + 1] - tile.begin, tile.kv_len = call.kv_lens[tile.request];
      store_shared(slot + 16, tile.query_len, tile.kv_len, tile.split | tile.splits << 16, tile.slot);
    }
    store_shared(slot, tile.request, tile.first, tile.head, tile.begin);
    arrive(in.tile_full + 8 * (nth % SLOTS));
    if (tile.request < 0) break;
    tile.find_keys(call);
    claimed += tile.count_blocks();
    // no program takes a second split before others, which began a moment later, have their first one
    while (claimed - load_shared_int(in.counter) >= (HAS_SPLITS && tile.splits > 1 ? 1 : AHEAD)) __nanosleep(64);
#ifdef SPLITS
    index = divided ? atomicAdd(call.claims + 2, 1) : gridDim.x + atomicAdd(call.claims, 1);
  }
#else
    index = gridDim.x + atomicAdd(call.claims, 1);
  }
  if (atomicAdd(call.claims + 1, 1) == gridDim.x - 1) call.claims[0] = call.claims[1] = 0;
#endif
}

// Dims from `dim` on of `head`, of a few tokens, or of slots of a page.
__device__ void load_rows(uint32 to, const TensorMap *map, uint32 bar, int dim, int head, int row, int page) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(dim), "r"(head), "r"(row), "r"(page) : "memory");
}

// A warp that asks for keys, or values, of all tiles; with keys for queries too. A lane has a box of a block: slots of
// a page, or 128 of them, by 64 dims.
template <bool IS_KEYS>
__device__ void fetch_blocks(const Call &call, const Places &in, const TensorMap *map, const TensorMap *q_map) {
  const uint32 ring_at = IS_KEYS ? in.keys : in.values, full = IS_KEYS ? in.k_full : in.v_full,
               empty = IS_KEYS ? in.k_empty : in.v_empty;
  const int lane = threadIdx.x % 32, each = min(call.page_size, KEYS), boxes = KEYS / each;
  const int half = lane / boxes, from = lane % boxes * each, shift = 31 - __clz(call.page_size);
  const uint32 place = half * KEYS_HALF + from * 128;
  Ring ring;
  int asked = 0;
  for (int nth = 0;; nth++) {
    const Tile tile = read_tile(call, in, nth);
    if (tile.request < 0) break;
    if (IS_KEYS && lane == 0) {
      const int which = nth % 2;
      const uint32 full = in.q_full + 8 * which;
      wait_for(in.q_empty + 8 * which, nth / 2 % 2 ^ 1);
      expect_bytes(full, HALVES * call.tokens * call.group * 128);
#pragma unroll
      for (int i = 0; i < HALVES; i++)
        load_rows(in.queries + which * Q_BYTES + i * Q_HALF, q_map, full, i * 64, 0, tile.head,
                  tile.begin + tile.first);
    }
    __syncwarp();
    const int *table = call.table + tile.request * call.table_stride;
    const int last = tile.last_block(), first = tile.first_block();
    auto find_page = [&](int at) {  // the null page where there are no keys: entries there may be of any request
      const int key = at + from;
      return half < HALVES && key < tile.kv_len && key + each > tile.low ? table[key >> shift] : 0;
    };
    int page = find_page(last);
#pragma unroll 1
    for (int at = last; at >= first; at -= KEYS) {
      const int next = at > first ? find_page(at - KEYS) : 0;
      wait_for(empty + 8 * ring.stage, ring.parity ^ 1);
      if (lane == 0) expect_bytes(full + 8 * ring.stage, BLOCK_BYTES);
      __syncwarp();
      if (half < HALVES)
        load_rows(ring_at + ring.stage * BLOCK_BYTES + place, map, full + 8 * ring.stage, half * 64, tile.head,
                  (at + from) & (call.page_size - 1), page);
      page = next;
      ring.advance();
      if (IS_KEYS && lane == 0) store_shared(in.counter, ++asked);
      __syncwarp();
    }
  }
}

// Logits of keys that a row does not see become -inf. `seen`: of the thread's rows, how many keys are before the first
// one that is not seen any more, counted from the thread's first column; `unseen`: how many before the first that is.
__device__ void mask_logits(float (&s)[64], const int (&seen)[2], const int (&unseen)[2]) {
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const int column = i / 4 * 8 + i % 2, low = i / 2 % 2;
    if (column >= seen[low] || column < unseen[low]) s[i] = __int_as_float(0xFF800000);
  }
}

// Weights of 0 would not make numbers of what nobody wrote: zeros there. All warpgroups write them, each before it
// reads.
__device__ void clear_values(const Tile &tile, int at, uint32 values, int group) {
  const int begin = tile.low - at, end = tile.kv_len - at;
  for (int i = threadIdx.x % 128; i < KEYS * 8; i += 128) {
    const int row = i / 8;
    if (row < begin || row >= end)
#pragma unroll
      for (int half = 0; half < HALVES; half++) store_shared(values + half * KEYS_HALF + i * 16, 0, 0, 0, 0);
  }
  fence_async();
  sync_group(group);
}

__device__ float load_sink(const Call &call, int head) {
  if (call.has_wide_sinks) return static_cast<const float *>(call.sinks)[head];
  const uint32 sink = static_cast<const uint16 *>(call.sinks)[head];
#ifdef FP16
  return half_of(sink, false);
#else
  return widen(sink);
#endif
}

struct Rows {  // a thread's two rows of a tile: the token, from the tile's first, and the head, from its kv head's
  int token[2], head[2];
  __device__ Rows(int row, int group) {
#pragma unroll
    for (int low = 0; low < 2; low++) token[low] = (row + 8 * low) / group, head[low] = (row + 8 * low) % group;
  }
};

// Rows of a tile behind the end of its chunk are those of another request: they are not written.
__device__ void store_tile(
    const Call &call, const Tile &tile, const float (&o)[E / 2], const Softmax &softmax, const Rows &rows
) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int low = 0; low < 2; low++) {
    float total = softmax.total[low];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int token = tile.first + rows.token[low], head = tile.head * call.group + rows.head[low];
    const bool is_own = rows.token[low] < call.tokens && token < tile.query_len;
    if (call.sinks && is_own) {
#ifdef SOFTCAP
      const float base = softmax.top[low] * LOG2_E;
#else
      const float base = softmax.top[low] * call.scale;
#endif
      total += exp2_fast(fmaf(load_sink(call, head), LOG2_E, -base));
    }
    const float share = invert(total);
    char *to = call.out + ((int64(tile.begin) + token) * (call.kv_heads * call.group) + head) * (E * 2) + c * 16;
#pragma unroll
    for (int i = 0; i < E / 32; i++) {
      uint32 w[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = (4 * i + j) * 4 + 2 * low;
        w[j] = pack(o[at] * share, o[at + 1] * share);
      }
      transpose(w, c);
      if (is_own) *reinterpret_cast<uint4 *>(to + i * 64) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

#include "prefill_splits.cuh"

// A warpgroup that multiplies.
__device__ void attend_tiles(const Call &call, const Places &in, int group) {
  const int lane = threadIdx.x % 32;
  const Rows rows(group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4, call.group);
#ifdef SOFTCAP
  const float scale = LOG2_E;
#else
  const float scale = call.scale;
#endif
  const float slack = SLACK / scale;
  Tile tile = read_tile(call, in, 0);
  if (tile.request < 0) return;
  int nth = 0, at = tile.last_block(), first = tile.first_block();
  float s[64], o[E / 2];
  uint32 p[32];
  Softmax softmax;
  Ring k_ring, v_ring;

  // the current block of keys, and for its first one the tile's queries
  auto find_queries = [&]() { return in.queries + nth % 2 * Q_BYTES + group * (64 * 128); };
  auto await_queries = [&]() { wait_for(in.q_full + 8 * (nth % 2), nth / 2 % 2); };
  auto await_keys = [&]() { wait_for(in.k_full + 8 * k_ring.stage, k_ring.parity); };
  auto release_keys = [&]() {
    if (lane == 0) {
      arrive(in.k_empty + 8 * k_ring.stage);
      if (at == first) arrive(in.q_empty + 8 * (nth % 2));
    }
    k_ring.advance();
  };
  auto limit_logits = [&]() {
#ifdef SOFTCAP
#pragma unroll
    for (int i = 0; i < 64; i++)  // softcap * tanh(x), of which x is s * scale
      s[i] = call.softcap * (1.0f - 2.0f * invert(exp2_fast(s[i] * call.scale * (2.0f * LOG2_E)) + 1.0f));
#endif
    if (tile.is_masked(call, at)) {
      int seen[2], unseen[2];
#pragma unroll
      for (int low = 0; low < 2; low++) {
        seen[low] = tile.place + rows.token[low] + 1 - at - lane % 4 * 2;
        unseen[low] = seen[low] - call.window;
      }
      mask_logits(s, seen, unseen);
    }
  };
  auto await_values = [&]() {
    wait_for(in.v_full + 8 * v_ring.stage, v_ring.parity);
    if (tile.is_ragged(at)) clear_values(tile, at, in.values + v_ring.stage * BLOCK_BYTES, group);
  };
  auto release_values = [&]() {
    if (lane == 0) arrive(in.v_empty + 8 * v_ring.stage);
    v_ring.advance();
  };

  softmax.reset();
  await_queries();
  await_keys();
  start_logits<Q_HALF>(s, find_queries(), in.keys + k_ring.stage * BLOCK_BYTES);
  wait_products<0>();
  fence_sums(s);
  release_keys();
  limit_logits();
  softmax.weigh(s, scale, slack);
  pack_weights(p, s);
  int adds = 0;
#pragma unroll 1
  for (;;) {
    await_values();
    const bool is_last = at == first;
    if (is_last) {
      const Tile next = read_tile(call, in, nth + 1);
      if (next.request < 0) break;
      tile = next, nth++;
      at = tile.last_block(), first = tile.first_block();
      await_queries();
    } else {
      at -= KEYS;
    }
    await_keys();
    start_logits<Q_HALF>(s, find_queries(), in.keys + k_ring.stage * BLOCK_BYTES);
    start_sums(o, p, in.values + v_ring.stage * BLOCK_BYTES, adds);
    wait_products<1>();
    fence_sums(s);
    release_keys();
    limit_logits();
    const Softmax before = softmax;
    if (is_last) softmax.reset();
    const bool grows = softmax.weigh(s, scale, slack);
    fence_sums(s);
    // The wait is in a branch, or ptxas would move it before the weights, which are made while the sums run.
    if (is_last) {
      wait_products<0>();
      fence_sums(o);
      release_values();
      finish_tile(call, read_tile(call, in, nth - 1), o, before, rows, group);
    } else {
      const bool scales = __any_sync(~0u, grows);
      wait_products<0>();
      fence_sums(o);
      release_values();
      if (scales) {
#pragma unroll
        for (int i = 0; i < E / 2; i++) o[i] *= softmax.shrink[i / 2 % 2];
      }
    }
    adds = !is_last;
    pack_weights(p, s);
  }
  start_sums(o, p, in.values + v_ring.stage * BLOCK_BYTES, adds);
  wait_products<0>();
  fence_sums(o);
  finish_tile(call, tile, o, softmax, rows, group);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
            const __grid_constant__ TensorMap v_map, const __grid_constant__ Call call) {
  extern __shared__ char unaligned[];
  const Places in((shared_address(unaligned) + 1023) & ~1023u);
  if (threadIdx.x == 0) {
    init_barriers<STAGES>(in, MATH_WARPS);
    store_shared(in.counter, 0);
    for (int slot = 0; slot < SLOTS; slot++) init_barrier(in.tile_full + 8 * slot, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // nothing is read before the wait: in the first layer the previous kernels may have written the plan as well
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    keep_few_registers();
    if (warp == 0) fetch_blocks<true>(call, in, &k_map, &q_map);
    if (warp == 1) fetch_blocks<false>(call, in, &v_map, &q_map);
    if (warp == 2 && threadIdx.x % 32 == 0) claim_tiles(call, in);
  } else {
    take_registers();
    attend_tiles(call, in, warp / 4 - 1);
#ifdef SPLITS
    merge_splits(call);
#endif
  }
}
