// How products with MXFP4 decoded in registers are summed up: low codes of a step's bytes (inputs 0 to 63) are decoded
// while products with high ones (64 to 127) run, and the other way round. After mxfp4_steps.cuh. Needs of the source:
// PRODUCTS of half a step, HIGH and SHIFTS, AHEAD, CODE_BYTES, GRAIN, and `decode_all`.

// Operands of half a step: of so many products four registers each.
using Half = uint32[PRODUCTS][4];

// The products of half a step with rows of x, of which the first N count.
template <int N>
__device__ __forceinline__ void multiply_half(float (&sums)[ROWS / 2], Half &a, uint64 rows) {
#pragma unroll
  for (int i = 0; i < 4 * PRODUCTS; ++i) pin(a[i / 4][i % 4]);  // nothing is decoded behind the fence
  begin_products();
#pragma unroll
  for (int nth = 0; nth < PRODUCTS; ++nth) multiply<N>(sums, a[nth], rows + 2 * nth, 1);
  commit_products();
}

// words[piece][half]: bytes of row 8 * half, inputs 16 * piece + lane % 4 * 4 + {0, 1, 2, 3} in their low halves, and
// 64 further in their high ones. Even inputs are the bytes 0 and 2; odd ones are there once words are shifted.
struct Codes {
  uint32 words[4][2], odd[4][2], scales[2];

  // Of a step, of a stage that is there. Beyond the last step what was there before is read, and not used.
  __device__ __forceinline__ void read(const Scales &from, int stage, const Place &place, int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[2 * i][0]), "=r"(words[2 * i][1]), "=r"(words[2 * i + 1][0]), "=r"(words[2 * i + 1][1])
                   : "r"(place.codes[i] + stage * CODE_BYTES));
    from.get(step, scales);
  }
  __device__ __forceinline__ void shift() {
#pragma unroll
    for (int i = 0; i < 8; ++i) odd[i / 2][i % 2] = words[i / 2][i % 2] >> 8;
  }
};

// Operands of half a step: LOW or high codes.
template <bool LOW>
__device__ __forceinline__ void decode_all(Half &a, const Codes &codes);

// The stage of the next step's codes has been waited for, that of the step after it is. In the first step nothing is on
// its way: a wait there would let ptxas think that products of other loops may be, and keep their registers.
template <int N, bool IS_FIRST>
__device__ __forceinline__ void add_step(
    float (&sums)[ROWS / 2], Half &low, Half &high, Codes &codes, Window &window, const Place &place, Scales &scales,
    int step, int steps
) {
  uint64 rows = place.rows_of(window.at);
  if (!AHEAD) codes.read(scales, window.at, place, step);
  if (SHIFTS) codes.shift();
  if (!IS_FIRST) wait_products<1>();  // those with low codes of the step before
  decode_all<true>(low, codes);
  multiply_half<N>(sums, low, rows);
  if (!IS_FIRST) {
    wait_products<1>();
    window.leave(window.before, place.leads);  // all products of the step before have ended
  }
  decode_all<false>(high, codes);
  if (AHEAD) codes.read(scales, window.next, place, step + 1);
  multiply_half<N>(sums, high, rows + HIGH);
  if (AHEAD)
    window.await_further(step + 2 < steps);
  else
    window.await(window.next, step + 1 < steps);
  scales.advance(step + AHEAD);
  window.advance();
}

// The sums of a tile with at most N rows.
template <int N>
__device__ __forceinline__ void add_up(
    float (&sums)[ROWS / 2], Window &window, const Place &place, Scales &scales, int steps
) {
  Half low, high;
  Codes codes = {};
  window.await(window.at, 1);
  if (AHEAD) {
    window.await(window.next, steps > 1);
    codes.read(scales, window.at, place, 0);
  }
  add_step<N, true>(sums, low, high, codes, window, place, scales, 0, steps);
#pragma unroll 1
  for (int step = 1; step < steps; ++step)
    add_step<N, false>(sums, low, high, codes, window, place, scales, step, steps);
  wait_products<0>();
  fence_sums(sums);
  window.leave(window.before, place.leads);
}

// The sums of a tile with at most N rows, or of one with more.
template <int N>
__device__ __forceinline__ void add_up_rows(
    float (&sums)[ROWS / 2], Window &window, const Place &place, Scales &scales, int rows, int steps
) {
  if constexpr (N < ROWS)
    if (rows > N) return add_up_rows<N + GRAIN>(sums, window, place, scales, rows, steps);
  add_up<N>(sums, window, place, scales, steps);
}

// Rows of the weight of this thread, 8 apart in a tile; -1 beyond the expert's.
__device__ __forceinline__ void find_rows(const Call &call, const Tile &tile, int (&own)[2]) {
  int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int output = tile.output + (GATE ? warp * 8 + lane / 4 : warp * 16 + lane / 4 + 8 * half);
    int matrix = tile.expert * (GATE ? 2 : 1) + (GATE ? half : 0);
    own[half] = output < call.outputs ? matrix * call.outputs + output : -1;
  }
}
