// Kernels on rows of float32 logits: bitmasks, argmax and sampling. Rows [begin, end) are computed by the calling
// thread. Strides and the vocabulary size count values.
#pragma once

#include <stdint.h>

namespace headrace {

struct ArgmaxRows {
  float* logits;
  int64_t stride, vocab;
  const int32_t* masks;        // [*, ceil(vocab / 32)]: a token whose bit is 0 becomes -inf; null: no masks
  const int32_t* mask_of_row;  // row of `masks`, negative: none
  float* raw;                  // greatest logit before masking, NaN if any is NaN
  float* values;               // after masking
  int64_t* ids;                // first token with `values`
};

struct SampleRows {
  const float* logits;
  int64_t stride, vocab;
  const double *temperature, *top_p, *min_p;
  const int64_t *top_k, *seed, *position;
  int64_t* ids;
};

struct SampleKernels {
  void (*argmax)(const ArgmaxRows&, int64_t begin, int64_t end);
  void (*sample)(const SampleRows&, int64_t begin, int64_t end);
};

}  // namespace headrace
