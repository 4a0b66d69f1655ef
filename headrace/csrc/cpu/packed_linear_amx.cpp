// compiled for: amx
// Packed products on AMX tiles, for more than a handful of rows; fewer, and what must stay float32, go to AVX-512.
// A tile is 16 rows of 64 bytes. Tiles 0 to 3 hold 32 rows times 32 outputs, 4 and 5 the rows, 6 and 7 the panels.
#include <vector>

#include "amx_tiles.h"
#include "packed_rows.h"
#include "vector.h"

namespace headrace::avx512 {
extern const PackedKernels packed_kernels;
}

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int64_t kLeastRows = 6;        // from which tiles are faster than registers
constexpr int64_t kLeastGroupRows = 24;  // from which making bfloat16 of a group format pays
constexpr int64_t kTileWords = 16 * kPanel;
constexpr int64_t kMostTiles = 20;       // of inputs; with more of them and `kLeastBlocks` of rows, sums are cut
constexpr int64_t kTilesAtOnce = 16, kLeastBlocks = 3;
constexpr int64_t kCachedBytes = 768 * 1024;  // of the weight, that the L2 cache keeps for all rows of a call

RowForm choose_form(const Weight& weight, int64_t num_rows, bool is_half) {
  switch (weight.format) {
    case Format::kBfloat16:
      if (is_half && num_rows >= kLeastRows) return RowForm::kBfloat16Tile;
      break;
    case Format::kInt8:
      if (num_rows >= kLeastRows) return RowForm::kInt8Tile;
      break;
    case Format::kFloat32: break;
    default:
      if (num_rows >= kLeastGroupRows) return RowForm::kBfloat16Tile;
  }
  return avx512::packed_kernels.choose_form(weight, num_rows, is_half);
}

// Where bytes are after packing: of each lane, those at even and odd places of the first 32 numbers and of the others.
struct alignas(64) CodeOrder {
  uint8_t places[64] = {};
  constexpr CodeOrder() {
    for (int i = 0; i < 64; ++i) places[i] = static_cast<uint8_t>(i % 32 / 8 * 16 + i / 32 * 8 + i % 2 * 4 + i % 8 / 2);
  }
};
constexpr CodeOrder kCodeOrder;

// Rows [first, last) of bfloat16 as codes in tiles, as `quantise` finds them.
void quantise_halves(const Weight& weight, const Input& input, const Rows& rows, int64_t first, int64_t last) {
  const int64_t inputs = weight.inputs, padded = weight.padded();
  const __m512i unsign = _mm512_set1_epi16(0x7fff);
  const __m512i in_order = _mm512_load_si512(kCodeOrder.places);
  for (int64_t m = first; m < last; ++m) {
    const bf16* x = static_cast<const bf16*>(input.data) + m * input.stride;
    __m512i top = _mm512_setzero_si512();
    for (int64_t k = 0; k < inputs; k += 32)
      top = _mm512_max_epi16(top, _mm512_and_si512(_mm512_maskz_loadu_epi16(first_halves(inputs - k), x + k), unsign));
    const int32_t most_bits = _mm512_reduce_max_epi32(
        _mm512_max_epi32(_mm512_slli_epi32(top, 16), _mm512_and_si512(top, _mm512_set1_epi32(0x7fff0000))));
    float most;
    std::memcpy(&most, &most_bits, 4);
    rows.scales[m] = most / 127.0f;
    const __m512 inverse = _mm512_set1_ps(most > 1e-30f ? 127.0f / most : 0.0f);
    int8_t* tile = static_cast<int8_t*>(rows.values) + m / 16 * 16 * padded + m % 16 * 64;
    for (int64_t k = 0; k < padded; k += 64) {
      const auto codes = [&](int64_t at) {
        const Halves halves(x + at, first_halves(inputs - at));
        return _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(halves.even.v, inverse)),
                                  _mm512_cvtps_epi32(_mm512_mul_ps(halves.odd.v, inverse)));
      };
      _mm512_storeu_si512(tile + k * 16,
                          _mm512_permutexvar_epi8(in_order, _mm512_packs_epi16(codes(k), codes(k + 32))));
    }
  }
  zero_beyond(rows, padded, last);
}

void prepare(const Weight& weight, const Input& input, const Rows& rows, int64_t first, int64_t last) {
  rows.form == RowForm::kInt8Tile&& input.is_half ? quantise_halves(weight, input, rows, first, last)
                                                  : prepare_rows(weight, input, rows, first, last);
}

struct Tiles {
  Tiles() { _tile_loadconfig(&kTileConfig); }
  ~Tiles() { _tile_release(); }
};

