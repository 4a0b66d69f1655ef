// Tiles of bfloat16, or of codes, by AMX: 32 query rows at a time against a step of keys that are packed once for all
// rows of the tile. Intel's software developer's manual, volume 1, chapter 18. TDPBF16PS multiplies a tile [16, 32] by
// one of 32 inputs by 16 outputs whose rows hold two inputs each: (input 2i, input 2i + 1) of output 0, of output 1,
// ...
//
// Products run on the tile unit and softmax on the vector units, so a software pipeline overlaps them. A unit of work
// is 32 rows by one step of keys. While tiles multiply weights and values of unit i - 1, and then the logits of unit i
// + 1 into the buffer that this frees, vectors turn the logits of unit i into weights in place. Each stage depends only
// on the previous turn, and all buffers fit the L1 cache.
#pragma once

#include "amx_tiles.h"
#include "attention_tile.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kAmxStep = 128;  // keys of a unit
constexpr int64_t kAmxRows = 32;   // rows of a unit
constexpr int64_t kTileValues = 512;
constexpr int64_t kSkew =
    144;  // floats between buffers, so that equal places of them do not share the low bits of an address

// Of codes, keys and queries are bytes, twice as many to a tile: E counts pairs of them then, and what their products
// are multiplied with lies beside. Values become bfloat16.
struct AmxBuffers {
  int64_t rows, dim, width, keys_of_block;  // M, E and V, padded to 32; N
  bf16 *q, *keys, *values;                  // [M, E]; [N / 16, E / 32] and [N / 32, V / 16] tiles of 512
  float* logits[2];                         // [32, step], or in the first half of each row the weights
  float *sums, *total, *top, *shift;        // [M, V], [M, 16]: sums of each lane, [M], [M]
  float *query_scales, *key_scales;                      // [M], [N]; of codes

  // The rows of a tile that are worth packing keys for, and the keys of a block: both stay in the L2 cache.
  static int64_t most_rows(const Attention& a) {
    return clamp(600 * 1024 / (2 * a.head_dim + 4 * a.value_dim) / kAmxRows * kAmxRows, 192, 1536);
  }
  static int64_t block_keys(int64_t dim, int64_t width) {
    return clamp((int64_t{1} << 17) / (dim + width) / kAmxStep * kAmxStep, kAmxStep, 1024);
  }
  static int64_t dim_of(const Attention& a) {
    return a.kv_type == kCodes ? padded(a.head_dim, 64) / 2 : padded(a.head_dim, 32);
  }
  static int64_t floats(const Attention& a, int64_t num_rows) {
    const int64_t m = padded(num_rows, kAmxRows), e = dim_of(a), v = padded(a.value_dim, 32), n = block_keys(e, v);
    return m * e / 2 + n * (e + v) / 2 + 2 * (kAmxRows * kAmxStep + kSkew) + m * v + m * 19 + n;
  }
  AmxBuffers(const Attention& a, int64_t num_rows, float* scratch)
      : rows(padded(num_rows, kAmxRows)), dim(dim_of(a)), width(padded(a.value_dim, 32)),
        keys_of_block(block_keys(dim, width)) {
    float* at = scratch;
    const auto take = [&](int64_t size) { return (at += size) - size; };
    q = reinterpret_cast<bf16*>(take(rows * dim / 2));
    keys = reinterpret_cast<bf16*>(take(keys_of_block * dim / 2)),
    values = reinterpret_cast<bf16*>(take(keys_of_block * width / 2));
    for (int i = 0; i < 2; ++i) logits[i] = take(kAmxRows * kAmxStep + kSkew);
    sums = take(rows * width), total = take(rows * 16), top = take(rows), shift = take(rows);
    query_scales = take(rows), key_scales = take(keys_of_block);
  }
};

// Transposes 16 x 16 words of 32 bits and stores them row after row.
static void store_transposed(__m512i (&r)[16], void* out) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  // Rows 4i ... 4i + 3; of each lane of 128 bits, words 0 (r[4i]) to 3 (r[4i + 3]).
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i even_low = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88),
                  odd_low = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88),
                  odd_high = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);       // lane 0 of all: word i
    t[4 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);     // lane 1: word 4 + i
    t[8 + i] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);   // lane 2
    t[12 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);    // lane 3
  }
  for (int i = 0; i < 16; ++i) _mm512_store_si512(static_cast<char*>(out) + 64 * i, t[i]);
}

// Prefetches and returns the rows of 16 tokens from a position on, null beyond the last.
struct TokenRows {
  const bf16 *keys[16], *values[16];

