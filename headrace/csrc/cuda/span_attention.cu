// Attention within spans on Hopper, in half precision: every token of a span sees all of them. q, k and v [T, H, E] in
// any strides, out [T, H, E].
//
// A tile is 64 * GROUPS rows of a span of one head. Programs stay and claim one tile after the other. One warp claims and
// asks for queries and keys, one for values, 128 keys at a time, by TMA into rings of STAGES; GROUPS warpgroups have 64
// rows each. A warpgroup starts the logits of a block, be it the first one of the next tile, then the sums of the block
// before, and makes weights of these logits while the sums run. A warpgroup without rows in a tile gives its blocks back.
//
// Compiled by NVRTC. -DE: a multiple of 8 up to 128; -DREST: columns asked for beyond the 64th, see `load_rows`;
// -DGROUPS: 2 or 3; -DFP16: float16 instead of bfloat16.

#include "numbers.cuh"
#include "hopper.cuh"
#include "attention_tiles.cuh"

constexpr int ROWS = 64 * GROUPS, STAGES = E > 64 ? 2 : 4;
constexpr int SLOTS = 8;  // of tiles, at least STAGES + 4: see `fetch_keys`
constexpr int THREADS = 128 * (GROUPS + 1), MATH_WARPS = 4 * GROUPS;
constexpr uint32 Q_HALF = ROWS * 128, Q_BYTES = HALVES * Q_HALF;
constexpr uint32 ROW_BYTES = 2 * (64 + (HALVES - 1) * REST);  // that are asked for
constexpr int CLAIM_AHEAD = 3;  // blocks of keys that are still to be asked for when the next tile is claimed

using Ring = RingOf<STAGES>;

struct Maps { TensorMap q[2], k[2], v[2]; };  // [T, H, E]: the first 64 dims, and the others

struct Call {
  const int *starts;  // [spans + 1]
  int *claims;        // [2] zeros, which the last program leaves as zeros
  char *out;
  int spans, heads;
  float scale;        // includes log2(e)
};

struct Tile {  // of a span of `length` tokens from `begin` on, rows from `first` on; begin -1: no more
  int begin, length, first, head;
  __device__ int last_block() const { return (length - 1) / KEYS * KEYS; }
  __device__ bool has_rows(int group) const { return first + 64 * group < length; }
};

constexpr int SLOT_BYTES = 16;  // of a tile in shared memory

using Places = PlacesOf<STAGES, Q_BYTES, SLOTS * SLOT_BYTES, 0>;

// The nth tile of this program.
__device__ Tile read_tile(const Places &in, int nth) {
  const int slot = nth % SLOTS;
  wait_for(in.tile_full + 8 * slot, nth / SLOTS % 2);
  const int4 found = load_shared(in.tiles + slot * SLOT_BYTES);
  return Tile{found.x, found.y, found.z, found.w};
}

// Finds tiles of rising numbers, by a warp: those of a span follow each other, of a span those of a head.
struct Finder {
  int first = 0, before = 0;  // the first of 32 spans, and tiles before it
  __device__ Tile find(const Call &call, int index) {
    const int lane = threadIdx.x % 32;
    for (; first < call.spans; first += 32) {
      const int span = first + lane;
      const int begin = span < call.spans ? call.starts[span] : 0;
      const int length = span < call.spans ? call.starts[span + 1] - begin : 0;
      const int rows = (length + ROWS - 1) / ROWS;
      int behind = rows * call.heads;  // tiles up to the lane's span
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, behind, step);
        if (lane >= step) behind += other;
      }
      const uint32 lanes = __ballot_sync(~0u, before + behind > index);
      if (lanes) {
        const int own = __ffs(lanes) - 1, within = index - before - (behind - rows * call.heads);
        const int divisor = rows > 0 ? rows : 1;
        return Tile{__shfl_sync(~0u, begin, own), __shfl_sync(~0u, length, own),
                    __shfl_sync(~0u, within % divisor * ROWS, own), __shfl_sync(~0u, within / divisor, own)};
      }
      before += __shfl_sync(~0u, behind, 31);
    }
    return Tile{-1, 0, 0, 0};
  }
};

__device__ void load_box_of(uint32 to, const TensorMap *map, uint32 bar, int dim, int head, int row) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %4, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(dim), "r"(head), "r"(row) : "memory");
}

// Rows of a head, in one half or two. Dims behind the last one arrive as zeros. A box of the second half is as wide as
// the product needs; its rows are as far apart as those of the first one, since that is what they are swizzled by.
__device__ void load_rows(uint32 to, uint32 half, const TensorMap *maps, uint32 bar, int head, int row) {
#pragma unroll
  for (int i = 0; i < HALVES; i++) load_box_of(to + i * half, maps + i, bar, i * 64, head, row);
}

