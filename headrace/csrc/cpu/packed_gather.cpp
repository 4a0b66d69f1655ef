// compiled with: rows.cpp
// Rows of a packed weight as plain numbers, for embeddings. Words of a row are 64 bytes apart in its panel.
#include <vector>

#include "packed_rows.h"

namespace headrace::HEADRACE_ISA {
namespace {

// The codes of a row, without their scales, as floats [padded].
void read_codes(const Weight& weight, int64_t row, float* out) {
  const uint32_t* at = weight.panel(row / kPanel) + row % kPanel;
  const int64_t count = weight.num_words();
  switch (weight.format) {
    case Format::kFloat32:
      for (int64_t w = 0; w < count; ++w) std::memcpy(out + w, at + w * kPanel, 4);
      break;
    case Format::kBfloat16:
      for (int64_t w = 0; w < count; ++w) {
        const uint32_t word = at[w * kPanel];
        out[2 * w] = half_to_float(static_cast<uint16_t>(word)),
                out[2 * w + 1] = half_to_float(static_cast<uint16_t>(word >> 16));
      }
      break;
    default: {
      const int64_t per_word = inputs_per_word(weight.format);
      for (int64_t k = 0; k < weight.padded(); ++k)
        out[k] = static_cast<float>(code_of(weight.format, at[k / per_word * kPanel], k));
    }
  }
}

void scale_row(const Weight& weight, int64_t row, float* values) {
  if (weight.format == Format::kInt8) {
    for (int64_t k = 0; k < weight.inputs; ++k) values[k] *= weight.scales[row];
  } else if (weight.format > Format::kInt8) {
    for (int64_t g = 0; g < weight.groups(); ++g) {
      const int64_t at = (row / kPanel * weight.groups() + g) * kPanel + row % kPanel;
      const float scale = float16_to_float(weight.group_scales[at]),
                  least = weight.group_mins ? float16_to_float(weight.group_mins[at]) : 0.0f;
      for (int64_t k = g * kGroup; k < (g + 1) * kGroup; ++k) values[k] = values[k] * scale + least;
    }
  }
}

void gather(const Weight& weight, const int64_t* rows, int64_t begin, int64_t end, void* out, bool is_half) {
  std::vector<float> line(weight.padded());
  for (int64_t t = begin; t < end; ++t) {
    read_codes(weight, rows[t], line.data());
    scale_row(weight, rows[t], line.data());
    if (!is_half) {
      std::memcpy(static_cast<float*>(out) + t * weight.inputs, line.data(), weight.inputs * sizeof(float));
      continue;
    }
    uint16_t* halves = static_cast<uint16_t*>(out) + t * weight.inputs;
    for (int64_t k = 0; k < weight.inputs; ++k) halves[k] = float_to_half(line[k]);
  }
}

}  // namespace

extern const PackedGather packed_gather;
const PackedGather packed_gather = {gather};

}  // namespace headrace::HEADRACE_ISA
