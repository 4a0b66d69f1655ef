// How AMX tiles are set up, and what the compiler is not told of them. Included by sources compiled for amx.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace headrace::HEADRACE_ISA {

// All eight tiles: 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static constexpr TileConfig kTileConfig;  // constant data: the compiler need not know that all of it is read

// The compiler does not know what tile loads read: everything written before must be in memory.
inline __attribute__((always_inline)) void settle() { asm volatile("" ::: "memory"); }

}  // namespace headrace::HEADRACE_ISA
