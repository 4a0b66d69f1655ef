// Activations into the forms that the kernels take, and sums into the output. Included by each instruction set's
// source, which compiles it for its own registers: everything here is local to that source.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "packed_linear.h"

#ifndef HEADRACE_IS_SCALAR
#include <immintrin.h>
#endif

namespace headrace::HEADRACE_ISA {
namespace {

using namespace packed;

inline float half_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// IEEE binary16 to float.
inline float float16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t bits = static_cast<uint32_t>(half & 0x7fffu) << 13;
  float value;
  if (bits >= 0x0f800000u) {  // infinity and NaN
    bits += 0x70000000u;
    std::memcpy(&value, &bits, 4);
  } else {
    std::memcpy(&value, &bits, 4);
    value *= 0x1p112f;  // right for subnormals too
  }
  std::memcpy(&bits, &value, 4);
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The code of input k of an output, which lies in `word`.
inline int32_t code_of(Format format, uint32_t word, int64_t k) {
  if (format <= Format::kInt8Group) return static_cast<int8_t>(word >> (k % 4 * 8));
  const int32_t nibble = word >> (k % 4 * 8 + k % 8 / 4 * 4) & 15;
  return is_looked_up(format) ? table_of(format).values[nibble] : nibble;
}

// A row as floats [padded].
inline void read_row(const Input& input, int64_t row, int64_t inputs, int64_t padded, float* out) {
  if (input.is_half) {
    const uint16_t* x = static_cast<const uint16_t*>(input.data) + row * input.stride;
    for (int64_t k = 0; k < inputs; ++k) out[k] = half_to_float(x[k]);
  } else {
    std::memcpy(out, static_cast<const float*>(input.data) + row * input.stride, inputs * sizeof(float));
  }
  if (padded > inputs) std::memset(out + inputs, 0, (padded - inputs) * sizeof(float));
}

// The same, in `room` where it does not lie in memory so.
inline const float* floats_of(const Input& input, int64_t row, int64_t inputs, int64_t padded, float* room) {
  if (!input.is_half && padded == inputs) return static_cast<const float*>(input.data) + row * input.stride;
  read_row(input, row, inputs, padded, room);
  return room;
}

// The same as bfloat16.
inline void read_half_row(const Input& input, int64_t row, int64_t inputs, int64_t padded, uint16_t* out) {
  if (input.is_half) {
    std::memcpy(out, static_cast<const uint16_t*>(input.data) + row * input.stride, inputs * sizeof(uint16_t));
  } else {
    const float* x = static_cast<const float*>(input.data) + row * input.stride;
    for (int64_t k = 0; k < inputs; ++k) out[k] = float_to_half(x[k]);
  }
  if (padded > inputs) std::memset(out + inputs, 0, (padded - inputs) * sizeof(uint16_t));
}

#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
// Magnitude of the largest of `count` floats, a multiple of 16; not finite if one of them is not.
inline float largest_of(const float* x, int64_t count) {
  __m512i top = _mm512_setzero_si512();  // floats without sign order as integers do
  for (int64_t k = 0; k < count; k += 16)
    top = _mm512_max_epi32(top, _mm512_and_si512(_mm512_loadu_si512(x + k), _mm512_set1_epi32(0x7fffffff)));
  const int32_t bits = _mm512_reduce_max_epi32(top);
  float most;
  std::memcpy(&most, &bits, 4);
  return most;
}

// Symmetric 8-bit codes of `count` floats, of which `most` is the largest magnitude; returns the scale.
inline float quantise(const float* x, int64_t count, float most, int8_t* codes, int32_t* sum) {
  const __m512 inverse = _mm512_set1_ps(most > 1e-30f ? 127.0f / most : 0.0f);
  __m512i total = _mm512_setzero_si512();
  for (int64_t k = 0; k < count; k += 16) {
    const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), _mm512_cvtepi32_epi8(code));
    total = _mm512_add_epi32(total, code);
  }
  *sum = _mm512_reduce_add_epi32(total);
  return most / 127.0f;
}
#else
// Magnitude of the largest of `count` floats; not finite if one of them is not.
inline float largest_of(const float* x, int64_t count) {
  int32_t top = 0;  // floats without sign order as integers do, which compilers can vectorise
  for (int64_t k = 0; k < count; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + k, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  float most;
  std::memcpy(&most, &top, 4);
  return most;
}

// Symmetric 8-bit codes of `count` floats, of which `most` is the largest magnitude; returns the scale.
inline float quantise(const float* x, int64_t count, float most, int8_t* codes, int32_t* sum) {
  const float scale = most / 127.0f, inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
  int32_t total = 0;
  for (int64_t k = 0; k < count; ++k) {
    const float shifted = x[k] * inverse + kMagic;
    int32_t code;
    std::memcpy(&code, &shifted, 4);
    code -= 0x4b400000;
    codes[k] = static_cast<int8_t>(code);
    total += static_cast<int8_t>(code);
  }
  *sum = total;
  return scale;
}

#endif

// The same in 15 bits, as two bytes: code = 128 * coarse + fine. The scale is that of 128, as for 8 bits alone.
inline float quantise_finely(const float* x, int64_t count, float most, int8_t* coarse, int8_t* fine, int32_t* sum) {
  constexpr int32_t kUnit = 1 << GroupRows::kFineBits;
  const float inverse = most > 1e-30f ? 127.0f * kUnit / most : 0.0f;
  constexpr float kMagic = 12582912.0f;
  int32_t total = 0;
  for (int64_t k = 0; k < count; ++k) {
    const float shifted = x[k] * inverse + kMagic;
    int32_t code;
    std::memcpy(&code, &shifted, 4);
    code -= 0x4b400000;
    const int32_t high = (code + kUnit / 2) >> GroupRows::kFineBits;
    coarse[k] = static_cast<int8_t>(high), fine[k] = static_cast<int8_t>(code - kUnit * high);
    total += code;
  }
  *sum = total;
  return most / 127.0f;
}

// How many times the mean of a row's groups the largest input of a group is when the group is rounded finely: weights
// of 8 bits deserve finer inputs than those of 4.
inline float fine_from(Format format) { return format == Format::kInt8Group ? 2.0f : 4.0f; }

// A row of kInt8Group, see GroupRows; `tops` has room for a float a group.
inline void quantise_groups(const Weight& weight, const float* x, const Rows& rows, int64_t m, float* tops) {
  const int64_t padded = weight.padded(), groups = weight.groups(), known = (weight.inputs + kGroup - 1) / kGroup;
  const GroupRows to(rows.values, rows.count, padded);
  uint8_t* const flags = to.flags(m, groups);
  float mean = 0.0f;
  for (int64_t g = 0; g < groups; ++g) mean += tops[g] = largest_of(x + g * kGroup, kGroup);
  const float bound = fine_from(weight.format) * mean / static_cast<float>(known);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = m * padded + g * kGroup;
    const bool is_fine = tops[g] > bound;
    int32_t sum;
    float scale, unit;
    if (is_fine) {
      scale = quantise_finely(x + g * kGroup, kGroup, tops[g], to.codes + at, to.fine + at, &sum);
      unit = scale / (1 << GroupRows::kFineBits);
    } else {
      scale = unit = quantise(x + g * kGroup, kGroup, tops[g], to.codes + at, &sum);
    }
    flags[g * GroupRows::kRows] = is_fine ? 255 : 0;
    rows.scales[m * groups + g] = scale, rows.sums[m * groups + g] = unit * static_cast<float>(sum);
  }
}

