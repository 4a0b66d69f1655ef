// Collectives of small messages among the GPUs of one host, a process each: all-reduce (alone, or followed by residual
// addition and RMS norm), all-gather, all-to-all and broadcast. Every rank has a mailbox, memory that its peers can write. A rank
// stores its part into the mailboxes of all its peers and polls its own. There are no barriers, and multicast is unused.
// Large sums are moved by copy engines instead (kernels/collective/sent.py): kernels here wait for them and add them up.
//
// How a reader knows that a vector (16 bytes) has arrived:
// - Sums (Lamport): mailboxes are zero between calls; a word (4 bytes) that would be +0 is sent as -0. A vector is
//   complete when none of its words is zero; the reader then writes the zeros back.
// - Gathers: each word travels with the number of the call beside it, so that any bits may be sent.
//
// Mailboxes have two halves, used in turn. A rank that begins call n + 2 has finished call n + 1, so all its peers had
// begun call n + 1 and hence finished call n: their half is free. This needs every rank to hear from every other in
// each call, and calls of a rank to follow each other on a stream. The number of a call is in device memory, so that
// CUDA graphs replay. Every block has its own copy, and a block also advances those of blocks that this call lacks.
//
// The grid must fit on the device at once, since blocks wait for the same blocks of other ranks.
//
// Compiled by NVRTC. -DWORLD: ranks, 2 to 8. -DTYPE: 0 float32, 1 bfloat16, 2 float16. -DPART: the kernels to compile, as
// all of them at once take seconds: 1 and 2 sums in so many steps, 3 sums of what copy engines have moved, 4 gathers and
// exchanges. -DCOUNT, of parts 1 to 3: vectors of a thread and row.

#include "mailbox.cuh"

struct Sum {  // x [splits, rows, row] -> out [rows, row]; rows of `width` vectors, the last one maybe shorter
  Ranks call;
  const char *x, *more;  // more: rows as those of x, which are added to them before they are sent; or null, as with splits
  char *out, *stream;
  const char *weight;
  uint64 x_stride, split_stride, stream_stride;  // bytes
  int rows, width, vectors, splits;              // splits: 0, or the number of float32 partial sums
  float eps, offset;
};

struct Sent {  // the peers' x are in slots of this rank's mailbox, written by their copy engines; splits are 0
  Sum sum;
  uint64 flags, slots, slot_bytes;  // places in the mailbox; a peer's flag is set behind its copy
  uint32 mark;                      // what a flag of this call is set to
};

struct Gather {  // x [rows, words] of each rank -> out [rows, WORLD, words]; with a root, its x -> x of all ranks;
                 // exchange: x [WORLD, words], of which each rank gets one part -> out [WORLD, words]
  Ranks call;
  const uint32 *x;
  uint32 *out;
  uint64 words;    // of x
  uint64 columns;  // words of a row
  int root;        // or -1
};

