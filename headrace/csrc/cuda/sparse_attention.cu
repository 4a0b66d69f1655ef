// Sparse latent attention on Hopper: 64 heads of a token attend to latents at slots of its own, each latent being key
// and value. Slots are packed: 448 values in e4m3 with a power of two for each 64, 64 rotated in bf16.
//
// A block takes one token, up to 64 heads and every `splits`-th group of 64 slots after the other. One warpgroup reads
// slots and unpacks them to bf16 in shared memory, two groups of slots ahead. Two warpgroups multiply: logits over half
// of the dims each, which they add up for half of the slots each, then half of the dims each over all 64 slots. Their
// sums of 64 x 256 stay in registers.
//
// Compiled by NVRTC.

#include "numbers.cuh"
#include "hopper.cuh"

constexpr int DIM = 512, ROTATED = 64, HEADS = 64, SLOTS = 64, STAGES = 2;
constexpr int VALUE_BYTES = 576, SCALE_BYTES = 8, CODES = DIM - ROTATED, GROUPS = CODES / 64;
// A tile has 64 rows of 64 dims, 128 bytes each, swizzled: 16 bytes c of row r lie at place c ^ r % 8.
constexpr int TILE_BYTES = 64 * 128, VECTOR_BYTES = DIM / 64 * TILE_BYTES;  // of 64 vectors, 64 dims after the other
constexpr int THREADS = 384, MATH_THREADS = 256, MATH_WARPS = 8;  // 128 threads unpack
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float SLACK = 8.0f;  // the highest logit may be 2^SLACK times what weights are relative to: less rescaling

struct Seen {  // slots that tokens attend to
  const char *values, *scales;  // of packed slots; null: none
  uint64 page_bytes;
  const int64 *numbers;         // [X, width]
  const int64 *counts;          // [T]
  const int64 *rows;            // [T], of `numbers`; null: row t of token t
  int width, per_page;
};

struct Places {  // addresses in shared memory
  uint32 queries, stages, weights, extremes, angles, exchange, full, empty;
  __device__ explicit Places(uint32 start)
      : queries(start), stages(queries + VECTOR_BYTES), weights(stages + STAGES * VECTOR_BYTES),
        extremes(weights + TILE_BYTES), angles(extremes + 4 * HEADS * 4), exchange(angles + ROTATED * 4),
        full(exchange + MATH_THREADS * 64), empty(full + 8 * STAGES) {}
};

struct Call {
  const char *q;          // [T, H, 512] bfloat16
  const int64 *positions;
  const float *cos_sin;   // [L, 64]
  const float *sinks;     // [H]
  char *out;              // [T, H, 512] bfloat16
  float *sums, *stats;    // [T, splits, H, 512] and [T, splits, H, 2]: highest logit (log2), sum of weights; if split
  float norm_eps, scale;
  int tokens, heads, splits;
};

__device__ void sync_math() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

__device__ void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ void store_shared(uint32 to, uint32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

__device__ void store_shared(uint32 to, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ uint4 load_shared(uint32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

__device__ float load_shared_float(uint32 from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
  return v;
}

// matrix operands

// the same tiles as [slots, dims] with dims as columns: the next 64 columns are a tile further, 8 slots are 1024 bytes
__device__ uint64 describe_columns(uint32 address) {
  return uint64((address & 0x3FFFF) >> 4) | (uint64(TILE_BYTES >> 4) << 16) | (uint64(1024 >> 4) << 32) | (1ull << 62);
}

// d [64, 64] += a [64, 16] b [64, 16]^T; a thread holds rows r and r + 8, r = lane / 4, of columns 8 j + 2 (lane % 4)
// and the next: d[4 j] and d[4 j + 1] of row r, d[4 j + 2] and d[4 j + 3] of row r + 8
__device__ void multiply_keys(float (&d)[32], uint64 a, uint64 b, int keeps) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" S32 "}, %32, %33, p, 1, 1, 0, 0; }"
      : F32(d, 0) : "l"(a), "l"(b), "r"(keeps));
}

// d [64, 256] += a [64, 16] b [16, 256], of which b's columns lie together ("transposed")
__device__ void multiply_values(float (&d)[128], uint64 a, uint64 b, int keeps) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" S128 "}, %128, %129, p, 1, 1, 0, 1; }"
      : F128(d, 0) : "l"(a), "l"(b), "r"(keeps));
}

