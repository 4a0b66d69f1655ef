// decoder_layers: all layers of a decoder for the tokens of a step, in one call; see kernels/decoder_layers. The
// kernels are those of the separate operators; a `Team` goes through them phase by phase. M rows (tokens), D hidden
// size.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <optional>

#include "arena.h"
#include "attention_work.h"
#include "bind_experts.h"
#include "bind_rope.h"
#include "bind_rows.h"
#include "lora_work.h"
#include "route.h"

namespace headrace {

namespace layers {

// One row of the int64 table that kernels/decoder_layers/table.py writes: same fields, same order. Addresses are int64.
struct Product {
  int64_t words, scales, mins, format, outputs, inputs, bias, bias_type;
};
struct Norm {
  int64_t weight, type;  // address 0: no norm
};
struct Layer {
  Norm attention_norm, attention_post, mlp_norm, mlp_post;
  Product qkv, output, gate_up, down;
  int64_t cos_sin, rotary_dim, is_interleaved, q_norm, k_norm, head_norm_type;
  int64_t k_pages, v_pages, scales, page_type, page_size, group;
  int64_t num_heads, num_kv_heads, head_dim, window, sinks, activation;
  // MoE, else 0. `gate_up` and `down` are then the experts' matrices stacked by rows.
  int64_t num_experts, top_k, score, is_renormalised, choice_bias, num_groups, top_groups, group_best;
  Product router;
};
constexpr int64_t kFields = sizeof(Layer) / sizeof(int64_t);
struct Reals {
  double eps, offset, scale, softcap;
  double route_scale, limit, alpha, up_offset;  // MoE
};
constexpr int64_t kReals = sizeof(Reals) / sizeof(double);
struct Bank {  // one row of `banks`: the additions to one product of a layer, see lora.h
  int64_t a, b, ranks, ends, parts, most_ranks, inputs, outputs, form;
};
constexpr int kBanks = 4;  // of a layer: qkv, output, gate_up, down
struct Adapters {          // banks of all layers; rows with an adapter, and their slots
  const Bank* banks;
  const int64_t *order, *slots;
  int64_t count;
  std::vector<LowRankChunk> chunks;
};
struct Group {  // one row of `groups`: addresses of a cache group's slots [M] int64 and page table [R, *] int32
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

inline experts::Stack stack_of(const Product& p, int64_t num_experts) {
  return {weight_of(p), p.outputs / num_experts, at(p.bias), p.bias_type == kBFloat16};
}

// The requests of a step, or those whose last token alone goes through the last layer.
struct Requests {
  int64_t count;
  const int32_t *query_start, *kv_lens;  // [R + 1], [R]
};

struct Inputs {
  int type;
  int64_t rows, hidden_size;
  const int64_t* positions;
  const Group* groups;
  Requests requests;
  // Rows that the last layer computes after its KV writes, ascending, each a request of one token; null: all rows.
  const int64_t* places = nullptr;
  Requests wanted = {};
  Group wanted_group = {};
  const Adapters* adapters = nullptr;  // null: no row has one; never with experts or `places`
};

// What a member of the team passes from phase to phase. `rows` is the same for all members at any phase, as all must
// reach the same waits; the last layer may reduce it.
struct Member {
  Team& team;
  int64_t index, rows;

  // f(begin, end) over the rows in pieces. A member begins with the same rows in every phase, which its caches hold.
  template <class F>
  void share_rows(const F& f) const { share_parts(rows, 1 + rows / (kPieces * team.size()), f); }
  template <class F>
  void share_parts(int64_t count, int64_t piece, const F& f) const { team.share_parts(count, piece, piece, index, f); }

