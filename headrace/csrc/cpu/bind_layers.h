// decoder_layers: all layers of a decoder for the tokens of a step, in one call; see kernels/decoder_layers for what it
// computes. The kernels are those of the separate operators; here a team of threads goes through them phase by phase.
// M rows, which are tokens, D model width.
#pragma once

#include <deque>
#include <memory>

#include "attention_work.h"
#include "bind_packed.h"
#include "bind_rope.h"
#include "bind_rows.h"
#include "team.h"

namespace headrace {

namespace layers {

// One row of the table that Python makes, in the order of kernels/decoder_layers/table.py. Addresses are numbers.
struct Product {
  int64_t words, scales, mins, format, outputs, inputs, bias, bias_type;
};
struct Norm {
  int64_t weight, type;  // 0: there is no such norm
};
struct Layer {
  Norm attention_norm, attention_post, mlp_norm, mlp_post;
  Product qkv, output, gate_up, down;
  int64_t cos_sin, rotary_dim, is_interleaved, q_norm, k_norm, head_norm_type;
  int64_t k_pages, v_pages, page_type, page_size, group;
  int64_t num_heads, num_kv_heads, head_dim, window, sinks, activation;
};
constexpr int64_t kFields = sizeof(Layer) / sizeof(int64_t);
struct Reals {
  double eps, offset, scale, softcap;
};
struct Group {  // what a cache group has for this step
  int64_t slots, page_table, table_stride;
};

inline const void* at(int64_t address) { return reinterpret_cast<const void*>(address); }
template <class T>
const T* at(int64_t address) { return reinterpret_cast<const T*>(address); }

inline packed::Weight weight_of(const Product& p) {
  packed::Weight weight{static_cast<packed::Format>(p.format), p.outputs, p.inputs, at<uint32_t>(p.words)};
  if (weight.format == packed::Format::kInt8) weight.scales = at<float>(p.scales);
  else weight.group_scales = at<uint16_t>(p.scales), weight.group_mins = at<uint16_t>(p.mins);
  return weight;
}

// Memory of the calling thread, cut anew for every step.
class Arena {
 public:
  void reserve(size_t bytes) {
    if (size_ < bytes + 64) {
      memory_.reset();
      memory_.reset(new char[size_ = bytes + 64]);
    }
    at_ = memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64);
  }
  char* take(size_t bytes) {
    char* start = at_;
    at_ += rounded(bytes);
    return start;
  }
  static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  std::unique_ptr<char[]> memory_;
  size_t size_ = 0;
  char* at_ = nullptr;
};

struct Inputs {
  int type;
  int64_t rows, width, num_requests;
  const int64_t* positions;
  const int32_t *query_start, *kv_lens;
  const Group* groups;
};

class Step {
 public:
  Step(const Layer* layers, const Reals* reals, int64_t num_layers, const Inputs& in, char* residual, char* branch)
      : layers_(layers), reals_(reals), num_layers_(num_layers), in_(in), size_(in.type == kFloat32 ? 4 : 2), residual_(residual), branch_(branch) {
    int64_t qkv = 0, heads = 0, hidden = 0, bytes = 0, weight_bytes = 0, groups = 1;
    for (int64_t i = 0; i < num_layers; ++i) {
      const Layer& layer = layers[i];
      qkv = std::max(qkv, layer.qkv.outputs), heads = std::max(heads, layer.num_heads * layer.head_dim), hidden = std::max(hidden, layer.gate_up.outputs);
      for (const Product* p : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
        const packed::Weight weight = weight_of(*p);
        groups = std::max(groups, weight.groups());
        bytes = std::max(bytes, packed::row_form_bytes(packed::RowForm::kFloat32, weight, in.rows));
        weight_bytes += weight.panels() * weight.num_words() * packed::kPanel * 4;
      }
    }
    num_members_ = std::clamp<int64_t>(weight_bytes * (1 + in.rows / 16) / (num_layers * kMemberBytes), 1, torch::stable::get_num_threads());
    const auto row_bytes = [&](int64_t values) { return Arena::rounded(in_.rows * values * size_); };
    static thread_local Arena arena;
    arena.reserve(2 * row_bytes(in.width) + row_bytes(qkv) + 2 * row_bytes(heads) + 2 * row_bytes(hidden) + Arena::rounded(bytes) + 2 * Arena::rounded(in.rows * groups * 4));
    normed_ = arena.take(in.rows * in.width * size_), plain_ = arena.take(in.rows * in.width * size_);
    qkv_ = arena.take(in.rows * qkv * size_), q_ = arena.take(in.rows * heads * size_), attended_ = arena.take(in.rows * heads * size_);
    gates_ = arena.take(in.rows * hidden * size_), hidden_ = arena.take(in.rows * hidden * size_);
    values_ = arena.take(bytes);
    scales_ = reinterpret_cast<float*>(arena.take(in.rows * groups * 4)), sums_ = reinterpret_cast<float*>(arena.take(in.rows * groups * 4));
    for (int64_t i = 0; i < num_layers; ++i) plan_attention(layers[i], reals[i]);
  }

