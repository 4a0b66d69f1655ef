// copy_pages: see kernels/pages for what it computes.
#pragma once

#include <cstring>

#include "operators.h"

namespace headrace {

// table [parts, 3]: address, bytes of a page, byte in the row. On the calling thread: it runs beside the steps.
inline void copy_pages(Tensor table, Tensor pages, Tensor rows, Tensor places, bool gathers) {
  STD_TORCH_CHECK(table.dim() == 2 && table.size(1) == 3 && table.is_contiguous() &&
                      table.scalar_type() == ScalarType::Long,
                  "table must be [parts, 3] int64");
  STD_TORCH_CHECK(pages.dim() == 1 && places.dim() == 1 && pages.size(0) == places.size(0) && pages.is_contiguous() &&
                      places.is_contiguous() && pages.scalar_type() == ScalarType::Long &&
                      places.scalar_type() == ScalarType::Long,
                  "pages and places must be [n] int64");
  STD_TORCH_CHECK(rows.dim() == 2 && rows.stride(1) == 1 && rows.scalar_type() == ScalarType::Byte,
                  "rows must be [S, page bytes] uint8");
  const int64_t num_parts = table.size(0), count = pages.size(0), num_rows = rows.size(0), stride = rows.stride(0);
  const int64_t *part = pointer<int64_t>(table), *page = pointer<int64_t>(pages), *place = pointer<int64_t>(places);
  for (int64_t i = 0; i < num_parts; ++i)
    STD_TORCH_CHECK(part[3 * i + 2] + part[3 * i + 1] <= rows.size(1), "a row must hold all parts");
  char* base = writable<char>(rows);
  for (int64_t n = 0; n < count; ++n) {
    STD_TORCH_CHECK(place[n] >= 0 && place[n] < num_rows && page[n] >= 0, "a page or row is out of bounds");
    for (int64_t i = 0; i < num_parts; ++i) {
      const int64_t bytes = part[3 * i + 1];
      char* stored = reinterpret_cast<char*>(part[3 * i]) + page[n] * bytes;
      char* row = base + place[n] * stride + part[3 * i + 2];
      std::memcpy(gathers ? row : stored, gathers ? stored : row, static_cast<size_t>(bytes));
    }
  }
}

inline void define_pages(Library& m) {
  m.def("copy_pages(Tensor table, Tensor pages, Tensor(a!) rows, Tensor places, bool gathers) -> ()");
}

inline void implement_pages(Library& m) { m.impl("copy_pages", TORCH_BOX(&copy_pages)); }

}  // namespace headrace
