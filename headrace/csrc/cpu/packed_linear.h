// Matrix products with weights packed in panels of 16 outputs: layout and arguments of the kernels.
//
// A weight [N, K] is stored as 32-bit words [panels, words, 16], so that word w of all 16 outputs of a panel is 64
// contiguous bytes and a product reads memory once, in order. A word holds, by format, inputs of one output:
//   float32  one float                              int8, int8_group  four signed bytes
//   bfloat16 two, the even input in the low half    the others        eight nibbles: byte j has input j in its low and
//                                                                     input j + 4 in its high half
// Inputs are padded with zeros to a multiple of 64. value = code * scale for int8 (a scale per output) and
// code * scale + min for the group formats (a scale and a min per output and 32 inputs, float16 [panels, groups, 16]).
// The code is the nibble itself for int4_group; e2m1_group and iq4_group look it up in a table, and have no mins.
#pragma once

#include <cstdint>

namespace headrace::packed {

#define HEADRACE_PACKED_INLINE \
  inline __attribute__((always_inline))  // objects with different flags must not share code

constexpr int64_t kPanel = 16;  // outputs of a panel
constexpr int64_t kGroup = 32;  // inputs that share a scale
constexpr int64_t kPad = 64;    // inputs are padded to a multiple

enum class Format : int64_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kInt8 = 2,
  kInt8Group = 3,
  kInt4Group = 4,
  kE2m1Group = 5,
  kIq4Group = 6
};

HEADRACE_PACKED_INLINE int64_t inputs_per_word(Format format) {
  constexpr int64_t counts[] = {1, 2, 4, 4, 8, 8, 8};
  return counts[static_cast<int64_t>(format)];
}

// Tables of the formats whose nibbles are indices: twice an E2M1 number (OCP Microscaling Formats 1.0, 5.3.3), and
// ggml's IQ4_NL.
struct Table {
  int8_t values[16];
};
constexpr Table kE2m1 = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};
constexpr Table kIq4 = {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};

HEADRACE_PACKED_INLINE constexpr const Table& table_of(Format format) {
  return format == Format::kE2m1Group ? kE2m1 : kIq4;
}

HEADRACE_PACKED_INLINE constexpr bool is_looked_up(Format format) { return format >= Format::kE2m1Group; }

struct Weight {
  Format format;
  int64_t outputs, inputs;
  const uint32_t* words;
  const float* scales = nullptr;           // int8: [panels * 16]
  const uint16_t* group_scales = nullptr;  // group formats: float16 [panels, groups, 16]
  const uint16_t* group_mins = nullptr;    // the same, or null: zeros

  HEADRACE_PACKED_INLINE int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  HEADRACE_PACKED_INLINE int64_t padded() const { return (inputs + kPad - 1) / kPad * kPad; }
  HEADRACE_PACKED_INLINE int64_t groups() const { return padded() / kGroup; }
  HEADRACE_PACKED_INLINE int64_t num_words() const { return padded() / inputs_per_word(format); }
  HEADRACE_PACKED_INLINE const uint32_t* panel(int64_t p) const { return words + p * num_words() * kPanel; }
};

// Forms in which kernels take the activations. Rows are padded with zeros to Weight::padded().
enum class RowForm : int64_t {
  kFloat32,       // floats [M, K]
  kBfloat16,      // bfloat16 [M, K]
  kBfloat16Tile,  // bfloat16 [M / 16, K / 32, 16, 32], rows padded with zeros to a multiple of 16
  kInt8,          // signed bytes [M, K], a scale per row
  kInt8Tile,      // signed bytes [M / 16, K / 64, 16, 64], a scale per row
  kInt8Group,     // signed bytes, a scale, and the sum of the values that the codes stand for, per row and 32 inputs;
                  // see GroupRows
};

// Rows of kInt8Group: bytes [M, K], then fine bytes [M, K], then flags [M / 16, groups, 16]: 255 where a group's fine
// bytes count, else 0, and they are not written. Where they count, an input is (128 * byte + fine byte) / 128 scales,
// else byte * scale. A group whose greatest input is far above that of the row's others would round its other inputs to
// nothing: it alone gets 15 bits. What a row is rounded to depends on no other row. M is a multiple of 16.
struct GroupRows {
  static constexpr int kFineBits = 7;
  static constexpr int64_t kRows = 16;
  int8_t *codes, *fine;
  uint8_t* is_fine;

  HEADRACE_PACKED_INLINE static int64_t bytes(int64_t rows, int64_t padded) {
    return rows * (2 * padded + padded / kGroup);
  }
  HEADRACE_PACKED_INLINE GroupRows(void* values, int64_t count, int64_t padded)
      : codes(static_cast<int8_t*>(values)), fine(codes + (count + kRows - 1) / kRows * kRows * padded),
        is_fine(reinterpret_cast<uint8_t*>(fine + (count + kRows - 1) / kRows * kRows * padded)) {}
  // Row m's, of its first group; the next group's is 16 bytes on.
  HEADRACE_PACKED_INLINE uint8_t* flags(int64_t m, int64_t groups) const {
    return is_fine + m / kRows * kRows * groups + m % kRows;
  }
};

struct Input {
  const void* data;  // [M, K] floats or bfloat16
  int64_t rows, stride;
  bool is_half;
};

struct Rows {
  RowForm form;
  int64_t count;
  void* values;
  float* scales;  // [M] or [M, groups]
  float* sums;    // int8: [M] sums of codes; int8 group: [M, groups] sums of values
};

// How a gated product combines its halves.
enum class Gate { kNone, kSilu, kGeluTanh };

struct Output {
  void* data;  // [M, N] floats or bfloat16
  int64_t stride;
  bool is_half;
  const void* bias;  // [N] floats or bfloat16, or null
  bool is_bias_half;
  Gate gate = Gate::kNone;  // else [M, N / 2]: outputs n and n + N / 2 become one. For rows in tiles alone
};

HEADRACE_PACKED_INLINE bool is_tiled(RowForm form) {
  return form == RowForm::kBfloat16Tile || form == RowForm::kInt8Tile;
}

HEADRACE_PACKED_INLINE int64_t row_form_bytes(RowForm form, const Weight& weight, int64_t num_rows) {
  const int64_t padded_rows = (num_rows + 15) / 16 * 16;
  if (form == RowForm::kInt8Group) return GroupRows::bytes(padded_rows, weight.padded());
  const int64_t size = form == RowForm::kFloat32 ? 4 : form <= RowForm::kBfloat16Tile ? 2 : 1;
  return padded_rows * weight.padded() * size;
}

}  // namespace headrace::packed

namespace headrace {

// One instruction set's kernels.
struct PackedKernels {
  // The fastest form for this many rows.
  packed::RowForm (*choose_form)(const packed::Weight& weight, int64_t num_rows, bool is_half);
  // Rows [first, last) of the input into their form.
  void (*prepare)(const packed::Weight& weight, const packed::Input& input, const packed::Rows& rows, int64_t first,
                  int64_t last);
  // Rows [first_row, last_row) times panels [first, last), those of gates where there are some; first_row is a multiple
  // of 16.
  void (*multiply)(const packed::Weight& weight, const packed::Rows& rows, const packed::Output& out, int64_t first_row,
                   int64_t last_row, int64_t first, int64_t last);
};

// Rows [begin, end) of those listed, as floats or bfloat16 [rows, inputs].
struct PackedGather {
  void (*gather)(const packed::Weight& weight, const int64_t* rows, int64_t begin, int64_t end, void* out,
                 bool is_half);
};

}  // namespace headrace