  // The residual then holds what was before the last branch, the branch what is still to be added to it.
  void run() {
    Team::run(num_members_, [&](Team& team) {
      for (int64_t i = 0; i < num_layers_; ++i) run_layer(team, i);
    });
  }

 private:
  void plan_attention(const Layer& layer, const Reals& reals) {
    const Group& group = in_.groups[layer.group];
    const PageStrides strides{layer.page_size * layer.num_kv_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.head_dim};
    Attention& a = attentions_.emplace_back(Attention{q_, layer.num_heads * layer.head_dim, in_.type, attended_, at(layer.k_pages), at(layer.v_pages),
                                                      static_cast<int>(layer.page_type), strides, strides});
    while (int64_t{1} << a.page_bits < layer.page_size) ++a.page_bits;
    a.table = at<int32_t>(group.page_table), a.table_stride = group.table_stride;
    a.query_start = in_.query_start, a.kv_lens = in_.kv_lens;
    a.num_heads = layer.num_heads, a.num_kv_heads = layer.num_kv_heads, a.head_dim = a.value_dim = layer.head_dim;
    a.scale = static_cast<float>(reals.scale), a.softcap = static_cast<float>(reals.softcap), a.window = layer.window, a.sinks = at<float>(layer.sinks);
    for (int64_t i = 0; i < static_cast<int64_t>(attentions_.size()) - 1; ++i)
      if (is_alike(i, layer)) return works_.push_back(works_[i]);
    works_.push_back(std::make_shared<AttentionWork>(a, in_.num_requests, num_members_));
  }

  // Whether the work of layer i's attention serves another layer.
  bool is_alike(int64_t i, const Layer& layer) const {
    const Layer& other = layers_[i];
    return other.group == layer.group && other.num_heads == layer.num_heads && other.num_kv_heads == layer.num_kv_heads && other.head_dim == layer.head_dim &&
           other.window == layer.window && other.page_size == layer.page_size && other.page_type == layer.page_type;
  }

  void run_layer(Team& team, int64_t i) {
    const Layer& layer = layers_[i];
    const Reals& reals = reals_[i];
    enter(team, layer.attention_norm, reals, i > 0, layer.qkv);
    multiply(team, layer.qkv, normed_, qkv_);
    const RopeRows rope = rope_of(layer, reals);
    share_rows(team, [&](int64_t begin, int64_t end) { best_rope_kernels().rope_write(rope, begin, end); });
    attend(team, attentions_[i], *works_[i]);
    prepare(team, layer.output, attended_);
    multiply(team, layer.output, attended_, branch_);
    leave(team, layer.attention_post, reals);
    enter(team, layer.mlp_norm, reals, true, layer.gate_up);
    multiply(team, layer.gate_up, normed_, gates_);
    const int64_t width = layer.gate_up.outputs / 2;
    const GatedRows gated{gates_, 2 * width, hidden_, width, static_cast<Activation>(layer.activation)};
    const packed::Weight down = weight_of(layer.down);
    share_rows(team, [&](int64_t begin, int64_t end) {
      best_row_kernels().gate(in_.type, gated, begin, end);
      prepare_rows(down, hidden_, begin, end);
    });
    multiply(team, layer.down, hidden_, branch_);
    leave(team, layer.mlp_post, reals);
  }

