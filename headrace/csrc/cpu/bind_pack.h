// pack_weight: a plain weight into packed layout; see kernels/packed_linear/quantise.py for what it computes.
#pragma once

#include "operators.h"
#include "pack.h"

namespace headrace {

// weight [outputs, inputs]; writes all of words, scales and mins, which are as in packed_linear.h.
inline void pack_weight(Tensor weight, int64_t format, Tensor words, std::optional<Tensor> scales,
                        std::optional<Tensor> mins) {
  check_rows_are_dense(weight);
  STD_TORCH_CHECK(weight.dim() == 2 && words.scalar_type() == ScalarType::Int && words.is_contiguous(),
                  "a weight is [O, I], and its words are dense int32");
  const PackSource source{pointer(weight), float_type(weight), weight.size(0), weight.size(1), weight.stride(0)};
  const packed::Weight about{static_cast<packed::Format>(format), source.outputs, source.inputs, nullptr};
  STD_TORCH_CHECK(words.numel() == about.panels() * about.num_words() * packed::kPanel,
                  "the words do not fit the weight");
  STD_TORCH_CHECK(!packed::is_looked_up(about.format), "no weight is rounded to numbers that are looked up");
  PackTarget target{about.format, writable<uint32_t>(words), nullptr, nullptr, nullptr};
  if (about.format <= packed::Format::kBfloat16) {
    STD_TORCH_CHECK(source.type == (about.format == packed::Format::kFloat32 ? kFloat32 : kBFloat16),
                    "plain numbers are packed as what they are");
  } else if (about.format == packed::Format::kInt8) {
    STD_TORCH_CHECK(
        scales && scales->scalar_type() == ScalarType::Float && scales->numel() == about.panels() * packed::kPanel,
        "scales are float32, one an output");
    target.scales = writable<float>(*scales);
  } else {
    const int64_t count = about.panels() * about.groups() * packed::kPanel;
    STD_TORCH_CHECK(scales && scales->scalar_type() == ScalarType::Half && scales->numel() == count &&
                        mins.has_value() == (about.format == packed::Format::kInt4Group) &&
                        (!mins || (mins->scalar_type() == ScalarType::Half && mins->numel() == count)),
                    "scales are float16, one a group and output; mins alike, where codes are nibbles");
    target.group_scales = writable<fp16>(*scales), target.group_mins = mins ? writable<fp16>(*mins) : nullptr;
  }
  over_rows(about.panels(), packed::kPanel * source.inputs,
            [&](int64_t begin, int64_t end) { best_pack_kernels().pack(source, target, begin, end); });
}

inline void define_pack(Library& m) {
  m.def("pack_weight(Tensor weight, int format, Tensor(a!) words, Tensor(b!)? scales, Tensor(c!)? mins) -> ()");
}

inline void implement_pack(Library& m) { m.impl("pack_weight", TORCH_BOX(&pack_weight)); }

}  // namespace headrace