// Inputs k and k + 1 of 16 outputs, of which these are the codes, as bfloat16 pairs.
inline __m512i interleave_pair(__m512 even, __m512 odd, __m512 scale, __m512 least) {
  const __m512 low = _mm512_fmadd_ps(even, scale, least), high = _mm512_fmadd_ps(odd, scale, least);
  const __m512i low_half = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
  const __m512i high_half = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
  return _mm512_or_si512(low_half, _mm512_slli_epi32(high_half, 16));
}

// A panel of a group format as a panel of bfloat16.
void expand_panel(const Weight& weight, int64_t p, uint32_t* out) {
  const int64_t groups = weight.groups();
  const uint32_t* at = weight.panel(p);
  const bool has_table = is_looked_up(weight.format);
  const __m512 table = _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table_of(weight.format).values))));
  const auto code_of_low_half = [&](__m512i words) {
    const __m512i nibble = _mm512_and_si512(words, _mm512_set1_epi32(15));
    return has_table ? _mm512_permutexvar_ps(nibble, table) : _mm512_cvtepi32_ps(nibble);
  };
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t place = (p * groups + g) * kPanel;
    const __m512 scale =
        _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight.group_scales + place)));
    const __m512 least =
        weight.group_mins == nullptr
            ? _mm512_setzero_ps()
            : _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight.group_mins + place)));
    if (weight.format >= Format::kInt4Group) {
      for (int w = 0; w < 4; ++w, at += kPanel, out += 4 * kPanel) {
        const __m512i words = _mm512_loadu_si512(at);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {  // nibbles lie 0 4 1 5 2 6 3 7 from the low end
          const int shift = i % 2 * 16 + i / 2 * 4;
          const __m512 even = code_of_low_half(_mm512_srli_epi32(words, shift)),
                       odd = code_of_low_half(_mm512_srli_epi32(words, shift + 8));
          _mm512_storeu_si512(out + i * kPanel, interleave_pair(even, odd, scale, least));
        }
      }
    } else {
      for (int w = 0; w < 8; ++w, at += kPanel, out += 2 * kPanel) {
        const __m512i words = _mm512_loadu_si512(at);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24 - 16 * i), 24));
          const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16 - 16 * i), 24));
          _mm512_storeu_si512(out + i * kPanel, interleave_pair(even, odd, scale, least));
        }
      }
    }
  }
}

// The bias of a panel's outputs, zeros if there is none.
inline __m512 load_bias(const Output& out, int64_t n, __mmask16 known) {
  if (out.bias == nullptr) return _mm512_setzero_ps();
  if (!out.is_bias_half) return _mm512_maskz_loadu_ps(known, static_cast<const float*>(out.bias) + n);
  const __m256i halves = _mm256_maskz_loadu_epi16(known, static_cast<const uint16_t*>(out.bias) + n);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Epilogue of a block's one or two panels: destination, scales and bias.
struct Columns {
  int64_t place;  // of the first of them
  __mmask16 known[2] = {};
  __m512 bias[2], scale[2];

  Columns() = default;
  Columns(const Weight& weight, const Output& out, int64_t p, int64_t second, bool is_scaled) : place(p * kPanel) {
    const int64_t panels[2] = {p, second};
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t n = panels[i] * kPanel, left = panels[i] < 0 ? 0 : weight.outputs - n;
      known[i] = left < kPanel ? static_cast<__mmask16>((1u << left) - 1) : static_cast<__mmask16>(0xffff);
      bias[i] = load_bias(out, n, known[i]);
      scale[i] = is_scaled ? _mm512_maskz_loadu_ps(known[i], weight.scales + n) : _mm512_setzero_ps();
    }
  }
};

// The sums of a block on their way to the output, a few rows at a time beside the tiles of the next block: short sums
// take hardly longer than this.
template <bool kIsHalf>
struct Draining {
  const Columns* columns;
  const uint32_t (*sums)[2][kTileWords];
  const float* row_scales;
  char* to;
  int64_t stride;  // bytes
  bool is_half;
  Gate gate;
  int64_t row = 0, count = 0;

