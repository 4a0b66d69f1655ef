// compiled with: rows.cpp
#include "rope.h"

#include "codes.h"

namespace headrace::HEADRACE_ISA {

static void norm_head(float* head, const void* weight, const RopeRows& a) {
  Vec squares(0.0f);
  over_lanes(a.head_dim, [&](int64_t i, auto part) {
    const Vec value = part.load(head + i);
    squares = fma(value, value, squares);
  });
  alignas(64) float factors[kMostHeadDim + kLanes];
  widen_values(a.norm_type, weight, factors, a.head_dim);
  const Vec scale(1.0f / sqrtf(sum(squares) / static_cast<float>(a.head_dim) + a.norm_eps)), offset(a.norm_offset);
  over_lanes(a.head_dim, [&](int64_t i, auto part) {
    part.store(head + i, part.load(head + i) * scale * (part.load(factors + i) + offset));
  });
}

// Su et al., arXiv:2104.09864.
static void rotate_head(float* head, const float* cos_sin, const RopeRows& a) {
  const int64_t half = a.rotary_dim / 2;
  const float *cos = cos_sin, *sin = cos_sin + half;
  if (a.interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float first = head[2 * i], second = head[2 * i + 1];
      head[2 * i] = first * cos[i] - second * sin[i];
      head[2 * i + 1] = second * cos[i] + first * sin[i];
    }
    return;
  }
  over_lanes(half, [&](int64_t i, auto part) {
    const Vec first = part.load(head + i), second = part.load(head + half + i), c = part.load(cos + i),
              s = part.load(sin + i);
    part.store(head + i, first * c - second * s);
    part.store(head + half + i, second * c + first * s);
  });
}

// One kv head of a row, in floats with room for whole vectors, to its place in pages of codes.
static void write_codes(const RopeRows& a, int64_t row, int64_t kv_head, bool is_value, const float* head) {
  alignas(64) int8_t codes[kMostHeadDim + kLanes];
  const CodeOrder order(a.page_size);
  const int64_t page = a.slots[row] / a.page_size, place = a.slots[row] % a.page_size, dim = a.head_dim,
                token = place % order.lot;
  const int64_t lot = (page * a.page_size + place - token) * a.num_kv_heads * dim + kv_head * order.lot * dim;
  a.scales[((2 * page + is_value) * a.num_kv_heads + kv_head) * a.page_size + place] = encode(head, dim, codes);
  if (is_value) place_value(codes, dim, order, token, static_cast<int8_t*>(a.v_pages) + lot);
  else place_key(codes, dim, order.lot, token, static_cast<int8_t*>(a.k_pages) + lot);
}

static void rope_write(const RopeRows& a, int64_t begin, int64_t end) {
  alignas(64) float head[kMostHeadDim + kLanes];
  const int64_t size = size_of(a.type), page_size = size_of(a.page_type), dim = a.head_dim;
  for (int64_t row = begin; row < end; ++row) {
    const char* in = static_cast<const char*>(a.qkv) + row * a.qkv_stride * size;
    char* q = static_cast<char*>(a.q) + row * a.num_heads * dim * size;
    const int64_t place = a.slots[row] * a.num_kv_heads * dim * page_size;
    const float* cos_sin = a.cos_sin ? a.cos_sin + a.positions[row] * a.rotary_dim : nullptr;
    for (int64_t h = 0; h < a.num_heads + a.num_kv_heads; ++h, in += dim * size) {
      const bool is_query = h < a.num_heads;
      widen_values(a.type, in, head, dim);
      if (a.q_norm) norm_head(head, is_query ? a.q_norm : a.k_norm, a);
      if (cos_sin) rotate_head(head, cos_sin, a);
      if (is_query) {
        narrow_values(a.type, head, q + h * dim * size, dim);
      } else {
        if (a.page_type != a.type) {  // rounded as the queries are, then to the pages' type
          alignas(64) char rounded[kMostHeadDim * 4];
          narrow_values(a.type, head, rounded, dim);
          widen_values(a.type, rounded, head, dim);
        }
        if (a.page_type == kCodes) write_codes(a, row, h - a.num_heads, false, head);
        else
          narrow_values(a.page_type, head, static_cast<char*>(a.k_pages) + place + (h - a.num_heads) * dim * page_size,
                        dim);
      }
    }
    char* v_place = static_cast<char*>(a.v_pages) + place;
    if (a.page_type == a.type) {
      memcpy(v_place, in, a.num_kv_heads * dim * size);
      continue;
    }
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      widen_values(a.type, in + h * dim * size, head, dim);
      if (a.page_type == kCodes) write_codes(a, row, h, true, head);
      else narrow_values(a.page_type, head, v_place + h * dim * page_size, dim);
    }
  }
}

extern const RopeKernels rope_kernels;
const RopeKernels rope_kernels = {rope_write};

}  // namespace headrace::HEADRACE_ISA
