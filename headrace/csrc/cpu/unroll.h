// Loops over registers.
#pragma once

// A loop unrolled by template, so that arrays indexed by it can be kept in registers.
#define HEADRACE_EACH(i, count) _Pragma("GCC unroll 32") for (int i = 0; i < (count); ++i)
