// paged_attention: see layers/attention/contract.py for what it computes. Here the work is dealt out to threads.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "attention.h"
#include "operators.h"

HEADRACE_TABLE_AMX(AttentionKernels, attention_kernels)

namespace headrace {

// Memory of one thread, kept from call to call.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  float* floats(int64_t size) {
    if (size > size_) {
      std::free(memory_);
      size_ = padded(size);
      memory_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
    }
    STD_TORCH_CHECK(memory_, "cannot allocate scratch memory");
    return memory_;
  }
  static Scratch& of_this_thread() {
    static thread_local Scratch scratch;
    return scratch;
  }

 private:
  float* memory_ = nullptr;
  int64_t size_ = 0;
};

// One-token requests: their keys, in blocks, are laid end to end and cut into equal shares, one a thread. A request that
// lies in several shares gives partial results, which are merged afterwards. Where there are too few blocks for all
// threads, kv heads are laid end to end too, some at a time.
class Decodes {
 public:
  explicit Decodes(const Attention& a) : a_(a), kernels_(best_attention_kernels()) {}

  void add(int64_t request) {
    const int64_t length = a_.kv_lens[request], first = a_.window > 0 ? std::max<int64_t>(0, length - a_.window) : 0;
    entries_.push_back({request, first, length, num_blocks_});
    num_blocks_ += blocks(entries_.back());
  }

  // Cuts the work into shares, as many as are worth a thread each, at most `most`. Each is to be run once, then all are joined.
  int64_t cut(int64_t most) {
    if (entries_.empty()) return 0;
    const int64_t block_values = kDecodeKeys * (a_.head_dim + a_.value_dim) * a_.num_kv_heads * (a_.group() + 1);
    shares_ = std::clamp<int64_t>(num_blocks_ * block_values / kShareValues, 1, most);
    while (shares_ > 1 && sets_ * num_blocks_ < kBlocksPerShare * shares_ && sets_ < a_.num_kv_heads) do ++sets_; while (a_.num_kv_heads % sets_);
    partials_.resize(shares_ > 1 ? 2 * shares_ * partial_size(a_, heads()) : 0);
    pieces_.resize(2 * shares_);
    return shares_;
  }

  // Pieces: at most one that began in an earlier share, and one that goes on in a later.
  void run_share(int64_t share) {
    const int64_t size = partial_size(a_, heads());
    int64_t low = sets_ * num_blocks_ * share / shares_;
    const int64_t high = sets_ * num_blocks_ * (share + 1) / shares_;
    float* scratch = Scratch::of_this_thread().floats(size + kernels_.decode_scratch(a_, heads()));
    auto entry = std::upper_bound(entries_.begin(), entries_.end(), low, [&](int64_t at, const Entry& e) { return at < sets_ * e.start; }) - 1;
    while (low < high) {
      const int64_t all = blocks(*entry), at = low - sets_ * entry->start, block = at % all, count = std::min(all - block, high - low);
      const bool is_whole = count == all, is_begun = block > 0;
      float* partial = is_whole ? scratch : partials_.data() + (2 * share + (is_begun ? 0 : 1)) * size;
      const int64_t first = entry->first + block * kDecodeKeys;
      const KeyRange range{entry->request, at / all * heads(), heads(), first, std::min(first + count * kDecodeKeys, entry->length)};
      kernels_.decode(a_, range, partial, scratch + size);
      if (is_whole) kernels_.finish(a_, range, partial);
      else pieces_[2 * share + (is_begun ? 0 : 1)] = {&*entry, range, partial};
      low += count;
      if (low == sets_ * (entry->start + all)) ++entry;
    }
  }

  void join() {
    float* sum = nullptr;
    for (const Piece& piece : pieces_) {
      if (!piece.entry) continue;
      if (piece.range.first == piece.entry->first) sum = piece.partial;
      else kernels_.merge(a_, heads(), sum, piece.partial);
      if (piece.range.last == piece.entry->length) kernels_.finish(a_, piece.range, sum);
    }
  }

  void run() {
    const int64_t shares = cut(torch::stable::get_num_threads());
    const auto run_shares = [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) run_share(s);
    };
    if (shares <= 1) return run_shares(0, shares);
    torch::stable::parallel_for(0, shares, 1, run_shares);
    join();
  }

 private:
  static constexpr int64_t kShareValues = 1 << 16;  // fewer are not worth waking a thread
  static constexpr int64_t kBlocksPerShare = 4;

  struct Entry {
    int64_t request, first, length, start;  // start: the number of its first block among all
  };
  struct Piece {  // of one request and set of heads
    const Entry* entry = nullptr;
    KeyRange range;
    float* partial;
  };

  static int64_t blocks(const Entry& entry) { return (entry.length - entry.first + kDecodeKeys - 1) / kDecodeKeys; }
  int64_t heads() const { return a_.num_kv_heads / sets_; }

  const Attention& a_;
  const AttentionKernels& kernels_;
  std::vector<Entry> entries_;
  std::vector<Piece> pieces_;
  std::vector<float> partials_;
  int64_t num_blocks_ = 0, shares_ = 1, sets_ = 1;
};

// Requests with several queries: tiles of query rows, which threads take one after the other, the longest first.
class Tiles {
 public:
  explicit Tiles(const Attention& a) : a_(a), kernels_(best_attention_kernels()) {}

  void add(int64_t request) {
    requests_.push_back(request);
    num_rows_ += rows(request);
  }