  HEADRACE_INLINE void enter(const Attention& a, const int32_t* table, int64_t position, int64_t count,
                             int64_t kv_head) {
    const int64_t page_size = page_size_of(a);
    for (int64_t i = 0; i < 16;) {
      if (i >= count) {
        keys[i] = values[i] = nullptr, ++i;
        continue;
      }
      const int64_t left = page_size - ((position + i) & (page_size - 1)),
                    end = clamp(i + left, 0, count < 16 ? count : 16);
      const bf16* key = static_cast<const bf16*>(row_at(a.k, a.k_strides, a, table, position + i, kv_head));
      const bf16* value = static_cast<const bf16*>(row_at(a.v, a.v_strides, a, table, position + i, kv_head));
      for (; i < end; ++i, key += a.k_strides.token, value += a.v_strides.token) {
        keys[i] = key, values[i] = value;
        for (int64_t e = 0; e < a.head_dim; e += 32) __builtin_prefetch(key + e, 0, 2);
        for (int64_t e = 0; e < a.value_dim; e += 32) __builtin_prefetch(value + e, 0, 2);
      }
    }
  }
};

// Interleaves 32 values of two tokens: pairs of the first 16 and pairs of the last 16.
HEADRACE_INLINE void store_pairs(__m512i even, __m512i odd, bf16* first, bf16* second) {
  const __m512i low = _mm512_unpacklo_epi16(even, odd),
                high = _mm512_unpackhi_epi16(even, odd);  // of each lane of 8 numbers, 4 and 4
  _mm512_store_si512(first, _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high));
  _mm512_store_si512(second, _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high));
}

// Weights leave the vectors as VPACKUSDW leaves them: of 32 keys, 0 to 3, 16 to 19, 4 to 7, 20 to 23, ... So do values:
// keys 2 pair and 2 pair + 1 are in row
HEADRACE_INLINE int64_t row_of_pair(int64_t pair) { return pair % 8 / 2 * 4 + pair % 2 + pair / 8 * 2; }

// Keys [at, at + n) and their values, zeros beyond up to whole steps.
static void pack_block(const AmxBuffers& t, const Attention& a, const Tile& tile, int64_t at, int64_t n) {
  const int32_t* table = a.table + tile.request * a.table_stride;
  constexpr int64_t kAhead = 48;  // keys
  TokenRows rows[kAhead / 16 + 1];
  const auto enter = [&](int64_t j) { rows[j / 16 % (kAhead / 16 + 1)].enter(a, table, at + j, n - j, tile.kv_head); };
  for (int64_t j = 0; j < kAhead; j += 16) enter(j);
  for (int64_t j = 0; j < padded(n, 32); j += 16) {
    enter(j + kAhead);
    const TokenRows& now = rows[j / 16 % (kAhead / 16 + 1)];
    for (int64_t e = 0; e < t.dim; e += 32) {
      const __mmask32 inside = first_halves(a.head_dim - e);
      __m512i r[16];
      for (int i = 0; i < 16; ++i)
        r[i] = now.keys[i] ? _mm512_maskz_loadu_epi16(inside, now.keys[i] + e) : _mm512_setzero_si512();
      store_transposed(r, t.keys + (j / 16 * (t.dim / 32) + e / 32) * kTileValues);
    }
    for (int64_t e = 0; e < t.width; e += 32) {
      const __mmask32 inside = first_halves(a.value_dim - e);
      const auto load = [&](int64_t i) {
        return now.values[i] ? _mm512_maskz_loadu_epi16(inside, now.values[i] + e) : _mm512_setzero_si512();
      };
      bf16* const tiles = t.values + j / 32 * t.width * 32 + e / 16 * kTileValues;
      for (int64_t i = 0; i < 16; i += 2) {
        bf16* const out = tiles + row_of_pair((j + i) % 32 / 2) * 32;
        store_pairs(load(i), load(i + 1), out, out + kTileValues);
      }
    }
  }
}

// Codes in the top bytes of words times their scales, as pairs of bfloat16. Both are cut, not rounded, from numbers
// which `kRounding` makes larger by half of what that takes away in the mean.
constexpr float kRounding = 0x1p-24f * (1.0f + 0x1p-9f * 1.44f);

HEADRACE_INLINE __m512i pair_of(__m512i even, float even_scale, __m512i odd, float odd_scale) {
  const __m512 first = _mm512_mul_ps(_mm512_cvtepi32_ps(even), _mm512_set1_ps(even_scale)),
               second = _mm512_mul_ps(_mm512_cvtepi32_ps(odd), _mm512_set1_ps(odd_scale));
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(first), 16),
                                 _mm512_castps_si512(second));
}

