// The attention of one step as pieces of work, which the members of a team take one by one. Planned once for all layers
// of equal shape; each layer then runs the pieces over its own pages. Three kinds of pieces:
//   - tiles of query rows of requests with several queries, over all their keys, or those after a shared prefix;
//   - tiles of query rows of many requests over the pages of their shared prefix, which is read once;
//   - ranges of keys (split KV) of requests with few queries, after a shared prefix if there is one.
// Of a request that was divided all chunks of keys have a partial result, and are merged afterwards; those before the
// first cut are merged already. Cuts are at borders of chunks, so the result of a row does not depend on them: neither
// on the number of threads, nor on the other requests, nor on how many queries come at once (attention.h).
//
// Few queries are computed one by one, as decodes.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention.h"
#include "operators.h"

namespace headrace {

// Scratch of one thread, kept from call to call.
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

// Strides of int8 pages, whose heads lie within lots of tokens (codes.h).
inline void lay_out_codes(Attention& a, int64_t page_size, const float* scales) {
  const int64_t lot = page_size < 16 ? page_size : 16;
  a.k_strides.head = lot * a.head_dim, a.v_strides.head = lot * a.value_dim;
  a.scales = scales, a.scale_strides = {2 * a.num_kv_heads * page_size, a.num_kv_heads * page_size};
}

class AttentionWork {
 public:
  // `a` is any of the layers of equal shape: same page table, lengths, heads and window.
  AttentionWork(const Attention& a, int64_t num_requests, int64_t num_members)
      : kernels_(best_attention_kernels()), members_(num_members), chunk_keys_(kernels_.chunk_keys(a)) {
    std::vector<Member> members;  // requests that may have a shared prefix
    std::vector<int64_t> others;
    for (int64_t r = 0; r < num_requests; ++r) {
      const int64_t query_len = a.query_start[r + 1] - a.query_start[r], rows = query_rows(a, r);
      const bool is_decode = query_len <= kFewQueries && a.group() <= kMostDecodeGroup;
      if (query_len == 0) continue;
      if (is_decode || rows <= kFewRows) {
        const int64_t pages = (a.kv_lens[r] - query_len) >> a.page_bits;
        members.push_back({r, is_decode ? static_cast<int64_t>(entries_.size()) : -1, pages, rows});
      }
      if (is_decode) add_entries(a, r, query_len);
      else others.push_back(r);
    }
    if (a.window == 0) find_common(a, std::move(members), others);
    add_tiles(a, others);
    add_common(a);
    add_ranges(a);
    std::stable_sort(items_.begin(), items_.end(), [](const Item& x, const Item& y) { return x.cost > y.cost; });
    partials_.resize(num_floats_);
  }

  int64_t num_items() const { return items_.size(); }
  // About the number of products of a query with a key.
  int64_t cost() const {
    int64_t sum = 0;
    for (const Item& item : items_) sum += item.cost;
    return sum;
  }
  int64_t num_merges() const { return merges_.size(); }

  // Any member may run any item.
  void run(const Attention& a, int64_t i) {
    const Item& item = items_[i];
    switch (item.kind) {
      case Kind::kTile: return run_tile(a, item.tile);
      case Kind::kOwn: return run_own(a, item);
      case Kind::kCommon: return run_common(a, item);
      case Kind::kRanges: return run_ranges(a, item);
    }
  }

  // Merge the partial results of the i-th divided request, or some heads of it. Only after all items have run.
  void merge(const Attention& a, int64_t i) {
    const Merge& merge = merges_[i];
    if (merge.parts.empty()) return;  // these heads were not divided
    const int64_t count = merge.rows.count;
    const auto part = [&](size_t p, int64_t row) {
      return partial_at(a, partials_.data() + merge.parts[p], count, row);
    };
    if (merge.common >= 0) return merge_common(a, merge, part);
    for (size_t p = 1; p < merge.parts.size(); ++p) kernels_.merge(a, count, part(0, 0), part(p, 0));
    kernels_.finish(a, merge.rows, part(0, 0));
  }

 private:
  static constexpr int64_t kTilesPerMember = 4;
  static constexpr int64_t kShareValues = 1 << 16;  // fewer are not worth a piece of their own
  static constexpr int64_t kChunksPerShare = 4;
  static constexpr int64_t kFewQueries = 4;  // of a request: so many are computed one by one
  static constexpr int64_t kLeastCommonRows = 8;  // from which one tile is faster than a range for each request
  static constexpr int64_t kLeastPiece = 256;     // keys of a shared prefix
  static constexpr int64_t kLeastHeight = 384;  // rows, for which it pays to lay out the same keys once more
  static constexpr int64_t kFewRows = 48;       // of a kv head: requests with more read all keys alone