  HEADRACE_INLINE __m512 finish(int64_t panel) const {
    const __m512i words = _mm512_load_si512(sums[row / 16][panel] + row % 16 * kPanel);
    if constexpr (kIsHalf) return _mm512_add_ps(_mm512_castsi512_ps(words), columns->bias[panel]);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(words),
                           _mm512_mul_ps(columns->scale[panel], _mm512_set1_ps(row_scales[row])), columns->bias[panel]);
  }
  HEADRACE_INLINE __m512 activate(Vec x) const {
    return (x * sigmoid_coarse(gate == Gate::kSilu ? x : gelu_argument(x))).v;
  }
  HEADRACE_INLINE void advance(int64_t rows) {
    for (const int64_t last = row + rows < count ? row + rows : count; row < last; ++row) {
      const __m512 low = finish(0), high = finish(1);
      char* at = to + row * stride;
      if (gate != Gate::kNone) {
        const Vec gated = activate(low) * Vec(high);
        is_half ? store(reinterpret_cast<bf16*>(at), gated) : store(reinterpret_cast<float*>(at), gated);
      } else if (is_half) {
        const __mmask32 known = columns->known[0] | static_cast<__mmask32>(columns->known[1]) << 16;
        _mm512_mask_storeu_epi16(at, known, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      } else {
        _mm512_mask_storeu_ps(at, columns->known[0], low);
        _mm512_mask_storeu_ps(at + 64, columns->known[1], high);
      }
    }
  }
};

// A macro, as the instructions take their tiles from the text.
#define HEADRACE_MULTIPLY_TILE(c, a, b) \
  do {                                  \
    if constexpr (kIsHalf)              \
      _tile_dpbf16ps(c, a, b);          \
    else                                \
      _tile_dpbssd(c, a, b);            \
  } while (false)

#define HEADRACE_LOAD_TILE(keeps, tile, from) \
  do {                                        \
    if constexpr (keeps)                      \
      _tile_loadd(tile, from, 64);            \
    else                                      \
      _tile_stream_loadd(tile, from, 64);     \
  } while (false)

// The sums of a block that are still in tiles 0 to 3: R tiles of rows by N of outputs. They are stored when the first
// loads of the next block are under way.
struct Held {
  uint32_t (*sums)[2][kTileWords] = nullptr;
  int rows = 0, outputs = 0;

  HEADRACE_INLINE void store() {
    if (sums == nullptr) return;
    _tile_stored(0, sums[0][0], 64);
    if (outputs == 2) _tile_stored(1, sums[0][1], 64);
    if (rows == 2) _tile_stored(2, sums[1][0], 64);
    if (rows == 2 && outputs == 2) _tile_stored(3, sums[1][1], 64);
    sums = nullptr;
    settle();
  }
};

// `begin` puts sums into tiles 0 to 3, to which the products of two by two tiles are added.
template <bool kIsHalf, bool kKeepsRows, class Begin>
HEADRACE_INLINE void multiply_square(const char* const a[2], const uint32_t* const b[2], int64_t num_tiles,
                                     const Begin& begin, Draining<kIsHalf>& draining) {
  const int64_t rows = (draining.count + num_tiles - 1) / num_tiles;
  const auto load = [&]<int o>(int64_t t) __attribute__((always_inline)) {
    if constexpr (o == 0) HEADRACE_LOAD_TILE(!kKeepsRows, 7, b[1] + t * kTileWords);
    if constexpr (o == 1) HEADRACE_LOAD_TILE(kKeepsRows, 5, a[1] + t * 1024);
    if constexpr (o == 2) HEADRACE_LOAD_TILE(!kKeepsRows, 6, b[0] + t * kTileWords);
    if constexpr (o == 3) HEADRACE_LOAD_TILE(kKeepsRows, 4, a[0] + t * 1024);
  };
  const auto between = [&]<int i>() __attribute__((always_inline)) {
    if constexpr (i == 3) draining.advance(rows);
  };
  weave(num_tiles, HEADRACE_WOVEN_PRODUCTS(HEADRACE_MULTIPLY_TILE), load, begin, between);
}

// The same for fewer: R tiles of rows by N of outputs. Loads come first and products after them.
template <bool kIsHalf, bool kKeepsRows, int R, int N>
HEADRACE_INLINE void multiply_edge(const char* const a[2], const uint32_t* const b[2], int64_t num_tiles,
                                   Draining<kIsHalf>& draining) {
  const int64_t rows = (draining.count + num_tiles - 1) / num_tiles;
  for (int64_t t = 0; t < num_tiles; ++t) {
    HEADRACE_LOAD_TILE(kKeepsRows, 4, a[0] + t * 1024);
    if constexpr (R == 2) HEADRACE_LOAD_TILE(kKeepsRows, 5, a[1] + t * 1024);
    HEADRACE_LOAD_TILE(!kKeepsRows, 6, b[0] + t * kTileWords);
    if constexpr (N == 2) HEADRACE_LOAD_TILE(!kKeepsRows, 7, b[1] + t * kTileWords);
    HEADRACE_MULTIPLY_TILE(0, 4, 6);
    if constexpr (N == 2) HEADRACE_MULTIPLY_TILE(1, 4, 7);
    if constexpr (R == 2) HEADRACE_MULTIPLY_TILE(2, 5, 6);
    draining.advance(rows);
  }
}