// The same for codes; tokens before `low` are outside the window and get scale 0.
static void pack_codes(const AmxBuffers& t, const Attention& a, const Tile& tile, int64_t low, int64_t at, int64_t n,
                       const LotRoom& room) {
  const int32_t* table = a.table + tile.request * a.table_stride;
  const __m512 zero = _mm512_setzero_ps();
  const __m512i kTopByte = _mm512_set1_epi32(static_cast<int>(0xff000000));
  for (int64_t j = 0; j < padded(n, 32); j += 16) {
    const int64_t position = j < n ? at + j : at;
    const uint32_t seen = j < n ? seen_of_block(low, at + n, position) & 0xffff : 0;
    const Lot lot = page_size_of(a) < kMostLot ? room.collect(a, table, position, at + n, tile.kv_head)
                                               : lot_at(a, table, position, tile.kv_head);
    if (j + 48 < n && page_size_of(a) >= kMostLot) {
      const Lot later = lot_at(a, table, at + j + 48, tile.kv_head);
      for (int64_t i = 0; i < 16 * a.head_dim; i += 64) fetch(later.keys + i);
      for (int64_t i = 0; i < 16 * a.value_dim; i += 64) fetch(later.values + i);
      fetch(later.key_scales), fetch(later.value_scales);
    }
    memcpy(t.keys + j / 16 * (t.dim / 32) * kTileValues, lot.keys, 16 * a.head_dim);
    _mm512_store_ps(t.key_scales + j, _mm512_mask_loadu_ps(zero, static_cast<__mmask16>(seen), lot.key_scales));
    alignas(64) float scales[16];
    _mm512_store_ps(scales, _mm512_mul_ps(_mm512_mask_loadu_ps(zero, static_cast<__mmask16>(seen), lot.value_scales),
                                          _mm512_set1_ps(kRounding)));
    for (int64_t i = 0; i < 16; i += 4) {
      bf16* first_out = t.values + j / 32 * t.width * 32 + row_of_pair((j + i) % 32 / 2) * 32;
      bf16* second_out = t.values + j / 32 * t.width * 32 + row_of_pair((j + i) % 32 / 2 + 1) * 32;
      for (int64_t e = 0; e < t.width; e += 16, first_out += kTileValues, second_out += kTileValues) {
        const __mmask16 inside = first(static_cast<int>(clamp(a.value_dim - e, 0, 16)));
        const __m512i codes = _mm512_maskz_loadu_epi32(inside, lot.values + (i / 4 * a.value_dim + e) * 4);
        _mm512_store_si512(first_out, pair_of(_mm512_slli_epi32(codes, 24), scales[i],
                                              _mm512_and_si512(_mm512_slli_epi32(codes, 16), kTopByte), scales[i + 1]));
        _mm512_store_si512(second_out, pair_of(_mm512_and_si512(_mm512_slli_epi32(codes, 8), kTopByte), scales[i + 2],
                                               _mm512_and_si512(codes, kTopByte), scales[i + 3]));
      }
    }
  }
}

// 32 rows, or the last 16, by keys [at, at + n) of the packed block at `begin`; n is a step, or less where no row sees
// more.
struct Unit {
  int64_t row, rows, begin, at, n;
  bool is_plain;          // all rows see all n keys, n is a whole step, and there is no soft-cap
  bool is_whole = false;  // its logits are products of codes still
};

// As weights keep bfloat16's exponents, the top is any number that is not 2^64 times too small or too large: that of
// the first keys. Where the sum of weights says that it was not, the tile is done again from the true tops.
constexpr float kMostTotal = 0x1p64f;

static constexpr Arc<uint8_t> kArc;

// Weights 2^x of two vectors as bfloat16. Of x = i + f, i becomes the exponent and f, less its distance from 2^f - 1,
// the mantissa.
HEADRACE_INLINE __m512i weigh(__m512 low, __m512 high, __m512 scale, __m512 shift, __m512i arc) {
  const __m512i a = _mm512_cvtps_epi32(_mm512_fmadd_ps(low, scale, shift)),
                b = _mm512_cvtps_epi32(_mm512_fmadd_ps(high, scale, shift));
  const __m512i x = _mm512_packus_epi32(a, b);
  return _mm512_srli_epi16(
      _mm512_subs_epu16(x, _mm512_maskz_permutexvar_epi8(0x5555555555555555, _mm512_srli_epi16(x, 2), arc)), 1);
}

constexpr int64_t kPiece = 32, kPieces = kAmxStep / kPiece;  // logits whose weights are found at a time

// The softmax of a unit's rows, each a whole step: logits, or products of codes, become weights in their place. `kPace`
// pieces go with each product.
template <bool kIsBytes, int kPace>
struct Softening {
  float* logits;
  const float *shift, *key_scales,
      *query_scales;  // of the keys and queries whose products are not logits yet; else null
  float* total;  // sums of each lane
  __m512 scale;
  int64_t row = 0, rows = 0;
  __m512i arc = _mm512_load_si512(&kArc);
  __m512 sum = _mm512_setzero_ps();  // of the row that is on

