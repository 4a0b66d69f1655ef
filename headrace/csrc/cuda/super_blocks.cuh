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
__device__ __forceinline__ uint32 product_of_pairs(uint32 a, uint32 b) {
  uint32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// A scale, and a min, for numbers of the weight in bfloat16, rounded once.
template <int FORM>
struct SuperNumbers {
  // With mins: a code at bits 12 and on of a float of this exponent is its number plus BASE.
  static constexpr uint32 BITS = 0x45000000u, MASK = FORM == 1 ? 0xF000u : 0x3F000u;
  static constexpr float BASE = 2048.f;
  // Without: a byte at the end of a bfloat16 is its number times 2**-133, and times the first of these, less the second, a
  // signed one divided by 64. The scale is a sum of two.
  static constexpr uint32 LIFT = 0x7F007F00u, CENTRE = 0xC000C000u;
  float scale, offset;
  uint32 high, low;

  __device__ __forceinline__ void set(const SuperScales<FORM> &own, int plane) {
    scale = own.factor * float(own.scale[plane]);
    if (Supers<FORM>::MINS) {
      offset = -(BASE * scale + own.min_factor * float(own.min[plane]));
    } else {
      scale *= 64.f / float(1 << Supers<FORM>::SHIFT);
      high = narrow(scale, scale);
      scale -= widen_high(high);
      low = narrow(scale, scale);
    }
  }
  // Four codes, from 4 * j on, to two pairs.
  __device__ __forceinline__ void decode(const SuperCodes<FORM> &codes, int plane, int j, uint32 &first, uint32 &second) {
    if (Supers<FORM>::MINS) {
      const uint32 word = FORM == 1 ? codes.words[j] : codes.pick(plane, j);
      float v[4];
#pragma unroll
      for (int b = 0; b < 4; b++) {
        const int right = 8 * b + (FORM == 1 ? 4 * plane : 2) - 12;
        uint32 bits = right < 0 ? word << (-right & 31) : word >> (right & 31);
        asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(bits) : "r"(bits), "n"(MASK), "n"(BITS));  // (a & b) | c
        v[b] = fmaf(__uint_as_float(bits), scale, offset);
      }
      first = narrow(v[0], v[1]), second = narrow(v[2], v[3]);
    } else {
      const uint32 bytes = codes.pick(plane, j) ^ 0x80808080u;
      first = fma_pairs(__byte_perm(bytes, 0, 0x4140), LIFT, CENTRE);
      second = fma_pairs(__byte_perm(bytes, 0, 0x4342), LIFT, CENTRE);
      first = fma_pairs(first, high, product_of_pairs(first, low));
      second = fma_pairs(second, high, product_of_pairs(second, low));
    }
  }
};