// The warp that claims tiles, and asks for their queries and keys. Of a tile that is claimed, keys of the STAGES blocks
// before it are in use at most, and their tiles, and the tile before those, whose rows are being written.
__device__ void fetch_keys(const Call &call, const Places &in, const Maps *maps) {
  const int lane = threadIdx.x % 32;
  int index = blockIdx.x;
  Finder finder;
  Ring ring;
#pragma unroll 1
  for (int nth = 0;; nth++) {
    const Tile tile = finder.find(call, index);
    if (lane == 0) {
      store_shared(in.tiles + nth % SLOTS * SLOT_BYTES, tile.begin, tile.length, tile.first, tile.head);
      arrive(in.tile_full + 8 * (nth % SLOTS));
    }
    if (tile.begin < 0) break;
    if (lane == 0) {
      const int which = nth % 2, last = tile.last_block();
      wait_for(in.q_empty + 8 * which, nth / 2 % 2 ^ 1);
      expect_bytes(in.q_full + 8 * which, ROWS * ROW_BYTES);
      load_rows(in.queries + which * Q_BYTES, Q_HALF, maps->q, in.q_full + 8 * which, tile.head,
                tile.begin + tile.first);
      const int claimed_at = max(last - (CLAIM_AHEAD - 1) * KEYS, 0);
#pragma unroll 1
      for (int at = 0; at <= last; at += KEYS) {
        if (at == claimed_at) index = gridDim.x + atomicAdd(call.claims, 1);
        wait_for(in.k_empty + 8 * ring.stage, ring.parity ^ 1);
        expect_bytes(in.k_full + 8 * ring.stage, KEYS * ROW_BYTES);
        load_rows(in.keys + ring.stage * BLOCK_BYTES, KEYS_HALF, maps->k, in.k_full + 8 * ring.stage, tile.head,
                  tile.begin + at);
        ring.advance();
      }
    }
    __syncwarp();
    index = __shfl_sync(~0u, index, 0);
  }
  if (lane == 0 && atomicAdd(call.claims + 1, 1) == gridDim.x - 1) call.claims[0] = call.claims[1] = 0;
}

// The thread that asks for values.
__device__ void fetch_values(const Places &in, const Maps *maps) {
  Ring ring;
#pragma unroll 1
  for (int nth = 0;; nth++) {
    const Tile tile = read_tile(in, nth);
    if (tile.begin < 0) break;
    const int last = tile.last_block();
#pragma unroll 1
    for (int at = 0; at <= last; at += KEYS) {
      wait_for(in.v_empty + 8 * ring.stage, ring.parity ^ 1);
      expect_bytes(in.v_full + 8 * ring.stage, KEYS * ROW_BYTES);
      load_rows(in.values + ring.stage * BLOCK_BYTES, KEYS_HALF, maps->v, in.v_full + 8 * ring.stage, tile.head,
                tile.begin + at);
      ring.advance();
    }
  }
}

// Logits behind the end of a span become -inf. `seen`: keys before it, counted from the thread's first column.
__device__ void mask_logits(float (&s)[64], int seen) {
#pragma unroll
  for (int i = 0; i < 64; i++)
    if (i / 4 * 8 + i % 2 >= seen) s[i] = __int_as_float(0xFF800000);
}

// Zeros in place of values behind the end of a span: weights of 0 would not make numbers of what another span may have.
// All warpgroups write them, each before it reads.
__device__ void clear_values(uint32 values, int end, int group) {
  for (int i = end * 8 + threadIdx.x % 128; i < KEYS * 8; i += 128)
#pragma unroll
    for (int half = 0; half < HALVES; half++) store_shared(values + half * KEYS_HALF + i * 16, 0, 0, 0, 0);
  fence_async();
  sync_group(group);
}

// Rows behind the end of a span are those of another one: they are not written.
__device__ void store_tile(
    const Call &call, const Tile &tile, const float (&o)[COLUMNS / 2], const float (&totals)[2], int row
) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int low = 0; low < 2; low++) {
    float total = totals[low];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float share = invert(total);
    const int token = tile.first + row + 8 * low;
    const bool is_own = token < tile.length;
    char *to = call.out + ((int64(tile.begin) + token) * call.heads + tile.head) * (E * 2);
#pragma unroll
    for (int i = 0; i < E / 32; i++) {
      uint32 w[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = (4 * i + j) * 4 + 2 * low;
        w[j] = pack(o[at] * share, o[at + 1] * share);
      }
      transpose(w, c);
      if (is_own) *reinterpret_cast<uint4 *>(to + i * 64 + c * 16) = make_uint4(w[0], w[1], w[2], w[3]);
    }
#pragma unroll
    for (int i = E / 32 * 4; i < E / 8; i++)  // what is left of the dims
      if (is_own)
        *reinterpret_cast<uint32 *>(to + i * 16 + c * 4) =
            pack(o[4 * i + 2 * low] * share, o[4 * i + 2 * low + 1] * share);
  }
}