  // After the i-th product of four.
  template <int i>
  HEADRACE_INLINE void advance() {
    if (row >= rows) return;
    if constexpr (kPace >= kPieces) {
      for (int n = 0; n < kPace / kPieces && row < rows; ++n) soften_row();
    } else {
      constexpr int kFirst = i * kPace % kPieces;
#pragma GCC unroll 4
      for (int n = 0; n < kPace; ++n) soften_piece(kFirst + n);
    }
  }
  // The rest; no row is half done.
  HEADRACE_INLINE void finish() {
    while (row < rows) soften_row();
  }

 private:
  HEADRACE_INLINE void soften_row() {
#pragma GCC unroll 8
    for (int n = 0; n < kPieces; ++n) soften_piece(n);
  }

  HEADRACE_INLINE void soften_piece(int n) {
    float* const at = logits + row * kAmxStep;
    const __m512 shifted = _mm512_set1_ps(shift[row]);
    __m512i weight;
    if (kIsBytes && key_scales) {
      const auto load = [&](int64_t j) {
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(at + j)), _mm512_load_ps(key_scales + j));
      };
      weight = weigh(load(n * kPiece), load(n * kPiece + 16), _mm512_mul_ps(scale, _mm512_set1_ps(query_scales[row])),
                     shifted, arc);
    } else {
      weight = weigh(_mm512_load_ps(at + n * kPiece), _mm512_load_ps(at + n * kPiece + 16), scale, shifted, arc);
    }
    _mm512_store_si512(reinterpret_cast<bf16*>(at) + n * kPiece, weight);
    // They are added up as rounded, as they must add up to 1. VDPBF16PS would wait for tiles.
    const Halves halves(weight);
    sum = _mm512_add_ps(n == 0 ? _mm512_load_ps(total + row * 16) : sum, (halves.even + halves.odd).v);
    if (n == kPieces - 1) _mm512_store_ps(total + row++ * 16, sum);
  }
};

// No vector work beside the tiles.
struct Nothing {
  template <int i>
  HEADRACE_INLINE void advance() {}
};

#define HEADRACE_PRODUCT(c, a, b)                   \
  do {                                              \
    if constexpr (kIsBytes) _tile_dpbssd(c, a, b);  \
    else _tile_dpbf16ps(c, a, b);                   \
  } while (false)

// Of 32 rows and 32 columns the second 16 rows only where there are some.
#define HEADRACE_IF_TALL(instruction) \
  do {                                \
    if (is_tall) instruction;         \
  } while (false)

// Sums in tiles 0 to 3, to be stored at c (16 rows, then 16 more, `c_row` floats apart) when the next loads are under
// way; null: none.
struct Held {
  float* c = nullptr;
  int64_t c_row = 0;
  bool is_tall = false;

  HEADRACE_INLINE void store() {
    if (c == nullptr) return;
    const int64_t c_bytes = c_row * 4;
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    HEADRACE_IF_TALL(_tile_stored(2, c + 16 * c_row, c_bytes));
    HEADRACE_IF_TALL(_tile_stored(3, c + 16 * c_row + 16, c_bytes));
    c = nullptr;
  }
};

