// What the bind_*.h files share: checks and accessors for tensors of torch's stable ABI. Included by binding.cpp alone.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "dispatch.h"
#include "team.h"
#include "types.h"

// Torch's own of these two make a third of all code that is compiled: texts where they are checked, and tuples of
// arguments.
#undef STD_TORCH_CHECK
#define STD_TORCH_CHECK(is_right, text) headrace::check(is_right, text)
#undef TORCH_BOX
#define TORCH_BOX(f) headrace::Boxed<(f)>::call

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // torch 2.11 has it by another name
#define STABLE_TORCH_ERROR_CODE_CHECK(call) STD_TORCH_CHECK((call) == AOTI_TORCH_SUCCESS, "torch failed: " #call)
#endif

namespace headrace {

using torch::stable::Tensor;
using Library = torch::stable::detail::StableLibrary;
using torch::headeronly::ScalarType;

[[noreturn]] __attribute__((noinline)) inline void refuse(const char* text) { throw std::runtime_error(text); }

inline void check(bool is_right, const char* text) {
  if (!is_right) [[unlikely]] refuse(text);
}

// An operator as torch calls it: arguments are taken from a stack, where the result is left.
template <auto f>
struct Boxed;
template <class Result, class... Arguments, Result (*f)(Arguments...)>
struct Boxed<f> {
  static void call(StableIValue* stack, uint64_t num_arguments, uint64_t) {
    check(num_arguments == sizeof...(Arguments), "an operator's schema is not that of its function");
    call_with(stack, std::index_sequence_for<Arguments...>{});
  }

 private:
  template <size_t... i>
  static void call_with(StableIValue* stack, std::index_sequence<i...>) {
    using torch::stable::detail::from, torch::stable::detail::to;
    if constexpr (std::is_void_v<Result>) f(to<Arguments>(stack[i])...);
    else stack[0] = from(f(to<Arguments>(stack[i])...));
  }
};

// The number by which kernels know a float type (types.h).
inline int float_type(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Half: return kFloat16;
    default: STD_TORCH_CHECK(false, "takes float32, bfloat16 or float16"); return -1;
  }
}

// The same for pages, which may also hold int8 codes.
inline int page_type(const Tensor& pages) {
  return pages.scalar_type() == ScalarType::Char ? kCodes : float_type(pages);
}

inline void check_scales(const Tensor& pages, const std::optional<Tensor>& scales) {
  const bool has_codes = pages.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(has_codes == scales.has_value(), "pages of int8, and no others, have scales");
  if (!has_codes) return;
  STD_TORCH_CHECK(pages.is_contiguous() && pages.size(3) % 4 == 0,
                  "pages of int8 must be contiguous, head dims multiples of 4");
  STD_TORCH_CHECK(scales->scalar_type() == ScalarType::Float && scales->is_contiguous() && scales->dim() == 4 &&
                      scales->size(0) == pages.size(0) && scales->size(1) == 2 && scales->size(2) == pages.size(2) &&
                      scales->size(3) == pages.size(1),
                  "scales must be float32 [P, 2, K, page]");
}

inline void check_rows_are_dense(const Tensor& x) {
  STD_TORCH_CHECK(x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) == 1, "the last dimension must be contiguous");
}

// A new contiguous tensor of x's type; cheaper than torch::stable::empty, which goes through the dispatcher.
inline Tensor empty(std::initializer_list<int64_t> sizes, const Tensor& like) {
  int64_t strides[8], step = 1;
  for (int i = static_cast<int>(sizes.size()) - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes.begin()[i];
  }
  int32_t dtype;
  aoti_torch_get_dtype(like.get(), &dtype);
  AtenTensorHandle out;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(sizes.size(), sizes.begin(), strides, dtype, aoti_torch_device_type_cpu(), 0, &out));
  return Tensor(out);
}

template <class T = void>
const T* pointer(const Tensor& x) { return static_cast<const T*>(x.const_data_ptr()); }

template <class T = void>
T* writable(const Tensor& x) { return static_cast<T*>(x.mutable_data_ptr()); }

template <class T = void>
const T* pointer(const std::optional<Tensor>& x) { return x ? pointer<T>(*x) : nullptr; }

// Rows [0, rows) over torch's own threads, none with less than some 16K values' work.
template <class F>
void over_rows(int64_t rows, int64_t values_per_row, const F& f) {
  const int64_t grain = values_per_row > 0 ? 1 + (16384 - 1) / values_per_row : rows;
  if (rows <= grain) return f(int64_t{0}, rows);
  torch::stable::parallel_for(0, rows, grain, f);
}

// f(team, member) on a team of at most `size` of torch's threads. OpenMP's parallel region gives each chunk a thread of
// its own, and inside another region, or with one thread, there is one chunk: no member can be missing.
template <class F>
void run_team(int64_t size, const F& f) {
  Team::run(size, [](int64_t count, const auto& member) { torch::stable::parallel_for(0, count, 1, member); }, f);
}

}  // namespace headrace