// A warpgroup that multiplies. Few registers are left beside s, o and p: what is needed once a tile is read again.
__device__ void attend_tiles(const Call &call, const Places &in, int group) {
  const int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const float scale = call.scale, slack = SLACK / scale;
  float s[64], o[COLUMNS / 2];
  uint32 p[32];
  Softmax softmax;
  int nth = 0, at = 0, length = 0;
  uint32 block = 0;  // of all that this program has, whose values are next

  auto find_stage = [](uint32 block) { return block % STAGES; };
  auto await = [&](uint32 full, uint32 block) { wait_for(full + 8 * find_stage(block), block / STAGES % 2); };
  auto release = [&](uint32 empty, uint32 block) {
    if (lane == 0) arrive(empty + 8 * find_stage(block));
  };
  auto await_queries = [&]() { wait_for(in.q_full + 8 * (nth % 2), nth / 2 % 2); };
  auto release_keys = [&](uint32 block) {
    release(in.k_empty, block);
    if (at + KEYS >= length && lane == 0) arrive(in.q_empty + 8 * (nth % 2));
  };
  auto find_logits = [&](uint32 block) {
    start_logits<Q_HALF>(s, in.queries + nth % 2 * Q_BYTES + group * (64 * 128),
                         in.keys + find_stage(block) * BLOCK_BYTES);
  };
  auto limit_logits = [&]() {
    if (at + KEYS > length) mask_logits(s, length - at - lane % 4 * 2);
  };
  auto await_values = [&]() {
    await(in.v_full, block);
    if (at + KEYS > length) clear_values(in.values + find_stage(block) * BLOCK_BYTES, length - at, group);
  };
  auto add_values = [&](bool adds) { start_sums(o, p, in.values + find_stage(block) * BLOCK_BYTES, adds); };

#pragma unroll 1
  for (;; nth++) {
    const Tile tile = read_tile(in, nth);
    if (tile.begin < 0) break;
    length = tile.length;
    if (!tile.has_rows(group)) {  // by one lane, or others might miss a phase
      if (lane == 0) {
        await_queries();
        uint32 own = block;
#pragma unroll 1
        for (at = 0; at < length; at += KEYS, own++) {
          await(in.k_full, own);
          release_keys(own);
          await(in.v_full, own);
          release(in.v_empty, own);
        }
      }
      block += (length + KEYS - 1) / KEYS;
      __syncwarp();
      continue;
    }
    at = 0;
    softmax.reset();
    await_queries();
    await(in.k_full, block);
    find_logits(block);
    wait_products<0>();
    fence_sums(s);
    release_keys(block);
    limit_logits();
    softmax.weigh(s, scale, slack);
    pack_weights(p, s);
    bool adds = false;
#pragma unroll 1
    for (;; block++) {
      await_values();
      const bool is_last = at + KEYS >= length;
      if (is_last) {
        const Tile next = read_tile(in, nth + 1);
        if (next.begin < 0 || !next.has_rows(group)) break;
        length = next.length, nth++;
        at = 0;
        await_queries();
      } else {
        at += KEYS;
      }
      await(in.k_full, block + 1);
      find_logits(block + 1);
      add_values(adds);
      wait_products<1>();
      fence_sums(s);
      release_keys(block + 1);
      limit_logits();
      const float totals[2] = {softmax.total[0], softmax.total[1]};
      if (is_last) softmax.reset();
      const bool grows = softmax.weigh(s, scale, slack);
      fence_sums(s);
      // The wait is in a branch, or ptxas would move it before the weights, which are made while the sums run.
      if (is_last) {
        wait_products<0>();
        fence_sums(o);
        release(in.v_empty, block);
        store_tile(call, read_tile(in, nth - 1), o, totals, row);
      } else {
        const bool scales = __any_sync(~0u, grows);
        wait_products<0>();
        fence_sums(o);
        release(in.v_empty, block);
        if (scales) {
#pragma unroll
          for (int i = 0; i < COLUMNS / 2; i++) o[i] *= softmax.shrink[i / 2 % 2];
        }
      }
      adds = !is_last;
      pack_weights(p, s);
    }
    add_values(adds);
    wait_products<0>();
    fence_sums(o);
    release(in.v_empty, block++);
    store_tile(call, read_tile(in, nth), o, softmax.total, row);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    span_attention(const __grid_constant__ Maps maps, const __grid_constant__ Call call) {
  extern __shared__ char unaligned[];
  const Places in((shared_address(unaligned) + 1023) & ~1023u);
  if (threadIdx.x == 0) {
    init_barriers<STAGES>(in, MATH_WARPS);
    for (int slot = 0; slot < SLOTS; slot++) init_barrier(in.tile_full + 8 * slot, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    keep_few_registers();
    if (warp == 0) fetch_keys(call, in, &maps);
    if (warp == 1 && threadIdx.x % 32 == 0) fetch_values(in, &maps);
  } else {
    take_registers();
    attend_tiles(call, in, warp / 4 - 1);
  }
}
