// Tiles of bfloat16, or of codes, by AMX: 32 query rows at a time against a step of keys that are packed once for all rows of the tile.
// Intel's software developer's manual, volume 1, chapter 18. TDPBF16PS multiplies a tile [16, 32] by one of 32 inputs by 16
// outputs whose rows hold two inputs each: (input 2i, input 2i + 1) of output 0, of output 1, ...
//
// Products and softmax are of different units of the processor, so they go on side by side: while tiles multiply the logits
// of one unit (32 rows by one step of keys) and the weighted values of the one before the last, vectors turn the logits of
// the one between into weights. What one needs of another was done a turn ago.
#pragma once

#include "amx_tiles.h"
#include "attention_tile.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kAmxStep = 128;  // keys of a unit
constexpr int64_t kAmxRows = 32;   // rows of a unit
constexpr int64_t kTileValues = 512;
constexpr int64_t kSkew = 144;     // floats between buffers, so that equal places of them do not share the low bits of an address

// Of codes, keys and queries are bytes, twice as many to a tile: E counts pairs of them then, and what their products are multiplied
// with lies beside. Values become bfloat16.
struct AmxBuffers {
  int64_t rows, dim, width, keys_of_block;  // M, E and V, padded to 32; N
  bool has_codes;
  bf16 *q, *keys, *values;                  // [M, E]; [N / 16, E / 32] and [N / 32, V / 16] tiles of 512
  float* logits[2];                         // [32, step]
  bf16* weights[2];                         // [step / 32, 32, 32]
  float *sums, *total, *added, *top, *shift, *fades[2];  // [M, V]; [M, 16], [32, 16]: sums of each lane; [M], [M], [32]
  float *query_scales, *key_scales;                      // [M], [N]; of codes

  // The rows of a tile that are worth packing keys for, and the keys of a block: both stay in the second-level cache.
  static int64_t most_rows(const Attention& a) { return clamp(600 * 1024 / (2 * a.head_dim + 4 * a.value_dim) / kAmxRows * kAmxRows, 192, 1536); }
  static int64_t block_keys(int64_t dim, int64_t width) { return clamp((int64_t{1} << 17) / (dim + width) / kAmxStep * kAmxStep, kAmxStep, 1024); }
  static int64_t dim_of(const Attention& a) { return a.kv_type == kCodes ? padded(a.head_dim, 64) / 2 : padded(a.head_dim, 32); }
  static int64_t floats(const Attention& a, int64_t num_rows) {
    const int64_t m = padded(num_rows, kAmxRows), e = dim_of(a), v = padded(a.value_dim, 32), n = block_keys(e, v);
    return m * e / 2 + n * (e + v) / 2 + kAmxRows * kAmxStep * 3 + 4 * kSkew + m * v + m * 19 + kAmxRows * 18 + n;
  }
  AmxBuffers(const Attention& a, int64_t num_rows, float* scratch) : rows(padded(num_rows, kAmxRows)), dim(dim_of(a)), width(padded(a.value_dim, 32)), keys_of_block(block_keys(dim, width)), has_codes(a.kv_type == kCodes) {
    float* at = scratch;
    const auto take = [&](int64_t size) { return (at += size) - size; };
    q = reinterpret_cast<bf16*>(take(rows * dim / 2));
    keys = reinterpret_cast<bf16*>(take(keys_of_block * dim / 2)), values = reinterpret_cast<bf16*>(take(keys_of_block * width / 2));
    for (int i = 0; i < 2; ++i) {
      logits[i] = take(kAmxRows * kAmxStep + kSkew);
      weights[i] = reinterpret_cast<bf16*>(take(kAmxRows * kAmxStep / 2 + kSkew));
    }
    sums = take(rows * width), total = take(rows * 16), added = take(kAmxRows * 16), top = take(rows), shift = take(rows);
    for (int i = 0; i < 2; ++i) fades[i] = take(kAmxRows);
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
    const __m512i even_low = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd_low = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), odd_high = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);       // lane 0 of all: word i
    t[4 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);     // lane 1: word 4 + i
    t[8 + i] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);   // lane 2
    t[12 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);    // lane 3
  }
  for (int i = 0; i < 16; ++i) _mm512_store_si512(static_cast<char*>(out) + 64 * i, t[i]);
}

HEADRACE_INLINE __m512i load_bits(const bf16* p, int64_t n) {  // up to 32 values, zeros beyond n
  return n >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1), p);
}

