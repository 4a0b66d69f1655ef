// compiled for: torch
// The operators of headrace_cpu, through torch's stable ABI: fast to compile, and one library for all torch since 2.11.
// What each group of operators does is in its bind_*.h; the work is done by kernels that know nothing of torch.
#include "operators.h"

#include "bind_attention.h"
#include "bind_blocks.h"
#include "bind_decodes.h"
#include "bind_experts.h"
#include "bind_layers.h"
#include "bind_pack.h"
#include "bind_packed.h"
#include "bind_rope.h"
#include "bind_rows.h"
#include "bind_sample.h"

namespace headrace {

// Let kernels use this instruction set at most; returns the one that they use from now on.
static int64_t select_isa(int64_t most) {
  bool is_compiled[] = {true, false, false, false, false};
#ifdef HEADRACE_HAS_AVX2
  is_compiled[kAvx2] = true;
#endif
#ifdef HEADRACE_HAS_AVXVNNI
  is_compiled[kAvxVnni] = true;
#endif
#ifdef HEADRACE_HAS_AVX512
  is_compiled[kAvx512] = true;
#endif
#ifdef HEADRACE_HAS_AMX
  is_compiled[kAmx] = true;
#endif
  const int64_t found = machine_isa();
  int level = static_cast<int>(most < found ? most : found);
  while (!is_compiled[level] || !has_isa(level)) --level;
  return allowed_isa() = level;
}

}  // namespace headrace

STABLE_TORCH_LIBRARY(headrace_cpu, m) {
  m.def("select_isa(int most) -> int");
  headrace::define_attention(m);
  headrace::define_blocks(m);
  headrace::define_decodes(m);
  headrace::define_experts(m);
  headrace::define_layers(m);
  headrace::define_pack(m);
  headrace::define_packed(m);
  headrace::define_rope(m);
  headrace::define_rows(m);
  headrace::define_sample(m);
}

STABLE_TORCH_LIBRARY_IMPL(headrace_cpu, CompositeExplicitAutograd, m) { m.impl("select_isa", TORCH_BOX(&headrace::select_isa)); }

STABLE_TORCH_LIBRARY_IMPL(headrace_cpu, CPU, m) {
  headrace::implement_attention(m);
  headrace::implement_blocks(m);
  headrace::implement_decodes(m);
  headrace::implement_experts(m);
  headrace::implement_layers(m);
  headrace::implement_pack(m);
  headrace::implement_packed(m);
  headrace::implement_rope(m);
  headrace::implement_rows(m);
  headrace::implement_sample(m);
}
