// route: top-k of a router. packed_experts: MoE with experts in packed layout; see kernels/moe. Tokens are sorted by
// expert; a `Team` goes through dispatch, both products, the activation between them, and combine.
// T tokens, k experts per token, N pairs of token and expert, X experts, D hidden size, F intermediate size.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "arena.h"
#include "bind_packed.h"
#include "bind_rows.h"
#include "route.h"

namespace headrace {

namespace experts {

// The experts' matrices stacked by rows. Each has whole panels.
struct Stack {
  packed::Weight all;
  int64_t outputs;  // per expert
  const void* biases;
  bool is_bias_half;

  packed::Weight of(int64_t expert) const {
    const int64_t first = expert * outputs, groups = first * all.groups();
    packed::Weight weight = all;
    weight.outputs = outputs, weight.words = all.panel(first / packed::kPanel);
    if (weight.scales) weight.scales += first;
    if (weight.group_scales) weight.group_scales += groups;
    if (weight.group_mins) weight.group_mins += groups;
    return weight;
  }
  const void* bias_of(int64_t expert) const {
    return biases ? static_cast<const char*>(biases) + expert * outputs * (is_bias_half ? 2 : 4) : nullptr;
  }
};

struct Mixture {
  Stack gate_up, down;
  int64_t num_experts;
  Activation activation;
  Clamp clamp;
};

struct Tokens {
  int type;
  const char* hidden;  // [T, D], contiguous
  const int64_t* ids;  // [T, k]; negative: no expert
  const float* weights;  // [T, k]
  int64_t count, top_k, hidden_size;
};

// The pairs of one expert: rows [first, first + count) in the order sorted by expert, in the forms that its products
// take.
struct Group {
  int64_t expert, first, count;
  packed::Rows in, hidden;
};

// Work for one member: rows and panels of a product, or rows alone.
struct Piece {
  int64_t group, row, last_row, panel, last_panel;
};

class Step {
 public:
  // For a team of at most `most_members`, fewer where there is little to do. Scratch belongs to the calling thread and
  // is reused by its next step.
  Step(const Mixture& mixture, const Tokens& tokens, char* out, int64_t most_members)
      : mixture_(mixture), tokens_(tokens), out_(out), size_(tokens.type == kFloat32 ? 4 : 2) {
    sort();
    reserve();
    int64_t work = 0;
    for (const Group& group : groups_) {
      const int64_t words = (mixture_.gate_up.of(group.expert).num_words() * mixture_.gate_up.outputs +
                             mixture_.down.of(group.expert).num_words() * mixture_.down.outputs);
      work += words * 4 * (1 + group.count / 16);
      for (int64_t row = 0; row < group.count; row += kRows)
        rows_.push_back({&group - groups_.data(), row, std::min(row + kRows, group.count), 0, 0});
    }
    members_ = std::clamp<int64_t>(work / kMemberBytes, 1, most_members);
    cut(mixture_.gate_up, [](const Group& group) { return group.in.form; }, gate_pieces_);
    cut(mixture_.down, [](const Group& group) { return group.hidden.form; }, down_pieces_);
  }

  int64_t num_members() const { return members_; }

  // As one of the members of a team.
  void run(Team& team, int64_t member) {
    const auto over = [&](const std::vector<Piece>& pieces, const auto& f) {
      const int64_t count = static_cast<int64_t>(pieces.size());
      team.share_parts(count, 1, 1 + count / (4 * team.size()), member, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) f(groups_[pieces[i].group], pieces[i]);
      });
    };
    over(rows_, [&](Group& group, const Piece& piece) { gather(group, piece); });
    over(gate_pieces_, [&](Group& group, const Piece& piece) {
      multiply(mixture_.gate_up, group, group.in, piece, gates_, tokens_.type == kBFloat16);
    });
    over(rows_, [&](Group& group, const Piece& piece) { gate(group, piece); });
    over(down_pieces_, [&](Group& group, const Piece& piece) {
      multiply(mixture_.down, group, group.hidden, piece, reinterpret_cast<char*>(products_), false);
    });
    const int64_t rows = 1 + tokens_.count / (4 * team.size());
    team.share_parts(tokens_.count, rows, rows, member, [&](int64_t begin, int64_t end) {
      best_row_kernels().weigh(tokens_.type,
                               {products_, tokens_.hidden_size, places_.data(), tokens_.weights, tokens_.top_k, out_},
                               begin, end);
    });
  }

