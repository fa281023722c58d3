// Plain loops, compiled once for each instruction set.
#pragma once
#include <string>

namespace fmoe {
std::string isa_default();
std::string isa_avx2();
std::string isa_avx512();
}  // namespace fmoe