  void run() {
    if (requests_.empty()) return;
    const int64_t threads = torch::stable::get_num_threads(), share = num_rows_ * a_.num_kv_heads / (kTilesPerThread * threads);
    const int64_t most = kernels_.tile_rows(a_), height = threads == 1 ? most : std::clamp<int64_t>(padded(share, 32), 32, most);
    for (const int64_t request : requests_)
      for (int64_t first = 0; first < rows(request); first += height)
        for (int64_t head = 0; head < a_.num_kv_heads; ++head) tiles_.push_back({request, head, first, std::min(height, rows(request) - first)});
    std::stable_sort(tiles_.begin(), tiles_.end(), [&](const Tile& x, const Tile& y) { return work(x) > work(y); });
    std::atomic<size_t> next{0};
    const auto take = [&](int64_t, int64_t) {
      float* scratch = Scratch::of_this_thread().floats(kernels_.tile_scratch(a_, height));
      for (size_t i; (i = next++) < tiles_.size();) kernels_.tile(a_, tiles_[i], scratch);
    };
    int64_t total = 0;
    for (const Tile& tile : tiles_) total += work(tile);
    if (total * (a_.head_dim + a_.value_dim) < kLeastWork) return take(0, 1);
    torch::stable::parallel_for(0, std::min<int64_t>(threads, tiles_.size()), 1, take);
  }

 private:
  static constexpr int64_t kTilesPerThread = 4, kLeastWork = 1 << 18;

  int64_t rows(int64_t request) const { return (a_.query_start[request + 1] - a_.query_start[request]) * a_.group(); }
  int64_t work(const Tile& tile) const {  // pairs of query rows and keys, windows aside
    const int64_t query_len = a_.query_start[tile.request + 1] - a_.query_start[tile.request];
    return tile.num_rows * (a_.kv_lens[tile.request] - query_len + (tile.first_row + tile.num_rows) / a_.group());
  }

  const Attention& a_;
  const AttentionKernels& kernels_;
  std::vector<int64_t> requests_;
  std::vector<Tile> tiles_;
  int64_t num_rows_ = 0;
};

inline void attend(const Attention& a, int64_t num_requests) {
  Decodes decodes(a);
  Tiles tiles(a);
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t query_len = a.query_start[r + 1] - a.query_start[r];
    if (query_len == 1 && a.group() <= kMostDecodeGroup) decodes.add(r);
    else if (query_len > 0) tiles.add(r);
  }
  decodes.run();
  tiles.run();
}

inline PageStrides strides_of(const Tensor& pages) { return {pages.stride(0), pages.stride(1), pages.stride(2)}; }

inline Tensor paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor query_start, Tensor kv_lens, Tensor page_table, double scale, double softcap,
                              int64_t window, std::optional<Tensor> sinks) {
  STD_TORCH_CHECK(q.dim() == 3 && q.stride(2) == 1 && q.stride(1) == q.size(2), "q must be [T, H, E], its heads one after the other");
  STD_TORCH_CHECK(k_pages.dim() == 4 && v_pages.dim() == 4 && k_pages.size(1) == v_pages.size(1) && k_pages.size(2) == v_pages.size(2) &&
                      k_pages.size(3) == q.size(2) && k_pages.stride(3) == 1 && v_pages.stride(3) == 1,
                  "pages must be [P, page, K, E] and [P, page, K, V]");
  const int64_t page_size = k_pages.size(1), num_kv_heads = k_pages.size(2), num_requests = kv_lens.size(0);
  STD_TORCH_CHECK((page_size & (page_size - 1)) == 0 && q.size(1) % num_kv_heads == 0, "page sizes are powers of two, H a multiple of K");
  for (const Tensor* t : {&query_start, &kv_lens, &page_table}) STD_TORCH_CHECK(t->scalar_type() == ScalarType::Int, "lengths and page tables are int32");
  STD_TORCH_CHECK(query_start.size(0) == num_requests + 1 && page_table.size(0) >= num_requests && query_start.is_contiguous() && kv_lens.is_contiguous() &&
                      (page_table.size(1) <= 1 || page_table.stride(1) == 1),
                  "one length and row of the page table for each request");
  STD_TORCH_CHECK(!sinks || (sinks->scalar_type() == ScalarType::Float && sinks->is_contiguous() && sinks->numel() == q.size(1)), "sinks must be float32 [H]");
  const int kv_type = float_type(k_pages);
  STD_TORCH_CHECK(kv_type == float_type(v_pages), "keys and values must be of one type");
  Tensor out = empty({q.size(0), q.size(1), v_pages.size(3)}, q);
  Attention a{pointer(q), q.stride(0), float_type(q), writable(out), pointer(k_pages), pointer(v_pages), kv_type, strides_of(k_pages), strides_of(v_pages)};
  while (int64_t{1} << a.page_bits < page_size) ++a.page_bits;
  a.table = pointer<int32_t>(page_table), a.table_stride = page_table.stride(0);
  a.query_start = pointer<int32_t>(query_start), a.kv_lens = pointer<int32_t>(kv_lens);
  a.num_heads = q.size(1), a.num_kv_heads = num_kv_heads, a.head_dim = q.size(2), a.value_dim = v_pages.size(3);
  a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap), a.window = window, a.sinks = pointer<float>(sinks);
  attend(a, num_requests);
  return out;
}

inline void define_attention(Library& m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor query_start, Tensor kv_lens, Tensor page_table, float scale, float softcap, int window, "
      "Tensor? sinks) -> Tensor");
}

inline void implement_attention(Library& m) { m.impl("paged_attention", TORCH_BOX(&paged_attention)); }

}  // namespace headrace