// Waits until earlier kernels have finished, then lets the next one start: see kernels/launch.py.
__device__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The sum over the block, in the same order on every rank.
__device__ float block_sum(float x) {
  __shared__ float sums[32];
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  __syncthreads();  // the sums of a row before have been read
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.f;
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

constexpr int SPLITS_AT_ONCE = 4;  // partial sums that are on their way together

// This rank's part of a vector, rounded to the type that is sent.
__device__ uint4 load_part(const Sum &s, int row, int column) {
  const char *x = s.x + row * s.x_stride;
  if (!s.splits) {
    const uint4 own = ((const uint4 *)x)[column];
    return s.more ? add_two(own, ((const uint4 *)(s.more + row * s.x_stride))[column]) : own;
  }
  float sum[ELEMENTS] = {};
  for (int first = 0; first < s.splits; first += SPLITS_AT_ONCE) {
    float4 parts[SPLITS_AT_ONCE][ELEMENTS / 4] = {};
#pragma unroll
    for (int split = 0; split < SPLITS_AT_ONCE; ++split)
      if (first + split < s.splits)
#pragma unroll
        for (int i = 0; i < ELEMENTS / 4; ++i)
          parts[split][i] = ((const float4 *)(x + (first + split) * s.split_stride))[column * (ELEMENTS / 4) + i];
#pragma unroll
    for (int split = 0; split < SPLITS_AT_ONCE; ++split)
#pragma unroll
      for (int i = 0; i < ELEMENTS / 4; ++i) {
        const float4 v = parts[split][i];
        sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
      }
  }
  return pack(sum);
}

// In two steps, vectors have owners, who add them up and send the sum to all: chunks of eight vectors go round the
// ranks. `place` is that of a vector among those of its owner.
__device__ int owner_of(int vector) { return vector / 8 % WORLD; }
__device__ int place_of(int vector) { return vector / (8 * WORLD) * 8 + vector % 8; }

// Where things are in the half of a mailbox that a call uses. One step: a slot of all vectors for each peer. Two steps:
// the sums, then a slot for each peer with its part of the vectors that the receiver owns.
struct Half {
  uint64 start, sums_bytes, slot_bytes;

  __device__ Half(const Sum &s, uint32 number, bool two_steps)
      : start(CONTROL_BYTES + number % 2 * s.call.sum_bytes), sums_bytes(two_steps ? 16ull * s.vectors : 0),
        slot_bytes(16ull * (two_steps ? place_of(s.vectors - 1 + 8 * WORLD) / 8 * 8 : s.vectors)) {}

  __device__ char *slot(const Ranks &call, int receiver, int sender) const {
    return call.mailboxes[receiver] + start + sums_bytes + slot_of(sender, receiver) * slot_bytes;
  }
  __device__ char *sums(const Ranks &call, int receiver) const { return call.mailboxes[receiver] + start; }
};

// Wait for the parts of VECTORS vectors at `places` of all peers' slots (-1: none), clear them and add them to `own`, in
// the order of ranks.
template <int VECTORS>
__device__ void collect(const Ranks &call, const Half &half, const int *places, const uint4 *own, uint4 *sums,
                        Patience &patience) {
  const int me = call.rank;
  uint4 parts[VECTORS][WORLD];
  bool waits = true;
  while (waits) {
    waits = false;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int r = 0; r < WORLD; ++r) {
        parts[i][r] = own[i];
        if (r != me && places[i] >= 0) parts[i][r] = peek(half.slot(call, me, r) + 16ull * places[i]);
      }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int r = 0; r < WORLD; ++r) waits |= r != me && places[i] >= 0 && !has_arrived(parts[i][r]);
    if (waits && patience.is_over()) break;
  }
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (places[i] < 0) continue;
    sums[i] = add_parts(parts[i]);
#pragma unroll
    for (int r = 0; r < WORLD; ++r) {
      if (r == me) continue;
      if (waits && !has_arrived(parts[i][r])) patience.report(r);
      put(half.slot(call, me, r) + 16ull * places[i], {0, 0, 0, 0});
    }
  }
}

// Wait for the sums of `vectors` (-1: none) from their owners, and clear them.
template <int VECTORS>
__device__ void receive(const Ranks &call, const Half &half, const int *vectors, uint4 *sums, Patience &patience) {
  char *from = half.sums(call, call.rank);
  bool waits = true;
  while (waits) {
    waits = false;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (vectors[i] >= 0) sums[i] = peek(from + 16ull * vectors[i]);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) waits |= vectors[i] >= 0 && !has_arrived(sums[i]);
    if (waits && patience.is_over()) break;
  }
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (vectors[i] < 0) continue;
    if (waits && !has_arrived(sums[i])) patience.report(owner_of(vectors[i]));
    put(from + 16ull * vectors[i], {0, 0, 0, 0});
  }
}

// The vectors of a row that a thread has, -1 for those beyond the row or the end.
template <int VECTORS> __device__ void find_vectors(const Sum &s, int row, int *vectors) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    int column = threadIdx.x + i * blockDim.x, vector = row * s.width + column;
    vectors[i] = column < s.width && vector < s.vectors ? vector : -1;
  }
}

