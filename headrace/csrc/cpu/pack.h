// Plain weights into packed layout (packed_linear.h), as they are or quantised to 8 or 4 bits as in
// kernels/packed_linear/quantise.py, while a model is loaded. Panels [first, last) are packed by the calling thread.
#pragma once

#include "packed_linear.h"
#include "types.h"

namespace headrace {

struct PackSource {
  const void* data;  // [outputs, inputs]
  int type;
  int64_t outputs, inputs, stride;
};

struct PackTarget {
  packed::Format format;
  uint32_t* words;                 // all of them are written
  float* scales;                   // int8
  fp16 *group_scales, *group_mins;  // group formats; int8 ones have no mins
};

struct PackKernels {
  void (*pack)(const PackSource&, const PackTarget&, int64_t first, int64_t last);
};

}  // namespace headrace
