// Choice of the kernel table, and the loop over tiles and columns that all instruction sets share.
#include "kernels.h"

#include "kernel_tables.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace tern {

namespace {

// Many columns meet the tiles in blocks: tiles of about BLOCK_BYTES stay in the first-level cache while panels of about
// PANEL_BYTES, which stay in the second-level cache, pass by.
constexpr size_t BLOCK_BYTES = 16 * 1024;
constexpr size_t PANEL_BYTES = 128 * 1024;

// Interleaves parts of PART bytes each: panel[i][c] = columns[c][i].
template <int PART>
void interleave(const uint8_t * const * columns, int n_cols, size_t offset, int64_t n_parts, uint8_t * panel) {
    panel += offset * n_cols;
    for (int64_t i = 0; i < n_parts; i++) {
        for (int c = 0; c < n_cols; c++, panel += PART) {
            std::memcpy(panel, columns[c] + offset + i * PART, PART);
        }
    }
}

void make_panel(const ColumnLayout & layout, const uint8_t * const * columns, int n_cols, uint8_t * panel) {
    interleave<4>(columns, n_cols, 0, layout.n_in / 4, panel);
    interleave<4>(columns, n_cols, layout.scales, layout.n_groups, panel);
    interleave<4>(columns, n_cols, layout.sums, layout.n_groups, panel);
}

std::vector<const Kernels *> find_kernels() {
    std::vector<const Kernels *> found;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        found.push_back(&KERNELS_AVX2);
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

void unrotate_row(const Kernels & kernels, const Rotation & rotation, float * row, float * plain) {
    for (int64_t i = 0; i < rotation.n_in; i += rotation.block) {
        kernels.hadamard(row + i, nullptr, rotation.block);
    }
    for (size_t i = 0; i < rotation.signs.size(); i++) {
        row[i] *= rotation.signs[i];
    }
    permute_back(rotation, row, plain);
}

void matmul(const Kernels & kernels, const uint8_t * tiles, int group, int64_t n_out, int64_t tile_begin,
            int64_t tile_end, const ColumnLayout & layout, const uint8_t * const * columns, int64_t n_cols,
            float * const * outputs) {
    thread_local std::vector<uint8_t> memory;
    thread_local std::vector<float *> results;
    results.resize(static_cast<size_t>(kernels.max_columns));
    const size_t stride = tile_bytes(layout.n_in, group);
    const int64_t block = std::max<int64_t>(1, static_cast<int64_t>(BLOCK_BYTES / stride));
    // As many panels as are needed, all of about the same width.
    const int64_t n_panels = (n_cols + kernels.max_columns - 1) / kernels.max_columns;
    const auto panel_begin = [&](int64_t panel) { return n_cols * panel / n_panels; };
    const auto panels_at_a_time =
        std::max<int64_t>(1, static_cast<int64_t>(PANEL_BYTES / layout.bytes) / kernels.max_columns);
    for (int64_t first = 0; first < n_panels; first += panels_at_a_time) {
        const int64_t last = std::min(first + panels_at_a_time, n_panels);
        const int64_t first_column = panel_begin(first);
        const uint8_t * panels = columns[first_column];
        if (n_cols > 1) {
            memory.resize(static_cast<size_t>(panel_begin(last) - first_column) * layout.bytes);
            for (int64_t p = first; p < last; p++) {
                const int64_t begin = panel_begin(p);
                make_panel(layout, columns + begin, static_cast<int>(panel_begin(p + 1) - begin),
                           memory.data() + (begin - first_column) * layout.bytes);
            }
            panels = memory.data();
        }
        for (int64_t tile = tile_begin; tile < tile_end; tile += n_cols > 1 ? block : tile_end - tile_begin) {
            const int64_t row = tile * TILE_ROWS;
            const int64_t end = n_cols > 1 ? std::min(tile + block, tile_end) : tile_end;
            const int64_t n_rows = std::min(end * TILE_ROWS, n_out) - row;
            for (int64_t p = first; p < last; p++) {
                const int64_t begin = panel_begin(p);
                const int width = static_cast<int>(panel_begin(p + 1) - begin);
                for (int c = 0; c < width; c++) {
                    results[c] = outputs[begin + c] + row;
                }
                kernels.multiply(tiles + tile * stride, n_rows, group, layout,
                                 panels + (begin - first_column) * layout.bytes, width, results.data());
            }
        }
    }
}

}  // namespace tern
