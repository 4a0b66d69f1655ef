// The distinct experts that few tokens have chosen. After numbers.cuh. Needs of the source: `Call` with ids, factors,
// tokens, top_k; `Shared` with count, experts, pairs, factors; macro DOWN.

// Choices from the L2: down reads them before its wait, where a multiprocessor may still have older ones.
__device__ __forceinline__ int load_id(const int64 *from) {
  int64 id;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(id) : "l"(from) : "memory");
  return int(id);
}
__device__ __forceinline__ float load_factor(const float *from) {
  float factor;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(factor) : "l"(from) : "memory");
  return factor;
}

// Distinct experts in order of first choice, and who chose them. Each warp finds the same, so that none waits for
// others before it asks for weights; of `pairs` others' writes are only seen after a barrier.
template <class Call, class Shared>
__device__ __forceinline__ void find_experts(const Call &call, Shared &s) {
  const int lane = threadIdx.x % 32, num_pairs = call.tokens * call.top_k;
  int count = 0;
  for (int first = 0; first < num_pairs; first += 32) {
    const int pair = first + lane;
    const int id = pair < num_pairs ? load_id(call.ids + pair) : -1;
    if (DOWN && pair < num_pairs) s.factors[pair] = load_factor(call.factors + pair);
    const uint32 same = __match_any_sync(~0u, id);
    int rank = -1;
    if (id >= 0)
      for (int j = 0; j < count; j++) rank = s.experts[j] == id ? j : rank;
    const int leader = __ffs(same) - 1;
    const bool is_new = id >= 0 && rank < 0;
    const uint32 leaders = __ballot_sync(~0u, is_new && leader == lane);
    if (is_new) rank = count + __popc(leaders & ((1u << leader) - 1));
    if (is_new && leader == lane) s.experts[rank] = id;
    if (id >= 0) s.pairs[rank][pair / call.top_k] = pair;
    count += __popc(leaders);
    __syncwarp();
  }
  if (lane == 0) s.count = count;
  __syncwarp();
}