#ifndef HEADRACE_IS_SCALAR
// The groups of some rows that have fine bytes, found once for all panels that the rows are multiplied with.
class FineGroups {
 public:
  // Rows [first, last); `first` is a multiple of 16. Valid until the calling thread makes another.
  FineGroups(const Weight& weight, const Rows& rows, int64_t first, int64_t last)
      : first_(first), size_(weight.groups() + 1) {
    if (rows.form != RowForm::kInt8Group) return;
    static thread_local std::vector<uint32_t> room;
    const int64_t blocks = (last - first + GroupRows::kRows - 1) / GroupRows::kRows;
    if (static_cast<int64_t>(room.size()) < blocks * size_) room.resize(blocks * size_);
    lists_ = room.data();
    const GroupRows bytes(rows.values, rows.count, weight.padded());
    for (int64_t m = first; m < last; m += GroupRows::kRows) {
      uint32_t* const list = lists_ + (m - first) / GroupRows::kRows * size_;
      const uint8_t* const flags = bytes.flags(m, weight.groups());
      const int known = last - m < GroupRows::kRows ? (1 << (last - m)) - 1 : 0xffff;
      uint32_t length = 0;
      for (int64_t g = 0; g < weight.groups(); ++g) {
        const __m128i own = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + g * GroupRows::kRows));
        const int members = _mm_movemask_epi8(own) & known;
        if (members) list[1 + length++] = static_cast<uint32_t>(g << GroupRows::kRows | members);
      }
      list[0] = length;
    }
  }

  // Whether some of the 16 rows from m on have fine bytes; m is a multiple of 16.
  bool has_some(int64_t m) const { return lists_ && list(m)[0]; }
  // f(g, members) for each group that some of them have, a bit for each such row.
  template <class F>
  void over(int64_t m, const F& f) const {
    const uint32_t* const own = list(m);
    for (uint32_t i = 1; i <= own[0]; ++i) f(int64_t{own[i] >> GroupRows::kRows}, own[i] & 0xffff);
  }

 private:
  const uint32_t* list(int64_t m) const { return lists_ + (m - first_) / GroupRows::kRows * size_; }
  int64_t first_, size_;
  uint32_t* lists_ = nullptr;
};
#endif

