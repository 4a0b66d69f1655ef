// Tiles of rows of x times a weight whose MXFP4 is decoded in registers: low codes of a step's bytes (inputs 0 to 63) are
// decoded while products with high ones (64 to 127) run, and the other way round. After mxfp4_steps.cuh. Needs of the
// source: PRODUCTS of half a step, HIGH, SHIFTS, SIDES (boxes beside each other of a stage's rows), EVENS_FIRST of
// outputs, `decode_all`, `scale_rows`; the macro BOX (rows that are copied at a time).

constexpr int LEAST = ROWS <= 64 ? 16 : ROWS > 128 ? 128 : ROWS / 2, GRAIN = ROWS <= 96 ? 16 : 32;
static_assert((ROWS - LEAST) % GRAIN == 0, "the largest is a whole tile");
static_assert(BOX == ROWS || (ROWS % BOX == 0 && BOX % GRAIN == 0), "boxes hold what is multiplied");
constexpr uint32 BOX_BYTES = BOX * 128;
// Whether codes are read a step ahead. Of three stages that would leave one to be copied, late in each step.
constexpr bool AHEAD = STAGES > 3;

// Where stages are few, their halves come and leave apart: rows of x of inputs 0 to 63, with all codes, and of 64 to 127.
constexpr bool HALVED = SIDES == 2 && !AHEAD;
constexpr int PARTS = HALVED ? 2 : 1, TOGETHER = SIDES / PARTS;  // of a stage; boxes of a part beside each other
// Blocks of a cluster: two with neighbouring outputs share rows of x, of which each copies every other box for both. All
// multiprocessors together would read more from the L2 than it gives, if each read all rows of tiles as large as these.
constexpr int CLUSTER = GROUPS == 2 ? 2 : 1;
#if GROUPS == 2
#define IN_CLUSTERS __cluster_dims__(2, 1, 1)
#else
#define IN_CLUSTERS
#endif

__device__ __forceinline__ uint32 bar_of(uint32 bars, int stage, int part) { return bars + 16 * (stage * PARTS + part); }

// What a tile's first stage says of it, behind the barriers; an expert of -1 ends the work of a block. Found by the warp
// that copies alone: in the others, its registers would be taken from products.
__device__ __forceinline__ uint32 notice_of(uint32 bars, int stage) { return bars + 16 * (STAGES * PARTS + stage); }
__device__ __forceinline__ void announce(const Ring &ring, const Tile &tile) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"r"(notice_of(ring.bars, ring.stage)), "r"(tile.expert), "r"(tile.first), "r"(tile.last),
                 "r"(tile.output) : "memory");
}

// The tile of the block `rank` of a cluster, whose first block has number `index`; false beyond the last. Both have the
// same rows of x if `shares`. Behind an odd number of tiles the last one is multiplied and stored twice, with the same bits.
__device__ __forceinline__ bool find_own(const Call &call, int index, int rank, Tile &tile, bool &shares) {
  const int across = (call.outputs + OUTPUTS - 1) / OUTPUTS;
  shares = CLUSTER > 1 && index / across == (index + 1) / across;
  if (!find_tile<ROWS, OUTPUTS>(call, index + rank, tile) && !(rank && find_tile<ROWS, OUTPUTS>(call, index, tile)))
    return false;
  even_out<ROWS>(call, tile);
  return true;
}

// The warp that copies: the stages of all tiles of this block.
__device__ __forceinline__ void fetch_tiles(
    const Call &call, const TensorMap *x_map, const TensorMap *code_map, Ring &ring
) {
  const int steps = (call.inputs + DEPTH - 1) / DEPTH, rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
  Tile tile;
  bool shares;
  for (int index = blockIdx.x - rank; find_own(call, index, rank, tile, shares); index += gridDim.x) {
    const int row = tile.expert * (GATE ? 2 : 1) * call.outputs + tile.output;
    const int boxes = (tile.last - tile.first + BOX - 1) / BOX, begin = shares ? rank : 0, each = shares ? CLUSTER : 1;
    for (int step = 0; step < steps; ++step) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          const uint32 full = bar_of(ring.bars, ring.stage, part), codes = ring.code_tiles + ring.stage * CODE_BYTES;
          wait_for(full + 8, ring.phase ^ 1);
          if (step == 0 && part == 0) announce(ring, tile);
          expect_bytes(full, (part == 0 ? CODE_BYTES : 0) + boxes * TOGETHER * BOX_BYTES);
          if (part == 0) {
            if (GATE)
              load_gated_box(codes, code_map, full, step * (DEPTH / 2), row);
            else
              load_box(codes, code_map, full, step * (DEPTH / 2), row);
          }
          for (int box = begin; box < boxes; box += each)
#pragma unroll
            for (int nth = 0; nth < TOGETHER; ++nth) {
              const int side = part + nth, column = step * DEPTH + side * (DEPTH / SIDES), first = tile.first + box * BOX;
              const uint32 to = ring.x_tiles + ring.stage * X_BYTES + side * (X_BYTES / SIDES) + box * BOX_BYTES;
              if (shares)
                load_box_for(3, to, x_map, full, column, first);
              else
                load_box(to, x_map, full, column, first);
            }
        }
      }
      ring.advance();
    }
    __syncwarp();
  }
  if (threadIdx.x == 0) {
    const uint32 full = bar_of(ring.bars, ring.stage, 0);
    tile.expert = -1;
    wait_for(full + 8, ring.phase ^ 1);
    announce(ring, tile);
    arrive(full);
  }
}

