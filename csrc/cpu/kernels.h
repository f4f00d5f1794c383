// The arithmetic of ternary matrices: y = W x with W in tiles (tiles.h) and x quantized to int8.
//
// x is quantized per group of 128 inputs: d = max|x| / 127, q = round-half-even(x / d). With u the 2-bit codes,
//
//   y = sum over groups of  d_w * d_x * (sum of u*q - sum of q)
//
// Inside a group everything is an exact integer; the fp32 sum runs over the groups in order, one multiply-add each. So a
// result has the same bits whatever the number of columns, the number of threads and the split of the work.
//
// One table of functions per instruction set; kernels() picks it when first called.
#pragma once

#include "../format/hadamard.h"
#include "tiles.h"

#include <algorithm>
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
    const char * isa;

    // Quantizes the groups [group_begin, group_end) of the column x (n_in floats) into `column`.
    void (*quantize)(const ColumnLayout & layout, const float * x, int64_t group_begin, int64_t group_end,
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

// The best table for this processor, or the one that the environment variable TERN_ISA names ("generic", "avx2", "avxvnni",
// "avx512", "neon", "i8mm"); a name that is unknown or that the processor lacks is reported on stderr and ignored.
const Kernels & kernels();

// All tables that this processor can run, best first: entries [0, *count).
const Kernels * const * available_kernels(int * count);

// Groups that are rotated and quantized together: a block may span several of them.
int64_t rotation_unit(const Rotation * rotation);

// One row of rotated weights to the plain weights that it stands for; `row` is overwritten.
void unrotate_row(const Kernels & kernels, const Rotation & rotation, float * row, float * plain);

// How n_cols columns are dealt out to panels: as many as are needed, all of about the same width. Panel p lies
// begin(p) * ColumnLayout::bytes behind the first one.
struct Panels {
    int64_t n_cols;
    int64_t count;

    Panels(int64_t n_cols, int max_width) : n_cols(n_cols), count((n_cols + max_width - 1) / max_width) {}
    int64_t begin(int64_t panel) const { return n_cols * panel / count; }
    int width(int64_t panel) const { return static_cast<int>(begin(panel + 1) - begin(panel)); }
};

// Quantizes the groups [group_begin, group_end) of the column x, rotated first if there is a rotation (else nullptr). The
// groups are whole units of rotation_unit().
void prepare_column(const Kernels & kernels, const Rotation * rotation, const ColumnLayout & layout, const float * x,
                    int64_t group_begin, int64_t group_end, uint8_t * column);
// The same for all columns of a panel.
void prepare_panel(const Kernels & kernels, const Rotation * rotation, const ColumnLayout & layout,
                   const float * const * x, int n_cols, int64_t group_begin, int64_t group_end, uint8_t * panel);

// The rows of tiles [tile_begin, tile_end) times the n_cols columns of `panels`. outputs[c] points at row 0 of column c.
void multiply_panels(const Kernels & kernels, const Tiles & tiles, int64_t tile_begin, int64_t tile_end,
                     const ColumnLayout & layout, const uint8_t * panels, int64_t n_cols, float * const * outputs);

// One row as floats.
void dequantize_row(const Kernels & kernels, const Tiles & tiles, int64_t row, float * weights);

// What threads share of a matrix that meets n_cols columns: items of some tiles each, so many that taking one does not cost.
struct Items {
    int64_t tiles;
    int64_t per_item;
    int64_t count;

    Items(const Kernels & kernels, const Tiles & matrix, int64_t n_cols);

    // The first tile of an item; behind the last item, the number of tiles.
    int64_t tile(int64_t item) const { return std::min(item * per_item, tiles); }
};

// Deals columns that lie anywhere, each a panel of its own, out to `panels`: n_cols * layout.bytes.
void make_panels(const Kernels & kernels, const ColumnLayout & layout, const uint8_t * const * columns, int64_t n_cols,
                 uint8_t * panels);

// multiply_panels() for such columns.
void matmul(const Kernels & kernels, const Tiles & tiles, int64_t tile_begin, int64_t tile_end,
            const ColumnLayout & layout, const uint8_t * const * columns, int64_t n_cols, float * const * outputs);

}  // namespace tern
