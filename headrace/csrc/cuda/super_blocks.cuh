// Weights of super-blocks of 256 inputs, whose scales come in two levels, in tiles of eight rows: where a thread finds
// its codes and scales. After numbers.cuh.
//
// FORM: 1 codes of 4 bits, 2 of 6 bits, with a scale and a min of 6 bits for each 32 inputs, times two float16; 3 signed
// codes of 4 bits, 4 of 6 bits, with a scale of 8 bits for each 16 inputs, times a float16. A unit is 128 inputs of eight
// rows; of a row a thread has 16 inputs, from 16 * part on, of each of its two planes of 64 inputs. `Supers` in
// kernels/coded_linear/device_codes.py says which bits are which.

template <int FORM>
struct Supers {
  static constexpr int BITS = FORM % 2 ? 4 : 6;
  static constexpr bool MINS = FORM <= 2;
  static constexpr int UNIT_BYTES = 128 * BITS, TABLE_BYTES = MINS ? 128 : 144;  // of eight rows; of a super-block
  static constexpr int SHIFT = BITS == 4 ? 4 : 2;  // bits that products with `pick` and `scale` are lifted by
};

// Codes of a thread.
template <int FORM>
struct SuperCodes {
  uint32 words[FORM % 2 ? 4 : 6];

  __device__ __forceinline__ void load(const char *unit, int row, int part) {
    *(uint4 *)words = *(const uint4 *)(unit + row * 64 + part * 16);
    if (Supers<FORM>::BITS == 6) *(uint2 *)(words + 4) = *(const uint2 *)(unit + 512 + row * 32 + part * 8);
  }
  // Four codes, from 4 * j on, of a plane as bytes. Of 4 bits with mins those of plane 0 are as they are and those of
  // plane 1 16 times as large, others of 4 bits 16 times and of 6 bits 4 times.
  __device__ __forceinline__ uint32 pick(int plane, int j) const {
    if (Supers<FORM>::BITS == 4) {
      if (Supers<FORM>::MINS) return words[j] & (plane ? 0xF0F0F0F0u : 0x0F0F0F0Fu);
      return (plane ? words[j] : words[j] << 4) & 0xF0F0F0F0u;
    }
    const uint32 *three = words + 3 * plane;
    if (j < 3) return three[j] & 0xFCFCFCFCu;
    const uint32 high = (three[0] << 6 & 0xC0C0C0C0u) | (three[1] << 4 & ~0xC0C0C0C0u);
    return (high & 0xF0F0F0F0u) | (three[2] << 2 & 0x0C0C0C0Cu);
  }
};

// Scales, and mins, of a thread's inputs of both planes of a unit, the first or second (`odd`) of a super-block.
template <int FORM>
struct SuperScales {
  float factor, min_factor;
  int scale[2], min[2];

  __device__ __forceinline__ void load(const char *table, int row, int part, bool odd) {
    if (Supers<FORM>::MINS) {
      const uint4 words = *(const uint4 *)(table + row * 16);
      factor = half_of(words.x, false), min_factor = half_of(words.x, true);
      const uint32 bits = __byte_perm(odd ? words.z : words.y, odd ? words.w : words.z,
                                      (part & 2 ? 0x0543 : 0x0210) + (odd ? 0x222 : 0));
      set(bits);
    } else {
      const uint32 both = *(const uint16 *)(table + row * 16 + odd * 8 + part * 2);
      factor = half_of(*(const uint16 *)(table + 128 + row * 2), false), min_factor = 0.f;
      scale[0] = (signed char)(both & 0xFF), scale[1] = (signed char)(both >> 8), min[0] = min[1] = 0;
    }
  }
  // From 24 bits, and whatever is above them.
  __device__ __forceinline__ void set(uint32 bits) {
    scale[0] = bits & 63, scale[1] = bits >> 6 & 63, min[0] = bits >> 12 & 63, min[1] = bits >> 18 & 63;
  }
  // The scale of codes as `pick` has them, lifted.
  __device__ __forceinline__ int lifted(int plane) const { return FORM == 1 && plane == 0 ? scale[0] << 4 : scale[plane]; }
};

