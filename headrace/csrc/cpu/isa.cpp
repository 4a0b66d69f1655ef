// compiled for: operators
#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headrace {

#if defined(__x86_64__)
static bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  if ((d & wanted) != wanted || !(c & 1u << 1)) return false;  // AVX512-VBMI
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(2)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

static bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}

static int find_isa() {
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return kScalar;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C)) return kScalar;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vnni");
  if (!has_avx512 || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5))
    return has_avx_vnni() ? kAvxVnni : kAvx2;  // AVX512-BF16
  return has_amx() ? kAmx : kAvx512;
}
#else
static bool has_avx_vnni() { return false; }
static int find_isa() { return kScalar; }
#endif

int machine_isa() {
  static const int found = find_isa();
  return found;
}

bool has_isa(int isa) { return isa <= machine_isa() && (isa != kAvxVnni || has_avx_vnni()); }

}  // namespace headrace
