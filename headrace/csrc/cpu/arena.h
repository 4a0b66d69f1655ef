// Scratch memory, laid out again for every step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace headrace {

// A bump allocator of the calling thread, reset by `reserve`.
class Arena {
 public:
  void reserve(size_t bytes) {
    if (size_ < bytes + 64) {
      memory_.reset();
      memory_.reset(new char[size_ = bytes + 64]);
    }
    at_ = memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64);
  }
  char* take(size_t bytes) {
    char* start = at_;
    at_ += rounded(bytes);
    return start;
  }
  static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  std::unique_ptr<char[]> memory_;
  size_t size_ = 0;
  char* at_ = nullptr;
};

}  // namespace headrace