__device__ __forceinline__ uint32 find_in(uint32 address, int block) {  // the same place of another block of the cluster
  uint32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

// The ring as warps that multiply see it: stages `at`, which is multiplied, the one before and the two after it;
// `phase` is of the last.
struct Window {
  uint32 bars, there;  // `there`: of the block of the cluster that this lane tells what is read
  int before, at, next, further;
  uint32 phase;

  __device__ __forceinline__ explicit Window(const Ring &ring)
      : bars(ring.bars), there(ring.bars), before(STAGES - 1), at(0), next(1), further(2), phase(0) {
    if (CLUSTER > 1) {
      there = find_in(bars, threadIdx.x % CLUSTER);
      pin(there);
    }
  }
  __device__ __forceinline__ void advance() {
    before = at, at = next, next = further;
    phase ^= further == STAGES - 1;
    further = further == STAGES - 1 ? 0 : further + 1;
  }
  __device__ __forceinline__ void await(int stage, int wanted, int part = 0) const {
    wait_if(wanted, bar_of(bars, stage, part), phase ^ (stage > further));
  }
  __device__ __forceinline__ void await_all(int stage, int wanted) const {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) await(stage, wanted, part);
  }
  __device__ __forceinline__ void await_further(int wanted) const { wait_if(wanted, bar_of(bars, further, 0), phase); }
  __device__ __forceinline__ void leave(int stage, int leads, int part = 0) const {
    if (CLUSTER > 1)
      arrive_there_if(leads, bar_of(there, stage, part) + 8);
    else
      arrive_if(leads, bar_of(bars, stage, part) + 8);
  }
};

// Operands of half a step: of so many products four registers each.
using Half = uint32[PRODUCTS][4];

// The products of half a step with N rows of x. BEGINS: sums are these, whatever they were.
template <int N, bool BEGINS>
__device__ __forceinline__ void multiply_half(float (&sums)[N / 2], Half &a, uint64 rows) {
#pragma unroll
  for (int i = 0; i < 4 * PRODUCTS; ++i) pin(a[i / 4][i % 4]);  // nothing is decoded behind the fence
  begin_products();
#pragma unroll
  for (int nth = 0; nth < PRODUCTS; ++nth) multiply<N>(sums, a[nth], rows + 2 * nth, !BEGINS || nth > 0);
  commit_products();
}

// words[piece][half]: bytes of row 8 * half, inputs 16 * piece + lane % 4 * 4 + {0, 1, 2, 3} in their low halves, and
// 64 further in their high ones. Even inputs are the bytes 0 and 2; odd ones are there once words are shifted.
struct Codes {
  uint32 words[4][2], odd[4][2], scales[2];

