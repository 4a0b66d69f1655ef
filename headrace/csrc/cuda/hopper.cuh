// What kernels on Hopper share: barriers in shared memory, copies by TMA, operands of wgmma. After numbers.cuh.

struct alignas(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ uint32 shared_address(const void *place) {
  uint32 address;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(place));
  return address;
}

__device__ __forceinline__ void init_barrier(uint32 bar, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrive at the barrier that is at the same place in a program of the cluster.
__device__ __forceinline__ void arrive_at(uint32 bar, uint32 program) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(bar), "r"(program) : "memory");
}
// Arrive; the barrier's phase also waits for so many bytes.
__device__ __forceinline__ void expect_bytes(uint32 bar, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for(uint32 bar, uint32 parity) {
  asm volatile("{ .reg .pred done;\n"
               "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra AGAIN; }" ::"r"(bar), "r"(parity) : "memory");
}

// Ask the L2 for a line that no kernel writes.
__device__ __forceinline__ void prefetch_line(const void *place) { asm volatile("prefetch.global.L2 [%0];" ::"l"(place)); }

// An L2 policy for what is read once.
__device__ __forceinline__ int64 read_once() {
  int64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Ask for a piece of memory, of a multiple of 16 bytes.
__device__ __forceinline__ void copy_bytes(uint32 to, const void *from, uint32 bytes, uint32 bar, int64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
               "%4;" ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
__device__ __forceinline__ void load_box(uint32 to, const TensorMap *map, uint32 bar, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row) : "memory");
}
// The same of a map of [pieces, rows, columns], from the first column on.
__device__ __forceinline__ void load_pieces(uint32 to, const TensorMap *map, uint32 bar, int row, int piece) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %4, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(row), "r"(piece) : "memory");
}
// Ask for a box for those programs of a cluster whose bits are set, to the same place and barrier of each.
__device__ __forceinline__ void load_box_for(
    uint16 programs, uint32 to, const TensorMap *map, uint32 bar, int column, int row
) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, "
      "%5}], [%2], %3;" ::"r"(to), "l"(map), "r"(bar), "h"(programs), "r"(column), "r"(row) : "memory");
}
// Ask for a map itself, of which the first copy would wait for it.
__device__ __forceinline__ void prefetch_map(const TensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Eight rows of gate from `row` on, then the same of up, and so on: a map of [columns, 8 rows, 2, eights].
__device__ __forceinline__ void load_gated_box(uint32 to, const TensorMap *map, uint32 bar, int column, int row) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %4, %4, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(0), "r"(row / 8) : "memory");
}

// A float at the same place in another program of the cluster.
__device__ __forceinline__ float load_of(const float *own, int program) {
  float value;
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2;\n ld.shared::cluster.f32 %0, [there]; }"
               : "=f"(value) : "r"(shared_address(own)), "r"(program) : "memory");
  return value;
}

// A matrix of rows of 128 bytes in shared memory, swizzled by 128 bytes; groups of eight rows follow each other.
__device__ __forceinline__ uint64 describe_operand(uint32 address) {
  return uint64((address & 0x3FFFF) >> 4) | (1ull << 16) | (uint64(1024 >> 4) << 32) | (1ull << 62);
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Keeps the compiler from moving sums of products that run.
template <int N>
__device__ __forceinline__ void fence_sums(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Transposes the 4 x 4 words of 4 neighbouring lanes: word i of lane l becomes word l of lane i.
__device__ __forceinline__ void transpose(uint32 (&v)[4]) {
  bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32 other = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
    v[i] = odd ? other : v[i];
    v[i + 1] = odd ? v[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32 other = __shfl_xor_sync(~0u, high ? v[i] : v[i + 2], 2);
    v[i] = high ? other : v[i];
    v[i + 2] = high ? v[i + 2] : other;
  }
}

// Four matrices of 8 x 8 numbers of 16 bits to shared memory, transposed: a lane has two of row lane / 4, and names the
// place of the 16 bytes of column lane % 8 of matrix lane / 8.
__device__ __forceinline__ void put(uint32 to, const uint32 *words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// Operands of so many sums, a multiple of 8, and their names, in the text of an instruction.
#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8(d, i) F4(d, i), F4(d, i + 4)
#define F16(d, i) F8(d, i), F8(d, i + 8)
#define F24(d, i) F16(d, i), F8(d, i + 16)
#define F32(d, i) F24(d, i), F8(d, i + 24)
#define F40(d, i) F32(d, i), F8(d, i + 32)
#define F48(d, i) F40(d, i), F8(d, i + 40)
#define F56(d, i) F48(d, i), F8(d, i + 48)
#define F64(d, i) F56(d, i), F8(d, i + 56)
#define F72(d, i) F64(d, i), F8(d, i + 64)
#define F80(d, i) F72(d, i), F8(d, i + 72)
#define F88(d, i) F80(d, i), F8(d, i + 80)
#define F96(d, i) F88(d, i), F8(d, i + 88)
#define F104(d, i) F96(d, i), F8(d, i + 96)
#define F112(d, i) F104(d, i), F8(d, i + 104)
#define F120(d, i) F112(d, i), F8(d, i + 112)
#define F128(d, i) F120(d, i), F8(d, i + 120)
#define S4 "%0,%1,%2,%3"
#define S8 S4 ",%4,%5,%6,%7"
#define S16 S8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define S24 S16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define S32 S16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define S36 S32 ",%32,%33,%34,%35"
#define S40 S36 ",%36,%37,%38,%39"
#define S44 S40 ",%40,%41,%42,%43"
#define S48 S44 ",%44,%45,%46,%47"
#define S52 S48 ",%48,%49,%50,%51"
#define S56 S52 ",%52,%53,%54,%55"
#define S64 S56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define S72 S64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define S80 S72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define S88 S80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define S96 S88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define S104 S96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define S112 S104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define S120 S112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define S128 S120 ",%120,%121,%122,%123,%124,%125,%126,%127"
