// Rotary embedding of the qkv projection's output, QK norms, and writes of keys and values to their pages.
#pragma once

#include "types.h"

namespace headrace {

constexpr int64_t kMostHeadDim = 1024;

// Strides count values. All rows of pages lie one after the other: slot s is at s * num_kv_heads * head_dim, but those
// of int8 pages (codes.h).
struct RopeRows {
  const void* qkv;
  int64_t qkv_stride;
  int type;
  const int64_t* positions;
  const float* cos_sin;  // [positions, rotary_dim], null: no rotation
  const int64_t* slots;
  void *k_pages, *v_pages;
  int page_type;
  void* q;                        // [rows, num_heads, head_dim], of qkv's type
  const void *q_norm, *k_norm;    // [head_dim] each, or both null
  int norm_type;
  int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
  bool interleaved;
  float norm_eps, norm_offset;
  float* scales = nullptr;  // of page_type kCodes
  int64_t page_size = 0;
};

struct RopeKernels {
  void (*rope_write)(const RopeRows&, int64_t begin, int64_t end);
};

}  // namespace headrace
