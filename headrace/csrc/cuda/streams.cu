// Hyper-connections of four streams, in two kernels from one sublayer to the next.
//
// `mix_streams` writes the output of the one back to the streams (with -DWRITES=1), multiplies what it wrote by the
// weights of the next while that is in registers, and leaves partial sums of each token's products and squares. A
// thread has 8 columns of all streams of two tokens, which are at once what it stores and its fragments of `mma`: which
// of the 16 inputs of an `mma` a register stands for is free, as long as streams and weights agree, so each thread's
// are neighbours in memory. Weights are float32, as the sum of two bfloat16: an error of 2 ** -17.
//
// `read_streams` adds the sums up: to the weights of a token's streams, the normalised input of the sublayer, and what
// is written back behind it. A block is a token. WORKERS threads sum the streams, which stay in registers; one warp more
// balances the S x S matrix meanwhile, all of it in the registers of each of its lanes: forty dependent passes over it
// take longer than reading the streams, and would take far longer with shuffles in between.
//
// So streams are read twice and written once. Compiled by NVRTC, without any header. -DTOKEN_WARPS, -DCOLUMN_WARPS: warps
// of a block of `mix_streams` that have other tokens, and other columns of the same. -DBLOCKS: of these on a
// multiprocessor at once. -DVECTORS: vectors of 8 values of
// each stream that a thread of `read_streams` has.

using uint32 = unsigned int;

constexpr int S = 4, WEIGHTS = (2 + S) * S, ROW = 32;  // a row of sums: WEIGHTS products, then the sum of squares
constexpr int WORKERS = 256, WARPS = WORKERS / 32;
constexpr int TILES = WEIGHTS / 8;                     // of 8 weights, as `mma` takes them

struct Mix {
  const uint4 *streams;       // [T, S, width] bfloat16, strides in vectors of 8
  const uint4 *out;           // [T, width]
  const float *post, *mix;    // [T, S], [T, S, S]
  uint4 *fresh;               // [T, S, width]
  const float4 *fn;           // [WEIGHTS, S * width] float32
  float *sums;                // [splits, T, ROW]
  long long token_stride, stream_stride, out_stride;
  int tokens, tiles, width, steps;  // tiles of tokens; width in vectors; steps of 4 * COLUMN_WARPS vectors a block
};

struct Read {
  const uint4 *streams;        // [T, S, width] bfloat16, strides in vectors
  const float *sums;           // [splits, T, ROW]
  const float *scale, *base;   // [3], [WEIGHTS]
  const uint4 *norm;           // [width] bfloat16
  uint4 *x;                    // [T, width] bfloat16
  float *post, *mix;           // [T, S], [T, S, S]
  long long token_stride, stream_stride;
  int tokens, splits, width, iterations;  // width in vectors
  float eps, norm_eps;
};

