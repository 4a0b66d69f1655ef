// From an operator to the kernels of the best instruction set that is compiled in, there, and allowed.
#pragma once

#include <atomic>

#include "isa.h"

namespace headrace {

inline std::atomic<int>& allowed_isa() {
  static std::atomic<int> level{machine_isa()};
  return level;
}

#ifdef HEADRACE_HAS_AVX2
#define HEADRACE_AVX2(x) x
#else
#define HEADRACE_AVX2(x) nullptr
#endif
#ifdef HEADRACE_HAS_AVXVNNI
#define HEADRACE_AVXVNNI(x) x
#else
#define HEADRACE_AVXVNNI(x) nullptr
#endif
#ifdef HEADRACE_HAS_AVX512
#define HEADRACE_AVX512(x) x
#else
#define HEADRACE_AVX512(x) nullptr
#endif
#ifdef HEADRACE_HAS_AMX
#define HEADRACE_AMX(x) x
#else
#define HEADRACE_AMX(x) nullptr
#endif

// The best of up to five tables, plainest first, null where there is none.
template <class Table>
const Table& pick(const Table* scalar, const Table* avx2, const Table* avx_vnni, const Table* avx512, const Table* amx) {
  const Table* tables[] = {scalar, avx2, avx_vnni, avx512, amx};
  for (int level = allowed_isa(); level > 0; --level)
    if (tables[level]) return *tables[level];
  return *scalar;
}

}  // namespace headrace

// Declares `name` in the namespace of every instruction set, and `best_<name>()`: for sources compiled for
// "scalar avx2 avx512", with _AMX for those that are compiled for amx too, with _ALL also for avxvnni.
#define HEADRACE_TABLE(Table, name)                                                                                      \
  namespace headrace {                                                                                                  \
  namespace scalar { extern const Table name; }                                                                         \
  namespace avx2 { extern const Table name; }                                                                           \
  namespace avx512 { extern const Table name; }                                                                         \
  inline const Table& best_##name() {                                                                                   \
    return pick<Table>(&scalar::name, HEADRACE_AVX2(&avx2::name), nullptr, HEADRACE_AVX512(&avx512::name), nullptr);    \
  }                                                                                                                     \
  }
#define HEADRACE_TABLE_AMX(Table, name)                                                                                  \
  namespace headrace {                                                                                                  \
  namespace scalar { extern const Table name; }                                                                         \
  namespace avx2 { extern const Table name; }                                                                           \
  namespace avx512 { extern const Table name; }                                                                         \
  namespace amx { extern const Table name; }                                                                            \
  inline const Table& best_##name() {                                                                                   \
    return pick<Table>(&scalar::name, HEADRACE_AVX2(&avx2::name), nullptr, HEADRACE_AVX512(&avx512::name),              \
                       HEADRACE_AMX(&amx::name));                                                                       \
  }                                                                                                                     \
  }
#define HEADRACE_TABLE_ALL(Table, name)                                                                                  \
  namespace headrace {                                                                                                  \
  namespace scalar { extern const Table name; }                                                                         \
  namespace avx2 { extern const Table name; }                                                                           \
  namespace avxvnni { extern const Table name; }                                                                        \
  namespace avx512 { extern const Table name; }                                                                         \
  namespace amx { extern const Table name; }                                                                            \
  inline const Table& best_##name() {                                                                                   \
    return pick<Table>(&scalar::name, HEADRACE_AVX2(&avx2::name), HEADRACE_AVXVNNI(&avxvnni::name),                     \
                       HEADRACE_AVX512(&avx512::name), HEADRACE_AMX(&amx::name));                                       \
  }                                                                                                                     \
  }
