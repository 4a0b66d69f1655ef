// Which instruction sets there are, and which the kernels may use. No torch here.
#pragma once

namespace headrace {

// In the order of ISAS in kernels/native/toolchain.py. Each has what those before it have, but for AVX-VNNI, which some with
// AVX-512 lack.
enum Isa : int { kScalar = 0, kAvx2 = 1, kAvxVnni = 2, kAvx512 = 3, kAmx = 4 };

// The best that the processor and the system have; for AMX the process asks the system for its tiles.
int machine_isa();

// Whether the processor has this one, if not the best that it has.
bool has_isa(int isa);

}  // namespace headrace
