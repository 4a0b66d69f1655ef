// compiled with: rows.cpp
#include "sample.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "lanes.h"

namespace headrace::HEADRACE_ISA {

static constexpr float kForbidden = -std::numeric_limits<float>::infinity();
static constexpr float kDeepest =
    87.0f;  // logits further below the best than that have no weight that sampling could notice
static constexpr int kWord = 32;
static constexpr int64_t kBlock = 64;  // greatest logit and sum of weights are kept per block

// Greatest of the logits seen so far, before (`raw`) and after (`best`) masking.
struct Found {
  Vec raw = Vec(kForbidden), best = Vec(kForbidden);
  uint32_t broken = 0;
};

HEADRACE_INLINE void mask_word(float* x, uint32_t bits, Found& found) {
  const Vec forbidden(kForbidden);
  for (int i = 0; i < kWord; i += kLanes) {
    const Vec value = load(x + i);
    found.raw = maximum(value, found.raw);
    found.broken |= not_numbers(value);
    if (bits == ~0u) {
      found.best = maximum(value, found.best);
      continue;
    }
    const Vec kept = by_bits(bits >> i, value, forbidden);
    store(x + i, kept);
    found.best = maximum(kept, found.best);
  }
}

static void argmax_row(const ArgmaxRows& a, int64_t row) {
  float* x = a.logits + row * a.stride;
  const int64_t num_words = (a.vocab + kWord - 1) / kWord, whole = a.vocab / kWord;
  const int64_t place = a.masks ? a.mask_of_row[row] : -1;
  const int32_t* mask = place >= 0 ? a.masks + place * num_words : nullptr;
  float raw = kForbidden, best = kForbidden;
  int64_t best_at = 0;
  uint32_t broken = 0, broken_after = 0;
  for (int64_t at = 0; at < whole;
       at += kWord) {  // 32 words at a time: where the greatest is, is looked up once it is known
    const int64_t end = std::min<int64_t>(at + kWord, whole);
    Found found;
    for (int64_t word = at; word < end; ++word)
      mask_word(x + word * kWord, mask ? static_cast<uint32_t>(mask[word]) : ~0u, found);
    raw = std::max(raw, largest(found.raw));
    broken |= found.broken;
    const float greatest = largest(found.best);
    if (greatest > best) best = greatest, best_at = at * kWord;
  }
  const int64_t rest_begin = whole * kWord;
  float rest = kForbidden;
  for (int64_t i = rest_begin; i < a.vocab; ++i) {
    broken |= x[i] != x[i];
    raw = x[i] > raw ? x[i] : raw;
    if (mask && !(static_cast<uint32_t>(mask[i / kWord]) >> (i % kWord) & 1)) x[i] = kForbidden;
    rest = x[i] > rest ? x[i] : rest;
  }
  if (rest > best) best = rest, best_at = rest_begin;
  if (broken)  // rare: some of them may have been forbidden
    for (int64_t i = 0; i < a.vocab; ++i) broken_after |= x[i] != x[i];
  int64_t id = best_at;
  while (id < a.vocab && x[id] != best) ++id;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  a.raw[row] = broken ? nan : raw;
  a.values[row] = broken_after ? nan : best;
  a.ids[row] = id < a.vocab ? id : 0;
}

static void argmax(const ArgmaxRows& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) argmax_row(a, row);
}

