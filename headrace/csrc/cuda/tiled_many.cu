// Products of tens to hundreds of rows of x [M, K] on Hopper with integers of 4 or 6 bits in tiles: out [M, N] = x times
// the weight [N, K] transposed, also with the gated activation of its halves, or partial sums of shares of K. Numbers of
// the weight are rounded once to bfloat16; sums are float32 in a fixed order.
//
// The layout of the weight is that of tiled_rows.cu: a unit is 128 inputs of eight rows, 512 or 768 bytes. A block is
// persistent and takes 64 * GROUPS rows of the weight by ROWS rows of x, of a share of the units. A thread asks the
// copy engine (TMA) for units and rows of x into a ring of STAGES, codes and scales also before the previous kernel has
// ended: three copies a stage, as asking for one takes some 75 cycles whatever its size. The other GROUPS warpgroups
// decode 64 rows of codes each to operands of wgmma in registers, PIECES of 16 inputs at a time while the products
// before run; x comes from shared memory. The two blocks of a cluster have the same rows of x and copy half of them
// each, for both.
//
// Macros: ROWS (64, 96, 128, 192, 256), GROUPS (2 or 4; ROWS * GROUPS at most 512), PIECES (2 or 4), STAGES, CODE_STAGES
// (0, or of codes, which are in a ring of their own, for where shared memory holds fewer of them), GATE (0, or a kind of
// activation: a block then has half as many outputs, its rows alternate 8 of gate, 8 of up), PAIRS (1: scales are pairs
// of float16, with zero points, else float32), WHOLE (1: zero points are whole numbers below 128), SCALE (inputs that
// share a scale, 0: all), SUPER_FORM (0, or the form of super-blocks, see super_blocks.cuh, with PAIRS, WHOLE and SCALE
// 0), TAIL_FORM (0, or that of rows that follow, with GATE 0). Compiled by NVRTC.

#define EXPERTS 1
#include "numbers.cuh"
#include "hopper.cuh"
#include "super_blocks.cuh"

constexpr int DEPTH = 128, WIDE = 64 * GROUPS, OUTPUTS = GATE ? WIDE / 2 : WIDE;
constexpr int WORDS = SCALE == 32 ? 4 : SCALE == 64 ? 2 : 1;    // scales of a unit of a row
constexpr int EACH = SCALE > DEPTH ? SCALE / DEPTH : 1;         // units that share one

// Bytes of a unit of a row, and of the scales that come with it: of a super-block all.
template <int FORM>
struct Piece {
  static constexpr uint32 UNIT_BYTES = WIDE * (FORM ? Supers<FORM>::UNIT_BYTES : 512) / 8;
  static constexpr uint32 TABLE_BYTES = WIDE * (FORM ? Supers<FORM>::TABLE_BYTES / 8 : WORDS * 4);
  static constexpr uint32 CODE_BYTES = UNIT_BYTES + TABLE_BYTES;
  static_assert(UNIT_BYTES % 128 == 0, "a copy's place is aligned");
};
constexpr uint32 X_BYTES = ROWS * DEPTH * 2, TAIL_BYTES = TAIL_FORM ? Piece<TAIL_FORM>::CODE_BYTES : 0;
constexpr uint32 MOST_CODE_BYTES = TAIL_BYTES > Piece<SUPER_FORM>::CODE_BYTES ? TAIL_BYTES : Piece<SUPER_FORM>::CODE_BYTES;
constexpr uint32 CODE_BYTES = (MOST_CODE_BYTES + 511) / 512 * 512;  // of a stage
static_assert(X_BYTES % 1024 == 0, "swizzles begin with each stage");
static_assert(X_BYTES + CODE_BYTES < 1 << 20, "a barrier counts a stage's bytes");
constexpr int CLUSTER = 2, THREADS = 128 * (GROUPS + 1);
constexpr int IDLE_REGISTERS = GROUPS == 2 ? 40 : 32, REGISTERS = GROUPS == 2 ? 232 : 112;

struct Call {
  const uint16 *bias;         // [rows of the weight] bfloat16, or null
  uint16 *out;                // [M, N] bfloat16
  float *parts;               // [splits, M, N] of partial sums, or null: of one split, to `out`
  int rows, outputs, inputs;  // M, N (after the activation), K
  int splits, units_each;     // shares of K, none empty, and their units
  int head;                   // outputs of the first form, if another follows
};

