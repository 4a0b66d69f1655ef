// What is called for hyper-connections of four streams in one kernel, and the weights of a token's streams; behind
// mailbox.cuh. Everything is float32.

using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;

constexpr int S = 4, WEIGHTS = (2 + S) * S;

struct Call {
  const uint16 *streams, *out;  // [T, S, width] and [T, width] bfloat16, strides in elements
  const uint16 *more;           // [T, width], added to `out` and rounded first; or null
  const float *post, *mix;      // [T, S], [T, S, S], of what is pending
  uint16 *fresh;                // [T, S, width]
  const float *fn;              // [WEIGHTS, S * width]
  const float *scale, *base;    // [3], [WEIGHTS]
  const uint16 *norm;           // [width]
  uint16 *x;                    // [T, width]
  float *new_post, *new_mix;
  unsigned char *codes;         // [T, width] e4m3, x once more with a scale for 128 columns; or null
  float *code_scales;           // [width / 128, T]
  int64 token_stride, stream_stride, out_stride, more_stride;
  int tokens, width, iterations;
  float eps, norm_eps;
#if WORLD > 1
  Ranks ranks;
#endif
};

__device__ __forceinline__ float reciprocal(float x) {  // within 1 ulp
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.f + expf(-x)); }

// The product of two vectors and one more number, in the order of the shortest chain behind `b`.
__device__ __forceinline__ float multiply_add(float a0, float a1, float a2, float a3, const float (&b)[S], float more) {
  return fmaf(a2, b[2], fmaf(a0, b[0], more)) + fmaf(a3, b[3], a1 * b[1]);
}

// Reciprocals of sums, of two at a time: one takes a warp's unit for them eight cycles.
__device__ __forceinline__ void invert(const float (&sums)[S], float (&shares)[S]) {
#pragma unroll
  for (int i = 0; i < S; i += 2) {
    const float both = reciprocal(sums[i] * sums[i + 1]);
    shares[i] = both * sums[i + 1], shares[i + 1] = both * sums[i];
  }
}

__device__ __forceinline__ float pick(const float (&values)[S], int i) {
  const float first = i & 1 ? values[1] : values[0], second = i & 1 ? values[3] : values[2];
  return i & 2 ? second : first;
}

// post and the doubly stochastic matrix of a token, by one warp; as the reference: softmax of rows, then columns and
// rows in turn, columns first and last.
//
// The matrix stays as it was after softmax; rows and columns have factors. Dividing columns by their sum plus eps makes
// a column's factor f to f / (f c + eps) = 1 / (c + eps / f), where c is its sum without its own factor: a pass is a
// product with a vector and four reciprocals.
__device__ __forceinline__ void balance(const Call &call, float own, int64 token, int lane) {
  const float post = 2.f * sigmoid(own);
  float most = fmaxf(own, __shfl_xor_sync(~0u, own, 1));  // rows of the matrix are lanes 8 to 11, 12 to 15, and so on
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  float share = expf(own - most);
  float sum = share + __shfl_xor_sync(~0u, share, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  share = share * reciprocal(sum) + call.eps;
  float mix[S][S], row_sums[S], column_sums[S], rows[S], columns[S];
#pragma unroll
  for (int i = 0; i < S; i++) {
    row_sums[i] = column_sums[i] = rows[i] = 1.f;
#pragma unroll
    for (int j = 0; j < S; j++) mix[i][j] = __shfl_sync(~0u, share, 2 * S + i * S + j);
  }
  for (int pass = 0; pass < call.iterations; pass++) {
    if (pass) {
#pragma unroll
      for (int i = 0; i < S; i++)
        row_sums[i] = multiply_add(mix[i][0], mix[i][1], mix[i][2], mix[i][3], columns, row_sums[i] * call.eps);
      invert(row_sums, rows);
    }
#pragma unroll
    for (int j = 0; j < S; j++)
      column_sums[j] = multiply_add(mix[0][j], mix[1][j], mix[2][j], mix[3][j], rows, column_sums[j] * call.eps);
    invert(column_sums, columns);
  }
  if (lane >= S && lane < 2 * S) call.new_post[token * S + lane - S] = post;
  if (lane >= 2 * S && lane < WEIGHTS)
    call.new_mix[token * S * S + lane - 2 * S] = share * pick(rows, lane / S - 2) * pick(columns, lane % S);
}
