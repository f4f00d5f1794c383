// Choice of the kernel table, and the loop over tiles and columns that all instruction sets share.
#include "kernels.h"

#include "kernel_tables.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(TERN_AVXVNNI)
#include <cpuid.h>
#endif
#if defined(TERN_NEON)
#include <sys/auxv.h>
#endif

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

#if defined(TERN_AVXVNNI)
// CPUID leaf 7, subleaf 1, bit 4 of eax; older compilers have no name for it.
bool has_avxvnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}
#endif

std::vector<const Kernels *> find_kernels() {
    std::vector<const Kernels *> found;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
#if defined(TERN_AVX512)
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni")) {
            found.push_back(&KERNELS_AVX512);
        }
#endif
#if defined(TERN_AVXVNNI)
        if (has_avxvnni()) {
            found.push_back(&KERNELS_AVXVNNI);
        }
#endif
        found.push_back(&KERNELS_AVX2);
    }
#endif
#if defined(TERN_NEON)
    if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) {
#if defined(TERN_I8MM)
        if ((getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0) {
            found.push_back(&KERNELS_I8MM);
        }
#endif
        found.push_back(&KERNELS_NEON);
    }
#endif
    found.push_back(&KERNELS_GENERIC);
    return found;
}

const std::vector<const Kernels *> & found_kernels() {
    static const std::vector<const Kernels *> found = find_kernels();
    return found;
}

const Kernels * choose_kernels() {
    const auto & found = found_kernels();
    const char * wanted = std::getenv("TERN_ISA");
    if (wanted == nullptr || *wanted == '\0') {
        return found.front();
    }
    for (const Kernels * k : found) {
        if (std::strcmp(k->isa, wanted) == 0) {
            return k;
        }
    }
    std::fprintf(stderr, "ggml-tern: TERN_ISA=%s is unknown or this processor lacks it; using %s\n", wanted,
                 found.front()->isa);
    return found.front();
}

}  // namespace

ColumnLayout::ColumnLayout(int64_t n_in)
    : n_in(n_in), n_groups((n_in + ACTIVATION_GROUP - 1) / ACTIVATION_GROUP), scales(static_cast<size_t>(n_in)),
      sums(scales + static_cast<size_t>(n_groups) * sizeof(float)),
      bytes((sums + static_cast<size_t>(n_groups) * 2 * sizeof(int16_t) + 63) / 64 * 64) {}

const Kernels & kernels() {
    static const Kernels * const chosen = choose_kernels();
    return *chosen;
}

const Kernels * const * available_kernels(int * count) {
    *count = static_cast<int>(found_kernels().size());
    return found_kernels().data();
}

int64_t rotation_unit(const Rotation * rotation) {
    return rotation == nullptr ? 1 : std::max<int64_t>(1, rotation->block / ACTIVATION_GROUP);
}

void prepare_column(const Kernels & kernels, const Rotation * rotation, const ColumnLayout & layout, const float * x,
                    int64_t group_begin, int64_t group_end, uint8_t * column) {
    if (rotation == nullptr) {
        kernels.quantize(layout, x, group_begin, group_end, column);
        return;
    }
    thread_local std::vector<float> rotated;
    rotated.resize(static_cast<size_t>(layout.n_in));
    const float * signs = rotation->signs.empty() ? nullptr : rotation->signs.data();
    // Block by block, so that what is rotated is still in the first-level cache when it is quantized.
    const int64_t unit = rotation_unit(rotation);
    for (int64_t group = group_begin; group < group_end; group += unit) {
        const int64_t begin = group * ACTIVATION_GROUP;
        const int64_t end = std::min((group + unit) * ACTIVATION_GROUP, layout.n_in);
        permute(*rotation, x, begin, end - begin, rotated.data() + begin);
        for (int64_t i = begin; i < end; i += rotation->block) {
            kernels.hadamard(rotated.data() + i, signs != nullptr ? signs + i : nullptr, rotation->block);
        }
        kernels.quantize(layout, rotated.data(), group, std::min(group + unit, group_end), column);
    }
}