#include "weight_operand.cuh"
#include "sorted_experts.cuh"
#include "weight_rows.cuh"

struct Place {  // of a block: its cluster's number, and its own in the cluster
  int cluster, rank;
  __device__ __forceinline__ Place() : cluster(blockIdx.x / CLUSTER), rank(blockIdx.x % CLUSTER) {}
};

struct Work {
  Tile tile;
  int split, first, last;  // units from `first` to before `last`
  bool is_tail;            // outputs are of the second form

  __device__ __forceinline__ int begin(const Call &call) const { return TAIL_FORM && is_tail ? call.head : 0; }
  __device__ __forceinline__ int end(const Call &call) const { return TAIL_FORM && !is_tail ? call.head : call.outputs; }
};

__device__ __forceinline__ int count_across(int outputs) { return (outputs + OUTPUTS * CLUSTER - 1) / (OUTPUTS * CLUSTER); }

// Item number `index` of a block; false beyond the last. Blocks at work at once share weights, if there
// are several tiles of rows of x. The last of these overlaps the one before: rows that are not there are copied slowly.
// A cluster's outputs are of one form.
__device__ __forceinline__ bool find_work(const Call &call, int index, const Place &place, Work &work) {
  int row_tiles = (call.rows + ROWS - 1) / ROWS, units = call.inputs / DEPTH;
  int head = count_across(TAIL_FORM ? call.head : call.outputs), across = head;
  if (TAIL_FORM) across += count_across(call.outputs - call.head);
  if (index >= across * row_tiles * call.splits) return false;
  work.split = index % call.splits;
  int tile = index / call.splits, column = tile / row_tiles;
  work.tile.expert = 0;
  work.tile.first = max(min(tile % row_tiles * ROWS, call.rows - ROWS), 0), work.tile.last = call.rows;
  work.is_tail = TAIL_FORM && column >= head;
  if (work.is_tail) column -= head;
  work.tile.output = work.begin(call) + (column * CLUSTER + place.rank) * OUTPUTS;
  work.first = work.split * call.units_each, work.last = min(work.first + call.units_each, units);
  return true;
}

struct Maps {  // of tensors; of codes [pairs of eights, 2, units, 8 or 12, 64 bytes], of scales [.., 2, words, 1, 32
               // bytes], or of super-blocks [.., 2, super-blocks, 4, 32 bytes] or [.., 2, super-blocks, 1, 144 bytes]
  const TensorMap *x, *codes, *scales, *tail_codes, *tail_scales;
};

// Pairs of eights of rows from `pair` on: a unit of codes, or its scales.
__device__ __forceinline__ void load_pairs(uint32 to, const TensorMap *map, uint32 bar, int unit, int pair) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %3, %4, %3, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(unit), "r"(pair) : "memory");
}

// Of codes alone, after that of x and with barriers like its; a block's are its own.
struct CodeRing {
  uint32 bars;
  int stage;
  uint32 phase;

