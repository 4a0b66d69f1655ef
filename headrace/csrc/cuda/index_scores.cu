// Scores of the lightning indexer for few tokens: of each key of a token's request the sum over heads of a weight times
// the rectified product with the head's query, both in e4m3.
//
// A block has one token and steps of 128 keys of its request, 16 for each warp. Keys are asked for first. Meanwhile a
// warp packs eight heads' queries, a lane four dims: rotated, rounded, turned by the Hadamard matrix in seven steps of
// sums and differences, and rounded to e4m3 with a scale for each head. Keys are the left operand of mma.m16n8k32, heads
// the columns of the right one. Which dims a thread holds does not matter as long as both operands agree: it has 32
// neighbours of each of its keys, so that it reads them as they lie.
//
// With NARROW keys are in MXFP4. A thread's 32 dims are one block then, whose codes it widens to e4m3 by a table of eight
// in two registers: the exponents of its block, so far below the key's largest as the scales are apart.
//
// Compiled by NVRTC. -DHEADS, a multiple of 8; -DNARROW, 0 or 1.

#include "numbers.cuh"

constexpr int DIMS = 128, WARPS = 8, THREADS = 32 * WARPS, KEYS = 16 * WARPS, TILES = HEADS / 8;
constexpr int PITCH = DIMS + 16;  // bytes of a head's codes in shared memory: no bank conflicts
constexpr float LEAST_AMAX = 1e-4f, LARGEST = 448.f;

struct Call {
  const uint16 *q;         // [T, HEADS, 128] bfloat16
  const int64 *positions;  // [T]
  const float *cos_sin;    // [L, rotated]: cosines, then sines
  const void *weights;     // [T, HEADS] float32 or bfloat16
  const int64 *requests;   // [T]
  const int64 *visible;    // [T]
  const int *table;        // [R, table_width]
  const char *keys;        // e4m3, or pairs of e2m1
  const char *scales;      // a float32 for each key, or four bytes of e8m0
  float *scores;           // [n, columns]
  uint64 weights_stride, table_width, page_bytes;
  int slot_bytes, per_page, first_token, columns, top_k, rotated, is_half, parts;  // parts: blocks of a token
  float scale;
};

struct Keys {  // a thread's parts of two keys, as they lie
  uint4 codes[2][2 - NARROW];
  uint32 scales[2];
};

// A word of eight e2m1 codes to two words of four e4m3 each; `low` and `high` are the table of sizes.
__device__ __forceinline__ void widen_codes(uint32 word, uint32 low, uint32 high, uint32 &first, uint32 &second) {
  const uint32 sizes = word & 0x77777777u, signs = word >> 1 & 0x44444444u;
  first = __byte_perm(low, high, sizes & 0xffff) | __byte_perm(0, 0x80808080u, signs & 0xffff);
  second = __byte_perm(low, high, sizes >> 16) | __byte_perm(0, 0x80808080u, signs >> 16);
}

// A thread's block of a key, which is the `block`-th, to 32 values in e4m3, and the key's scale.
__device__ __forceinline__ float widen_block(const uint4 &codes, uint32 scales, int block, uint32 (&out)[8]) {
  const uint32 largest = max(max(scales & 255, scales >> 8 & 255), max(scales >> 16 & 255, scales >> 24));
  const uint32 exponent = 12 + (scales >> 8 * block & 255) - largest;  // of 0.5, which is 32 under the largest scale
  const uint32 low = 0x0c080000u + exponent * 0x08080800u, high = 0x1c181410u + exponent * 0x08080808u;
  widen_codes(codes.x, low, high, out[0], out[1]), widen_codes(codes.y, low, high, out[2], out[3]);
  widen_codes(codes.z, low, high, out[4], out[5]), widen_codes(codes.w, low, high, out[6], out[7]);
  return __uint_as_float((largest - 6) << 23);
}

__device__ __forceinline__ void load_keys(const Call &call, const int *pages, Keys &keys, int first, int visible) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    // behind the last key: the last, whose score is not stored again
    const uint32 number = min(first + lane / 4 + 8 * i, visible - 1), at = number % uint32(call.per_page);
    const uint64 page = pages[number / uint32(call.per_page)];
    const int part = lane % 4 * (NARROW ? 16 : 32);
    const uint4 *from = (const uint4 *)(call.keys + page * call.page_bytes + at * call.slot_bytes + part);
#pragma unroll
    for (int k = 0; k < 2 - NARROW; k++) keys.codes[i][k] = from[k];
    keys.scales[i] = *(const uint32 *)(call.scales + page * call.page_bytes + at * 4);
  }
}

