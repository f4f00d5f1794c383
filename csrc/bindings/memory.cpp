// What the plug-in takes in memory for matrices, activations and attention of given shapes, for those who plan it.
#include "../cpu/attention.h"
#include "../cpu/kernels.h"
#include "../cpu/tiles.h"
#include "arguments.h"
#include "bindings.h"

#include <algorithm>
#include <string>

namespace py = pybind11;

namespace tern {

namespace {

// Sizes come from files: their products must not run over.
constexpr int64_t MAX_SIZE = int64_t{1} << 31;
constexpr int64_t MAX_HEADS = int64_t{1} << 14;  // and values of a head
constexpr int64_t MAX_TOKENS = int64_t{1} << 10;

void require_size(const char * name, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
        throw py::value_error(std::string(name) + " is " + std::to_string(value) + "; " + std::to_string(least) +
                              " to " + std::to_string(most) + " is possible");
    }
}

size_t bytes_in_tiles(uint32_t type_id, int64_t n_in, int64_t n_out, bool dense) {
    const TernaryType & type = require_type(type_id);
    require_size("n_in", n_in, 0, MAX_SIZE);
    require_size("n_out", n_out, 0, MAX_SIZE);
    require_whole_blocks(type, n_in, "the matrix");
    return tiled_bytes(type, dense ? TileLayout::DENSE : TileLayout::FAST, n_in, n_out);
}

size_t bytes_of_column(int64_t n_in) {
    require_size("n_in", n_in, 0, MAX_SIZE);
    return ColumnLayout((n_in + ACTIVATION_SUM_GROUP - 1) / ACTIVATION_SUM_GROUP * ACTIVATION_SUM_GROUP).bytes;
}

size_t most_attention_scratch(int64_t n_tokens, int64_t n_heads, int64_t n_kv_heads, int64_t d_k, int64_t d_v,
                              int64_t n_kv) {
    Attention a{};
    require_size("n_tokens", n_tokens, 1, MAX_TOKENS);
    require_size("n_heads", n_heads, 1, MAX_HEADS);
    require_size("n_kv_heads", n_kv_heads, 1, MAX_HEADS);
    require_size("d_k", d_k, 1, MAX_HEADS);
    require_size("d_v", d_v, 1, MAX_HEADS);
    require_size("n_kv", n_kv, 1, MAX_SIZE);
    a.n_heads = n_heads;
    a.n_kv_heads = n_kv_heads;
    a.d_k = d_k;
    a.d_v = d_v;
    a.n_kv = n_kv;
    a.n_sequences = 1;
    size_t most = 0;
    for (a.n_tokens = 1; a.n_tokens <= n_tokens; a.n_tokens++) {
        most = std::max(most, AttentionWork(a).n_partials());
    }
    return most * sizeof(float);
}

}  // namespace

void bind_memory(py::module_ & m) {
    m.def("tiled_bytes", &bytes_in_tiles, py::arg("type"), py::arg("n_in"), py::arg("n_out"), py::arg("dense") = false,
          R"(
Bytes that a matrix of a ternary type (id) takes in the plug-in's tiles. dense: in its dense layout, where the type has one.
ValueError for n_in that is no multiple of the type's block.)");
    m.def("column_bytes", &bytes_of_column, py::arg("n_in"),
          "Bytes of the activations of one token as the kernels read them, quantized. n_in: values.");
    m.def("most_attention_scratch", &most_attention_scratch, py::arg("n_tokens"), py::arg("n_heads"),
          py::arg("n_kv_heads"), py::arg("d_k"), py::arg("d_v"), py::arg("n_kv"), R"(
The most bytes that the plug-in's attention keeps between its two steps, over all passes of 1 to n_tokens tokens that look
at n_kv positions.)");
}

}  // namespace tern
