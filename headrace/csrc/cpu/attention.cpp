// compiled for: scalar avx2 avx512
#include "attention.h"

#include "attention_codes.h"
#include "attention_decode.h"
#include "attention_tile.h"

#ifdef HEADRACE_IS_AVX512
#include "attention_code_panels.h"
#endif

namespace headrace::HEADRACE_ISA {

#ifdef HEADRACE_IS_AVX512
static int64_t chunk_keys(const Attention& a) { return is_narrow(a) ? kPairKeys : kChunkKeys; }
#else
static int64_t chunk_keys(const Attention&) { return kChunkKeys; }
#endif

static void decode(const Attention& a, const KeyRange& range, float* partials, int64_t step, float* scratch) {
  if (a.kv_type == kCodes) return decode_of_codes(a, range, chunk_keys(a), partials, step, scratch);
#ifdef HEADRACE_IS_AVX512
  if (is_narrow(a)) return decode_pairs(a, range, partials, step, scratch);
#endif
  decode_of_floats(a, range, partials, step, scratch);
}

static int64_t decode_scratch(const Attention& a, int64_t num_kv_heads) {
  return a.kv_type == kCodes ? decode_scratch_of_codes(a, num_kv_heads)
                             : DecodeState::floats(a, num_kv_heads, chunk_keys(a));
}

#ifdef HEADRACE_IS_AVX512
static void tile(const Attention& a, const Tile& tile, float* scratch) {
  if (!is_narrow(a)) return tile_of_floats(a, tile, scratch);
  a.kv_type == kCodes ? tile_of_codes(a, tile, scratch) : tile_of_pairs(a, tile, scratch);
}
static int64_t tile_scratch(const Attention& a, int64_t num_rows) {
  return is_narrow(a) ? PanelBuffers::floats(a, num_rows) + LotRoom::floats(a) : TileBuffers::floats(a, num_rows);
}
static int64_t tile_rows(const Attention& a) {
  return is_narrow(a) ? PanelBuffers::most_rows(a) : TileBuffers::most_rows(a);
}
#else
static void tile(const Attention& a, const Tile& tile, float* scratch) {
  a.kv_type == kCodes ? tile_by_decodes(a, tile, scratch) : tile_of_floats(a, tile, scratch);
}
static int64_t tile_scratch(const Attention& a, int64_t num_rows) {
  return a.kv_type == kCodes ? tile_scratch_by_decodes(a, num_rows) : TileBuffers::floats(a, num_rows);
}
static int64_t tile_rows(const Attention& a) { return TileBuffers::most_rows(a); }
#endif

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {chunk_keys, decode,       decode_scratch, merge,
                                            finish,     tile,         tile_scratch,   tile_rows};

}  // namespace headrace::HEADRACE_ISA
