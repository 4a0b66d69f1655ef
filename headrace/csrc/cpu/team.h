// `Team`: threads that go through the phases of a step together, without leaving the parallel region in between. One
// wake-up serves a whole step. Knows neither torch nor kernels; operators.h starts one on torch's threads.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

// Tests widen races: HEADRACE_TEAM_DELAY() stands between the accesses that members race for.
#ifndef HEADRACE_TEAM_DELAY
#define HEADRACE_TEAM_DELAY() ((void)0)
#endif
#ifndef HEADRACE_TEAM_SPINS
#define HEADRACE_TEAM_SPINS (1 << 10)  // 20 to 60 us: members are closer unless one had to leave its core
#endif

namespace headrace {

// Sleep until a word has changed. The caller changes the word first and wakes afterwards. A sleeper compares under the
// same lock that `wake_all` takes (the kernel's, or `mutex_`), so a change is either seen before sleeping or followed
// by a wake-up. May return early: call it in a loop.
class SleepQueue {
 public:
#if defined(__linux__)
  void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);  // EINTR and EAGAIN are early returns
  }
  void wake_all(const std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
  }
  static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);
#else
  void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (word.load(std::memory_order_acquire) == value) changed_.wait(lock);
  }
  void wake_all(const std::atomic<uint32_t>&) {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
};

// Every member calls `share`, `share_parts` and `wait` equally often and in the same order.
class Team {
 public:
  // Run f(team, member) on each of team.size() members. parallel_for(size, g) calls g(begin, end) over [0, size) in
  // equal chunks, each on a thread of its own, all at the same time; it may make fewer chunks than `size`, each then
  // stands for one member. When a member throws, the others leave at their next `wait`, and its exception is rethrown
  // here.
  template <class ParallelFor, class F>
  static void run(int64_t size, const ParallelFor& parallel_for, const F& f) {
    Team team(size);
    if (size <= 1) return f(team, int64_t{0});
    parallel_for(size, [&](int64_t begin, int64_t end) {
      // Only the first chunk knows how many there are: the last one may be shorter.
      if (begin == 0) team.size_.store((size + end - 1) / end, std::memory_order_release);
      int64_t members;
      while ((members = team.size_.load(std::memory_order_acquire)) == 0) sched_yield();
      try {
        f(team, begin * members / size);
      } catch (const Abandoned&) {
      } catch (...) {
        team.abandon(std::current_exception());
      }
    });
    if (team.error_) std::rethrow_exception(team.error_);
  }

  int64_t size() const { return std::max<int64_t>(1, size_.load(std::memory_order_relaxed)); }

  // f(begin, end) over [0, count) in pieces, each taken by the member that comes first. Then all wait for one another.
  template <class F>
  void share(int64_t count, int64_t piece, const F& f) {
    if (size() == 1) return count > 0 ? f(int64_t{0}, count) : void();
    std::atomic<int64_t>& taken = tickets()[0].taken;
    for (int64_t begin; (begin = taken.fetch_add(piece, std::memory_order_relaxed)) < count;) {
      f(begin, std::min(begin + piece, count));
    }
    wait();
  }

  // Where in [0, count) a member begins in `share_parts`.
  int64_t part_begin(int64_t count, int64_t member) const { return count * member / size(); }

  // Like `share`, but each member first goes through a part of its own from the front, in pieces that shrink from
  // `most` to `least`, and then helps the others with theirs. So memory is read in order, and it is known before where
  // a member will begin.
  template <class F>
  void share_parts(int64_t count, int64_t least, int64_t most, int64_t member, const F& f) {
    const int64_t members = size();
    if (members == 1) return count > 0 ? f(int64_t{0}, count) : void();
    for (int64_t i = 0; i < members; ++i) {
      const int64_t owner = (member + i) % members;
      const int64_t first = part_begin(count, owner), end = part_begin(count, owner + 1);
      std::atomic<int64_t>& taken = tickets()[owner].taken;
      for (int64_t left; (left = end - first - taken.load(std::memory_order_relaxed)) > 0;) {
        const int64_t piece = std::max(least, std::min(most, left / (i == 0 ? 2 : 4)));
        const int64_t begin = first + taken.fetch_add(piece, std::memory_order_relaxed);
        if (begin < end) f(begin, std::min(begin + piece, end));
      }
    }
    wait();
  }