  __device__ __forceinline__ explicit CodeRing(const Ring &ring) : bars(ring.bars + 16 * STAGES), stage(0), phase(0) {
    if (CODE_STAGES && threadIdx.x == 0) {
      for (int nth = 0; nth < CODE_STAGES; ++nth) {
        init_barrier(bars + 16 * nth, 1);
        init_barrier(bars + 16 * nth + 8, 4 * GROUPS);  // warps that multiply
      }
      asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
  }
  __device__ __forceinline__ void advance() {
    if (CODE_STAGES && ++stage == CODE_STAGES) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ uint32 find_bar(const Ring &ring) const {
    return CODE_STAGES ? bars + 16 * stage : ring.bars + 16 * ring.stage;
  }
  __device__ __forceinline__ uint32 find_bytes(const Ring &ring) const {
    return (CODE_STAGES ? stage : ring.stage) * CODE_BYTES;
  }
};

template <int FORM>
__device__ __forceinline__ void ask_pairs(
    const TensorMap *codes, const TensorMap *scales, uint32 to, uint32 full, int unit, int pair
) {
  int word = FORM ? unit / 2 : SCALE == 0 ? 0 : unit * WORDS / EACH;
  expect_bytes(full, (CODE_STAGES ? 0 : X_BYTES) + Piece<FORM>::CODE_BYTES);
  load_pairs(to, codes, full, unit, pair);
  load_pairs(to + Piece<FORM>::UNIT_BYTES, scales, full, word, pair);
}

// Ask for a unit's codes and scales, zeros beyond the last outputs; a stage of both then also waits for rows of x.
__device__ __forceinline__ void ask_codes(
    const Call &call, const Maps &maps, const Ring &ring, const CodeRing &codes, const Work &work, int unit
) {
  int pair = (work.tile.output - work.begin(call)) / (GATE ? 8 : 16);
  uint32 to = ring.code_tiles + codes.find_bytes(ring), full = codes.find_bar(ring);
  if (TAIL_FORM && work.is_tail)
    ask_pairs<TAIL_FORM>(maps.tail_codes, maps.tail_scales, to, full, unit, pair);
  else
    ask_pairs<SUPER_FORM>(maps.codes, maps.scales, to, full, unit, pair);
}

// Ask for this block's half of the rows of x of a unit, for both.
__device__ __forceinline__ void ask_rows(
    const Maps &maps, const Ring &ring, const Work &work, int unit, const Place &place
) {
  uint32 full = ring.bars + 16 * ring.stage, to = ring.x_tiles + ring.stage * X_BYTES;
  load_box_for(3, to + place.rank * (X_BYTES / 2), maps.x, full, unit * DEPTH + place.rank * (DEPTH / 2),
               work.tile.first);
}

// The thread that copies: the stages of all items of this block.
__device__ __forceinline__ void fetch_work(
    const Call &call, const Maps &maps, Ring &ring, CodeRing &codes, const Place &place
) {
  Work work;
  int begin = place.cluster, stride = gridDim.x / CLUSTER, ahead = 0;
  if (find_work(call, begin, place, work)) ahead = min(work.last - work.first, CODE_STAGES ? CODE_STAGES : STAGES);
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) {  // stages that were never used are empty
    ask_codes(call, maps, ring, codes, work, work.first + step);
    ring.advance(), codes.advance();
  }
  ring.stage = codes.stage = 0, ring.phase = codes.phase = 0;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int index = begin; find_work(call, index, place, work); index += stride) {
#pragma unroll 1
    for (int unit = work.first; unit < work.last; ++unit) {
      bool asked = index == begin && unit - work.first < ahead;
      if (CODE_STAGES || !asked) wait_for(ring.bars + 16 * ring.stage + 8, ring.phase ^ 1);
      if (CODE_STAGES) {
        expect_bytes(ring.bars + 16 * ring.stage, X_BYTES);
        ask_rows(maps, ring, work, unit, place);
        if (!asked) wait_for(codes.find_bar(ring) + 8, codes.phase ^ 1);
      }
      if (!asked) ask_codes(call, maps, ring, codes, work, unit);
      if (!CODE_STAGES) ask_rows(maps, ring, work, unit, place);
      ring.advance(), codes.advance();
    }
  }
}

template <bool FIRST, class One, class Other> struct Choice { using type = One; };
template <class One, class Other> struct Choice<false, One, Other> { using type = Other; };

__device__ __forceinline__ uint32 load_word(uint32 from) {
  uint32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
  return word;
}

// A scale and its zero point, for the numbers (code - zero) * scale of two codes of a row.
struct Scale {
#if WHOLE
  // A code at the end of a bfloat16, of which it is a part of the mantissa and the last bit of the exponent, is its
  // number times 2**-133, and 16 times as much four bits further: times these it is its number divided by LIFT.
  static constexpr uint32 LOW_LIFT = 0x7F007F00u, HIGH_LIFT = 0x7D007D00u;
  static constexpr float LIFT = 64.f;
  uint32 high, low, zero;  // pairs of the same bfloat16: a scale is the sum of two, times LIFT

