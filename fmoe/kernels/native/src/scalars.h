// Common parts of the files that are compiled for each instruction set: the namespace named after it, and loads and
// stores of numbers.
//
// Such a file has everything inside that namespace. The linker would merge functions that have the same name in two
// instruction sets, and the wrong one would run on older processors. For the same reason, nothing of std:: is used.
#pragma once
#include "kernels.h"

#define FMOE_JOIN_(a, b) a##b
#define FMOE_JOIN(a, b) FMOE_JOIN_(a, b)

namespace fmoe {
namespace FMOE_JOIN(isa_, FMOE_ISA) {

#define INLINE [[gnu::always_inline]] static inline
#define SIMD _Pragma("omp simd")

INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

INLINE float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

INLINE float load(const float* p) { return *p; }
INLINE float load(const bf16* p) { return from_bits(uint32_t(p->bits) << 16); }
INLINE void store(float* p, float x) { *p = x; }

INLINE void store(bf16* p, float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits = to_bits(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  p->bits = uint16_t(x != x ? 0x7fc0 : rounded);
}

}  // namespace FMOE_JOIN(isa_,FMOE_ISA)
}  // namespace fmoe