  void attend(Team& team, const Attention& a, AttentionWork& work) {
    team.share(work.num_items(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work.run(a, i);
    });
    if (work.num_joins() == 0) return;
    team.share(work.num_joins(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work.join(a, i);
    });
  }

  // f(begin, end) over the rows, in pieces.
  template <class F>
  void share_rows(Team& team, const F& f) const { team.share(in_.rows, 1 + in_.rows / (kPieces * team.size()), f); }

  // The branch is added to the residual and that is normed, in the form that the next product takes.
  void enter(Team& team, const Norm& norm, const Reals& reals, bool has_branch, const Product& next) {
    NormRows rows{has_branch ? branch_ : residual_, in_.width, has_branch ? residual_ : nullptr, in_.width, at(norm.weight), static_cast<int>(norm.type),
                  normed_, in_.width, static_cast<float>(reals.eps), static_cast<float>(reals.offset)};
    const packed::Weight weight = weight_of(next);
    share_rows(team, [&](int64_t begin, int64_t end) {
      best_row_kernels().norm(in_.type, rows, begin, end);
      prepare_rows(weight, normed_, begin, end);
    });
  }

  // The norm that some architectures have after a branch.
  void leave(Team& team, const Norm& norm, const Reals& reals) {
    if (norm.weight == 0) return;
    const NormRows rows{branch_, in_.width, nullptr, 0, at(norm.weight), static_cast<int>(norm.type), plain_, in_.width, static_cast<float>(reals.eps),
                        static_cast<float>(reals.offset)};
    share_rows(team, [&](int64_t begin, int64_t end) {
      best_row_kernels().norm(in_.type, rows, begin, end);
      const int64_t step = in_.width * size_;
      std::copy(plain_ + begin * step, plain_ + end * step, branch_ + begin * step);
    });
  }

  RopeRows rope_of(const Layer& layer, const Reals& reals) const {
    return {qkv_, layer.qkv.outputs, in_.type, in_.positions, at<float>(layer.cos_sin), at<int64_t>(in_.groups[layer.group].slots),
            const_cast<void*>(at(layer.k_pages)), const_cast<void*>(at(layer.v_pages)), static_cast<int>(layer.page_type), q_, at(layer.q_norm), at(layer.k_norm),
            static_cast<int>(layer.head_norm_type), layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.rotary_dim, layer.is_interleaved != 0,
            static_cast<float>(reals.eps), static_cast<float>(reals.offset)};
  }

  packed::Input input_of(const packed::Weight& weight, const char* x) const { return {x, in_.rows, weight.inputs, in_.type == kBFloat16}; }

  packed::Rows rows_of(const packed::Weight& weight, const char* x) const {
    packed::Rows rows{best_packed_kernels().choose_form(weight, in_.rows, in_.type == kBFloat16), in_.rows, values_, scales_, sums_};
    const bool is_ready = rows.form == packed::RowForm::kFloat32 && in_.type == kFloat32 && weight.inputs == weight.padded();
    if (is_ready) rows.values = const_cast<char*>(x);
    return rows;
  }

  void prepare_rows(const packed::Weight& weight, const char* x, int64_t begin, int64_t end) {
    const packed::Rows rows = rows_of(weight, x);
    if (rows.values != x) best_packed_kernels().prepare(weight, input_of(weight, x), rows, begin, end);
  }

  void prepare(Team& team, const Product& product, const char* x) {
    const packed::Weight weight = weight_of(product);
    if (rows_of(weight, x).values == x) return;
    share_rows(team, [&](int64_t begin, int64_t end) { prepare_rows(weight, x, begin, end); });
  }

