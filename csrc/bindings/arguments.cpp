// Checks of arguments: see arguments.h.
#include "arguments.h"

#include <algorithm>
#include <thread>

namespace py = pybind11;

namespace tern {

int thread_count(int n_threads) {
    return n_threads > 0 ? n_threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

const TernaryType & require_type(uint32_t id) {
    const TernaryType * type = ternary_type(id);
    if (type == nullptr) {
        throw py::value_error("type " + std::to_string(id) +
                              " is not ternary; PQ2_0 (142), PTQ1_0 (143), Q2_0 (42), TQ2_0 (35) and TQ1_0 (34) are");
    }
    return *type;
}

void require_native_order(const py::array & array, const char * name) {
    // '=' and '|' stand for the machine's own order and for single bytes.
    const char order = array.dtype().byteorder();
    if (order != '=' && order != '|') {
        throw py::type_error(std::string(name) + " must be in the machine's byte order, not " +
                             std::string(py::str(array.dtype())) + "; " + name + ".astype(" + name +
                             ".dtype.newbyteorder('=')) makes it so");
    }
}

void require_matrix(const py::array & array, const char * name) {
    if (array.ndim() != 2) {
        throw py::value_error(std::string(name) + " must have 2 dimensions [n_rows, n], not " +
                              std::to_string(array.ndim()));
    }
    if (!(array.flags() & py::array::c_style)) {
        throw py::value_error(std::string(name) + " must be C-contiguous; numpy.ascontiguousarray() makes it so");
    }
}

void require_dtype(const py::array & array, const char * name, char kind, py::ssize_t size, const char * wanted) {
    if (array.dtype().kind() != kind || array.itemsize() != size) {
        throw py::type_error(std::string(name) + " must be " + wanted + ", not " + std::string(py::str(array.dtype())));
    }
    require_native_order(array, name);
}

void require_whole_blocks(const TernaryType & type, int64_t n_in, const char * name) {
    if (n_in % type.block != 0) {
        throw py::value_error(std::string(name) + " has rows of " + std::to_string(n_in) +
                              " weights, which is no multiple of the " + std::to_string(type.block) +
                              " in a block of " + type.name);
    }
}

int64_t require_packed(const TernaryType & type, const py::array & data, const char * name) {
    require_dtype(data, name, 'u', 1, "uint8");
    require_matrix(data, name);
    if (data.shape(1) % type.block_bytes != 0) {
        throw py::value_error(std::string(name) + " has rows of " + std::to_string(data.shape(1)) +
                              " bytes, which is no multiple of the " + std::to_string(type.block_bytes) +
                              " in a block of " + type.name);
    }
    return data.shape(1) / type.block_bytes * type.block;
}

const Isa & isa_by_name(const std::optional<std::string> & name) {
    if (!name) {
        return isa();
    }
    int count;
    const Isa * const * isas = available_isas(&count);
    for (int i = 0; i < count; i++) {
        if (*name == isas[i]->name) {
            return *isas[i];
        }
    }
    throw py::value_error("instruction set '" + *name + "' is unknown or this processor lacks it");
}

}  // namespace tern