  enum class Kind { kTile, kOwn, kCommon, kRanges };
  struct Item {
    Kind kind;
    int64_t cost;  // about the products of a query with a key
    Tile tile{};
    int64_t index = 0, piece = 0, kv_head = 0;  // of a common tile; for own keys the index is that of a merge
    int64_t first = 0, last = 0;                // pieces; rows of a common tile
  };
  struct Entry {  // keys of a query of a request with few, after its shared prefix
    int64_t request, token, first, length, start = 0, first_merge = -1, common = -1,
                                    first_row = 0;  // start: the number of its first chunk among all
  };
  struct Piece {
    int64_t token;
    KeyRange range;
    int64_t part = -1, step = 0;  // where partial results go, -1: it is the whole; from chunk to chunk, 0: merged
  };
  struct Merge {  // some kv heads of a request; of each lie as many rows together, in the common part from `first_row`
                 // on
    PartialRows rows;
    int64_t first_head, num_heads;
    std::vector<int64_t> parts;
    int64_t common, first_row;
  };
  struct Member {
    int64_t request, entry, pages, num_rows;  // entry: of its first query, -1 for many; pages: that it can share
  };
  struct Common {  // requests with the same first `length` keys, whole chunks
    std::vector<Member> members;
    int64_t length, num_rows = 0;
    std::vector<int64_t> starts;  // keys where its pieces begin, and the end
    int64_t part = 0;             // [parts, K]: of the first piece one, of each chunk of the others
  };
  struct Shared {  // the shared prefix of a request with several queries
    int64_t request, common, first_row;
  };

  void add_entries(const Attention& a, int64_t request, int64_t query_len) {
    for (int64_t i = 0; i < query_len; ++i) {
      const int64_t length = a.kv_lens[request] - query_len + i + 1;
      const int64_t first = a.window > 0 ? std::max<int64_t>(0, length - a.window) : 0;
      entries_.push_back({request, a.query_start[request] + i, first, length});
    }
  }

  int64_t chunk_of(int64_t key) const { return key / chunk_keys_; }
  // Those that hold keys [first, last).
  int64_t chunks(int64_t first, int64_t last) const { return chunk_of(last - 1) - chunk_of(first) + 1; }
  int64_t chunks(const Entry& entry) const { return chunks(entry.first, entry.length); }

  int64_t take(int64_t floats) {
    const int64_t start = num_floats_;
    num_floats_ += floats;
    return start;
  }

  static int64_t query_rows(const Attention& a, int64_t r) {
    return (a.query_start[r + 1] - a.query_start[r]) * a.group();
  }

  void add_tiles(const Attention& a, const std::vector<int64_t>& requests) {
    int64_t num_rows = 0;
    for (const int64_t r : requests) num_rows += query_rows(a, r);
    const int64_t most = kernels_.tile_rows(a), share = num_rows * a.num_kv_heads / (kTilesPerMember * members_);
    const int64_t highest = members_ == 1 ? most : std::clamp<int64_t>(padded(share, 32), 32, most);
    for (const int64_t r : requests) {
      const int64_t rows = query_rows(a, r), before = a.kv_lens[r] - rows / a.group(),
                    height = even_height(rows, highest, a.num_kv_heads);
      for (int64_t first = 0; first < rows; first += height) {
        const int64_t count = std::min(height, rows - first);
        for (int64_t head = 0; head < a.num_kv_heads; ++head)
          items_.push_back({Kind::kTile, count * (before + (first + count) / a.group()), {r, head, first, count}});
      }
    }
    for (const Shared& shared : shared_) add_own(a, shared);
  }

  // Keys of a request after its shared prefix: all rows of a kv head in one tile.
  void add_own(const Attention& a, const Shared& shared) {
    const int64_t r = shared.request, rows = query_rows(a, r), length = commons_[shared.common].length;
    for (int64_t head = 0; head < a.num_kv_heads; ++head) {
      Item item{Kind::kOwn, rows * (a.kv_lens[r] - length), {r, head, 0, rows}};
      item.index = merges_.size();
      items_.push_back(item);
      merges_.push_back({{a.query_start[r], head * a.group(), a.group(), rows}, head, 1, {}, shared.common,
                         shared.first_row});
      for (int64_t i = 0; i < chunks(length, a.kv_lens[r]); ++i)
        merges_.back().parts.push_back(take(partial_size(a, rows)));
    }
  }

