// rope_write: see kernels/rope_write for what it computes.
#pragma once

#include "operators.h"
#include "rope.h"

namespace headrace {

inline void check_pages(const Tensor& pages, int64_t num_kv_heads, int64_t dim) {
  STD_TORCH_CHECK(pages.dim() == 4 && pages.is_contiguous() && pages.size(2) == num_kv_heads && pages.size(3) == dim,
                  "pages must be [P, page, K, E], contiguous");
}

inline Tensor rope_write(Tensor qkv, Tensor positions, std::optional<Tensor> cos_sin, Tensor slots, Tensor k_pages,
                         Tensor v_pages, std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, int64_t num_heads,
                         int64_t num_kv_heads, int64_t head_dim, int64_t rotary_dim, bool interleaved, double norm_eps,
                         double norm_offset, std::optional<Tensor> scales) {
  const int64_t rows = qkv.size(0), width = (num_heads + 2 * num_kv_heads) * head_dim;
  check_rows_are_dense(qkv);
  STD_TORCH_CHECK(qkv.size(1) == width && head_dim <= kMostHeadDim && rotary_dim <= head_dim,
                  "qkv must be [T, (H + 2K) * E], E at most 1024");
  check_pages(k_pages, num_kv_heads, head_dim);
  check_pages(v_pages, num_kv_heads, head_dim);
  STD_TORCH_CHECK(positions.numel() == rows && slots.numel() == rows && positions.is_contiguous() &&
                      slots.is_contiguous() && positions.scalar_type() == ScalarType::Long &&
                      slots.scalar_type() == ScalarType::Long,
                  "positions and slots must be int64, one a row");
  STD_TORCH_CHECK(!cos_sin || (cos_sin->scalar_type() == ScalarType::Float && cos_sin->is_contiguous() &&
                               cos_sin->size(1) == rotary_dim),
                  "cos_sin must be float32 [L, rotary_dim]");
  const int type = float_type(qkv), pages = page_type(k_pages), norm_type = q_norm ? float_type(*q_norm) : type;
  STD_TORCH_CHECK(pages == page_type(v_pages), "keys and values must be of one type");
  check_scales(k_pages, scales);
  STD_TORCH_CHECK(!q_norm == !k_norm && (!k_norm || norm_type == float_type(*k_norm)),
                  "both norms or none, of one type");
  Tensor q = empty({rows, num_heads, head_dim}, qkv);
  const RopeRows a{pointer(qkv), qkv.stride(0), type, pointer<int64_t>(positions), pointer<float>(cos_sin),
                   pointer<int64_t>(slots), writable(k_pages), writable(v_pages), pages, writable(q), pointer(q_norm),
                   pointer(k_norm), norm_type, num_heads, num_kv_heads, head_dim, rotary_dim, interleaved,
                   static_cast<float>(norm_eps), static_cast<float>(norm_offset),
                   scales ? writable<float>(*scales) : nullptr, k_pages.size(1)};
  const auto kernel = best_rope_kernels().rope_write;
  over_rows(rows, width, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  return q;
}

inline void define_rope(Library& m) {
  m.def(
      "rope_write(Tensor qkv, Tensor positions, Tensor? cos_sin, Tensor slots, Tensor(a!) k_pages, Tensor(b!) v_pages, "
      "Tensor? q_norm, Tensor? k_norm, "
      "int num_heads, int num_kv_heads, int head_dim, int rotary_dim, bool interleaved, float norm_eps, float "
      "norm_offset, Tensor(c!)? scales=None) -> Tensor");
}

inline void implement_rope(Library& m) { m.impl("rope_write", TORCH_BOX(&rope_write)); }

}  // namespace headrace
