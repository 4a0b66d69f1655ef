// Weights as they lie in GGUF files, in blocks with their own scales, into packed layout (packed_linear.h).
#pragma once

#include "packed_linear.h"
#include "types.h"

namespace headrace {

namespace blocks {

// What a block holds, by ggml's names; numbers are those of kernels/packed_linear/blocks.py. In pairs of MXFP4 two
// neighbours share a byte.
enum class Kind : int64_t {
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2K,
  kQ3K,
  kQ4K,
  kQ5K,
  kQ6K,
  kIq4Nl,
  kIq4Xs,
  kMxfp4,
  kMxfp4Pairs,
  kCount
};

// Rows [at, at + rows) of a weight.
struct Source {
  Kind kind;
  const uint8_t* raw;
  int64_t row_bytes, at, rows;
};

// A weight of a group format: of nibbles, if a group of 32 inputs has four words, else of bytes. `mins` may be null.
struct Target {
  uint32_t* words;
  fp16 *scales, *mins;
  int64_t words_of_group, groups;
};

// Of a kind: the bytes of a block, and how many groups of 32 inputs it holds.
struct Size {
  int64_t num_bytes, groups;
};

}  // namespace blocks

struct BlockKernels {
  blocks::Size (*size_of)(blocks::Kind kind);
  // Panels [first, last), as far as they are rows of the source.
  void (*pack)(const blocks::Source&, const blocks::Target&, int64_t first, int64_t last);
};

}  // namespace headrace