  // Of the tiles of a request, no higher than `highest`, such that all members get as many where that takes few more of
  // them.
  int64_t even_height(int64_t rows, int64_t highest, int64_t num_kv_heads) const {
    const int64_t least = (rows + highest - 1) / highest,
                  most = least > 1 ? least + std::max<int64_t>(1, least / 3) : 1;
    for (int64_t count = least; count <= most; ++count)
      if (count * num_kv_heads % members_ == 0) return padded((rows + count - 1) / count, 32);
    return highest;
  }

  // Pages of the common prefix of two requests.
  static int64_t count_equal(const Attention& a, int64_t r, int64_t other, int64_t most) {
    const int32_t *pages = a.table + r * a.table_stride, *others = a.table + other * a.table_stride;
    return std::mismatch(pages, pages + most, others).first - pages;
  }

  // Sorts requests by their pages, so that those with a common prefix are neighbours, and groups neighbours as long as
  // that saves more key reads than the shorter common prefix costs the group. Removes grouped requests from `others`.
  void find_common(const Attention& a, std::vector<Member> all, std::vector<int64_t>& others) {
    const int64_t page = int64_t{1} << a.page_bits;
    std::stable_sort(all.begin(), all.end(), [&](const Member& x, const Member& y) {
      const int64_t shorter = std::min(x.pages, y.pages), equal = count_equal(a, x.request, y.request, shorter);
      if (equal == shorter) return x.pages < y.pages;
      return a.table[x.request * a.table_stride + equal] < a.table[y.request * a.table_stride + equal];
    });
    for (size_t i = 0; i < all.size();) {
      int64_t pages = all[i].pages, count = 1, rows = all[i].num_rows;
      for (; i + count < all.size(); ++count) {
        const Member& next = all[i + count];
        const int64_t equal = count_equal(a, all[i].request, next.request, std::min(pages, next.pages));
        if (equal * count < pages * (count - 1)) break;
        pages = equal, rows += next.num_rows;
      }
      const int64_t length = pages * page / chunk_keys_ * chunk_keys_;
      if (count > 1 && length > 0 && rows >= kLeastCommonRows)
        take_together({all.begin() + i, all.begin() + i + count}, length, a.group(), others);
      i += count;
    }
  }

  void take_together(std::vector<Member> members, int64_t length, int64_t group, std::vector<int64_t>& others) {
    Common common{std::move(members), length};
    const int64_t index = commons_.size();
    for (const Member& member : common.members) {
      for (int64_t row = 0; member.entry >= 0 && row < member.num_rows; row += group) {
        Entry& entry = entries_[member.entry + row / group];
        entry.first = length, entry.common = index, entry.first_row = common.num_rows + row;
      }
      if (member.entry < 0) {
        shared_.push_back({member.request, index, common.num_rows});
        std::erase(others, member.request);
      }
      common.num_rows += member.num_rows;
    }
    commons_.push_back(std::move(common));
  }

  // The p-th partial results of the rows from `row` on.
  Partial common_part(const Attention& a, const Common& common, int64_t p, int64_t kv_head, int64_t row) {
    float* start = partials_.data() + common.part + (p * a.num_kv_heads + kv_head) * partial_size(a, common.num_rows);
    return partial_at(a, start, common.num_rows, row);
  }
  int64_t common_parts(const Common& common, int64_t piece) const {  // those before a piece
    return piece == 0 ? 0 : 1 + chunk_of(common.starts[piece] - common.starts[1]);
  }

  // What a request's rows have of the shared prefix, and then of their own chunks: nobody else reads these rows.
  template <class F>
  void merge_common(const Attention& a, const Merge& merge, const F& part) {
    const Common& common = commons_[merge.common];
    const int64_t per_head = merge.rows.count / merge.num_heads;
    for (int64_t k = 0; k < merge.num_heads; ++k) {
      const int64_t kv_head = merge.first_head + k;
      const Partial into = common_part(a, common, 0, kv_head, merge.first_row);
      for (int64_t p = 1; p < common_parts(common, common.starts.size() - 1); ++p)
        kernels_.merge(a, per_head, into, common_part(a, common, p, kv_head, merge.first_row));
      for (size_t p = 0; p < merge.parts.size(); ++p) kernels_.merge(a, per_head, into, part(p, k * per_head));
      kernels_.finish(a, {merge.rows.token, kv_head * a.group(), a.group(), per_head}, into);
    }
  }

