// Stress of csrc/cpu/team.h with random delays between the accesses that members race for. `team_stress MODE MEMBERS SECONDS`;
// ends with status 3 when nothing has moved for STALL_SECONDS. See test_team.py for the modes.
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

static constexpr int STALL_SECONDS = 5;

static uint64_t random_number() {
  static std::atomic<uint64_t> seeds{1};
  static thread_local uint64_t x = 0x9e3779b97f4a7c15u * seeds.fetch_add(1);
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return x;
}

// Mostly nothing or some hundred nanoseconds; sometimes long enough for all others to fall asleep.
static void delay() {
  const uint64_t r = random_number();
  if (r % 32 == 0) usleep(r / 32 % 100);
  else if (r % 32 == 1) sched_yield();
  else if (r % 4 == 2) for (uint64_t i = r / 4 % 1000; i > 0; --i) random_number();
}

#define HEADRACE_TEAM_DELAY() delay()
#define HEADRACE_TEAM_SPINS 4
#include "team.h"

static std::atomic<uint64_t> progress{0};

[[noreturn]] static void fail(const char* text) {
  std::printf("%s after %llu phases\n", text, static_cast<unsigned long long>(progress.load()));
  std::fflush(stdout);
  _exit(std::strcmp(text, "hung") == 0 ? 3 : 1);
}

static void watch() {
  uint64_t seen = ~uint64_t{0};
  for (int silent = 0; silent < 10 * STALL_SECONDS; usleep(100000)) {
    const uint64_t now = progress.load();
    silent = now == seen ? silent + 1 : 0, seen = now;
  }
  fail("hung");
}

// parallel_for of `threads` threads, which start at different times.
static auto on_threads(int64_t threads) {
  return [threads](int64_t size, const auto& f) {
    const int64_t chunk = (size + threads - 1) / threads;
    std::vector<std::thread> started;
    for (int64_t begin = chunk; begin < size; begin += chunk) {
      started.emplace_back([&f, begin, end = std::min(begin + chunk, size)] { delay(), f(begin, end); });
    }
    delay();
    f(int64_t{0}, std::min(chunk, size));
    for (std::thread& thread : started) thread.join();
  };
}

// All pieces of each phase are done once, and before the next one begins.
static void share_phases(int64_t members, int64_t threads) {
  constexpr int64_t kPhases = 500, kCount = 12;
  std::vector<std::atomic<int64_t>> done(kCount);
  headrace::Team::run(members, on_threads(threads), [&](headrace::Team& team, int64_t member) {
    for (int64_t phase = 0; phase < kPhases; ++phase) {
      const auto work = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          if (done[i].fetch_add(1) != phase) fail("a piece was done twice, or too early");
        }
      };
      phase % 2 ? team.share(kCount, 1, work) : team.share_parts(kCount, 1, 4, member, work);
      if (member == 0) ++progress;
    }
  });
  for (const auto& count : done) {
    if (count != kPhases) fail("a piece was left out");
  }
}

// One or two members throw somewhere; all come home, with one of their exceptions.
static void throw_somewhere(int64_t members) {
  const int64_t last = random_number() % 20, first = random_number() % members, second = random_number() % members;
  try {
    headrace::Team::run(members, on_threads(members), [&](headrace::Team& team, int64_t member) {
      for (int64_t phase = 0;; ++phase) {
        if (phase == last && (member == first || member == second)) throw std::runtime_error("thrown by a member");
        phase % 2 ? team.wait() : team.share_parts(8, 1, 4, member, [](int64_t, int64_t) { delay(); });
      }
    });
    fail("nothing was thrown");
  } catch (const std::runtime_error&) {
    ++progress;
  }
}

// The barrier of before: the phase in one word, the count of sleepers (libstdc++'s own, in std::atomic::wait) in another. The
// store of the phase may become visible after the load of the count, as any processor's store buffer allows; here it does.
class TwoWords {
 public:
  void wait(int64_t members) {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1) + 1 == members) {
      arrived_.store(0);
      const bool has_sleepers = sleeping_.load() != 0;
      delay();
      phase_.store(phase + 1);
      if (has_sleepers) queue_.wake_all(phase_);
      return;
    }
    while (phase_.load() == phase) {
      delay();
      sleeping_.fetch_add(1);
      delay();
      queue_.sleep_while(phase_, phase);
      sleeping_.fetch_sub(1);
    }
  }

 private:
  std::atomic<int64_t> arrived_{0}, sleeping_{0};
  std::atomic<uint32_t> phase_{0};
  headrace::SleepQueue queue_;
};

static void wait_with_two_words(int64_t members) {
  TwoWords barrier;
  on_threads(members)(members, [&](int64_t begin, int64_t) {
    for (int64_t phase = 0; phase < 500; ++phase) {
      delay(), barrier.wait(members);
      if (begin == 0) ++progress;
    }
  });
}

int main(int, char** arguments) {
  const std::string mode = arguments[1];
  const int64_t members = std::atoll(arguments[2]);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(arguments[3]));
  std::thread(watch).detach();
  while (std::chrono::steady_clock::now() < end) {
    if (mode == "phases") share_phases(members, members);
    else if (mode == "fewer") share_phases(members, 1 + random_number() % members);
    else if (mode == "throw") throw_somewhere(members);
    else if (mode == "two-words") wait_with_two_words(members);
    else fail("no such mode");
  }
  std::printf("%llu phases\n", static_cast<unsigned long long>(progress.load()));
  std::fflush(stdout);
  _exit(0);
}