  static constexpr int64_t kPieces = 8;  // per member: a slow one holds up the others for one piece at most
};

// Activations between two products. One set for all members, or one per member when there are so few rows that each
// computes all of them itself: that takes less time than a barrier.
struct Buffers {
  char *residual, *normed, *values, *hidden;
  float *scales, *sums;
};

class Step {
 public:
  // `head`: the product after the layers, if the same team computes it.
  Step(const Layer* layers, const Reals* reals, int64_t num_layers, const Inputs& in, char* residual, char* branch,
       const Product* head = nullptr)
      : layers_(layers), reals_(reals), num_layers_(num_layers), in_(in), size_(in.type == kFloat32 ? 4 : 2),
        branch_(branch) {
    int64_t qkv = 0, heads = 0, gate_bytes = 0, hidden = 0, bytes = 0, work = 0, groups = 1;
    size_t routes = 0;
    const auto add_work = [&](const packed::Weight& weight, int64_t rows, int64_t times = 1) {
      work += times * weight.panels() * weight.num_words() * packed::kPanel * 4 * (1 + rows / 16);
    };
    const auto count = [&](const Product& product) {
      const packed::Weight weight = weight_of(product);
      groups = std::max(groups, weight.groups());
      bytes = std::max(bytes, packed::row_form_bytes(packed::RowForm::kFloat32, weight, in.rows));
      add_work(weight, in.rows);
    };
    if (head) count(*head);
    for (int64_t i = 0; i < num_layers; ++i) {
      const Layer& layer = layers[i];
      qkv = std::max(qkv, layer.qkv.outputs), heads = std::max(heads, layer.num_heads * layer.head_dim);
      for (const Product* p : {&layer.qkv, &layer.output}) count(*p);
      if (layer.num_experts) {
        count(layer.router);
        routes = std::max(routes, route_bytes(in.rows, layer));
        const int64_t chosen = std::min(layer.num_experts, in.rows * layer.top_k),
                      each = in.rows * layer.top_k / chosen;
        for (const Product* p : {&layer.gate_up, &layer.down})
          add_work(stack_of(*p, layer.num_experts).of(0), each, chosen);
        continue;
      }
      hidden = std::max(hidden, layer.down.inputs);
      gate_bytes = std::max(gate_bytes,
                            (is_gated_at_once(in, in.rows, layer) ? kRowBlock : in.rows) * layer.gate_up.outputs * size_);
      for (const Product* p : {&layer.gate_up, &layer.down}) count(*p);
    }
    num_members_ = std::clamp<int64_t>(work / ((num_layers + (head != nullptr)) * kMemberBytes), 1,
                                       torch::stable::get_num_threads());
    const auto row_bytes = [&](int64_t values) { return Arena::rounded(in_.rows * values * size_); };
    const size_t scale_bytes = Arena::rounded(in_.rows * groups * 4),
                 attention_bytes = row_bytes(qkv) + 2 * row_bytes(heads);
    is_apart_ = num_members_ > 1 && in.rows <= kFewRows && in.places == nullptr;
    buffers_.resize(is_apart_ ? num_members_ : 1);
    const size_t buffer_bytes = 2 * row_bytes(in.hidden_size) + Arena::rounded(bytes) + 2 * scale_bytes;
    const size_t shared_bytes =
        std::max<size_t>({attention_bytes, Arena::rounded(gate_bytes) + buffers_.size() * row_bytes(hidden), routes});
    const size_t reduced_bytes = Arena::rounded(most_reduced() * 4);
    static thread_local Arena arena;
    arena.reserve(buffers_.size() * buffer_bytes + shared_bytes + reduced_bytes);
    for (Buffers& buffers : buffers_) {
      char* const own = &buffers == buffers_.data() ? residual : arena.take(row_bytes(in.hidden_size));
      buffers = {own, arena.take(row_bytes(in.hidden_size)), arena.take(bytes), nullptr, nullptr, nullptr};
      buffers.scales = reinterpret_cast<float*>(arena.take(scale_bytes));
      buffers.sums = reinterpret_cast<float*>(arena.take(scale_bytes));
    }
    qkv_ = gates_ = arena.take(shared_bytes);  // shared: attention is over when the MLP begins
    reduced_ = reinterpret_cast<float*>(arena.take(reduced_bytes));
    q_ = qkv_ + row_bytes(qkv), attended_ = q_ + row_bytes(heads);
    for (size_t i = 0; i < buffers_.size(); ++i)
      buffers_[i].hidden = gates_ + Arena::rounded(gate_bytes) + i * row_bytes(hidden);
    for (int64_t i = 0; i < num_layers; ++i) plan_attention(layers[i], reals[i]);
  }

  int64_t num_members() const { return num_members_; }

  // Where a member reads the rows of the first layer [M, D], and f(begin, end) over those that it must write there.
  char* input(const Member& member) const { return buffers(member).residual; }
  template <class F>
  void over_rows(const Member& member, const F& f) const {
    is_apart_ ? f(int64_t{0}, member.rows) : member.share_rows(f);
  }