 private:
  void sort() {
    const int64_t pairs = tokens_.count * tokens_.top_k;
    std::vector<int64_t> next(mixture_.num_experts + 1);
    for (int64_t n = 0; n < pairs; ++n)
      if (tokens_.ids[n] >= 0) ++next[tokens_.ids[n] + 1];
    for (int64_t e = 0; e < mixture_.num_experts; ++e) {
      if (next[e + 1]) groups_.push_back({e, next[e], next[e + 1], {}, {}});
      next[e + 1] += next[e];
    }
    order_.resize(next[mixture_.num_experts]), places_.assign(pairs, -1);
    for (int64_t n = 0; n < pairs; ++n) {
      if (tokens_.ids[n] < 0) continue;
      const int64_t place = next[tokens_.ids[n]]++;
      order_[place] = n / tokens_.top_k, places_[n] = static_cast<int32_t>(place);
    }
  }

  void reserve() {
    const int64_t pairs = order_.size(), width = tokens_.hidden_size, inner = mixture_.gate_up.outputs / 2;
    const bool is_half = tokens_.type == kBFloat16;
    size_t bytes = Arena::rounded(pairs * width * size_) + Arena::rounded(pairs * 2 * inner * size_) +
                   Arena::rounded(pairs * inner * size_) + Arena::rounded(pairs * width * 4);
    for (Group& group : groups_) {
      const packed::Weight first = mixture_.gate_up.of(group.expert), second = mixture_.down.of(group.expert);
      group.in = {best_packed_kernels().choose_form(first, group.count, is_half), group.count, nullptr, nullptr,
                  nullptr};
      group.hidden = {best_packed_kernels().choose_form(second, group.count, is_half), group.count, nullptr, nullptr,
                      nullptr};
      bytes += form_bytes(first, group.in) + form_bytes(second, group.hidden);
    }
    static thread_local Arena arena;
    arena.reserve(bytes);
    gathered_ = arena.take(pairs * width * size_), gates_ = arena.take(pairs * 2 * inner * size_),
    hidden_ = arena.take(pairs * inner * size_);
    products_ = reinterpret_cast<float*>(arena.take(pairs * width * 4));
    for (Group& group : groups_) {
      place_form(mixture_.gate_up.of(group.expert), group.in, arena);
      place_form(mixture_.down.of(group.expert), group.hidden, arena);
    }
  }

  static size_t scale_bytes(const packed::Weight& weight, const packed::Rows& rows) {
    return Arena::rounded(rows.count * weight.groups() * 4);
  }
  static size_t form_bytes(const packed::Weight& weight, const packed::Rows& rows) {
    return Arena::rounded(packed::row_form_bytes(rows.form, weight, rows.count)) + 2 * scale_bytes(weight, rows);
  }
  static void place_form(const packed::Weight& weight, packed::Rows& rows, Arena& arena) {
    rows.values = arena.take(packed::row_form_bytes(rows.form, weight, rows.count));
    rows.scales = reinterpret_cast<float*>(arena.take(scale_bytes(weight, rows))),
    rows.sums = reinterpret_cast<float*>(arena.take(scale_bytes(weight, rows)));
  }

  // A product of each group as pieces of like cost; pieces of an expert lie side by side.
  template <class F>
  void cut(const Stack& stack, const F& form_of, std::vector<Piece>& pieces) const {
    const int64_t pairs = (stack.outputs / packed::kPanel + 1) / 2,
                  pair_bytes = 2 * stack.all.num_words() * packed::kPanel * 4;
    int64_t total = 0;
    for (const Group& group : groups_) total += pairs * pair_bytes * (1 + group.count / 16);
    const int64_t cost = std::max(total / (kPieces * members_), kPieceBytes);
    for (const Group& group : groups_) {
      const packed::Weight weight = stack.of(group.expert);
      const packed::RowForm form = form_of(group);
      const int64_t height =
          group.count <= kRowBlock || is_expanded(weight, form) ? group.count : block_rows(weight, form, group.count);
      const int64_t step =
          std::clamp<int64_t>(cost / (pair_bytes * (1 + std::min(height, group.count) / 16)), 1, pairs);
      for (int64_t row = 0; row < group.count; row += height)
        for (int64_t pair = 0; pair < pairs; pair += step)
          pieces.push_back({&group - groups_.data(), row, std::min(row + height, group.count), 2 * pair,
                            std::min(2 * (pair + step), weight.panels())});
    }
  }

  void gather(const Group& group, const Piece& piece) {
    const int64_t row_bytes = tokens_.hidden_size * size_;
    for (int64_t row = piece.row; row < piece.last_row; ++row)
      std::memcpy(gathered_ + (group.first + row) * row_bytes, tokens_.hidden + order_[group.first + row] * row_bytes,
                  row_bytes);
    prepare(mixture_.gate_up, group, group.in, gathered_, tokens_.hidden_size, piece);
  }