// Two by two tiles: c (16 rows, then 16 more, `c_row` floats apart) + a b, held. Tiles of a and b: of the second 16
// rows or columns `a_next` and `b_next` values further, of the next 32 inputs `a_step` and `b_step`. b passes the
// L1 cache by, which holds what the softmax beside works on.
template <bool kAccumulates, bool kIsBytes, class Beside>
HEADRACE_INLINE void multiply_tiles(bool is_tall, const bf16* a, int64_t a_row, int64_t a_next, int64_t a_step,
                                    const bf16* b, int64_t b_next, int64_t b_step, float* c, int64_t c_row,
                                    int64_t lots, Held& held, Beside& beside) {
  const int64_t a_bytes = a_row * 2, c_bytes = c_row * 4;
  const auto begin = [&]() __attribute__((always_inline)) {
    held.store();
    if (kAccumulates) {
      _tile_loadd(0, c, c_bytes);
      _tile_loadd(1, c + 16, c_bytes);
      HEADRACE_IF_TALL(_tile_loadd(2, c + 16 * c_row, c_bytes));
      HEADRACE_IF_TALL(_tile_loadd(3, c + 16 * c_row + 16, c_bytes));
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
  };
  const auto load = [&]<int o>(int64_t i) __attribute__((always_inline)) {
    if constexpr (o == 0) _tile_stream_loadd(7, b + b_next + i * b_step, 64);
    if constexpr (o == 1) HEADRACE_IF_TALL(_tile_loadd(5, a + a_next + i * a_step, a_bytes));
    if constexpr (o == 2) _tile_stream_loadd(6, b + i * b_step, 64);
    if constexpr (o == 3) _tile_loadd(4, a + i * a_step, a_bytes);
  };
  const auto product = [&]<int o>() __attribute__((always_inline)) {
    if constexpr (o == 0) HEADRACE_PRODUCT(1, 4, 7);
    if constexpr (o == 1) HEADRACE_IF_TALL(HEADRACE_PRODUCT(3, 5, 7));
    if constexpr (o == 2) HEADRACE_IF_TALL(HEADRACE_PRODUCT(2, 5, 6));
    if constexpr (o == 3) HEADRACE_PRODUCT(0, 4, 6);
  };
  weave(lots, product, load, begin, [&]<int i>() __attribute__((always_inline)) { beside.template advance<i>(); });
  held = {c, c_row, is_tall};
}

// Logits where all of 32 queries fits half of the tiles, and stays there: half the loads. Keys are loaded ahead.
template <bool kIsBytes, class Beside>
HEADRACE_INLINE void multiply_short_logits(bool is_tall, const bf16* q, const bf16* keys, float* logits, int64_t n,
                                           Held& held, Beside& beside) {
  _tile_loadd(4, q, 128);
  _tile_loadd(5, q + 32, 128);
  HEADRACE_IF_TALL(_tile_loadd(6, q + 16 * 64, 128));
  HEADRACE_IF_TALL(_tile_loadd(7, q + 16 * 64 + 32, 128));
  held.store();
  _tile_stream_loadd(2, keys, 64);
  _tile_stream_loadd(3, keys + kTileValues, 64);
  for (int64_t j = 0; j < n; j += 16, keys += 2 * kTileValues) {
    const bool is_last = j + 16 >= n;
    _tile_zero(0);
    _tile_zero(1);
    HEADRACE_PRODUCT(0, 4, 2);
    beside.template advance<0>();
    HEADRACE_IF_TALL(HEADRACE_PRODUCT(1, 6, 2));
    beside.template advance<1>();
    if (!is_last) _tile_stream_loadd(2, keys + 2 * kTileValues, 64);
    HEADRACE_PRODUCT(0, 5, 3);
    beside.template advance<2>();
    HEADRACE_IF_TALL(HEADRACE_PRODUCT(1, 7, 3));
    beside.template advance<3>();
    if (!is_last) _tile_stream_loadd(3, keys + 3 * kTileValues, 64);
    _tile_stored(0, logits + j, kAmxStep * 4);
    HEADRACE_IF_TALL(_tile_stored(1, logits + 16 * kAmxStep + j, kAmxStep * 4));
  }
}

// The same where they fit two tiles, for 32 keys at a time: codes of up to 64 dimensions.
template <class Beside>
HEADRACE_INLINE void multiply_shortest_logits(bool is_tall, const bf16* q, const bf16* keys, float* logits, int64_t n,
                                              Held& held, Beside& beside) {
  _tile_loadd(4, q, 64);
  HEADRACE_IF_TALL(_tile_loadd(6, q + 16 * 32, 64));
  _tile_stream_loadd(5, keys, 64);
  _tile_stream_loadd(7, keys + kTileValues, 64);
  held.store();
  for (int64_t j = 0; j < n; j += 32, keys += 2 * kTileValues) {
    const bool is_last = j + 32 >= n;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_dpbssd(0, 4, 5);
    beside.template advance<0>();
    HEADRACE_IF_TALL(_tile_dpbssd(2, 6, 5));
    beside.template advance<1>();
    if (!is_last) _tile_stream_loadd(5, keys + 2 * kTileValues, 64);
    _tile_dpbssd(1, 4, 7);
    beside.template advance<2>();
    HEADRACE_IF_TALL(_tile_dpbssd(3, 6, 7));
    beside.template advance<3>();
    if (!is_last) _tile_stream_loadd(7, keys + 3 * kTileValues, 64);
    _tile_stored(0, logits + j, kAmxStep * 4);
    _tile_stored(1, logits + j + 16, kAmxStep * 4);
    HEADRACE_IF_TALL(_tile_stored(2, logits + 16 * kAmxStep + j, kAmxStep * 4));
    HEADRACE_IF_TALL(_tile_stored(3, logits + 16 * kAmxStep + j + 16, kAmxStep * 4));
  }
}

template <bool kIsBytes, class Beside>
HEADRACE_INLINE void multiply_logits(const AmxBuffers& t, const Unit& u, float* logits, Held& held, Beside& beside) {
  const int64_t lots = t.dim / 32, n = padded(u.n, 32);
  const bool is_tall = u.rows > 16;
  const bf16 *q = t.q + u.row * t.dim, *keys = t.keys + (u.at - u.begin) / 16 * lots * kTileValues;
  if (kIsBytes && lots == 1) return multiply_shortest_logits(is_tall, q, keys, logits, n, held, beside);
  if (lots == 2) return multiply_short_logits<kIsBytes>(is_tall, q, keys, logits, n, held, beside);
  for (int64_t j = 0; j < n; j += 32, keys += 2 * lots * kTileValues)
    multiply_tiles<false, kIsBytes>(is_tall, q, t.dim, 16 * t.dim, 32, keys, lots * kTileValues, kTileValues,
                                    logits + j, kAmxStep, lots, held, beside);
}

template <class Beside>
HEADRACE_INLINE void multiply_values(const AmxBuffers& t, const Unit& u, const float* logits, Held& held,
                                     Beside& beside) {
  const bf16* weights = reinterpret_cast<const bf16*>(logits);
  float* sums = t.sums + u.row * t.width;
  for (int64_t e = 0; e < t.width; e += 32) {
    const bf16* values = t.values + (u.at - u.begin) * t.width + e * 32;
    multiply_tiles<true, false>(u.rows > 16, weights, 2 * kAmxStep, 32 * kAmxStep, 32, values, kTileValues,
                                32 * t.width, sums + e, t.width, (u.n + 31) / 32, held, beside);
  }
}

constexpr float kUnseen = -1.0e30f;  // a logit whose weight is 0

// The logits of keys before `end` are hidden, or those from `start` on up to the end of a step.
HEADRACE_INLINE void hide_before(float* logits, int64_t end) {
  int64_t i = 0;
  for (; i + 16 <= end; i += 16) _mm512_store_ps(logits + i, _mm512_set1_ps(kUnseen));
  if (i < end) _mm512_mask_store_ps(logits + i, first(static_cast<int>(end - i)), _mm512_set1_ps(kUnseen));
}
HEADRACE_INLINE void hide_from(float* logits, int64_t start) {
  int64_t i = start / 16 * 16;
  if (i < start)
    _mm512_mask_store_ps(logits + i, ~first(static_cast<int>(start - i)), _mm512_set1_ps(kUnseen)), i += 16;
  for (; i < kAmxStep; i += 16) _mm512_store_ps(logits + i, _mm512_set1_ps(kUnseen));
}

HEADRACE_INLINE void set_top(const AmxBuffers& t, int64_t row, float found, float factor) {
  const float top = ceilf(found * factor);  // whole, so that `shift` is exact
  if (found > kUnseen && top > t.top[row]) t.top[row] = top, t.shift[row] = kFixedTop - top * kFixedOne;
}

// The top of a row that has none yet is that of the first logits that it sees: any of them is near enough.
static void find_top(const AmxBuffers& t, int64_t row, const float* logits, float factor) {
  float found = kUnseen;
  for (int64_t i = 0; i < kAmxStep && found <= kUnseen; i += 16)
    found = _mm512_reduce_max_ps(_mm512_load_ps(logits + i));
  set_top(t, row, found, factor);
}

// Raises it to that of all of a step's logits.
static void raise_top(const AmxBuffers& t, int64_t row, const float* logits, float factor) {
  __m512 most = _mm512_load_ps(logits);
  for (int64_t i = 16; i < kAmxStep; i += 16) most = _mm512_max_ps(most, _mm512_load_ps(logits + i));
  set_top(t, row, _mm512_reduce_max_ps(most), factor);
}

HEADRACE_INLINE bool has_tops(const AmxBuffers& t, const Unit& u) {
  const __m512 least = _mm512_min_ps(_mm512_load_ps(t.top + u.row), _mm512_load_ps(t.top + u.row + u.rows - 16));
  return _mm512_cmp_ps_mask(least, _mm512_set1_ps(kMasked), _CMP_LE_OQ) == 0;
}

// Products of a unit that are not done yet become logits; those of keys that a row does not see, and what lies beyond
// the unit's keys, are hidden.
template <bool kIsBytes>
static void settle_logits(const AmxBuffers& t, const Attention& a, const Tile& tile, const Span& span, const Unit& u,
                          float* logits) {
  const int64_t padded_n = padded(u.n, 32);
  int64_t position = span.position(u.row), head = (span.first_row + u.row) % span.group;
  for (int64_t r = 0; r < u.rows; ++r) {
    if (r > 0 && u.row + r < tile.num_rows && ++head == span.group)
      head = 0, ++position;  // rows behind the last are as the last
    float* row = logits + r * kAmxStep;
    const __m512 scale = kIsBytes ? _mm512_set1_ps(t.query_scales[u.row + r]) : _mm512_setzero_ps();
    for (int64_t j = 0; j < padded_n && kIsBytes; j += 16)
      _mm512_store_ps(row + j, _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(row + j)),
                                                           _mm512_load_ps(t.key_scales + u.at - u.begin + j)),
                                             scale));
    if (u.is_plain) continue;
    for (int64_t j = 0; j < padded_n && a.softcap > 0.0f; j += kLanes)
      store(row + j, Vec(a.softcap) * tanh(load(row + j) * Vec(product_scale(a))));
    const int64_t end = clamp(position + 1 - u.at, 0, u.n);
    if (a.window > 0) hide_before(row, clamp(position - a.window + 1 - u.at, 0, end));
    hide_from(row, end);
  }
}

