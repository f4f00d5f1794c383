// Instruction sets: one record for each, whose parts are compiled for it alone.
//
// Whatever is compiled for an instruction set lies in a namespace named for it, so that a profile shows which one ran. The
// headers that several of them share are compiled anew for each, in the namespace that the macro TERN_ISA names. In there all
// that is not in a record has internal linkage: an inline function with the instructions of one processor must not be the copy
// that the linker picks for all (tests/test_isas.py looks for such).
#pragma once

#include "attention_kernels.h"
#include "kernels.h"
#include "multiply_add_loops.h"

namespace tern {

struct Isa {
    const char * name;
    // Its own, or those of a lesser one.
    const Kernels & kernels;
    const AttentionKernels & attention;
    const MultiplyAddLoop & multiply_adds;
};

// The best for this processor, or the one that the environment variable TERN_ISA names ("generic", "avx2", "avxvnni", "avx512",
// "neon", "i8mm"); a name that is unknown or that the processor lacks is reported on stderr and ignored.
const Isa & isa();
// Its kernels.
const Kernels & kernels();

// All that this processor can run, best first: entries [0, *count).
const Isa * const * available_isas(int * count);

}  // namespace tern
