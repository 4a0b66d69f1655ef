// paged_attention: see layers/attention/contract.py for what it computes. Here its work is dealt out to torch's
// threads.
#pragma once

#include <algorithm>
#include <atomic>

#include "attention_work.h"

namespace headrace {

// f(i) for each of `count` pieces of work. Threads take the next one from a counter and never wait for one another.
template <class F>
void take_pieces(int64_t count, int64_t threads, const F& f) {
  std::atomic<int64_t> next{0};
  const auto take = [&](int64_t, int64_t) {
    for (int64_t i; (i = next++) < count;) f(i);
  };
  threads = std::min(threads, count);
  if (threads > 1) torch::stable::parallel_for(0, threads, 1, take);
  else take(0, 1);
}

inline void attend(const Attention& a, int64_t num_requests) {
  constexpr int64_t kLeastWork = 1 << 18;  // less is not worth waking a thread for
  int64_t threads = torch::stable::get_num_threads();
  AttentionWork work(a, num_requests, threads);
  if (work.cost() * (a.head_dim + a.value_dim) < kLeastWork) threads = 1;
  take_pieces(work.num_items(), threads, [&](int64_t i) { work.run(a, i); });
  take_pieces(work.num_merges(), threads, [&](int64_t i) { work.merge(a, i); });
}

inline PageStrides strides_of(const Tensor& pages) { return {pages.stride(0), pages.stride(1), pages.stride(2)}; }

inline Tensor paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor query_start, Tensor kv_lens,
                              Tensor page_table, double scale, double softcap, int64_t window,
                              std::optional<Tensor> sinks, std::optional<Tensor> scales) {
  STD_TORCH_CHECK(q.dim() == 3 && q.stride(2) == 1 && (q.size(1) == 1 || q.stride(1) == q.size(2)),
                  "q must be [T, H, E], its heads one after the other");
  STD_TORCH_CHECK(k_pages.dim() == 4 && v_pages.dim() == 4 && k_pages.size(1) == v_pages.size(1) &&
                      k_pages.size(2) == v_pages.size(2) && k_pages.size(3) == q.size(2) && k_pages.stride(3) == 1 &&
                      v_pages.stride(3) == 1,
                  "pages must be [P, page, K, E] and [P, page, K, V]");
  const int64_t page_size = k_pages.size(1), num_kv_heads = k_pages.size(2), num_requests = kv_lens.size(0);
  STD_TORCH_CHECK((page_size & (page_size - 1)) == 0 && q.size(1) % num_kv_heads == 0,
                  "page sizes are powers of two, H a multiple of K");
  for (const Tensor* t : {&query_start, &kv_lens, &page_table})
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Int, "lengths and page tables are int32");
  STD_TORCH_CHECK(query_start.size(0) == num_requests + 1 && page_table.size(0) >= num_requests &&
                      query_start.is_contiguous() && kv_lens.is_contiguous() &&
                      (page_table.size(1) <= 1 || page_table.stride(1) == 1),
                  "one length and row of the page table for each request");
  STD_TORCH_CHECK(
      !sinks || (sinks->scalar_type() == ScalarType::Float && sinks->is_contiguous() && sinks->numel() == q.size(1)),
      "sinks must be float32 [H]");
  const int kv_type = page_type(k_pages);
  STD_TORCH_CHECK(kv_type == page_type(v_pages) && (kv_type != kCodes || v_pages.is_contiguous()),
                  "keys and values must be of one type");
  check_scales(k_pages, scales);
  Tensor out = empty({q.size(0), q.size(1), v_pages.size(3)}, q);
  Attention a{pointer(q),       q.stride(0), float_type(q),       writable(out),      pointer(k_pages),
              pointer(v_pages), kv_type,     strides_of(k_pages), strides_of(v_pages)};
  while (int64_t{1} << a.page_bits < page_size) ++a.page_bits;
  a.table = pointer<int32_t>(page_table), a.table_stride = page_table.stride(0);
  a.query_start = pointer<int32_t>(query_start), a.kv_lens = pointer<int32_t>(kv_lens);
  a.num_heads = q.size(1), a.num_kv_heads = num_kv_heads, a.head_dim = q.size(2), a.value_dim = v_pages.size(3);
  a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap), a.window = window,
  a.sinks = pointer<float>(sinks);
  if (kv_type == kCodes) lay_out_codes(a, page_size, pointer<float>(scales));
  attend(a, num_requests);
  return out;
}

inline void define_attention(Library& m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor query_start, Tensor kv_lens, Tensor "
      "page_table, float scale, float softcap, int window, "
      "Tensor? sinks, Tensor? scales=None) -> Tensor");
}

inline void implement_attention(Library& m) { m.impl("paged_attention", TORCH_BOX(&paged_attention)); }

}  // namespace headrace
