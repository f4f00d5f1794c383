// The product of a matrix in tiles, as the plug-in computes it, on numpy arrays.
#include "tiled_matrix.h"

#include "../cpu/product.h"
#include "../cpu/shared_work.h"
#include "../cpu/team.h"
#include "arguments.h"
#include "bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

namespace py = pybind11;

namespace tern {

TiledMatrix make_tiled_matrix(uint32_t type_id, const py::array & data, bool dense) {
    const TernaryType & type = require_type(type_id);
    const int64_t n_in = require_packed(type, data, "data");
    const int64_t n_out = data.shape(0);
    const auto * rows = static_cast<const uint8_t *>(data.data());
    const py::gil_scoped_release unlocked;
    return TiledMatrix(type, dense ? TileLayout::DENSE : TileLayout::FAST, rows, n_in, n_out);
}

py::array_t<float> multiply_tiled(const TiledMatrix & matrix, const py::array & x,
                                  const std::optional<std::string> & isa, int n_threads, const Rotation * rotation) {
    const int64_t n_in = matrix.n_in();
    require_dtype(x, "x", 'f', 4, "float32");
    require_matrix(x, "x");
    if (x.shape(1) != n_in) {
        throw py::value_error("x has columns of " + std::to_string(x.shape(1)) +
                              " values, the matrix has n_in = " + std::to_string(n_in));
    }
    if (rotation != nullptr && rotation->n_in != n_in) {
        throw py::value_error("rotation is of " + std::to_string(rotation->n_in) +
                              " inputs, the matrix has n_in = " + std::to_string(n_in));
    }
    const Kernels & table = isa_by_name(isa).kernels;
    const int64_t n_cols = x.shape(0);
    py::array_t<float> y(std::vector<py::ssize_t>{n_cols, matrix.n_out()});
    auto * results = y.mutable_data();

    const py::gil_scoped_release unlocked;
    FloatColumns columns{static_cast<const char *>(x.data()), n_in, n_cols};
    columns.column_stride = static_cast<size_t>(n_in) * sizeof(float);
    ReadyColumns ready(table, rotation, columns);
    const StreamedMemory memory = allocate_streamed(ready.n_bytes());
    ready.lie_in(memory.get());
    const Product product(table, ready, 0, {matrix.tiles()}, results,
                          static_cast<size_t>(matrix.n_out()) * sizeof(float));
    const int threads = thread_count(n_threads);
    ThreadScratch scratch;
    scratch.reserve(threads, std::max(ready.scratch_bytes(), product.scratch_bytes()));
    for_each_thread(threads, [&](int ith) { ready.prepare(ith, threads, scratch.of(ith)); });
    SharedWork work;
    for_each_thread(threads, [&](int ith) {
        work.run(product.n_items(), ith, threads,
                 [&](int64_t begin, int64_t end) { product.multiply(begin, end, scratch.of(ith)); });
    });
    return y;
}

void bind_tiled_matrix(py::module_ & m) {
    py::class_<TiledMatrix>(m, "TiledMatrix", "A ternary matrix as the plug-in's kernels want it, packed once.")
        .def(py::init(&make_tiled_matrix), py::arg("type"), py::arg("data"), py::arg("dense") = false,
             "type: a ternary type id. data: uint8 [n_out, row_bytes]. dense: 1.75 bits a weight in memory, for the "
             "base-3 types; slower, with the same bits.")
        .def_property_readonly("n_in", &TiledMatrix::n_in)
        .def_property_readonly("n_out", &TiledMatrix::n_out)
        .def_property_readonly("n_bytes", &TiledMatrix::n_bytes, "Bytes that a product with one column reads.")
        .def("matmul", &multiply_tiled, py::arg("x"), py::arg("isa") = py::none(), py::arg("n_threads") = 0,
             py::arg("rotation").none(true) = py::none(), "As the function matmul, with the same bits.");
}

}  // namespace tern