  // A tile for each kv head, cut by rows where there are many of them, else by keys.
  void add_common(const Attention& a) {
    for (size_t i = 0; i < commons_.size(); ++i) {
      Common& common = commons_[i];
      const int64_t rows = common.num_rows, most = kernels_.tile_rows(a), least = (rows + most - 1) / most;
      const int64_t wanted = members_ == 1 ? 1 : kTilesPerMember * members_ / (a.num_kv_heads * commons_.size());
      const int64_t blocks = std::max(least, std::min(wanted, rows / kLeastHeight)),
                    height = padded((rows + blocks - 1) / blocks, 32);
      const int64_t pieces = std::clamp<int64_t>(wanted / blocks, 1, std::max<int64_t>(1, common.length / kLeastPiece));
      for (int64_t p = 0; p <= pieces; ++p)
        common.starts.push_back(chunk_of(common.length) * p / pieces * chunk_keys_);
      common.part = take(common_parts(common, pieces) * a.num_kv_heads * partial_size(a, rows));
      for (int64_t p = 0; p < pieces; ++p)
        for (int64_t head = 0; head < a.num_kv_heads; ++head)
          for (int64_t first = 0; first < rows; first += height) {
            Item item{Kind::kCommon, std::min(height, rows - first) * (common.starts[p + 1] - common.starts[p])};
            item.index = i, item.piece = p, item.kv_head = head, item.first = first,
            item.last = std::min(first + height, rows);
            items_.push_back(item);
          }
    }
  }

  // Chunks of keys of all queries, laid end to end, are cut into equal shares; where there are few of them, kv heads
  // are laid end to end too, some at a time.
  void add_ranges(const Attention& a) {
    if (entries_.empty()) return;
    int64_t num_chunks = 0, num_keys = 0;
    for (Entry& entry : entries_)
      entry.start = num_chunks, num_chunks += chunks(entry), num_keys += entry.length - entry.first;
    const int64_t key_values = (a.head_dim + a.value_dim) * a.num_kv_heads * (a.group() + 1);
    const int64_t shares =
        members_ == 1 ? 1 : std::clamp<int64_t>(num_keys * key_values / kShareValues, 1, 2 * members_);
    int64_t sets = 1;
    while (shares > 1 && sets * num_chunks < kChunksPerShare * shares && sets < a.num_kv_heads) do
        ++sets;
      while (a.num_kv_heads % sets);
    const int64_t heads = a.num_kv_heads / sets;
    size_t e = 0;
    for (int64_t share = 0; share < shares; ++share) {
      int64_t low = sets * num_chunks * share / shares, keys = 0;
      const int64_t high = sets * num_chunks * (share + 1) / shares;
      Item item{Kind::kRanges, 0};
      item.first = pieces_.size();
      while (low < high) {
        Entry& entry = entries_[e];
        const int64_t all = chunks(entry), at = low - sets * entry.start, chunk = at % all,
                      count = std::min(all - chunk, high - low), number = chunk_of(entry.first) + chunk;
        const KeyRange range{entry.request, at / all * heads, heads, std::max(number * chunk_keys_, entry.first),
                             std::min((number + count) * chunk_keys_, entry.length)};
        pieces_.push_back({entry.token, range});
        if (count < all || entry.common >= 0) add_parts(a, entry, pieces_.back(), at / all, sets);
        low += count, keys += range.last - range.first;
        if (low == sets * (entry.start + all)) ++e;
      }
      item.last = pieces_.size(), item.cost = keys * heads * a.group();
      items_.push_back(item);
    }
  }

  // Room for the partial results of a piece: one where it begins with a row's first chunk, else one for each chunk.
  void add_parts(const Attention& a, Entry& entry, Piece& piece, int64_t set, int64_t sets) {
    const KeyRange& range = piece.range;
    const int64_t rows = range.num_heads * a.group();
    if (entry.first_merge < 0) {
      entry.first_merge = merges_.size();
      for (int64_t s = 0; s < sets; ++s)
        merges_.push_back({{entry.token, s * rows, rows, rows}, s * range.num_heads, range.num_heads, {}, entry.common,
                           entry.first_row});
    }
    const bool is_first = range.first == entry.first && entry.common < 0;
    const int64_t count = is_first ? 1 : chunks(range.first, range.last);
    piece.step = is_first ? 0 : partial_size(a, rows), piece.part = take(count * partial_size(a, rows));
    for (int64_t i = 0; i < count; ++i) merges_[entry.first_merge + set].parts.push_back(piece.part + i * piece.step);
  }

