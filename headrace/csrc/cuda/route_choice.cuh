// The choice of experts by one warp, from a token's logits. Macros of the source: EXPERTS; SCORE 0 softmax, 1 sigmoid, 2
// sqrt_softplus; RENORMALISE.

constexpr int PER_LANE = (EXPERTS + 31) / 32;  // experts j * 32 + lane
constexpr float LEAST = -3.0e38f;  // replaces NaN: chosen last, but before those already chosen

__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(~0u, v, step);
  return v;
}
__device__ __forceinline__ float most_of_warp(float v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
  return v;
}
// Unsigned numbers in the order of floats.
__device__ __forceinline__ uint32 order_of(float v) {
  const uint32 bits = __float_as_uint(v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float score_of(float logit, float most, float sum) {
  if (SCORE == 0) return __expf(logit - most) / sum;
  if (SCORE == 1) return 1.f / (1.f + __expf(-logit));
  if (logit > 20.f) return sqrtf(logit);
  const float power = __expf(logit);
  return sqrtf(logit < -8.f ? power - 0.5f * power * power : logf(1.f + power));
}

// What is added to logits, and to scores for the choice alone.
struct Biases {
  float logit[PER_LANE], choice[PER_LANE];
  bool has_choice;
};
// Of [X], or null. Volatile, so that they are asked for where it is called: before the previous kernel has ended, as they
// come from memory.
__device__ __forceinline__ Biases load_biases(const uint16 *logits, const float *choice) {
  Biases biases = {};
  biases.has_choice = choice;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const int expert = j * 32 + threadIdx.x % 32;
    if (expert >= EXPERTS) continue;
    uint16 word = 0;
    if (logits) asm volatile("ld.global.u16 %0, [%1];" : "=h"(word) : "l"(logits + expert));
    biases.logit[j] = widen(word);
    if (choice) asm volatile("ld.global.f32 %0, [%1];" : "=f"(biases.choice[j]) : "l"(choice + expert));
  }
  return biases;
}

// `logits` without their bias, of lanes that have no expert 0; `ids`, `weights` [k] are the token's. Of equal scores the
// first expert wins.
__device__ __forceinline__ void choose(
    float (&logits)[PER_LANE], const Biases &biases, int64 *ids, float *weights, int top_k, float scale,
    float least_sum) {
  const int lane = threadIdx.x % 32;
  float choice[PER_LANE], most = -3.4e38f, sum = 0.f;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    logits[j] = widen(narrow(logits[j] + biases.logit[j], 0.f) & 0xFFFF);  // as if stored
    if (j * 32 + lane < EXPERTS) most = fmaxf(most, logits[j]);
  }
  if (SCORE == 0) {
    most = most_of_warp(most);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) sum += j * 32 + lane < EXPERTS ? __expf(logits[j] - most) : 0.f;
    sum = sum_of_warp(sum);
  }
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    // softmax keeps order, so logits choose as well, and exactly where tiny scores would tie at 0
    const bool plain = SCORE == 0 && !biases.has_choice;
    choice[j] = plain ? logits[j] : score_of(logits[j], most, sum) + biases.choice[j];
    choice[j] = j * 32 + lane < EXPERTS ? (choice[j] > LEAST ? choice[j] : LEAST) : -__uint_as_float(0x7F800000u);
  }
  int own_id = 0;
  float own_weight = 0.f;
  for (int nth = 0; nth < top_k; nth++) {
    float best = choice[0];
    int at = 0;
#pragma unroll
    for (int j = 1; j < PER_LANE; j++)
      if (choice[j] > best) best = choice[j], at = j;
    const uint32 order = order_of(best), top = __reduce_max_sync(~0u, order);
    const int id = int(__reduce_min_sync(~0u, order == top ? uint32(at * 32 + lane) : ~0u));
    float score = 0.f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
      if (id == j * 32 + lane) score = score_of(logits[j], most, sum), choice[j] = -__uint_as_float(0x7F800000u);
    score = __shfl_sync(~0u, score, id % 32);
    if (nth == lane) own_id = id, own_weight = score;
  }
  const float total = RENORMALISE ? sum_of_warp(lane < top_k ? own_weight : 0.f) + least_sum : 1.f;
  if (lane < top_k) {
    ids[lane] = own_id;
    weights[lane] = own_weight / total * scale;
  }
}