  // Of a step, of a stage that is there. Beyond the last step what was there before is read, and not used.
  __device__ __forceinline__ void read(const Scales &from, int stage, const Place &place, int step) {
    const uint32 at = place.codes + stage * CODE_BYTES;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[2 * i][0]), "=r"(words[2 * i][1]), "=r"(words[2 * i + 1][0]), "=r"(words[2 * i + 1][1])
                   : "r"(at ^ 32 * i));
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
    float (&sums)[N / 2], Half &low, Half &high, Codes &codes, Window &window, const Place &place, Scales &scales,
    int step, int steps
) {
  uint64 rows = place.rows_of(window.at);
  if (!AHEAD) codes.read(scales, window.at, place, step);
  if (SHIFTS) codes.shift();
  if (!IS_FIRST) {
    wait_products<1>();  // those with low codes of the step before
    if (HALVED) window.leave(window.before, place.leads, 0);
  }
  decode_all<true>(low, codes);
  multiply_half<N, IS_FIRST>(sums, low, rows);
  if (!IS_FIRST) {
    wait_products<1>();
    window.leave(window.before, place.leads, PARTS - 1);  // all products of the step before have ended
  }
  decode_all<false>(high, codes);
  if (AHEAD) codes.read(scales, window.next, place, step + 1);
  multiply_half<N, false>(sums, high, rows + HIGH);
  if (AHEAD)
    window.await_further(step + 2 < steps);
  else
    window.await_all(window.next, step + 1 < steps);
  scales.advance(step + AHEAD);
  window.advance();
}

// The sums of a tile with at most N rows.
template <int N>
__device__ __forceinline__ void add_up(
    float (&sums)[N / 2], Window &window, const Place &place, Scales &scales, int steps
) {
  Half low, high;
  Codes codes = {};
  window.await_all(window.at, 1);
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
#pragma unroll
  for (int part = 0; part < PARTS; ++part) window.leave(window.before, place.leads, part);
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

// The tile whose first stage comes next.
__device__ __forceinline__ void find_next(Tile &tile, const Window &window) {
  window.await(window.at, 1);
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile.expert), "=r"(tile.first), "=r"(tile.last), "=r"(tile.output)
               : "r"(notice_of(window.bars, window.at)) : "memory");
  // the same for the whole warp, which ptxas does not know: else what depends on it would not be in uniform registers
  tile.expert = __reduce_max_sync(~0u, tile.expert);
}

// Scales of rows of x, if they have any. A thread has sums[4 * j + 2 * half + i] of row 8 * j + lane % 4 * 2 + i.
template <int N>
__device__ __forceinline__ void scale_rows(const Call &call, float (&sums)[N / 2], const Tile &tile);

// A tile with at most N rows, or one with more; then `tile` is the next one. Each size has sums of its own: had all the
// same, ptxas would often find no place for them where products of all sizes can run on, and make products wait for each
// other.
template <int N>
__device__ __forceinline__ void multiply_tile(
    const Call &call, Tile &tile, Window &window, const Place &place, Scales &scales, int rows, int steps
) {
  // steps of 16 where tiles often are: of an expert with some more rows than one tile holds, and of one with many
  if constexpr (N < ROWS)
    if (rows > N) return multiply_tile<N + (N >= 192 || (N >= 128 && N < 160) ? 16 : GRAIN)>(call, tile, window, place, scales, rows, steps);
  float sums[N / 2];
  add_up<N>(sums, window, place, scales, steps);
  const Tile done = tile;
  int own[2];
  find_next(tile, window);
  if (tile.expert >= 0) find_rows(call, tile, own), scales.begin(call, own, steps);  // on their way while this tile ends
  scale_rows<N>(call, sums, done);
  find_rows(call, done, own);
  finish<EVENS_FIRST>(call, sums, done, own, threadIdx.x / 32 - 4, call.outputs);
}

// The warps that multiply.
__device__ __forceinline__ void multiply_tiles(const Call &call, const Ring &ring) {
  int steps = (call.inputs + DEPTH - 1) / DEPTH;
  Window window(ring);
  Scales scales;
  Place place(ring, CLUSTER);
  Tile tile;
  int own[2];
  find_next(tile, window);
  if (tile.expert >= 0) find_rows(call, tile, own), scales.begin(call, own, steps);
#pragma unroll 1
  while (tile.expert >= 0) {
    int rows = __reduce_max_sync(~0u, tile.last - tile.first);
    multiply_tile<LEAST>(call, tile, window, place, scales, rows, steps);
  }
}

__device__ __forceinline__ void meet() {  // all threads of a cluster
  if (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What a block does.
__device__ __forceinline__ void run_block(const Call &call, const TensorMap *x_map, const TensorMap *code_map) {
  extern __shared__ unsigned char storage[];
  Ring ring(storage, CLUSTER, STAGES * CODE_BYTES, PARTS);
  meet();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 40 : 32));
    if (threadIdx.x < 32) fetch_tiles(call, x_map, code_map, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 232 : 112));
    multiply_tiles(call, ring);
  }
  __syncwarp();
  meet();  // others may still write to this block's shared memory
}
