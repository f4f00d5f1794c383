// The choice between fast and dense tiles.
#include "weight_layout.h"

#include "../cpu/dense_tiles.h"
#include "machine_memory.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace tern {

namespace {

// The layout that TERN_LAYOUT names; nothing for auto. Another word is reported and ignored.
std::optional<TileLayout> named_layout() {
    static const std::optional<TileLayout> named = []() -> std::optional<TileLayout> {
        const char * word = std::getenv("TERN_LAYOUT");
        if (word == nullptr || std::strcmp(word, "auto") == 0) {
            return std::nullopt;
        }
        if (std::strcmp(word, "fast") == 0) {
            return TileLayout::FAST;
        }
        if (std::strcmp(word, "dense") == 0) {
            return TileLayout::DENSE;
        }
        std::fprintf(stderr, "ggml-tern: TERN_LAYOUT=%s is none of auto, fast and dense; it is ignored\n", word);
        return std::nullopt;
    }();
    return named;
}

std::atomic<TileLayout> g_chosen{TileLayout::FAST};

// About how many bytes all tensors take, the ternary ones in this layout. As a double, which no header makes overflow.
double bytes_in(const GgufHeader & header, TileLayout layout) {
    double total = 0;
    for (const GgufTensor & tensor : header.tensors) {
        double n = 1;
        for (const uint64_t size : tensor.shape) {
            n *= static_cast<double>(size);
        }
        if (const TernaryType * type = ternary_type(tensor.type)) {
            const double scale_bits = 16.0 / tile_group(*type);
            total +=
                n / 8 * ((is_dense(*type, layout) ? 8.0 * DENSE_WORDS * 2 / DENSE_GROUP / TILE_ROWS : 2) + scale_bits);
        } else if (const TensorTypeInfo * other = tensor_type_info(tensor.type)) {
            total += n / other->block * other->block_bytes;
        }
    }
    return total;
}

// A model needs more than its weights: a sixteenth of them, for a small context and the process.
constexpr double MARGIN = 1.0625;

}  // namespace

void choose_layout(const char * name, const GgufHeader & header) {
    if (named_layout()) {
        return;
    }
    const double fast = bytes_in(header, TileLayout::FAST);
    const double dense = bytes_in(header, TileLayout::DENSE);
    const auto free = static_cast<double>(machine_memory().free);
    const bool is_short = dense < fast && MARGIN * fast > free;
    g_chosen = is_short ? TileLayout::DENSE : TileLayout::FAST;
    if (is_short) {
        constexpr double MB = 1e6;
        std::fprintf(
            stderr,
            "ggml-tern: %s: of %.0f MB free memory its weights take %.0f MB in the dense layout, which is slower "
            "than the fast one of %.0f MB (TERN_LAYOUT=fast or dense decides otherwise)\n",
            name, free / MB, dense / MB, fast / MB);
    }
}

TileLayout chosen_layout() {
    return named_layout().value_or(g_chosen);
}

}  // namespace tern
