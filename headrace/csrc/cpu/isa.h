// Instruction sets, and which of them the machine supports. No torch here.
#pragma once

namespace headrace {

// In the order of ISAS in kernels/native/toolchain.py. Each includes those before it, except AVX-VNNI, which some
// AVX-512 machines lack.
enum Isa : int { kScalar = 0, kAvx2 = 1, kAvxVnni = 2, kAvx512 = 3, kAmx = 4 };

// The best that processor and system support; for AMX it requests tile permission from Linux.
int machine_isa();

// Whether the machine supports this one.
bool has_isa(int isa);

}  // namespace headrace