// Scaling, soft-cap and masks of a unit's products before their softmax.
template <bool kIsBytes>
static void prepare_rows(const AmxBuffers& t, const Attention& a, const Tile& tile, const Span& span, Unit& u,
                         float* logits, float factor) {
  const bool is_known = has_tops(t, u);
  u.is_whole = kIsBytes && u.is_plain && is_known;
  if (!u.is_whole && (kIsBytes || !u.is_plain)) settle_logits<kIsBytes>(t, a, tile, span, u, logits);
  for (int64_t r = 0; r < u.rows && !is_known; ++r)
    if (t.top[u.row + r] == kMasked) find_top(t, u.row + r, logits + r * kAmxStep, factor);
}

// The units of a packed block of keys, one after the other.
class Units {
 public:
  Units(const Attention& a, const Tile& tile, const Span& span, int64_t begin, int64_t end)
      : a_(a), tile_(tile), span_(span), begin_(begin), end_(end) {
    enter_rows();
  }

  bool take(Unit& u) {
    while (at_ >= seen_) {
      if ((row_ += kAmxRows) >= tile_.num_rows) return false;
      enter_rows();
    }
    u = {row_, tile_.num_rows - row_ > 16 ? kAmxRows : 16, begin_, at_,
         seen_ - at_ < kAmxStep ? seen_ - at_ : kAmxStep};
    u.is_plain = u.n == kAmxStep && at_ + kAmxStep <= seen_by_all_ && at_ >= low_of_all_;
    at_ += kAmxStep;
    return true;
  }