__device__ void finish_products() {
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// numbers

__device__ uint32 multiply_pairs(uint32 a, uint32 b) {
  uint32 c;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// Two codes in the high bytes of 16 bits each, times 2^60 * `scale`: e4m3's bits 4 places to the right are bfloat16's
// of 2^-120 times the value, subnormal ones included. Two factors, as no bfloat16 holds 2^120 times a large scale.
__device__ uint32 widen(uint32 codes, uint32 scale) {
  const uint32 bits = (codes & 0x80008000u) | ((codes >> 4) & 0x07F007F0u);
  return multiply_pairs(multiply_pairs(bits, 0x5D805D80u), scale);
}

__device__ uint4 load_global(const char *from) { return *reinterpret_cast<const uint4 *>(from); }

__device__ uint4 load_once(const char *from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Which groups of slots a block goes through: all items of the grid's stride, and of an item every splits-th group.
struct Walk {
  const Call &call;
  const Seen &window, &entries;
  int item, items, head_blocks;
  int token, head, split;                          // of the item
  int window_count, entry_count, groups, group;    // `group`: the current one; groups of the window come first
  int64 entry_row;

  __device__ Walk(const Call &call, const Seen &window, const Seen &entries)
      : call(call), window(window), entries(entries), head_blocks((call.heads + HEADS - 1) / HEADS) {
    items = call.tokens * head_blocks * call.splits;
  }
  __device__ bool open(int nth) {  // the item of that number, at its first group; false behind the last
    item = nth;
    if (item >= items) return false;
    split = item % call.splits;
    head = item / call.splits % head_blocks * HEADS;
    token = item / call.splits / head_blocks;
    const int64 count = window.counts[token];
    window_count = count < window.width ? int(count) : window.width;
    entry_count = 0;
    if (entries.values) {
      const int64 more = entries.counts[token];
      entry_count = more < entries.width ? int(more) : entries.width;
      entry_row = entries.rows ? entries.rows[token] : token;
    }
    groups = window_groups() + (entry_count + SLOTS - 1) / SLOTS;
    group = split;
    return true;
  }
  __device__ int window_groups() const { return (window_count + SLOTS - 1) / SLOTS; }
  __device__ bool is_inside() const { return group < groups; }
  __device__ int slots_left() const {
    const int ahead = window_groups();
    return group < ahead ? window_count - group * SLOTS : entry_count - (group - ahead) * SLOTS;
  }
  // to the next group, of a later item if this has no more; false behind the last
  __device__ bool advance() {
    group += call.splits;
    return is_inside() || open_next();
  }
  __device__ bool open_next() {
    while (open(item + gridDim.x))
      if (is_inside()) return true;
    return false;
  }
  // The slot number in row `row` of the current group. Behind the last slot: the last, whose weight is zero.
  __device__ int64 number(int row) const {
    const int ahead = window_groups();
    if (group < ahead) return window.numbers[int64(token) * window.width + min(group * SLOTS + row, window_count - 1)];
    return entries.numbers[entry_row * entries.width + min((group - ahead) * SLOTS + row, entry_count - 1)];
  }
  __device__ bool is_in_window() const { return group < window_groups(); }
};

__device__ void prefetch(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// The unpacking threads ask for the queries of an item that the others come to later.
__device__ void announce_queries(const Call &call, const Walk &walk) {
  const int heads = min(HEADS, call.heads - walk.head);
  const char *from = call.q + (int64(walk.token) * call.heads + walk.head) * (DIM * 2);
  for (int line = threadIdx.x; line < heads * (DIM * 2 / 128); line += 128) prefetch(from + line * 128);
}

struct Row {  // where a slot lies
  const char *values;
  uint2 scales;
  __device__ void find(const Seen &seen, uint32 number) {
    const uint32 page = number / uint32(seen.per_page), at = number % uint32(seen.per_page);
    values = seen.values + page * seen.page_bytes + at * VALUE_BYTES;
    scales = *reinterpret_cast<const uint2 *>(seen.scales + page * seen.page_bytes + at * SCALE_BYTES);
  }
};

struct Group {  // a thread's two rows of a group of slots
  uint32 numbers[2];
  bool is_window;
  __device__ void load(const Walk &walk, int first) {
    is_window = walk.is_in_window();
    numbers[0] = uint32(walk.number(first));
    numbers[1] = uint32(walk.number(first + 8));
  }
  // Ask for both rows, 576 bytes and their scales: each of a row's 4 lanes for some of its lines of 128 bytes.
  __device__ void announce(const Seen &seen, int c) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32 page = numbers[half] / uint32(seen.per_page), at = numbers[half] % uint32(seen.per_page);
      const char *values = seen.values + page * seen.page_bytes + at * VALUE_BYTES;
      prefetch(values + c * 128);
      if (c == 0) prefetch(values + 512);
      if (c == 1) prefetch(seen.scales + page * seen.page_bytes + at * SCALE_BYTES);
    }
  }
};

// The warpgroup that unpacks. A warp has 16 rows of a group, 8 at a time: 4 lanes a row, 16 bytes each. While one row
// is unpacked, the next is on its way into the same registers, and those of two groups later to the second-level cache.
__device__ void unpack_slots(const Call &call, Walk &walk, uint32 stages, uint32 full, uint32 empty) {
  const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, first = threadIdx.x / 32 * 16 + r;
  if (!walk.open(blockIdx.x) || (!walk.is_inside() && !walk.open_next())) return;
  const Seen &window = walk.window, &entries = walk.entries;
  Group now, next, later;
  now.load(walk, first);
  bool has_next = walk.advance();
  if (has_next) next.load(walk, first);
  uint4 raw[GROUPS + 2];
  Row row;
  row.find(now.is_window ? window : entries, now.numbers[0]);
  const int turned = r % 2;  // an odd row's halves in the other order: no two rows write to the same banks
#pragma unroll
  for (int g = 0; g < GROUPS; g++) raw[g] = load_global(row.values + g * 64 + c * 16);
#pragma unroll
  for (int h = 0; h < 2; h++) raw[GROUPS + h] = load_global(row.values + CODES + (c + 4 * (h ^ turned)) * 16);
  if (has_next) next.announce(next.is_window ? window : entries, c);

  int stage = 0;
  uint32 parity = 0;
  for (bool goes_on = true; goes_on;) {
    const int item = walk.item;
    const bool has_later = has_next && walk.advance();
    if (has_later) {
      later.load(walk, first);
      if (walk.item != item) announce_queries(call, walk);
    }
    wait_for(empty + 8 * stage, parity ^ 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint2 scales = row.scales;
      const uint32 to = stages + stage * VECTOR_BYTES + (first + 8 * half) * 128;
      if (half == 0) {
        row.find(now.is_window ? window : entries, now.numbers[1]);
      } else {
        if (has_next) row.find(next.is_window ? window : entries, next.numbers[0]);
        if (has_later) later.announce(later.is_window ? window : entries, c);
      }
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const uint4 codes = raw[g];
        raw[g] = load_global(row.values + g * 64 + c * 16);
        // e8m0 to bfloat16's exponent, times 2^60
        const uint32 scale = (((g < 4 ? scales.x : scales.y) >> (g % 4 * 8) & 255) + 60) * 0x00800080u;
        const uint32 tile = to + g * TILE_BYTES;
        store_shared(tile + ((2 * c ^ r) * 16), widen(__byte_perm(codes.x, 0, 0x1404), scale),
                     widen(__byte_perm(codes.x, 0, 0x3424), scale), widen(__byte_perm(codes.y, 0, 0x1404), scale),
                     widen(__byte_perm(codes.y, 0, 0x3424), scale));
        store_shared(tile + ((2 * c + 1 ^ r) * 16), widen(__byte_perm(codes.z, 0, 0x1404), scale),
                     widen(__byte_perm(codes.z, 0, 0x3424), scale), widen(__byte_perm(codes.w, 0, 0x1404), scale),
                     widen(__byte_perm(codes.w, 0, 0x3424), scale));
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int chunk = c + 4 * (h ^ turned);
        const uint4 v = raw[GROUPS + h];
        raw[GROUPS + h] = load_global(row.values + CODES + chunk * 16);
        store_shared(to + GROUPS * TILE_BYTES + ((chunk ^ r) * 16), v.x, v.y, v.z, v.w);
      }
    }
    show_to_tensor_cores();
    arrive(full + 8 * stage);
    if (++stage == STAGES) { stage = 0; parity ^= 1; }
    goes_on = has_next;
    now = next;
    next = later;
    has_next = has_later;
  }
}

// Queries [64, 512] of an item to shared memory: RMS norm over a head, rotation of its last dims. A warp has 8 heads, a
// lane dims 8 lane to 8 lane + 7 and the same behind 256. The item's angles go to shared memory too.
__device__ void prepare_queries(const Call &call, const Walk &walk, const Places &in, int warp, int lane) {
  uint4 raw[8][2];  // all on their way at once
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int head = walk.head + warp * 8 + i;
    const char *from = call.q + (int64(walk.token) * call.heads + head) * (DIM * 2) + lane * 16;
#pragma unroll
    for (int half = 0; half < 2; half++)
      raw[i][half] = head < call.heads ? load_once(from + half * 512) : make_uint4(0, 0, 0, 0);
  }
  const float *angles = call.cos_sin + call.positions[walk.token] * ROTATED;
  float cosine[4] = {1, 1, 1, 1}, sine[4] = {0, 0, 0, 0};
  if (lane >= 24) {  // the last dims, in pairs
    const float4 c = *reinterpret_cast<const float4 *>(angles + (lane - 24) * 4);
    const float4 s = *reinterpret_cast<const float4 *>(angles + ROTATED / 2 + (lane - 24) * 4);
    cosine[0] = c.x, cosine[1] = c.y, cosine[2] = c.z, cosine[3] = c.w;
    sine[0] = s.x, sine[1] = s.y, sine[2] = s.z, sine[3] = s.w;
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        store_shared(in.angles + ((lane - 24) * 4 + i) * 4, __float_as_uint(cosine[i]));
        store_shared(in.angles + (ROTATED / 2 + (lane - 24) * 4 + i) * 4, __float_as_uint(sine[i]));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float square = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32 words[4] = {raw[i][half].x, raw[i][half].y, raw[i][half].z, raw[i][half].w};
#pragma unroll
      for (int w = 0; w < 4; w++)
        square += widen(words[w]) * widen(words[w]) + widen_high(words[w]) * widen_high(words[w]);
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
    const float inverse = rsqrtf(square / DIM + call.norm_eps);
    const int row = warp * 8 + i;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32 words[4] = {raw[i][half].x, raw[i][half].y, raw[i][half].z, raw[i][half].w};
      uint32 done[4];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const float even = widen(words[w]) * inverse, odd = widen_high(words[w]) * inverse;
        done[w] = half ? narrow(even * cosine[w] - odd * sine[w], odd * cosine[w] + even * sine[w]) : narrow(even, odd);
      }
      const int chunk = half * 32 + lane;  // of 16 bytes
      store_shared(in.queries + chunk / 8 * TILE_BYTES + row * 128 + ((chunk % 8 ^ row % 8) * 16), done[0], done[1],
                   done[2], done[3]);
    }
  }
}