void prepare_panel(const Kernels & kernels, const Rotation * rotation, const ColumnLayout & layout,
                   const float * const * x, int n_cols, int64_t group_begin, int64_t group_end, uint8_t * panel) {
    if (n_cols == 1) {
        prepare_column(kernels, rotation, layout, x[0], group_begin, group_end, panel);
        return;
    }
    thread_local std::vector<uint8_t> memory;
    thread_local std::vector<const uint8_t *> columns;
    memory.resize(n_cols * layout.bytes);
    columns.clear();
    for (int c = 0; c < n_cols; c++) {
        uint8_t * column = memory.data() + c * layout.bytes;
        prepare_column(kernels, rotation, layout, x[c], group_begin, group_end, column);
        columns.push_back(column);
    }
    make_panel(kernels, layout, columns.data(), n_cols, group_begin, group_end, panel);
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

void multiply_panels(const Kernels & kernels, const Tiles & tiles, int64_t tile_begin, int64_t tile_end,
                     const ColumnLayout & layout, const uint8_t * panels, int64_t n_cols, float * const * outputs) {
    thread_local std::vector<float *> results;
    thread_local std::vector<uint8_t> expanded;
    results.resize(static_cast<size_t>(kernels.max_columns));
    const size_t stride = tile_bytes(tiles.n_in, tiles.group);
    const Panels p(n_cols, kernels.max_columns);
    const auto tiles_in_block =
        static_cast<int64_t>(BLOCK_BYTES / stride) / kernels.tiles_at_once * kernels.tiles_at_once;
    const int64_t tiles_at_a_time =
        p.count == 1 && !tiles.dense ? tile_end - tile_begin : std::max<int64_t>(kernels.tiles_at_once, tiles_in_block);
    if (tiles.dense) {
        expanded.resize(stride * static_cast<size_t>(tiles_at_a_time));
    }
    const int64_t panels_at_a_time =
        std::max<int64_t>(1, static_cast<int64_t>(PANEL_BYTES / layout.bytes) / kernels.max_columns);
    for (int64_t first = 0; first < p.count; first += panels_at_a_time) {
        const int64_t last = std::min(first + panels_at_a_time, p.count);
        for (int64_t tile = tile_begin; tile < tile_end; tile += tiles_at_a_time) {
            const int64_t end = std::min(tile + tiles_at_a_time, tile_end);
            const uint8_t * block = tiles.tile(tile);
            if (tiles.dense) {
                for (int64_t t = tile; t < end; t++) {
                    kernels.expand(tiles.tile(t), tiles.n_in, expanded.data() + stride * static_cast<size_t>(t - tile));
                }
                block = expanded.data();
            }
            const int64_t row = tile * TILE_ROWS;
            const int64_t n_rows = std::min(end * TILE_ROWS, tiles.n_out) - row;
            for (int64_t panel = first; panel < last; panel++) {
                for (int c = 0; c < p.width(panel); c++) {
                    results[c] = outputs[p.begin(panel) + c] + row;
                }
                kernels.multiply(block, n_rows, tiles.group, layout, panels + p.begin(panel) * layout.bytes,
                                 p.width(panel), results.data());
            }
        }
    }
}

void dequantize_row(const Kernels & kernels, const Tiles & tiles, int64_t row, float * weights) {
    const uint8_t * tile = tiles.tile(row / TILE_ROWS);
    thread_local std::vector<uint8_t> expanded;
    if (tiles.dense) {
        expanded.resize(tile_bytes(tiles.n_in, tiles.group));
        kernels.expand(tile, tiles.n_in, expanded.data());
        tile = expanded.data();
    }
    dequantize_tile_row(tile, static_cast<int>(row % TILE_ROWS), tiles.n_in, tiles.group, weights);
}

Items::Items(const Kernels & kernels, const Tiles & matrix, int64_t n_cols) : tiles(matrix.count()) {
    auto n = static_cast<int64_t>(ITEM_BYTES / tile_bytes(matrix.n_in, matrix.group));
    if (n_cols > kernels.max_columns) {
        n = std::min(n, MAX_ITEM_OF_PANELS);
    }
    per_item = std::max<int64_t>(1, n / kernels.tiles_at_once) * kernels.tiles_at_once;
    count = (tiles + per_item - 1) / per_item;
}

void make_panels(const Kernels & kernels, const ColumnLayout & layout, const uint8_t * const * columns, int64_t n_cols,
                 uint8_t * panels) {
    const Panels p(n_cols, kernels.max_columns);
    for (int64_t panel = 0; panel < p.count; panel++) {
        make_panel(kernels, layout, columns + p.begin(panel), p.width(panel), 0, layout.n_groups,
                   panels + p.begin(panel) * layout.bytes);
    }
}

void matmul(const Kernels & kernels, const Tiles & tiles, int64_t tile_begin, int64_t tile_end,
            const ColumnLayout & layout, const uint8_t * const * columns, int64_t n_cols, float * const * outputs) {
    thread_local std::vector<uint8_t> panels;
    panels.resize(static_cast<size_t>(n_cols) * layout.bytes);
    make_panels(kernels, layout, columns, n_cols, panels.data());
    multiply_panels(kernels, tiles, tile_begin, tile_end, layout, panels.data(), n_cols, outputs);
}

}  // namespace tern
