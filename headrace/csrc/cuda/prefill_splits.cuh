// The keys of a tile of prefill.cu in several splits. Each leaves sums that are not normalised, and (highest logit,
// total) of each row. Programs that find no more tiles wait for all splits and merge the rows of one each.

#ifdef SPLITS
#ifdef SOFTCAP
__device__ float find_scale(const Call &) { return LOG2_E; }
#else
__device__ float find_scale(const Call &call) { return call.scale; }
#endif

// The sums of a split, in rows of the tile. The arrival is behind the stores of the whole warpgroup.
__device__ void store_part(
    const Call &call, const Tile &tile, const float (&o)[E / 2], const Softmax &softmax, const Rows &rows, int group
) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int low = 0; low < 2; low++) {
    float total = softmax.total[low];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (rows.token[low] < call.tokens && tile.first + rows.token[low] < tile.query_len) {
      const int64 row = int64(tile.slot) * ROWS + rows.token[low] * call.group + rows.head[low];
      if (c == 0) call.stats[row] = make_float2(softmax.top[low] * find_scale(call), total);
      float *to = call.parts + row * E + 2 * c;
#pragma unroll
      for (int i = 0; i < E / 8; i++)
        *reinterpret_cast<float2 *>(to + 8 * i) = make_float2(o[4 * i + 2 * low], o[4 * i + 2 * low + 1]);
    }
  }
  __syncwarp();
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
  if (threadIdx.x % 128 == 0) {
    __threadfence();
    atomicAdd(call.claims + 1, 1);
  }
}

constexpr int LEFT = 1 << 16;  // counts a program that leaves, beside warpgroups that have arrived

constexpr int MERGED = 8;     // splits of a row whose sums are asked for at once
constexpr int EACH = E / 32;  // dims of a lane

// One row of a tile, by a warp: lane i has the highest logit and the total of split i, all lanes have some dims of all.
// `row`: of the first split; those of the next one are `stride` further.
__device__ void merge_row(const Call &call, int64 row, int64 stride, int splits, int head, char *to) {
  const int lane = threadIdx.x % 32;
  float2 stats = make_float2(__int_as_float(0xFF800000), 0.0f);
  if (lane < splits) stats = __ldcg(call.stats + row + lane * stride);
  float top = stats.x;
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
  float share = lane < splits ? exp2_fast(stats.x - top) : 0.0f, total = share * stats.y;
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) total += __shfl_xor_sync(~0u, total, bit);
  if (call.sinks) total += exp2_fast(fmaf(load_sink(call, head), LOG2_E, -top));
  share *= invert(total);
  float sum[EACH] = {};
#pragma unroll 1
  for (int first = 0; first < splits; first += MERGED) {
    float4 part[MERGED];
#pragma unroll
    for (int i = 0; i < MERGED; i++) {
      part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (first + i < splits) {
        const float *from = call.parts + (row + (first + i) * stride) * E + lane * EACH;
#if E == 128
        part[i] = __ldcg(reinterpret_cast<const float4 *>(from));
#else
        const float2 two = __ldcg(reinterpret_cast<const float2 *>(from));
        part[i].x = two.x, part[i].y = two.y;
#endif
      }
    }
#pragma unroll
    for (int i = 0; i < MERGED; i++) {
      const float weight = __shfl_sync(~0u, share, first + i);
      sum[0] = fmaf(weight, part[i].x, sum[0]), sum[1] = fmaf(weight, part[i].y, sum[1]);
#if E == 128
      sum[2] = fmaf(weight, part[i].z, sum[2]), sum[3] = fmaf(weight, part[i].w, sum[3]);
#endif
    }
  }
#if E == 128
  *reinterpret_cast<uint2 *>(to + lane * 8) = make_uint2(pack(sum[0], sum[1]), pack(sum[2], sum[3]));
#else
  *reinterpret_cast<uint32 *>(to + lane * 4) = pack(sum[0], sum[1]);
#endif
}

// All warps that multiply: of the rows of a split's tile, the share that is the split's by its number. In the order of
// the splits, whichever came last. What is waited for has been claimed by programs that run, and these wait for nothing
// before it is done: so it must not be dealt to programs that may not have started.
__device__ void merge_splits(const Call &call) {
  const int warp = threadIdx.x / 32 - 4, total = call.claims[3] * call.kv_heads;
  if (blockIdx.x < total) {
    if (warp == 0) {
      int arrived;
      do {
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(arrived) : "l"(call.claims + 1) : "memory");
      } while (arrived % LEFT < total * GROUPS);
      __syncwarp();
    }
    asm volatile("bar.sync %0, %1;" ::"n"(1 + GROUPS), "n"(128 * GROUPS) : "memory");
  }
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Block block = call.blocks[index / call.kv_heads];
    const int begin = call.query_start[block.x], query_len = call.query_start[block.x + 1] - begin;
    const int split = block.z, splits = block.w, own = min(call.tokens, query_len - block.y) * call.group;
    const int64 stride = int64(call.kv_heads) * ROWS, first = int64(index) * ROWS - split * stride;
    for (int row = own * split / splits + warp; row < own * (split + 1) / splits; row += MATH_WARPS) {
      const int token = begin + block.y + row / call.group;
      const int head = index % call.kv_heads * call.group + row % call.group;
      merge_row(call, first + row, stride, splits, head,
                call.out + (int64(token) * (call.kv_heads * call.group) + head) * (E * 2));
    }
  }
  // The last program to leave: nobody waits any more, and all have claimed.
  if (threadIdx.x == 128 && atomicAdd(call.claims + 1, LEFT) / LEFT == gridDim.x - 1)
    call.claims[0] = call.claims[1] = call.claims[2] = 0;
}
#endif

// A tile's rows, or its splits' sums.
__device__ void finish_tile(
    const Call &call, const Tile &tile, const float (&o)[E / 2], const Softmax &softmax, const Rows &rows, int group
) {
#ifdef SPLITS
  if (tile.splits > 1) return store_part(call, tile, o, softmax, rows, group);
#endif
  store_tile(call, tile, o, softmax, rows);
}