  __device__ __forceinline__ void set(uint32 word) {
    float scale = (PAIRS ? half_of(word, false) : __uint_as_float(word)) * LIFT;
    float offset = PAIRS ? half_of(word, true) * (-1.f / LIFT) : 0.f;
    high = narrow(scale, scale), zero = narrow(offset, offset);
    scale -= widen_high(high);
    low = narrow(scale, scale);
  }
  // The difference is exact, and so is its product with `low` but for its last bits, 16 below the number's first.
  template <bool LOW>
  __device__ __forceinline__ uint32 decode(uint32 codes) const {
    uint32 number = fma_pairs(codes & (LOW ? 0x000F000Fu : 0x00F000F0u), LOW ? LOW_LIFT : HIGH_LIFT, zero);
    return fma_pairs(number, high, product_of_pairs(number, low));
  }
#else
  // A code at bits 12 to 15 of a float of this exponent is its number plus BASE.
  static constexpr uint32 BITS = 0x45000000u;
  static constexpr float BASE = 2048.f;
  float scale, offset;

  __device__ __forceinline__ void set(uint32 word) {
    scale = PAIRS ? half_of(word, false) : __uint_as_float(word);
    offset = -(BASE + (PAIRS ? half_of(word, true) : 0.f)) * scale;
  }
  template <bool LOW>
  __device__ __forceinline__ uint32 decode(uint32 codes) const {
    uint32 bits[2] = {codes << (LOW ? 12 : 8), LOW ? codes >> 4 : codes >> 8};
#pragma unroll
    for (int i = 0; i < 2; ++i)  // (a & b) | c, in one instruction
      asm("lop3.b32 %0, %0, 0xF000, %1, 0xEA;" : "+r"(bits[i]) : "r"(BITS));
    return narrow(fmaf(__uint_as_float(bits[0]), scale, offset), fmaf(__uint_as_float(bits[1]), scale, offset));
  }
#endif
};

// Two codes of a row, inputs 16 * piece + 8 * h and on of each plane, for a thread's operands: a byte in each half of
// codes[piece][2 * h + half] of row 8 * half. Rows of 64 bytes, swizzled by 64 bytes: the 16 bytes of a piece are
// exchanged by row / 2 % 4.
struct Bytes {
  uint32 begin, turned;  // of a stage's codes

  __device__ __forceinline__ Bytes(const Ring &ring, uint32 row) :
      begin(ring.code_tiles + row * 64 + threadIdx.x % 4 * 2), turned(row / 2 % 4 * 16) {}

  template <int FIRST>
  __device__ __forceinline__ void load(uint32 (&codes)[PIECES][4], uint32 stage) const {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows differ by 8, which changes no swizzle
        uint16 bytes;
        uint32 from = begin + stage + ((FIRST + piece) * 16 ^ turned) + i % 2 * 512 + i / 2 * 8;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(from));
        codes[piece][i] = __byte_perm(bytes, 0, 0x4140);
      }
  }
};

// The weight of a thread's rows, `row` of the block's and the one 8 further: operands of PIECES times 16 inputs from piece
// FIRST of a half of a unit, the LOW one or the other.
struct Integers {
  Bytes bytes;
  uint32 table, own;  // of all stages, of this one
  Scale scales[2];

  __device__ __forceinline__ Integers(const Ring &ring, uint32 row) :
      bytes(ring, row),
      table(ring.code_tiles + Piece<0>::UNIT_BYTES + row / 8 * (WORDS * 32) + threadIdx.x % 32 / 4 * 4) {}

  __device__ __forceinline__ void begin(uint32 stage, bool) {
    own = table + stage;
#pragma unroll
    for (int half = 0; half < (WORDS == 1 ? 2 : 0); ++half) scales[half].set(load_word(own + half * 32));
  }
  template <int FIRST>
  __device__ __forceinline__ void load(uint32 (&codes)[PIECES][4], uint32 stage) const {
    bytes.load<FIRST>(codes, stage);
  }
  template <bool LOW, int FIRST>
  __device__ __forceinline__ void decode(uint32 (&a)[PIECES][4], const uint32 (&codes)[PIECES][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        int word = WORDS == 2 ? !LOW : (LOW ? 0 : 2) + (FIRST + piece) / 2;
        if (WORDS == 4 ? piece % 2 == 0 : WORDS == 2 && piece == 0)
          scales[half].set(load_word(own + (half * WORDS + word) * 32));
#pragma unroll
        for (int i = half; i < 4; i += 2) a[piece][i] = scales[half].template decode<LOW>(codes[piece][i]);
      }
    }
  }
};

