// Shapes and bytes of twins: see twin.h.
#include "twin.h"

#include "../cpu/team.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

namespace tern {

namespace {

const TernaryType & q2_0() {
    static const TernaryType & type = *ternary_type(TYPE_Q2_0);
    return type;
}

// Rows that are worth a thread.
constexpr int64_t BYTES_PER_THREAD = int64_t{1} << 20;

// A row of PQ2_0 as Q2_0, whose codes are the same: a block becomes two with its scale.
void split_blocks(const uint8_t * row, int64_t n_in, uint8_t * out) {
    const TernaryType & from = *ternary_type(TYPE_PQ2_0);
    const size_t scale_bytes = sizeof(uint16_t);
    const size_t code_bytes = static_cast<size_t>(q2_0().block_bytes) - scale_bytes;
    for (int64_t i = 0; i < n_in; i += from.block, row += from.block_bytes) {
        for (int half = 0; half < 2; half++, out += q2_0().block_bytes) {
            std::memcpy(out, row, scale_bytes);
            std::memcpy(out + scale_bytes, row + scale_bytes + static_cast<size_t>(half) * code_bytes, code_bytes);
        }
    }
}

void transcode(const TernaryType & from, const TernaryType & to, const uint8_t * rows, int64_t n_rows, int64_t n_in,
               uint8_t * out) {
    const size_t stride = from.row_bytes(n_in);
    const size_t out_stride = to.row_bytes(n_in);
    const auto worth = static_cast<int64_t>(stride) * n_rows / BYTES_PER_THREAD + 1;
    const auto n_threads = std::min<int64_t>(worth, std::max(1U, std::thread::hardware_concurrency()));
    std::atomic<bool> failed{false};
    parallel(n_rows, static_cast<int>(n_threads), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            if (from.id == TYPE_PQ2_0) {
                split_blocks(rows + static_cast<size_t>(row) * stride, n_in,
                             out + static_cast<size_t>(row) * out_stride);
            } else if (transcode_row(from, to, rows + static_cast<size_t>(row) * stride, n_in,
                                     out + static_cast<size_t>(row) * out_stride) != Transcode::OK) {
                failed = true;
            }
        }
    });
    if (failed) {
        throw std::runtime_error(std::string("a matrix on the GPU has values that ") + to.name + " does not");
    }
}

}  // namespace

bool has_twin(ggml_type type) {
    const TernaryType * ternary = ternary_type_of(type);
    return ternary != nullptr && (ternary->id != TYPE_Q2_0 || is_treated(type));
}

size_t twin_row_bytes(const ggml_tensor * w) {
    return q2_0().row_bytes(w->ne[0]);
}

ggml_tensor twin_of(const ggml_tensor * w) {
    const ggml_tensor * whole = w->view_src != nullptr ? w->view_src : w;
    const size_t row_bytes = ternary_type_of(w->type)->row_bytes(w->ne[0]);
    ggml_tensor twin = *w;
    twin.type = static_cast<ggml_type>(TYPE_Q2_0);
    twin.nb[0] = static_cast<size_t>(q2_0().block_bytes);
    for (int i = 1; i < GGML_MAX_DIMS; i++) {
        twin.nb[i] = w->nb[i] / row_bytes * twin_row_bytes(w);
    }
    twin.buffer = whole->buffer;
    if (whole->data != nullptr) {
        twin.data = static_cast<char *>(whole->data) + w->view_offs / row_bytes * twin_row_bytes(w);
    }
    twin.op = host().op_none;
    twin.view_src = nullptr;
    twin.view_offs = 0;
    twin.extra = nullptr;
    std::fill(std::begin(twin.src), std::end(twin.src), nullptr);
    return twin;
}

void to_twin(const ggml_tensor * w, const uint8_t * rows, int64_t n_rows, uint8_t * twin) {
    transcode(*ternary_type_of(w->type), q2_0(), rows, n_rows, w->ne[0], twin);
}

void from_twin(const ggml_tensor * w, const uint8_t * twin, int64_t n_rows, uint8_t * rows) {
    transcode(q2_0(), *ternary_type_of(w->type), twin, n_rows, w->ne[0], rows);
}

}  // namespace tern
