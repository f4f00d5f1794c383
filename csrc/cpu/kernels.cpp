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

// Quantized columns that stay in the second-level cache while the tiles of a chunk pass by.
constexpr size_t PANEL_BYTES = 192 * 1024;

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
      bytes((sums + static_cast<size_t>(n_in / ACTIVATION_SUM_GROUP) * sizeof(int32_t) + 63) / 64 * 64) {}

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
    const size_t stride = tile_bytes(layout.n_in, group);
    const int64_t panel =
        std::max<int64_t>(1, static_cast<int64_t>(PANEL_BYTES / layout.bytes) / MAX_COLUMNS) * MAX_COLUMNS;
    float results[MAX_COLUMNS][TILE_ROWS];
    for (int64_t first = 0; first < n_cols; first += panel) {
        const int64_t end = std::min(first + panel, n_cols);
        for (int64_t tile = tile_begin; tile < tile_end; tile++) {
            const int64_t row = tile * TILE_ROWS;
            const size_t rows = static_cast<size_t>(std::min<int64_t>(TILE_ROWS, n_out - row));
            for (int64_t c = first; c < end; c += MAX_COLUMNS) {
                const int n = static_cast<int>(std::min<int64_t>(MAX_COLUMNS, end - c));
                kernels.tile_times_columns(tiles + tile * stride, group, layout, columns + c, n, results);
                for (int i = 0; i < n; i++) {
                    std::memcpy(outputs[c + i] + row, results[i], rows * sizeof(float));
                }
            }
        }
    }
}

}  // namespace tern