// A warp's sums [16, 256] times `share`, rotated back in the last dims, through its own 8 KiB of shared memory.
__device__ void store_output(const Call &call, const Walk &walk, const float (&sums)[128], const float (&share)[2],
                             int side, uint32 through, uint32 angles, int warp, int lane) {
  const int r = lane / 4, c = lane % 4;
#pragma unroll
  for (int j = 0; j < 32; j++) {
    float cosine = 1.0f, sine = 0.0f;
    if (side == 1 && j >= 24) {
      cosine = load_shared_float(angles + ((j - 24) * 4 + c) * 4);
      sine = load_shared_float(angles + (ROTATED / 2 + (j - 24) * 4 + c) * 4);
    }
#pragma unroll
    for (int low = 0; low < 2; low++) {
      const float even = sums[4 * j + 2 * low] * share[low], odd = sums[4 * j + 2 * low + 1] * share[low];
      store_shared(through + (r + 8 * low) * 512 + ((j ^ r) * 16) + c * 4,
                   narrow(even * cosine + odd * sine, odd * cosine - even * sine));
    }
  }
  __syncwarp();
#pragma unroll 4
  for (int row = 0; row < 16; row++) {
    const int head = walk.head + warp * 16 + row;
    const uint4 v = load_shared(through + row * 512 + ((lane ^ row % 8) * 16));
    char *to = call.out + (int64(walk.token) * call.heads + head) * (DIM * 2) + side * 512 + lane * 16;
    if (head < call.heads) *reinterpret_cast<uint4 *>(to) = v;
  }
}

