#include "kernels.h"

#define FMOE_PASTE(a, b) a##b
#define FMOE_JOIN(a, b) FMOE_PASTE(a, b)
#define FMOE_QUOTE_(a) #a
#define FMOE_QUOTE(a) FMOE_QUOTE_(a)

namespace fmoe {
std::string FMOE_JOIN(isa_, FMOE_ISA)() { return FMOE_QUOTE(FMOE_ISA); }
}  // namespace fmoe
