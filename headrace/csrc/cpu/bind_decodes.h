// decode_step: a step of decodes alone in one call: embedding of the input tokens, layers, final norm, LM head and
// argmax. See `FusedDecode` in kernels/decoder_layers/table.py. R decodes, V vocabulary, G cache groups. A row may occur
// several times (its last token and drafts): each layer writes the keys of all decodes before any of them attends.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "bind_layers.h"
#include "bind_sample.h"

namespace headrace {

namespace layers {

// What comes before and after the layers: the int64 vector that `FusedDecode` writes, same fields, same order.
struct Ends {
  Product embedding, head;
  Norm norm;
  int64_t type;  // of hidden states
};

// The inputs of a step (positions, slots, page tables), made from its rows and their lengths after it.
class Decodes {
 public:
  // rows, ends [R]; tables [G, num_rows, entries], of which each row's used entries are copied.
  Decodes(const int64_t* rows, const int64_t* ends, int64_t count, const int32_t* tables, int64_t num_groups,
          int64_t num_rows, int64_t entries, int64_t page_size)
      : positions(count), slots_(num_groups * count), query_start_(count + 1), kv_lens_(count) {
    int64_t longest = 0;
    for (int64_t r = 0; r < count; ++r) {
      STD_TORCH_CHECK(rows[r] >= 0 && rows[r] < num_rows && ends[r] > 0 && ends[r] <= entries * page_size,
                      "a row does not exist or is too long");
      positions[r] = ends[r] - 1;
      kv_lens_[r] = static_cast<int32_t>(ends[r]), query_start_[r + 1] = static_cast<int32_t>(r + 1);
      longest = std::max(longest, ends[r]);
    }
    const int64_t width = (longest + page_size - 1) / page_size;
    tables_.resize(num_groups * count * width);
    for (int64_t g = 0; g < num_groups; ++g) {
      int32_t* own = tables_.data() + g * count * width;
      for (int64_t r = 0; r < count; ++r) {
        const int32_t* table = tables + (g * num_rows + rows[r]) * entries;
        std::copy(table, table + (ends[r] + page_size - 1) / page_size, own + r * width);
        slots_[g * count + r] = table[positions[r] / page_size] * page_size + positions[r] % page_size;
      }
      groups.push_back({reinterpret_cast<int64_t>(slots_.data() + g * count), reinterpret_cast<int64_t>(own), width});
    }
  }

  Requests requests() const { return {static_cast<int64_t>(kv_lens_.size()), query_start_.data(), kv_lens_.data()}; }

  std::vector<int64_t> positions;
  std::vector<Group> groups;

 private:
  std::vector<int64_t> slots_;
  std::vector<int32_t> query_start_, kv_lens_, tables_;
};

// Argmax of each row over logits that come in parts, in any order, to several members. Ties go to the lowest id.
class Argmax {
 public:
  Argmax(int64_t rows, int64_t members)
      : rows_(rows), found_(rows * members), raw_(found_.size()), values_(found_.size()), ids_(found_.size()) {}

  // Logits [rows, count] of the tokens from `first` on, rows `stride` values apart.
  void add(int64_t member, float* logits, int64_t stride, int64_t first, int64_t count) {
    const int64_t at = member * rows_;
    best_sample_kernels().argmax(
        {logits, stride, count, nullptr, nullptr, raw_.data() + at, values_.data() + at, ids_.data() + at}, 0, rows_);
    for (int64_t i = at; i < at + rows_; ++i) {
      const bool is_broken = values_[i] != values_[i];
      found_[i].add({is_broken ? kNone : values_[i], first + ids_[i], is_broken});
    }
  }

  // After the team has ended: a row's token, and whether its greatest logit is finite and none of them is NaN.
  std::pair<int64_t, bool> result(int64_t row) const {
    Found all;
    for (size_t i = row; i < found_.size(); i += rows_) all.add(found_[i]);
    return {all.id, !all.is_broken && all.value - all.value == 0.0f};
  }

 private:
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  struct Found {
    float value = kNone;
    int64_t id = std::numeric_limits<int64_t>::max();
    bool is_broken = false;  // a logit is NaN
    void add(const Found& other) {
      is_broken |= other.is_broken;
      if (other.value > value || (other.value == value && other.id < id)) value = other.value, id = other.id;
    }
  };

