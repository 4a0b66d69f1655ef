// Paged causal attention: arguments of the kernels of all instruction sets. H heads, K kv heads, G = H / K, E head dim
// of queries and keys, V of values. Softmax in float32 with a running maximum (Milakov & Gimelshein, arXiv:1805.02867;
// Dao, arXiv:2307.08691); decode split over keys as in Flash-Decoding.
#pragma once

#include "types.h"

namespace headrace {

// Strides count values. Row (page, place, head) of keys or values starts at page * page + place * token + head * head.
struct PageStrides {
  int64_t page, token, head;
};

// Strides of the scales of int8 pages: page to page, keys to values. A head's tokens are contiguous.
struct ScaleStrides {
  int64_t page, values;
};

// Partial results of rows (online softmax): maximum logit, sum of e^(logit - maximum), and sum of values so weighted.
struct Partial {
  float *top = nullptr, *total = nullptr, *sums = nullptr;  // [M], [M], [M, padded V]
};

struct Attention {
  const void* q;  // [T, H, E]: tokens q_stride apart, heads E apart
  int64_t q_stride;
  int q_type;
  void* out;  // [T, H, V], contiguous, of q's type
  const void *k, *v;
  int kv_type;
  PageStrides k_strides, v_strides;
  int64_t page_bits;  // a page holds 2^page_bits tokens
  const int32_t* table;
  int64_t table_stride;
  const int32_t *query_start, *kv_lens;
  int64_t num_heads, num_kv_heads, head_dim, value_dim;
  float scale, softcap;
  int64_t window;      // 0: all
  const float* sinks;  // [H], or null
  const float* scales =
      nullptr;  // of kv_type kCodes, whose lots of tokens take the place of tokens in the strides: see codes.h
  ScaleStrides scale_strides = {};
  Partial partial;     // set: tiles write partial results here instead of `out`
  int64_t first_key = 0, last_key = INT64_MAX;  // tiles see keys [first_key, last_key) alone

  int64_t group() const { return num_heads / num_kv_heads; }
};

constexpr int64_t kMostDecodeGroup = 8;  // decodes with more query heads per kv head use tiles
constexpr int64_t kDecodeKeys = 32;      // keys of a block in decode; chunks are whole blocks
constexpr int64_t kMostLanes = 16;

// Dims are padded to whole vectors of any instruction set.
inline int64_t padded(int64_t size, int64_t step = kMostLanes) { return (size + step - 1) / step * step; }

// Keys [first, last) of a request with one query, for the query heads of `num_heads` kv heads from `first_head` on.
struct KeyRange {
  int64_t request, first_head, num_heads, first, last;
};

// Partial results of `num_rows` rows are contiguous: maxima [M], sums of weights [M], sums of values [M, padded V].
inline int64_t partial_size(const Attention& a, int64_t num_rows) {
  return padded(2 * num_rows) + num_rows * padded(a.value_dim);
}
inline Partial partial_at(const Attention& a, float* start, int64_t num_rows, int64_t first = 0) {
  return {start + first, start + num_rows + first, start + padded(2 * num_rows) + first * padded(a.value_dim)};
}

// Row r is of query token `token` + r / per_token, and of its query head `head` + r % per_token.
struct PartialRows {
  int64_t token, head, per_token, count;
};

// Query rows of one request and kv head: row r is query token r / G and head r % G of the group.
struct Tile {
  int64_t request, kv_head, first_row, num_rows;
};

// A row's result has the same bits whether a decode or a tile computes it. It is defined chunk by chunk: chunk i holds
// keys [i, i + 1) * chunk_keys, wherever a request's cached part, a window or a thread's share begins. Each chunk gives
// a partial result of its own, with sums in the same order in decodes and tiles, and `merge` adds these from left to
// right. Keys that a row does not see weigh exactly 0; chunks without any that it sees change nothing.
struct AttentionKernels {
  int64_t (*chunk_keys)(const Attention& a);
  // The partial results of the chunks of a range: merged (step 0), or each by itself, `step` floats apart.
  void (*decode)(const Attention& a, const KeyRange& range, float* partials, int64_t step, float* scratch);
  int64_t (*decode_scratch)(const Attention& a, int64_t num_kv_heads);
  void (*merge)(const Attention& a, int64_t num_rows, const Partial& into, const Partial& from);
  void (*finish)(const Attention& a, const PartialRows& rows, const Partial& partial);  // sinks, division, to `out`
  void (*tile)(const Attention& a, const Tile& tile, float* scratch);
  int64_t (*tile_scratch)(const Attention& a, int64_t num_rows);
  int64_t (*tile_rows)(const Attention& a);  // best rows of a tile when there are many
};

}  // namespace headrace
