// Which instruction sets there are, and which the kernels may use. No torch here.
#pragma once

namespace headrace {

// In the order of ISAS in kernels/native/toolchain.py.
enum Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// The best that the processor and the system have; for AMX the process asks the system for its tiles.
int machine_isa();

}  // namespace headrace