  void gate(const Group& group, const Piece& piece) {
    const int64_t inner = mixture_.gate_up.outputs / 2;
    best_row_kernels().gate(tokens_.type, {gates_, 2 * inner, hidden_, inner, mixture_.activation, 0, mixture_.clamp},
                            group.first + piece.row, group.first + piece.last_row);
    prepare(mixture_.down, group, group.hidden, hidden_, inner, piece);
  }

  void prepare(const Stack& stack, const Group& group, const packed::Rows& rows, const char* from, int64_t width,
               const Piece& piece) const {
    const packed::Input input{from + group.first * width * size_, group.count, width, tokens_.type == kBFloat16};
    best_packed_kernels().prepare(stack.of(group.expert), input, rows, piece.row, piece.last_row);
  }

  void multiply(const Stack& stack, const Group& group, const packed::Rows& rows, const Piece& piece, char* to,
                bool is_half) const {
    const packed::Output out{to + group.first * stack.outputs * (is_half ? 2 : 4), stack.outputs, is_half,
                             stack.bias_of(group.expert), stack.is_bias_half};
    best_packed_kernels().multiply(stack.of(group.expert), rows, out, piece.row, piece.last_row, piece.panel,
                                   piece.last_panel);
  }

  static constexpr int64_t kRows = 16;                 // per piece of dispatch and activation
  static constexpr int64_t kPieces = 8;  // of a product for each member, so that a slow one holds up the others little
  static constexpr int64_t kPieceBytes = 32 * 1024;    // fewer are not worth an atomic operation
  static constexpr int64_t kMemberBytes = 256 * 1024;  // of weights for each member: with less, they would mostly wait

  const Mixture mixture_;
  const Tokens tokens_;
  char* const out_;
  const int64_t size_;
  int64_t members_ = 1;
  std::vector<Group> groups_;
  std::vector<int64_t> order_;   // [N] token of each pair, sorted by expert
  std::vector<int32_t> places_;  // [T, k] row of each pair in that order, -1 for none
  std::vector<Piece> rows_, gate_pieces_, down_pieces_;
  char *gathered_, *gates_, *hidden_;
  float* products_;
};

// Tokens per pass, which bounds the scratch memory.
inline int64_t tokens_at_once(const Mixture& mixture, const Tokens& tokens) {
  constexpr int64_t kBytes = 128 << 20;
  return std::max<int64_t>(64, kBytes / (tokens.top_k * (12 * tokens.hidden_size + 8 * mixture.gate_up.outputs)));
}

inline Stack stack_of(const Tensor& words, const std::optional<Tensor>& scales, const std::optional<Tensor>& mins,
                      int64_t format, const std::optional<Tensor>& biases, int64_t num_experts, int64_t inputs) {
  const int64_t all = words.size(0) * packed::kPanel, outputs = all / num_experts;
  STD_TORCH_CHECK(outputs * num_experts == all && outputs % packed::kPanel == 0, "experts must have whole panels each");
  if (biases)
    STD_TORCH_CHECK(biases->is_contiguous() && biases->numel() == all && float_type(*biases) != kFloat16,
                    "biases must be [X * outputs], float32 or bfloat16, contiguous");
  return {packed_weight(words, scales, mins, format, all, inputs), outputs, pointer(biases),
          biases && float_type(*biases) == kBFloat16};
}

}  // namespace experts

