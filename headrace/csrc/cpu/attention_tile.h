// Many query rows of one request and kv head, in float32 by vectors. Rows lie side by side in the lanes, a panel of two
// vectors of them at a time: logits are keys by rows, sums are values by rows, and softmax runs down the lanes. What a
// panel needs beside keys and values stays in the L1 cache.
#pragma once

#include "attention_codes.h"
#include "unroll.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kWide = 2 * kLanes;  // rows of a panel
constexpr int kBlock = kLanes == 16  ? 12
                       : kLanes == 8 ? 6
                                     : 4;  // keys, or dimensions of values, whose sums fill the registers

// c [kCount, W] = a b, W a panel's rows: a [kCount, depth] at any strides, b [depth, W]. With factors [2, W] that is
// added to c instead, each side multiplied with its own.
template <int kCount>
HEADRACE_INLINE void multiply_block(const float* a, int64_t a_row, int64_t a_depth, const float* b, float* c,
                                    int64_t depth, const float* factors) {
  Vec acc[kCount][2];
  for (int r = 0; r < kCount; ++r)
    for (int u = 0; u < 2; ++u) acc[r][u] = Vec(0.0f);
#pragma GCC unroll 2
  for (int64_t d = 0; d < depth; ++d) {
    const Vec first = load(b + d * kWide), second = load(b + d * kWide + kLanes);
    for (int r = 0; r < kCount; ++r) {
      const Vec factor(a[r * a_row + d * a_depth]);
      acc[r][0] = fma(factor, first, acc[r][0]);
      acc[r][1] = fma(factor, second, acc[r][1]);
    }
  }
  for (int u = 0; u < 2 && factors; ++u) {
    const Vec here = load(factors + u * kLanes), there = load(factors + kWide + u * kLanes);
    for (int r = 0; r < kCount; ++r)
      acc[r][u] = Factors::add(load(c + r * kWide + u * kLanes), here, acc[r][u], there);
  }
  for (int r = 0; r < kCount; ++r)
    for (int u = 0; u < 2; ++u) store(c + r * kWide + u * kLanes, acc[r][u]);
}

// `next` advances once for each block.
template <class F>
HEADRACE_INLINE void multiply(const float* a, int64_t a_row, int64_t a_depth, const float* b, float* c, int64_t count,
                              int64_t depth, const float* factors, F& next) {
  int64_t r = 0;
  for (; r + kBlock <= count; r += kBlock) {
    next.advance();
    multiply_block<kBlock>(a + r * a_row, a_row, a_depth, b, c + r * kWide, depth, factors);
  }
  for (; r + 4 <= count; r += 4) multiply_block<4>(a + r * a_row, a_row, a_depth, b, c + r * kWide, depth, factors);
  for (; r < count; ++r) multiply_block<1>(a + r * a_row, a_row, a_depth, b, c + r * kWide, depth, factors);
}

// Layout of a tile's scratch. M rows, padded to whole panels of W; N keys of a chunk.
struct TileBuffers {
  int64_t rows, dim, width;                  // M, E padded, V padded
  float *q, *keys, *values, *logits, *sums;  // [M / W, E, W], [N, E], [N, V], [N, W], [M / W, V, W]
  float *top, *total, *factors;              // [M], [M], [2, W]

  // Rows that share one packing of keys and values: as many as the L2 cache holds.
  static int64_t most_rows(const Attention& a) { return clamp(98304 / (a.head_dim + a.value_dim) / 32 * 32, 96, 768); }
  static int64_t floats(const Attention& a, int64_t num_rows) {
    const int64_t m = padded(num_rows, kWide), e = padded(a.head_dim), v = padded(a.value_dim);
    return (e + v) * (m + kChunkKeys) + kChunkKeys * kWide + 2 * m + 2 * kWide;
  }
  TileBuffers(const Attention& a, int64_t num_rows, float* scratch)
      : rows(padded(num_rows, kWide)), dim(padded(a.head_dim)), width(padded(a.value_dim)) {
    q = scratch, keys = q + dim * rows, values = keys + kChunkKeys * dim, logits = values + kChunkKeys * width;
    sums = logits + kChunkKeys * kWide, top = sums + rows * width, total = top + rows, factors = total + rows;
  }
};

inline const char* query_row(const Attention& a, const Tile& tile, int64_t r) {
  const int64_t group = a.group(), row = tile.first_row + r;
  return static_cast<const char*>(a.q) + ((a.query_start[tile.request] + row / group) * a.q_stride +
                                          (tile.kv_head * group + row % group) * a.head_dim) *
                                             size_of(a.q_type);
}