// Samples one row. Scaled logits are logits / temperature, each rounded once.
class Sampler {
 public:
  Sampler(std::vector<float>& room, const float* logits, int64_t vocab, double temperature)
      : x_(logits), vocab_(vocab), num_blocks_((vocab + kBlock - 1) / kBlock),
        temperature_(static_cast<float>(temperature)) {
    room.resize(2 * num_blocks_ + vocab + kLanes);
    bests_ = room.data(), sums_ = bests_ + num_blocks_, kept_ = sums_ + num_blocks_;
    best_ = kForbidden;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      Vec greatest(kForbidden);
      over_block(block, [&](int64_t i, auto part, uint32_t lanes) {
        greatest = maximum(by_bits(lanes, part.load(x_ + i), Vec(kForbidden)), greatest);
      });
      bests_[block] = largest(greatest) / temperature_;
      best_ = std::max(best_, bests_[block]);
    }
    cut_ = best_ - kDeepest;
  }

  bool is_possible() const { return best_ - best_ == 0.0f; }

  void cut_by_share(double min_p) { cut_ = std::max(cut_, best_ + static_cast<float>(log(min_p))); }

  // Keep the `top_k` greatest if that is above 0, and of these the fewest that reach `top_p` of their sum. Ties stay.
  void cut_by_rank(int64_t top_k, double top_p) {
    if (top_k > 0) {
      const int64_t count = std::min(top_k, collect(bound_of(top_k)));
      if (!count) return;
      std::nth_element(kept_, kept_ + count - 1, kept_ + num_kept_, std::greater<float>());
      if (num_kept_ >= top_k) cut_ = std::max(cut_, kept_[count - 1]);
      if (top_p < 1.0) cut_ = std::max(cut_, lowest_of(count, top_p * weigh(kept_, count)));
    } else if (top_p < 1.0) {
      const double wanted = top_p * weigh_blocks();
      for (float depth = 1.0f;; depth *= 2.0f) {
        const float bound = std::max(cut_, best_ - depth);
        const int64_t count = collect(bound);
        if (bound == cut_ || weigh(kept_, count) >= wanted)
          return void(cut_ = std::max(cut_, lowest_of(count, wanted)));
      }
    }
  }

  // Inverse CDF: the first token at which the running sum of weights exceeds `uniform` of the total.
  int64_t find(double uniform) {
    const double target = uniform * weigh_blocks();
    double before = 0.0;
    int64_t last = 0;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      if (!(sums_[block] > 0.0f)) continue;
      const bool is_here = before + static_cast<double>(sums_[block]) > target;
      double reached = before;
      if (is_here || is_last(block)) {
        float weights[kBlock + kLanes];
        over_block(block, [&](int64_t i, auto part, uint32_t lanes) {
          store(weights + i - block * kBlock, weights_at(i, part, lanes));
        });
        for (int64_t i = 0; i < std::min(kBlock, vocab_ - block * kBlock); ++i) {
          if (weights[i] > 0.0f) last = block * kBlock + i;
          reached += static_cast<double>(weights[i]);
          if (reached > target) return block * kBlock + i;
        }
        if (is_here) return last;  // sums in another order were a little more
      }
      before += static_cast<double>(sums_[block]);
    }
    return last;
  }

 private:
  template <class F>
  HEADRACE_INLINE void over_block(int64_t block, const F& f) const {
    const int64_t begin = block * kBlock, end = std::min(begin + kBlock, vocab_);
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) f(i, Whole{}, ~0u);
    if (i < end) f(i, Rest{static_cast<int>(end - i)}, (1u << (end - i)) - 1);
  }

  template <class Part>
  HEADRACE_INLINE Vec weights_at(int64_t i, Part part, uint32_t lanes) const {
    const Vec scaled = part.load(x_ + i) / Vec(temperature_);
    return by_bits(at_least(scaled, Vec(cut_)) & lanes, exp(scaled - Vec(best_)), Vec(0.0f));
  }

  // The weight of all that is kept, and of each block.
  double weigh_blocks() {
    double total = 0.0;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      sums_[block] = 0.0f;
      if (!(bests_[block] >= cut_)) continue;
      Vec weight(0.0f);
      over_block(block, [&](int64_t i, auto part, uint32_t lanes) { weight = weight + weights_at(i, part, lanes); });
      sums_[block] = sum(weight);
      total += static_cast<double>(sums_[block]);
    }
    return total;
  }

  bool is_last(int64_t block) const {
    while (++block < num_blocks_)
      if (sums_[block] > 0.0f) return false;
    return true;
  }

  // At most what the `top_k`-th greatest is: so many blocks' greatest are no less.
  float bound_of(int64_t top_k) {
    if (top_k > num_blocks_) return cut_;
    std::copy(bests_, bests_ + num_blocks_, kept_);
    std::nth_element(kept_, kept_ + top_k - 1, kept_ + num_blocks_, std::greater<float>());
    return std::max(cut_, kept_[top_k - 1]);
  }

  // The scaled logits from `bound` up, into `kept_`; returns how many.
  int64_t collect(float bound) {
    num_kept_ = 0;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      if (!(bests_[block] >= bound)) continue;
      over_block(block, [&](int64_t i, auto part, uint32_t lanes) {
        const Vec scaled = part.load(x_ + i) / Vec(temperature_);
        uint32_t chosen = at_least(scaled, Vec(bound)) & lanes;
        if (!chosen) return;
        float values[kLanes];
        store(values, scaled);
        for (; chosen; chosen &= chosen - 1) kept_[num_kept_++] = values[__builtin_ctz(chosen)];
      });
    }
    return num_kept_;
  }

  double weigh(const float* values, int64_t count) const {
    double total = 0.0;
    for (int64_t begin = 0; begin < count; begin += kBlock) {  // in short sums, whose rounding does not add up
      Vec weight(0.0f);
      const int64_t size = std::min(kBlock, count - begin);
      over_lanes(size, [&](int64_t i, auto part) {
        const uint32_t lanes = size - i < kLanes ? (1u << (size - i)) - 1 : ~0u;
        weight = weight + by_bits(lanes, exp(part.load(values + begin + i) - Vec(best_)), Vec(0.0f));
      });
      total += static_cast<double>(sum(weight));
    }
    return total;
  }

  // The least of the first `count` in `kept_` before which, greatest first, there is less weight than `wanted`.
  float lowest_of(int64_t count, double wanted) {
    int64_t begin = 0, end = count;
    double before = 0.0;
    if (!count) return cut_;
    while (end - begin > 1) {
      const int64_t middle = begin + (end - begin) / 2;
      std::nth_element(kept_ + begin, kept_ + middle, kept_ + end, std::greater<float>());
      const double upper = weigh(kept_ + begin, middle - begin);
      if (before + upper >= wanted) {
        end = middle;
      } else {
        before += upper, begin = middle;
      }
    }
    return kept_[begin];
  }

  const float* x_;
  const int64_t vocab_, num_blocks_;
  const float temperature_;
  float best_, cut_;  // both scaled
  float *bests_, *sums_, *kept_;
  int64_t num_kept_ = 0;
};

static uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// In [0, 1): SplitMix64's finaliser over the seed, then over seed and position (Steele, Lea, Flood: Fast splittable
// pseudorandom number generators, OOPSLA 2014).
static double uniform(int64_t seed, int64_t position) {
  const uint64_t golden = 0x9E3779B97F4A7C15u;
  const uint64_t bits = mix(mix(static_cast<uint64_t>(seed) + golden) + (static_cast<uint64_t>(position) + 1) * golden);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

static void sample(const SampleRows& a, int64_t begin, int64_t end) {
  std::vector<float> room;
  for (int64_t row = begin; row < end; ++row) {
    Sampler sampler(room, a.logits + row * a.stride, a.vocab, a.temperature[row]);
    a.ids[row] = 0;
    if (!sampler.is_possible()) continue;
    if (a.min_p[row] > 0.0) sampler.cut_by_share(a.min_p[row]);
    sampler.cut_by_rank(a.top_k[row], a.top_p[row]);
    a.ids[row] = sampler.find(uniform(a.seed[row], a.position[row]));
  }
}

extern const SampleKernels sample_kernels;
const SampleKernels sample_kernels = {argmax, sample};

}  // namespace headrace::HEADRACE_ISA
