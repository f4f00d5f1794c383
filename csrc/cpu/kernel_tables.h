// The kernel tables, one per instruction set. Declared are all; compiled in are those for the family of the processor that
// the compiler can make.
#pragma once

#include "kernels.h"

namespace tern {

extern const Kernels KERNELS_GENERIC;
extern const Kernels KERNELS_AVX2;
extern const Kernels KERNELS_AVXVNNI;
extern const Kernels KERNELS_AVX512;
extern const Kernels KERNELS_NEON;
extern const Kernels KERNELS_I8MM;

}  // namespace tern
