// The attention of one step as pieces of work, which the members of a team take one by one. Planned once for all layers
// that are alike; each layer then runs the pieces over its own pages. Three kinds of pieces:
//   - tiles of the query rows of requests with several queries;
//   - tiles of the queries of many requests with one query each, over pages that all of them begin with: read once;
//   - ranges of keys of requests with one query, those of a request that are not read in common.
// A request that was divided has several partial results, which are joined afterwards.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
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

class AttentionWork {
 public:
  // `a` is any of the layers that are alike: same page table, lengths, heads and window.
  AttentionWork(const Attention& a, int64_t num_requests, int64_t num_members) : kernels_(best_attention_kernels()), members_(num_members) {
    std::vector<int64_t> decodes, others;
    for (int64_t r = 0; r < num_requests; ++r) {
      const int64_t query_len = a.query_start[r + 1] - a.query_start[r];
      if (query_len == 1 && a.group() <= kMostDecodeGroup) decodes.push_back(r);
      else if (query_len > 0) others.push_back(r);
    }
    add_tiles(a, others);
    for (const int64_t r : decodes) entries_.push_back({r, a.window > 0 ? std::max<int64_t>(0, a.kv_lens[r] - a.window) : 0, a.kv_lens[r]});
    if (a.window == 0) find_common(a, decodes);
    add_common(a);
    add_ranges(a);
    std::stable_sort(items_.begin(), items_.end(), [](const Item& x, const Item& y) { return x.cost > y.cost; });
    partials_.resize(num_floats_);
  }

  int64_t num_items() const { return items_.size(); }
  // About the products of a query with a key, all of them.
  int64_t cost() const {
    int64_t sum = 0;
    for (const Item& item : items_) sum += item.cost;
    return sum;
  }
  int64_t num_joins() const { return joins_.size(); }

  // Any member may run any item.
  void run(const Attention& a, int64_t i) {
    const Item& item = items_[i];
    switch (item.kind) {
      case Kind::kTile: return kernels_.tile(a, item.tile, Scratch::of_this_thread().floats(kernels_.tile_scratch(a, item.tile.num_rows)));
      case Kind::kCommon: return run_common(a, item);
      case Kind::kRanges: return run_ranges(a, item);
    }
  }

  // The i-th request, or some heads of it, that has several partial results; once all items have run.
  void join(const Attention& a, int64_t i) {
    const Join& join = joins_[i];
    if (join.parts.empty()) return;  // these heads were not divided
    const int64_t heads = join.range.num_heads;
    float* sum = partials_.data() + join.parts.front();
    for (size_t p = 1; p < join.parts.size(); ++p) kernels_.merge(a, heads, sum, partials_.data() + join.parts[p]);
    if (join.common >= 0) {
      const Common& common = commons_[join.common];
      float* part = Scratch::of_this_thread().floats(partial_size(a, heads));
      for (int64_t chunk = 0; chunk < common.num_chunks; ++chunk) {
        pick_common(a, common, chunk, join, part);
        kernels_.merge(a, heads, sum, part);
      }
    }
    kernels_.finish(a, join.range, sum);
  }

 private:
  static constexpr int64_t kTilesPerMember = 4;
  static constexpr int64_t kShareValues = 1 << 16;  // fewer are not worth a piece of their own
  static constexpr int64_t kBlocksPerShare = 4;
  static constexpr int64_t kLeastCommonKeys = 64, kLeastCommonRows = 8;  // from which one tile is faster than a range for each request
  static constexpr int64_t kLeastChunk = 256;                            // keys

  enum class Kind { kTile, kCommon, kRanges };
  struct Item {
    Kind kind;
    int64_t cost;  // about the products of a query with a key
    Tile tile{};
    int64_t index = 0, chunk = 0, kv_head = 0;  // of a common tile
    int64_t first = 0, last = 0;                // pieces
  };
  struct Entry {  // keys of a request with one query that it does not read in common
    int64_t request, first, length, start = 0, first_join = -1, common = -1, member = 0;  // start: the number of its first block among all
  };
  struct Piece {
    KeyRange range;
    int64_t part;  // where its partial result goes, -1: it is the whole
  };
  struct Join {
    KeyRange range;
    std::vector<int64_t> parts;
    int64_t common, member;
  };
  struct Common {  // requests that begin with the same `length` keys
    std::vector<int64_t> entries;
    int64_t length, num_chunks = 1, part = 0;
  };

