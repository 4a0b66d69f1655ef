// Attention of a warp to a tile of KEYS keys and values in e4m3, which lie in shared memory.
//
// Codes become float16 in registers, exactly. What both products add up may be in any order: a lane takes dims of keys,
// and keys of values, as they lie in 16 bytes, and queries and weights follow. Keys and values are left operands, K Q^T
// and V^T P^T, as eight columns are enough for the heads.
//
// Macros: E, 64 or 128; G query heads of a kv head, up to 16; SOFTCAP 0 or 1. Before it: KEYS, a multiple of 16.

constexpr int HALVES = G > 8 ? 2 : 1, HEADS = 8 * HALVES;  // rows of queries
constexpr int STEPS = E / 16;                              // of a product over dims; also tiles of dims
constexpr int TILE = KEYS * E;                             // bytes of the keys of a tile; its values lie behind them
constexpr int PADDED = E + 4;                              // floats of a row of sums
constexpr float MASKED = -1.0e38f, LOG2_E = 1.4426950408889634f;
constexpr float SLACK = 8.f;  // the highest logit may be 2^SLACK times what weights are relative to: less rescaling

__device__ __forceinline__ uint32 address(const void *p) { return uint32(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ uint4 load_four(uint32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_two(uint32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}
// Four codes as two pairs of float16.
__device__ __forceinline__ void decode(uint32 codes, uint32 &low, uint32 &high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
      : "=r"(low), "=r"(high) : "r"(codes));
}
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ uint32 pack_cut(float low, float high) {  // larger ones become the largest
  return pack(fminf(fmaxf(low, -65504.f), 65504.f), fminf(fmaxf(high, -65504.f), 65504.f));
}
// A matrix of 8 by 8 of 16 bits over the lanes, transposed.
__device__ __forceinline__ uint32 transpose(uint32 v) {
  uint32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}
// d [16, 8] += a [16, 16] b [8, 16]^T in float16
__device__ __forceinline__ void multiply_halves(float *d, const uint32 *a, uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where 16 bytes of a tile's key lie: lines of 128 bytes, in which they do not conflict with what lanes read at once,
// that is 16 bytes 2t + j or t of keys 2i and 2i + 1, and 16 bytes 2i and 2i + 1 (dims of 64: halves of i) of keys 2t + j.
__device__ __forceinline__ uint32 place_of(int key, int chunk) {
  if (E == 128) return key * 128 + ((chunk ^ (key & 7)) << 4);
  return (key >> 1) * 128 + ((((key & 1) * 4 + chunk) ^ ((key >> 1 & 3) * 2)) << 4);
}

// What a lane reads of a tile.
struct Reader {
  uint32 keys, values[2];  // of key `row`; of the values of keys 2 column and 2 column + 1

  __device__ Reader() {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    keys = place_of(row, E / 64 * column);
    for (int i = 0; i < 2; i++)
      values[i] = E == 128 ? place_of(column * 2 + i, row) : place_of(column * 2 + i, row / 2) + row % 2 * 8;
  }
};

// Of heads row and 8 further: dims E / 4 column and on, four in a step.
using Queries = uint32[STEPS][HALVES][2];

struct Sums {
  float values[STEPS][HALVES][4];         // V^T P^T: see `put_sums`
  float top[HALVES][2], total[HALVES][2];  // of heads 2 column and one more; total: of the lane's own keys
};
__device__ __forceinline__ Sums no_sums() {
  Sums sums = {};
#pragma unroll
  for (int r = 0; r < HALVES; r++) sums.top[r][0] = sums.top[r][1] = MASKED;
  return sums;
}

// Weigh the values of a tile that lies at `at`; `first` is its first key. A share has the `len` of its request, its `first`
// key that is seen, and says whether it `sees` all of a tile.
template <class Call, class Share>
__device__ __forceinline__ void attend(
    const Call &call, const Share &share, const Reader &lane, int first, uint32 at, const Queries &q, Sums &sums
) {
  constexpr int PARTS = KEYS / 16;
  float logits[PARTS][HALVES][4];  // of keys row and row + 8, heads 2 column and one more
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    float odd[HALVES][4] = {};
#pragma unroll
    for (int r = 0; r < HALVES; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) logits[p][r][i] = 0.f;
#pragma unroll
    for (int j = 0; j < E / 64; j++) {
      const uint32 from = at + (lane.keys ^ j * 16) + p * 16 * E;
      const uint4 low = load_four(from), high = load_four(from + 8 * E);
      const uint32 codes[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        uint32 k[4];
        decode(codes[0][i], k[0], k[2]), decode(codes[1][i], k[1], k[3]);
#pragma unroll
        for (int r = 0; r < HALVES; r++)
          multiply_halves(i % 2 ? odd[r] : logits[p][r], k, q[4 * j + i][r][0], q[4 * j + i][r][1]);
      }
    }
#pragma unroll
    for (int r = 0; r < HALVES; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float &logit = logits[p][r][i];
        logit = (logit + odd[r][i]) * call.scale;
        if (SOFTCAP) logit = call.softcap * (1.f - 2.f * invert(exp2_fast(logit * 2.f * LOG2_E) + 1.f)) * LOG2_E;
      }
  }
  if (!share.sees(first)) {
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int position = first + p * 16 + threadIdx.x % 32 / 4 + i / 2 * 8;
        const bool is_seen = position >= share.first && position < share.len;
#pragma unroll
        for (int r = 0; r < HALVES; r++) logits[p][r][i] = is_seen ? logits[p][r][i] : MASKED;
      }
  }
  float top[HALVES][2];
  bool is_higher = false;
#pragma unroll
  for (int r = 0; r < HALVES; r++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      top[r][j] = logits[0][r][j];
#pragma unroll
      for (int p = 0; p < PARTS; p++) top[r][j] = fmaxf(top[r][j], fmaxf(logits[p][r][j], logits[p][r][2 + j]));
      is_higher |= top[r][j] > sums.top[r][j] + SLACK;
    }
  if (__any_sync(~0u, is_higher)) {
#pragma unroll
    for (int r = 0; r < HALVES; r++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top[r][j] = fmaxf(top[r][j], __shfl_xor_sync(~0u, top[r][j], step));
        const float now = fmaxf(sums.top[r][j], top[r][j]), fade = exp2_fast(sums.top[r][j] - now);
        sums.top[r][j] = now, sums.total[r][j] *= fade;
#pragma unroll
        for (int m = 0; m < STEPS; m++) sums.values[m][r][j] *= fade, sums.values[m][r][2 + j] *= fade;
      }
  }
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    uint32 weights[HALVES][2];
#pragma unroll
    for (int r = 0; r < HALVES; r++) {
      float *own = logits[p][r];
#pragma unroll
      for (int i = 0; i < 4; i++) own[i] = exp2_fast(own[i] - sums.top[r][i % 2]), sums.total[r][i % 2] += own[i];
      weights[r][0] = transpose(pack(own[0], own[1])), weights[r][1] = transpose(pack(own[2], own[3]));
    }
    uint32 codes[4][E / 32];  // of keys 2 column, 2 column + 1, and 8 further, dims E / 8 row and on
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32 from = at + lane.values[i % 2] + TILE + (p * 16 + i / 2 * 8) * E;
      if (E == 128) {
        const uint4 four = load_four(from);
        codes[i][0] = four.x, codes[i][1] = four.y, codes[i][E / 32 - 2] = four.z, codes[i][E / 32 - 1] = four.w;
      } else {
        const uint2 two = load_two(from);
        codes[i][0] = two.x, codes[i][1] = two.y;
      }
    }
#pragma unroll
    for (int m = 0; m < STEPS; m++) {
      const int order = m % 2 ? 0x7362 : 0x5140;  // two dims of two keys, a dim's side by side
      uint32 v[4];
      decode(__byte_perm(codes[0][m / 2], codes[1][m / 2], order), v[0], v[1]);
      decode(__byte_perm(codes[2][m / 2], codes[3][m / 2], order), v[2], v[3]);
#pragma unroll
      for (int r = 0; r < HALVES; r++) multiply_halves(sums.values[m][r], v, weights[r][0], weights[r][1]);
    }
  }
}

// Of a warp, into its ring: rows of heads, and the maximum and sum of each of the first COUNT. Sums m, 0 and 2, are of head
// 2 column and dims E / 8 row + 2 m and one more.
template <int COUNT>
__device__ __forceinline__ void put_sums(float *rows, float2 *own, const Sums &sums, int lane) {
  const int row = lane / 4, column = lane % 4;
#pragma unroll
  for (int r = 0; r < HALVES; r++)
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int m = 0; m < STEPS; m += 2)
        *(float4 *)(rows + (r * 8 + column * 2 + j) * PADDED + E / 8 * row + 2 * m) = float4{
            sums.values[m][r][j], sums.values[m][r][2 + j], sums.values[m + 1][r][j], sums.values[m + 1][r][2 + j]};
#pragma unroll
  for (int r = 0; r < HALVES; r++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float total = sums.total[r][j];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      const int head = lane * 2 + j + 8 * r;
      if (lane < 4 && (COUNT == HEADS || head < COUNT)) own[head] = float2{sums.top[r][j], total};
    }
}
