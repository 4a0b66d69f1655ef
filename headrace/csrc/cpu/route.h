// Top-k routing: experts of a token and their weights; see ROUTE in kernels/moe. X experts, k experts per token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace headrace::experts {

enum class Score : int64_t { kSoftmax = 0, kSigmoid = 1, kSqrtSoftplus = 2 };

struct Routing {
  int64_t num_experts, top_k;
  Score score;
  bool is_renormalised;
  float scale;
  const float* choice_bias;  // [X], or null
  int64_t num_groups, top_groups, group_best;
};

class Router {
 public:
  explicit Router(const Routing& routing)
      : routing_(routing),
        is_plain_(routing.score == Score::kSoftmax && routing.choice_bias == nullptr && routing.num_groups == 1),
        scores_(routing.num_experts), choice_(routing.num_experts) {}

  // Logits [X] of a token to ids and weights [k]. No expert is chosen twice, whatever the logits are.
  void route(const float* logits, int64_t* ids, float* weights) {
    const int64_t k = routing_.top_k;
    if (is_plain_) {  // the highest logits have the highest scores
      choose(logits, routing_.num_experts, k, ids);
      // Renormalised, the softmax over all experts is that over those that were chosen.
      const double all = routing_.is_renormalised ? 0.0 : sum_powers(logits, logits[ids[0]]);
      double sum = 0.0;
      for (int64_t i = 0; i < k; ++i) sum += weights[i] = std::exp(logits[ids[i]] - logits[ids[0]]);
      return scale(weights, routing_.scale / (routing_.is_renormalised ? sum : all));
    }
    find_scores(logits);
    const float* choice = scores_.data();
    if (routing_.choice_bias || routing_.num_groups > 1) {
      for (int64_t x = 0; x < routing_.num_experts; ++x)
        choice_[x] = scores_[x] + (routing_.choice_bias ? routing_.choice_bias[x] : 0.0f);
      if (routing_.num_groups > 1) keep_best_groups();
      choice = choice_.data();
    }
    choose(choice, routing_.num_experts, k, ids);
    double sum = 0.0;
    for (int64_t i = 0; i < k; ++i) sum += weights[i] = scores_[ids[i]];
    scale(weights, routing_.is_renormalised ? routing_.scale / (sum + kLeastSum) : routing_.scale);
  }

 private:
  static constexpr double kLeastSum = 1e-20;  // matters only where every chosen score is 0

  // The greatest of `count` values, in falling order.
  static void choose(const float* values, int64_t count, int64_t most, int64_t* ids) {
    int64_t found = 0;
    for (int64_t x = 0; x < count; ++x) {
      if (found == most && !(values[x] > values[ids[most - 1]])) continue;
      int64_t at = found < most ? found++ : most - 1;
      for (; at > 0 && values[x] > values[ids[at - 1]]; --at) ids[at] = ids[at - 1];
      ids[at] = x;
    }
  }

  double sum_powers(const float* logits, float top) const {
    return std::accumulate(logits, logits + routing_.num_experts, 0.0,
                           [&](double sum, float x) { return sum + std::exp(x - top); });
  }

  void find_scores(const float* logits) {
    const int64_t count = routing_.num_experts;
    if (routing_.score == Score::kSoftmax) {
      const float top = *std::max_element(logits, logits + count);
      const double sum = sum_powers(logits, top);
      for (int64_t x = 0; x < count; ++x) scores_[x] = static_cast<float>(std::exp(logits[x] - top) / sum);
    } else if (routing_.score == Score::kSigmoid) {
      for (int64_t x = 0; x < count; ++x) scores_[x] = 1.0f / (1.0f + std::exp(-logits[x]));
    } else {
      for (int64_t x = 0; x < count; ++x)
        scores_[x] = std::sqrt(std::max(logits[x], 0.0f) + std::log1p(std::exp(-std::fabs(logits[x]))));
    }
  }

  // -inf wherever the group is not among the best.
  void keep_best_groups() {
    const int64_t groups = routing_.num_groups, width = routing_.num_experts / groups;
    worth_.resize(groups), best_.resize(std::max(width, groups));
    for (int64_t g = 0; g < groups; ++g) {
      choose(choice_.data() + g * width, width, routing_.group_best, best_.data());
      worth_[g] = 0.0f;
      for (int64_t i = 0; i < routing_.group_best; ++i) worth_[g] += choice_[g * width + best_[i]];
    }
    choose(worth_.data(), groups, routing_.top_groups, best_.data());
    for (int64_t g = 0; g < groups; ++g)
      if (std::find(best_.data(), best_.data() + routing_.top_groups, g) == best_.data() + routing_.top_groups)
        std::fill_n(choice_.data() + g * width, width, -std::numeric_limits<float>::infinity());
  }

  void scale(float* weights, double factor) const {
    for (int64_t i = 0; i < routing_.top_k; ++i) weights[i] = static_cast<float>(weights[i] * factor);
  }

  const Routing routing_;
  const bool is_plain_;
  std::vector<float> scores_, choice_, worth_;
  std::vector<int64_t> best_;
};

// The tokens of a step: logits [T, X] to ids and weights [T, k].
struct Routes {
  const float* logits;
  int64_t* ids;
  float* weights;

  void fill(const Routing& routing, int64_t begin, int64_t end) const {
    Router router(routing);
    for (int64_t i = begin; i < end; ++i)
      router.route(logits + i * routing.num_experts, ids + i * routing.top_k, weights + i * routing.top_k);
  }
};

}  // namespace headrace::experts