  const int64_t rows_;
  std::vector<Found> found_;
  std::vector<float> raw_, values_;
  std::vector<int64_t> ids_;
};

class DecodeStep {
 public:
  DecodeStep(const Ends& ends, double embedding_scale, const Reals& reals)
      : ends_(ends), embedding_scale_(static_cast<float>(embedding_scale)), reals_(reals) {}

  // Rows of the embedding [R, D] of tokens [R], scaled, as input of the first layer.
  void embed(const Member& member, const int64_t* tokens, const Step& step) const {
    const packed::Weight weight = weight_of(ends_.embedding);
    char* const x = step.input(member);
    step.over_rows(member, [&](int64_t begin, int64_t end) {
      best_packed_gather().gather(weight, tokens, begin, end, x, ends_.type == kBFloat16);
      if (embedding_scale_ == 1.0f) return;
      for (int64_t i = begin * weight.inputs; i < end * weight.inputs; ++i) {
        if (ends_.type == kFloat32) reinterpret_cast<float*>(x)[i] *= embedding_scale_;
        else scale_half(reinterpret_cast<uint16_t*>(x) + i);
      }
    });
  }

  // Logits [R, V].
  void multiply(const Member& member, const packed::Rows& rows, float* logits) const {
    const packed::Weight weight = weight_of(ends_.head);
    share_head(member, weight, [&](int64_t first, int64_t last) {
      best_packed_kernels().multiply(weight, rows, output(weight, logits, weight.outputs), 0, rows.count, first, last);
    });
  }

  // Argmax without storing [R, V]: logits of some panels at a time, read again while they are in the L2 cache.
  void argmax(const Member& member, const packed::Rows& rows, Argmax& found) const {
    const packed::Weight weight = weight_of(ends_.head);
    const int64_t most = std::clamp<int64_t>(kArgmaxLogits / (rows.count * packed::kPanel) / 2 * 2, 2, kArgmaxPanels);
    static thread_local std::vector<float> logits;
    logits.resize(rows.count * most * packed::kPanel);
    share_head(member, weight, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; p += most) {
        const int64_t end = std::min(p + most, last), token = p * packed::kPanel,
                      count = std::min(end * packed::kPanel, weight.outputs) - token;
        best_packed_kernels().multiply(weight, rows, output(weight, logits.data() - token, most * packed::kPanel), 0,
                                       rows.count, p, end);
        found.add(member.index, logits.data(), most * packed::kPanel, token, count);
      }
    });
  }

 private:
  static constexpr int64_t kArgmaxLogits = 1 << 16, kArgmaxPanels = 64;  // logits of all rows; panels of 16 tokens
  static constexpr int64_t kPieceBytes = 64 * 1024;

  packed::Output output(const packed::Weight&, float* logits, int64_t stride) const {
    return {logits, stride, false, at(ends_.head.bias), ends_.head.bias_type == kBFloat16};
  }

  // f(first, last) over the panels of the vocabulary; kernels take panels in pairs.
  template <class F>
  void share_head(const Member& member, const packed::Weight& weight, const F& f) const {
    const int64_t pairs = (weight.panels() + 1) / 2,
                  least = kPieceBytes / (2 * weight.num_words() * packed::kPanel * 4) + 1;
    member.team.share_parts(pairs, least, pairs, member.index,
                          [&](int64_t begin, int64_t end) { f(2 * begin, std::min(2 * end, weight.panels())); });
  }

  void scale_half(uint16_t* x) const {
    uint32_t bits = static_cast<uint32_t>(*x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    value *= embedding_scale_;
    std::memcpy(&bits, &value, 4);
    *x = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  }

  const Ends& ends_;
  const float embedding_scale_;
  const Reals& reals_;
};

}  // namespace layers

