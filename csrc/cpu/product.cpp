// The loops over columns, panels and tiles that all instruction sets share: see product.h.
#include "product.h"

#include <cstring>

namespace tern {

namespace {

// Many columns meet the tiles in blocks: tiles of about BLOCK_BYTES stay in the first-level cache while panels of about
// PANEL_BYTES, which stay in the second-level cache, pass by.
constexpr size_t BLOCK_BYTES = 16 * 1024;
constexpr size_t PANEL_BYTES = 128 * 1024;

// What a thread reads in a microsecond or two of decode. More panels take their time over a few tiles.
constexpr size_t ITEM_BYTES = 16 * 1024;
constexpr int64_t MAX_ITEM_OF_PANELS = 4;

// Interleaves the parts [begin, end) of columns, PART bytes each: panel[part][c] = columns[c][part]. `offset`: in a column.
template <int PART>
void interleave(const uint8_t * const * columns, int n_cols, size_t offset, int64_t begin, int64_t end,
                uint8_t * panel) {
    panel += (offset + begin * PART) * n_cols;
    for (int64_t i = begin; i < end; i++) {
        for (int c = 0; c < n_cols; c++, panel += PART) {
            std::memcpy(panel, columns[c] + offset + i * PART, PART);
        }
    }
}

// The groups [group_begin, group_end) of n_cols columns to a panel.
void make_panel(const Kernels & kernels, const ColumnLayout & layout, const uint8_t * const * columns, int n_cols,
                int64_t group_begin, int64_t group_end, uint8_t * panel) {
    const int64_t input_begin = group_begin * ACTIVATION_GROUP;
    const int64_t input_end = std::min(group_end * ACTIVATION_GROUP, layout.n_in);
    if (kernels.panel_inputs == 8) {
        interleave<8>(columns, n_cols, 0, input_begin / 8, input_end / 8, panel);
    } else {
        interleave<4>(columns, n_cols, 0, input_begin / 4, input_end / 4, panel);
    }
    interleave<4>(columns, n_cols, layout.scales, group_begin, group_end, panel);
    interleave<4>(columns, n_cols, layout.sums, group_begin, group_end, panel);
}

// Groups that are rotated and quantized together: a block may span several of them.
int64_t rotation_unit(const Rotation * rotation) {
    return rotation == nullptr ? 1 : std::max<int64_t>(1, rotation->block / ACTIVATION_GROUP);
}

// Tiles that a block of the loop takes.
int64_t tiles_at_a_time(const Kernels & kernels, const Tiles & tiles) {
    const auto n = static_cast<int64_t>(BLOCK_BYTES / tile_bytes(tiles.n_in, tiles.group));
    return std::max<int64_t>(kernels.tiles_at_once, n / kernels.tiles_at_once * kernels.tiles_at_once);
}

// multiply_panels() for a matrix that is in tiles.
void multiply_tiles(const Kernels & kernels, const Tiles & tiles, int64_t tile_begin, int64_t tile_end,
                    const ColumnLayout & layout, const uint8_t * panels, int64_t n_cols, float * const * outputs,
                    Scratch scratch) {
    const size_t stride = tile_bytes(tiles.n_in, tiles.group);
    const Panels p(n_cols, kernels.max_columns);
    const int64_t at_a_time = p.count == 1 && !tiles.dense ? tile_end - tile_begin : tiles_at_a_time(kernels, tiles);
    auto ** results = scratch.take<float *>(kernels.max_columns);
    auto * expanded = tiles.dense ? scratch.take<uint8_t>(at_a_time * static_cast<int64_t>(stride)) : nullptr;
    const int64_t panels_at_a_time =
        std::max<int64_t>(1, static_cast<int64_t>(PANEL_BYTES / layout.bytes) / kernels.max_columns);
    for (int64_t first = 0; first < p.count; first += panels_at_a_time) {
        const int64_t last = std::min(first + panels_at_a_time, p.count);
        for (int64_t tile = tile_begin; tile < tile_end; tile += at_a_time) {
            const int64_t end = std::min(tile + at_a_time, tile_end);
            const uint8_t * block = tiles.tile(tile);
            if (tiles.dense) {
                for (int64_t t = tile; t < end; t++) {
                    kernels.expand(tiles.tile(t), tiles.n_in, expanded + stride * static_cast<size_t>(t - tile));
                }
                block = expanded;
            }
            const int64_t row = tile * TILE_ROWS;
            const int64_t n_rows = std::min(end * TILE_ROWS, tiles.n_out) - row;
            for (int64_t panel = first; panel < last; panel++) {
                for (int c = 0; c < p.width(panel); c++) {
                    results[c] = outputs[p.begin(panel) + c] + row;
                }
                kernels.multiply(block, n_rows, tiles.group, layout, panels + p.begin(panel) * layout.bytes,
                                 p.width(panel), results);
            }
        }
    }
}

size_t tiles_scratch_bytes(const Kernels & kernels, const Tiles & tiles) {
    const auto expanded =
        tiles.dense ? tiles_at_a_time(kernels, tiles) * static_cast<int64_t>(tile_bytes(tiles.n_in, tiles.group)) : 0;
    return Scratch::bytes<float *>(kernels.max_columns) + Scratch::bytes<uint8_t>(expanded);
}

// Plain rows are put into a tile as they come.
void multiply_plain_rows(const Kernels & kernels, const ProductMatrix & matrix, int64_t tile_begin, int64_t tile_end,
                         const ColumnLayout & layout, const uint8_t * panels, int64_t n_cols, float * const * outputs,
                         Scratch scratch) {
    Tiles tile = matrix.tiles;
    auto * memory = scratch.take<uint8_t>(static_cast<int64_t>(tile.stride()));
    auto ** results = scratch.take<float *>(n_cols);
    tile.first = memory;
    for (int64_t t = tile_begin; t < tile_end; t++) {
        const int64_t row = t * TILE_ROWS;
        tile.n_out = std::min<int64_t>(TILE_ROWS, matrix.tiles.n_out - row);
        pack_tile(*matrix.type, tile.group, matrix.rows + row * matrix.row_stride, matrix.row_stride,
                  static_cast<int>(tile.n_out), tile.n_in, memory);
        for (int64_t c = 0; c < n_cols; c++) {
            results[c] = outputs[c] + row;
        }
        multiply_tiles(kernels, tile, 0, 1, layout, panels, n_cols, results, scratch);
    }
}

}  // namespace

ColumnLayout::ColumnLayout(int64_t n_in)
    : n_in(n_in), n_groups((n_in + ACTIVATION_GROUP - 1) / ACTIVATION_GROUP), scales(static_cast<size_t>(n_in)),
      sums(scales + static_cast<size_t>(n_groups) * sizeof(float)),
      bytes((sums + static_cast<size_t>(n_groups) * 2 * sizeof(int16_t) + 63) / 64 * 64) {}

ReadyColumns::ReadyColumns(const Kernels & kernels, const Rotation * rotation, const FloatColumns & x, bool one_by_one)
    : kernels_(kernels), rotation_(rotation), x_(x), layout_(x.n_in),
      panels_(x.n_cols, one_by_one ? 1 : kernels.max_columns) {}

void ReadyColumns::prepare(int ith, int nth, Scratch scratch) const {
    const int64_t unit = rotation_unit(rotation_);
    const int64_t n_units = layout_.n_groups / unit;  // of a panel; a block divides the column
    const int64_t total = x_.n_slices * panels_.count * n_units;
    const int64_t end = total * (ith + 1) / nth;
    for (int64_t u = total * ith / nth; u < end;) {
        const int64_t panel = u / n_units % panels_.count;
        const int64_t slice = u / n_units / panels_.count;
        const int64_t first = u % n_units;
        const int64_t last = std::min(n_units, first + end - u);
        prepare_panel(slice, panel, first * unit, last * unit, scratch);
        u += last - first;
    }
}

size_t ReadyColumns::scratch_bytes() const {
    const int64_t width = std::min<int64_t>(panels_.n_cols, kernels_.max_columns);
    return Scratch::bytes<float>(rotation_ != nullptr ? x_.n_in : 0) +
           Scratch::bytes<uint8_t>(width * static_cast<int64_t>(layout_.bytes)) + Scratch::bytes<uint8_t *>(width);
}

// The groups [group_begin, group_end) of all columns of a panel, whole units of rotation_unit().
void ReadyColumns::prepare_panel(int64_t slice, int64_t panel, int64_t group_begin, int64_t group_end,
                                 Scratch scratch) const {
    auto * rotated = rotation_ != nullptr ? scratch.take<float>(x_.n_in) : nullptr;
    const int64_t begin = panels_.begin(panel);
    const int width = panels_.width(panel);
    uint8_t * const made = memory_ + (slice * x_.n_cols + begin) * layout_.bytes;
    if (width == 1) {
        prepare_column(x_.column(slice, begin), group_begin, group_end, made, rotated);
        return;
    }
    auto * memory = scratch.take<uint8_t>(width * static_cast<int64_t>(layout_.bytes));
    auto ** columns = scratch.take<const uint8_t *>(width);
    for (int c = 0; c < width; c++) {
        uint8_t * column = memory + c * layout_.bytes;
        prepare_column(x_.column(slice, begin + c), group_begin, group_end, column, rotated);
        columns[c] = column;
    }
    make_panel(kernels_, layout_, columns, width, group_begin, group_end, made);
}

void ReadyColumns::prepare_column(const float * x, int64_t group_begin, int64_t group_end, uint8_t * column,
                                  float * rotated) const {
    if (rotation_ == nullptr) {
        kernels_.quantize_activation(layout_, x, group_begin, group_end, column);
        return;
    }
    const float * signs = rotation_->signs.empty() ? nullptr : rotation_->signs.data();
    // Block by block, so that what is rotated is still in the first-level cache when it is quantized.
    const int64_t unit = rotation_unit(rotation_);
    for (int64_t group = group_begin; group < group_end; group += unit) {
        const int64_t begin = group * ACTIVATION_GROUP;
        const int64_t end = std::min((group + unit) * ACTIVATION_GROUP, layout_.n_in);
        permute(*rotation_, x, begin, end - begin, rotated + begin);
        for (int64_t i = begin; i < end; i += rotation_->block) {
            kernels_.hadamard(rotated + i, signs != nullptr ? signs + i : nullptr, rotation_->block);
        }
        kernels_.quantize_activation(layout_, rotated, group, std::min(group + unit, group_end), column);
    }
}

Items::Items(const Kernels & kernels, const Tiles & matrix, int64_t n_cols) : tiles(matrix.count()) {
    auto n = static_cast<int64_t>(ITEM_BYTES / tile_bytes(matrix.n_in, matrix.group));
    if (n_cols > kernels.max_columns) {
        n = std::min(n, MAX_ITEM_OF_PANELS);
    }
    per_item = std::max<int64_t>(1, n / kernels.tiles_at_once) * kernels.tiles_at_once;
    count = (tiles + per_item - 1) / per_item;
}

void multiply_panels(const Kernels & kernels, const ProductMatrix & matrix, int64_t tile_begin, int64_t tile_end,
                     const ColumnLayout & layout, const uint8_t * panels, int64_t n_cols, float * const * outputs,
                     Scratch scratch) {
    if (matrix.rows == nullptr) {
        multiply_tiles(kernels, matrix.tiles, tile_begin, tile_end, layout, panels, n_cols, outputs, scratch);
    } else {
        multiply_plain_rows(kernels, matrix, tile_begin, tile_end, layout, panels, n_cols, outputs, scratch);
    }
    if (matrix.squared_relu) {
        const int64_t begin = tile_begin * TILE_ROWS;
        const int64_t end = std::min(tile_end * TILE_ROWS, matrix.tiles.n_out);
        for (int64_t c = 0; c < n_cols; c++) {
            kernels.squared_relu_for_silu(outputs[c] + begin, end - begin);
        }
    }
}

size_t multiply_scratch_bytes(const Kernels & kernels, const ProductMatrix & matrix, int64_t n_cols) {
    size_t n_bytes = tiles_scratch_bytes(kernels, matrix.tiles);
    if (matrix.rows != nullptr) {
        n_bytes +=
            Scratch::bytes<uint8_t>(static_cast<int64_t>(matrix.tiles.stride())) + Scratch::bytes<float *>(n_cols);
    }
    return n_bytes;
}

Product::Product(const Kernels & kernels, const ReadyColumns & columns, int64_t slice, const ProductMatrix & matrix,
                 float * result, size_t result_stride)
    : kernels_(kernels), columns_(columns), slice_(slice), matrix_(matrix), result_(result),
      result_stride_(result_stride), items_(kernels, matrix.tiles, columns.n_cols()) {}

void Product::multiply(int64_t begin, int64_t end, Scratch scratch) const {
    const int64_t n_cols = columns_.n_cols();
    auto ** outputs = scratch.take<float *>(n_cols);
    for (int64_t c = 0; c < n_cols; c++) {
        outputs[c] = reinterpret_cast<float *>(reinterpret_cast<char *>(result_) + c * result_stride_);
    }
    multiply_panels(kernels_, matrix_, items_.tile(begin), items_.tile(end), columns_.layout(), columns_.panels(slice_),
                    n_cols, outputs, scratch);
}

size_t Product::scratch_bytes() const {
    return Scratch::bytes<float *>(columns_.n_cols()) + multiply_scratch_bytes(kernels_, matrix_, columns_.n_cols());
}

void make_panels(const Kernels & kernels, const ColumnLayout & layout, const uint8_t * const * columns, int64_t n_cols,
                 uint8_t * panels) {
    const Panels p(n_cols, kernels.max_columns);
    for (int64_t panel = 0; panel < p.count; panel++) {
        make_panel(kernels, layout, columns + p.begin(panel), p.width(panel), 0, layout.n_groups,
                   panels + p.begin(panel) * layout.bytes);
    }
}

void unrotate_row(const Kernels & kernels, const Rotation & rotation, float * row, float * plain) {
    for (int64_t i = 0; i < rotation.n_in; i += rotation.block) {
        kernels.hadamard(row + i, nullptr, rotation.block);
    }
    for (size_t i = 0; i < rotation.signs.size(); i++) {
        row[i] *= rotation.signs[i];
    }
    permute_back(rotation, row, plain);
}

void look_up_row(const Kernels & kernels, const ProductMatrix & matrix, const Rotation * rotation, int64_t row,
                 float * weights, Scratch scratch) {
    const Tiles & tiles = matrix.tiles;
    float * stored = rotation != nullptr ? scratch.take<float>(tiles.n_in) : weights;
    if (row < 0 || row >= tiles.n_out) {
        std::memset(stored, 0, static_cast<size_t>(tiles.n_in) * sizeof(float));
    } else if (matrix.rows != nullptr) {
        dequantize_row(*matrix.type, matrix.rows + row * matrix.row_stride, tiles.n_in, stored);
    } else {
        const uint8_t * tile = tiles.tile(row / TILE_ROWS);
        if (tiles.dense) {
            auto * expanded = scratch.take<uint8_t>(static_cast<int64_t>(tile_bytes(tiles.n_in, tiles.group)));
            kernels.expand(tile, tiles.n_in, expanded);
            tile = expanded;
        }
        dequantize_tile_row(tile, static_cast<int>(row % TILE_ROWS), tiles.n_in, tiles.group, stored);
    }
    if (rotation != nullptr) {
        unrotate_row(kernels, *rotation, stored, weights);
    }
}

size_t look_up_scratch_bytes(const ProductMatrix & matrix, const Rotation * rotation) {
    const Tiles & tiles = matrix.tiles;
    return Scratch::bytes<float>(rotation != nullptr ? tiles.n_in : 0) +
           Scratch::bytes<uint8_t>(tiles.dense ? static_cast<int64_t>(tile_bytes(tiles.n_in, tiles.group)) : 0);
}

}  // namespace tern
