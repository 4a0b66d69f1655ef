// Pairs of token and expert sorted by expert, stably: see GROUP_PAIRS. A block for each expert, and a last one for pairs
// without any; each reads all ids once, and is told by nobody.
//
// A warp has `turns` times 32 pairs, one behind the other. A lane keeps which of its first 64 pairs are of this expert in
// a mask; those of further turns are read again.
//
// Compiled by NVRTC.

#include "numbers.cuh"

constexpr int WARPS = 32, AHEAD = 8;  // AHEAD ids of a lane are on their way

struct Call {
  const int64 *ids;           // [pairs]; -1: none
  int *order, *place, *ends;  // [pairs], [pairs], [experts]
  int pairs, experts, turns;  // turns is a multiple of AHEAD
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) sort_pairs(const Call call) {
  __shared__ int own[WARPS], lower[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, expert = blockIdx.x;
  const int first = warp * call.turns * 32 + lane;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  uint64 mask = 0;
  int mine = 0, before = 0;
  for (int turn = 0; turn < call.turns; turn += AHEAD) {
    int ids[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int pair = first + (turn + i) * 32;
      ids[i] = pair < call.pairs ? (int)call.ids[pair] : 0x7fffffff;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int id = ids[i] < 0 ? call.experts : ids[i];
      mine += id == expert, before += id < expert;
      if (turn + i < 64) mask |= uint64(id == expert) << (turn + i);
    }
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    mine += __shfl_xor_sync(~0u, mine, step);
    before += __shfl_xor_sync(~0u, before, step);
  }
  if (lane == 0) own[warp] = mine, lower[warp] = before;
  __syncthreads();
  int at = 0, all = 0;  // of this warp's first pair, and past the last of all warps
  for (int i = 0; i < WARPS; i++) {
    at += lower[i] + (i < warp ? own[i] : 0);
    all += lower[i] + own[i];
  }
  if (threadIdx.x == 0 && expert < call.experts) call.ends[expert] = all;
  if (mine == 0) return;
  for (int turn = 0; turn < call.turns; turn++) {
    const int pair = first + turn * 32;
    bool is_mine;
    if (turn < 64) {
      is_mine = mask >> turn & 1;
    } else {
      const int id = pair < call.pairs ? (int)call.ids[pair] : 0x7fffffff;
      is_mine = (id < 0 ? call.experts : id) == expert;
    }
    const uint32 beside = __ballot_sync(~0u, is_mine);
    if (is_mine) {
      const int to = at + __popc(beside & ((1u << lane) - 1));
      call.order[to] = pair;
      call.place[pair] = to;
    }
    at += __popc(beside);
  }
}
