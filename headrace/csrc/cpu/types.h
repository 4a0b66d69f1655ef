// Element types, and their numbers where the type is known only at run time. No torch here.
#pragma once

#include <stdint.h>

namespace headrace {

enum FloatType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
constexpr int kCodes = 3;  // of pages alone: 8 bits and a scale, see codes.h

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

}  // namespace headrace