template <int VECTORS, bool TWO_STEPS> __device__ void send_row(const Sum &s, const Half &half, int row) {
  int vectors[VECTORS];
  uint4 parts[VECTORS];
  find_vectors<VECTORS>(s, row, vectors);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    if (vectors[i] >= 0) parts[i] = without_zero(load_part(s, row, threadIdx.x + i * blockDim.x));
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (vectors[i] < 0) continue;
    const int place = TWO_STEPS ? place_of(vectors[i]) : vectors[i];
#pragma unroll
    for (int r = 0; r < WORLD; ++r)
      if (r != s.call.rank && (!TWO_STEPS || r == owner_of(vectors[i])))
        put(half.slot(s.call, r, s.call.rank) + 16ull * place, parts[i]);
  }
}

// The second of two steps: add up what this rank owns of a row and send the sums to all ranks, itself too.
template <int VECTORS> __device__ void share_sums(const Sum &s, const Half &half, int row, Patience &patience) {
  int vectors[VECTORS], places[VECTORS];
  uint4 own[VECTORS], sums[VECTORS];
  find_vectors<VECTORS>(s, row, vectors);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const bool is_mine = vectors[i] >= 0 && owner_of(vectors[i]) == s.call.rank;
    places[i] = is_mine ? place_of(vectors[i]) : -1;
    if (is_mine) own[i] = load_part(s, row, threadIdx.x + i * blockDim.x);
  }
  collect<VECTORS>(s.call, half, places, own, sums, patience);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
#pragma unroll
    for (int r = 0; r < WORLD; ++r)
      if (places[i] >= 0) put(half.sums(s.call, r) + 16ull * vectors[i], without_zero(sums[i]));
}

// Add the sums of a row to the stream, which takes the total, and normalise: out = total / rms(total) * weight.
template <int VECTORS>
__device__ void add_and_norm(const Sum &s, int row, const uint4 *sums, const uint4 *stream, const uint4 *weights) {
  float total[VECTORS][ELEMENTS], squares = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int column = threadIdx.x + i * blockDim.x;
    if (column >= s.width) continue;
    float before[ELEMENTS];
    unpack(sums[i], total[i]), unpack(stream[i], before);
#pragma unroll
    for (int j = 0; j < ELEMENTS; ++j) total[i][j] += before[j];
    const uint4 rounded = pack(total[i]);  // the norm sees what the next layer will
    ((uint4 *)(s.stream + row * s.stream_stride))[column] = rounded;
    unpack(rounded, total[i]);
#pragma unroll
    for (int j = 0; j < ELEMENTS; ++j) squares += total[i][j] * total[i][j];
  }
  const float scale = rsqrtf(block_sum(squares) / (s.width * ELEMENTS) + s.eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int column = threadIdx.x + i * blockDim.x;
    if (column >= s.width) continue;
    float weight[ELEMENTS];
    unpack(weights[i], weight);
#pragma unroll
    for (int j = 0; j < ELEMENTS; ++j) total[i][j] = total[i][j] * scale * (weight[j] + s.offset);
    ((uint4 *)s.out)[(uint64)row * s.width + column] = pack(total[i]);
  }
}

// This thread's weights of the norm, which no kernel writes: before the wait.
template <int VECTORS> __device__ void load_weights(const Sum &s, uint4 *weights) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int column = threadIdx.x + i * blockDim.x;
    if (column < s.width) weights[i] = ((const uint4 *)s.weight)[column];
  }
}

// What follows the sums of a row's vectors: the norm, or they are stored as they are.
template <int VECTORS, bool NORM>
__device__ void finish_row(
    const Sum &s, int row, const int *vectors, const uint4 *sums, const uint4 *stream, const uint4 *weights) {
  if (NORM) {
    add_and_norm<VECTORS>(s, row, sums, stream, weights);
  } else {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (vectors[i] >= 0) ((uint4 *)s.out)[vectors[i]] = sums[i];
  }
}

