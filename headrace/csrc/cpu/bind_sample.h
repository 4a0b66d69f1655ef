// argmax_logits and sample_tokens: see kernels/sample for what they compute.
#pragma once

#include "operators.h"
#include "sample.h"

namespace headrace {

inline void check_logits(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == ScalarType::Float, "logits must be [S, V] float32");
  check_rows_are_dense(logits);
}

template <class T>
T* per_row(const Tensor& x, int64_t rows, ScalarType type) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == rows && x.is_contiguous() && x.scalar_type() == type,
                  "per-row arguments must be [S], contiguous, of their type");
  return writable<T>(x);
}

// Writes raw, values and ids [S], and -inf to the logits of masked tokens.
inline void argmax_logits(Tensor logits, std::optional<Tensor> masks, std::optional<Tensor> mask_of_row, Tensor raw,
                          Tensor values, Tensor ids) {
  check_logits(logits);
  const int64_t num_rows = logits.size(0), vocab = logits.size(1);
  ArgmaxRows a{writable<float>(logits), logits.stride(0), vocab, pointer<int32_t>(masks), nullptr,
               per_row<float>(raw, num_rows, ScalarType::Float), per_row<float>(values, num_rows, ScalarType::Float),
               per_row<int64_t>(ids, num_rows, ScalarType::Long)};
  if (masks) {
    STD_TORCH_CHECK(mask_of_row && masks->dim() == 2 && masks->is_contiguous() &&
                        masks->scalar_type() == ScalarType::Int && masks->size(1) == (vocab + 31) / 32,
                    "masks must be [G, ceil(V / 32)] int32, with mask_of_row [S]");
    a.mask_of_row = per_row<int32_t>(*mask_of_row, num_rows, ScalarType::Int);
    for (int64_t row = 0; row < num_rows; ++row)
      STD_TORCH_CHECK(a.mask_of_row[row] < masks->size(0), "mask_of_row is outside the masks");
  }
  const auto kernel = best_sample_kernels().argmax;
  over_rows(num_rows, vocab, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

inline void sample_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed,
                        Tensor position, Tensor ids) {
  check_logits(logits);
  const int64_t num_rows = logits.size(0), vocab = logits.size(1);
  const auto reals = [&](const Tensor& x) { return per_row<double>(x, num_rows, ScalarType::Double); };
  const auto integers = [&](const Tensor& x) { return per_row<int64_t>(x, num_rows, ScalarType::Long); };
  const SampleRows a{pointer<float>(logits), logits.stride(0), vocab, reals(temperature), reals(top_p), reals(min_p),
                     integers(top_k), integers(seed), integers(position), integers(ids)};
  const auto kernel = best_sample_kernels().sample;
  over_rows(num_rows, 4 * vocab,
            [&](int64_t begin, int64_t end) { kernel(a, begin, end); });  // an exponential per logit
}

inline void define_sample(Library& m) {
  m.def(
      "argmax_logits(Tensor(a!) logits, Tensor? masks, Tensor? mask_of_row, Tensor(b!) raw, Tensor(c!) values, "
      "Tensor(d!) ids) -> ()");
  m.def(
      "sample_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor "
      "position, Tensor(a!) ids) -> ()");
}

inline void implement_sample(Library& m) {
  m.impl("argmax_logits", TORCH_BOX(&argmax_logits));
  m.impl("sample_tokens", TORCH_BOX(&sample_tokens));
}

}  // namespace headrace
