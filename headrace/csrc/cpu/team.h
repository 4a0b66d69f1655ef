// Threads that do a sequence of phases together, without going to sleep in between: one wake-up for a whole step.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "operators.h"

namespace headrace {

// The members are torch's own threads. Every member calls `share`, `share_parts` and `wait` equally often and in the same order.
class Team {
 public:
  // f(team, member) on each member, of which there are team.size().
  template <class F>
  static void run(int64_t size, const F& f) {
    Team team(size);
    if (size <= 1) return f(team, int64_t{0});
    torch::stable::parallel_for(0, size, 1, [&](int64_t begin, int64_t end) {
      // Torch may have fewer threads to give; then each call stands for several of the members asked for.
      if (begin == 0) team.size_.store((size + end - 1) / end, std::memory_order_release);
      int64_t members;
      while ((members = team.size_.load(std::memory_order_acquire)) == 0) sched_yield();
      f(team, begin * members / size);
    });
  }

  int64_t size() const { return std::max<int64_t>(1, size_.load(std::memory_order_relaxed)); }

  // f(begin, end) over [0, count) in pieces, each taken by whichever member comes first; then all wait for one another.
  template <class F>
  void share(int64_t count, int64_t piece, const F& f) {
    if (size() == 1) return count > 0 ? f(int64_t{0}, count) : void();
    std::atomic<int64_t>& taken = tickets()[0].taken;
    for (int64_t begin; (begin = taken.fetch_add(piece, std::memory_order_relaxed)) < count;) f(begin, std::min(begin + piece, count));
    wait();
  }

  // Of [0, count), what a member begins with in `share_parts`.
  int64_t part_begin(int64_t count, int64_t member) const { return count * member / size(); }

  // The same, but each member goes through a part of its own from the front, in pieces that become smaller down to `least`, and
  // then helps the others with theirs: memory is read in order, and where a member will begin is known before. No piece is
  // larger than `most`.
  template <class F>
  void share_parts(int64_t count, int64_t least, int64_t most, int64_t member, const F& f) {
    const int64_t members = size();
    if (members == 1) return count > 0 ? f(int64_t{0}, count) : void();
    for (int64_t i = 0; i < members; ++i) {
      const int64_t owner = (member + i) % members, first = part_begin(count, owner), end = part_begin(count, owner + 1);
      std::atomic<int64_t>& taken = tickets()[owner].taken;
      for (int64_t left; (left = end - first - taken.load(std::memory_order_relaxed)) > 0;) {
        const int64_t piece = std::max(least, std::min(most, left / (i == 0 ? 2 : 4))), begin = first + taken.fetch_add(piece, std::memory_order_relaxed);
        if (begin < end) f(begin, std::min(begin + piece, end));
      }
    }
    wait();
  }

  // Until all members are here.
  void wait() {
    const int64_t members = size();
    if (members == 1) return;
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
      arrived_.store(0, std::memory_order_relaxed);
      for (int64_t i = 0; i < members; ++i) tickets()[i].taken.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      generation_.notify_all();  // costs nothing while nobody sleeps
    } else {
      const auto is_over = [&] { return generation_.load(std::memory_order_acquire) != generation; };
      for (int i = 0; i < kSpins && !is_over(); ++i) relax();  // no sched_yield: it gives up a whole slice, and others get it
      while (!is_over()) generation_.wait(generation, std::memory_order_acquire);
    }
  }

 private:
  explicit Team(int64_t size) : asked_(std::max<int64_t>(size, 1)), tickets_(new Ticket[2 * asked_]) {}

  static constexpr int kSpins = 1 << 10;  // 20 to 60 us, longer than members are apart unless one had to leave its core

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  struct alignas(64) Ticket {
    std::atomic<int64_t> taken{0};
  };

  // Those of the phase that is on; the last to arrive clears them for the phase after the next.
  Ticket* tickets() { return tickets_.get() + (generation_.load(std::memory_order_relaxed) & 1) * asked_; }

  const int64_t asked_;
  const std::unique_ptr<Ticket[]> tickets_;  // one for each member, twice
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int64_t> size_{0};
};

}  // namespace headrace
