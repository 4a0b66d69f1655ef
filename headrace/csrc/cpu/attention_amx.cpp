// compiled for: amx
// Attention whose prompts are tiles of bfloat16 or of codes (in attention_amx_codes.cpp); the rest, and all decodes,
// are AVX-512's.
#include "attention.h"

#include "attention_codes.h"
#include "attention_amx.h"

namespace headrace::avx512 {
extern const AttentionKernels attention_kernels;
}

namespace headrace::HEADRACE_ISA {

static const AttentionKernels& plainer = avx512::attention_kernels;

void tile_of_codes(const Attention& a, const Tile& tile, float* scratch);  // in attention_amx_codes.cpp

static int64_t chunk_keys(const Attention& a) { return plainer.chunk_keys(a); }
static void decode(const Attention& a, const KeyRange& range, float* partials, int64_t step, float* scratch) {
  plainer.decode(a, range, partials, step, scratch);
}
static int64_t decode_scratch(const Attention& a, int64_t num_kv_heads) {
  return plainer.decode_scratch(a, num_kv_heads);
}
static void tile(const Attention& a, const Tile& tile, float* scratch) {
  if (a.kv_type == kCodes) return tile_of_codes(a, tile, scratch);
  is_narrow(a) ? tile_by_amx<false>(a, tile, scratch) : plainer.tile(a, tile, scratch);
}
static int64_t tile_scratch(const Attention& a, int64_t num_rows) {
  return is_narrow(a) ? AmxBuffers::floats(a, num_rows) + LotRoom::floats(a) : plainer.tile_scratch(a, num_rows);
}
static int64_t tile_rows(const Attention& a) { return is_narrow(a) ? AmxBuffers::most_rows(a) : plainer.tile_rows(a); }

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {chunk_keys, decode,       decode_scratch, merge,
                                            finish,     tile,         tile_scratch,   tile_rows};

}  // namespace headrace::HEADRACE_ISA
