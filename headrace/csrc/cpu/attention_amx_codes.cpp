// compiled for: amx
// Prompts over codes, apart from those over bfloat16: either takes the compiler long.
#include "attention.h"

#include "attention_codes.h"
#include "attention_amx.h"

namespace headrace::HEADRACE_ISA {

void tile_of_codes(const Attention& a, const Tile& tile, float* scratch);
void tile_of_codes(const Attention& a, const Tile& tile, float* scratch) { tile_by_amx<true>(a, tile, scratch); }

}  // namespace headrace::HEADRACE_ISA
