// packed_linear, packed_gated and packed_rows: products with packed weights, and their rows; see kernels/packed_linear.
#pragma once

#include <algorithm>
#include <vector>

#include "bind_rows.h"
#include "operators.h"
#include "packed_linear.h"

namespace headrace {

constexpr int64_t kLeastBytes = 96 * 1024;  // of weight per thread, below which waking it does not pay
constexpr int64_t kSharedBytes = 1 << 22;  // of weight, from which threads share the work dynamically
constexpr int64_t kRowBlock = 256;          // rows that share a part of the weight in the L2 cache
constexpr int64_t kGatedBytes = 1 << 19;    // of outputs of both halves per block of a gated product

constexpr int64_t kRowBlockBytes = 5 << 17;  // of rows in tiles (AMX)
constexpr int64_t kGatedPanels = 16;        // of either half, for rows in tiles

// Scratch of the calling thread for prepared rows; grows to the largest step and is kept.
struct PackedScratch {
  std::vector<char> values;
  std::vector<float> scales, sums;

  packed::Rows rows(packed::RowForm form, const packed::Weight& weight, int64_t count) {
    const size_t bytes = packed::row_form_bytes(form, weight, count) + 64;
    if (values.size() < bytes) values.resize(bytes);
    const size_t num_scales = count * (form == packed::RowForm::kInt8Group ? weight.groups() : 1);
    if (scales.size() < num_scales) scales.resize(num_scales), sums.resize(num_scales);
    const auto start = reinterpret_cast<uintptr_t>(values.data());
    return {form, count, reinterpret_cast<void*>((start + 63) / 64 * 64), scales.data(), sums.data()};
  }
};

inline PackedScratch& packed_scratch() {
  static thread_local PackedScratch scratch;
  return scratch;
}

template <class F>
void in_parallel(int64_t count, int64_t grain, const F& f) {
  if (count <= grain) return f(int64_t{0}, count);
  torch::stable::parallel_for(0, count, grain, f);
}

// Activations in the form that the kernels take, in scratch of the calling thread.
inline packed::Rows prepare_rows(const packed::Weight& weight, const packed::Input& input) {
  const PackedKernels& kernels = best_packed_kernels();
  const int64_t count = input.rows;
  packed::Rows rows = packed_scratch().rows(kernels.choose_form(weight, count, input.is_half), weight, count);
  const bool is_ready = rows.form == packed::RowForm::kFloat32 && !input.is_half && input.stride == weight.padded() &&
                        weight.inputs == weight.padded();
  if (is_ready) {
    rows.values = const_cast<void*>(input.data);
  } else {
    const int64_t blocks = (count + 15) / 16;
    in_parallel(blocks, 1 + kLeastBytes / (64 * weight.padded()), [&](int64_t begin, int64_t end) {
      kernels.prepare(weight, input, rows, 16 * begin, 16 * end < count ? 16 * end : count);
    });
  }
  return rows;
}

// On AMX, panels of group formats are expanded to bfloat16 once for all rows of a call.
inline bool is_expanded(const packed::Weight& weight, packed::RowForm form) {
  return form == packed::RowForm::kBfloat16Tile && weight.format >= packed::Format::kInt8Group;
}

// Rows per block: those that share a part of the weight in the L2 cache. Rows in tiles are multiplied faster than
// weights are read, so a block has as many as L2 holds beside the weights. An even number of blocks, so that a thread
// finds the same rows in its cache phase after phase.
inline int64_t block_rows(const packed::Weight& weight, packed::RowForm form, int64_t count) {
  if (!packed::is_tiled(form)) return kRowBlock;
  const int64_t row_bytes = packed::row_form_bytes(form, weight, 16) / 16,
                most = std::clamp(kRowBlockBytes / row_bytes / 32 * 32, kRowBlock, 2 * kRowBlock);
  if (count <= most) return most;
  const int64_t blocks = ((count + most - 1) / most + 1) / 2 * 2;
  return ((count + blocks - 1) / blocks + 31) / 32 * 32;
}

// The product, shared by torch's threads.
inline void multiply_packed(const packed::Weight& weight, const packed::Input& input, const packed::Output& out) {
  const PackedKernels& kernels = best_packed_kernels();
  const int64_t count = input.rows, panels = weight.panels();
  const packed::Rows rows = prepare_rows(weight, input);
  const int64_t panel_bytes = weight.num_words() * packed::kPanel * 4;
  const auto multiply = [&](int64_t begin, int64_t end) {
    kernels.multiply(weight, rows, out, 0, count, 2 * begin, 2 * end < panels ? 2 * end : panels);
  };
  if (count <= kRowBlock && panels * panel_bytes >= kSharedBytes) {
    const int64_t pairs = (panels + 1) / 2, least = kLeastBytes / panel_bytes + 1;
    return run_team(torch::stable::get_num_threads(),
                    [&](Team& team, int64_t member) { team.share_parts(pairs, least, pairs, member, multiply); });
  }
  if (count <= kRowBlock || is_expanded(weight, rows.form)) {
    const int64_t grain = kLeastBytes / (panel_bytes * (1 + count / 16)) / 2 * 2 + 2;
    return in_parallel((panels + 1) / 2, grain / 2, multiply);
  }
  const int64_t height = block_rows(weight, rows.form, count), blocks = (count + height - 1) / height,
                least = (panels + 31) / 32;
  const int64_t chunk = ((panels + least - 1) / least + 1) / 2 * 2, chunks = (panels + chunk - 1) / chunk;
  in_parallel(blocks * chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / chunks * height, panel = i % chunks * chunk;
      kernels.multiply(weight, rows, out, row, std::min(row + height, count), panel, std::min(panel + chunk, panels));
    }
  });
}