inline Tensor packed_experts(Tensor x, Tensor ids, Tensor weights, int64_t num_experts, Tensor gate_words,
                             std::optional<Tensor> gate_scales, std::optional<Tensor> gate_mins, int64_t gate_format,
                             std::optional<Tensor> gate_bias, Tensor down_words, std::optional<Tensor> down_scales,
                             std::optional<Tensor> down_mins, int64_t down_format, std::optional<Tensor> down_bias,
                             int64_t activation, double limit, double alpha, double up_offset) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && float_type(x) != kFloat16,
                  "x must be [T, D], float32 or bfloat16, contiguous");
  STD_TORCH_CHECK(
      ids.dim() == 2 && ids.scalar_type() == ScalarType::Long && ids.is_contiguous() && ids.size(0) == x.size(0),
      "ids must be int64 [T, k], contiguous");
  STD_TORCH_CHECK(
      weights.scalar_type() == ScalarType::Float && weights.is_contiguous() && weights.numel() == ids.numel(),
      "weights must be float32 [T, k], contiguous");
  const int64_t hidden_size = x.size(1), top_k = ids.size(1), *chosen = pointer<int64_t>(ids);
  for (int64_t n = 0; n < ids.numel(); ++n)
    STD_TORCH_CHECK(chosen[n] < num_experts, "no such expert: ids must be below num_experts");
  const experts::Stack gate_up =
      experts::stack_of(gate_words, gate_scales, gate_mins, gate_format, gate_bias, num_experts, hidden_size);
  const experts::Stack down =
      experts::stack_of(down_words, down_scales, down_mins, down_format, down_bias, num_experts, gate_up.outputs / 2);
  STD_TORCH_CHECK(down.outputs == hidden_size, "down must have D outputs");
  const experts::Mixture mixture{gate_up, down, num_experts, static_cast<Activation>(activation),
                                 {static_cast<float>(limit), static_cast<float>(alpha), static_cast<float>(up_offset)}};
  const Tensor out = empty({x.size(0), hidden_size}, x);
  const int type = float_type(x);
  const int64_t row_bytes = hidden_size * (type == kFloat32 ? 4 : 2);
  experts::Tokens tokens{type, pointer<char>(x), chosen, pointer<float>(weights), x.size(0), top_k, hidden_size};
  const int64_t step = experts::tokens_at_once(mixture, tokens);
  for (int64_t first = 0; first < x.size(0); first += step) {
    tokens.hidden = pointer<char>(x) + first * row_bytes, tokens.ids = chosen + first * top_k,
    tokens.weights = pointer<float>(weights) + first * top_k;
    tokens.count = std::min(step, x.size(0) - first);
    experts::Step part(mixture, tokens, writable<char>(out) + first * row_bytes, torch::stable::get_num_threads());
    run_team(part.num_members(), [&](Team& team, int64_t member) { part.run(team, member); });
  }
  return out;
}

// logits [T, X] float32; writes ids int64 and weights float32 [T, k].
inline void route(Tensor logits, std::optional<Tensor> choice_bias, Tensor ids, Tensor weights, int64_t score,
                  bool is_renormalised, double scale, int64_t num_groups, int64_t top_groups, int64_t group_best) {
  const auto is_dense = [](const Tensor& x, ScalarType type) { return x.is_contiguous() && x.scalar_type() == type; };
  STD_TORCH_CHECK(logits.dim() == 2 && is_dense(logits, ScalarType::Float),
                  "logits must be [T, X] float32, contiguous");
  const int64_t rows = logits.size(0), num_experts = logits.size(1), top_k = ids.size(1);
  STD_TORCH_CHECK(ids.dim() == 2 && ids.size(0) == rows && is_dense(ids, ScalarType::Long) &&
                      weights.numel() == ids.numel() && is_dense(weights, ScalarType::Float),
                  "ids and weights must be [T, k], int64 and float32, contiguous");
  STD_TORCH_CHECK(!choice_bias || (choice_bias->numel() == num_experts && is_dense(*choice_bias, ScalarType::Float)),
                  "the choice bias must be [X] float32");
  STD_TORCH_CHECK(num_groups > 0 && num_experts % num_groups == 0 && top_groups > 0 && top_groups <= num_groups &&
                      group_best <= num_experts / num_groups && top_k <= num_experts / num_groups * top_groups,
                  "top_k does not fit the experts or their groups");
  const experts::Routing routing{num_experts, top_k, static_cast<experts::Score>(score), is_renormalised,
                                 static_cast<float>(scale), pointer<float>(choice_bias), num_groups, top_groups,
                                 group_best};
  const experts::Routes routes{pointer<float>(logits), writable<int64_t>(ids), writable<float>(weights)};
  over_rows(rows, 16 * num_experts, [&](int64_t begin, int64_t end) { routes.fill(routing, begin, end); });
}

inline void define_experts(Library& m) {
  m.def(
      "route(Tensor logits, Tensor? choice_bias, Tensor(a!) ids, Tensor(b!) weights, int score, bool is_renormalised, "
      "float scale, int num_groups, int top_groups, int group_best) -> ()");
  m.def(
      "packed_experts(Tensor x, Tensor ids, Tensor weights, int num_experts, Tensor gate_words, Tensor? gate_scales, "
      "Tensor? gate_mins, int gate_format, Tensor? gate_bias, Tensor down_words, Tensor? down_scales, Tensor? "
      "down_mins, "
      "int down_format, Tensor? down_bias, int activation, float limit, float alpha, float up_offset) -> Tensor");
}

inline void implement_experts(Library& m) {
  m.impl("route", TORCH_BOX(&route));
  m.impl("packed_experts", TORCH_BOX(&packed_experts));
}

}  // namespace headrace