  // Until all members are here. Leaves by an exception, which `run` catches, when another member has thrown.
  void wait() {
    const int64_t members = size();
    if (members == 1) return;
    // The phase cannot move on before this member has arrived, so a relaxed load sees the current one.
    const uint32_t phase = state_.load(std::memory_order_relaxed) & ~kFlags;
    HEADRACE_TEAM_DELAY();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) return open(phase, members);
    uint32_t state;
    const auto is_over = [&] { return ((state = state_.load(std::memory_order_acquire)) & ~kSleeping) != phase; };
    // No sched_yield: since Linux 6.18 it gives up a whole time slice, and other programs get it.
    for (int i = 0; i < HEADRACE_TEAM_SPINS && !is_over(); ++i) relax();
    while (!is_over()) {
      HEADRACE_TEAM_DELAY();
      // The flag is set in the word that `open` exchanges. One word has one order of modifications: either the exchange
      // returns the flag and wakes us, or this compare-exchange fails and we see the new phase. With a count of
      // sleepers in a second word, a store of the phase that is still on its way could be missed together with the
      // sleeper.
      const uint32_t asleep = state | kSleeping;
      if (state != asleep && !state_.compare_exchange_weak(state, asleep, std::memory_order_relaxed)) continue;
      HEADRACE_TEAM_DELAY();
      sleepers_.sleep_while(state_, asleep);
    }
    if (state & kAbandoned) throw Abandoned{};
  }

 private:
  struct Abandoned {};  // unwinds a member whose team cannot go on
  struct alignas(64) Ticket {
    std::atomic<int64_t> taken{0};
  };

  explicit Team(int64_t size) : asked_(std::max<int64_t>(size, 1)), tickets_(new Ticket[2 * asked_]) {}

  // As the last to arrive: begin the next phase.
  void open(uint32_t phase, int64_t members) {
    arrived_.store(0, std::memory_order_relaxed);
    for (int64_t i = 0; i < members; ++i) tickets()[i].taken.store(0, std::memory_order_relaxed);
    HEADRACE_TEAM_DELAY();
    // kAbandoned cannot be lost here: a member that throws does not arrive, so nobody is the last one.
    const uint32_t before = state_.exchange(phase + kNextPhase, std::memory_order_acq_rel);
    HEADRACE_TEAM_DELAY();
    if (before & kSleeping) sleepers_.wake_all(state_);
  }

  // As a member that has thrown and will never arrive.
  void abandon(std::exception_ptr error) {
    if (has_error_.test_and_set(std::memory_order_relaxed)) return;
    error_ = std::move(error);  // read when the parallel region is over
    state_.fetch_or(kAbandoned, std::memory_order_acq_rel);
    HEADRACE_TEAM_DELAY();
    sleepers_.wake_all(state_);
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // The tickets of the current phase. The last to arrive clears them for the phase after the next.
  Ticket* tickets() {
    return tickets_.get() + (state_.load(std::memory_order_relaxed) & kNextPhase ? asked_ : int64_t{0});
  }

  // Bits of state_; those above kNextPhase count the phases and wrap around.
  static constexpr uint32_t kSleeping = 1, kAbandoned = 2, kFlags = kSleeping | kAbandoned, kNextPhase = 4;

  const int64_t asked_;
  const std::unique_ptr<Ticket[]> tickets_;  // [2, asked]: of even and of odd phases
  // On lines of their own: members write to the first while others poll the second.
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> state_{0};
  alignas(64) std::atomic<int64_t> size_{0};  // 0 until the first member has come
  SleepQueue sleepers_;
  std::atomic_flag has_error_ = ATOMIC_FLAG_INIT;
  std::exception_ptr error_;
};

}  // namespace headrace