template <int VECTORS, bool NORM, bool TWO_STEPS> __device__ void reduce(const Sum &s) {
  uint4 weights[VECTORS];
  if (NORM) load_weights<VECTORS>(s, weights);
  wait_for_previous();
  Control *control = (Control *)s.call.mailboxes[s.call.rank];
  const uint32 number = peek_word(&control->sums[blockIdx.x]);
  const Half half(s, number, TWO_STEPS);
  Patience patience(s.call);
  for (int row = blockIdx.x; row < s.rows; row += gridDim.x) send_row<VECTORS, TWO_STEPS>(s, half, row);
  if (TWO_STEPS)
    for (int row = blockIdx.x; row < s.rows; row += gridDim.x) share_sums<VECTORS>(s, half, row, patience);
  for (int row = blockIdx.x; row < s.rows; row += gridDim.x) {
    int vectors[VECTORS];
    uint4 own[VECTORS], stream[VECTORS], sums[VECTORS];
    find_vectors<VECTORS>(s, row, vectors);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int column = threadIdx.x + i * blockDim.x;
      if (vectors[i] < 0) continue;
      if (!TWO_STEPS) own[i] = load_part(s, row, column);
      if (NORM) stream[i] = ((const uint4 *)(s.stream + row * s.stream_stride))[column];
    }
    if (TWO_STEPS) receive<VECTORS>(s.call, half, vectors, sums, patience);
    else collect<VECTORS>(s.call, half, vectors, own, sums, patience);
    finish_row<VECTORS, NORM>(s, row, vectors, sums, stream, weights);
  }
  __syncthreads();
  count_call(control->sums, number);
}

// sum_<vectors of a thread>_<1 with norm>_<steps>
#define SUM(VECTORS, NORM, STEPS)                                                                    \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS) sum_##VECTORS##_##NORM##_##STEPS(const Sum s) { \
    reduce<VECTORS, NORM, STEPS == 2>(s);                                                            \
  }
#define SUMS(VECTORS, STEPS) SUM(VECTORS, 0, STEPS) SUM(VECTORS, 1, STEPS)
#if PART == 1
SUMS(COUNT, 1)
#elif PART == 2
SUMS(COUNT, 2)
#endif

// Sums of what copy engines have moved, while multiprocessors computed something else: by rows, as they are in memory.
template <int VECTORS, bool NORM> __device__ void add_sent(const Sent &sent) {
  const Sum &s = sent.sum;
  const int me = s.call.rank;
  char *mailbox = s.call.mailboxes[me];
  uint4 weights[VECTORS];
  if (NORM) load_weights<VECTORS>(s, weights);
  wait_for_previous();
  if (threadIdx.x < WORLD && threadIdx.x != me) {
    const uint32 *flag = (const uint32 *)(mailbox + sent.flags) + slot_of(threadIdx.x, me);
    Patience patience(s.call);
    while (peek_word(flag) != sent.mark)
      if (patience.is_over()) {
        patience.report(threadIdx.x);
        break;
      }
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  }
  __syncthreads();
  for (int row = blockIdx.x; row < s.rows; row += gridDim.x) {
    int vectors[VECTORS];
    uint4 parts[VECTORS][WORLD], stream[VECTORS], sums[VECTORS];
    find_vectors<VECTORS>(s, row, vectors);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int column = threadIdx.x + i * blockDim.x;
      if (vectors[i] < 0) continue;
#pragma unroll
      for (int r = 0; r < WORLD; ++r)
        parts[i][r] = r == me ? load_part(s, row, column)
                              : peek(mailbox + sent.slots + slot_of(r, me) * sent.slot_bytes + 16ull * vectors[i]);
      if (NORM) stream[i] = ((const uint4 *)(s.stream + row * s.stream_stride))[column];
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (vectors[i] >= 0) sums[i] = add_parts(parts[i]);
    finish_row<VECTORS, NORM>(s, row, vectors, sums, stream, weights);
  }
}

// sent_<vectors of a thread>_<1 with norm>
#define SENT(VECTORS, NORM)                                                                             \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS) sent_##VECTORS##_##NORM(const Sent sent) { \
    add_sent<VECTORS, NORM>(sent);                                                                      \
  }