// Eight heads' queries of a warp to `codes`, and the heads' factors.
__device__ __forceinline__ void pack_queries(const Call &call, int64 token, uint8 *codes, float *factors) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 8;
  uint2 raw[8];
  float weights[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (first + i >= HEADS) break;
    raw[i] = *(const uint2 *)(call.q + (token * HEADS + first + i) * DIMS + lane * 4);
    const uint64 at = token * call.weights_stride + first + i;
    weights[i] = call.is_half ? widen(((const uint16 *)call.weights)[at]) : ((const float *)call.weights)[at];
  }
  float cosine[2] = {1.f, 1.f}, sine[2] = {0.f, 0.f};
  const int turn = lane * 2 - (DIMS - call.rotated) / 2;  // of pairs
  if (turn >= 0) {
    const float *angles = call.cos_sin + call.positions[token] * call.rotated + turn;
#pragma unroll
    for (int p = 0; p < 2; p++) cosine[p] = angles[p], sine[p] = angles[call.rotated / 2 + p];
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (first + i >= HEADS) break;
    const uint32 words[2] = {raw[i].x, raw[i].y};
    float v[4];
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const float even = widen(words[p] & 0xffff), odd = __uint_as_float(words[p] & 0xffff0000u);
      v[2 * p] = rounded(even * cosine[p] - odd * sine[p]), v[2 * p + 1] = rounded(odd * cosine[p] + even * sine[p]);
    }
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float other = __shfl_xor_sync(~0u, v[k], step);
        v[k] = lane & step ? other - v[k] : v[k] + other;
      }
    }
    float largest = 0.f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      v[k] *= 0.08838834764831845f;  // 128**-0.5
      largest = fmaxf(largest, fabsf(v[k]));
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float unit = __fdiv_rn(fmaxf(largest, LEAST_AMAX), LARGEST);
    uint32 word;
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high}; }"
        : "=r"(word)
        : "f"(__fdiv_rn(v[0], unit)), "f"(__fdiv_rn(v[1], unit)), "f"(__fdiv_rn(v[2], unit)),
          "f"(__fdiv_rn(v[3], unit)));
    *(uint32 *)(codes + (first + i) * PITCH + lane * 4) = word;
    if (lane == 0) factors[first + i] = weights[i] * (call.scale * unit);
  }
}

// d [16, 8] += a [16, 32] b [8, 32]^T in e4m3
__device__ __forceinline__ void multiply_codes(
    float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1
) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(THREADS) index_scores(const __grid_constant__ Call call) {
  __shared__ __align__(16) uint8 codes[HEADS * PITCH];
  __shared__ __align__(16) float factors[HEADS];
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
  const int parts = call.parts, nth = blockIdx.x / parts, part = blockIdx.x - nth * parts;
  const int64 token = call.first_token + nth;
  const int visible = int(call.visible[token]), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (visible <= call.top_k || part * KEYS >= visible) return;
  const int *pages = call.table + call.requests[token] * call.table_width;
  Keys keys;
  load_keys(call, pages, keys, part * KEYS + warp * 16, visible);
  pack_queries(call, token, codes, factors);
  __syncthreads();
  for (int first = part * KEYS; first < visible;) {
    float sums[2] = {0.f, 0.f};
#if NARROW
    uint32 a[2][8];
    const float scales[2] = {
        widen_block(keys.codes[0][0], keys.scales[0], lane % 4, a[0]),
        widen_block(keys.codes[1][0], keys.scales[1], lane % 4, a[1])
    };
#else
    const uint32 *a[2] = {(const uint32 *)keys.codes[0], (const uint32 *)keys.codes[1]};
    const float scales[2] = {__uint_as_float(keys.scales[0]), __uint_as_float(keys.scales[1])};
#endif
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const uint4 *from = (const uint4 *)(codes + (tile * 8 + lane / 4) * PITCH + lane % 4 * 32);
      const uint4 low = from[0], high = from[1];
      const uint32 b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float hits[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int k = 0; k < 4; k++)
        multiply_codes(hits, a[0][2 * k], a[1][2 * k], a[0][2 * k + 1], a[1][2 * k + 1], b[2 * k], b[2 * k + 1]);
      const float2 factor = *(const float2 *)(factors + tile * 8 + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 2; i++)
        sums[i] += fmaxf(hits[2 * i], 0.f) * factor.x + fmaxf(hits[2 * i + 1], 0.f) * factor.y;
    }
    const int number = first + warp * 16 + lane / 4;
    first += parts * KEYS;
    if (first < visible) load_keys(call, pages, keys, first + warp * 16, visible);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sums[i] += __shfl_xor_sync(~0u, sums[i], 1);
      sums[i] += __shfl_xor_sync(~0u, sums[i], 2);
      // a key's scale is positive, so that it may come behind the rectifier
      if (lane % 4 == 0 && number + 8 * i < visible)
        call.scores[uint64(nth) * call.columns + number + 8 * i] = sums[i] * scales[i];
    }
  }
}