__device__ void store_sums(const Call &call, const Walk &walk, const float (&sums)[128], int side, int warp, int lane) {
  const int64 place = (int64(walk.token) * call.splits + walk.split) * call.heads;
#pragma unroll
  for (int low = 0; low < 2; low++) {
    const int head = walk.head + warp * 16 + lane / 4 + 8 * low;
    if (head < call.heads) {
      float *to = call.sums + (place + head) * DIM + side * 256 + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 32; j++)
        *reinterpret_cast<float2 *>(to + 8 * j) = make_float2(sums[4 * j + 2 * low], sums[4 * j + 2 * low + 1]);
    }
  }
}

__device__ void store_stats(const Call &call, const Walk &walk, int head, float most, float total) {
  const int64 place = (int64(walk.token) * call.splits + walk.split) * call.heads + head;
  *reinterpret_cast<float2 *>(call.stats + place * 2) = make_float2(most, total);
}

// A warpgroup that multiplies; `side` 0 or 1: which 256 dims, and of which 32 slots of a group it makes weights.
__device__ void attend_groups(const Call &call, Walk &walk, int side, const Places &in) {
  const int thread = threadIdx.x - 128, lane = threadIdx.x % 32, warp = thread % 128 / 32, r = warp * 16 + lane / 4;
  const float scale = call.scale * LOG2_E;
  const uint64 q = describe_operand(in.queries), p = describe_operand(in.weights);
  int stage = 0;
  uint32 parity = 0;
  for (int item = blockIdx.x; walk.open(item); item += gridDim.x) {
    if (call.splits > 1 && !walk.is_inside()) {  // nothing is left for this split: its sums are not read
      const int head = walk.head + thread;
      if (thread < HEADS && head < call.heads) store_stats(call, walk, head, __int_as_float(0xFF800000), 0.0f);
      continue;
    }
    float sinks[2];
#pragma unroll
    for (int low = 0; low < 2; low++) {
      const int head = walk.head + r + 8 * low;
      sinks[low] = head < call.heads ? call.sinks[head] * LOG2_E : 0.0f;
    }
    prepare_queries(call, walk, in, thread / 32, lane);
    show_to_tensor_cores();
    sync_math();
    float sums[128];
#pragma unroll
    for (int i = 0; i < 128; i++) sums[i] = 0.0f;
    const float none = __int_as_float(0xFF800000);
    float most[2] = {none, none}, total[2] = {0.0f, 0.0f};  // of rows r and r + 8; `total`: of own slots alone
    for (; walk.is_inside(); walk.group += call.splits) {
      wait_for(in.full + 8 * stage, parity);
      const uint32 vectors = in.stages + stage * VECTOR_BYTES;
      float s[16];
      {
        float both[32];
        const uint64 k = describe_operand(vectors);
        begin_products();
#pragma unroll
        for (int step = 0; step < DIM / 32; step++) {
          const uint32 at = ((step / 4 + side * 4) * TILE_BYTES + step % 4 * 32) >> 4;
          multiply_keys(both, q + at, k + at, step > 0);
        }
        finish_products();
        const uint32 own = in.exchange + thread * 16, other = in.exchange + (thread ^ 128) * 16;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float *given = both + 4 * j;  // of the other side's slots
          store_shared(own + j * 4096, __float_as_uint(side ? given[0] : given[16]),
                       __float_as_uint(side ? given[1] : given[17]), __float_as_uint(side ? given[2] : given[18]),
                       __float_as_uint(side ? given[3] : given[19]));
        }
        sync_math();
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const uint4 v = load_shared(other + j * 4096);
          const float *mine = both + 4 * j;
          s[4 * j] = (side ? mine[16] : mine[0]) + __uint_as_float(v.x);
          s[4 * j + 1] = (side ? mine[17] : mine[1]) + __uint_as_float(v.y);
          s[4 * j + 2] = (side ? mine[18] : mine[2]) + __uint_as_float(v.z);
          s[4 * j + 3] = (side ? mine[19] : mine[3]) + __uint_as_float(v.w);
        }
      }
      const int left = walk.slots_left();
      float high[2] = {none, none};
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const int slot = side * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2;
        s[i] = slot < left ? s[i] * scale : none;
        high[i / 2 % 2] = fmaxf(high[i / 2 % 2], s[i]);
      }