// A block of 16 * R rows and 16 * N outputs; a and b are the first tiles of each 16 rows and 16 outputs. The
// L1 cache has room for the rows or for the panels: those stay that are used again in the next block; the
// others pass it by.
template <bool kIsHalf, bool kKeepsRows, int R, int N>
void multiply_block(const char* const a[2], const uint32_t* const b[2], int64_t num_tiles, bool is_first,
                    uint32_t (*sums)[2][kTileWords], Held& held, Draining<kIsHalf>& draining) {
  const auto begin = [&]() __attribute__((always_inline)) {
    held.store();
    if (is_first) {
      _tile_zero(0);
      if constexpr (N == 2) _tile_zero(1);
      if constexpr (R == 2) _tile_zero(2);
      if constexpr (R == 2 && N == 2) _tile_zero(3);
    } else {
      _tile_loadd(0, sums[0][0], 64);
      if constexpr (N == 2) _tile_loadd(1, sums[0][1], 64);
      if constexpr (R == 2) _tile_loadd(2, sums[1][0], 64);
      if constexpr (R == 2 && N == 2) _tile_loadd(3, sums[1][1], 64);
    }
  };
  if constexpr (R == 2 && N == 2)
    multiply_square<kIsHalf, kKeepsRows>(a, b, num_tiles, begin, draining);
  else
    begin(), multiply_edge<kIsHalf, kKeepsRows, R, N>(a, b, num_tiles, draining);
  draining.advance(draining.count);
  held = {sums, R, N};
}

// Outputs of panel p, and of `second` if that is not negative; their tiles start at b.
struct Pair {
  int64_t p, second;
  const uint32_t* b[2];
};

// Some of the inputs, in tiles; the sums of those before are taken up again.
struct Depth {
  int64_t first, count;
  bool is_last;
};

// Blocks one after the other; what is left of each is done with the next. There is room for the sums of `num_sums` of
// them.
template <bool kIsHalf, bool kKeepsRows>
class Blocks {
 public:
  Blocks(const Weight& weight, const Rows& rows, const Output& out, int64_t last_row, int64_t num_sums)
      : weight_(weight), rows_(rows), out_(out), last_row_(last_row), num_tiles_(weight.padded() / (kIsHalf ? 32 : 64)),
        sums_(room(num_sums)) {}

  int64_t num_tiles() const { return num_tiles_; }

  // Rows from m on times a pair of panels; the sums lie in `place`, and stay there until another block is given that
  // place.
  void multiply(int64_t m, const Pair& pair, const Depth& depth, int64_t place) {
    const char* start = static_cast<const char*>(rows_.values) + (m / 16 * num_tiles_ + depth.first) * 1024;
    const char* a[2] = {start, start + num_tiles_ * 1024};
    const uint32_t* b[2] = {pair.b[0] + depth.first * kTileWords, pair.b[1] + depth.first * kTileWords};
    auto* sums = sums_ + 2 * place;
    const bool is_tall = last_row_ - m > 16, is_first = depth.first == 0;
    if (pair.second >= 0) {
      is_tall ? multiply_block<kIsHalf, kKeepsRows, 2, 2>(a, b, depth.count, is_first, sums, held_, draining_)
              : multiply_block<kIsHalf, kKeepsRows, 1, 2>(a, b, depth.count, is_first, sums, held_, draining_);
    } else {
      is_tall ? multiply_block<kIsHalf, kKeepsRows, 2, 1>(a, b, depth.count, is_first, sums, held_, draining_)
              : multiply_block<kIsHalf, kKeepsRows, 1, 1>(a, b, depth.count, is_first, sums, held_, draining_);
    }
    draining_.count = draining_.row = 0;
    if (!depth.is_last) return;
    turn_ = 1 - turn_;
    columns_[turn_] = Columns(weight_, out_, pair.p, pair.second, !kIsHalf);
    const int64_t size = out_.is_half ? 2 : 4;
    draining_ = {&columns_[turn_],   sums,
                 rows_.scales + m,   static_cast<char*>(out_.data) + (m * out_.stride + columns_[turn_].place) * size,
                 out_.stride * size, out_.is_half, out_.gate};
    draining_.count = last_row_ - m < 32 ? last_row_ - m : 32;
  }
  void finish() {
    held_.store();
    draining_.advance(32);
  }

