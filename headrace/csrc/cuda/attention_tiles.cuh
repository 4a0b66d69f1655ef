// What attention of tiles of queries in half precision shares on Hopper, see prefill.cu and span_attention.cu: the
// products of a warpgroup, 64 rows by KEYS keys, and its softmax. Weights never leave registers: what is a result of the
// first product is the left operand of the second one as it is.
//
// After numbers.cuh and hopper.cuh. -DE: the head dim, a multiple of 8 up to 128; -DGROUPS: warpgroups
// that multiply, two or three; -DFP16: float16 instead of bfloat16.

#ifdef FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

// Columns of the product with values: the dims, or 64 or 128 where there are none for so many.
#if E <= 64
#define COLUMNS 64
#define SUMS(d) F32(d, 0)
#define SUMS_AND_OPERANDS S32 "}, {%32, %33, %34, %35}, %36"
#define ADDS "%37"
#elif E == 72
#define COLUMNS 72
#define SUMS(d) F32(d, 0), F4(d, 32)
#define SUMS_AND_OPERANDS S36 "}, {%36, %37, %38, %39}, %40"
#define ADDS "%41"
#elif E == 80
#define COLUMNS 80
#define SUMS(d) F32(d, 0), F8(d, 32)
#define SUMS_AND_OPERANDS S40 "}, {%40, %41, %42, %43}, %44"
#define ADDS "%45"
#elif E == 88
#define COLUMNS 88
#define SUMS(d) F32(d, 0), F8(d, 32), F4(d, 40)
#define SUMS_AND_OPERANDS S44 "}, {%44, %45, %46, %47}, %48"
#define ADDS "%49"
#elif E == 96
#define COLUMNS 96
#define SUMS(d) F48(d, 0)
#define SUMS_AND_OPERANDS S48 "}, {%48, %49, %50, %51}, %52"
#define ADDS "%53"
#elif E == 104
#define COLUMNS 104
#define SUMS(d) F48(d, 0), F4(d, 48)
#define SUMS_AND_OPERANDS S52 "}, {%52, %53, %54, %55}, %56"
#define ADDS "%57"
#elif E == 112
#define COLUMNS 112
#define SUMS(d) F48(d, 0), F8(d, 48)
#define SUMS_AND_OPERANDS S56 "}, {%56, %57, %58, %59}, %60"
#define ADDS "%61"
#else
#define COLUMNS 128
#define SUMS(d) F64(d, 0)
#define SUMS_AND_OPERANDS S64 "}, {%64, %65, %66, %67}, %68"
#define ADDS "%69"
#endif
#define TEXT_OF(x) #x
#define NUMBER_OF(x) TEXT_OF(x)

constexpr int KEYS = 128, HALVES = E > 64 ? 2 : 1;
// Rows of 64 dims, 128 bytes, swizzled: 16 bytes c of row r lie at place c ^ r % 8. Further dims are in a half of
// their own, behind all rows of the first one.
constexpr uint32 KEYS_HALF = KEYS * 128, BLOCK_BYTES = HALVES * KEYS_HALF;
constexpr float SLACK = 8.0f;  // the highest logit may be 2^SLACK times what weights are relative to: less rescaling

// Addresses in shared memory: two tiles of queries, rings of keys and values, TILE_BYTES that say which tiles they are
// of, a counter of COUNTER_BYTES, barriers.
template <int STAGES, uint32 Q_BYTES, uint32 TILE_BYTES, uint32 COUNTER_BYTES>
struct PlacesOf {
  uint32 queries, keys, values, tiles, counter, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full;
  __device__ explicit PlacesOf(uint32 start)
      : queries(start), keys(queries + 2 * Q_BYTES), values(keys + STAGES * BLOCK_BYTES),
        tiles(values + STAGES * BLOCK_BYTES), counter(tiles + TILE_BYTES), q_full(counter + COUNTER_BYTES),
        q_empty(q_full + 16), k_full(q_empty + 16), k_empty(k_full + 8 * STAGES), v_full(k_empty + 8 * STAGES),
        v_empty(v_full + 8 * STAGES), tile_full(v_empty + 8 * STAGES) {}
};

template <int STAGES>
struct RingOf {
  int stage = 0;
  uint32 parity = 0;
  __device__ void advance() {
    if (++stage == STAGES) { stage = 0; parity ^= 1; }
  }
};

__device__ void store_shared(uint32 to, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ int4 load_shared(uint32 from) {
  int4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
// Waits for the warpgroup.
__device__ __forceinline__ void sync_group(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}
// What threads have stored is seen by products and copies.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// products; a thread holds rows r and r + 8, r = lane / 4, of columns 8 j + 2 (lane % 4) and the next: d[4 j] and
// d[4 j + 1] of row r, d[4 j + 2] and d[4 j + 3] of row r + 8

// d [64, 128] = or += a [64, 16] b [128, 16]^T
__device__ void multiply_keys(float (&d)[64], uint64 a, uint64 b, int adds) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" S64 "}, %64, %65, p, 1, 1, 0, 0; }"
      : F64(d, 0) : "l"(a), "l"(b), "r"(adds));
}

