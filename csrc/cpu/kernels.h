// The arithmetic of ternary matrices: y = W x with W in tiles (tiles.h) and x quantized to int8.
//
// x is quantized per group of 128 inputs: d = max|x| / 127, q = round-half-even(x / d). With u the 2-bit codes,
//
//   y = sum over groups of  d_w * d_x * (sum of u*q - sum of q)
//
// Inside a group everything is an exact integer; the fp32 sum runs over the groups in order, one multiply-add each. So a
// result has the same bits whatever the number of columns, the number of threads and the split of the work.
//
// One table of functions per instruction set (isa.h).
#pragma once

#include "tiles.h"

#include <cstddef>
#include <cstdint>

namespace tern {

constexpr int ACTIVATION_GROUP = 128;
// The sums of q are kept for half groups, for weights with a scale per 64 inputs. 64 * 127 = 8128 fits 16 bits.
constexpr int ACTIVATION_SUM_GROUP = 64;

// A panel holds n_cols quantized columns, interleaved as the kernels read them:
//
//   int8  q            [n_in/4][n_cols][4], or [n_in/8][n_cols][8] where Kernels::panel_inputs is 8
//   float d            [groups][n_cols]
//   int16 minus_sum    [groups][n_cols][2 half groups]
//
// A column by itself is a panel of one. All offsets of a panel are n_cols times those of a column.
struct ColumnLayout {
    int64_t n_in;
    int64_t n_groups;
    size_t scales;  // offset in bytes
    size_t sums;    // offset in bytes
    size_t bytes;   // of one column, a multiple of 64

    // n_in: a multiple of 64
    explicit ColumnLayout(int64_t n_in);
};

struct Kernels {
    // Quantizes the groups [group_begin, group_end) of the column x (n_in floats) into `column`.
    void (*quantize_activation)(const ColumnLayout & layout, const float * x, int64_t group_begin, int64_t group_end,
                                uint8_t * column);

    // The normalized Walsh-Hadamard transform of x[0..block), in place; first x[i] *= signs[i] where signs are given.
    // block: a power of two. The same bits from every instruction set.
    void (*hadamard)(float * x, const float * signs, int64_t block);

    // The first n_rows rows of consecutive tiles times the columns of a panel, 1 to max_columns: outputs[c][0..n_rows).
    void (*multiply)(const uint8_t * tiles, int64_t n_rows, int group, const ColumnLayout & layout,
                     const uint8_t * panel, int n_cols, float * const * outputs);
    int max_columns;

    // values[i] = silu^-1(relu(values[i])^2): see squared_relu.h.
    void (*squared_relu_for_silu)(float * values, int64_t n);

    // A dense tile (dense_tiles.h) to one that multiply() takes.
    void (*expand)(const uint8_t * dense, int64_t n_in, uint8_t * tile);

    // Neighbouring inputs of a column that lie together in a panel.
    int panel_inputs = 4;
    // multiply() takes so many tiles at a time, and as long for fewer.
    int tiles_at_once = 1;
};

}  // namespace tern
