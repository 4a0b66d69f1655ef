// Products whose left operand is 64 rows of the weight in registers, decoded there. After hopper.cuh. Macro: FP8 (1: the
// operand is e5m2 and rows of x are e4m3; else both are bfloat16).

#if FP8
#define NUMBERS "k32.f32.e5m2.e4m3"
#define ORDER ""
#else
#define NUMBERS "k16.f32.bf16.bf16"
#define ORDER ", 0"  // rows of x are not transposed
#endif

// sums [64, N] += codes [64, K] (a fragment in registers) times rows of x [ROWS, K], K of 32 bytes; `adds` 0: = instead
#define MULTIPLY(N, SUMS, NAMES, A0, A1, A2, A3, B, P) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" N NUMBERS " {" NAMES "}, {" A0 "," A1 "," A2 "," A3 "}, " B \
      ", p, 1, 1" ORDER ";\n}" \
      : SUMS(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(adds))

// N is a multiple of 16 up to 256; sums of further rows are left as they are.
template <int N, int SUMS>
__device__ __forceinline__ void multiply(float (&d)[SUMS], const uint32 (&a)[4], uint64 rows, int adds) {
  static_assert(N % 16 == 0 && N <= 256 && N <= 2 * SUMS, "no product");
  if constexpr (N == 16)
    MULTIPLY("16", F8, S8, "%8", "%9", "%10", "%11", "%12", "%13");
  if constexpr (N == 32)
    MULTIPLY("32", F16, S16, "%16", "%17", "%18", "%19", "%20", "%21");
  if constexpr (N == 48)
    MULTIPLY("48", F24, S24, "%24", "%25", "%26", "%27", "%28", "%29");
  if constexpr (N == 64)
    MULTIPLY("64", F32, S32, "%32", "%33", "%34", "%35", "%36", "%37");
  if constexpr (N == 80)
    MULTIPLY("80", F40, S40, "%40", "%41", "%42", "%43", "%44", "%45");
  if constexpr (N == 96)
    MULTIPLY("96", F48, S48, "%48", "%49", "%50", "%51", "%52", "%53");
  if constexpr (N == 112)
    MULTIPLY("112", F56, S56, "%56", "%57", "%58", "%59", "%60", "%61");
  if constexpr (N == 128)
    MULTIPLY("128", F64, S64, "%64", "%65", "%66", "%67", "%68", "%69");
  if constexpr (N == 144)
    MULTIPLY("144", F72, S72, "%72", "%73", "%74", "%75", "%76", "%77");
  if constexpr (N == 160)
    MULTIPLY("160", F80, S80, "%80", "%81", "%82", "%83", "%84", "%85");
  if constexpr (N == 176)
    MULTIPLY("176", F88, S88, "%88", "%89", "%90", "%91", "%92", "%93");
  if constexpr (N == 192)
    MULTIPLY("192", F96, S96, "%96", "%97", "%98", "%99", "%100", "%101");
  if constexpr (N == 208)
    MULTIPLY("208", F104, S104, "%104", "%105", "%106", "%107", "%108", "%109");
  if constexpr (N == 224)
    MULTIPLY("224", F112, S112, "%112", "%113", "%114", "%115", "%116", "%117");
  if constexpr (N == 240)
    MULTIPLY("240", F120, S120, "%120", "%121", "%122", "%123", "%124", "%125");
  if constexpr (N == 256)
    MULTIPLY("256", F128, S128, "%128", "%129", "%130", "%131", "%132", "%133");
}
