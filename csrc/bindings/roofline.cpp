// What roofline.h measures, for Python.
#include "../cpu/roofline.h"

#include "arguments.h"
#include "bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace tern {

namespace {

void require_positive(double value, const char * name) {
    if (!(value > 0)) {
        throw py::value_error(std::string(name) + " must be positive, not " + std::string(py::str(py::float_(value))));
    }
}

double measured_read_bandwidth(int n_threads, int64_t n_bytes, double seconds) {
    require_positive(static_cast<double>(n_bytes), "n_bytes");
    require_positive(seconds, "seconds");
    const py::gil_scoped_release unlocked;
    return read_bandwidth(thread_count(n_threads), static_cast<size_t>(n_bytes), seconds);
}

double measured_multiply_add_peak(int n_threads, const std::optional<std::string> & isa, double seconds) {
    require_positive(seconds, "seconds");
    const MultiplyAddLoop & loop = isa_by_name(isa).multiply_adds;
    const py::gil_scoped_release unlocked;
    return multiply_add_peak(loop, thread_count(n_threads), seconds);
}

std::vector<std::pair<double, double>> measured_products(const std::vector<const TiledMatrix *> & matrices,
                                                         int64_t n_cols, int n_threads, int repeats,
                                                         const std::optional<std::string> & isa) {
    if (matrices.empty()) {
        throw py::value_error("no matrices to multiply with");
    }
    if (std::find(matrices.begin(), matrices.end(), nullptr) != matrices.end()) {
        throw py::type_error("matrices must be TiledMatrix, not None");
    }
    require_positive(static_cast<double>(n_cols), "n_cols");
    require_positive(repeats, "repeats");
    const Kernels & table = isa_by_name(isa).kernels;
    const py::gil_scoped_release unlocked;
    std::vector<std::pair<double, double>> seconds;
    for (const ProductTimes & times : time_products(table, matrices, n_cols, thread_count(n_threads), repeats)) {
        seconds.emplace_back(times.prepare, times.multiply);
    }
    return seconds;
}

}  // namespace

void bind_roofline(py::module_ & m) {
    m.def("read_bandwidth", &measured_read_bandwidth, py::arg("n_threads") = 0, py::arg("n_bytes") = int64_t{256} << 20,
          py::arg("seconds") = 0.5, R"(
Bytes per second that the threads read from n_bytes of memory, which should be far more than the caches hold: the median of
the passes that begin within so many seconds.)");
    m.def("multiply_add_peak", &measured_multiply_add_peak, py::arg("n_threads") = 0, py::arg("isa") = py::none(),
          py::arg("seconds") = 0.3, R"(
Multiply-adds per second of the instructions that the kernels of an instruction set rest on, with all operands in registers:
the median of many slices in so many seconds. isa: as for matmul.)");
    m.def("time_products", &measured_products, py::arg("matrices"), py::arg("n_cols"), py::arg("n_threads") = 0,
          py::arg("repeats") = 5, py::arg("isa") = py::none(), R"(
Time products as the plug-in computes them, without the interpreter in between. matrices: a list of TiledMatrix, which are
multiplied in turn, each with n_cols columns of its own; the time of reading matrices shows only where all of them together
are far more than the caches hold. isa: as for matmul.

Returns a pair for each of the `repeats` passes: seconds of quantizing columns and of multiplying, over all matrices.)");
}

}  // namespace tern