// The product fused with the gated activation; the first half of the outputs is the gate. Blocks of some rows by some
// panels of either half are gated while they are in the L2 cache, or in registers for rows in tiles. For many rows.
class GatedProduct {
 public:
  GatedProduct(const packed::Weight& weight, const packed::Rows& rows, const packed::Output& out, int type,
               Activation activation)
      : weight_(weight), rows_(rows), out_(out), type_(type), activation_(activation),
        panels_(weight.outputs / 2 / packed::kPanel),
        height_(is_expanded(weight, rows.form) ? rows.count : block_rows(weight, rows.form, rows.count)) {
    const int64_t column_bytes = height_ * 2 * packed::kPanel * (out.is_half ? 2 : 4),
                  most = packed::is_tiled(rows.form) ? kGatedPanels : kGatedBytes / column_bytes;
    chunk_ = std::min(panels_, most), chunks_ = (panels_ + chunk_ - 1) / chunk_;
  }

  static bool suits(const packed::Weight& weight) { return weight.outputs % (2 * packed::kPanel) == 0; }

  int64_t num_blocks() const { return (rows_.count + height_ - 1) / height_ * chunks_; }

  void run(int64_t i) const {
    const int64_t row = i / chunks_ * height_, last = std::min(row + height_, rows_.count);
    const int64_t panel = i % chunks_ * chunk_, num_panels = std::min(chunk_, panels_ - panel),
                  width = num_panels * packed::kPanel;
    if (packed::is_tiled(rows_.form)) {
      packed::Output to = out_;
      to.gate = activation_ == kSilu ? packed::Gate::kSilu : packed::Gate::kGeluTanh;
      return best_packed_kernels().multiply(weight_, rows_, to, row, last, panel, panel + num_panels);
    }
    const int64_t size = out_.is_half ? 2 : 4, stride = 2 * width + 64 / size;  // rows in different sets of the caches
    static thread_local std::vector<char> room;
    const size_t bytes = (last - row) * stride * size + 64;
    if (room.size() < bytes) room.resize(bytes);
    char* const start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
    for (int64_t part = 0; part < 2; ++part) {
      const int64_t first = part * panels_ + panel;
      packed::Output to{start, stride, out_.is_half, out_.bias, out_.is_bias_half};
      to.data = start + (part * width - row * stride - first * packed::kPanel) *
                            size;  // kernels place outputs by their numbers
      best_packed_kernels().multiply(weight_, rows_, to, row, last, first, first + num_panels);
    }
    char* gated = static_cast<char*>(out_.data) + (row * out_.stride + panel * packed::kPanel) * size;
    best_row_kernels().gate(type_, {start, stride, gated, width, activation_, out_.stride}, 0, last - row);
  }

 private:
  packed::Weight weight_;
  packed::Rows rows_;
  packed::Output out_;
  int type_;
  Activation activation_;
  int64_t panels_, height_, chunk_, chunks_;
};

inline void multiply_gated(const packed::Weight& weight, const packed::Input& input, const packed::Output& out,
                           int type, Activation activation) {
  const GatedProduct product(weight, prepare_rows(weight, input), out, type, activation);
  in_parallel(product.num_blocks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) product.run(i);
  });
}