  // The input lies in the first member's buffers; members with their own copy it. Safe without a barrier: residuals
  // are first written in the first layer's MLP, waits later.
  void copy_input(const Member& member) const {
    if (buffers(member).residual != buffers_[0].residual)
      std::memcpy(buffers(member).residual, buffers_[0].residual, in_.rows * in_.hidden_size * size_);
  }

  // All layers, as one of the members. Leaves the last branch unadded: residual + branch is the result.
  void run(Member& member) {
    for (int64_t i = 0; i < num_layers_; ++i) run_layer(member, i);
  }

  // residual += branch, then norm(residual) in the form that the next product takes.
  void enter(const Member& member, const Norm& norm, const Reals& reals, bool has_branch, const Product& next) {
    const Buffers& own = buffers(member);
    NormRows rows{has_branch ? branch_ : own.residual, in_.hidden_size, has_branch ? own.residual : nullptr,
                  in_.hidden_size, at(norm.weight), static_cast<int>(norm.type), own.normed, in_.hidden_size,
                  static_cast<float>(reals.eps), static_cast<float>(reals.offset)};
    const packed::Weight weight = weight_of(next);
    over_rows(member, [&](int64_t begin, int64_t end) {
      for (int64_t last; begin < end; begin = last) {  // a few rows at a time stay in the L1 cache
        last = std::min(begin + 16, end);
        best_row_kernels().norm(in_.type, rows, begin, last);
        prepare_rows(member, weight, own.normed, begin, last);
      }
    });
  }

  // The output of `enter` as input of its `next`.
  packed::Rows entered(const Member& member, const packed::Weight& weight) const {
    return rows_of(member, weight, buffers(member).normed);
  }

 private:
  const Buffers& buffers(const Member& member) const { return buffers_[is_apart_ ? member.index : 0]; }

  void plan_attention(const Layer& layer, const Reals& reals) {
    const bool is_narrow = in_.places && &layer == layers_ + num_layers_ - 1;
    const Group& group = is_narrow ? in_.wanted_group : in_.groups[layer.group];
    const Requests& requests = is_narrow ? in_.wanted : in_.requests;
    const PageStrides strides{layer.page_size * layer.num_kv_heads * layer.head_dim,
                              layer.num_kv_heads * layer.head_dim, layer.head_dim};
    Attention& a =
        attentions_.emplace_back(Attention{q_, layer.num_heads * layer.head_dim, in_.type, attended_, at(layer.k_pages),
                                           at(layer.v_pages), static_cast<int>(layer.page_type), strides, strides});
    while (int64_t{1} << a.page_bits < layer.page_size) ++a.page_bits;
    a.table = at<int32_t>(group.page_table), a.table_stride = group.table_stride;
    a.query_start = requests.query_start, a.kv_lens = requests.kv_lens;
    a.num_heads = layer.num_heads, a.num_kv_heads = layer.num_kv_heads, a.head_dim = a.value_dim = layer.head_dim;
    a.scale = static_cast<float>(reals.scale), a.softcap = static_cast<float>(reals.softcap), a.window = layer.window,
    a.sinks = at<float>(layer.sinks);
    if (layer.page_type == kCodes) lay_out_codes(a, layer.page_size, at<float>(layer.scales));
    for (int64_t i = 0; !is_narrow && i < static_cast<int64_t>(works_.size()); ++i)
      if (is_alike(i, layer)) return works_.push_back(works_[i]);
    works_.push_back(std::make_shared<AttentionWork>(a, requests.count, num_members_));
  }

  // Whether the attention plan of layer i serves another layer.
  bool is_alike(int64_t i, const Layer& layer) const {
    const Layer& other = layers_[i];
    return other.group == layer.group && other.num_heads == layer.num_heads &&
           other.num_kv_heads == layer.num_kv_heads && other.head_dim == layer.head_dim &&
           other.window == layer.window && other.page_size == layer.page_size && other.page_type == layer.page_type;
  }

