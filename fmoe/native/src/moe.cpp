#include <ATen/Version.h>
#include <torch/library.h>

#include "kernels.h"

static std::string isa() {
#ifdef __x86_64__
  const auto name = at::get_cpu_capability();
  if (name == "AVX512") return fmoe::isa_avx512();
  if (name == "AVX2") return fmoe::isa_avx2();
#endif
  return fmoe::isa_default();
}

TORCH_LIBRARY(fmoe_native, m) { m.def("isa() -> str", &isa); }