#define SENTS(VECTORS) SENT(VECTORS, 0) SENT(VECTORS, 1)
#if PART == 3
SENTS(COUNT)
#endif

// A packet holds two words, each with the tag of its call. Without a root every rank sends `words` words; with a root it
// alone does, and the others send one empty packet, so that all hear from all.
constexpr int PACKETS = 2;  // of a thread at a time

__device__ void store_pair(const Gather &g, int sender, uint64 packet, uint32 first, uint32 second) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint64 word = 2 * packet + i;
    if (word >= g.words) break;
    g.out[g.root < 0 ? (word / g.columns * WORLD + sender) * g.columns + word % g.columns : word] = i ? second : first;
  }
}

// The two words of a packet that go to rank r.
template <bool EXCHANGE> __device__ uint2 load_pair(const Gather &g, uint64 packet, int r) {
  const uint32 *x = g.x + (EXCHANGE ? r * g.words : 0);
  return {x[2 * packet], 2 * packet + 1 < g.words ? x[2 * packet + 1] : 0};
}

template <bool EXCHANGE> __device__ void spread(const Gather &g) {
  wait_for_previous();
  const Ranks &call = g.call;
  const int me = call.rank, thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  Control *control = (Control *)call.mailboxes[me];
  const uint32 number = peek_word(&control->gathers[blockIdx.x]), tag = 2 * number + 1;  // never 0
  const uint64 packets = (g.words + 1) / 2;
  const uint64 start = CONTROL_BYTES + 2 * call.sum_bytes + number % 2 * call.gather_bytes;
  Patience patience(call);
  const bool is_silent = g.root >= 0 && g.root != me;
  for (uint64 packet = thread; packet < (is_silent ? 1 : packets); packet += threads) {
    uint2 pair = {0, 0};
    if (!EXCHANGE && !is_silent) pair = load_pair<false>(g, packet, 0);
#pragma unroll
    for (int r = 0; r < WORLD; ++r) {
      if (EXCHANGE) pair = load_pair<true>(g, packet, r);
      if (r != me) put(call.mailboxes[r] + start + 16 * (slot_of(me, r) * packets + packet), {pair.x, tag, pair.y, tag});
      else if (EXCHANGE) store_pair(g, me, packet, pair.x, pair.y);
    }
    if (!EXCHANGE && g.root < 0) store_pair(g, me, packet, pair.x, pair.y);
  }
  for (uint64 base = thread; base < packets; base += (uint64)threads * PACKETS) {
    uint4 got[PACKETS][WORLD];
    bool waits = true;
    while (waits) {
      waits = false;
#pragma unroll
      for (int i = 0; i < PACKETS; ++i)
#pragma unroll
        for (int r = 0; r < WORLD; ++r) {
          const uint64 packet = base + (uint64)i * threads, sent = g.root < 0 || r == g.root ? packets : 1;
          got[i][r] = {0, tag, 0, tag};
          if (r != me && packet < sent)
            got[i][r] = peek(call.mailboxes[me] + start + 16 * (slot_of(r, me) * packets + packet));
        }
#pragma unroll
      for (int i = 0; i < PACKETS; ++i)
#pragma unroll
        for (int r = 0; r < WORLD; ++r) waits |= got[i][r].y != tag || got[i][r].w != tag;
      if (waits && patience.is_over()) break;
    }
#pragma unroll
    for (int i = 0; i < PACKETS; ++i)
#pragma unroll
      for (int r = 0; r < WORLD; ++r) {
        if (waits && (got[i][r].y != tag || got[i][r].w != tag)) patience.report(r);
        if (r != me && (g.root < 0 || r == g.root)) store_pair(g, r, base + (uint64)i * threads, got[i][r].x, got[i][r].z);
      }
  }
  __syncthreads();
  count_call(control->gathers, number);
}

#if PART == 4
extern "C" __global__ void __launch_bounds__(MOST_THREADS) gather(const Gather g) { spread<false>(g); }
extern "C" __global__ void __launch_bounds__(MOST_THREADS) exchange(const Gather g) { spread<true>(g); }
#endif
