// Kernels on rows of float32 logits: forbidding tokens by bit masks, the greatest logit, and drawing. Rows [begin, end) are
// done by the caller's thread. Strides and the vocabulary's size count values.
#pragma once

#include <stdint.h>

namespace headrace {

struct SearchRows {
  float* logits;
  int64_t stride, vocab;
  const int32_t* masks;       // rows of ceil(vocab / 32) words: a token whose bit is 0 becomes -inf; null: nothing is forbidden
  const int32_t* mask_of_row;  // which of them, or a negative number
  float* raw;                  // the greatest logit before, NaN if there is one
  float* values;               // and after
  int64_t* ids;                // the first token that has it then
};

struct DrawRows {
  const float* logits;
  int64_t stride, vocab;
  const double *temperature, *top_p, *min_p;
  const int64_t *top_k, *seed, *position;
  int64_t* ids;
};

struct SampleKernels {
  void (*search)(const SearchRows&, int64_t begin, int64_t end);
  void (*draw)(const DrawRows&, int64_t begin, int64_t end);
};

}  // namespace headrace
