// Attention of a warp to a tile of KEYS keys and values in bfloat16, which lie in shared memory: the interface of
// `e4m3_keys.cuh`. Queries are the left operand, Q K^T and P V.
//
// Macros: E, a multiple of 64; G query heads of a kv head, up to 16; SOFTCAP 0 or 1. Before it: KEYS, which is 16.

constexpr int HEADS = G > 8 ? 16 : 8;               // rows of queries
constexpr int STEPS = E / 16;                       // of a product over dims
constexpr int TILE = KEYS * 2 * E;                  // bytes of the keys of a tile; its values lie behind them
constexpr int PADDED = E + 8;                       // floats of a row of sums, against bank conflicts
constexpr float MASKED = -1.0e38f, LOG2_E = 1.4426950408889634f;
static_assert(KEYS == 16, "");

__device__ __forceinline__ uint32 address(const void *p) { return uint32(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void load_matrices(uint32 *d, uint32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed(uint32 *d, uint32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from) : "memory");
}
// Where 16 bytes of a tile's key lie: where they do not conflict with those of the next keys.
__device__ __forceinline__ uint32 place_of(int key, int eight) { return key * 2 * E + ((eight ^ (key & 7)) << 4); }

struct Reader {};  // a lane computes what it reads
using Queries = uint32[STEPS][HEADS / 4];  // left operands

// Sums of a warp: of values, and of weights, both relative to the maximum; rows lane / 4, and 8 more.
struct Sums { float values[E / 8][4], top[2], total[2]; };

__device__ __forceinline__ Sums no_sums() {
  Sums sums = {};
  sums.top[0] = sums.top[1] = MASKED;
  return sums;
}

// Weigh the values of a tile that lies at `tile`; `first` is its first key. A share has the `len` of its request and its
// `first` key that is seen.
template <class Call, class Share>
__device__ __forceinline__ void attend(
    const Call &call, const Share &share, Reader, int first, uint32 tile, const Queries &q, Sums &sums
) {
  const int lane = threadIdx.x % 32;
  float scores[2][2][4] = {};  // of eight keys; of even and odd steps, so that products wait less for one another
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    uint32 k[4];
    load_matrices(k, tile + place_of(lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
    const uint32 low0 = q[step][0], low1 = q[step][HEADS / 8], high0 = HEADS > 8 ? q[step][1] : 0,
                 high1 = HEADS > 8 ? q[step][HEADS / 4 - 1] : 0;
    multiply(scores[0][step % 2], low0, high0, low1, high1, k[0], k[1]);
    multiply(scores[1][step % 2], low0, high0, low1, high1, k[2], k[3]);
  }
  uint32 weights[2][2] = {};  // [eight keys][row]
#pragma unroll
  for (int r = 0; r < HEADS / 8; r++) {
    float logits[2][2], top = sums.top[r];
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float logit = (scores[t][0][2 * r + j] + scores[t][1][2 * r + j]) * call.scale;
        if (SOFTCAP) logit = call.softcap * (1.f - 2.f / (exp2_fast(logit * 2.f * LOG2_E) + 1.f)) * LOG2_E;
        const int position = first + t * 8 + lane % 4 * 2 + j;
        logits[t][j] = position >= share.first && position < share.len ? logit : MASKED;
        top = fmaxf(top, logits[t][j]);
      }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float fade = exp2_fast(sums.top[r] - top);
    sums.top[r] = top, sums.total[r] *= fade;
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const float low = exp2_fast(logits[t][0] - top), high = exp2_fast(logits[t][1] - top);
      sums.total[r] += low + high, weights[t][r] = narrow(low, high);
    }
#pragma unroll
    for (int t = 0; t < E / 8; t++) sums.values[t][2 * r] *= fade, sums.values[t][2 * r + 1] *= fade;
  }
#pragma unroll
  for (int t = 0; t < E / 8; t += 2) {
    uint32 v[4];
    load_transposed(v, tile + TILE + place_of(lane % 16, t + lane / 16));
    multiply(sums.values[t], weights[0][0], weights[0][1], weights[1][0], weights[1][1], v[0], v[1]);
    multiply(sums.values[t + 1], weights[0][0], weights[0][1], weights[1][0], weights[1][1], v[2], v[3]);
  }
}

// Of a warp, into its ring: rows of the first COUNT heads, and the maximum and sum of each.
template <int COUNT>
__device__ __forceinline__ void put_sums(float *rows, float2 *own, const Sums &sums, int lane) {
#pragma unroll
  for (int r = 0; r < HEADS / 8; r++) {
    float total = sums.total[r];
    total += __shfl_xor_sync(~0u, total, 1), total += __shfl_xor_sync(~0u, total, 2);
    const int g = lane / 4 + 8 * r;
    if (g >= COUNT) continue;
#pragma unroll
    for (int t = 0; t < E / 8; t++)
      *(float2 *)(rows + g * PADDED + t * 8 + lane % 4 * 2) = float2{sums.values[t][2 * r], sums.values[t][2 * r + 1]};
    if (lane % 4 == 0) own[g].x = sums.top[r], own[g].y = total;
  }
}
