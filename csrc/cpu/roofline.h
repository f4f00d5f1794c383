// How near the kernels come to what the machine can do: its read bandwidth, its peak of multiply-adds, and products timed
// without a host around them.
//
// A product reads its matrix once for all columns, and does n_in * n_out multiply-adds for each. So with one column (decode)
// it takes at least bytes / bandwidth, with many (prefill) at least multiply-adds / peak. Both bounds hold for the threads
// that they were measured with: two processors may be the two threads of one core.
#pragma once

#include "kernels.h"
#include "multiply_add_loops.h"
#include "tiled_matrix.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tern {

// Bytes per second that n_threads threads read from n_bytes of memory: the median of the passes through it that begin within
// so many seconds.
double read_bandwidth(int n_threads, size_t n_bytes, double seconds);

// Multiply-adds per second of n_threads threads in this loop, the median of the slices of so many seconds.
double multiply_add_peak(const MultiplyAddLoop & loop, int n_threads, double seconds);

// What a pass through some matrices took, in seconds: quantizing the columns, and multiplying.
struct ProductTimes {
    double prepare;
    double multiply;
};

// Multiplies each of the matrices in turn with n_cols columns, `repeats` times over, in one team of threads and with the split
// of the work that the plug-in has. A first pass is not counted.
std::vector<ProductTimes> time_products(const Kernels & kernels, const std::vector<const TiledMatrix *> & matrices,
                                        int64_t n_cols, int n_threads, int repeats);

}  // namespace tern
