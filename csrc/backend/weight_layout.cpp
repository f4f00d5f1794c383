// The choice between fast and dense tiles.
#include "weight_layout.h"

#include "../cpu/dense_tiles.h"
#include "../format/gguf_header.h"
#include "../host/machine_memory.h"

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

// About how many bytes all weights take, the ternary ones in this layout.
double bytes_in(const Model & model, TileLayout layout) {
    double total = 0;
    for (const auto & [id, n] : model.n_weights) {
        if (const TernaryType * type = ternary_type(id)) {
            const double scale_bits = 16.0 / tile_group(*type);
            total +=
                n / 8 * ((is_dense(*type, layout) ? 8.0 * DENSE_WORDS * 2 / DENSE_GROUP / TILE_ROWS : 2) + scale_bits);
        } else if (const TensorTypeInfo * other = tensor_type_info(id)) {
            total += n / other->block * other->block_bytes;
        }
    }
    return total;
}

// A model needs more than its weights: a sixteenth of them, for a small context and the process.
constexpr double MARGIN = 1.0625;

// Whether there is no memory for the fast layout, and the dense one takes less.
bool must_be_dense(const Model & model) {
    const double fast = bytes_in(model, TileLayout::FAST);
    const double dense = bytes_in(model, TileLayout::DENSE);
    const auto free = static_cast<double>(machine_memory().free);
    const bool is_short = dense < fast && MARGIN * fast > free;
    if (is_short) {
        constexpr double MB = 1e6;
        std::fprintf(
            stderr,
            "ggml-tern: %s: of %.0f MB free memory its weights take %.0f MB in the dense layout, which is slower "
            "than the fast one of %.0f MB (TERN_LAYOUT=fast or dense decides otherwise)\n",
            model.name.c_str(), free / MB, dense / MB, fast / MB);
    }
    return is_short;
}

}  // namespace

TileLayout layout_of_model(Model * model) {
    if (const auto named = named_layout()) {
        return *named;
    }
    if (model == nullptr) {
        return TileLayout::FAST;
    }
    if (!model->dense) {
        model->dense = must_be_dense(*model);
    }
    return *model->dense ? TileLayout::DENSE : TileLayout::FAST;
}

}  // namespace tern