// d [64, COLUMNS] = or += a [64, 16] (in registers) b [16, COLUMNS], of which b's columns lie together ("transposed")
__device__ void multiply_values(float (&d)[COLUMNS / 2], const uint32 *a, uint64 b, int adds) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, " ADDS ", 0;\n"
      "wgmma.mma_async.sync.aligned.m64n" NUMBER_OF(COLUMNS) "k16.f32." TYPE "." TYPE " {" SUMS_AND_OPERANDS
      ", p, 1, 1, 1; }"
      : SUMS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

// values [keys, dims] with dims as columns: the next 64 columns are a half further, the next 8 keys 1024 bytes
__device__ uint64 describe_columns(uint32 address) {
  return uint64((address & 0x3FFFF) >> 4) | (uint64(KEYS_HALF >> 4) << 16) | (uint64(1024 >> 4) << 32) | (1ull << 62);
}

// Q_HALF: bytes from a row's first 64 dims to the others.
template <uint32 Q_HALF>
__device__ void start_logits(float (&s)[64], uint32 queries, uint32 keys) {
  const uint64 a = describe_operand(queries), b = describe_operand(keys);
  begin_products();
#pragma unroll
  for (int step = 0; step < (E + 15) / 16; step++)
    multiply_keys(s, a + (step / 4 * Q_HALF + step % 4 * 32) / 16, b + (step / 4 * KEYS_HALF + step % 4 * 32) / 16,
                  step > 0);
  commit_products();
}

__device__ void start_sums(float (&o)[COLUMNS / 2], const uint32 (&p)[32], uint32 values, int adds) {
  const uint64 b = describe_columns(values);
  begin_products();
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++)
    multiply_values(o, p + 4 * step, b + step * (16 * 128 / 16), step > 0 ? 1 : adds);
  commit_products();
}

// numbers

__device__ uint32 pack(float low, float high) {
  uint32 both;
  asm("cvt.rn." TYPE "x2.f32 %0, %2, %1;" : "=r"(both) : "f"(low), "f"(high));
  return both;
}

// Softmax in base 2 of 64 rows: weights of a row are relative to `top`, which is at most SLACK below its highest logit.
struct Softmax {
  float top[2], total[2], shrink[2];  // top: before the scale; total: of the thread's own columns

  __device__ void reset() {
    top[0] = top[1] = __int_as_float(0xFF800000);
    total[0] = total[1] = 0.0f;
  }

  // Logits to weights. True if sums so far must be multiplied with `shrink`.
  __device__ bool weigh(float (&s)[64], float scale, float slack) {
    bool grows = false;
#pragma unroll
    for (int low = 0; low < 2; low++) {
      float most[4];
#pragma unroll
      for (int i = 0; i < 4; i++) most[i] = fmaxf(s[4 * i + 2 * low], s[4 * i + 2 * low + 1]);
#pragma unroll
      for (int i = 4; i < 16; i++)
        most[i % 4] = fmaxf(most[i % 4], fmaxf(s[4 * i + 2 * low], s[4 * i + 2 * low + 1]));
      float high = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      const float now = high > top[low] + slack ? high : top[low];
      // a row that has seen nothing so far: all weights are 0
      const float base = now == __int_as_float(0xFF800000) ? 0.0f : now * scale;
      grows |= now != top[low];
      // Exactly 1 where `top` stays, although `base` is rounded: sums are multiplied, or not, for all rows of a warp, and
      // a row's result must not depend on the others, of which those behind the tokens hold anything.
      shrink[low] = now == top[low] ? 1.0f : exp2_fast(fmaf(top[low], scale, -base));
      top[low] = now;
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 32; i++) {
        float &x = s[i / 2 * 4 + 2 * low + i % 2];
        x = exp2_fast(fmaf(x, scale, -base));
        sum[i % 4] += x;
      }
      total[low] = fmaf(total[low], shrink[low], (sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    return grows;
  }
};

__device__ void pack_weights(uint32 (&p)[32], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

// Words of four lanes, lane c's word j to word c of lane j.
__device__ void transpose(uint32 (&w)[4], int c) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int a = bit == 1 ? 2 * i : i, b = a + bit;
      const bool upper = c & bit;
      const uint32 got = __shfl_xor_sync(~0u, upper ? w[a] : w[b], bit);
      if (upper) w[a] = got; else w[b] = got;
    }
}

// Registers of a thread: those that others give are there for warpgroups that multiply.
__device__ __forceinline__ void keep_few_registers() {
#if GROUPS == 2
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#else
  asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
}
__device__ __forceinline__ void take_registers() {
#if GROUPS == 2
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#endif
}

// Barriers of two tiles of queries and of STAGES blocks of keys and of values, which are empty once so many warps have
// read them; by one thread.
template <int STAGES, class Places>
__device__ __forceinline__ void init_barriers(const Places &in, int readers) {
  for (int i = 0; i < 2; i++) {
    init_barrier(in.q_full + 8 * i, 1);
    init_barrier(in.q_empty + 8 * i, readers);
  }
  for (int stage = 0; stage < STAGES; stage++) {
    init_barrier(in.k_full + 8 * stage, 1);
    init_barrier(in.k_empty + 8 * stage, readers);
    init_barrier(in.v_full + 8 * stage, 1);
    init_barrier(in.v_empty + 8 * stage, readers);
  }
}