// requests [3, R]: rows, their lengths up to and with the decode's token, and that token. Writes sampled [2, R] (ids,
// and 1 where the greatest logit is not finite). With logits [R, V] it writes these instead and samples nothing. Banks
// [layers * 4, fields] and adapter_rows [2, n]: decodes with an adapter, and their slots.
inline void decode_step(Tensor table, Tensor reals, Tensor ends, Tensor end_reals, Tensor requests, Tensor tables,
                        Tensor sampled, std::optional<Tensor> logits, std::optional<Tensor> banks,
                        std::optional<Tensor> adapter_rows) {
  layers::check_table(table, reals);
  STD_TORCH_CHECK(ends.scalar_type() == ScalarType::Long && ends.is_contiguous() &&
                      ends.numel() == sizeof(layers::Ends) / sizeof(int64_t),
                  "the ends do not match this library's layout");
  STD_TORCH_CHECK(end_reals.scalar_type() == ScalarType::Double && end_reals.numel() == 3,
                  "end_reals must be scale, eps and offset");
  for (const Tensor* x : {&requests, &sampled})
    STD_TORCH_CHECK(x->scalar_type() == ScalarType::Long && x->is_contiguous(),
                    "requests and sampled must be contiguous int64");
  STD_TORCH_CHECK(tables.scalar_type() == ScalarType::Int && tables.dim() == 3 && tables.is_contiguous(),
                  "tables must be [G, rows, entries] int32");
  const auto* layers_of = pointer<layers::Layer>(table);
  const auto& about = *pointer<layers::Ends>(ends);
  const double* numbers = pointer<double>(end_reals);
  const int64_t count = requests.size(1), *rows = pointer<int64_t>(requests);
  STD_TORCH_CHECK(requests.dim() == 2 && requests.size(0) == 3 && sampled.numel() == 2 * count && count > 0,
                  "requests must be [3, R] and sampled [2, R]");
  STD_TORCH_CHECK(!logits || (logits->scalar_type() == ScalarType::Float && logits->is_contiguous() &&
                              logits->numel() == count * about.head.outputs),
                  "logits must be [R, V] float32, contiguous");
  const layers::Decodes decodes(rows, rows + count, count, pointer<int32_t>(tables), tables.size(0), tables.size(1),
                                tables.size(2), layers_of->page_size);
  const int64_t* const tokens = rows + 2 * count;
  for (int64_t r = 0; r < count; ++r)
    STD_TORCH_CHECK(tokens[r] >= 0 && tokens[r] < about.embedding.outputs, "no such token in the vocabulary");

  const int64_t hidden_size = about.embedding.inputs, bytes = count * hidden_size * (about.type == kFloat32 ? 4 : 2);
  static thread_local Arena arena;
  arena.reserve(2 * Arena::rounded(bytes));
  char *residual = arena.take(bytes), *branch = arena.take(bytes);
  layers::Inputs in{static_cast<int>(about.type), count, hidden_size, decodes.positions.data(),
                    decodes.groups.data(), decodes.requests()};
  layers::Adapters adapters{};
  if (adapter_rows) {
    adapters = layers::adapters_of(banks, *adapter_rows, table.size(0), count);
    in.adapters = &adapters;
  }
  layers::Step step(layers_of, pointer<layers::Reals>(reals), table.size(0), in, residual, branch, &about.head);
  const layers::Reals norm{numbers[1], numbers[2], 1.0, 0.0};
  const layers::DecodeStep outside(about, numbers[0], norm);
  layers::Argmax found(count, step.num_members());
  float* const all = logits ? writable<float>(*logits) : nullptr;
  run_team(step.num_members(), [&](Team& team, int64_t index) {
    layers::Member member{team, index, count};
    outside.embed(member, tokens, step);
    step.run(member);
    step.enter(member, about.norm, norm, true, about.head);
    const packed::Rows hidden = step.entered(member, layers::weight_of(about.head));
    all ? outside.multiply(member, hidden, all) : outside.argmax(member, hidden, found);
  });
  if (all) return;
  int64_t* const out = writable<int64_t>(sampled);
  for (int64_t r = 0; r < count; ++r) {
    const auto [id, is_finite] = found.result(r);
    out[r] = id, out[count + r] = !is_finite;
  }
}

inline void define_decodes(Library& m) {
  m.def(
      "decode_step(Tensor table, Tensor reals, Tensor ends, Tensor end_reals, Tensor requests, Tensor tables, "
      "Tensor(a!) sampled, Tensor(b!)? logits, Tensor? banks, Tensor? adapter_rows) -> ()");
}

inline void implement_decodes(Library& m) { m.impl("decode_step", TORCH_BOX(&decode_step)); }

}  // namespace headrace