// Writes row r of the tile: its sum of weighted values over its denominator, or all of these as they are.
inline void write_row(const Attention& a, const Tile& tile, int64_t r, const float* sums, float top, float total) {
  const int64_t group = a.group(), row = tile.first_row + r, head = tile.kv_head * group + row % group;
  if (a.partial.top) {
    a.partial.top[row] = top, a.partial.total[row] = total;
    memcpy(a.partial.sums + row * padded(a.value_dim), sums, padded(a.value_dim) * sizeof(float));
    return;
  }
  if (a.sinks) total += expf(a.sinks[head] - top);
  const int64_t place = ((a.query_start[tile.request] + row / group) * a.num_heads + head) * a.value_dim;
  narrow_values(a.q_type, sums, static_cast<char*>(a.out) + place * size_of(a.q_type), a.value_dim, 1.0f / total);
}

// Positions of the queries of a tile and the keys they see: row r is at `position(r)`.
struct Span {
  int64_t group, first_row, begin;  // begin: the position of the request's first query
  int64_t low, end;                 // keys seen by any row

  Span(const Attention& a, const Tile& tile) : group(a.group()), first_row(tile.first_row) {
    const int64_t query_len = a.query_start[tile.request + 1] - a.query_start[tile.request];
    begin = a.kv_lens[tile.request] - query_len;
    const int64_t first_position = position(0);
    low = a.window > 0 && first_position >= a.window ? first_position - a.window + 1 : 0;
    end = position(tile.num_rows - 1) + 1;
    if (low < a.first_key) low = a.first_key;
    if (end > a.last_key) end = a.last_key;
  }
  int64_t position(int64_t r) const { return begin + (first_row + r) / group; }
  // The first row at this position or later.
  int64_t row_at(int64_t position) const { return (position - begin) * group - first_row; }
};

// Softmax over keys [low, n) of a chunk for the rows of a panel: logits [n, W] become weights. Masked ones fill what is
// left of whole vectors of keys: as in decodes, whose lanes are keys, each lane has a sum of its own.
template <bool kHasMasked>
static void soften_columns(float* logits, int64_t low, int64_t n, float* tops, float* totals, float* factors) {
  for (int64_t m = 0; m < kWide; m += kLanes) {
    Vec top(kMasked), added[kLanes];
    for (int64_t j = low; j < n; ++j) top = maximum(load(logits + j * kWide + m), top);
    HEADRACE_EACH(i, kLanes) added[i] = Vec(0.0f);
    for (int64_t j = low / kLanes * kLanes; j < n; j += kLanes)
      HEADRACE_EACH(i, kLanes) {
        float* const at = logits + (j + i) * kWide + m;
        const Vec weight = weigh<kHasMasked>(load(at), top);
        store(at, weight);
        added[i] = added[i] + weight;
      }
#pragma GCC unroll 4
    for (int step = kLanes / 2; step > 0; step /= 2)  // in the order of sum()
      HEADRACE_EACH(i, step) added[i] = added[i] + added[i + step];
    const Factors f(load(tops + m), top);
    store(factors + m, f.here);
    store(factors + kWide + m, f.there);
    store(tops + m, f.top);
    store(totals + m, f.add(load(totals + m), f.here, added[0], f.there));
  }
}

// Masks keys [at + low, at + n) for the rows from m on, and those around them up to whole vectors of keys.
static void mask(const Attention& a, float* logits, const Span& span, int64_t m, int64_t at, int64_t low, int64_t n) {
  for (int64_t j = low / kLanes * kLanes; j < padded(n, kLanes); ++j) {
    float* row = logits + j * kWide;
    const int64_t first = j < low || j >= n ? kWide : clamp(span.row_at(at + j) - m, 0, kWide);
    for (int64_t r = 0; r < first; ++r) row[r] = kMasked;
    if (a.window > 0)
      for (int64_t r = clamp(span.row_at(at + j + a.window) - m, 0, kWide); r < kWide; ++r) row[r] = kMasked;
  }
}

// Prefetches keys and values of a block, a row at a time between products: processors drop most of a burst.
struct NextRows {
  const Attention& a;
  const int32_t* table;
  int64_t kv_head, at, end, slots;  // positions; how often it advances before they are needed
  int64_t count = end - at, credit = 0;

  HEADRACE_INLINE void advance() {
    for (credit += count; credit >= slots && at < end; credit -= slots, ++at) fetch_rows(a, table, at, 1, end, kv_head);
  }
};

// Keys [at + low, at + n) of the chunk at `at` times the rows of the panel that begins with row m.
static void run_panel(const Attention& a, const TileBuffers& t, const Span& span, int64_t m, int64_t at, int64_t low,
                      int64_t n, NextRows& next) {
  float* const logits = t.logits + low * kWide;
  multiply(t.keys + low * t.dim, t.dim, 1, t.q + m * t.dim, logits, n - low, a.head_dim, nullptr, next);
  if (a.softcap > 0.0f) cap_logits(logits, (n - low) * kWide, a.softcap);
  const bool is_plain = at + n - 1 <= span.position(m) && a.window == 0 && low % kLanes == 0 && n % kLanes == 0;
  if (!is_plain) mask(a, t.logits, span, m, at, low, n);
  (is_plain ? soften_columns<false> : soften_columns<true>)(t.logits, low, n, t.top + m, t.total + m, t.factors);
  multiply(t.values + low * t.width, 1, t.width, logits, t.sums + m * t.width, a.value_dim, n - low, t.factors, next);
}