HEADRACE_INLINE const bf16* key_at(const Attention& a, const int32_t* table, int64_t position, int64_t kv_head) {
  return static_cast<const bf16*>(row_at(a.k, a.k_strides, a, table, position, kv_head));
}
HEADRACE_INLINE const bf16* value_at(const Attention& a, const int32_t* table, int64_t position, int64_t kv_head) {
  return static_cast<const bf16*>(row_at(a.v, a.v_strides, a, table, position, kv_head));
}

// Weights leave the vectors as VPACKSSDW leaves them: of 32 keys, 0 to 3, 16 to 19, 4 to 7, 20 to 23, ... So do values: keys
// 2 pair and 2 pair + 1 are in row
HEADRACE_INLINE int64_t row_of_pair(int64_t pair) { return pair % 8 / 2 * 4 + pair % 2 + pair / 8 * 2; }

// Keys [at, at + n) and their values, zeros beyond up to whole steps.
static void pack_block(const AmxBuffers& t, const Attention& a, const Tile& tile, int64_t at, int64_t n) {
  const int32_t* table = a.table + tile.request * a.table_stride;
  const int64_t padded_n = padded(n, 32);
  constexpr int64_t kAhead = 48;  // keys
  fetch_rows(a, table, at, kAhead, at + n, tile.kv_head);
  for (int64_t j = 0; j < padded_n; j += 16) {
    fetch_rows(a, table, at + j + kAhead, 16, at + n, tile.kv_head);
    const bf16* rows[16];
    for (int64_t i = 0; i < 16; ++i) rows[i] = j + i < n ? key_at(a, table, at + j + i, tile.kv_head) : nullptr;
    for (int64_t e = 0; e < t.dim; e += 32) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = rows[i] ? load_bits(rows[i] + e, a.head_dim - e) : _mm512_setzero_si512();
      store_transposed(r, t.keys + (j / 16 * (t.dim / 32) + e / 32) * kTileValues);
    }
  }
  for (int64_t j = 0; j < padded_n; j += 2) {
    const bf16* even = j < n ? value_at(a, table, at + j, tile.kv_head) : nullptr;
    const bf16* odd = j + 1 < n ? value_at(a, table, at + j + 1, tile.kv_head) : nullptr;
    bf16* out = t.values + j / 32 * t.width * 32 + row_of_pair(j % 32 / 2) * 32;
    for (int64_t e = 0; e < t.width; e += 16, out += kTileValues) {
      const __mmask16 inside = first(static_cast<int>(clamp(a.value_dim - e, 0, 16)));
      const __m512i low = even ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, even + e)) : _mm512_setzero_si512();
      const __m512i high = odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, odd + e)) : _mm512_setzero_si512();
      _mm512_store_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

// Codes in the top bytes of words times their scales, as pairs of bfloat16. Both are cut, not rounded, from numbers which `kRounding`
// makes larger by half of what that takes away in the mean.
constexpr float kRounding = 0x1p-24f * (1.0f + 0x1p-9f * 1.44f);

HEADRACE_INLINE __m512i pair_of(__m512i even, float even_scale, __m512i odd, float odd_scale) {
  const __m512 first = _mm512_mul_ps(_mm512_cvtepi32_ps(even), _mm512_set1_ps(even_scale)), second = _mm512_mul_ps(_mm512_cvtepi32_ps(odd), _mm512_set1_ps(odd_scale));
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(first), 16), _mm512_castps_si512(second));
}