  void run_tile(const Attention& a, const Tile& tile) {
    kernels_.tile(a, tile, Scratch::of_this_thread().floats(kernels_.tile_scratch(a, tile.num_rows)));
  }

  void run_own(const Attention& a, const Item& item) {
    const Merge& merge = merges_[item.index];
    Attention own = a;
    own.first_key = commons_[merge.common].length;
    for (const int64_t part : merge.parts) {
      own.last_key = own.first_key + chunk_keys_;
      own.partial = partial_at(a, partials_.data() + part, merge.rows.count);
      run_tile(own, item.tile);
      own.first_key = own.last_key;
    }
  }

  // The queries of all rows are laid side by side, as if they were the heads of one query that sees the chunk's keys
  // alone.
  void run_common(const Attention& a, const Item& item) {
    const Common& common = commons_[item.index];
    const int64_t rows = item.last - item.first, row_bytes = a.head_dim * type_bytes(a.q_type), group = a.group();
    Attention tile = a;
    tile.num_heads = rows, tile.num_kv_heads = 1, tile.q_stride = rows * a.head_dim;
    float* scratch = Scratch::of_this_thread().floats(padded(rows * a.head_dim) + kernels_.tile_scratch(tile, rows));
    char* q = reinterpret_cast<char*>(scratch);
    int64_t before = 0;
    for (const Member& member : common.members) {
      const int64_t end = std::min(member.num_rows, item.last - before);
      for (int64_t r = std::max<int64_t>(0, item.first - before); r < end; ++r, q += row_bytes) {
        const int64_t token = a.query_start[member.request] + r / group, head = item.kv_head * group + r % group;
        memcpy(q, static_cast<const char*>(a.q) + token * a.q_stride * type_bytes(a.q_type) + head * row_bytes,
               row_bytes);
      }
      before += member.num_rows;
    }
    const int32_t query_start[] = {0, 1}, length = static_cast<int32_t>(common.starts[item.piece + 1]);
    tile.q = scratch, tile.query_start = query_start, tile.kv_lens = &length;
    tile.k = static_cast<const char*>(a.k) + item.kv_head * a.k_strides.head * type_bytes(a.kv_type);
    tile.v = static_cast<const char*>(a.v) + item.kv_head * a.v_strides.head * type_bytes(a.kv_type);
    if (a.scales) tile.scales = a.scales + (item.kv_head << a.page_bits);
    tile.table = a.table + common.members.front().request * a.table_stride, tile.table_stride = 0;
    const int64_t first_part = common_parts(common, item.piece),
                  parts = common_parts(common, item.piece + 1) - first_part;
    for (int64_t p = 0; p < parts; ++p) {
      tile.first_key = common.starts[item.piece] + p * chunk_keys_;
      tile.last_key = item.piece == 0 ? length : tile.first_key + chunk_keys_;
      tile.partial = common_part(a, common, first_part + p, item.kv_head, item.first);
      kernels_.tile(tile, {0, 0, 0, rows}, scratch + padded(rows * a.head_dim));
    }
  }

  void run_ranges(const Attention& a, const Item& item) {
    for (int64_t p = item.first; p < item.last; ++p) {
      const Piece& piece = pieces_[p];
      const int64_t rows = piece.range.num_heads * a.group(), size = partial_size(a, rows);
      float* scratch = Scratch::of_this_thread().floats(size + kernels_.decode_scratch(a, piece.range.num_heads));
      float* partials = piece.part < 0 ? scratch : partials_.data() + piece.part;
      const int32_t token = static_cast<int32_t>(piece.token);  // the query as a request of its own
      Attention one = a;
      one.query_start = &token, one.table = a.table + piece.range.request * a.table_stride;
      KeyRange range = piece.range;
      range.request = 0;
      kernels_.decode(one, range, partials, piece.step, scratch + size);
      if (piece.part < 0)
        kernels_.finish(a, {piece.token, range.first_head * a.group(), rows, rows}, partial_at(a, partials, rows));
    }
  }

  static int64_t type_bytes(int type) { return type == kFloat32 ? 4 : type == kCodes ? 1 : 2; }

  const AttentionKernels& kernels_;
  const int64_t members_, chunk_keys_;
  std::vector<Shared> shared_;
  std::vector<Entry> entries_;
  std::vector<Common> commons_;
  std::vector<Piece> pieces_;
  std::vector<Merge> merges_;
  std::vector<Item> items_;
  std::vector<float> partials_;
  int64_t num_floats_ = 0;
};

}  // namespace headrace