static void tile_of_floats(const Attention& a, const Tile& tile, float* scratch) {
  const TileBuffers t(a, tile.num_rows, scratch);
  const Span span(a, tile);
  memset(t.q, 0, t.dim * t.rows * sizeof(float));
  memset(t.sums, 0, t.rows * t.width * sizeof(float));
  for (int64_t r = 0; r < t.rows; ++r) t.top[r] = kMasked, t.total[r] = 0.0f;
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    widen_values(a.q_type, query_row(a, tile, r), t.keys, a.head_dim, product_scale(a));
    float* column = t.q + r / kWide * kWide * t.dim + r % kWide;
    for (int64_t e = 0; e < a.head_dim; ++e) column[e * kWide] = t.keys[e];
  }
  const int32_t* table = a.table + tile.request * a.table_stride;
  for (int64_t at = span.low / kChunkKeys * kChunkKeys; at < span.end; at += kChunkKeys) {
    const int64_t low = span.low > at ? span.low - at : 0, n = span.end - at < kChunkKeys ? span.end - at : kChunkKeys;
    for (int64_t j = low; j < n; ++j) {
      widen_values(a.kv_type, row_at(a.k, a.k_strides, a, table, at + j, tile.kv_head), t.keys + j * t.dim, a.head_dim);
      widen_values(a.kv_type, row_at(a.v, a.v_strides, a, table, at + j, tile.kv_head), t.values + j * t.width,
                   a.value_dim);
    }
    const int64_t after = at + kChunkKeys, blocks = (n + a.value_dim) / kBlock;
    NextRows next{a, table, tile.kv_head, after, after + kChunkKeys < span.end ? after + kChunkKeys : span.end,
                  t.rows / kWide * blocks};
    for (int64_t m = 0; m < tile.num_rows; m += kWide) {
      const int64_t last = span.position(m + kWide <= tile.num_rows ? m + kWide - 1 : tile.num_rows - 1),
                    seen = last + 1 - at;
      if (a.window > 0 && at + n <= span.position(m) - a.window + 1) continue;
      if (seen > low) run_panel(a, t, span, m, at, low, seen < n ? seen : n, next);
    }
  }
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    const float* column = t.sums + r / kWide * kWide * t.width + r % kWide;
    for (int64_t e = 0; e < t.width; ++e) t.keys[e] = column[e * kWide];
    write_row(a, tile, r, t.keys, t.top[r], t.total[r]);
  }
}

// Of codes, where processors have no products of bytes for tiles: chunk by chunk, query by query, as decodes.
static int64_t tile_scratch_by_decodes(const Attention& a, int64_t num_rows) {
  return padded(CodeQueries::floats(a, num_rows)) + padded(a.head_dim) + floats_of_lots(a) +
         partial_size(a, num_rows) + partial_size(a, kMostDecodeGroup);
}

static void tile_by_decodes(const Attention& a, const Tile& tile, float* scratch) {
  const Span span(a, tile);
  const int64_t rows = tile.num_rows;
  float *const sums = scratch, *const spare = sums + partial_size(a, rows),
               *const room = spare + partial_size(a, kMostDecodeGroup),
               *const lots = room + padded(a.head_dim);
  const CodeQueries queries(a, rows, lots + floats_of_lots(a));
  const Partial all = partial_at(a, sums, rows);
  memset(all.sums, 0, rows * padded(a.value_dim) * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    queries.encode_head(a, r, query_row(a, tile, r), room);
    all.top[r] = kMasked, all.total[r] = 0.0f;
  }
  for (int64_t at = span.low / kChunkKeys * kChunkKeys; at < span.end; at += kChunkKeys)
    for (int64_t r = 0, count; r < rows; r += count) {
      const int64_t position = span.position(r), left = span.row_at(position + 1) - r;
      count = clamp(left, 1, rows - r < kMostDecodeGroup ? rows - r : kMostDecodeGroup);
      KeyRange range{tile.request, tile.kv_head, 1, at > span.low ? at : span.low,
                     at + kChunkKeys < span.end ? at + kChunkKeys : span.end};
      if (a.window > 0 && range.first < position - a.window + 1) range.first = position - a.window + 1;
      if (range.last > position + 1) range.last = position + 1;
      if (range.first >= range.last) continue;
      Attention one = a;  // these rows as a group
      one.num_heads = count, one.num_kv_heads = 1;
      const Partial from = partial_at(a, spare, count);
      decode_codes_of_chunk(one, range, range.last, queries.from(r), from, lots);
      merge(one, count, partial_at(a, sums, rows, r), from);
    }
  for (int64_t r = 0; r < rows; ++r)
    write_row(a, tile, r, all.sums + r * padded(a.value_dim), all.top[r], all.total[r]);
}

}  // namespace headrace::HEADRACE_ISA
