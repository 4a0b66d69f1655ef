// AMX tile configuration, and a compiler fence for tile loads. Included by sources compiled for amx.
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

// The compiler does not know what tile loads read: this forces all earlier writes to memory.
inline __attribute__((always_inline)) void settle() { asm volatile("" ::: "memory"); }

// Products of two tiles of rows (4, 5) with two of columns (6, 7), which add to tiles 0 to 3; `steps` times, each with
// tiles of their own. `product<c>` and `load<o>(step)`: the four products come in a ring in which neighbours share an
// operand, and operand o is that of products o and o + 1. It is loaded anew as soon as both are done, at least two
// instructions before it is used, and each step starts one product further on: so loads wait for nothing, neither alone
// on a core nor beside another thread's. `between<i>` is called after the i-th product of each step, and `begin` when
// the first loads are under way: sums of products before are best stored there, as loads behind such a store wait until
// the sums are there.
template <class Product, class Load, class Begin, class Between>
inline __attribute__((always_inline)) void weave(int64_t steps, const Product& product, const Load& load,
                                                 const Begin& begin, const Between& between) {
  load.template operator()<3>(0), load.template operator()<0>(0), load.template operator()<1>(0),
      load.template operator()<2>(0);
  begin();
  int64_t next = 1;
  const auto step = [&]<int s>() __attribute__((always_inline)) {
    const bool is_last = next == steps;
    product.template operator()<s>(), between.template operator()<0>();
    product.template operator()<(s + 1) % 4>(), between.template operator()<1>();
    if (!is_last) load.template operator()<s>(next);
    product.template operator()<(s + 2) % 4>(), between.template operator()<2>();
    if (!is_last) load.template operator()<(s + 1) % 4>(next);
    product.template operator()<(s + 3) % 4>(), between.template operator()<3>();
    if (!is_last) load.template operator()<(s + 2) % 4>(next), load.template operator()<(s + 3) % 4>(next);
    ++next;
    return !is_last;
  };
  while (step.template operator()<0>() && step.template operator()<1>() && step.template operator()<2>() &&
         step.template operator()<3>()) {}
}

// For `weave`, by an instruction on tiles; a macro, as tiles are taken from the text.
#define HEADRACE_WOVEN_PRODUCTS(instruction)                   \
  [&]<int c>() __attribute__((always_inline)) {                \
    if constexpr (c == 0) instruction(1, 4, 7);                \
    if constexpr (c == 1) instruction(3, 5, 7);                \
    if constexpr (c == 2) instruction(2, 5, 6);                \
    if constexpr (c == 3) instruction(0, 4, 6);                \
  }

}  // namespace headrace::HEADRACE_ISA