#pragma unroll
      for (int low = 0; low < 2; low++) {
        high[low] = fmaxf(high[low], __shfl_xor_sync(~0u, high[low], 1));
        high[low] = fmaxf(high[low], __shfl_xor_sync(~0u, high[low], 2));
        if (lane % 4 == 0) store_shared(in.extremes + (side * 64 + r + 8 * low) * 4, __float_as_uint(high[low]));
      }
      sync_math();
      float shrink[2];
      bool grows = false;
#pragma unroll
      for (int low = 0; low < 2; low++) {
        high[low] = fmaxf(high[low], load_shared_float(in.extremes + ((side ^ 1) * 64 + r + 8 * low) * 4));
        const float now = high[low] > most[low] + SLACK ? high[low] : most[low];
        grows |= now != most[low];
        shrink[low] = exp2_fast(most[low] - now);
        most[low] = now;
        total[low] *= shrink[low];
      }
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int low = 0; low < 2; low++) {
          const float a = exp2_fast(s[4 * j + 2 * low] - most[low]), b = exp2_fast(s[4 * j + 2 * low + 1] - most[low]);
          total[low] += a + b;
          store_shared(in.weights + (r + 8 * low) * 128 + ((side * 4 + j ^ r % 8) * 16) + lane % 4 * 4, narrow(a, b));
        }
      show_to_tensor_cores();
      if (__any_sync(~0u, grows)) {
#pragma unroll
        for (int i = 0; i < 128; i++) sums[i] *= shrink[i / 2 % 2];
      }
      sync_math();
      {
        const uint64 v = describe_columns(vectors + side * (4 * TILE_BYTES));
        begin_products();
#pragma unroll
        for (int step = 0; step < SLOTS / 16; step++)
          multiply_values(sums, p + (step * 32 >> 4), v + (step * 2048 >> 4), 1);
        finish_products();
      }
      if (lane == 0) arrive(in.empty + 8 * stage);
      if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