__device__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ float reciprocal(float x) {  // within 1 ulp
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ float low(uint32 word) { return __uint_as_float(word << 16); }
__device__ float high(uint32 word) { return __uint_as_float(word & 0xffff0000u); }

__device__ uint32 narrow(float a, float b) {  // a in the low half; to nearest, ties to even
  uint32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
  return word;
}

__device__ float warp_sum(float x) {
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// c [16, 8] += a [16, 16] * b [16, 8]
__device__ void multiply(float (&c)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A token's 8 columns of a stream, written back to: post * out plus its shares of all streams.
__device__ uint4 write_back(const uint4 (&own)[S], uint4 out, float4 mix, float post) {
  const float share[S] = {mix.x, mix.y, mix.z, mix.w};
  uint32 words[4];
  for (int w = 0; w < 4; w++) {
    const uint32 word = ((const uint32 *)&out)[w];
    float a = post * low(word), b = post * high(word);
    for (int j = 0; j < S; j++) {
      const uint32 stream = ((const uint32 *)&own[j])[w];
      a += share[j] * low(stream), b += share[j] * high(stream);
    }
    words[w] = narrow(a, b);  // rounded first: the next sublayer sees what is written
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ float sum_squares(uint4 x) {
  float sum = 0.f;
  for (int w = 0; w < 4; w++) {
    const uint32 word = ((const uint32 *)&x)[w];
    sum += low(word) * low(word) + high(word) * high(word);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(32 * TOKEN_WARPS * COLUMN_WARPS, BLOCKS) mix_streams(
    const __grid_constant__ Mix call) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quarter = lane % 4;
  const int tile = blockIdx.x % call.tiles, split = blockIdx.x / call.tiles;
  const long long first = (long long)(tile * TOKEN_WARPS + warp / COLUMN_WARPS) * 16 + row;
  const int begin = split * call.steps * COLUMN_WARPS + warp % COLUMN_WARPS;  // chunks of 4 vectors
  if (4 * begin < call.width) {
    // no kernel writes the weights: they may come nearer before the wait
    for (int k = 0; k < S; k++) {
      for (int t = 0; t < TILES; t++) {
        prefetch(call.fn + ((long long)(t * 8 + row) * S + k) * 2 * call.width + 2 * (4 * begin + quarter));
      }
    }
  }
  wait_for_previous();
  const bool there[2] = {first < call.tokens, first + 8 < call.tokens};
#if WRITES
  __shared__ float4 mixes[TOKEN_WARPS * COLUMN_WARPS][16][S];  // of a token and stream k: mix[0..3][k]
  __shared__ float posts[TOKEN_WARPS * COLUMN_WARPS][16][S];
  for (int at = lane; at < 16 * S * S; at += 32) {
    const int place = at / (S * S), j = at / S % S, k = at % S;
    const long long token = first - row + place;
    const bool is_token = token < call.tokens;
    ((float *)&mixes[warp][place][k])[j] = is_token ? call.mix[token * S * S + j * S + k] : 0.f;
    if (j == 0) posts[warp][place][k] = is_token ? call.post[token * S + k] : 0.f;
  }
  __syncwarp();
#endif
  float total[TILES][4] = {}, squares[2] = {};
  for (int step = 0; step < call.steps; step++) {
    const int at = 4 * (begin + step * COLUMN_WARPS) + quarter;
    if (at >= call.width) break;  // all lanes at once: width is a multiple of 4
    uint4 own[2][S];
#if WRITES
    uint4 out[2];
#endif
    for (int i = 0; i < 2; i++) {
      const long long token = first + 8 * i;
      for (int s = 0; s < S; s++) {
        own[i][s] = there[i] ? call.streams[token * call.token_stride + s * call.stream_stride + at]
                             : make_uint4(0, 0, 0, 0);
      }
#if WRITES
      out[i] = there[i] ? call.out[token * call.out_stride + at] : make_uint4(0, 0, 0, 0);
#endif
    }
#pragma unroll
    for (int k = 0; k < S; k++) {
      uint4 x[2];
      for (int i = 0; i < 2; i++) {
#if WRITES
        x[i] = write_back(own[i], out[i], mixes[warp][row + 8 * i][k], posts[warp][row + 8 * i][k]);
        if (there[i]) call.fresh[((first + 8 * i) * S + k) * call.width + at] = x[i];
#else
        x[i] = own[i][k];
#endif
        squares[i] += sum_squares(x[i]);
      }
      for (int t = 0; t < TILES; t++) {
        const float4 *fn = call.fn + ((long long)(t * 8 + row) * S + k) * 2 * call.width + 2 * at;
        const float4 a = fn[0], b = fn[1];
        const float weights[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        uint32 coarse[4], fine[4];
        for (int w = 0; w < 4; w++) {
          coarse[w] = narrow(weights[2 * w], weights[2 * w + 1]);
          fine[w] = narrow(weights[2 * w] - low(coarse[w]), weights[2 * w + 1] - high(coarse[w]));
        }
        multiply(total[t], x[0].x, x[1].x, x[0].y, x[1].y, coarse[0], coarse[1]);
        multiply(total[t], x[0].z, x[1].z, x[0].w, x[1].w, coarse[2], coarse[3]);
        multiply(total[t], x[0].x, x[1].x, x[0].y, x[1].y, fine[0], fine[1]);
        multiply(total[t], x[0].z, x[1].z, x[0].w, x[1].w, fine[2], fine[3]);
      }
    }
  }
  for (int i = 0; i < 2; i++) {  // the four lanes of a row have its columns
    squares[i] += __shfl_xor_sync(~0u, squares[i], 1);
    squares[i] += __shfl_xor_sync(~0u, squares[i], 2);
  }
#if COLUMN_WARPS > 1
  __shared__ float parts[TOKEN_WARPS * COLUMN_WARPS][16][ROW];
  float(*rows)[ROW] = parts[warp];
#endif
  for (int i = 0; i < 2; i++) {
#if COLUMN_WARPS == 1
    if (!there[i]) continue;
    float *sums = call.sums + ((long long)split * call.tokens + first + 8 * i) * ROW;
#else
    float *sums = rows[row + 8 * i];
#endif
    for (int t = 0; t < TILES; t++) {
      *(float2 *)(sums + t * 8 + quarter * 2) = make_float2(total[t][2 * i], total[t][2 * i + 1]);
    }
    if (quarter == 0) sums[WEIGHTS] = squares[i];
  }
#if COLUMN_WARPS > 1
  __syncthreads();
  for (int at = threadIdx.x; at < TOKEN_WARPS * 16 * ROW; at += 32 * TOKEN_WARPS * COLUMN_WARPS) {
    const int place = at / ROW, weight = at % ROW;
    const long long token = (long long)tile * TOKEN_WARPS * 16 + place;
    if (token >= call.tokens || weight > WEIGHTS) continue;
    float sum = 0.f;
    for (int w = 0; w < COLUMN_WARPS; w++) sum += parts[place / 16 * COLUMN_WARPS + w][place % 16][weight];
    call.sums[((long long)split * call.tokens + token) * ROW + weight] = sum;
  }
#endif
}

// What every weight of a token is multiplied by: its streams are normalised as one vector.
__device__ float factor(const Read &call, float squares) {
  return rsqrtf(squares / (8.f * S * call.width) + call.norm_eps);
}

// post and the doubly stochastic matrix of a token, by one warp.
__device__ void weigh(const Read &call, long long token) {
  const int lane = threadIdx.x % 32;
  float own = 0.f;  // lane w has weight w
#pragma unroll 8
  for (int split = 0; split < call.splits; split++) {
    if (lane <= WEIGHTS) own += call.sums[((long long)split * call.tokens + token) * ROW + lane];
  }
  own *= factor(call, __shfl_sync(~0u, own, WEIGHTS));
  if (lane < WEIGHTS) own = own * call.scale[lane < S ? 0 : lane < 2 * S ? 1 : 2] + call.base[lane];
  if (lane >= S && lane < 2 * S) call.post[token * S + lane - S] = 2.f * sigmoid(own);
  float mix[S][S];
  for (int i = 0; i < S; i++) {
    for (int j = 0; j < S; j++) mix[i][j] = __shfl_sync(~0u, own, 2 * S + i * S + j);
  }
  // softmax of rows; then, as the reference, columns and rows in turn, columns first and last
  for (int i = 0; i < S; i++) {
    float most = mix[i][0], sum = 0.f;
    for (int j = 1; j < S; j++) most = fmaxf(most, mix[i][j]);
    for (int j = 0; j < S; j++) sum += mix[i][j] = expf(mix[i][j] - most);
    for (int j = 0; j < S; j++) mix[i][j] = mix[i][j] / sum + call.eps;
  }
  for (int pass = 0; pass < 2 * call.iterations - 1; pass += 2) {
    if (pass) {
      for (int i = 0; i < S; i++) {
        const float share = reciprocal((mix[i][0] + mix[i][1]) + (mix[i][2] + mix[i][3]) + call.eps);
        for (int j = 0; j < S; j++) mix[i][j] *= share;
      }
    }
    for (int j = 0; j < S; j++) {
      const float share = reciprocal((mix[0][j] + mix[1][j]) + (mix[2][j] + mix[3][j]) + call.eps);
      for (int i = 0; i < S; i++) mix[i][j] *= share;
    }
  }
  for (int i = 0; i < S; i++) {
    for (int j = 0; j < S; j++) {
      if (lane == i * S + j) call.mix[token * S * S + lane] = mix[i][j];
    }
  }
}

// The weighted sum of a token's streams, normalised, by WORKERS threads.
__device__ void sum_up(const Read &call, long long token) {
  __shared__ float squares_of[WARPS];
  const int lane = threadIdx.x % 32;
  uint4 streams[VECTORS][S];
  for (int v = 0; v < VECTORS; v++) {
    const int at = threadIdx.x + v * WORKERS;
    for (int s = 0; s < S; s++) {
      streams[v][s] = at < call.width ? call.streams[token * call.token_stride + s * call.stream_stride + at]
                                      : make_uint4(0, 0, 0, 0);
    }
  }
  float pre[S] = {}, squares = 0.f;  // each warp adds up the same numbers in the same order
  for (int split = lane; split < call.splits; split += 32) {
    const float *row = call.sums + ((long long)split * call.tokens + token) * ROW;
    const float4 own = *(const float4 *)row;
    pre[0] += own.x, pre[1] += own.y, pre[2] += own.z, pre[3] += own.w, squares += row[WEIGHTS];
  }
  const float share = factor(call, warp_sum(squares));
  for (int s = 0; s < S; s++) pre[s] = sigmoid(warp_sum(pre[s]) * share * call.scale[0] + call.base[s]) + call.eps;
  uint32 sum[VECTORS][4];
  float total = 0.f;
  for (int v = 0; v < VECTORS; v++) {
    for (int w = 0; w < 4; w++) {
      float a = 0.f, b = 0.f;
      for (int s = 0; s < S; s++) {
        const uint32 word = ((const uint32 *)&streams[v][s])[w];
        a += pre[s] * low(word), b += pre[s] * high(word);
      }
      sum[v][w] = narrow(a, b);  // the norm sees the rounded sum
      total += low(sum[v][w]) * low(sum[v][w]) + high(sum[v][w]) * high(sum[v][w]);
    }
  }
  total = warp_sum(total);
  if (lane == 0) squares_of[threadIdx.x / 32] = total;
  asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");  // the warp beside them does not take part
  total = 0.f;
  for (int warp = 0; warp < WARPS; warp++) total += squares_of[warp];
  const float scale = rsqrtf(total / (8.f * call.width) + call.norm_eps);
  for (int v = 0; v < VECTORS; v++) {
    const int at = threadIdx.x + v * WORKERS;
    if (at >= call.width) continue;
    const uint4 norm = call.norm[at];
    uint32 out[4];
    for (int w = 0; w < 4; w++) {
      const uint32 weight = ((const uint32 *)&norm)[w];
      out[w] = narrow(low(sum[v][w]) * scale * low(weight), high(sum[v][w]) * scale * high(weight));
    }
    call.x[token * call.width + at] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32) read_streams(const __grid_constant__ Read call) {
  wait_for_previous();
  if (threadIdx.x < WORKERS) {
    sum_up(call, blockIdx.x);
  } else {
    weigh(call, blockIdx.x);
  }
}