  static int64_t blocks(const Entry& entry) { return (entry.length - entry.first + kDecodeKeys - 1) / kDecodeKeys; }

  int64_t take(int64_t floats) {
    const int64_t start = num_floats_;
    num_floats_ += floats;
    return start;
  }

  void add_tiles(const Attention& a, const std::vector<int64_t>& requests) {
    const auto rows = [&](int64_t r) { return (a.query_start[r + 1] - a.query_start[r]) * a.group(); };
    int64_t num_rows = 0;
    for (const int64_t r : requests) num_rows += rows(r);
    const int64_t most = kernels_.tile_rows(a), share = num_rows * a.num_kv_heads / (kTilesPerMember * members_);
    const int64_t highest = members_ == 1 ? most : std::clamp<int64_t>(padded(share, 32), 32, most);
    for (const int64_t r : requests) {
      const int64_t before = a.kv_lens[r] - rows(r) / a.group(), height = even_height(rows(r), highest, a.num_kv_heads);
      for (int64_t first = 0; first < rows(r); first += height) {
        const int64_t count = std::min(height, rows(r) - first);
        for (int64_t head = 0; head < a.num_kv_heads; ++head)
          items_.push_back({Kind::kTile, count * (before + (first + count) / a.group()), {r, head, first, count}});
      }
    }
  }

  // Of the tiles of a request, no higher than `highest`, such that all members get as many where that takes few more of them.
  int64_t even_height(int64_t rows, int64_t highest, int64_t num_kv_heads) const {
    const int64_t least = (rows + highest - 1) / highest, most = least > 1 ? least + std::max<int64_t>(1, least / 3) : 1;
    for (int64_t count = least; count <= most; ++count)
      if (count * num_kv_heads % members_ == 0) return padded((rows + count - 1) / count, 32);
    return highest;
  }

  // How many pages two requests begin with that are the same.
  static int64_t count_equal(const Attention& a, int64_t r, int64_t other, int64_t most) {
    const int32_t *pages = a.table + r * a.table_stride, *others = a.table + other * a.table_stride;
    return std::mismatch(pages, pages + most, others).first - pages;
  }

  // Requests are put in the order of their pages, so that those alike lie side by side, and are taken together as long as
  // that saves more keys than it costs those who are already together.
  void find_common(const Attention& a, const std::vector<int64_t>& requests) {
    const int64_t page = int64_t{1} << a.page_bits, most = kernels_.tile_rows(a) / a.group();
    const auto whole = [&](int64_t e) { return (entries_[e].length - 1) / page; };  // at least one key stays its own
    std::vector<int64_t> order(requests.size());
    for (size_t e = 0; e < order.size(); ++e) order[e] = e;
    std::sort(order.begin(), order.end(), [&](int64_t x, int64_t y) {
      const int64_t shorter = std::min(whole(x), whole(y)), equal = count_equal(a, entries_[x].request, entries_[y].request, shorter);
      if (equal == shorter) return whole(x) != whole(y) ? whole(x) < whole(y) : x < y;
      return a.table[entries_[x].request * a.table_stride + equal] < a.table[entries_[y].request * a.table_stride + equal];
    });
    for (size_t i = 0; i < order.size();) {
      int64_t pages = whole(order[i]), count = 1;
      for (; i + count < order.size() && count < most; ++count) {
        const int64_t next = order[i + count], equal = count_equal(a, entries_[order[i]].request, entries_[next].request, std::min(pages, whole(next)));
        if (equal * count < pages * (count - 1)) break;
        pages = equal;
      }
      if (count > 1 && pages * page >= kLeastCommonKeys && count * a.group() >= kLeastCommonRows) {
        commons_.push_back({{order.begin() + i, order.begin() + i + count}, pages * page});
        for (int64_t m = 0; m < count; ++m) {
          Entry& entry = entries_[order[i + m]];
          entry.first = pages * page, entry.common = commons_.size() - 1, entry.member = m;
        }
      }
      i += count;
    }
  }