 private:
  // What the rows from `row_` on see of the block: [low, seen) by any of them, [low_of_all, seen_by_all) by all.
  void enter_rows() {
    const int64_t first = span_.position(row_),
                  last = span_.position(row_ + kAmxRows < tile_.num_rows ? row_ + kAmxRows - 1 : tile_.num_rows - 1);
    seen_ = last + 1 < end_ ? last + 1 : end_;
    seen_by_all_ = a_.softcap == 0.0f ? first + 1 : begin_;
    low_of_all_ = a_.window > 0 ? last - a_.window + 1 : begin_;
    at_ = begin_;
    while (a_.window > 0 && at_ + kAmxStep <= first - a_.window + 1) at_ += kAmxStep;
  }

  const Attention& a_;
  const Tile& tile_;
  const Span& span_;
  int64_t begin_, end_, at_ = 0, row_ = 0, seen_ = 0, seen_by_all_ = 0, low_of_all_ = 0;
};

// All units of a packed block. Turn by turn: weighted values of unit i - 1, logits of unit i + 1, and softmax of unit
// i.
template <bool kIsBytes, int kPace>
static void pass_units(const AmxBuffers& t, const Attention& a, const Tile& tile, const Span& span, Units units,
                       float factor) {
  Unit before, now, next;
  Nothing nothing;
  Held held;
  bool has_before = false, has_now = units.take(now);
  if (has_now) multiply_logits<kIsBytes>(t, now, t.logits[0], held, nothing);
  held.store();
  settle();
  for (int64_t turn = 0; has_now || has_before; ++turn) {
    float *const here = t.logits[turn % 2], *const other = t.logits[1 - turn % 2];
    const bool has_next = has_now && units.take(next);
    Softening<kIsBytes, kPace> softening{here,    t.shift + now.row,      nullptr,
                                         nullptr, t.total + now.row * 16, _mm512_set1_ps(factor * kFixedOne)};
    if (has_now) {
      prepare_rows<kIsBytes>(t, a, tile, span, now, here, factor);
      if (now.is_whole)
        softening.key_scales = t.key_scales + now.at - now.begin, softening.query_scales = t.query_scales + now.row;
      softening.rows = now.rows;
    }
    if (has_before) multiply_values(t, before, other, held, softening);
    if (has_next) multiply_logits<kIsBytes>(t, next, other, held, softening);
    held.store();
    softening.finish();
    settle();
    before = now, has_before = has_now;
    now = next, has_now = has_next;
  }
}

// Spreads the pieces of softmax evenly over the products, so that both end together.
template <bool kIsBytes>
static void pass_block(const AmxBuffers& t, const Attention& a, const Tile& tile, const Span& span, const Units& units,
                       float factor) {
  const int64_t products = kAmxStep / 16 * (t.dim / 32 * 2 + t.width / 16), pieces = kAmxRows * kPieces;
  if (products >= pieces) return pass_units<kIsBytes, 1>(t, a, tile, span, units, factor);
  if (2 * products >= pieces) return pass_units<kIsBytes, 2>(t, a, tile, span, units, factor);
  pass_units<kIsBytes, 4>(t, a, tile, span, units, factor);
}

