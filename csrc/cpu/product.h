// The product of ternary matrices with columns of floats, in two steps that threads share: the columns are made ready, then they
// meet the matrices. Whoever has threads uses this: the steps of a graph, the Python module, the measurements.
//
// Made ready, a column is rotated where the matrices are, quantized, and dealt out to a panel (kernels.h).
#pragma once

#include "../format/hadamard.h"
#include "kernels.h"
#include "scratch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace tern {

// How n_cols columns are dealt out to panels: as many as are needed, all of about the same width. Panel p lies
// begin(p) * ColumnLayout::bytes behind the first one.
struct Panels {
    int64_t n_cols;
    int64_t count;

    Panels(int64_t n_cols, int max_width) : n_cols(n_cols), count((n_cols + max_width - 1) / max_width) {}
    int64_t begin(int64_t panel) const { return n_cols * panel / count; }
    int width(int64_t panel) const { return static_cast<int>(begin(panel + 1) - begin(panel)); }
};

// Columns of floats in memory. They come in slices of n_cols, which matrices meet one by one: slice s is number s % n_inner of
// outer slice s / n_inner. Strides in bytes; the values of a column have no gaps.
struct FloatColumns {
    const char * data;
    int64_t n_in;
    int64_t n_cols;
    int64_t n_inner = 1;
    int64_t n_slices = 1;
    size_t column_stride = 0;
    size_t inner_stride = 0;
    size_t outer_stride = 0;

    const float * column(int64_t slice, int64_t i) const {
        return reinterpret_cast<const float *>(data + i * column_stride + slice % n_inner * inner_stride +
                                               slice / n_inner * outer_stride);
    }
};

// Columns of floats that are made ready for matrices that want them rotated alike.
class ReadyColumns {
  public:
    // rotation: or nullptr. one_by_one: each column is a panel of its own, to be picked with column().
    ReadyColumns(const Kernels & kernels, const Rotation * rotation, const FloatColumns & x, bool one_by_one = false);

    // The memory that they will lie in, n_bytes() of it, aligned to 64. It is given before prepare().
    size_t n_bytes() const { return static_cast<size_t>(x_.n_slices * x_.n_cols) * layout_.bytes; }
    void lie_in(uint8_t * memory) { memory_ = memory; }

    // Makes them ready. Every thread calls this, ith of nth.
    void prepare(int ith, int nth, Scratch scratch) const;
    size_t scratch_bytes() const;

    const ColumnLayout & layout() const { return layout_; }
    int64_t n_cols() const { return x_.n_cols; }
    const uint8_t * panels(int64_t slice) const { return column(slice * x_.n_cols); }
    const uint8_t * column(int64_t index) const { return memory_ + index * layout_.bytes; }

  private:
    void prepare_panel(int64_t slice, int64_t panel, int64_t group_begin, int64_t group_end, Scratch scratch) const;
    void prepare_column(const float * x, int64_t group_begin, int64_t group_end, uint8_t * column,
                        float * rotated) const;

    const Kernels & kernels_;
    const Rotation * rotation_;
    FloatColumns x_;
    ColumnLayout layout_;
    Panels panels_;
    uint8_t * memory_ = nullptr;
};

// A matrix in tiles; or in plain rows, which are put into a tile as they come.
struct ProductMatrix {
    Tiles tiles;  // of plain rows, the shape and the group alone
    const TernaryType * type = nullptr;
    const uint8_t * rows = nullptr;  // or nullptr
    size_t row_stride = 0;
    bool squared_relu = false;  // whether the results pass through squared ReLU (squared_relu.h)
};

// What threads share of a matrix that meets n_cols columns: items of some tiles each, so many that taking one does not cost.
struct Items {
    int64_t tiles;
    int64_t per_item;
    int64_t count;

    Items(const Kernels & kernels, const Tiles & matrix, int64_t n_cols);

    // The first tile of an item; behind the last item, the number of tiles.
    int64_t tile(int64_t item) const { return std::min(item * per_item, tiles); }
};

// The rows of tiles [tile_begin, tile_end) times the n_cols columns of `panels`. outputs[c] points at row 0 of column c.
void multiply_panels(const Kernels & kernels, const ProductMatrix & matrix, int64_t tile_begin, int64_t tile_end,
                     const ColumnLayout & layout, const uint8_t * panels, int64_t n_cols, float * const * outputs,
                     Scratch scratch);
size_t multiply_scratch_bytes(const Kernels & kernels, const ProductMatrix & matrix, int64_t n_cols);

// A matrix times the columns of a slice.
class Product {
  public:
    // result: row 0 of column 0; result_stride: bytes from column to column.
    Product(const Kernels & kernels, const ReadyColumns & columns, int64_t slice, const ProductMatrix & matrix,
            float * result, size_t result_stride);

    int64_t n_items() const { return items_.count; }
    // Computes the items [begin, end), after the columns are ready.
    void multiply(int64_t begin, int64_t end, Scratch scratch) const;
    size_t scratch_bytes() const;

  private:
    const Kernels & kernels_;
    const ReadyColumns & columns_;
    int64_t slice_;
    ProductMatrix matrix_;
    float * result_;
    size_t result_stride_;
    Items items_;
};

// Deals ready columns that lie anywhere, each a panel of its own, out to `panels`: n_cols * layout.bytes.
void make_panels(const Kernels & kernels, const ColumnLayout & layout, const uint8_t * const * columns, int64_t n_cols,
                 uint8_t * panels);

// One row of rotated weights to the plain weights that it stands for; `row` is overwritten.
void unrotate_row(const Kernels & kernels, const Rotation & rotation, float * row, float * plain);

// One row of a matrix as floats: the plain weights, where it is rotated; zeros for a row that it has not.
void look_up_row(const Kernels & kernels, const ProductMatrix & matrix, const Rotation * rotation, int64_t row,
                 float * weights, Scratch scratch);
size_t look_up_scratch_bytes(const ProductMatrix & matrix, const Rotation * rotation);

}  // namespace tern
