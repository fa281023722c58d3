// Choice of code for this processor: its row kernels (kernels.h), and whether it multiplies bf16 matrices.
#pragma once
#include <ATen/Version.h>

#include <cstdlib>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"

namespace fmoe {
namespace {

// The variable FMOE_NATIVE_ISA: upper limit of the instruction set, for tests (docs/native.md). Empty: no limit.
const std::string& isa_limit() {
  static const char* named = std::getenv("FMOE_NATIVE_ISA");
  static const std::string limit = named ? named : "";
  return limit;
}

template <class Table>
const Table& choose(const Table& plain, [[maybe_unused]] const Table& avx2, [[maybe_unused]] const Table& avx512) {
#if defined(__x86_64__)
  // The instruction set that torch detected, which ATEN_CPU_CAPABILITY lowers.
  const std::string found = at::get_cpu_capability();
  const std::string& limit = isa_limit();
  if (limit == "default" || (found != "AVX2" && found != "AVX512")) return plain;
  return limit == "avx2" || found == "AVX2" ? avx2 : avx512;
#else
  return plain;
#endif
}

#if defined(__x86_64__)
#define FMOE_CHOOSE(name) choose(isa_default::name, isa_avx2::name, isa_avx512::name)
#else
#define FMOE_CHOOSE(name) choose(isa_default::name, isa_default::name, isa_default::name)
#endif

template <class T, class C>
const Kernels<T, C>& kernels();
template <>
const Kernels<float, float>& kernels() {
  static const auto& table = FMOE_CHOOSE(kernels_ff);
  return table;
}
template <>
const Kernels<bf16, float>& kernels() {
  static const auto& table = FMOE_CHOOSE(kernels_bf);
  return table;
}
template <>
const Kernels<bf16, bf16>& kernels() {
  static const auto& table = FMOE_CHOOSE(kernels_bb);
  return table;
}

// Whether the processor multiplies bf16 matrices itself (AVX512-BF16, AMX-BF16). If not, torch's bf16 GEMMs are several
// times slower than those in float.
bool has_bf16_gemm() {
  if (!isa_limit().empty() && isa_limit() != "avx512_bf16") return false;
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1)) return true;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
#else
  return true;
#endif
}

const char* isa_name() {
  const auto* table = &kernels<float, float>();
#if defined(__x86_64__)
  if (table == &isa_avx512::kernels_ff) return "avx512";
  if (table == &isa_avx2::kernels_ff) return "avx2";
#endif
  return table == &isa_default::kernels_ff ? "default" : "";
}

const Draws& draws() {
  static const auto& table = FMOE_CHOOSE(draws);
  return table;
}

const Gemms& gemms() {
  static const auto& table = FMOE_CHOOSE(gemms);
  return table;
}

}  // namespace
}  // namespace fmoe