#if SUPER_FORM
// Of 6 bits: bytes lane % 4 * 2 and on of words of a row's 16 codes, of both planes beside each other. Lines of 64 bytes,
// twelve of a unit, are swizzled like those above; those of eights 768 bytes further are exchanged by two more.
struct Sixes {
  uint32 near, turned, far, side;
  bool is_last;  // whose second codes lie in the low bits of three bytes

  __device__ __forceinline__ Sixes(const Ring &ring, uint32 row) {
    const uint32 r = row % 8, lane = threadIdx.x % 4, begin = ring.code_tiles + row / 8 * 768;
    near = begin + r * 64, turned = r / 2 * 16;
    far = begin + 512 + (r * 32 ^ r / 4 * 16);
    side = lane & 1 ? 0x7632 : 0x5410, is_last = lane & 2;
  }
  template <int FIRST>
  __device__ __forceinline__ void load(uint32 (&codes)[PIECES][4], uint32 stage, uint32 flipped) const {
    const uint32 chosen = is_last ? 0xF0F0F0F0u : 0, up = is_last ? 2 : 0;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        constexpr uint32 HIGHEST = 0xC0C0C0C0u, SIX = 0xFCFCFCFCu;
        const int place = FIRST + piece;
        uint32 one[4], two[2];  // words 0 to 2 of plane 0 and 0 of plane 1, 1 and 2 of plane 1
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(one[0]), "=r"(one[1]), "=r"(one[2]), "=r"(one[3])
                     : "r"(near + stage + ((place ^ 2 * half) * 16 ^ turned) + half * 768));
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(two[0]), "=r"(two[1])
                     : "r"((far ^ (place / 2 * 16 + half * 32)) + stage + place % 2 * 8 + half * 768));
        const uint32 first = __byte_perm(one[0], one[3], side), second = __byte_perm(one[1], two[0], side);
        const uint32 third = __byte_perm(one[2], two[1], side);
        const uint32 high = (first << 6 & HIGHEST) | (second << 4 & ~HIGHEST);
        const uint32 last = (high & chosen) | (third << up & ~chosen);
        codes[piece][half] = ((is_last ? second : first) & SIX) ^ flipped;
        codes[piece][2 + half] = (last & SIX) ^ flipped;
      }
  }
};

// The same of super-blocks. Of the lanes of a row each makes the terms of 32 inputs of both planes, two those of the row 8
// further, for all four.
template <int FORM>
struct SuperBlocks {
  static constexpr bool MINS = Supers<FORM>::MINS, IS_SHORT = Supers<FORM>::BITS == 4;
  static constexpr uint32 HIGHEST = MINS ? 0 : IS_SHORT ? 0x00800080u : 0x80808080u;  // of codes, inverted
  using Terms = SuperTerms<FORM>;
  typename Choice<IS_SHORT, Bytes, Sixes>::type own;
  uint32 table, factor;
  uint32 terms[4];  // of planes scales and offsets; without mins of pieces scales of planes

