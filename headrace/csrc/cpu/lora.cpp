// compiled for: scalar avx2 avx512
#include "lora.h"

#include "vector.h"

namespace headrace::HEADRACE_ISA {

constexpr int kAtOnce = 4;         // ranks that share the loads of a row, or of outputs
constexpr int64_t kMostRanks = 512;  // of an adapter, see AdapterConfig

// reduced[r] = a[r] x for r in [0, rank), kAtOnce rows of `a` at a time.
template <class T>
static void shrink(const T* x, const T* a, int64_t rank, int64_t inputs, float* reduced) {
  int64_t r = 0;
  for (; r + kAtOnce <= rank; r += kAtOnce) {
    const T* rows = a + r * inputs;
    Vec s0(0.0f), s1(0.0f), s2(0.0f), s3(0.0f);
    over_lanes(inputs, [&](int64_t i, auto part) {
      const Vec value = part.load(x + i);
      s0 = fma(value, part.load(rows + i), s0), s1 = fma(value, part.load(rows + inputs + i), s1);
      s2 = fma(value, part.load(rows + 2 * inputs + i), s2), s3 = fma(value, part.load(rows + 3 * inputs + i), s3);
    });
    reduced[r] = sum(s0), reduced[r + 1] = sum(s1), reduced[r + 2] = sum(s2), reduced[r + 3] = sum(s3);
  }
  for (; r < rank; ++r) {
    Vec s0(0.0f);
    over_lanes(inputs, [&](int64_t i, auto part) { s0 = fma(part.load(x + i), part.load(a + r * inputs + i), s0); });
    reduced[r] = sum(s0);
  }
}

// out[n] += sum of reduced[r] b[r][n] for n in [0, count), rounded once.
template <class T, class O>
static void expand(const float* reduced, const T* b, int64_t rank, int64_t stride, int64_t count, O* out) {
  int64_t whole = 0;  // whole cache lines of each row of `b` at a time: rows are far apart
  for (; whole + 4 * kLanes <= count; whole += 4 * kLanes) {
    const T* own = b + whole;
    Vec s0 = load(out + whole), s1 = load(out + whole + kLanes), s2 = load(out + whole + 2 * kLanes),
        s3 = load(out + whole + 3 * kLanes);
    for (int64_t r = 0; r < rank; ++r, own += stride) {
      const Vec factor(reduced[r]);
      s0 = fma(factor, load(own), s0), s1 = fma(factor, load(own + kLanes), s1);
      s2 = fma(factor, load(own + 2 * kLanes), s2), s3 = fma(factor, load(own + 3 * kLanes), s3);
    }
    store(out + whole, s0), store(out + whole + kLanes, s1), store(out + whole + 2 * kLanes, s2),
        store(out + whole + 3 * kLanes, s3);
  }
  b += whole, out += whole, count -= whole;
  over_lanes(count, [&](int64_t n, auto part) {
    Vec s0 = part.load(out + n), s1(0.0f);
    int64_t r = 0;
    for (; r + 2 <= rank; r += 2) {
      s0 = fma(Vec(reduced[r]), part.load(b + r * stride + n), s0);
      s1 = fma(Vec(reduced[r + 1]), part.load(b + (r + 1) * stride + n), s1);
    }
    if (r < rank) s0 = fma(Vec(reduced[r]), part.load(b + r * stride + n), s0);
    part.store(out + n, s0 + s1);
  });
}

template <class T, class O>
static void add_rows(const LowRankRows& rows, int64_t begin, int64_t end) {
  const LowRankBank& bank = rows.bank;
  float reduced[kMostRanks];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = rows.order[i], slot = rows.slots[i];
    const T* x = static_cast<const T*>(rows.x) + row * rows.x_stride;
    O* out = static_cast<O*>(rows.out) + row * rows.out_stride;
    const T* a = static_cast<const T*>(bank.a) + slot * bank.parts * bank.most_ranks * bank.inputs;
    const T* b = static_cast<const T*>(bank.b) + slot * bank.most_ranks * bank.outputs;
    int64_t first = 0;
    for (int64_t part = 0; part < bank.parts; ++part) {
      const int64_t rank = bank.ranks[slot * bank.parts + part], last = bank.ends[part];
      if (rank) {
        shrink(x, a + part * bank.most_ranks * bank.inputs, rank, bank.inputs, reduced);
        expand(reduced, b + first, rank, bank.outputs, last - first, out + first);
      }
      first = last;
    }
  }
}

template <class T>
static void add_of_type(const LowRankRows& rows, int64_t begin, int64_t end) {
  rows.is_out_float ? add_rows<T, float>(rows, begin, end) : add_rows<T, T>(rows, begin, end);
}

static void add(int type, const LowRankRows& rows, int64_t begin, int64_t end) {
  type == kFloat32    ? add_rows<float, float>(rows, begin, end)
  : type == kBFloat16 ? add_of_type<bf16>(rows, begin, end)
                      : add_of_type<fp16>(rows, begin, end);
}

extern const LowRankKernels low_rank_kernels;
const LowRankKernels low_rank_kernels = {add};

}  // namespace headrace::HEADRACE_ISA
