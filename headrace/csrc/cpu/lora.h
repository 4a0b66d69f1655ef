// Low-rank additions of many adapters, each for its own rows: see kernels/lora. No torch here. P parts of an output, R
// ranks that there is room for, K inputs, N outputs.
#pragma once

#include "packed_linear.h"
#include "types.h"

namespace headrace {

enum class BankForm : int64_t {
  kPlain = 0,     // numbers of the inputs' type
  kBfloat16 = 1,  // beside inputs in float32
  kCoded = 2,     // 8 bits, see CodedSlot
};

struct LowRankBank {
  const void *a, *b;     // [slots, P, R, K] and [slots, R, N]; kCoded: [slots, CodedSlot::bytes], and null
  const int64_t* ranks;  // [slots, P]
  const int64_t* ends;   // [P]: one past each part's last output
  int64_t parts, most_ranks, inputs, outputs;
  BankForm form;
};

// What a slot of a coded bank holds, one behind the other, padded to 64 bytes: `a` as a packed weight of P * R outputs
// in kInt8Group without mins, and `b` by groups of 16 ranks and panels of 16 outputs, which never lie in two parts.
// Byte j of word w of a panel's output is the code of rank 4 w + j, plus 128; a bfloat16 scale belongs to the 16.
// kernels/lora/codes.py writes the same.
struct CodedSlot {
  packed::Weight a;
  const uint8_t* codes;    // [R / 16, panels, 4, 16, 4]
  const bf16* scales;      // [R / 16, panels, 16]
  int64_t panels;          // of b, in all parts

  HEADRACE_PACKED_INLINE static int64_t panels_of(const LowRankBank& bank) {
    int64_t panels = 0, first = 0;
    for (int64_t part = 0; part < bank.parts; first = bank.ends[part++])
      panels += (bank.ends[part] - first + packed::kPanel - 1) / packed::kPanel;
    return panels;
  }
  HEADRACE_PACKED_INLINE CodedSlot(const LowRankBank& bank, int64_t slot)
      : a{packed::Format::kInt8Group, bank.parts * bank.most_ranks, bank.inputs, nullptr}, panels(panels_of(bank)) {
    const int64_t b_panels = bank.most_ranks / kRanks * panels, a_bytes = a.outputs * a.padded(),
                  a_scale_bytes = a.outputs * a.groups() * 2, b_bytes = b_panels * packed::kPanel * kRanks;
    bytes = (a_bytes + a_scale_bytes + b_bytes + b_panels * packed::kPanel * 2 + 63) / 64 * 64;
    const char* const at = static_cast<const char*>(bank.a) + slot * bytes;
    a.words = reinterpret_cast<const uint32_t*>(at);
    a.group_scales = reinterpret_cast<const uint16_t*>(at + a_bytes);
    codes = reinterpret_cast<const uint8_t*>(at + a_bytes + a_scale_bytes);
    scales = reinterpret_cast<const bf16*>(codes + b_bytes);
  }

  int64_t bytes;  // of a slot
  static constexpr int64_t kRanks = 16;  // that share a scale
};

struct LowRankRows {
  LowRankBank bank;
  const void* x;  // rows of `inputs`, `x_stride` values apart
  int64_t x_stride;
  void* out;  // rows of `outputs`, `out_stride` values apart, of `type`, or float32
  int64_t out_stride;
  bool is_out_float;
  const int64_t *order, *slots;  // rows with an adapter, those of a slot together, and the slot of each
  float* reduced;                // [places in `order`, P, R]: what shrink leaves, of an adapter's ranks alone
};

// `type` is a FloatType, of x and out alike unless said. Places [begin, end) of `order` are all of one slot. A row gets
// the same bits whatever else is in the batch, and however outputs are divided.
struct LowRankKernels {
  // reduced[i] = a x[order[i]], but of coded banks, whose `a` packed kernels multiply.
  void (*shrink)(int type, const LowRankRows&, int64_t begin, int64_t end);
  // The floats of reduced, of coded banks, into the form that `expand` takes.
  void (*code)(const LowRankRows&, int64_t begin, int64_t end);
  // out[order[i]] += b' reduced[i], of the panels [first, last): sixteen outputs each, of coded banks those of b.
  void (*expand)(int type, const LowRankRows&, int64_t begin, int64_t end, int64_t first, int64_t last);
};

}  // namespace headrace
