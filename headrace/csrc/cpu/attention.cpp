// compiled for: scalar avx2 avx512 amx
#include "attention.h"

#include "attention_codes.h"
#include "attention_decode.h"
#include "attention_tile.h"

#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
#include "attention_pairs.h"
#endif
#ifdef HEADRACE_IS_AMX
#include "attention_amx.h"
#endif

namespace headrace::HEADRACE_ISA {

static void decode(const Attention& a, const KeyRange& range, float* partial, float* scratch) {
  if (a.kv_type == kCodes) return decode_of_codes(a, range, partial, scratch);
#if defined(HEADRACE_IS_AVX512) || defined(HEADRACE_IS_AMX)
  if (is_for_pairs(a)) return decode_pairs(a, range, partial, scratch);
#endif
  decode_of_floats(a, range, partial, scratch);
}

static int64_t decode_scratch(const Attention& a, int64_t num_kv_heads) { return a.kv_type == kCodes ? decode_scratch_of_codes(a, num_kv_heads) : decode_scratch_of_floats(a, num_kv_heads); }

#ifdef HEADRACE_IS_AMX
static bool is_for_amx(const Attention& a) { return a.kv_type == kCodes || (a.kv_type == kBFloat16 && a.q_type == kBFloat16); }
static void tile(const Attention& a, const Tile& tile, float* scratch) { is_for_amx(a) ? tile_by_amx(a, tile, scratch) : tile_of_floats(a, tile, scratch); }
static int64_t tile_scratch(const Attention& a, int64_t num_rows) { return is_for_amx(a) ? AmxBuffers::floats(a, num_rows) + LotRoom::floats(a) : TileBuffers::floats(a, num_rows); }
static int64_t tile_rows(const Attention& a) { return is_for_amx(a) ? AmxBuffers::most_rows(a) : TileBuffers::most_rows(a); }
#else
static void tile(const Attention& a, const Tile& tile, float* scratch) { tile_of_floats(a, tile, scratch); }
static int64_t tile_scratch(const Attention& a, int64_t num_rows) { return TileBuffers::floats(a, num_rows); }
static int64_t tile_rows(const Attention& a) { return TileBuffers::most_rows(a); }
#endif

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {decode, decode_scratch, merge, finish, tile, tile_scratch, tile_rows};

}  // namespace headrace::HEADRACE_ISA