  __device__ __forceinline__ SuperBlocks(const Ring &ring, uint32 row) : own(ring, row) {
    const uint32 lane = threadIdx.x % 4, r = row % 8;
    table = ring.code_tiles + Piece<FORM>::UNIT_BYTES + (row / 8 + lane % 2) * Supers<FORM>::TABLE_BYTES;
    factor = table + 128 + r * 2, table += r * 16;
  }
  __device__ __forceinline__ void begin(uint32 stage, bool odd) {
    const uint32 part = threadIdx.x % 4 / 2;
    if (MINS) {
      uint32 words[4];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(table + stage));
      SuperScales<FORM> six;
      six.set(__byte_perm(odd ? words[2] : words[1], odd ? words[3] : words[2],
                          (part ? 0x0543 : 0x0210) + (odd ? 0x222 : 0)));
      const float factor = half_of(words[0], false) * 256.f, min_factor = half_of(words[0], true);
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        const float scale = factor * float(six.scale[plane]);
        terms[2 * plane] = Terms::split(scale);
        terms[2 * plane + 1] = Terms::divide(scale, min_factor * float(six.min[plane]));
      }
    } else {
      const uint32 four = load_word(table + stage + (odd ? 8 : 0) + part * 4);
      uint16 bits;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(factor + stage));
      const float scale = half_of(bits, false) * 256.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) terms[i] = Terms::split(scale * float((signed char)(four >> 8 * i & 0xFF)));
    }
  }
  template <int FIRST>
  __device__ __forceinline__ void load(uint32 (&codes)[PIECES][4], uint32 stage) const {
    if constexpr (IS_SHORT)
      own.template load<FIRST>(codes, stage);
    else
      own.template load<FIRST>(codes, stage, HIGHEST);
  }
  template <bool LOW, int FIRST>
  __device__ __forceinline__ void decode(uint32 (&a)[PIECES][4], const uint32 (&codes)[PIECES][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32 scales, offsets = 0;
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        const int lane = half + (FIRST + piece) / 2 * 2;  // of the four, whose terms these are
        if (!MINS) scales = __shfl_sync(~0u, terms[piece % 2 * 2 + !LOW], lane, 4);
        if (MINS && piece % 2 == 0) {
          scales = __shfl_sync(~0u, terms[LOW ? 0 : 2], lane, 4);
          offsets = __shfl_sync(~0u, terms[LOW ? 1 : 3], lane, 4);
        }
#pragma unroll
        for (int i = half; i < 4; i += 2) {
          if constexpr (IS_SHORT) {
            const uint32 pair = (codes[piece][i] & (LOW ? 0x000F000Fu : 0x00F000F0u)) ^ (LOW ? HIGHEST >> 4 : HIGHEST);
            a[piece][i] = Terms::decode(pair, LOW ? 0 : 4, scales, offsets);
          } else {
            const uint32 pair = __byte_perm(codes[piece][i], 0, LOW ? 0x4140 : 0x4342);
            a[piece][i] = Terms::decode(pair, 2, scales, offsets);
          }
        }
      }
    }
  }
};
#endif

__device__ __forceinline__ void multiply_all(
    float (&sums)[ROWS / 2], const uint32 (&a)[PIECES][4], uint64 rows, bool adds
) {
  begin_products();
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) multiply<ROWS>(sums, a[piece], rows + 2 * piece, adds || piece > 0);
  commit_products();
}

// A stage of both blocks, whose barrier is `empty`, may be filled again.
__device__ __forceinline__ void release(uint32 empty) {
  int lane = threadIdx.x % 32;
  if (lane < CLUSTER) arrive_at(empty, lane);
}

// Both halves' products of PIECES pieces from FIRST on; `empty` and `read`: barriers of the stage before, if there is one,
// and of this one's codes. At most one batch of products is on its way when the next one
// is decoded, to the registers of the one before.
template <int FIRST, class Weight>
__device__ __forceinline__ void add_pieces(
    float (&sums)[ROWS / 2], uint32 (&low)[PIECES][4], uint32 (&high)[PIECES][4], Weight &weight, uint32 stage,
    uint64 rows, bool adds, uint32 empty, uint32 read
) {
  uint32 codes[PIECES][4];
  weight.template load<FIRST>(codes, stage);
  wait_products<1>();
  weight.template decode<true, FIRST>(low, codes);
  multiply_all(sums, low, rows + 2 * FIRST, adds || FIRST > 0);
  wait_products<1>();
  // all products of the stage before have ended
  if (FIRST == 0 && empty) release(empty);
  if (CODE_STAGES && FIRST == 4 - PIECES && threadIdx.x % 32 == 0) arrive(read);
  weight.template decode<false, FIRST>(high, codes);
  multiply_all(sums, high, rows + X_BYTES / 2 / 16 + 2 * FIRST, true);
}

