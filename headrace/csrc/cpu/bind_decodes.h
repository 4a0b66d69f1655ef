// decode_step: a step of decodes alone, from the tokens drawn last to those to be drawn now, in one call: embedding, layers,
// last norm, the product with the vocabulary, and each row's greatest logit. See kernels/decoder_layers/decode_step.py.
// R rows, V vocabulary, G cache groups.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "bind_layers.h"
#include "bind_sample.h"

namespace headrace {

namespace layers {

// What is before and after the layers, as Python tells it.
struct Ends {
  Product embedding, head;
  Norm norm;
  int64_t type;  // of hidden states
};

// The inputs of a step, made of its rows and their lengths after it.
class Decodes {
 public:
  // tables [G, num_rows, entries]
  Decodes(const int64_t* rows, const int64_t* ends, int64_t count, const int64_t* last_token, const int32_t* tables, int64_t num_groups, int64_t num_rows, int64_t entries,
          int64_t page_size)
      : tokens(count), positions(count), slots_(num_groups * count), query_start_(count + 1), kv_lens_(count) {
    int64_t longest = 0;
    for (int64_t r = 0; r < count; ++r) {
      STD_TORCH_CHECK(rows[r] >= 0 && rows[r] < num_rows && ends[r] > 0 && ends[r] <= entries * page_size, "there is no such row, or it is too long");
      tokens[r] = last_token[rows[r]], positions[r] = ends[r] - 1;
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

  std::vector<int64_t> tokens, positions;
  std::vector<Group> groups;

 private:
  std::vector<int64_t> slots_;
  std::vector<int32_t> query_start_, kv_lens_, tables_;
};

// The greatest logit of each row and the first token that has it, of logits that come in parts, in any order and to several members.
class Search {
 public:
  Search(int64_t rows, int64_t members) : rows_(rows), found_(rows * members), raw_(found_.size()), values_(found_.size()), ids_(found_.size()) {}

  // Logits [rows, count] of tokens from `first` on, `stride` apart.
  void add(int64_t member, float* logits, int64_t stride, int64_t first, int64_t count) {
    const int64_t at = member * rows_;
    best_sample_kernels().search({logits, stride, count, nullptr, nullptr, raw_.data() + at, values_.data() + at, ids_.data() + at}, 0, rows_);
    for (int64_t i = at; i < at + rows_; ++i) {
      const bool is_broken = values_[i] != values_[i];
      found_[i].add({is_broken ? kNone : values_[i], first + ids_[i], is_broken});
    }
  }

  // Once all members have added theirs: the id of a row, and whether its greatest logit is a number and finite.
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
    bool is_broken = false;  // a logit is no number
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
  DecodeStep(const Ends& ends, double embedding_scale, const Reals& reals) : ends_(ends), embedding_scale_(static_cast<float>(embedding_scale)), reals_(reals) {}

  // Rows of the embedding, into the first layer.
  void embed(const Crew& crew, const Decodes& decodes, const Step& step) const {
    const packed::Weight weight = weight_of(ends_.embedding);
    char* const x = step.input(crew);
    step.over_rows(crew, [&](int64_t begin, int64_t end) {
      best_packed_gather().gather(weight, decodes.tokens.data(), begin, end, x, ends_.type == kBFloat16);
      if (embedding_scale_ == 1.0f) return;
      for (int64_t i = begin * weight.inputs; i < end * weight.inputs; ++i) {
        if (ends_.type == kFloat32) reinterpret_cast<float*>(x)[i] *= embedding_scale_;
        else scale_half(reinterpret_cast<uint16_t*>(x) + i);
      }
    });
  }

  // Logits [R, V] of the rows that were entered.
  void multiply(const Crew& crew, const packed::Rows& rows, float* logits) const {
    const packed::Weight weight = weight_of(ends_.head);
    share_head(crew, weight, [&](int64_t first, int64_t last) { best_packed_kernels().multiply(weight, rows, output(weight, logits, weight.outputs), 0, rows.count, first, last); });
  }

  // Their greatest alone; what is not searched yet stays in the second-level cache.
  void search(const Crew& crew, const packed::Rows& rows, Search& found) const {
    const packed::Weight weight = weight_of(ends_.head);
    const int64_t most = std::clamp<int64_t>(kSearched / (rows.count * packed::kPanel) / 2 * 2, 2, kSearchedPanels);
    static thread_local std::vector<float> logits;
    logits.resize(rows.count * most * packed::kPanel);
    share_head(crew, weight, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; p += most) {
        const int64_t end = std::min(p + most, last), token = p * packed::kPanel, count = std::min(end * packed::kPanel, weight.outputs) - token;
        best_packed_kernels().multiply(weight, rows, output(weight, logits.data() - token, most * packed::kPanel), 0, rows.count, p, end);
        found.add(crew.member, logits.data(), most * packed::kPanel, token, count);
      }
    });
  }

 private:
  static constexpr int64_t kSearched = 1 << 16, kSearchedPanels = 64;  // logits, of all rows; and of each
  static constexpr int64_t kPieceBytes = 64 * 1024;

