// Low-rank additions of adapters to rows of a product, as kernels of kernels/lora share them. bfloat16. After
// numbers.cuh.
//
// A warp has up to 8 rows of one adapter and 64 columns. It multiplies columns with rows, b^T [64, 16 ranks] with
// sums^T [16, 8 rows], so that few rows fill a tile. Lane 4 q + c reads ranks 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of the
// eight columns from 8 q on, 16 bytes of each. The order of columns in a product is free: these are its operands as
// they are, and what the lane gets are rows 2 c and 2 c + 1 of the same columns. Macro MANY (0, 1): there may be more than
// 16 ranks; without, registers are left for more warps.

constexpr int ROWS = 8, COLUMNS = 64;  // of a warp

struct alignas(16) Eight { uint32 v[4]; };  // bfloat16

__device__ __forceinline__ Eight load(const uint16 *place, bool is_there) {
  return is_there ? *(const Eight *)place : Eight{};
}

// Copies to shared memory, to places that only the asking thread reads, in groups: behind a wait all but the latest LEFT
// groups are there.
__device__ __forceinline__ void copy_eight(Eight *to, const uint16 *from) {
  asm volatile("{ .reg .u64 t; .reg .b32 there; cvta.to.shared.u64 t, %0; cvt.u32.u64 there, t;\n"
               "cp.async.cg.shared.global [there], [%1], 16; }" ::"l"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Eight numbers times their weights, raised by `offset`, and `scale`.
__device__ __forceinline__ Eight apply_norm(const Eight &x, const Eight &weight, float scale, float offset) {
  Eight normed;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    normed.v[j] = narrow(widen(x.v[j]) * scale * (widen(weight.v[j]) + offset),
                         widen_high(x.v[j]) * scale * (widen_high(weight.v[j]) + offset));
  return normed;
}

// What `SHRINK` left, the additions, and which rows are whose: see kernels/lora.
struct Additions {
  const void *sums;          // of each row, or of each place of `order`: of `splits` partial sums
  const uint16 *b;           // [S, ranks, width]
  const int64 *ranks;        // [S, parts]
  const int64 *order, *blocks;
  int64 split_stride;               // numbers
  int sums_stride, splits;          // numbers; partial sums
  int is_float, is_dense;           // of float32; by rows, with columns of all slots
  int num_blocks, most_ranks, parts, width;
};

// Of a block of rows, the lane's.
__device__ __forceinline__ int row_of_lane(const Additions &in, int first, int count) {
  const int lane = threadIdx.x % 32;
  return lane < count ? int(in.order[first + lane]) : 0;  // no kernel writes which rows are whose
}

// Up to 8 rows of an adapter, and which of them a lane has.
struct Rows {
  int64 slot;
  int place, row;         // whose sums the lane reads, row q
  int pair[2];            // the rows that it has in the end
  bool has_own, has[2];

  // Those from `at` on of a block of `count` rows, at most 32, from place `first` on. `mine`: see `row_of_lane`.
  __device__ __forceinline__ Rows(int64 slot, int first, int count, int mine, int at) : slot(slot) {
    const int lane = threadIdx.x % 32, c = lane % 4, q = at + lane / 4;
    place = first + q, row = __shfl_sync(~0u, mine, q), has_own = q < count;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      pair[half] = __shfl_sync(~0u, mine, at + 2 * c + half), has[half] = at + 2 * c + half < count;
  }
  __device__ __forceinline__ Rows(const Additions &in, int64 slot, int first, int count)
      : Rows(slot, first, count, row_of_lane(in, first, min(count, ROWS)), 0) {}
};

// The lane's words of `b` for the ranks from `rank` on, and its eight columns from `column` on.
__device__ __forceinline__ void load_b(
    Eight (&b)[4], const Additions &in, int64 slot, int rank, int column, bool is_there
) {
  const uint16 *own = in.b + (slot * in.most_ranks + rank + threadIdx.x % 4 * 2) * in.width + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = load(own + (i % 2 + i / 2 * 8) * int64(in.width), is_there);
}

// The lane's two pairs of sums for the ranks from `rank` of `part` on, if they are there: as of a product in bfloat16.
__device__ __forceinline__ void load_sums(
    uint32 (&sums)[2], const Additions &in, const Rows &rows, int part, int rank, bool is_there
) {
  const int64 column = part * in.most_ranks + rank + threadIdx.x % 4 * 2;
  const int64 own = in.is_dense ? int64(rows.row) * in.sums_stride + rows.slot * in.parts * in.most_ranks + column
                                : int64(rows.place) * in.sums_stride + column;
  is_there &= rows.has_own;
  if (!in.is_float) {
    const uint16 *place = (const uint16 *)in.sums + own;
    sums[0] = is_there ? *(const uint32 *)place : 0, sums[1] = is_there ? *(const uint32 *)(place + 8) : 0;
    return;
  }
  const float *place = (const float *)in.sums + own;
  float2 total[2] = {};
#pragma unroll 2
  for (int split = 0; split < (is_there ? in.splits : 0); ++split) {
    const float2 low = *(const float2 *)place, high = *(const float2 *)(place + 8);
    total[0].x += low.x, total[0].y += low.y, total[1].x += high.x, total[1].y += high.y;
    place += in.split_stride;
  }
  sums[0] = narrow(total[0].x, total[0].y), sums[1] = narrow(total[1].x, total[1].y);
}

// What the lane's columns get: d[j] of columns 2 j (of both rows) and 2 j + 1.
__device__ __forceinline__ void add(float (&d)[4][4], const Eight (&b)[4], const uint32 (&sums)[2]) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
    multiply(d[j], __byte_perm(b[0].v[j], b[1].v[j], 0x5410), __byte_perm(b[0].v[j], b[1].v[j], 0x7632),
             __byte_perm(b[2].v[j], b[3].v[j], 0x5410), __byte_perm(b[2].v[j], b[3].v[j], 0x7632), sums[0], sums[1]);
}

// All that `part` with this rank gets, of which the first ranks of `b`, and their sums, have been read.
__device__ __forceinline__ void add_part(
    float (&d)[4][4], const Eight (&first)[4], const uint32 (&first_sums)[2], const Additions &in, const Rows &rows,
    int part, int rank, int column, bool is_there
) {
  if (rank > 0) add(d, first, first_sums);
#if MANY
#pragma unroll 1
  for (int at = 16; at < rank; at += 16) {
    Eight b[4];
    uint32 sums[2];
    load_b(b, in, rows.slot, at, column, is_there);
    load_sums(sums, in, rows, part, at, true);
    add(d, b, sums);
  }
#endif
}

// Rows of a block on their way to shared memory, STAGES times the eight of a warp: each thread's words of PARTS parts.
// `own`: where a row's words of a part are, by (rows, part, half).
template <int STAGES, int PARTS, int THREADS, class Own>
struct RowsAhead {
  Eight *staged;  // [STAGES, PARTS, 2 rows, THREADS]
  Own own;
  int64 slot;
  int first, count, mine;
  bool is_there;

  __device__ __forceinline__ Eight *place(int at, int i, int half) const {
    return staged + ((at / ROWS % STAGES * PARTS + i) * 2 + half) * THREADS + threadIdx.x;
  }
  // Of the rows from `at` on, if there are any.
  __device__ __forceinline__ void ask(int at) const {
    if (at < count) {
      const Rows rows(slot, first, count, mine, at);
#pragma unroll
      for (int i = 0; i < PARTS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (is_there && rows.has[half]) copy_eight(place(at, i, half), own(rows, i, half));
    }
    commit_copies();
  }
  __device__ __forceinline__ void begin() const {
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) ask(stage * ROWS);
  }
};
