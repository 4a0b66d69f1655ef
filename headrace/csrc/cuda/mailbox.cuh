// What ranks store into each other's mailboxes, and how they wait for it; collective.cu says how it works. -DWORLD: ranks;
// -DTYPE: 0 float32, 1 bfloat16, 2 float16.

using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr int MOST_RANKS = 8, MOST_THREADS = 512, MOST_BLOCKS = 1024;
constexpr int CONTROL_BYTES = 16384;  // at the start of a mailbox; two halves for sums and two for gathers follow
constexpr int ELEMENTS = TYPE == 0 ? 4 : 8;  // of a vector
constexpr int POLLS = 256;                   // between two looks at the clock

struct Control {  // in a rank's own mailbox
  uint32 sums[MOST_BLOCKS], gathers[MOST_BLOCKS];  // calls so far, by block
  uint32 failed;                                   // no call waits any more
  uint32 looked, budget;  // when the host's words were last read, and the budget then (0: not yet)
};

struct Host {  // in pinned host memory, which the host reads and writes at any time
  uint32 late[MOST_RANKS];  // set: this rank waited for that one in vain
  uint32 aborted;           // set by the host: give up
  uint32 budget;            // milliseconds that a call waits for its peers
};

struct Ranks {  // what all kernels have in common
  char *mailboxes[MOST_RANKS];  // of every rank, at the addresses of this process
  Host *host;
  uint64 sum_bytes, gather_bytes;  // of a half
  int rank;
};

__device__ void put(void *to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ uint4 peek(const void *from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ void put_word(uint32 *to, uint32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ uint32 peek_word(const uint32 *from) {
  uint32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ uint64 nanoseconds() {
  uint64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ void rest() { __nanosleep(100); }

__device__ void widen(uint32 word, float &low, float &high) {
#if TYPE == 1
  low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000u);
#elif TYPE == 2
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(low), "=f"(high) : "r"(word));
#endif
}

__device__ uint32 narrow(float low, float high) {
  uint32 word = 0;
#if TYPE == 1
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#elif TYPE == 2
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
  return word;
}

__device__ void unpack(uint4 v, float *x) {
  const uint32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (TYPE == 0) x[i] = __uint_as_float(words[i]);
    else widen(words[i], x[2 * i], x[2 * i + 1]);
  }
}

__device__ uint4 pack(const float *x) {
  uint32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = TYPE == 0 ? __float_as_uint(x[i]) : narrow(x[2 * i], x[2 * i + 1]);
  return {words[0], words[1], words[2], words[3]};
}

__device__ uint32 without_zero(uint32 word) { return word ? word : TYPE == 0 ? 0x80000000u : 0x80008000u; }

__device__ uint4 without_zero(uint4 v) {
  return {without_zero(v.x), without_zero(v.y), without_zero(v.z), without_zero(v.w)};
}

__device__ bool has_arrived(uint4 v) { return v.x && v.y && v.z && v.w; }

// A rank's place among the peers of `receiver`, who has no slot for itself.
__device__ int slot_of(int sender, int receiver) { return sender < receiver ? sender : sender - 1; }

// How long to wait for peers. When time is up, or the host says so, all calls of this rank stop waiting.
//
// The host's words are across PCIe, some microseconds a read and warp. If all who wait read them, this rank is late for
// its peers, who wait and read in turn, and every later call takes as long. So one thread of the rank reads them, about
// once a millisecond, and the others read its copy.
struct Patience {
  const Ranks &call;
  Control *control;
  uint32 polls = 0;
  uint64 began = 0;
  bool failed;

  __device__ Patience(const Ranks &call)
      : call(call), control((Control *)call.mailboxes[call.rank]), failed(peek_word(&control->failed)) {}

  __device__ bool is_over() {
    if (failed) return true;
    if (++polls % POLLS) return false;
    if (peek_word(&control->failed)) return failed = true;
    const uint64 now = nanoseconds();
    if (!began) began = now;
    look(now >> 20);
    const uint64 budget = peek_word(&control->budget);
    if (budget && now - began > 1000000 * budget) {
      put_word(&control->failed, 1);
      return failed = true;
    }
    rest();
    return false;
  }

  // Read the host's words, unless another thread has in this tick, which is about a millisecond.
  __device__ void look(uint32 tick) {
    const uint32 before = peek_word(&control->looked);
    if (before == tick || atomicCAS(&control->looked, before, tick) != before) return;
    put_word(&control->budget, peek_word(&call.host->budget));
    if (peek_word(&call.host->aborted)) put_word(&control->failed, 1);
  }

  __device__ void report(int peer) { put_word(&call.host->late[peer], 1); }
};

// Once all threads have read `calls[blockIdx.x]`: advance it, and with it those of blocks that only larger grids have.
__device__ void count_call(uint32 *calls, uint32 number) {
  for (int i = blockIdx.x + threadIdx.x * gridDim.x; i < MOST_BLOCKS; i += blockDim.x * gridDim.x)
    put_word(&calls[i], number + 1);
}

// The sum of all ranks' parts of a vector, in their order.
__device__ uint4 add_parts(const uint4 *parts) {
  float sum[ELEMENTS] = {}, part[ELEMENTS];
#pragma unroll
  for (int r = 0; r < WORLD; ++r) {
    unpack(parts[r], part);
#pragma unroll
    for (int j = 0; j < ELEMENTS; ++j) sum[j] += part[j];
  }
  return pack(sum);
}

// Two parts of one rank, rounded as if stored.
__device__ uint4 add_two(uint4 one, uint4 other) {
  float sum[ELEMENTS], more[ELEMENTS];
  unpack(one, sum), unpack(other, more);
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) sum[i] += more[i];
  return pack(sum);
}

// The sum in one step of vector number `vector` of a tensor of `vectors`, in call `number` of the sums: sends this rank's
// part, waits for those of all peers and clears them. Bit for bit, and in the same places, what collective.cu does. A
// thread that has several vectors sends all, by calls that do not collect, before it collects each.
template <bool SENDS = true, bool COLLECTS = true>
__device__ uint4 sum_vector(
    const Ranks &call, uint32 number, uint64 vectors, uint64 vector, uint4 own, Patience &patience) {
  const int me = call.rank;
  const uint64 start = CONTROL_BYTES + number % 2 * call.sum_bytes + 16 * vector;
#pragma unroll
  for (int r = 0; r < WORLD; ++r)
    if (SENDS && r != me) put(call.mailboxes[r] + start + slot_of(me, r) * 16 * vectors, without_zero(own));
  if (!COLLECTS) return own;
  char *from = call.mailboxes[me] + start;
  uint4 parts[WORLD];
  bool waits = true;
  while (waits) {
    waits = false;
#pragma unroll
    for (int r = 0; r < WORLD; ++r) {
      parts[r] = r == me ? own : peek(from + slot_of(r, me) * 16 * vectors);
      waits |= r != me && !has_arrived(parts[r]);
    }
    if (waits && patience.is_over()) break;
  }
#pragma unroll
  for (int r = 0; r < WORLD; ++r) {
    if (r == me) continue;
    if (waits && !has_arrived(parts[r])) patience.report(r);
    put(from + slot_of(r, me) * 16 * vectors, {0, 0, 0, 0});
  }
  return add_parts(parts);
}
