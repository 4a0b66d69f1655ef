// compiled for: operators
// The operators of headrace_cpu, through torch's stable ABI: fast to compile, and one library for torch 2.11 and later.
// Each group of operators is in its bind_*.h; kernels know nothing of torch.
#include "operators.h"

#include "bind_attention.h"
#include "bind_blocks.h"
#include "bind_decodes.h"
#include "bind_experts.h"
#include "bind_layers.h"
#include "bind_lora.h"
#include "bind_pack.h"
#include "bind_packed.h"
#include "bind_pages.h"
#include "bind_rope.h"
#include "bind_rows.h"
#include "bind_sample.h"
#include "isa.h"

namespace headrace {

// Whether the kernels of this instruction set can run here.
static bool can_run(int64_t isa) { return has_isa(static_cast<int>(isa)); }

// Use the kernel table at this address, `headrace_kernels` of a library.
static void use_kernels(int64_t address) { kernels_in_use() = reinterpret_cast<const Kernels*>(address); }

}  // namespace headrace

STABLE_TORCH_LIBRARY(headrace_cpu, m) {
  m.def("can_run(int isa) -> bool");
  m.def("use_kernels(int address) -> ()");
  headrace::define_attention(m);
  headrace::define_blocks(m);
  headrace::define_decodes(m);
  headrace::define_experts(m);
  headrace::define_layers(m);
  headrace::define_lora(m);
  headrace::define_pack(m);
  headrace::define_packed(m);
  headrace::define_pages(m);
  headrace::define_rope(m);
  headrace::define_rows(m);
  headrace::define_sample(m);
}

STABLE_TORCH_LIBRARY_IMPL(headrace_cpu, CompositeExplicitAutograd, m) {
  m.impl("can_run", TORCH_BOX(&headrace::can_run));
  m.impl("use_kernels", TORCH_BOX(&headrace::use_kernels));
}

STABLE_TORCH_LIBRARY_IMPL(headrace_cpu, CPU, m) {
  headrace::implement_attention(m);
  headrace::implement_blocks(m);
  headrace::implement_decodes(m);
  headrace::implement_experts(m);
  headrace::implement_layers(m);
  headrace::implement_lora(m);
  headrace::implement_pack(m);
  headrace::implement_packed(m);
  headrace::implement_pages(m);
  headrace::implement_rope(m);
  headrace::implement_rows(m);
  headrace::implement_sample(m);
}