  void run_layer(Member& member, int64_t i) {
    const Layer& layer = layers_[i];
    const Reals& reals = reals_[i];
    const Buffers& own = buffers(member);
    enter(member, layer.attention_norm, reals, i > 0, layer.qkv);
    multiply_adapted(member, i, 0, layer.qkv, own.normed, qkv_);
    const RopeRows rope = rope_of(layer, reals);
    member.share_rows([&](int64_t begin, int64_t end) { best_rope_kernels().rope_write(rope, begin, end); });
    if (in_.places && i == num_layers_ - 1) narrow(member, layer.num_heads * layer.head_dim * size_);
    if (member.rows == 0) return;
    attend(member.team, attentions_[i], *works_[i]);
    prepare(member, layer.output, attended_);
    multiply_adapted(member, i, 1, layer.output, attended_, branch_);
    leave(member, layer.attention_post, reals);
    enter(member, layer.mlp_norm, reals, true, layer.num_experts ? layer.router : layer.gate_up);
    if (layer.num_experts) {
      mix(member, layer, reals);
    } else {
      gate(member, i);
      multiply_adapted(member, i, 3, layer.down, own.hidden, branch_);
    }
    leave(member, layer.mlp_post, reals);
  }

  // activation(gate) * up of the product with gate_up, in the form that `down` takes. Many rows: fused, block by block.
  void gate(const Member& member, int64_t i) {
    const Layer& layer = layers_[i];
    const packed::Weight weight = weight_of(layer.gate_up), down = weight_of(layer.down);
    const Buffers& own = buffers(member);
    const Activation activation = static_cast<Activation>(layer.activation);
    if (is_gated_at_once(in_, member.rows, layer)) {
      const packed::Output to{own.hidden, weight.outputs / 2, in_.type == kBFloat16, at(layer.gate_up.bias),
                              layer.gate_up.bias_type == kBFloat16};
      const GatedProduct product(weight, rows_of(member, weight, own.normed), to, in_.type, activation);
      member.share_parts(product.num_blocks(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) product.run(i);
      });
      return prepare(member, layer.down, own.hidden);
    }
    multiply_adapted(member, i, 2, layer.gate_up, own.normed, gates_);
    const int64_t size = weight.outputs / 2;  // intermediate size
    const GatedRows gated{gates_, 2 * size, own.hidden, size, activation};
    over_rows(member, [&](int64_t begin, int64_t end) {
      best_row_kernels().gate(in_.type, gated, begin, end);
      prepare_rows(member, down, own.hidden, begin, end);
    });
  }

  // Numbers that adapters reduce their rows to, for one product.
  int64_t most_reduced() const {
    int64_t most = 0;
    for (int64_t i = 0; in_.adapters && i < num_layers_ * kBanks; ++i)
      most = std::max(most, in_.adapters->banks[i].parts * in_.adapters->banks[i].most_ranks);
    return most ? most * in_.adapters->count : 0;
  }

  // A product, and what adapters add to it: `which` of layer i. Members reduce inputs before their share of the
  // product, which evens out who has more of that, and expand behind the wait at its end.
  void multiply_adapted(const Member& member, int64_t i, int which, const Product& product, const char* x, char* out) {
    if (!in_.adapters) return multiply(member, product, x, out);
    const Adapters& adapters = *in_.adapters;
    const Bank& bank = adapters.banks[i * kBanks + which];
    const LowRankWork work{
        in_.type,
        {{at(bank.a), at(bank.b), at<int64_t>(bank.ranks), at<int64_t>(bank.ends), bank.parts, bank.most_ranks,
          bank.inputs, bank.outputs, static_cast<BankForm>(bank.form)},
         x, bank.inputs, out, bank.outputs, false, adapters.order, adapters.slots, reduced_},
        adapters.chunks};
    const int64_t chunks = adapters.chunks.size(), panels = work.num_panels();
    work.shrink(member.team.part_begin(chunks, member.index), member.team.part_begin(chunks, member.index + 1));
    multiply(member, product, x, out);
    member.share_parts(panels, 1 + panels / (Member::kPieces * member.team.size()),
                       [&](int64_t begin, int64_t end) { work.expand(begin, end); });
  }

  // Scratch of a router: logits [M, X] float32, then ids [M, k] int64 and weights [M, k] float32.
  static size_t logit_bytes(int64_t rows, const Layer& layer) { return Arena::rounded(rows * layer.num_experts * 4); }
  static size_t route_bytes(int64_t rows, const Layer& layer) {
    return logit_bytes(rows, layer) + rows * layer.top_k * 12;
  }