inline packed::Weight packed_weight(const Tensor& words, const std::optional<Tensor>& scales,
                                    const std::optional<Tensor>& mins, int64_t format, int64_t outputs,
                                    int64_t inputs) {
  packed::Weight weight{static_cast<packed::Format>(format), outputs, inputs, pointer<uint32_t>(words)};
  STD_TORCH_CHECK(words.size(0) == weight.panels() && words.size(1) == weight.num_words() && words.is_contiguous(),
                  "the weight does not fit");
  if (weight.format == packed::Format::kInt8) {
    weight.scales = pointer<float>(*scales);
  } else if (weight.format > packed::Format::kInt8) {
    weight.group_scales = pointer<uint16_t>(*scales), weight.group_mins = pointer<uint16_t>(mins);
  }
  return weight;
}

inline Tensor empty_floats(int64_t rows, int64_t width, bool is_half) {
  int64_t sizes[] = {rows, width}, strides[] = {width, 1};
  AtenTensorHandle handle;
  const int32_t dtype = is_half ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32();
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

inline Tensor packed_linear(Tensor x, Tensor words, std::optional<Tensor> scales, std::optional<Tensor> mins,
                            int64_t format, int64_t outputs, std::optional<Tensor> bias, bool is_out_float) {
  check_rows_are_dense(x);
  const int x_type = float_type(x), out_type = is_out_float ? kFloat32 : x_type;
  STD_TORCH_CHECK(x_type != kFloat16, "packed_linear takes float32 or bfloat16");
  const packed::Weight weight = packed_weight(words, scales, mins, format, outputs, x.size(1));
  const Tensor out = empty_floats(x.size(0), outputs, out_type == kBFloat16);
  if (x.size(0) == 0) return out;
  multiply_packed(
      weight, {pointer(x), x.size(0), x.stride(0), x_type == kBFloat16},
      {writable(out), outputs, out_type == kBFloat16, pointer(bias), bias && float_type(*bias) == kBFloat16});
  return out;
}

inline Tensor packed_gated(Tensor x, Tensor words, std::optional<Tensor> scales, std::optional<Tensor> mins,
                           int64_t format, int64_t outputs, std::optional<Tensor> bias, int64_t activation) {
  check_rows_are_dense(x);
  const int type = float_type(x);
  STD_TORCH_CHECK(type != kFloat16, "packed_gated takes float32 or bfloat16");
  const packed::Weight weight = packed_weight(words, scales, mins, format, outputs, x.size(1));
  STD_TORCH_CHECK(GatedProduct::suits(weight), "each half of the outputs must be whole panels");
  const Tensor out = empty_floats(x.size(0), outputs / 2, type == kBFloat16);
  if (x.size(0) == 0) return out;
  multiply_gated(weight, {pointer(x), x.size(0), x.stride(0), type == kBFloat16},
                 {writable(out), outputs / 2, type == kBFloat16, pointer(bias), bias && float_type(*bias) == kBFloat16},
                 type, static_cast<Activation>(activation));
  return out;
}

inline Tensor packed_rows(Tensor rows, Tensor words, std::optional<Tensor> scales, std::optional<Tensor> mins,
                          int64_t format, int64_t outputs, int64_t inputs, bool is_half) {
  const packed::Weight weight = packed_weight(words, scales, mins, format, outputs, inputs);
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Long && rows.dim() == 1 && rows.is_contiguous(),
                  "rows must be a dense list of int64");
  const int64_t count = rows.size(0), *list = pointer<int64_t>(rows);
  for (int64_t t = 0; t < count; ++t) STD_TORCH_CHECK(list[t] >= 0 && list[t] < outputs, "there is no such row");
  const Tensor out = empty_floats(count, inputs, is_half);
  void* to = writable(out);
  over_rows(count, inputs,
            [&](int64_t begin, int64_t end) { best_packed_gather().gather(weight, list, begin, end, to, is_half); });
  return out;
}

inline void define_packed(Library& m) {
  m.def(
      "packed_linear(Tensor x, Tensor words, Tensor? scales, Tensor? mins, int format, int outputs, Tensor? bias, bool "
      "is_out_float) -> Tensor");
  m.def(
      "packed_gated(Tensor x, Tensor words, Tensor? scales, Tensor? mins, int format, int outputs, Tensor? bias, int "
      "activation) -> Tensor");
  m.def(
      "packed_rows(Tensor rows, Tensor words, Tensor? scales, Tensor? mins, int format, int outputs, int inputs, bool "
      "is_half) -> Tensor");
}

inline void implement_packed(Library& m) {
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("packed_gated", TORCH_BOX(&packed_gated));
  m.impl("packed_rows", TORCH_BOX(&packed_rows));
}

}  // namespace headrace
