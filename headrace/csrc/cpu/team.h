// Threads that do a sequence of phases together, without going to sleep in between: one wake-up for a whole step.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "operators.h"

namespace headrace {

// The members are torch's own threads. Every member calls `share` and `wait` equally often and in the same order.
class Team {
 public:
  // f(team) on each member.
  template <class F>
  static void run(int64_t size, const F& f) {
    Team team;
    if (size <= 1) return f(team);
    torch::stable::parallel_for(0, size, 1, [&](int64_t begin, int64_t end) {
      // Torch may have fewer threads to give; then each call stands for several of the members asked for.
      if (begin == 0) team.size_.store((size + end - 1) / end, std::memory_order_release);
      while (team.size_.load(std::memory_order_acquire) == 0) sched_yield();
      f(team);
    });
  }

  int64_t size() const { return std::max<int64_t>(1, size_.load(std::memory_order_relaxed)); }

  // f(begin, end) over [0, count) in pieces, each taken by whichever member comes first; then all wait for one another.
  template <class F>
  void share(int64_t count, int64_t piece, const F& f) {
    if (size() == 1) return count > 0 ? f(int64_t{0}, count) : void();
    std::atomic<int64_t>& taken = tickets_[generation_.load(std::memory_order_relaxed) & 1].taken;
    for (int64_t begin; (begin = taken.fetch_add(piece, std::memory_order_relaxed)) < count;) f(begin, std::min(begin + piece, count));
    wait();
  }

  // Until all members are here.
  void wait() {
    const int64_t members = size();
    if (members == 1) return;
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
      arrived_.store(0, std::memory_order_relaxed);
      tickets_[generation & 1].taken.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      generation_.notify_all();  // costs nothing while nobody sleeps
    } else {
      const auto is_over = [&] { return generation_.load(std::memory_order_acquire) != generation; };
      for (int i = 0; i < kSpins && !is_over(); ++i) relax();
      while (!is_over()) generation_.wait(generation, std::memory_order_acquire);
    }
  }

 private:
  static constexpr int kSpins = 1 << 10;  // 20 to 60 us, longer than members are apart unless one had to leave its core

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  struct alignas(64) Ticket {
    std::atomic<int64_t> taken{0};
  };

  Ticket tickets_[2];
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int64_t> size_{0};
};

}  // namespace headrace