__device__ __forceinline__ uint32 fma_pairs(uint32 a, uint32 b, uint32 c) {  // of bfloat16
  uint32 out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
__device__ __forceinline__ uint32 twice(uint32 pair, bool high) {
  uint32 out;
  if (high)
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(out) : "r"(pair));
  else
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(out) : "r"(pair));
  return out;
}
__device__ __forceinline__ uint32 product_of_pairs(uint32 a, uint32 b) {
  uint32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// For numbers of the weight in bfloat16, rounded once. With mins, scale * code - min is scale * (code - zero) - rest:
// `zero` is the quotient of both, rounded so that the difference is exact, which is divided by 256, and `rest` what that
// leaves. Without, `zero` is the centre of codes. The scale is a sum of two.
template <int FORM>
struct SuperTerms {
  static constexpr float GRID = FORM == 1 ? 3072.f : 12288.f;  // of floats near it: 1 / 16 or 1 / 4, divided by 256
  static constexpr uint32 CENTRE = FORM == 3 ? 0xBD00BD00u : 0xBE00BE00u;

  // Bfloat16 parts of 256 times the scale, the larger one in the low half.
  static __device__ __forceinline__ uint32 split(float scale) {
    const float high = widen(narrow(scale, 0.f));
    return narrow(high, scale - high);
  }
  // Minus zero / 256, and (high half) minus the rest. A scale of zero has a zero of 256.
  static __device__ __forceinline__ uint32 divide(float scale, float min) {
    const float near = (__saturatef(min * invert(scale)) + GRID) - GRID, zero = widen(narrow(near, 0.f));
    return narrow(-zero, fmaf(zero, scale, -min));
  }
  // Two codes, lifted by bits, at the ends of bfloat16, which they are 2**-133 times as numbers.
  static __device__ __forceinline__ uint32 decode(uint32 codes, int lifted, uint32 scales, uint32 offsets) {
    const uint32 LIFT = uint32(125 - lifted + 127) * 0x00800080u;  // to the number divided by 256
    const uint32 high = twice(scales, false), low = twice(scales, true);
    if (Supers<FORM>::MINS) {
      const uint32 number = fma_pairs(codes, LIFT, twice(offsets, false));
      return fma_pairs(number, high, fma_pairs(number, low, twice(offsets, true)));
    }
    const uint32 number = fma_pairs(codes, LIFT, CENTRE);
    return fma_pairs(number, high, product_of_pairs(number, low));
  }
};

// The same of a thread that has 16 inputs of a plane.
template <int FORM>
struct SuperNumbers {
  static constexpr uint32 HIGHEST = Supers<FORM>::MINS ? 0 : 0x80808080u;  // of signed codes, to which the centre is added
  uint32 scales, offsets;

  __device__ __forceinline__ void set(const SuperScales<FORM> &own, int plane) {
    const float scale = own.factor * 256.f * float(own.scale[plane]);
    scales = SuperTerms<FORM>::split(scale);
    offsets = Supers<FORM>::MINS ? SuperTerms<FORM>::divide(scale, own.min_factor * float(own.min[plane])) : 0;
  }
  // Four codes, from 4 * j on, to two pairs.
  __device__ __forceinline__ void decode(
      const SuperCodes<FORM> &codes, int plane, int j, uint32 &first, uint32 &second
  ) const {
    const int lifted = FORM == 1 && plane == 0 ? 0 : Supers<FORM>::SHIFT;
    const uint32 bytes = codes.pick(plane, j) ^ HIGHEST;
    first = SuperTerms<FORM>::decode(__byte_perm(bytes, 0, 0x4140), lifted, scales, offsets);
    second = SuperTerms<FORM>::decode(__byte_perm(bytes, 0, 0x4342), lifted, scales, offsets);
  }
};
