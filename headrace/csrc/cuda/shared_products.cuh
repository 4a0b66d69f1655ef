// Products of 64 rows of the weight and rows of x, both in shared memory, of one instruction. After hopper.cuh. Macros of
// the source: PRODUCT, the instruction's inputs and types, and MODES, what follows its operands.

// sums [64, COUNT] += rows of the weight [64, inputs] times rows of x [COUNT, inputs]; `adds` 0: = instead
#define MULTIPLY(N, SUMS, NAMES, A, B, P) \
  if constexpr (COUNT == N) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" #N PRODUCT " {" NAMES "}, " A ", " B MODES "\n}" \
      : SUMS(d, 0) : "l"(weight), "l"(rows), "r"(adds))

// COUNT is a multiple of 16 up to 256; sums of further rows are left as they are.
template <int COUNT, int SIZE>
__device__ __forceinline__ void multiply(float (&d)[SIZE], uint64 weight, uint64 rows, int adds) {
  static_assert(COUNT % 16 == 0 && COUNT <= 256 && COUNT <= 2 * SIZE, "no product");
  MULTIPLY(16, F8, S8, "%8", "%9", "%10");
  MULTIPLY(32, F16, S16, "%16", "%17", "%18");
  MULTIPLY(48, F24, S24, "%24", "%25", "%26");
  MULTIPLY(64, F32, S32, "%32", "%33", "%34");
  MULTIPLY(80, F40, S40, "%40", "%41", "%42");
  MULTIPLY(96, F48, S48, "%48", "%49", "%50");
  MULTIPLY(112, F56, S56, "%56", "%57", "%58");
  MULTIPLY(128, F64, S64, "%64", "%65", "%66");
  MULTIPLY(144, F72, S72, "%72", "%73", "%74");
  MULTIPLY(160, F80, S80, "%80", "%81", "%82");
  MULTIPLY(176, F88, S88, "%88", "%89", "%90");
  MULTIPLY(192, F96, S96, "%96", "%97", "%98");
  MULTIPLY(208, F104, S104, "%104", "%105", "%106");
  MULTIPLY(224, F112, S112, "%112", "%113", "%114");
  MULTIPLY(240, F120, S120, "%120", "%121", "%122");
  MULTIPLY(256, F128, S128, "%128", "%129", "%130");
}
