// compiled for: scalar
// Packed products in plain C++: right everywhere, and the oracle of the other instruction sets.
#include "packed_rows.h"

namespace headrace::HEADRACE_ISA {
namespace {

RowForm choose_form(const Weight& weight, int64_t, bool) {
  if (weight.format <= Format::kBfloat16) return RowForm::kFloat32;
  return weight.format == Format::kInt8 ? RowForm::kInt8 : RowForm::kInt8Group;
}

float multiply_floats(const Weight& weight, const float* x, const uint32_t* panel, int64_t i) {
  float sum = 0.0f;
  for (int64_t k = 0; k < weight.padded(); ++k) {
    if (weight.format == Format::kFloat32) {
      float value;
      std::memcpy(&value, panel + k * kPanel + i, 4);
      sum += x[k] * value;
    } else {
      sum += x[k] * half_to_float(static_cast<uint16_t>(panel[k / 2 * kPanel + i] >> (k % 2 * 16)));
    }
  }
  return sum;
}

float multiply_codes(const Weight& weight, const Rows& rows, int64_t m, int64_t p, int64_t i) {
  const uint32_t* panel = weight.panel(p);
  const int64_t per_word = inputs_per_word(weight.format), groups = weight.groups();
  if (weight.format == Format::kInt8) {
    const int8_t* x = static_cast<const int8_t*>(rows.values) + m * weight.padded();
    int32_t sum = 0;
    for (int64_t k = 0; k < weight.padded(); ++k)
      sum += x[k] * code_of(weight.format, panel[k / per_word * kPanel + i], k);
    return static_cast<float>(sum) * rows.scales[m] * weight.scales[p * kPanel + i];
  }
  const GroupRows bytes(rows.values, rows.count, weight.padded());
  const uint8_t* const flags = bytes.flags(m, groups);
  float total = 0.0f;
  for (int64_t g = 0; g < groups; ++g) {
    int32_t sum = 0;
    constexpr int32_t kUnit = 1 << GroupRows::kFineBits;
    const int64_t row = m * weight.padded();
    const bool is_fine = flags[g * GroupRows::kRows];
    for (int64_t k = g * kGroup; k < (g + 1) * kGroup; ++k)
      sum += (kUnit * bytes.codes[row + k] + (is_fine ? bytes.fine[row + k] : 0)) *
             code_of(weight.format, panel[k / per_word * kPanel + i], k);
    const int64_t at = (p * groups + g) * kPanel + i;
    total += static_cast<float>(sum) *
             (rows.scales[m * groups + g] / kUnit * float16_to_float(weight.group_scales[at]));
    if (weight.group_mins != nullptr) total += rows.sums[m * groups + g] * float16_to_float(weight.group_mins[at]);
  }
  return total;
}

void multiply(const Weight& weight, const Rows& rows, const Output& out, int64_t first_row, int64_t last_row,
              int64_t first, int64_t last) {
  for (int64_t p = first; p < last; ++p) {
    for (int64_t m = first_row; m < last_row; ++m) {
      float sums[kPanel];
      for (int64_t i = 0; i < kPanel; ++i) {
        sums[i] = rows.form == RowForm::kFloat32
                      ? multiply_floats(weight, static_cast<const float*>(rows.values) + m * weight.padded(),
                                        weight.panel(p), i)
                      : multiply_codes(weight, rows, m, p, i);
      }
      store_row(weight, out, m, p, sums);
    }
  }
}

}  // namespace

extern const PackedKernels packed_kernels;
const PackedKernels packed_kernels = {choose_form, prepare_rows, multiply};

}  // namespace headrace::HEADRACE_ISA
