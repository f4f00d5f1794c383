// The kernel tables that are compiled in, one per instruction set.
#pragma once

#include "kernels.h"

namespace tern {

extern const Kernels KERNELS_GENERIC;
#if defined(__x86_64__)
extern const Kernels KERNELS_AVX2;
#endif

}  // namespace tern