  // Router and experts on the output of `enter`.
  void mix(const Member& member, const Layer& layer, const Reals& reals) {
    int64_t* const ids = reinterpret_cast<int64_t*>(gates_ + logit_bytes(member.rows, layer));
    const experts::Routes routes{reinterpret_cast<const float*>(gates_), ids,
                                 reinterpret_cast<float*>(ids + member.rows * layer.top_k)};
    const char* const normed = buffers(member).normed;
    multiply(member, layer.router, normed, gates_, false);
    const experts::Routing routing{layer.num_experts, layer.top_k, static_cast<experts::Score>(layer.score),
                                   layer.is_renormalised != 0, static_cast<float>(reals.route_scale),
                                   at<float>(layer.choice_bias), layer.num_groups, layer.top_groups, layer.group_best};
    member.share_rows([&](int64_t begin, int64_t end) { routes.fill(routing, begin, end); });
    const experts::Mixture mixture{
        stack_of(layer.gate_up, layer.num_experts),
        stack_of(layer.down, layer.num_experts),
        layer.num_experts,
        static_cast<Activation>(layer.activation),
        {static_cast<float>(reals.limit), static_cast<float>(reals.alpha), static_cast<float>(reals.up_offset)}};
    experts::Tokens tokens{in_.type, nullptr, nullptr, nullptr, 0, layer.top_k, in_.hidden_size};
    const int64_t step = experts::tokens_at_once(mixture, tokens), row_bytes = in_.hidden_size * size_;
    for (int64_t first = 0; first < member.rows; first += step) {
      member.team.share(1, 1, [&](int64_t, int64_t) {
        tokens.hidden = normed + first * row_bytes, tokens.ids = routes.ids + first * layer.top_k,
        tokens.weights = routes.weights + first * layer.top_k;
        tokens.count = std::min(step, member.rows - first);
        mixture_.emplace(mixture, tokens, branch_ + first * row_bytes, member.team.size());
      });
      mixture_->run(member.team, member.index);
    }
  }

  static bool is_gated_at_once(const Inputs& in, int64_t rows, const Layer& layer) {
    return !in.adapters && rows > kRowBlock && GatedProduct::suits(weight_of(layer.gate_up));
  }

  // After the last KV writes: queries and residuals of the rows still wanted move to the front. By one member, in
  // place: rows are ascending, so a row is never overwritten before it is read.
  void narrow(Member& member, int64_t query_bytes) {
    member.team.share(1, 1, [&](int64_t, int64_t) {
      const int64_t bytes = in_.hidden_size * size_;
      for (int64_t r = 0; r < in_.wanted.count; ++r) {
        std::memmove(q_ + r * query_bytes, q_ + in_.places[r] * query_bytes, query_bytes);
        std::memmove(buffers_[0].residual + r * bytes, buffers_[0].residual + in_.places[r] * bytes, bytes);
      }
    });
    member.rows = in_.wanted.count;
  }

  void attend(Team& team, const Attention& a, AttentionWork& work) {
    team.share(work.num_items(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work.run(a, i);
    });
    if (work.num_merges() == 0) return;
    team.share(work.num_merges(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work.merge(a, i);
    });
  }

  // The norm that some architectures have after a branch.
  void leave(const Member& member, const Norm& norm, const Reals& reals) {
    if (norm.weight == 0) return;
    char* const normed = buffers_[0].normed;
    const NormRows rows{branch_, in_.hidden_size, nullptr, 0, at(norm.weight), static_cast<int>(norm.type), normed,
                        in_.hidden_size, static_cast<float>(reals.eps), static_cast<float>(reals.offset)};
    member.share_rows([&](int64_t begin, int64_t end) {
      best_row_kernels().norm(in_.type, rows, begin, end);
      const int64_t step = in_.hidden_size * size_;
      std::copy(normed + begin * step, normed + end * step, branch_ + begin * step);
    });
  }

  RopeRows rope_of(const Layer& layer, const Reals& reals) const {
    return {qkv_, layer.qkv.outputs, in_.type, in_.positions, at<float>(layer.cos_sin),
            at<int64_t>(in_.groups[layer.group].slots), const_cast<void*>(at(layer.k_pages)),
            const_cast<void*>(at(layer.v_pages)), static_cast<int>(layer.page_type), q_, at(layer.q_norm),
            at(layer.k_norm), static_cast<int>(layer.head_norm_type), layer.num_heads, layer.num_kv_heads,
            layer.head_dim, layer.rotary_dim, layer.is_interleaved != 0, static_cast<float>(reals.eps),
            static_cast<float>(reals.offset), const_cast<float*>(at<float>(layer.scales)), layer.page_size};
  }

