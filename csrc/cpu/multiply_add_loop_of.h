// The loop of multiply_add_loops.h for processors with vectors. An instruction set brings a class Step:
//
//   Step::Bytes, Step::Sums        vectors of 8-bit factors and of sums
//   Step::Lane                     the integer type of a sum
//   Step::ones(), Step::zero()     bytes that are all 1, sums that are all 0
//   Step::add(sums, codes, x)      sums + codes * x in the instructions of the kernels
//   Step::hold(v)                  v, which the compiler does not know to be the same
//   Step::MULTIPLY_ADDS            of one add()
//
// Each of CODES * COLUMNS pairs of operands has SUMS sums: more than one only where one instruction multiplies and adds, or
// compilers would multiply once for all of them. The sums in flight hide how long an instruction takes; they and their operands
// fit the registers.
#pragma once

#include "multiply_add_loops.h"

#include <cstring>

namespace tern::TERN_ISA {

namespace {  // on purpose: one copy for each instruction set

template <class Step> int64_t sum_of_lanes(typename Step::Sums sums) {
    typename Step::Lane lanes[sizeof(sums) / sizeof(typename Step::Lane)];
    std::memcpy(lanes, &sums, sizeof(sums));
    int64_t total = 0;
    for (const auto lane : lanes) {
        total += lane;
    }
    return total;
}

template <class Step, int CODES, int COLUMNS, int SUMS> int64_t run_multiply_adds(int64_t n_passes) {
    typename Step::Bytes codes[CODES];
    typename Step::Bytes columns[COLUMNS];
    typename Step::Sums sums[CODES][COLUMNS][SUMS];
    for (int c = 0; c < COLUMNS; c++) {
        columns[c] = Step::ones();
    }
    for (int k = 0; k < CODES; k++) {
        codes[k] = Step::hold(Step::ones());
        for (int c = 0; c < COLUMNS; c++) {
            for (int s = 0; s < SUMS; s++) {
                sums[k][c][s] = Step::hold(Step::zero());  // or all would be known to be the same
            }
        }
    }
    for (int64_t pass = 0; pass < n_passes; pass++) {
        // Says that the columns have changed, or the compiler would multiply once and for all.
        for (int c = 0; c < COLUMNS; c++) {
            columns[c] = Step::hold(columns[c]);
        }
        for (int k = 0; k < CODES; k++) {
            for (int s = 0; s < SUMS; s++) {
                for (int c = 0; c < COLUMNS; c++) {
                    sums[k][c][s] = Step::add(sums[k][c][s], codes[k], columns[c]);
                }
            }
        }
    }
    // Unrolled, or the sums would have to lie in memory.
    int64_t total = 0;
#pragma GCC unroll 16
    for (int k = 0; k < CODES; k++) {
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; c++) {
#pragma GCC unroll 16
            for (int s = 0; s < SUMS; s++) {
                total += sum_of_lanes<Step>(sums[k][c][s]);
            }
        }
    }
    return total;
}

template <class Step, int CODES, int COLUMNS, int SUMS = 1> constexpr MultiplyAddLoop multiply_add_loop() {
    return {int64_t{SUMS} * CODES * COLUMNS * Step::MULTIPLY_ADDS, run_multiply_adds<Step, CODES, COLUMNS, SUMS>};
}

}  // namespace

}  // namespace tern::TERN_ISA