// Zeros beyond the last row in tiles, when `last` is the number of rows.
inline void zero_beyond(const Rows& rows, int64_t padded, int64_t last) {
  if (!is_tiled(rows.form) || last != rows.count) return;
  const int64_t row_bytes = padded * (rows.form == RowForm::kBfloat16Tile ? 2 : 1);
  for (int64_t m = last; m % 16; ++m) {
    char* tile = static_cast<char*>(rows.values) + m / 16 * 16 * row_bytes + m % 16 * 64;
    for (int64_t at = 0; at < row_bytes; at += 64) std::memset(tile + at * 16, 0, 64);
  }
}

// Rows [first, last) into `rows.form`.
inline void prepare_rows(const Weight& weight, const Input& input, const Rows& rows, int64_t first, int64_t last) {
  static thread_local std::vector<float> room;
  const int64_t inputs = weight.inputs, padded = weight.padded();
  if (static_cast<int64_t>(room.size()) < 2 * padded) room.resize(2 * padded);
  float* const line = room.data();
  for (int64_t m = first; m < last; ++m) {
    switch (rows.form) {
      case RowForm::kFloat32:
        read_row(input, m, inputs, padded, static_cast<float*>(rows.values) + m * padded);
        break;
      case RowForm::kBfloat16:
        read_half_row(input, m, inputs, padded, static_cast<uint16_t*>(rows.values) + m * padded);
        break;
      case RowForm::kBfloat16Tile: {
        const uint16_t* half = static_cast<const uint16_t*>(input.data) + m * input.stride;
        if (!input.is_half || padded != inputs) {
          read_half_row(input, m, inputs, padded, reinterpret_cast<uint16_t*>(line));
          half = reinterpret_cast<uint16_t*>(line);
        }
        uint16_t* tile = static_cast<uint16_t*>(rows.values) + m / 16 * 16 * padded + m % 16 * 32;
        for (int64_t k = 0; k < padded; k += 32) std::memcpy(tile + k * 16, half + k, 64);
        break;
      }
      case RowForm::kInt8:
      case RowForm::kInt8Tile: {
        const float* const x = floats_of(input, m, inputs, padded, line);
        int32_t sum;
        if (rows.form == RowForm::kInt8) {
          rows.scales[m] = quantise(x, padded, largest_of(x, padded),
                                    static_cast<int8_t*>(rows.values) + m * padded, &sum);
        } else {
          int8_t* codes = reinterpret_cast<int8_t*>(line + padded);
          rows.scales[m] = quantise(x, padded, largest_of(x, padded), codes, &sum);
          int8_t* tile = static_cast<int8_t*>(rows.values) + m / 16 * 16 * padded + m % 16 * 64;
          for (int64_t k = 0; k < padded; k += 64) std::memcpy(tile + k * 16, codes + k, 64);
        }
        rows.sums[m] = static_cast<float>(sum);
        break;
      }
      case RowForm::kInt8Group:
        quantise_groups(weight, floats_of(input, m, inputs, padded, line), rows, m, line + padded);
        break;
    }
  }
  zero_beyond(rows, padded, last);
}

// `count` sums of row m, the outputs of panel p, into the output with the bias added.
inline void store_row(const Weight& weight, const Output& out, int64_t m, int64_t p, const float* sums) {
  const int64_t n = p * kPanel, left = weight.outputs - n, count = left < kPanel ? left : kPanel;
  if (!out.is_half && out.bias == nullptr && count == kPanel) {
    std::memcpy(static_cast<float*>(out.data) + m * out.stride + n, sums, kPanel * sizeof(float));
    return;
  }
  float values[kPanel];
  for (int64_t i = 0; i < kPanel; ++i) values[i] = sums[i];
  if (out.bias != nullptr) {
    for (int64_t i = 0; i < count; ++i)
      values[i] += out.is_bias_half ? half_to_float(static_cast<const uint16_t*>(out.bias)[n + i])
                                    : static_cast<const float*>(out.bias)[n + i];
  }
  if (!out.is_half) {
    float* to = static_cast<float*>(out.data) + m * out.stride + n;
    std::memcpy(to, values, count * sizeof(float));
    return;
  }
  uint16_t halves[kPanel];
  for (int64_t i = 0; i < kPanel; ++i) halves[i] = float_to_half(values[i]);
  std::memcpy(static_cast<uint16_t*>(out.data) + m * out.stride + n, halves, count * sizeof(uint16_t));
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