// The sums of an item from unit `first` on, of this thread's row `row` of the block's and the one 8 further.
template <class Weight>
__device__ __forceinline__ void add_up(
    float (&sums)[ROWS / 2], Ring &ring, CodeRing &codes, uint32 row, int first, int steps
) {
  if (SUPER_FORM) asm volatile("" : "+r"(row));  // registers are short: addresses are made anew for each item
  Weight weight(ring, row);
  uint32 low[PIECES][4], high[PIECES][4], before = 0;
  for (int step = 0; step < steps; ++step) {
    if (CODE_STAGES) wait_for(codes.find_bar(ring), codes.phase);
    wait_for(ring.bars + 16 * ring.stage, ring.phase);
    uint64 rows = describe_operand(ring.x_tiles + ring.stage * X_BYTES);
    uint32 stage = codes.find_bytes(ring), read = codes.find_bar(ring) + 8;
    weight.begin(stage, (first + step) & 1);
    add_pieces<0>(sums, low, high, weight, stage, rows, step > 0, before, read);
    if (PIECES == 2) add_pieces<4 - PIECES>(sums, low, high, weight, stage, rows, true, 0, read);
    before = ring.bars + 16 * ring.stage + 8;
    ring.advance(), codes.advance();
  }
  wait_products<0>();
  fence_sums(sums);
  release(before);
}

// A thread has sums[4 * j + 2 * half + i]: row lane / 4 + 8 * half of its warp's 16 rows of the weight, and row
// 8 * j + lane % 4 * 2 + i of x.
__device__ __forceinline__ void store_sums(const Call &call, const float (&sums)[ROWS / 2], const Work &work, int row) {
  int m = work.tile.first + threadIdx.x % 4 * 2, n = work.tile.output + row;
  float *to = call.parts + ((int64)work.split * call.rows + m) * call.outputs + n;
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (m + 8 * j + i < work.tile.last && n + 8 * half < work.end(call))
          to[(int64)(8 * j + i) * call.outputs + 8 * half] = sums[4 * j + 2 * half + i];
}

// What follows the sums of an item.
__device__ __forceinline__ void finish_work(const Call &call, float (&sums)[ROWS / 2], const Work &work, int row) {
  int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, own[2];
  if (call.parts) {
    store_sums(call, sums, work, row);
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int output = work.tile.output + (GATE ? warp * 8 + lane / 4 : row + 8 * half);
    own[half] = output < work.end(call) ? (GATE ? half * call.outputs : 0) + output : -1;
  }
  finish<false>(call, sums, work.tile, own, warp, work.end(call));
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The warps that multiply.
__device__ __forceinline__ void multiply_work(const Call &call, Ring &ring, CodeRing &codes, const Place &place) {
  int row = (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4;
  float sums[ROWS / 2];
  Work work;
  for (int index = place.cluster; find_work(call, index, place, work); index += gridDim.x / CLUSTER) {
    int steps = work.last - work.first;
#if SUPER_FORM
    if (TAIL_FORM && work.is_tail)
      add_up<SuperBlocks<TAIL_FORM ? TAIL_FORM : SUPER_FORM>>(sums, ring, codes, row, work.first, steps);
    else
      add_up<SuperBlocks<SUPER_FORM>>(sums, ring, codes, row, work.first, steps);
#else
    add_up<Integers>(sums, ring, codes, row, work.first, steps);
#endif
    finish_work(call, sums, work, row);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) tiled_many(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap code_map,
    const __grid_constant__ TensorMap scale_map,
#if TAIL_FORM
    const __grid_constant__ TensorMap tail_code_map, const __grid_constant__ TensorMap tail_scale_map,
#endif
    const __grid_constant__ Call call
) {
  extern __shared__ unsigned char storage[];
  Ring ring(storage, CLUSTER, (CODE_STAGES ? CODE_STAGES : STAGES) * CODE_BYTES);
  CodeRing codes(ring);
  Place place;
  meet_cluster();  // before anything is copied to another's memory, its barriers are there
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(IDLE_REGISTERS));
#if TAIL_FORM
    const Maps maps = {&x_map, &code_map, &scale_map, &tail_code_map, &tail_scale_map};
#else
    const Maps maps = {&x_map, &code_map, &scale_map, nullptr, nullptr};
#endif
    if (threadIdx.x == 0) fetch_work(call, maps, ring, codes, place);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    multiply_work(call, ring, codes, place);
  }
  meet_cluster();  // nobody copies to, or arrives at, a block that has ended
}