  void multiply(Team& team, const Product& product, const char* x, char* out) {
    const packed::Weight weight = weight_of(product);
    const packed::Rows rows = rows_of(weight, x);
    const packed::Output to{out, weight.outputs, in_.type == kBFloat16, at(product.bias), product.bias_type == kBFloat16};
    const int64_t pairs = (weight.panels() + 1) / 2, pair_bytes = 2 * weight.num_words() * packed::kPanel * 4;
    const bool is_expanded = rows.form == packed::RowForm::kBfloat16Tile && weight.format >= packed::Format::kInt8Group;  // once, for all rows
    const int64_t height = is_expanded ? in_.rows : kRowBlock, blocks = (in_.rows + height - 1) / height;
    const int64_t least = std::min(pairs, kPieceBytes / (pair_bytes * (1 + std::min(in_.rows, height) / 16))) + 1;
    const int64_t piece = std::max(pairs * blocks / (kPieces * team.size()), least), pieces = (pairs + piece - 1) / piece;
    team.share(blocks * pieces, 1, [&](int64_t begin, int64_t end) {
      if (blocks == 1) return multiply_block(weight, rows, to, 0, in_.rows, begin * piece, std::min(end * piece, pairs));
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / pieces * height, pair = i % pieces * piece;
        multiply_block(weight, rows, to, row, std::min(row + height, in_.rows), pair, std::min(pair + piece, pairs));
      }
    });
  }

  static void multiply_block(const packed::Weight& weight, const packed::Rows& rows, const packed::Output& to, int64_t row, int64_t last_row, int64_t pair, int64_t last_pair) {
    best_packed_kernels().multiply(weight, rows, to, row, last_row, 2 * pair, std::min(2 * last_pair, weight.panels()));
  }

  static constexpr int64_t kPieces = 8;              // for each member, so that a slow one holds up the others little
  static constexpr int64_t kMemberBytes = 128 * 1024;  // of a layer for each member: with less, they would mostly wait
  static constexpr int64_t kPieceBytes = 32 * 1024;  // fewer are not worth an atomic operation

  const Layer* layers_;
  const Reals* reals_;
  int64_t num_layers_;
  Inputs in_;
  int64_t size_, num_members_ = 1;
  char *residual_, *branch_, *normed_, *plain_, *qkv_, *q_, *attended_, *gates_, *hidden_, *values_;
  float *scales_, *sums_;
  std::deque<Attention> attentions_;
  std::vector<std::shared_ptr<AttentionWork>> works_;
};

}  // namespace layers

// x [M, D] is overwritten with the residual; returns the last branch.
inline Tensor decoder_layers(Tensor table, Tensor reals, Tensor groups, Tensor x, Tensor positions, Tensor query_start, Tensor kv_lens) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Long && table.is_contiguous() && table.size(1) == layers::kFields, "the table is not of this library");
  STD_TORCH_CHECK(reals.scalar_type() == ScalarType::Double && reals.is_contiguous() && reals.size(0) == table.size(0) && reals.size(1) == 4, "reals must be float64 [L, 4]");
  STD_TORCH_CHECK(groups.scalar_type() == ScalarType::Long && groups.is_contiguous() && groups.size(1) == 3, "groups must be int64 [G, 3]");
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && positions.numel() == x.size(0) && query_start.numel() == kv_lens.numel() + 1, "one position a row, one length a request");
  Tensor branch = empty({x.size(0), x.size(1)}, x);
  const layers::Inputs in{float_type(x), x.size(0), x.size(1), kv_lens.numel(), pointer<int64_t>(positions), pointer<int32_t>(query_start), pointer<int32_t>(kv_lens),
                          pointer<layers::Group>(groups)};
  layers::Step(pointer<layers::Layer>(table), pointer<layers::Reals>(reals), table.size(0), in, writable<char>(x), writable<char>(branch)).run();
  return branch;
}

inline void define_layers(Library& m) {
  m.def("decoder_layers(Tensor table, Tensor reals, Tensor groups, Tensor(a!) x, Tensor positions, Tensor query_start, Tensor kv_lens) -> Tensor");
}

inline void implement_layers(Library& m) { m.impl("decoder_layers", TORCH_BOX(&decoder_layers)); }

}  // namespace headrace
