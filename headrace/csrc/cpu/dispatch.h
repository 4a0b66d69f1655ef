// The kernel table of the instruction set in use. Each instruction set is a library of its own, loaded by Python.
#pragma once

#include <atomic>

#include "kernels.h"

namespace headrace {

// Set before any operator is called, so that no ordering is needed.
inline std::atomic<const Kernels*>& kernels_in_use() {
  static std::atomic<const Kernels*> kernels{nullptr};
  return kernels;
}

inline const AttentionKernels& best_attention_kernels() { return *kernels_in_use().load()->attention; }
inline const BlockKernels& best_block_kernels() { return *kernels_in_use().load()->blocks; }
inline const PackKernels& best_pack_kernels() { return *kernels_in_use().load()->pack; }
inline const PackedKernels& best_packed_kernels() { return *kernels_in_use().load()->packed; }
inline const PackedGather& best_packed_gather() { return *kernels_in_use().load()->gather; }
inline const RopeKernels& best_rope_kernels() { return *kernels_in_use().load()->rope; }
inline const RowKernels& best_row_kernels() { return *kernels_in_use().load()->rows; }
inline const LowRankKernels& best_low_rank_kernels() { return *kernels_in_use().load()->low_rank; }
inline const SampleKernels& best_sample_kernels() { return *kernels_in_use().load()->sample; }

}  // namespace headrace