  static Attention as_tile(const Attention& a, int64_t num_rows) {
    Attention tile = a;
    tile.num_heads = num_rows, tile.num_kv_heads = 1, tile.q_stride = num_rows * a.head_dim, tile.sinks = nullptr;
    return tile;
  }
  int64_t common_rows(const Attention& a, const Common& common) const { return common.entries.size() * a.group(); }
  int64_t common_part(const Attention& a, const Common& common, int64_t chunk, int64_t kv_head) const {
    return common.part + (chunk * a.num_kv_heads + kv_head) * partial_size(as_tile(a, common_rows(a, common)), 1);
  }

  void add_common(const Attention& a) {
    for (size_t i = 0; i < commons_.size(); ++i) {
      Common& common = commons_[i];
      const int64_t wanted = kTilesPerMember * members_ / (a.num_kv_heads * commons_.size());
      common.num_chunks = members_ == 1 ? 1 : std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, common.length / kLeastChunk));
      common.part = take(common.num_chunks * a.num_kv_heads * partial_size(as_tile(a, common_rows(a, common)), 1));
      for (int64_t chunk = 0; chunk < common.num_chunks; ++chunk)
        for (int64_t head = 0; head < a.num_kv_heads; ++head) {
          Item item{Kind::kCommon, common_rows(a, common) * common.length / common.num_chunks};
          item.index = i, item.chunk = chunk, item.kv_head = head;
          items_.push_back(item);
        }
    }
  }

  // Blocks of keys of all requests, laid end to end, are cut into equal shares; where there are few of them, kv heads are
  // laid end to end too, some at a time.
  void add_ranges(const Attention& a) {
    if (entries_.empty()) return;
    int64_t num_blocks = 0;
    for (Entry& entry : entries_) entry.start = num_blocks, num_blocks += blocks(entry);
    const int64_t block_values = kDecodeKeys * (a.head_dim + a.value_dim) * a.num_kv_heads * (a.group() + 1);
    const int64_t shares = members_ == 1 ? 1 : std::clamp<int64_t>(num_blocks * block_values / kShareValues, 1, 2 * members_);
    int64_t sets = 1;
    while (shares > 1 && sets * num_blocks < kBlocksPerShare * shares && sets < a.num_kv_heads) do ++sets; while (a.num_kv_heads % sets);
    const int64_t heads = a.num_kv_heads / sets;
    size_t e = 0;
    for (int64_t share = 0; share < shares; ++share) {
      int64_t low = sets * num_blocks * share / shares;
      const int64_t high = sets * num_blocks * (share + 1) / shares;
      Item item{Kind::kRanges, (high - low) * kDecodeKeys * heads * a.group()};
      item.first = pieces_.size();
      while (low < high) {
        Entry& entry = entries_[e];
        const int64_t all = blocks(entry), at = low - sets * entry.start, block = at % all, count = std::min(all - block, high - low);
        const int64_t first = entry.first + block * kDecodeKeys;
        const KeyRange range{entry.request, at / all * heads, heads, first, std::min(first + count * kDecodeKeys, entry.length)};
        pieces_.push_back({range, count == all && entry.common < 0 ? -1 : add_part(a, entry, range, at / all, sets)});
        low += count;
        if (low == sets * (entry.start + all)) ++e;
      }
      item.last = pieces_.size();
      items_.push_back(item);
    }
  }

  int64_t add_part(const Attention& a, Entry& entry, const KeyRange& range, int64_t set, int64_t sets) {
    if (entry.first_join < 0) {
      entry.first_join = joins_.size();
      for (int64_t s = 0; s < sets; ++s) joins_.push_back({{entry.request, s * range.num_heads, range.num_heads, 0, 0}, {}, entry.common, entry.member});
    }
    const int64_t part = take(partial_size(a, range.num_heads));
    joins_[entry.first_join + set].parts.push_back(part);
    return part;
  }

  // The queries of all rows are laid side by side, as if they were the heads of one query that sees the chunk's keys alone.
  void run_common(const Attention& a, const Item& item) {
    const Common& common = commons_[item.index];
    const int64_t rows = common_rows(a, common), heads_bytes = a.group() * a.head_dim * type_bytes(a.q_type);
    Attention tile = as_tile(a, rows);
    float* scratch = Scratch::of_this_thread().floats(padded(rows * a.head_dim) + kernels_.tile_scratch(tile, rows));
    char* q = reinterpret_cast<char*>(scratch);
    for (const int64_t e : common.entries) {
      const int64_t token = a.query_start[entries_[e].request];
      memcpy(q, static_cast<const char*>(a.q) + token * a.q_stride * type_bytes(a.q_type) + item.kv_head * heads_bytes, heads_bytes);
      q += heads_bytes;
    }
    const int64_t blocks = (common.length + kDecodeKeys - 1) / kDecodeKeys, first = blocks * item.chunk / common.num_chunks * kDecodeKeys;
    const int32_t query_start[] = {0, 1}, last = std::min(common.length, blocks * (item.chunk + 1) / common.num_chunks * kDecodeKeys);
    tile.q = scratch, tile.query_start = query_start, tile.kv_lens = &last, tile.window = first > 0 ? last - first : 0;
    tile.k = static_cast<const char*>(a.k) + item.kv_head * a.k_strides.head * type_bytes(a.kv_type);
    tile.v = static_cast<const char*>(a.v) + item.kv_head * a.v_strides.head * type_bytes(a.kv_type);
    tile.table = a.table + entries_[common.entries.front()].request * a.table_stride, tile.table_stride = 0;
    tile.partial = partials_.data() + common_part(a, common, item.chunk, item.kv_head);
    kernels_.tile(tile, {0, 0, 0, rows}, scratch + padded(rows * a.head_dim));
  }

  void run_ranges(const Attention& a, const Item& item) {
    for (int64_t p = item.first; p < item.last; ++p) {
      const Piece& piece = pieces_[p];
      const int64_t size = partial_size(a, piece.range.num_heads);
      float* scratch = Scratch::of_this_thread().floats(size + kernels_.decode_scratch(a, piece.range.num_heads));
      float* partial = piece.part < 0 ? scratch : partials_.data() + piece.part;
      kernels_.decode(a, piece.range, partial, scratch + size);
      if (piece.part < 0) kernels_.finish(a, piece.range, partial);
    }
  }

  // What a chunk gave for the heads of one request, as a partial result of its own.
  void pick_common(const Attention& a, const Common& common, int64_t chunk, const Join& join, float* part) const {
    const int64_t group = a.group(), rows = common_rows(a, common), width = padded(a.value_dim), heads = join.range.num_heads * group;
    for (int64_t k = 0; k < join.range.num_heads; ++k) {
      const float* from = partials_.data() + common_part(a, common, chunk, join.range.first_head + k);
      const int64_t row = join.member * group;
      std::copy_n(from + row, group, part + k * group);
      std::copy_n(from + rows + row, group, part + heads + k * group);
      std::copy_n(from + padded(2 * rows) + row * width, group * width, part + padded(2 * heads) + k * group * width);
    }
  }

  static int64_t type_bytes(int type) { return type == kFloat32 ? 4 : 2; }

  const AttentionKernels& kernels_;
  int64_t members_;
  std::vector<Entry> entries_;
  std::vector<Common> commons_;
  std::vector<Piece> pieces_;
  std::vector<Join> joins_;
  std::vector<Item> items_;
  std::vector<float> partials_;
  int64_t num_floats_ = 0;
};

}  // namespace headrace
