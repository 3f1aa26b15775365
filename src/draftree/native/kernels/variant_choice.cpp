// The choice among the variants of the kernels, and the processor's maker: see variant_choice.h
// and kernels.h.
#include "variant_choice.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace draftree {

#define DRAFTREE_DECLARE(name) extern const Kernels kernels_##name;
DRAFTREE_DECLARE(generic)
#if defined(__x86_64__)
DRAFTREE_DECLARE(avx2)
DRAFTREE_DECLARE(avx512)
DRAFTREE_DECLARE(avx512_vnni)
DRAFTREE_DECLARE(avx512_bf16)
#if defined(DRAFTREE_HAS_AMX)
DRAFTREE_DECLARE(amx)
#endif
#endif

const bool made_by_amd = [] {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0, &a, &b, &c, &d) && b == 0x68747541;  // "Auth" of "AuthenticAMD"
#else
  return false;
#endif
}();

namespace {

#if defined(__x86_64__)
bool bit(unsigned word, int at) { return (word >> at) & 1; }

// Return the bits of `all` that the operating system saves when threads switch (xgetbv).
bool saves(unsigned all) {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & all) == all;
}
#endif

#if defined(DRAFTREE_HAS_AMX)
// Ask the system to save the tiles of the matrix unit when threads switch.
bool may_use_tiles() {
  constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = saves(3u << 17) && syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
  return may;
}
#endif

}  // namespace

// The instruction cpuid is asked itself: __builtin_cpu_supports finds nothing in builds by zig.
std::vector<const Kernels*> supported_variants() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0, basic = 0, extended = 0, features = 0, more = 0, matrix = 0,
           last = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) basic = c;
  if (__get_cpuid(0x80000001u, &a, &b, &c, &d)) extended = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) features = b, more = c, matrix = d;
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) last = a;
  // FMA, OSXSAVE, AVX, F16C; LZCNT; BMI1, AVX2, BMI2
  const bool avx2 = bit(basic, 12) && bit(basic, 27) && bit(basic, 28) && bit(basic, 29) &&
                    bit(extended, 5) && bit(features, 3) && bit(features, 5) && bit(features, 8) &&
                    saves(0x6);
  // AVX-512 F, DQ, CD, BW, VL
  const bool avx512 = avx2 && bit(features, 16) && bit(features, 17) && bit(features, 28) &&
                      bit(features, 30) && bit(features, 31) && saves(0xe6);
  const bool vnni = avx512 && bit(more, 11);  // AVX512_VNNI
  const bool bf16 = vnni && bit(last, 5);     // AVX512_BF16
#if defined(DRAFTREE_HAS_AMX)
  // AMX-BF16, AMX-TILE
  if (bf16 && bit(matrix, 22) && bit(matrix, 24) && may_use_tiles()) found.push_back(&kernels_amx);
#endif
  if (bf16) found.push_back(&kernels_avx512_bf16);
  if (vnni) found.push_back(&kernels_avx512_vnni);
  if (avx512) found.push_back(&kernels_avx512);
  if (avx2) found.push_back(&kernels_avx2);
#endif
  found.push_back(&kernels_generic);
  return found;
}

namespace {

const Kernels* chosen = supported_variants().front();

}  // namespace

const Kernels& variant_in_use() { return *chosen; }

bool use_variant(const std::string& name) {
  for (const Kernels* each : supported_variants())
    if (name == each->name) {
      chosen = each;
      return true;
    }
  return false;
}

}  // namespace draftree