  packed::Output output(const packed::Weight&, float* logits, int64_t stride) const {
    return {logits, stride, false, at(ends_.head.bias), ends_.head.bias_type == kBFloat16};
  }

  // f(first, last) over the panels of the vocabulary, those of a pair together.
  template <class F>
  void share_head(const Crew& crew, const packed::Weight& weight, const F& f) const {
    const int64_t pairs = (weight.panels() + 1) / 2, least = kPieceBytes / (2 * weight.num_words() * packed::kPanel * 4) + 1;
    crew.team.share_parts(pairs, least, pairs, crew.member, [&](int64_t begin, int64_t end) { f(2 * begin, std::min(2 * end, weight.panels())); });
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

// requests [2, R]: rows, and their lengths after the step. Sets drawn [2, R] to ids and to 1 where a greatest logit is not
// finite, and the rows' last tokens to the ids. With logits [R, V] it fills these instead, and draws nothing.
inline void decode_step(Tensor table, Tensor reals, Tensor ends, Tensor end_reals, Tensor requests, Tensor last_token, Tensor tables, Tensor drawn, std::optional<Tensor> logits) {
  layers::check_table(table, reals);
  STD_TORCH_CHECK(ends.scalar_type() == ScalarType::Long && ends.is_contiguous() && ends.numel() == sizeof(layers::Ends) / sizeof(int64_t), "the ends are not of this library");
  STD_TORCH_CHECK(end_reals.scalar_type() == ScalarType::Double && end_reals.numel() == 3, "the ends have a scale, eps and an offset");
  for (const Tensor* x : {&requests, &last_token, &drawn}) STD_TORCH_CHECK(x->scalar_type() == ScalarType::Long && x->is_contiguous(), "requests, last tokens and draws are dense int64");
  STD_TORCH_CHECK(tables.scalar_type() == ScalarType::Int && tables.dim() == 3 && tables.is_contiguous() && last_token.numel() >= tables.size(1), "tables must be [G, rows, entries] int32");
  const auto* layers_of = pointer<layers::Layer>(table);
  const auto& about = *pointer<layers::Ends>(ends);
  const double* numbers = pointer<double>(end_reals);
  const int64_t count = requests.size(1), *rows = pointer<int64_t>(requests);
  STD_TORCH_CHECK(requests.dim() == 2 && requests.size(0) == 2 && drawn.numel() == 2 * count && count > 0, "requests and draws are [2, R]");
  STD_TORCH_CHECK(!logits || (logits->scalar_type() == ScalarType::Float && logits->is_contiguous() && logits->numel() == count * about.head.outputs), "logits are [R, V] float32");
  const layers::Decodes decodes(rows, rows + count, count, pointer<int64_t>(last_token), pointer<int32_t>(tables), tables.size(0), tables.size(1), tables.size(2), layers_of->page_size);
  for (const int64_t token : decodes.tokens) STD_TORCH_CHECK(token >= 0 && token < about.embedding.outputs, "there is no such token");

  const int64_t width = about.embedding.inputs, bytes = count * width * (about.type == kFloat32 ? 4 : 2);
  static thread_local Arena arena;
  arena.reserve(2 * Arena::rounded(bytes));
  char *residual = arena.take(bytes), *branch = arena.take(bytes);
  const layers::Inputs in{static_cast<int>(about.type), count, width, decodes.positions.data(), decodes.groups.data(), decodes.requests()};
  layers::Step step(layers_of, pointer<layers::Reals>(reals), table.size(0), in, residual, branch, &about.head);
  const layers::Reals norm{numbers[1], numbers[2], 1.0, 0.0};
  const layers::DecodeStep outside(about, numbers[0], norm);
  layers::Search found(count, step.num_members());
  float* const all = logits ? writable<float>(*logits) : nullptr;
  run_team(step.num_members(), [&](Team& team, int64_t member) {
    layers::Crew crew{team, member, count};
    outside.embed(crew, decodes, step);
    step.run(crew);
    step.enter(crew, about.norm, norm, true, about.head);
    const packed::Rows hidden = step.entered(crew, layers::weight_of(about.head));
    all ? outside.multiply(crew, hidden, all) : outside.search(crew, hidden, found);
  });
  if (all) return;
  int64_t *last = writable<int64_t>(last_token), *out = writable<int64_t>(drawn);
  for (int64_t r = 0; r < count; ++r) {
    const auto [id, is_finite] = found.result(r);
    last[rows[r]] = out[r] = id, out[count + r] = !is_finite;
  }
}

inline void define_decodes(Library& m) {
  m.def(
      "decode_step(Tensor table, Tensor reals, Tensor ends, Tensor end_reals, Tensor requests, Tensor(a!) last_token, Tensor tables, Tensor(b!) drawn, "
      "Tensor(c!)? logits) -> ()");
}

inline void implement_decodes(Library& m) { m.impl("decode_step", TORCH_BOX(&decode_step)); }

}  // namespace headrace
