// The records of the instruction sets, and their parts. Declared are all; compiled in are those for the family of the processor
// that the compiler can make.
#pragma once

#include "isa.h"

#define TERN_DECLARE_ISA(name)                                                                                         \
    namespace name {                                                                                                   \
    extern const Kernels KERNELS;                                                                                      \
    extern const AttentionKernels ATTENTION;                                                                           \
    extern const MultiplyAddLoop MULTIPLY_ADDS;                                                                        \
    extern const Isa ISA;                                                                                              \
    }

namespace tern {

TERN_DECLARE_ISA(generic)
TERN_DECLARE_ISA(avx2)
TERN_DECLARE_ISA(avxvnni)
TERN_DECLARE_ISA(avx512)
TERN_DECLARE_ISA(neon)
TERN_DECLARE_ISA(i8mm)

}  // namespace tern

#undef TERN_DECLARE_ISA