  packed::Rows rows_of(const Member& member, const packed::Weight& weight, const char* x) const {
    const Buffers& own = buffers(member);
    packed::Rows rows{best_packed_kernels().choose_form(weight, member.rows, in_.type == kBFloat16), member.rows,
                      own.values, own.scales, own.sums};
    const bool is_ready =
        rows.form == packed::RowForm::kFloat32 && in_.type == kFloat32 && weight.inputs == weight.padded();
    if (is_ready) rows.values = const_cast<char*>(x);
    return rows;
  }

  void prepare_rows(const Member& member, const packed::Weight& weight, const char* x, int64_t begin, int64_t end) {
    const packed::Rows rows = rows_of(member, weight, x);
    if (rows.values != x)
      best_packed_kernels().prepare(weight, {x, member.rows, weight.inputs, in_.type == kBFloat16}, rows, begin, end);
  }

  void prepare(const Member& member, const Product& product, const char* x) {
    const packed::Weight weight = weight_of(product);
    if (rows_of(member, weight, x).values == x) return;
    over_rows(member, [&](int64_t begin, int64_t end) { prepare_rows(member, weight, x, begin, end); });
  }

  void multiply(const Member& member, const Product& product, const char* x, char* out) {
    multiply(member, product, x, out, in_.type == kBFloat16);
  }
  void multiply(const Member& member, const Product& product, const char* x, char* out, bool is_half) {
    const packed::Weight weight = weight_of(product);
    const packed::Rows rows = rows_of(member, weight, x);
    const packed::Output to{out, weight.outputs, is_half, at(product.bias), product.bias_type == kBFloat16};
    const int64_t pairs = (weight.panels() + 1) / 2, pair_bytes = 2 * weight.num_words() * packed::kPanel * 4;
    const int64_t height = is_expanded(weight, rows.form) ? member.rows : block_rows(weight, rows.form, member.rows),
                  blocks = (member.rows + height - 1) / height;
    const int64_t least = std::min(pairs, kPieceBytes / (pair_bytes * (1 + std::min(member.rows, height) / 16))) + 1;
    if (blocks == 1) {
      return member.team.share_parts(pairs, least, pairs, member.index, [&](int64_t begin, int64_t end) {
        multiply_block(weight, rows, to, 0, member.rows, begin, end);
      });
    }
    const int64_t piece = std::max(pairs * blocks / (Member::kPieces * member.team.size()), least),
                  pieces = (pairs + piece - 1) / piece;
    member.share_parts(blocks * pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / pieces * height, pair = i % pieces * piece;
        multiply_block(weight, rows, to, row, std::min(row + height, member.rows), pair, std::min(pair + piece, pairs));
      }
    });
  }

  static void multiply_block(const packed::Weight& weight, const packed::Rows& rows, const packed::Output& to,
                             int64_t row, int64_t last_row, int64_t pair, int64_t last_pair) {
    best_packed_kernels().multiply(weight, rows, to, row, last_row, 2 * pair, std::min(2 * last_pair, weight.panels()));
  }

  static constexpr int64_t kFewRows = 2;
  static constexpr int64_t kMemberBytes =
      128 * 1024;  // of weights per layer and member: with less, members would mostly wait
  static constexpr int64_t kPieceBytes = 32 * 1024;  // of weights; less is not worth an atomic operation

  const Layer* layers_;
  const Reals* reals_;
  int64_t num_layers_;
  Inputs in_;
  int64_t size_, num_members_ = 1;
  bool is_apart_ = false;  // each member has buffers of its own
  char *branch_, *qkv_, *q_, *attended_, *gates_;
  float* reduced_;  // of the rows with an adapter
  std::vector<Buffers> buffers_;
  std::deque<Attention> attentions_;
  std::vector<std::shared_ptr<AttentionWork>> works_;
  std::optional<experts::Step> mixture_;  // the current one, shared by all members
};

inline void check_table(const Tensor& table, const Tensor& reals) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Long && table.is_contiguous() && table.size(1) == kFields,
                  "the table does not match this library's layout");
  STD_TORCH_CHECK(reals.scalar_type() == ScalarType::Double && reals.is_contiguous() &&
                      reals.size(0) == table.size(0) && reals.size(1) == kReals,
                  "the reals do not match this library's layout");
}

