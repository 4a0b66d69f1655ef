// pack_blocks: weights as they lie in GGUF files into packed layout; see kernels/packed_linear/blocks.py for what a
// block holds.
#pragma once

#include "blocks.h"
#include "operators.h"

namespace headrace {

// Rows of `raw` [n, bytes] become rows `at` and on of a weight of a group format.
inline void pack_blocks(Tensor raw, int64_t kind, int64_t at, Tensor words, Tensor scales, std::optional<Tensor> mins) {
  STD_TORCH_CHECK(kind >= 0 && kind < static_cast<int64_t>(blocks::Kind::kCount), "there is no such kind of block");
  const blocks::Size size = best_block_kernels().size_of(static_cast<blocks::Kind>(kind));
  STD_TORCH_CHECK(raw.scalar_type() == ScalarType::Byte && raw.dim() == 2 && raw.is_contiguous() &&
                      raw.size(1) % size.num_bytes == 0,
                  "blocks must be dense bytes");
  STD_TORCH_CHECK(words.is_contiguous() && scales.is_contiguous() && words.dim() == 3 && scales.dim() == 3 &&
                      words.size(1) % scales.size(1) == 0,
                  "the weight does not fit");
  const blocks::Source source{static_cast<blocks::Kind>(kind), pointer<uint8_t>(raw), raw.size(1), at, raw.size(0)};
  const blocks::Target target{writable<uint32_t>(words), writable<fp16>(scales), mins ? writable<fp16>(*mins) : nullptr,
                              words.size(1) / scales.size(1), scales.size(1)};
  const int64_t last = at + source.rows, first_panel = at / packed::kPanel,
                num_panels = (last + packed::kPanel - 1) / packed::kPanel - first_panel;
  STD_TORCH_CHECK(at >= 0 && last <= words.size(0) * packed::kPanel &&
                      source.row_bytes / size.num_bytes * size.groups <= target.groups &&
                      (target.words_of_group == 8 || target.words_of_group == 4),
                  "the blocks do not fit the weight");
  over_rows(num_panels, packed::kPanel * source.row_bytes, [&](int64_t begin, int64_t end) {
    best_block_kernels().pack(source, target, first_panel + begin, first_panel + end);
  });
}

inline void define_blocks(Library& m) {
  m.def("pack_blocks(Tensor raw, int kind, int at, Tensor(a!) words, Tensor(b!) scales, Tensor(c!)? mins) -> ()");
}

inline void implement_blocks(Library& m) { m.impl("pack_blocks", TORCH_BOX(&pack_blocks)); }

}  // namespace headrace