// The same of codes; what lies before `low` is nobody's.
static void pack_codes(const AmxBuffers& t, const Attention& a, const Tile& tile, int64_t low, int64_t at, int64_t n, const LotRoom& room) {
  const int32_t* table = a.table + tile.request * a.table_stride;
  const __m512 zero = _mm512_setzero_ps();
  const __m512i kTopByte = _mm512_set1_epi32(static_cast<int>(0xff000000));
  for (int64_t j = 0; j < padded(n, 32); j += 16) {
    const int64_t position = j < n ? at + j : at;
    const uint32_t seen = j < n ? seen_of_block(low, at + n, position) & 0xffff : 0;
    const Lot lot = page_size_of(a) < kMostLot ? room.collect(a, table, position, at + n, tile.kv_head) : lot_at(a, table, position, tile.kv_head);
    if (j + 48 < n && page_size_of(a) >= kMostLot) {
      const Lot later = lot_at(a, table, at + j + 48, tile.kv_head);
      for (int64_t i = 0; i < 16 * a.head_dim; i += 64) fetch(later.keys + i);
      for (int64_t i = 0; i < 16 * a.value_dim; i += 64) fetch(later.values + i);
      fetch(later.key_scales), fetch(later.value_scales);
    }
    memcpy(t.keys + j / 16 * (t.dim / 32) * kTileValues, lot.keys, 16 * a.head_dim);
    _mm512_store_ps(t.key_scales + j, _mm512_mask_loadu_ps(zero, static_cast<__mmask16>(seen), lot.key_scales));
    alignas(64) float scales[16];
    _mm512_store_ps(scales, _mm512_mul_ps(_mm512_mask_loadu_ps(zero, static_cast<__mmask16>(seen), lot.value_scales), _mm512_set1_ps(kRounding)));
    for (int64_t i = 0; i < 16; i += 4) {
      bf16* first_out = t.values + j / 32 * t.width * 32 + row_of_pair((j + i) % 32 / 2) * 32;
      bf16* second_out = t.values + j / 32 * t.width * 32 + row_of_pair((j + i) % 32 / 2 + 1) * 32;
      for (int64_t e = 0; e < t.width; e += 16, first_out += kTileValues, second_out += kTileValues) {
        const __mmask16 inside = first(static_cast<int>(clamp(a.value_dim - e, 0, 16)));
        const __m512i codes = _mm512_maskz_loadu_epi32(inside, lot.values + (i / 4 * a.value_dim + e) * 4);
        _mm512_store_si512(first_out, pair_of(_mm512_slli_epi32(codes, 24), scales[i], _mm512_and_si512(_mm512_slli_epi32(codes, 16), kTopByte), scales[i + 1]));
        _mm512_store_si512(second_out, pair_of(_mm512_and_si512(_mm512_slli_epi32(codes, 8), kTopByte), scales[i + 2], _mm512_and_si512(codes, kTopByte), scales[i + 3]));
      }
    }
  }
}

// 32 rows, or the last 16, by keys [at, at + n) of the packed block at `begin`; n is a step, or less where no row sees more.
struct Unit {
  int64_t row, rows, begin, at, n;
  bool is_plain;          // all rows see all n keys, n is a whole step, and there is no soft-cap
  bool is_faded = false;  // fades are not all 1
  bool is_whole = false;  // its logits are products of codes still
};

// Weights are found in 16 bits: of a logit in units of log2 the row's top is taken away, and 11 bits are kept below the point.
// `kFixedTop` stands for the top itself, half a unit added. That reaches from 2^-27, below which all is 0, to 2^4.5. The top is
// that of the first keys: where later ones near the end, which their sum tells (`kMostAdded`), the row is done again.
constexpr float kFixedOne = 2048.0f, kFixedTop = 11 * 2048.0f + 1024.0f, kMostAdded = 16.0f;

// Weights 2^x of two vectors as bfloat16. Of x = i + f, i becomes the exponent and f the mantissa, less its distance from
// 2^f - 1, which is f (1 - f) (0.344 + 0.073 (f - 1/2)) to 0.0004.
template <bool kHides>
HEADRACE_INLINE __m512i weigh(__m512 low, __m512 high, __m512 scale, __m512 shift) {
  const __m512i a = _mm512_cvtps_epi32(_mm512_fmadd_ps(low, scale, shift)), b = _mm512_cvtps_epi32(_mm512_fmadd_ps(high, scale, shift));
  const __m512i x = _mm512_packs_epi32(a, b), f = _mm512_slli_epi16(x, 5);  // f - 1/2, a signed fraction of 16 bits
  const __mmask32 is_seen = kHides ? _mm512_cmpgt_epi16_mask(x, _mm512_set1_epi16(-30720)) : 0;
  const __m512i arc = _mm512_sub_epi16(_mm512_set1_epi16(16384), _mm512_mulhi_epi16(f, f));
  const __m512i part = _mm512_add_epi16(_mm512_mulhi_epi16(f, _mm512_set1_epi16(150)), _mm512_set1_epi16(704));
  const __m512i mantissa = _mm512_subs_epi16(x, _mm512_mulhi_epi16(arc, part));
  const __m512i bits = _mm512_mulhrs_epi16(mantissa, _mm512_set1_epi16(2048)), least = _mm512_set1_epi16(14784);
  return kHides ? _mm512_maskz_add_epi16(is_seen, bits, least) : _mm512_add_epi16(bits, least);
}

// A row of logits, or of products of codes and what these are multiplied with.
struct LogitRow {
  const float *at, *key_scales;

