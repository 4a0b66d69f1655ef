// Many query rows of one request and kv head, in float32 by vectors: products are made of blocks of some rows by two
// vectors that stay in registers. Logits are kept transposed, keys by query rows, so that softmax runs down the lanes.
#pragma once

#include "attention_rows.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kTileKeys = 96;  // whole blocks of rows whatever the lanes
constexpr int kBlockRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;
constexpr float kMasked = -1.0e38f;  // finite: a row whose first keys are all masked must not become NaN

// c [rows, 2 vectors] = fades * c + a b. Element (r, d) of a is at r * a_row + d * a_depth; fades null: c is not read.
template <int kRows>
HEADRACE_INLINE void multiply_block(const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t b_depth, float* c, int64_t c_row, int64_t depth, const float* fades) {
  Vec acc[kRows][2];
  for (int r = 0; r < kRows; ++r)
    for (int u = 0; u < 2; ++u) acc[r][u] = fades ? load(c + r * c_row + u * kLanes) * Vec(fades[r]) : Vec(0.0f);
  for (int64_t d = 0; d < depth; ++d) {
    const Vec first = load(b + d * b_depth), second = load(b + d * b_depth + kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec factor(a[r * a_row + d * a_depth]);
      acc[r][0] = fma(factor, first, acc[r][0]);
      acc[r][1] = fma(factor, second, acc[r][1]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int u = 0; u < 2; ++u) store(c + r * c_row + u * kLanes, acc[r][u]);
}

// The same for any number of columns in steps of two vectors, and rows in steps of kRows; returns the first row left over.
template <int kRows>
HEADRACE_INLINE int64_t multiply_rows(int64_t r, const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t b_depth, float* c, int64_t c_row, int64_t rows, int64_t columns, int64_t depth, const float* fades) {
  for (; r + kRows <= rows; r += kRows)
    for (int64_t n = 0; n < columns; n += 2 * kLanes)
      multiply_block<kRows>(a + r * a_row, a_row, a_depth, b + n, b_depth, c + r * c_row + n, c_row, depth, fades ? fades + r : nullptr);
  return r;
}

static void multiply(const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t b_depth, float* c, int64_t c_row, int64_t rows, int64_t columns, int64_t depth, const float* fades) {
  int64_t r = multiply_rows<kBlockRows>(0, a, a_row, a_depth, b, b_depth, c, c_row, rows, columns, depth, fades);
  r = multiply_rows<4>(r, a, a_row, a_depth, b, b_depth, c, c_row, rows, columns, depth, fades);
  multiply_rows<1>(r, a, a_row, a_depth, b, b_depth, c, c_row, rows, columns, depth, fades);
}

// Buffers of a tile in its scratch. M rows, padded; N keys of a block.
struct TileBuffers {
  int64_t rows, width;                            // M and V, padded
  float *q, *keys, *values, *logits, *sums;       // [E, M], [N, padded E], [N, V], [N, M], [M, V]
  float *top, *total, *fades;                     // [M] each

  static int64_t floats(const Attention& a, int64_t num_rows) {
    const int64_t m = padded(num_rows, 2 * kLanes), v = padded(a.value_dim, 2 * kMostLanes);
    return padded(a.head_dim) * (m + kTileKeys) + (kTileKeys + m) * v + kTileKeys * m + 3 * m;
  }
  TileBuffers(const Attention& a, int64_t num_rows, float* scratch) : rows(padded(num_rows, 2 * kLanes)), width(padded(a.value_dim, 2 * kMostLanes)) {
    const int64_t dim = padded(a.head_dim);
    q = scratch, keys = q + dim * rows, values = keys + kTileKeys * dim, logits = values + kTileKeys * width;
    sums = logits + kTileKeys * rows, top = sums + rows * width, total = top + rows, fades = total + rows;
  }
};

inline const char* query_row(const Attention& a, const Tile& tile, int64_t r) {
  const int64_t group = a.group(), row = tile.first_row + r;
  return static_cast<const char*>(a.q) +
         ((a.query_start[tile.request] + row / group) * a.q_stride + (tile.kv_head * group + row % group) * a.head_dim) * size_of(a.q_type);
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

// Where the queries of a tile sit and which keys they see: row r is at `position(r)`.
struct Span {
  int64_t group, first_row, begin;  // begin: the position of the request's first query
  int64_t low, end;                 // keys seen by any row

  Span(const Attention& a, const Tile& tile) : group(a.group()), first_row(tile.first_row) {
    const int64_t query_len = a.query_start[tile.request + 1] - a.query_start[tile.request];
    begin = a.kv_lens[tile.request] - query_len;
    const int64_t first_position = position(0);
    low = a.window > 0 && first_position >= a.window ? first_position - a.window + 1 : 0;
    end = position(tile.num_rows - 1) + 1;
  }
  int64_t position(int64_t r) const { return begin + (first_row + r) / group; }
  // The first row at this position or later.
  int64_t row_at(int64_t position) const { return (position - begin) * group - first_row; }
};

HEADRACE_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// One step of the running softmax down the keys: logits [n, M] become weights.
static void soften_columns(const TileBuffers& t, int64_t n) {
  for (int64_t m = 0; m < t.rows; m += kLanes) {
    const Vec old = load(t.top + m);
    Vec top = old, added(0.0f);
    for (int64_t j = 0; j < n; ++j) top = maximum(load(t.logits + j * t.rows + m), top);
    for (int64_t j = 0; j < n; ++j) {
      const Vec weight = exp(load(t.logits + j * t.rows + m) - top);
      store(t.logits + j * t.rows + m, weight);
      added = added + weight;
    }
    const Vec fade = exp(old - top);
    store(t.top + m, top);
    store(t.fades + m, fade);
    store(t.total + m, fma(load(t.total + m), fade, added));
  }
}

static void tile_of_floats(const Attention& a, const Tile& tile, float* scratch) {
  const TileBuffers t(a, tile.num_rows, scratch);
  const Span span(a, tile);
  const int64_t dim = padded(a.head_dim);
  memset(t.q, 0, dim * t.rows * sizeof(float));
  memset(t.sums, 0, t.rows * t.width * sizeof(float));
  for (int64_t r = 0; r < t.rows; ++r) t.top[r] = kMasked, t.total[r] = 0.0f;
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    widen_values(a.q_type, query_row(a, tile, r), t.keys, a.head_dim, product_scale(a));
    for (int64_t e = 0; e < a.head_dim; ++e) t.q[e * t.rows + r] = t.keys[e];
  }
  const int32_t* table = a.table + tile.request * a.table_stride;
  for (int64_t at = span.low; at < span.end; at += kTileKeys) {
    const int64_t n = span.end - at < kTileKeys ? span.end - at : kTileKeys;
    for (int64_t j = 0; j < n; ++j) {
      widen_values(a.kv_type, row_at(a.k, a.k_strides, a, table, at + j, tile.kv_head), t.keys + j * dim, a.head_dim);
      float* value = t.values + j * t.width;
      memset(value + a.value_dim / kLanes * kLanes, 0, (t.width - a.value_dim / kLanes * kLanes) * sizeof(float));
      widen_values(a.kv_type, row_at(a.v, a.v_strides, a, table, at + j, tile.kv_head), value, a.value_dim);
    }
    fetch_rows(a, table, at + kTileKeys, kTileKeys, span.end, tile.kv_head);
    multiply(t.keys, dim, 1, t.q, t.rows, t.logits, t.rows, n, t.rows, a.head_dim, nullptr);
    if (a.softcap > 0.0f) cap_logits(t.logits, n * t.rows, a.softcap);
    for (int64_t j = 0; j < n; ++j) {
      float* row = t.logits + j * t.rows;
      const int64_t first = clamp(span.row_at(at + j), 0, t.rows);
      for (int64_t r = 0; r < first; ++r) row[r] = kMasked;
      if (a.window > 0)
        for (int64_t r = clamp(span.row_at(at + j + a.window), 0, t.rows); r < t.rows; ++r) row[r] = kMasked;
    }
    soften_columns(t, n);
    multiply(t.logits, 1, t.rows, t.values, t.width, t.sums, t.width, tile.num_rows, t.width, n, t.fades);
  }
  for (int64_t r = 0; r < tile.num_rows; ++r) write_row(a, tile, r, t.sums + r * t.width, t.top[r], t.total[r]);
}

}  // namespace headrace::HEADRACE_ISA
