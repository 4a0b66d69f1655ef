// Sums that blocks of a cluster send each other: a barrier in the receiver's shared memory counts the bytes that have
// come, so that a sender waits for nothing, where a barrier of the cluster would have it wait for all that it has stored
// in global memory. After a source's uint32.
//
// A barrier has one phase, unless bytes are expected anew. `expect_sums`, `publish_barriers`, then arrive at the cluster's
// barrier (relaxed), and wait for that before the first `send`: all barriers are there then. No block may end before it
// has all that others send it.

__device__ __forceinline__ void expect_sums(uint32 bar, uint32 bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// To an address of this block in another one of the cluster, whose barrier counts the bytes.
#define TO_BLOCK \
  "{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 bar, %1, %2;\n" \
  "st.async.shared::cluster.mbarrier::complete_tx::bytes"
__device__ __forceinline__ void send(uint32 to, uint32 bar, int block, float v) {
  asm volatile(TO_BLOCK ".f32 [there], %3, [bar]; }" ::"r"(to), "r"(bar), "r"(block), "f"(v) : "memory");
}
__device__ __forceinline__ void send(uint32 to, uint32 bar, int block, float2 v) {
  asm volatile(TO_BLOCK ".v2.f32 [there], {%3, %4}, [bar]; }"
               ::"r"(to), "r"(bar), "r"(block), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ void send(uint32 to, uint32 bar, int block, float4 v) {
  asm volatile(TO_BLOCK ".v4.f32 [there], {%3, %4, %5, %6}, [bar]; }"
               ::"r"(to), "r"(bar), "r"(block), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ void wait_for_sums(uint32 bar, uint32 parity = 0) {
  asm volatile("{ .reg .pred done;\n"
               "AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra AGAIN; }" ::"r"(bar), "r"(parity) : "memory");
}