  // Weights of 32. Rows of products have none that is hidden: what is nothing beside the top may stay at 2^-27 of it.
  HEADRACE_INLINE __m512i weigh_at(int64_t j, __m512 scale, __m512 shift) const {
    return key_scales ? weigh<false>(load(j), load(j + 16), scale, shift) : weigh<true>(load(j), load(j + 16), scale, shift);
  }

  HEADRACE_INLINE __m512 load(int64_t j) const {
    return key_scales ? _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(at + j)), _mm512_load_ps(key_scales + j)) : _mm512_load_ps(at + j);
  }
};

// Weights of 64 logits from the j-th, and the sums of each lane.
HEADRACE_INLINE __m512 weigh_half(const LogitRow& row, int64_t j, bf16* weights, __m512 scale, __m512 shift) {
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  const __m512i low = row.weigh_at(j, scale, shift), high = row.weigh_at(j + 32, scale, shift);
  _mm512_store_si512(weights, low);
  _mm512_store_si512(weights + 32 * kAmxRows, high);
  return _mm512_dpbf16_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)low, one), (__m512bh)high, one);
}

// Weights of one row of n logits, a multiple of 32; the sums of each lane, as rounded: they must add up to 1.
HEADRACE_INLINE __m512 weigh_row(const LogitRow& row, bf16* weights, int64_t n, __m512 scale, __m512 shift) {
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 even = _mm512_setzero_ps(), odd = even;
  const auto weigh_at = [&](int64_t j, __m512& sum) __attribute__((always_inline)) {
    const __m512i weight = row.weigh_at(j, scale, shift);
    _mm512_store_si512(weights + j * kAmxRows, weight);
    sum = _mm512_dpbf16_ps(sum, (__m512bh)weight, one);
  };
  if (n == kAmxStep) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kAmxStep; j += 64) weigh_at(j, even), weigh_at(j + 32, odd);
  } else {
    for (int64_t j = 0; j < n; j += 32) weigh_at(j, even);
  }
  return _mm512_add_ps(even, odd);
}

// The softmax of a unit, a piece at a time: `pace` rows go with each step of four products.
struct Softening {
  const float *logits, *shift;
  bf16* weights;
  float* added;
  __m512 scale;
  int64_t n, pace;
  const float *key_scales, *query_scales;  // null: logits are logits
  int64_t row = 0, rows = 0;
  __m512 most = _mm512_setzero_ps(), first = most;

  // After the i-th product of a step.
  template <int i>
  HEADRACE_INLINE void advance() {
    if (pace == 2) return advance_half<i % 2>();
    if constexpr (i % 2 == 1)
      if (pace == 1) return advance_half<i / 2>();
    if constexpr (i == 3)
      if (pace > 2) finish(pace);
  }
  // The next rows, at most `count`; no row is half done.
  HEADRACE_INLINE void finish(int64_t count) {
    for (const int64_t last = row + count < rows ? row + count : rows; row < last; ++row) {
      const __m512 sum = weigh_row({logits + row * kAmxStep, key_scales}, weights + row * 32, n, scale_of_row(), _mm512_set1_ps(shift[row]));
      _mm512_store_ps(added + row * 16, sum);
      most = _mm512_max_ps(most, sum);
    }
  }

  HEADRACE_INLINE __m512 scale_of_row() const { return key_scales ? _mm512_mul_ps(scale, _mm512_set1_ps(query_scales[row])) : scale; }

 private:
  template <int kHalf>
  HEADRACE_INLINE void advance_half() {
    if (row >= rows) return;
    if (n != kAmxStep) {
      if constexpr (kHalf == 1) finish(1);
      return;
    }
    const __m512 half = weigh_half({logits + row * kAmxStep, key_scales}, kHalf * 64, weights + row * 32 + kHalf * 64 * kAmxRows, scale_of_row(), _mm512_set1_ps(shift[row]));
    if constexpr (kHalf == 0) {
      first = half;
    } else {
      const __m512 sum = _mm512_add_ps(first, half);
      _mm512_store_ps(added + row++ * 16, sum);
      most = _mm512_max_ps(most, sum);
    }
  }
};

#define HEADRACE_PRODUCT(c, a, b)                   \
  do {                                              \
    if constexpr (kIsBytes) _tile_dpbssd(c, a, b);  \
    else _tile_dpbf16ps(c, a, b);                   \
  } while (false)