 private:
  using Sums = uint32_t[2][kTileWords];

  // Memory of the calling thread, two for each block.
  static Sums* room(int64_t count) {
    static thread_local std::vector<uint32_t> words;
    const size_t size = count * 2 * 2 * kTileWords + 16;
    if (words.size() < size) words.resize(size);
    return reinterpret_cast<Sums*>((reinterpret_cast<uintptr_t>(words.data()) + 63) / 64 * 64);
  }

  const Weight& weight_;
  const Rows& rows_;
  const Output& out_;
  int64_t last_row_, num_tiles_, turn_ = 0;
  Sums* const sums_;
  alignas(64) Columns columns_[2];
  Draining<kIsHalf> draining_{};
  Held held_;
};

// All rows times a pair of panels. Of many inputs some at a time, whose panels the L1 cache keeps for all
// rows.
template <bool kIsHalf>
void multiply_pair(Blocks<kIsHalf, false>& blocks, const Pair& pair, int64_t first_row, int64_t last_row) {
  const int64_t all = blocks.num_tiles(), times = all > kMostTiles ? (all + kTilesAtOnce - 1) / kTilesAtOnce : 1;
  for (int64_t i = 0; i < times; ++i) {
    const int64_t first = all * i / times, last = all * (i + 1) / times;
    for (int64_t m = first_row, block = 0; m < last_row; m += 32, ++block)
      blocks.multiply(m, pair, {first, last - first, i + 1 == times}, times > 1 ? block : block % 2);
  }
}

template <bool kIsHalf>
void multiply_tiles(const Weight& weight, const Rows& rows, const Output& out, int64_t first_row, int64_t last_row,
                    int64_t first, int64_t last) {
  const Tiles tiles;
  const bool is_gated = out.gate != Gate::kNone, is_expanded = weight.format >= Format::kInt8Group,
             is_deep = weight.padded() / (kIsHalf ? 32 : 64) > kMostTiles;
  const int64_t step = is_gated ? 1 : 2, num_blocks = (last_row - first_row + 31) / 32;
  const auto second = [&](int64_t p) { return is_gated ? p + weight.panels() / 2 : p + 1 < last ? p + 1 : -1; };
  if (is_expanded || (is_deep && num_blocks >= kLeastBlocks)) {
    Blocks<kIsHalf, false> blocks(weight, rows, out, last_row, is_deep ? num_blocks : 2);
    const int64_t size = weight.padded() / 2 * kPanel;
    std::vector<uint32_t> expanded(is_expanded ? 2 * size : 0);
    for (int64_t p = first; p < last; p += step) {
      Pair pair{p, second(p), {weight.panel(p), weight.panel(second(p) >= 0 ? second(p) : p)}};
      if (is_expanded) {  // once for all rows
        pair.b[0] = expanded.data(), pair.b[1] = expanded.data() + size;
        expand_panel(weight, p, expanded.data());
        if (pair.second >= 0) expand_panel(weight, pair.second, expanded.data() + size);
      }
      settle();
      multiply_pair(blocks, pair, first_row, last_row);
    }
    return blocks.finish();
  }
  Blocks<kIsHalf, true> blocks(weight, rows, out, last_row, 2);
  const int64_t fitting = kCachedBytes / (2 * weight.num_words() * kPanel * 4),
                chunk = (fitting > 1 ? fitting : 1) * step;
  settle();
  int64_t place = 0;
  for (int64_t from = first; from < last; from += chunk)
    for (int64_t m = first_row; m < last_row; m += 32)
      for (int64_t p = from; p < last && p < from + chunk; p += step, place ^= 1)
        blocks.multiply(m, {p, second(p), {weight.panel(p), weight.panel(second(p) >= 0 ? second(p) : p)}},
                        {0, blocks.num_tiles(), true}, place);
  blocks.finish();
}

void multiply(const Weight& weight, const Rows& rows, const Output& out, int64_t first_row, int64_t last_row,
              int64_t first, int64_t last) {
  if (rows.form == RowForm::kBfloat16Tile)
    return multiply_tiles<true>(weight, rows, out, first_row, last_row, first, last);
  if (rows.form == RowForm::kInt8Tile)
    return multiply_tiles<false>(weight, rows, out, first_row, last_row, first, last);
  avx512::packed_kernels.multiply(weight, rows, out, first_row, last_row, first, last);
}

}  // namespace

extern const PackedKernels packed_kernels;
const PackedKernels packed_kernels = {choose_form, prepare, multiply};

}  // namespace headrace::HEADRACE_ISA