// The tops of all rows, by all logits of a packed block.
template <bool kIsBytes>
static void raise_tops(const AmxBuffers& t, const Attention& a, const Tile& tile, const Span& span, Units units,
                       float factor) {
  Nothing nothing;
  Held held;
  for (Unit u; units.take(u);) {
    multiply_logits<kIsBytes>(t, u, t.logits[0], held, nothing);
    held.store();
    settle();
    settle_logits<kIsBytes>(t, a, tile, span, u, t.logits[0]);
    for (int64_t r = 0; r < u.rows; ++r) raise_top(t, u.row + r, t.logits[0] + r * kAmxStep, factor);
  }
}

template <bool kIsBytes>
static void pack_queries(const AmxBuffers& t, const Attention& a, const Tile& tile) {
  if (kIsBytes || t.rows > tile.num_rows || t.dim > a.head_dim) memset(t.q, 0, t.rows * t.dim * sizeof(bf16));
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    if (!kIsBytes) halve_queries(a, query_row(a, tile, r), t.q + r * t.dim, a.head_dim);
    else
      widen_values(a.q_type, query_row(a, tile, r), t.logits[0], a.head_dim),
          t.query_scales[r] = encode(t.logits[0], a.head_dim, reinterpret_cast<int8_t*>(t.q + r * t.dim));
  }
  for (int64_t r = tile.num_rows; r < t.rows && kIsBytes; ++r) t.query_scales[r] = 0.0f;
}

// f(units) for the keys of a tile, packed block by block.
template <bool kIsBytes, class F>
static void over_blocks(const AmxBuffers& t, const Attention& a, const Tile& tile, const Span& span,
                        const LotRoom& room, const F& f) {
  for (int64_t at = kIsBytes ? span.low / kMostLot * kMostLot : span.low; at < span.end; at += t.keys_of_block) {
    const int64_t n = span.end - at < t.keys_of_block ? span.end - at : t.keys_of_block;
    if constexpr (kIsBytes) pack_codes(t, a, tile, span.low, at, n, room);
    else pack_block(t, a, tile, at, n);
    settle();
    f(Units(a, tile, span, at, at + n));
  }
}

template <bool kIsBytes>
static void add_up(const AmxBuffers& t, const Attention& a, const Tile& tile, const Span& span, const LotRoom& room,
                   float factor) {
  memset(t.sums, 0, t.rows * t.width * sizeof(float));
  memset(t.total, 0, t.rows * 16 * sizeof(float));
  over_blocks<kIsBytes>(t, a, tile, span, room,
                        [&](const Units& units) { pass_block<kIsBytes>(t, a, tile, span, units, factor); });
}

// Whether some weights came near the end of their range, or are beyond it and no numbers.
static bool is_over(const AmxBuffers& t) {
  __mmask16 over = 0;
  for (int64_t i = 0; i < t.rows * 16; i += 16)
    over |= _mm512_cmp_ps_mask(_mm512_load_ps(t.total + i), _mm512_set1_ps(kMostTotal), _CMP_NLT_UQ);
  return over != 0;
}

template <bool kIsBytes>
static void tile_by_amx(const Attention& a, const Tile& tile, float* scratch) {
  const AmxBuffers t(a, tile.num_rows, scratch);
  const Span span(a, tile);
  const LotRoom room(a, scratch + AmxBuffers::floats(a, tile.num_rows));
  constexpr float kLog2e = 1.44269504088896341f;
  const float factor = a.softcap > 0.0f ? kLog2e : product_scale(a) * kLog2e;
  for (int64_t r = 0; r < t.rows; ++r) t.top[r] = kMasked, t.shift[r] = kFixedTop;
  pack_queries<kIsBytes>(t, a, tile);
  _tile_loadconfig(&kTileConfig);
  add_up<kIsBytes>(t, a, tile, span, room, factor);
  if (is_over(t)) {
    over_blocks<kIsBytes>(t, a, tile, span, room,
                          [&](const Units& units) { raise_tops<kIsBytes>(t, a, tile, span, units, factor); });
    add_up<kIsBytes>(t, a, tile, span, room, factor);
  }
  _tile_release();
  for (int64_t r = 0; r < tile.num_rows; ++r)
    write_row(a, tile, r, t.sums + r * t.width, t.top[r] * kLn2,
              _mm512_reduce_add_ps(_mm512_load_ps(t.total + r * 16)));
}

}  // namespace headrace::HEADRACE_ISA