// Two by two tiles: c (16 rows, then 16 more, `c_row` floats apart) + a b. Tiles of a and b: of the second 16 rows or columns
// `a_next` and `b_next` values further, of the next 32 inputs `a_step` and `b_step`. b passes the first-level cache by, which
// holds what the softmax beside works on. Without `kIsTall` there are no second 16 rows.
template <bool kAccumulates, bool kIsTall, bool kIsBytes = false>
HEADRACE_INLINE void multiply_tiles(const bf16* a, int64_t a_row, int64_t a_next, int64_t a_step, const bf16* b, int64_t b_next, int64_t b_step, float* c, int64_t c_row,
                                    int64_t lots, Softening& softening) {
  const int64_t a_bytes = a_row * 2, c_bytes = c_row * 4;
  if (kAccumulates) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
    if constexpr (kIsTall) {
      _tile_loadd(2, c + 16 * c_row, c_bytes);
      _tile_loadd(3, c + 16 * c_row + 16, c_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kIsTall) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  if constexpr (kIsTall) {
    const auto load = [&]<int o>(int64_t i) __attribute__((always_inline)) {
      if constexpr (o == 0) _tile_stream_loadd(7, b + b_next + i * b_step, 64);
      if constexpr (o == 1) _tile_loadd(5, a + a_next + i * a_step, a_bytes);
      if constexpr (o == 2) _tile_stream_loadd(6, b + i * b_step, 64);
      if constexpr (o == 3) _tile_loadd(4, a + i * a_step, a_bytes);
    };
    const auto between = [&]<int i>() __attribute__((always_inline)) { softening.advance<i>(); };
    if constexpr (kIsBytes) weave(lots, HEADRACE_WOVEN_PRODUCTS(_tile_dpbssd), load, between);
    else weave(lots, HEADRACE_WOVEN_PRODUCTS(_tile_dpbf16ps), load, between);
  } else {
    for (int64_t i = 0; i < lots; ++i) {
      _tile_loadd(4, a + i * a_step, a_bytes);
      _tile_stream_loadd(6, b + i * b_step, 64);
      _tile_stream_loadd(7, b + b_next + i * b_step, 64);
      HEADRACE_PRODUCT(0, 4, 6);
      softening.advance<0>(), softening.advance<1>();
      HEADRACE_PRODUCT(1, 4, 7);
      softening.advance<2>(), softening.advance<3>();
    }
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  if constexpr (kIsTall) {
    _tile_stored(2, c + 16 * c_row, c_bytes);
    _tile_stored(3, c + 16 * c_row + 16, c_bytes);
  }
}

// Logits where all of 32 queries fits half of the tiles, and stays there: half the loads.
template <bool kIsTall, bool kIsBytes>
HEADRACE_INLINE void multiply_short_logits(const bf16* q, const bf16* keys, float* logits, int64_t n, Softening& softening) {
  _tile_loadd(4, q, 128);
  _tile_loadd(5, q + 32, 128);
  if constexpr (kIsTall) {
    _tile_loadd(6, q + 16 * 64, 128);
    _tile_loadd(7, q + 16 * 64 + 32, 128);
  }
  for (int64_t j = 0; j < n; j += 16, keys += 2 * kTileValues) {
    _tile_stream_loadd(2, keys, 64);
    _tile_stream_loadd(3, keys + kTileValues, 64);
    _tile_zero(0);
    if constexpr (kIsTall) _tile_zero(1);
    HEADRACE_PRODUCT(0, 4, 2);
    softening.advance<0>();
    if constexpr (kIsTall) HEADRACE_PRODUCT(1, 6, 2);
    softening.advance<1>();
    HEADRACE_PRODUCT(0, 5, 3);
    softening.advance<2>();
    if constexpr (kIsTall) HEADRACE_PRODUCT(1, 7, 3);
    softening.advance<3>();
    _tile_stored(0, logits + j, kAmxStep * 4);
    if constexpr (kIsTall) _tile_stored(1, logits + 16 * kAmxStep + j, kAmxStep * 4);
  }
}

// The same where they fit two tiles, for 32 keys at a time: codes of up to 64 dimensions.
template <bool kIsTall>
HEADRACE_INLINE void multiply_shortest_logits(const bf16* q, const bf16* keys, float* logits, int64_t n, Softening& softening) {
  _tile_loadd(4, q, 64);
  if constexpr (kIsTall) _tile_loadd(6, q + 16 * 32, 64);
  for (int64_t j = 0; j < n; j += 32, keys += 2 * kTileValues) {
    _tile_stream_loadd(5, keys, 64);
    _tile_stream_loadd(7, keys + kTileValues, 64);
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kIsTall) {
      _tile_zero(2);
      _tile_zero(3);
    }
    _tile_dpbssd(0, 4, 5);
    softening.advance<0>();
    if constexpr (kIsTall) _tile_dpbssd(2, 6, 5);
    softening.advance<1>();
    _tile_dpbssd(1, 4, 7);
    softening.advance<2>();
    if constexpr (kIsTall) _tile_dpbssd(3, 6, 7);
    softening.advance<3>();
    _tile_stored(0, logits + j, kAmxStep * 4);
    _tile_stored(1, logits + j + 16, kAmxStep * 4);
    if constexpr (kIsTall) {
      _tile_stored(2, logits + 16 * kAmxStep + j, kAmxStep * 4);
      _tile_stored(3, logits + 16 * kAmxStep + j + 16, kAmxStep * 4);
    }
  }
}

template <bool kIsTall, bool kIsBytes>
HEADRACE_INLINE void multiply_logits(const AmxBuffers& t, const Unit& u, float* logits, Softening& softening) {
  const int64_t lots = t.dim / 32;
  if (kIsBytes && lots == 1) return multiply_shortest_logits<kIsTall>(t.q + u.row * t.dim, t.keys + (u.at - u.begin) / 16 * kTileValues, logits, padded(u.n, 32), softening);
  if (lots == 2) return multiply_short_logits<kIsTall, kIsBytes>(t.q + u.row * t.dim, t.keys + (u.at - u.begin) / 16 * lots * kTileValues, logits, padded(u.n, 32), softening);
  for (int64_t j = 0; j < u.n; j += 32) {
    const bf16* keys = t.keys + (u.at - u.begin + j) / 16 * lots * kTileValues;
    multiply_tiles<false, kIsTall, kIsBytes>(t.q + u.row * t.dim, t.dim, 16 * t.dim, 32, keys, lots * kTileValues, kTileValues, logits + j, kAmxStep, lots, softening);
  }
}

template <bool kIsTall>
HEADRACE_INLINE void multiply_values(const AmxBuffers& t, const Unit& u, const bf16* weights, const float* fades, Softening& softening) {
  float* sums = t.sums + u.row * t.width;
  if (u.is_faded) {
    for (int64_t r = 0; r < u.rows; ++r)
      for (int64_t e = 0; e < t.width; e += 16) _mm512_store_ps(sums + r * t.width + e, _mm512_mul_ps(_mm512_load_ps(sums + r * t.width + e), _mm512_set1_ps(fades[r])));
    settle();
  }
  for (int64_t e = 0; e < t.width; e += 32) {
    const bf16* values = t.values + (u.at - u.begin) * t.width + e * 32;
    multiply_tiles<true, kIsTall>(weights, 32, kTileValues, 2 * kTileValues, values, kTileValues, 32 * t.width, sums + e, t.width, (u.n + 31) / 32, softening);
  }
}

constexpr float kUnseen = -1.0e30f;  // a logit whose weight is 0

HEADRACE_INLINE void hide(float* logits, int64_t from, int64_t to) {
  for (int64_t i = from / 16 * 16; i < to; i += 16)
    _mm512_mask_store_ps(logits + i, first(static_cast<int>(clamp(to - i, 0, 16))) & ~first(static_cast<int>(clamp(from - i, 0, 16))), _mm512_set1_ps(kUnseen));
}

// Raises the top of a row to that of n logits, if they have any.
static void raise_top(const AmxBuffers& t, int64_t row, const float* logits, int64_t n, float factor) {
  __m512 most = _mm512_load_ps(logits);
  for (int64_t i = 16; i < n; i += 16) most = _mm512_max_ps(most, _mm512_load_ps(logits + i));
  const float found = _mm512_reduce_max_ps(most);
  if (!(found > kUnseen)) return;
  const float top = ceilf(found * factor);  // whole, so that `shift` is exact
  if (top > t.top[row]) t.top[row] = top, t.shift[row] = kFixedTop - top * kFixedOne;
}

HEADRACE_INLINE bool has_tops(const AmxBuffers& t, const Unit& u) {
  const __m512 least = _mm512_min_ps(_mm512_load_ps(t.top + u.row), _mm512_load_ps(t.top + u.row + u.rows - 16));
  return _mm512_cmp_ps_mask(least, _mm512_set1_ps(kMasked), _CMP_LE_OQ) == 0;
}

// Of a row of products of codes, what these stand for.
static void scale_row(const AmxBuffers& t, const Unit& u, int64_t r, float* row, int64_t n) {
  const LogitRow products{row, t.key_scales + u.at - u.begin};
  const __m512 scale = _mm512_set1_ps(t.query_scales[u.row + r]);
  for (int64_t i = 0; i < n; i += 16) _mm512_store_ps(row + i, _mm512_mul_ps(products.load(i), scale));
}

// What is done to the logits of a unit before their softmax.
static void prepare_rows(const AmxBuffers& t, const Attention& a, const Tile& tile, const Span& span, Unit& u, float* logits, float factor) {
  const int64_t padded_n = padded(u.n, 32);
  u.is_whole = t.has_codes && u.is_plain && has_tops(t, u);
  for (int64_t r = 0; r < u.rows && t.has_codes && !u.is_whole; ++r) scale_row(t, u, r, logits + r * kAmxStep, padded_n);
  for (int64_t r = 0; r < u.rows && !u.is_plain; ++r) {
    if (a.softcap > 0.0f) {
      float* row = logits + r * kAmxStep;
      for (int64_t i = 0; i < padded_n; i += kLanes) store(row + i, Vec(a.softcap) * tanh(load(row + i) * Vec(product_scale(a))));
    }
    const int64_t position = span.position(u.row + r < tile.num_rows ? u.row + r : tile.num_rows - 1), end = clamp(position + 1 - u.at, 0, u.n);
    if (a.window > 0) hide(logits + r * kAmxStep, 0, clamp(position - a.window + 1 - u.at, 0, end));
    hide(logits + r * kAmxStep, end, padded_n);
  }
  if (has_tops(t, u)) return;
  for (int64_t r = 0; r < u.rows; ++r)
    if (t.top[u.row + r] == kMasked) raise_top(t, u.row + r, logits + r * kAmxStep, padded_n, factor);
}

// After the softmax of a unit: its sums join the rest. Rows that rose too far above their top are done again.
static void add_rows(const AmxBuffers& t, Unit& u, const Softening& done, float* logits, float* fades, float factor) {
  const __m512 most = _mm512_set1_ps(kMostAdded);
  u.is_faded = _mm512_cmp_ps_mask(done.most, most, _CMP_NLT_UQ) != 0;
  for (int64_t r = 0; r < u.rows; ++r) {
    float* total = t.total + (u.row + r) * 16;
    __m512 added = _mm512_load_ps(t.added + r * 16), before = _mm512_load_ps(total);
    if (u.is_faded) {
      fades[r] = 1.0f;
      if (_mm512_cmp_ps_mask(added, most, _CMP_NLT_UQ)) {
        const float old = t.top[u.row + r];
        if (u.is_whole) scale_row(t, u, r, logits + r * kAmxStep, done.n);
        raise_top(t, u.row + r, logits + r * kAmxStep, done.n, factor);
        fades[r] = exp2f(old - t.top[u.row + r]);
        added = weigh_row({logits + r * kAmxStep, nullptr}, done.weights + r * 32, done.n, done.scale, _mm512_set1_ps(t.shift[u.row + r]));
        before = _mm512_mul_ps(before, _mm512_set1_ps(fades[r]));
      }
    }
    _mm512_store_ps(total, _mm512_add_ps(before, added));
  }
}

// The units of a packed block of keys, one after the other.
class Units {
 public:
  Units(const Attention& a, const Tile& tile, const Span& span, int64_t begin, int64_t end) : a_(a), tile_(tile), span_(span), begin_(begin), end_(end), at_(begin) {}

  bool take(Unit& u) {
    for (; row_ < tile_.num_rows; row_ += kAmxRows, at_ = begin_) {
      const int64_t last = row_ + kAmxRows < tile_.num_rows ? row_ + kAmxRows - 1 : tile_.num_rows - 1;
      const int64_t seen = span_.position(last) + 1 < end_ ? span_.position(last) + 1 : end_, low = span_.position(row_) - a_.window + 1;
      while (a_.window > 0 && at_ + kAmxStep <= low) at_ += kAmxStep;
      if (at_ >= seen) continue;
      u = {row_, tile_.num_rows - row_ > 16 ? kAmxRows : 16, begin_, at_, seen - at_ < kAmxStep ? seen - at_ : kAmxStep};
      u.is_plain = u.n == kAmxStep && a_.softcap == 0.0f && at_ + kAmxStep <= span_.position(row_) + 1 && (a_.window == 0 || at_ > span_.position(last) - a_.window);
      at_ += kAmxStep;
      return true;
    }
    return false;
  }

 private:
  const Attention& a_;
  const Tile& tile_;
  const Span& span_;
  int64_t begin_, end_, at_, row_ = 0;
};

// All units of a packed block. Turn by turn: logits of unit i + 1 and weighted values of unit i - 1, and softmax of unit i.
template <bool kIsBytes>
static void pass_units(const AmxBuffers& t, const Attention& a, const Tile& tile, const Span& span, Units units, float factor) {
  Unit before, now, next;
  const int64_t lots = kAmxStep / 32 * (t.dim / 32 + t.width / 32), pace = (kAmxRows + lots - 1) / lots;
  bool has_before = false, has_now = units.take(now);
  Softening softening{};
  if (has_now) multiply_logits<true, kIsBytes>(t, now, t.logits[0], softening);
  settle();
  for (int64_t turn = 0; has_now || has_before; ++turn) {
    const int64_t here = turn % 2, other = 1 - here;
    const bool has_next = has_now && units.take(next);
    softening = {t.logits[here], t.shift + now.row, t.weights[here], t.added, _mm512_set1_ps(factor * kFixedOne), padded(now.n, 32), pace, nullptr, nullptr};
    if (has_now) {
      prepare_rows(t, a, tile, span, now, t.logits[here], factor);
      if (now.is_whole) softening.key_scales = t.key_scales + now.at - now.begin, softening.query_scales = t.query_scales + now.row;
      softening.rows = now.rows;
    }
    if (has_next) next.rows > 16 ? multiply_logits<true, kIsBytes>(t, next, t.logits[other], softening) : multiply_logits<false, kIsBytes>(t, next, t.logits[other], softening);
    if (has_before)
      before.rows > 16 ? multiply_values<true>(t, before, t.weights[other], t.fades[other], softening)
                       : multiply_values<false>(t, before, t.weights[other], t.fades[other], softening);
    softening.finish(kAmxRows);
    if (has_now) add_rows(t, now, softening, t.logits[here], t.fades[here], factor);
    settle();
    before = now, has_before = has_now;
    now = next, has_now = has_next;
  }
}

static void tile_by_amx(const Attention& a, const Tile& tile, float* scratch) {
  const AmxBuffers t(a, tile.num_rows, scratch);
  const Span span(a, tile);
  constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
  const float factor = a.softcap > 0.0f ? kLog2e : product_scale(a) * kLog2e;
  memset(t.q, 0, t.rows * t.dim * sizeof(bf16));
  memset(t.sums, 0, t.rows * t.width * sizeof(float));
  memset(t.total, 0, t.rows * 16 * sizeof(float));
  for (int64_t r = 0; r < t.rows; ++r) t.top[r] = kMasked, t.shift[r] = kFixedTop;
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    if (!t.has_codes) memcpy(t.q + r * t.dim, query_row(a, tile, r), a.head_dim * sizeof(bf16));
    else widen_values(a.q_type, query_row(a, tile, r), t.logits[0], a.head_dim), t.query_scales[r] = encode(t.logits[0], a.head_dim, reinterpret_cast<int8_t*>(t.q + r * t.dim));
  }
  for (int64_t r = tile.num_rows; r < t.rows && t.has_codes; ++r) t.query_scales[r] = 0.0f;
  _tile_loadconfig(&kTileConfig);
  const LotRoom room(a, scratch + AmxBuffers::floats(a, tile.num_rows));
  for (int64_t at = t.has_codes ? span.low / kMostLot * kMostLot : span.low; at < span.end; at += t.keys_of_block) {
    const int64_t n = span.end - at < t.keys_of_block ? span.end - at : t.keys_of_block;
    t.has_codes ? pack_codes(t, a, tile, span.low, at, n, room) : pack_block(t, a, tile, at, n);
    settle();
    const Units units(a, tile, span, at, at + n);
    t.has_codes ? pass_units<true>(t, a, tile, span, units, factor) : pass_units<false>(t, a, tile, span, units, factor);
  }
  _tile_release();
  for (int64_t r = 0; r < tile.num_rows; ++r)
    write_row(a, tile, r, t.sums + r * t.width, t.top[r] * kLn2, _mm512_reduce_add_ps(_mm512_load_ps(t.total + r * 16)));
}

}  // namespace headrace::HEADRACE_ISA
