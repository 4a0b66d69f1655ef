// The indexer's choice: of each token's visible scores the `top_k` highest, exactly, as slots of its request's pages.
//
// Radix selection, a block a token: the k-th highest score is found 11, 11 and 10 bits at a time, by histograms in
// shared memory, stopping where all scores that share the bits found are taken. Then a pass in the scores' order takes
// what is above it and, of those equal to it, the first: the same choice in the same order at every run.
//
// Compiled by NVRTC, without any header. select_short holds a row's scores in registers; select_long those of tokens that
// see few, however many there is room for, and reads others again.

using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

constexpr int DIGIT_BITS = 11, BINS = 1 << DIGIT_BITS;
constexpr uint32 ALL = ~0u;

struct Call {
  const float *scores;    // [n, columns]
  const int64 *requests;  // [T]
  const int64 *visible;   // [T]: how many of a token's scores count
  const int *table;       // [R, table_width] pages
  int64 *slots;           // [n, top_k]
  uint64 table_width;     // elements from one request's pages to the next
  int columns, first_token, top_k, per_page;
};

struct Shared {
  uint32 counts[BINS];
  uint32 totals[33];     // of warps
  uint32 before[8 * 32]; // of each stripe and warp: how many above, and (in the low half) how many equal
  uint32 digit, above;   // what a histogram finds: the digit of the k-th highest, how many scores are above it
};

