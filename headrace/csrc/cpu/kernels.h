// All kernels of one instruction set: the table that its library exports. No torch here.
#pragma once

#include "attention.h"
#include "blocks.h"
#include "lora.h"
#include "pack.h"
#include "packed_linear.h"
#include "rope.h"
#include "rows.h"
#include "sample.h"

namespace headrace {

struct Kernels {
  const AttentionKernels* attention;
  const BlockKernels* blocks;
  const PackKernels* pack;
  const PackedKernels* packed;
  const PackedGather* gather;
  const RopeKernels* rope;
  const RowKernels* rows;
  const SampleKernels* sample;
  const LowRankKernels* low_rank;
};

}  // namespace headrace
