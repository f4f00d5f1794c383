// Ternarization: the nearest ternary group for a group of real weights, and packing it in the same pass.
#pragma once

#include "ternary_types.h"

#include <cstdint>

namespace tern {

enum class WeightFormat { F32, F16, BF16 };

inline int weight_bytes(WeightFormat format) {
    return format == WeightFormat::F32 ? 4 : 2;
}

struct TernarizeStats {
    int64_t n = 0;            // weights seen
    int64_t zeros = 0;        // weights that became 0
    double sum_sq = 0;        // sum of w^2
    double sum_sq_error = 0;  // sum of (w - decoded)^2
    int64_t groups = 0;
    int64_t ternary_groups = 0;  // that held nothing but -a, 0 and a for some a
    int64_t exact_groups = 0;    // of these, whose a is an fp16 number
    double max_scale_error = 0;  // of the others, the largest |a - fp16(a)| / a
    // Index in the row of the first NaN or Inf, or of a magnitude that takes its group's scale beyond fp16; -1 if none.
    int64_t non_finite = -1;

    void add(const TernarizeStats & other);
};

// Ternarizes and packs one row of n_in weights (a multiple of type.block).
//
// Each group of type.block weights gets the ternary values and the scale that minimize its squared error. For k nonzero
// weights the best choice is the k largest magnitudes with their mean as scale, which lowers the error by S_k^2 / k
// (S_k: the sum of those magnitudes); all k are tried. The scale is then rounded to fp16 and every weight goes to the
// nearest of -d, 0, +d for the rounded d. A group that is ternary already keeps its values, and of its scale loses no more
// than the rounding to fp16. Stops at a row with a value that is not finite (stats.non_finite >= 0).
TernarizeStats ternarize_row(const TernaryType & type, const void * weights, WeightFormat format, int64_t n_in,
                             uint8_t * data);

}  // namespace tern
