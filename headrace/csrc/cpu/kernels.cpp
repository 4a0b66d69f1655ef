// compiled for: scalar avx2 avxvnni avx512 amx
// The only symbol that a library of kernels exports. AVX-VNNI and AMX have some kernels of their own and take the
// others from HEADRACE_BASE, the instruction set that they extend.
#include "kernels.h"

#ifdef HEADRACE_IS_AMX
#define HEADRACE_ATTENTION HEADRACE_ISA
#else
#define HEADRACE_ATTENTION HEADRACE_BASE
#endif

namespace headrace {

namespace HEADRACE_ATTENTION { extern const AttentionKernels attention_kernels; }
namespace HEADRACE_ISA { extern const PackedKernels packed_kernels; }
namespace HEADRACE_BASE {
extern const BlockKernels block_kernels;
extern const LowRankKernels low_rank_kernels;
extern const PackKernels pack_kernels;
extern const PackedGather packed_gather;
extern const RopeKernels rope_kernels;
extern const RowKernels row_kernels;
extern const SampleKernels sample_kernels;
}  // namespace HEADRACE_BASE

extern "C" __attribute__((visibility("default"))) const Kernels headrace_kernels;
const Kernels headrace_kernels = {&HEADRACE_ATTENTION::attention_kernels, &HEADRACE_BASE::block_kernels,
                                  &HEADRACE_BASE::pack_kernels, &HEADRACE_ISA::packed_kernels,
                                  &HEADRACE_BASE::packed_gather, &HEADRACE_BASE::rope_kernels,
                                  &HEADRACE_BASE::row_kernels, &HEADRACE_BASE::sample_kernels,
                                  &HEADRACE_BASE::low_rank_kernels};

}  // namespace headrace
