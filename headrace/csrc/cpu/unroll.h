// Loops over registers.
#pragma once

// For i from 0 on, taken apart before the compiler decides which arrays lie in registers.
#define HEADRACE_EACH(i, count) _Pragma("GCC unroll 32") for (int i = 0; i < (count); ++i)