inline Adapters adapters_of(const std::optional<Tensor>& banks, const Tensor& rows, int64_t num_layers, int64_t count) {
  STD_TORCH_CHECK(banks && banks->scalar_type() == ScalarType::Long && banks->is_contiguous() &&
                      banks->numel() == num_layers * kBanks * static_cast<int64_t>(sizeof(Bank) / sizeof(int64_t)),
                  "the banks do not match this library's layout");
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Long && rows.is_contiguous() && rows.dim() == 2 &&
                      rows.size(0) == 2,
                  "adapter_rows must be int64 [2, n]");
  const int64_t *order = pointer<int64_t>(rows), *slots = order + rows.size(1);
  for (int64_t i = 0; i < rows.size(1); ++i)
    STD_TORCH_CHECK(order[i] >= 0 && order[i] < count && slots[i] >= 0, "no such row or slot");
  return {pointer<Bank>(*banks), order, slots, rows.size(1), chunks_of(slots, rows.size(1))};
}

}  // namespace layers

inline layers::Requests requests_of(const Tensor& query_start, const Tensor& kv_lens) {
  STD_TORCH_CHECK(query_start.scalar_type() == ScalarType::Int && kv_lens.scalar_type() == ScalarType::Int &&
                      query_start.is_contiguous() && kv_lens.is_contiguous() &&
                      query_start.numel() == kv_lens.numel() + 1,
                  "query_start [R + 1] and kv_lens [R] must be contiguous int32");
  return {kv_lens.numel(), pointer<int32_t>(query_start), pointer<int32_t>(kv_lens)};
}

// x [M, D] becomes the residual; returns the last branch [M, D]. With `places` [S], only their first S rows are valid.
inline Tensor decoder_layers(Tensor table, Tensor reals, Tensor groups, Tensor x, Tensor positions, Tensor query_start,
                             Tensor kv_lens, std::optional<Tensor> places, std::optional<Tensor> wanted_query_start,
                             std::optional<Tensor> wanted_kv_lens, std::optional<Tensor> wanted_table,
                             std::optional<Tensor> banks, std::optional<Tensor> adapter_rows) {
  layers::check_table(table, reals);
  STD_TORCH_CHECK(groups.scalar_type() == ScalarType::Long && groups.is_contiguous() && groups.size(1) == 3,
                  "groups must be int64 [G, 3]");
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && positions.numel() == x.size(0),
                  "x must be [M, D], contiguous, with positions [M]");
  Tensor branch = empty({x.size(0), x.size(1)}, x);
  layers::Inputs in{float_type(x), x.size(0), x.size(1), pointer<int64_t>(positions), pointer<layers::Group>(groups),
                    requests_of(query_start, kv_lens)};
  if (places) {
    in.wanted = requests_of(*wanted_query_start, *wanted_kv_lens);
    STD_TORCH_CHECK(places->scalar_type() == ScalarType::Long && places->is_contiguous() &&
                        places->numel() == in.wanted.count && wanted_table->size(0) == in.wanted.count,
                    "places must be [S] int64, with S rows of the page table");
    in.places = pointer<int64_t>(*places);
    in.wanted_group = {0, reinterpret_cast<int64_t>(pointer<int32_t>(*wanted_table)), wanted_table->stride(0)};
  }
  layers::Adapters adapters{};
  if (adapter_rows) {
    STD_TORCH_CHECK(!places, "rows with adapters are not narrowed");
    adapters = layers::adapters_of(banks, *adapter_rows, table.size(0), in.rows);
    in.adapters = &adapters;
  }
  layers::Step step(pointer<layers::Layer>(table), pointer<layers::Reals>(reals), table.size(0), in, writable<char>(x),
                    writable<char>(branch));
  run_team(step.num_members(), [&](Team& team, int64_t index) {
    layers::Member member{team, index, in.rows};
    step.copy_input(member);
    step.run(member);
  });
  return branch;
}

inline void define_layers(Library& m) {
  m.def(
      "decoder_layers(Tensor table, Tensor reals, Tensor groups, Tensor(a!) x, Tensor positions, Tensor query_start, "
      "Tensor kv_lens, Tensor? places, Tensor? wanted_query_start, Tensor? wanted_kv_lens, Tensor? wanted_table, "
      "Tensor? banks, Tensor? adapter_rows) -> Tensor");
}

inline void implement_layers(Library& m) { m.impl("decoder_layers", TORCH_BOX(&decoder_layers)); }

}  // namespace headrace