// float32 to unsigned integers of the same order; equal for 0 and -0
__device__ uint32 sortable(float score) {
  const uint32 bits = __float_as_uint(score + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ uint32 add_up_to_lane(uint32 x, int lane) {  // inclusive
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const uint32 other = __shfl_up_sync(ALL, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

// A warp adds 1 to each active lane's bin: at once where all lanes have the same, as scores that are zero do.
__device__ void count(uint32 *counts, uint32 bin, bool is_counted, int lane) {
  const uint32 counted = __ballot_sync(ALL, is_counted);
  if (!counted) return;
  const int leader = __ffs(counted) - 1;
  const uint32 first = __shfl_sync(ALL, bin, leader);
  if (__all_sync(ALL, !is_counted || bin == first)) {
    if (lane == leader) atomicAdd(&counts[first], __popc(counted));
  } else if (is_counted) {
    atomicAdd(&counts[bin], 1);
  }
}

// The bin that holds the `wanted`-th highest: to `digit`, and how many are in bins above it to `above`.
template <int THREADS>
__device__ void find_bin(Shared &shared, uint32 wanted) {
  constexpr int PER_THREAD = BINS / THREADS, WARPS = THREADS / 32;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int top = BINS - 1 - thread * PER_THREAD;  // bins from the highest down
  uint32 sum = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) sum += shared.counts[top - i];
  const uint32 up_to = add_up_to_lane(sum, lane);
  if (lane == 31) shared.totals[warp] = up_to;
  __syncthreads();
  if (warp == 0) {
    const uint32 mine = lane < WARPS ? shared.totals[lane] : 0, through = add_up_to_lane(mine, lane);
    shared.totals[lane] = through - mine;
  }
  __syncthreads();
  uint32 above = shared.totals[warp] + up_to - sum;
  if (above < wanted && wanted <= above + sum) {
    int bin = top;
    while (above + shared.counts[bin] < wanted) above += shared.counts[bin--];
    shared.digit = bin;
    shared.above = above;
  }
  __syncthreads();
}

template <int THREADS, int STRIPES, bool HOLDS>
__device__ void select(const Call &call, Shared &shared, int visible) {
  constexpr int WARPS = THREADS / 32, CHUNK = THREADS * STRIPES;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const uint64 nth = blockIdx.x;
  const int top_k = call.top_k;
  const uint32 per_page = call.per_page;
  const int *pages = call.table + call.requests[call.first_token + nth] * call.table_width;
  int64 *out = call.slots + nth * top_k;
  if (visible <= top_k) {
    for (int number = thread; number < top_k; number += THREADS)
      out[number] = number < visible ? int64(pages[number / per_page]) * per_page + number % per_page : -1;
    return;
  }
  const float *scores = call.scores + nth * call.columns;
  uint32 keys[STRIPES];
  if (HOLDS) {
#pragma unroll
    for (int i = 0; i < STRIPES; i++) {
      const int number = i * THREADS + thread;
      keys[i] = number < visible ? sortable(scores[number]) : 0;
    }
  }
  // `prefix`: the bits found, at the top; `wanted`: how many to take among the scores that begin with them
  uint32 prefix = 0, found = 0, wanted = top_k;
#pragma unroll 1
  for (int shift = 21; found != ALL; shift = shift > 10 ? shift - DIGIT_BITS : 0) {
    const uint32 mask = shift ? BINS - 1 : 1023;
    for (int bin = thread; bin < BINS; bin += THREADS) shared.counts[bin] = 0;
    __syncthreads();
    for (int first = 0; first < (HOLDS ? CHUNK : visible); first += CHUNK) {
#pragma unroll
      for (int i = 0; i < STRIPES; i++) {
        const int number = first + i * THREADS + thread;
        if (!HOLDS) keys[i] = number < visible ? sortable(scores[number]) : 0;
      }
#pragma unroll
      for (int i = 0; i < STRIPES; i++) {
        const int number = first + i * THREADS + thread;
        const bool is_here = number < visible && (keys[i] & found) == prefix;
        count(shared.counts, keys[i] >> shift & mask, is_here, lane);
      }
    }
    __syncthreads();
    find_bin<THREADS>(shared, wanted);
    wanted -= shared.above;
    prefix |= shared.digit << shift;
    found = ALL << shift;
    const bool takes_all = shared.counts[shared.digit] == wanted;
    __syncthreads();
    if (takes_all) break;
  }
  // all above, and the first `wanted` of those that equal the prefix in the bits found
  uint32 above = 0, equal = 0;
  for (int first = 0; first < (HOLDS ? CHUNK : visible); first += CHUNK) {
    uint32 is_above = 0, is_equal = 0;  // a bit a stripe
    uint32 votes[STRIPES][2];
#pragma unroll
    for (int i = 0; i < STRIPES; i++) {
      const int number = first + i * THREADS + thread;
      if (!HOLDS) keys[i] = number < visible ? sortable(scores[number]) : 0;
      const uint32 bits = keys[i] & found;
      if (number < visible && bits > prefix) is_above |= 1u << i;
      if (number < visible && bits == prefix) is_equal |= 1u << i;
      votes[i][0] = __ballot_sync(ALL, is_above >> i & 1);
      votes[i][1] = __ballot_sync(ALL, is_equal >> i & 1);
      if (lane == 0) shared.before[i * WARPS + warp] = __popc(votes[i][0]) << 16 | __popc(votes[i][1]);
    }
    __syncthreads();
    constexpr int CELLS = STRIPES * WARPS, PER_LANE = (CELLS + 31) / 32;
    if (warp == 0) {
      uint32 sum = 0;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) {
        const int cell = lane * PER_LANE + i;
        const uint32 mine = cell < CELLS ? shared.before[cell] : 0;
        if (cell < CELLS) shared.before[cell] = sum;
        sum += mine;
      }
      const uint32 up_to = add_up_to_lane(sum, lane);
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (lane * PER_LANE + i < CELLS) shared.before[lane * PER_LANE + i] += up_to - sum;
      if (lane == 31) shared.totals[32] = up_to;
    }
    __syncthreads();
    const uint32 below_lane = (1u << lane) - 1;
#pragma unroll
    for (int i = 0; i < STRIPES; i++) {
      const uint32 before = shared.before[i * WARPS + warp];
      const uint32 higher = above + (before >> 16) + __popc(votes[i][0] & below_lane);
      const uint32 same = equal + (before & 0xFFFF) + __popc(votes[i][1] & below_lane);
      if ((is_above >> i & 1) || ((is_equal >> i & 1) && same < wanted)) {
        const uint32 number = first + i * THREADS + thread;
        out[higher + (same < wanted ? same : wanted)] = int64(pages[number / per_page]) * per_page + number % per_page;
      }
    }
    above += shared.totals[32] >> 16;
    equal += shared.totals[32] & 0xFFFF;
    __syncthreads();
  }
}

// How many scores the block's token has, once earlier kernels have ended.
__device__ int count_visible(const Call &call) {
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
  return int(call.visible[call.first_token + uint64(blockIdx.x)]);
}

extern "C" __global__ void __launch_bounds__(512) select_short(const __grid_constant__ Call call) {
  __shared__ Shared shared;
  select<512, 8, true>(call, shared, count_visible(call));
}

extern "C" __global__ void __launch_bounds__(1024) select_long(const __grid_constant__ Call call) {
  __shared__ Shared shared;
  const int visible = count_visible(call);
  if (visible <= 1024 * 8)
    select<1024, 8, true>(call, shared, visible);
  else
    select<1024, 8, false>(call, shared, visible);
}