#pragma unroll
    for (int low = 0; low < 2; low++) {
      total[low] += __shfl_xor_sync(~0u, total[low], 1);
      total[low] += __shfl_xor_sync(~0u, total[low], 2);
      if (lane % 4 == 0) store_shared(in.extremes + (128 + side * 64 + r + 8 * low) * 4, __float_as_uint(total[low]));
    }
    sync_math();  // also: everybody has read the in.queries
    float share[2];
#pragma unroll
    for (int low = 0; low < 2; low++) {
      total[low] += load_shared_float(in.extremes + (128 + (side ^ 1) * 64 + r + 8 * low) * 4);
      const int head = walk.head + r + 8 * low;
      if (call.splits > 1) {
        if (side == 0 && lane % 4 == 0 && head < call.heads) store_stats(call, walk, head, most[low], total[low]);
      } else {
        share[low] = 1.0f / (total[low] + exp2_fast(sinks[low] - most[low]));
      }
    }
    if (call.splits > 1) {
      store_sums(call, walk, sums, side, warp, lane);
    } else {
      store_output(call, walk, sums, share, side, in.queries + thread / 32 * 8192, in.angles, warp, lane);
    }
    sync_math();  // before the next in.queries overwrite what outputs went through
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_slots(const __grid_constant__ Call call, const __grid_constant__ Seen window,
                 const __grid_constant__ Seen entries) {
  extern __shared__ char unaligned[];
  const Places in((shared_address(unaligned) + 1023) & ~1023u);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(in.full + 8 * stage, 128);
      init_barrier(in.empty + 8 * stage, MATH_WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
  Walk walk(call, window, entries);
  if (threadIdx.x < 128) {
    // of 504 registers that three warpgroups have at launch
    asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
    unpack_slots(call, walk, in.stages, in.full, in.empty);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    attend_groups(call, walk, threadIdx.x < 256 ? 0 : 1, in);
  }
}
