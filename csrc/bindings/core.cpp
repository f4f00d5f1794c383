// The Python module ggml_tern._core: the format and the kernels on numpy arrays, without copies.
//
// Rows are split over threads; the interpreter's lock is released meanwhile. Whatever is wrong with the arguments is
// raised as ValueError or TypeError before anything is computed.
#include "../cpu/isa.h"
#include "../cpu/product.h"
#include "../cpu/team.h"
#include "../format/float16.h"
#include "../format/gguf_header.h"
#include "../format/hadamard.h"
#include "../format/ternarize.h"
#include "../format/ternary_types.h"
#include "../host/machine_memory.h"
#include "arguments.h"
#include "bindings.h"
#include "tiled_matrix.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;
using namespace tern;

namespace {

// ---- codecs ----

WeightFormat weight_format(const py::array & weights) {
    require_native_order(weights, "weights");
    const char kind = weights.dtype().kind();
    if (kind == 'f' && weights.itemsize() == 4) {
        return WeightFormat::F32;
    }
    if (kind == 'f' && weights.itemsize() == 2) {
        return WeightFormat::F16;
    }
    if (kind == 'u' && weights.itemsize() == 2) {
        return WeightFormat::BF16;
    }
    throw py::type_error("weights must be float32, float16 or uint16 (the bits of bfloat16), not " +
                         std::string(py::str(weights.dtype())));
}

py::tuple ternarize(uint32_t type_id, const py::array & weights, std::optional<py::array> out, int n_threads) {
    const TernaryType & type = require_type(type_id);
    require_matrix(weights, "weights");
    const WeightFormat format = weight_format(weights);
    const int64_t n_rows = weights.shape(0);
    const int64_t n_in = weights.shape(1);
    require_whole_blocks(type, n_in, "weights");
    const auto row_bytes = static_cast<py::ssize_t>(type.row_bytes(n_in));
    if (!out) {
        out = Bytes(std::vector<py::ssize_t>{n_rows, row_bytes});
    }
    require_dtype(*out, "out", 'u', 1, "uint8");
    require_matrix(*out, "out");
    if (out->shape(0) != n_rows || out->shape(1) != row_bytes) {
        throw py::value_error("out must have shape [" + std::to_string(n_rows) + ", " + std::to_string(row_bytes) +
                              "]");
    }

    const auto * src = static_cast<const char *>(weights.data());
    auto * dst = static_cast<uint8_t *>(out->mutable_data());
    // Blocks do not span rows, so the rows of one part are ternarized as a single long one. Parts do not depend on the
    // number of threads, nor does the order in which their statistics are added.
    const int64_t part_rows = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, n_in));
    const int64_t n_parts = (n_rows + part_rows - 1) / part_rows;
    std::vector<TernarizeStats> parts(n_parts);
    {
        const py::gil_scoped_release unlocked;
        parallel(n_parts, thread_count(n_threads), [&](int64_t begin, int64_t end) {
            for (int64_t p = begin; p < end; p++) {
                const int64_t row = p * part_rows;
                const int64_t n = std::min(part_rows, n_rows - row) * n_in;
                parts[p] =
                    ternarize_row(type, src + row * n_in * weight_bytes(format), format, n, dst + row * row_bytes);
            }
        });
    }
    TernarizeStats total;
    for (int64_t p = 0; p < n_parts; p++) {
        if (parts[p].non_finite >= 0) {
            const int64_t index = p * part_rows * n_in + parts[p].non_finite;
            throw py::value_error("row " + std::to_string(index / n_in) + ", column " + std::to_string(index % n_in) +
                                  ": NaN, Inf or a magnitude beyond the fp16 range");
        }
        total.add(parts[p]);
    }
    py::dict stats;
    stats["n"] = total.n;
    stats["zeros"] = total.zeros;
    stats["sum_sq"] = total.sum_sq;
    stats["sum_sq_error"] = total.sum_sq_error;
    stats["groups"] = total.groups;
    stats["ternary_groups"] = total.ternary_groups;
    stats["exact_groups"] = total.exact_groups;
    stats["max_scale_error"] = total.max_scale_error;
    return py::make_tuple(*out, stats);
}

Bytes pack(uint32_t type_id, const py::array & trits, const py::array & scales, int n_threads) {
    const TernaryType & type = require_type(type_id);
    require_dtype(trits, "trits", 'i', 1, "int8");
    require_matrix(trits, "trits");
    require_dtype(scales, "scales", 'f', 4, "float32");
    require_matrix(scales, "scales");
    const int64_t n_rows = trits.shape(0);
    const int64_t n_in = trits.shape(1);
    require_whole_blocks(type, n_in, "trits");
    const int64_t n_blocks = n_in / type.block;
    if (scales.shape(0) != n_rows || scales.shape(1) != n_blocks) {
        throw py::value_error("scales must have shape [" + std::to_string(n_rows) + ", " + std::to_string(n_blocks) +
                              "]");
    }
    const auto row_bytes = static_cast<py::ssize_t>(type.row_bytes(n_in));
    Bytes out(std::vector<py::ssize_t>{n_rows, row_bytes});
    const auto * t = static_cast<const int8_t *>(trits.data());
    const auto * s = static_cast<const float *>(scales.data());
    auto * dst = out.mutable_data();
    std::atomic<bool> bad_trit{false};
    std::atomic<bool> bad_scale{false};
    {
        const py::gil_scoped_release unlocked;
        parallel(n_rows, thread_count(n_threads), [&](int64_t begin, int64_t end) {
            std::vector<uint8_t> codes(n_in);
            std::vector<uint16_t> fp16(n_blocks);
            for (int64_t r = begin; r < end; r++) {
                int bad = 0;
                for (int64_t i = 0; i < n_in; i++) {
                    const int trit = t[r * n_in + i];
                    bad |= trit < -1 || trit > 1;
                    codes[i] = static_cast<uint8_t>(trit + 1);
                }
                for (int64_t b = 0; b < n_blocks; b++) {
                    fp16[b] = fp16_from_fp32(s[r * n_blocks + b]);
                    if ((fp16[b] & 0x7c00u) == 0x7c00u) {
                        bad_scale = true;
                    }
                }
                if (bad != 0) {
                    bad_trit = true;
                    return;
                }
                pack_row(type, codes.data(), fp16.data(), n_in, dst + r * row_bytes);
            }
        });
    }
    if (bad_trit) {
        throw py::value_error("trits must be -1, 0 or 1");
    }
    if (bad_scale) {
        throw py::value_error("scales must be finite and within the fp16 range (65504)");
    }
    return out;
}

py::tuple unpack(uint32_t type_id, const py::array & data, int n_threads) {
    const TernaryType & type = require_type(type_id);
    const int64_t n_in = require_packed(type, data, "data");
    const int64_t n_rows = data.shape(0);
    const int64_t n_blocks = n_in / type.block;
    py::array_t<int8_t> trits(std::vector<py::ssize_t>{n_rows, n_in});
    py::array_t<float> scales(std::vector<py::ssize_t>{n_rows, n_blocks});
    const auto * src = static_cast<const uint8_t *>(data.data());
    auto * t = trits.mutable_data();
    auto * s = scales.mutable_data();
    {
        const py::gil_scoped_release unlocked;
        parallel(n_rows, thread_count(n_threads), [&](int64_t begin, int64_t end) {
            std::vector<uint8_t> codes(n_in);
            std::vector<uint16_t> fp16(n_blocks);
            for (int64_t r = begin; r < end; r++) {
                unpack_row(type, src + r * type.row_bytes(n_in), n_in, codes.data(), fp16.data());
                std::transform(codes.begin(), codes.end(), t + r * n_in,
                               [](uint8_t c) { return static_cast<int8_t>(c - 1); });
                std::transform(fp16.begin(), fp16.end(), s + r * n_blocks, fp32_from_fp16);
            }
        });
    }
    return py::make_tuple(trits, scales);
}

py::array_t<float> dequantize(uint32_t type_id, const py::array & data, int n_threads) {
    const TernaryType & type = require_type(type_id);
    const int64_t n_in = require_packed(type, data, "data");
    const int64_t n_rows = data.shape(0);
    py::array_t<float> weights(std::vector<py::ssize_t>{n_rows, n_in});
    const auto * src = static_cast<const uint8_t *>(data.data());
    auto * w = weights.mutable_data();
    const py::gil_scoped_release unlocked;
    parallel(n_rows, thread_count(n_threads), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            dequantize_row(type, src + r * type.row_bytes(n_in), n_in, w + r * n_in);
        }
    });
    return weights;
}

Bytes transcode(uint32_t from_id, uint32_t to_id, const py::array & data, int n_threads) {
    const TernaryType & from = require_type(from_id);
    const TernaryType & to = require_type(to_id);
    const int64_t n_in = require_packed(from, data, "data");
    const int64_t n_rows = data.shape(0);
    require_whole_blocks(to, n_in, "data");
    Bytes out(std::vector<py::ssize_t>{n_rows, static_cast<py::ssize_t>(to.row_bytes(n_in))});
    const auto * src = static_cast<const uint8_t *>(data.data());
    auto * dst = out.mutable_data();
    std::vector<Transcode> results(n_rows);
    {
        const py::gil_scoped_release unlocked;
        parallel(n_rows, thread_count(n_threads), [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; r++) {
                results[r] =
                    transcode_row(from, to, src + r * from.row_bytes(n_in), n_in, dst + r * to.row_bytes(n_in));
            }
        });
    }
    for (int64_t r = 0; r < n_rows; r++) {
        const std::string where =
            std::string(from.name) + " to " + to.name + " would lose information in row " + std::to_string(r) + ": ";
        if (results[r] == Transcode::UNEQUAL_SCALES) {
            throw py::value_error(where + "a block of " + std::to_string(to.block) + " weights spans unequal scales");
        }
        if (results[r] == Transcode::RESERVED_CODE) {
            throw py::value_error(where + "it holds the reserved code 3, which has no base-3 digit");
        }
    }
    return out;
}

// ---- kernels ----

py::array_t<float> matrix_product(uint32_t type_id, const py::array & data, const py::array & x,
                                  const std::optional<std::string> & isa, int n_threads, const Rotation * rotation) {
    return multiply_tiled(make_tiled_matrix(type_id, data, /*dense=*/false), x, isa, n_threads, rotation);
}

py::list names_of_isas() {
    int count;
    const Isa * const * isas = available_isas(&count);
    py::list names;
    for (int i = 0; i < count; i++) {
        names.append(isas[i]->name);
    }
    return names;
}

py::array_t<float> squared_relu_for_silu(const py::array & x, const std::optional<std::string> & isa) {
    require_dtype(x, "x", 'f', 4, "float32");
    require_matrix(x, "x");
    const Kernels & table = isa_by_name(isa).kernels;
    py::array_t<float> y(std::vector<py::ssize_t>{x.shape(0), x.shape(1)});
    std::memcpy(y.mutable_data(), x.data(), static_cast<size_t>(x.nbytes()));
    table.squared_relu_for_silu(y.mutable_data(), y.size());
    return y;
}

Bytes tiles_roundtrip(uint32_t type_id, const py::array & data, bool dense) {
    const TernaryType & type = require_type(type_id);
    const int64_t n_in = require_packed(type, data, "data");
    const int64_t n_out = data.shape(0);
    const TileLayout layout = dense ? TileLayout::DENSE : TileLayout::FAST;
    std::vector<uint8_t> tiles(tiled_bytes(type, layout, n_in, n_out));
    pack_tiles(type, layout, static_cast<const uint8_t *>(data.data()), n_in, n_out, tiles.data());
    Bytes out(std::vector<py::ssize_t>{n_out, data.shape(1)});
    unpack_tiles(type, layout, tiles.data(), n_in, n_out, out.mutable_data());
    return out;
}

// ---- rotations ----

Rotation make_rotation(int64_t n_in, int64_t block, const std::optional<py::array> & signs,
                       const std::optional<std::pair<int64_t, int64_t>> & v_heads) {
    Rotation rotation;
    rotation.n_in = n_in;
    rotation.block = block;
    if (signs) {
        require_dtype(*signs, "signs", 'i', 1, "int8");
        if (signs->ndim() != 1 || signs->shape(0) != n_in) {
            throw py::value_error("signs must have shape [" + std::to_string(n_in) + "]");
        }
        const py::array_t<int8_t, py::array::c_style> values(*signs);
        for (int64_t i = 0; i < n_in; i++) {
            if (values.at(i) != 1 && values.at(i) != -1) {
                throw py::value_error("signs must be -1 or 1");
            }
            rotation.signs.push_back(values.at(i));
        }
    }
    if (v_heads) {
        std::tie(rotation.n_k, rotation.n_v) = *v_heads;
        if (rotation.n_k == 0 || rotation.n_v == 0) {
            throw py::value_error("v_heads must be positive");
        }
    }
    rotation.check();  // FormatError is a ValueError in Python
    return rotation;
}

py::object signs_of(const Rotation & rotation) {
    if (rotation.signs.empty()) {
        return py::none();
    }
    py::array_t<int8_t> signs(static_cast<py::ssize_t>(rotation.signs.size()));
    std::transform(rotation.signs.begin(), rotation.signs.end(), signs.mutable_data(),
                   [](float sign) { return static_cast<int8_t>(sign); });
    return std::move(signs);
}

// Applies work(row in, row out) to every row of x.
py::array_t<float> map_rows(const Rotation & rotation, const py::array & x, int n_threads,
                            const std::function<void(const float *, float *)> & work) {
    require_dtype(x, "x", 'f', 4, "float32");
    require_matrix(x, "x");
    if (x.shape(1) != rotation.n_in) {
        throw py::value_error("x has rows of " + std::to_string(x.shape(1)) + " values, the rotation is of " +
                              std::to_string(rotation.n_in));
    }
    const int64_t n_in = rotation.n_in;
    py::array_t<float> y(std::vector<py::ssize_t>{x.shape(0), x.shape(1)});
    const auto * in = static_cast<const float *>(x.data());
    auto * out = y.mutable_data();
    const int64_t n_rows = x.shape(0);
    const py::gil_scoped_release unlocked;
    parallel(n_rows, thread_count(n_threads), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            work(in + row * n_in, out + row * n_in);
        }
    });
    return y;
}

py::array_t<float> rotate(const Rotation & rotation, const py::array & x, int n_threads) {
    const float * signs = rotation.signs.empty() ? nullptr : rotation.signs.data();
    return map_rows(rotation, x, n_threads, [&](const float * in, float * out) {
        permute(rotation, in, 0, rotation.n_in, out);
        for (int64_t i = 0; i < rotation.n_in; i += rotation.block) {
            kernels().hadamard(out + i, signs != nullptr ? signs + i : nullptr, rotation.block);
        }
    });
}

py::array_t<float> unrotate(const Rotation & rotation, const py::array & z, int n_threads) {
    return map_rows(rotation, z, n_threads, [&](const float * in, float * out) {
        std::vector<float> row(in, in + rotation.n_in);
        unrotate_row(kernels(), rotation, row.data(), out);
    });
}

// ---- GGUF headers ----

py::str text(std::string_view bytes) {
    // Names and strings are UTF-8; bytes that are not are kept visible instead of failing the whole file.
    PyObject * decoded = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace");
    if (decoded == nullptr) {
        throw py::error_already_set();
    }
    return py::reinterpret_steal<py::str>(decoded);
}

template <typename T> py::object numbers(const GgufValue & value) {
    if (value.is_array) {
        py::array_t<T> array(static_cast<py::ssize_t>(value.count));
        std::memcpy(array.mutable_data(), value.bytes.data(), value.bytes.size());
        return array;
    }
    T number;
    std::memcpy(&number, value.bytes.data(), sizeof(number));
    return py::cast(number);
}

py::object strings(const GgufValue & value) {
    py::list list;
    std::string_view rest = value.bytes;
    for (uint64_t i = 0; i < value.count; i++) {
        uint64_t length;
        std::memcpy(&length, rest.data(), sizeof(length));
        list.append(text(rest.substr(8, length)));
        rest.remove_prefix(8 + length);
    }
    return value.is_array ? py::object(list) : list[0];
}

py::object booleans(const GgufValue & value) {
    if (!value.is_array) {
        return py::bool_(value.bytes[0] != 0);
    }
    py::list list;
    for (const char b : value.bytes) {
        list.append(py::bool_(b != 0));
    }
    return std::move(list);
}

py::object python_value(const GgufValue & value) {
    switch (value.type) {
    case GgufValueType::UINT8: return numbers<uint8_t>(value);
    case GgufValueType::INT8: return numbers<int8_t>(value);
    case GgufValueType::UINT16: return numbers<uint16_t>(value);
    case GgufValueType::INT16: return numbers<int16_t>(value);
    case GgufValueType::UINT32: return numbers<uint32_t>(value);
    case GgufValueType::INT32: return numbers<int32_t>(value);
    case GgufValueType::UINT64: return numbers<uint64_t>(value);
    case GgufValueType::INT64: return numbers<int64_t>(value);
    case GgufValueType::FLOAT32: return numbers<float>(value);
    case GgufValueType::FLOAT64: return numbers<double>(value);
    case GgufValueType::BOOL: return booleans(value);
    case GgufValueType::STRING: return strings(value);
    case GgufValueType::ARRAY: break;
    }
    return py::none();
}

// OSError(errno, text, path) of the kind that the error number stands for, such as FileNotFoundError.
[[noreturn]] void raise_os_error(const std::system_error & error, const std::string & path) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
    throw py::error_already_set();
}

// Maps a file into `mapped`, or raises OSError.
void map_file(const std::filesystem::path & path, std::optional<MappedFile> & mapped) {
    try {
        mapped.emplace(path.string());
    } catch (const std::system_error & error) {
        raise_os_error(error, path.string());
    }
}

py::dict read_gguf_header(const std::filesystem::path & path) {
    std::optional<MappedFile> mapped;
    map_file(path, mapped);
    const MappedFile & file = *mapped;
    GgufHeader header;
    bool legacy_q2_0;
    {
        const py::gil_scoped_release unlocked;
        header = parse_gguf_header(file.bytes(), file.bytes().size());
        legacy_q2_0 = resolve_legacy_q2_0(header, file.bytes().size());
        check_tensor_data(header, file.bytes().size());
    }
    const auto position = [&](const char * p) { return static_cast<uint64_t>(p - file.bytes().data()); };
    py::dict metadata;
    py::dict key_extents;
    py::dict key_types;
    for (const GgufKey & key : header.metadata) {
        const py::str name = text(key.name);
        const std::string_view value = key.value.bytes;
        metadata[name] = python_value(key.value);
        const auto type = static_cast<uint32_t>(key.value.type);
        const auto array = static_cast<uint32_t>(GgufValueType::ARRAY);
        key_types[name] =
            key.value.is_array ? py::tuple(py::make_tuple(array, type)) : py::tuple(py::make_tuple(type, py::none()));
        key_extents[name] =
            py::make_tuple(position(key.name.data()) - sizeof(uint64_t), position(value.data()) + value.size());
    }
    py::list tensors;
    for (const GgufTensor & tensor : header.tensors) {
        py::dict entry;
        entry["name"] = text(tensor.name);
        entry["type"] = tensor.type;
        entry["shape"] = std::vector<uint64_t>(tensor.shape, tensor.shape + tensor.n_dims);
        entry["offset"] = tensor.offset;
        entry["nbytes"] = tensor_bytes(tensor);
        // Behind the type id stands the offset, a u64.
        entry["extent"] = py::make_tuple(position(tensor.name.data()) - sizeof(uint64_t),
                                         tensor.type_position + sizeof(uint32_t) + sizeof(uint64_t));
        tensors.append(entry);
    }
    py::dict result;
    result["version"] = header.version;
    result["alignment"] = header.alignment;
    result["data_offset"] = header.data_offset;
    result["file_size"] = file.bytes().size();
    result["legacy_q2_0"] = legacy_q2_0;
    result["metadata"] = metadata;
    result["key_types"] = key_types;
    result["key_extents"] = key_extents;
    result["tensors"] = tensors;
    return result;
}

py::object read_hadamard(const std::filesystem::path & path) {
    std::optional<MappedFile> mapped;
    map_file(path, mapped);
    const std::string_view bytes = mapped->bytes();
    GgufHeader header;
    std::optional<HadamardContract> contract;
    {
        const py::gil_scoped_release unlocked;
        header = parse_gguf_header(bytes, bytes.size());
        resolve_legacy_q2_0(header, bytes.size());
        check_tensor_data(header, bytes.size());
        contract = read_hadamard_contract(header);
    }
    if (!contract) {
        return py::none();
    }
    const auto names = [](const std::vector<std::string_view> & views) {
        py::list list;
        for (const std::string_view view : views) {
            list.append(text(view));
        }
        return list;
    };
    py::dict signs;
    for (const auto & [width, values] : contract->signs) {
        signs[py::int_(width)] = py::array_t<int8_t>(static_cast<py::ssize_t>(values.size()), values.data());
    }
    py::dict rotations;
    for (const auto & [name, rotation] : contract->rotations) {
        rotations[text(name)] = rotation;  // weights that are rotated alike have one object in Python too
    }
    py::dict result;
    result["version"] = contract->version;
    result["block_size"] = contract->block_size;
    result["sign_mode"] = contract->explicit_signs ? "explicit" : "identity";
    result["signs"] = signs;
    result["weight_names"] = names(contract->weight_names);
    result["inverse_weight_names"] = names(contract->inverse_weight_names);
    result["tied_output"] = contract->version == 2;
    result["gdn_v_grouped"] = contract->gdn_v_grouped;
    result["rotations"] = rotations;
    return std::move(result);
}

const TensorTypeInfo & require_info(uint32_t id) {
    const TensorTypeInfo * info = tensor_type_info(id);
    if (info == nullptr) {
        throw py::value_error("unknown tensor type " + std::to_string(id));
    }
    return *info;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
    m.doc() = "Ternary block formats, GGUF headers and CPU kernels of ggml-tern, on numpy arrays.";

    py::register_exception<FormatError>(m, "FormatError", PyExc_ValueError);
    // Every known type as a constant TYPE_<NAME>, so that Python never spells a number.
    size_t n_types;
    const TensorTypeInfo * types = tensor_types(&n_types);
    for (size_t i = 0; i < n_types; i++) {
        m.attr(("TYPE_" + std::string(types[i].name)).c_str()) = types[i].id;
    }
    py::list ternary;
    for (int i = 0; i < TERNARY_TYPE_COUNT; i++) {
        ternary.append(TERNARY_TYPES[i].id);
    }
    m.attr("TERNARY_TYPES") = py::tuple(ternary);

    m.def(
        "type_name", [](uint32_t id) { return require_info(id).name; }, py::arg("type"),
        "Name of a GGUF tensor type id, such as 'PQ2_0'. ValueError for an unknown id.");
    m.def(
        "block_size", [](uint32_t id) { return require_info(id).block; }, py::arg("type"),
        "Weights in one block of a GGUF tensor type id. ValueError for an unknown id.");
    m.def(
        "type_size", [](uint32_t id) { return require_info(id).block_bytes; }, py::arg("type"),
        "Bytes of one block of a GGUF tensor type id. ValueError for an unknown id.");

    m.def("ternarize", &ternarize, py::arg("type"), py::arg("weights"), py::arg("out") = py::none(),
          py::arg("n_threads") = 0, R"(
Ternarize and pack a matrix, each block with the scale that minimizes its squared error.

type: a ternary type id. weights: [n_rows, n_in], C-contiguous, float32, float16 or uint16 (the bits of bfloat16); n_in a
multiple of the type's block. out: uint8 [n_rows, row_bytes] to write into, or None. n_threads: 0 for all cores.

Returns (data, stats): data uint8 [n_rows, row_bytes]; stats with n, zeros, sum_sq and sum_sq_error over all weights;
groups, ternary_groups (that held only -a, 0 and a), exact_groups (of these, whose a is an fp16 number) and max_scale_error
(the largest |a - fp16(a)| / a of ternary groups).
ValueError names the row and column of a weight that is not finite.)");
    m.def("pack", &pack, py::arg("type"), py::arg("trits"), py::arg("scales"), py::arg("n_threads") = 0, R"(
Pack ternary values. trits: int8 [n_rows, n_in] of -1, 0, 1. scales: float32 [n_rows, n_in / block], rounded to fp16.
Returns uint8 [n_rows, row_bytes]. ValueError for other trits and for scales beyond fp16.)");
    m.def("unpack", &unpack, py::arg("type"), py::arg("data"), py::arg("n_threads") = 0, R"(
Unpack ternary values. data: uint8 [n_rows, row_bytes].
Returns (trits int8 [n_rows, n_in] with the reserved code 3 as 2, scales float32 [n_rows, n_in / block]).)");
    m.def("dequantize", &dequantize, py::arg("type"), py::arg("data"), py::arg("n_threads") = 0,
          "Decode packed rows, uint8 [n_rows, row_bytes], to float32 [n_rows, n_in].");
    m.def("transcode", &transcode, py::arg("source_type"), py::arg("target_type"), py::arg("data"),
          py::arg("n_threads") = 0, R"(
Repack rows, uint8 [n_rows, row_bytes], from one ternary type to another with equal values.
ValueError where that is not possible: a target block that spans unequal scales, or the reserved code 3 in base 3.
The scale of a block that is all zero is no value: it takes that of its neighbours where they are to share one.)");

    m.def("matmul", &matrix_product, py::arg("type"), py::arg("data"), py::arg("x"), py::arg("isa") = py::none(),
          py::arg("n_threads") = 0, py::arg("rotation").none(true) = py::none(), R"(
Multiply as the plug-in does. data: uint8 [n_out, row_bytes]. x: float32 [n_cols, n_in], rotated if a Rotation is given, and
quantized to int8 per group of 128. isa: one of available_isas(), None for the plug-in's choice.
Returns float32 [n_cols, n_out].)");
    m.def("squared_relu_for_silu", &squared_relu_for_silu, py::arg("x"), py::arg("isa") = py::none(), R"(
What the plug-in makes of the products with the gate of a BitNet that has squared ReLU where llama.cpp's graph has SiLU:
h with silu(h) = relu(x)^2. x: float32 [n_cols, n_out]. isa: as for matmul. Returns float32 [n_cols, n_out].)");
    m.def("available_isas", &names_of_isas,
          "Kernel tables that this processor can run, best first: 'avx2', 'generic'.");
    m.def("tiles_roundtrip", &tiles_roundtrip, py::arg("type"), py::arg("data"), py::arg("dense") = false,
          "Pack rows, uint8 [n_rows, row_bytes], into the kernels' tiles and read them back, as the plug-in's buffers "
          "do.");

    py::class_<Rotation, std::shared_ptr<Rotation>>(m, "Rotation", R"(
The rotation of one weight, y = W_stored . H(s * P(x)): P reorders value heads, s is a vector of signs, H the normalized
Walsh-Hadamard transform of every block of inputs.)")
        .def(py::init(&make_rotation), py::arg("n_in"), py::arg("block"), py::arg("signs") = py::none(),
             py::arg("v_heads") = py::none(), R"(
n_in: inputs. block: a power of two that divides n_in. signs: int8 [n_in] of -1 and 1, None where all are 1. v_heads: (nk, nv)
where the nv value heads of nk key heads are to be taken from the order [head, nk, nv/nk], the leftmost fastest, to
[head, nv/nk, nk]; None where P changes nothing. ValueError for what does not fit.)")
        .def_readonly("n_in", &Rotation::n_in)
        .def_readonly("block", &Rotation::block)
        .def_property_readonly("signs", &signs_of, "int8 [n_in], or None where all are 1.")
        .def_property_readonly(
            "v_heads",
            [](const Rotation & rotation) {
                return rotation.n_v == 0 ? py::object(py::none())
                                         : py::object(py::make_tuple(rotation.n_k, rotation.n_v));
            },
            "(nk, nv), or None.")
        .def("rotate", &rotate, py::arg("x"), py::arg("n_threads") = 0, R"(
H(s * P(x)) of every row of x, float32 [n_rows, n_in]: activations, or plain weights to be stored rotated. The same bits as
in the kernels.)")
        .def("unrotate", &unrotate, py::arg("z"), py::arg("n_threads") = 0, R"(
P^-1(s * H(z)) of every row of z, float32 [n_rows, n_in]: the plain weights that stored ones stand for.)")
        .def("__eq__", [](const Rotation & a, const Rotation & b) { return a == b; }, py::is_operator());
    bind_tiled_matrix(m);
    bind_attention(m);
    bind_memory(m);
    bind_roofline(m);
    m.attr("ROTATED_ARCHITECTURES") = py::tuple(py::cast(ROTATED_ARCHITECTURES));
    m.def("may_be_rotated", &may_be_rotated, py::arg("name"),
          "Whether the contract of rotated files lets a tensor of this name be rotated.");
    m.def("read_hadamard", &read_hadamard, py::arg("path"), R"(
The contract of a GGUF file with Hadamard-rotated weights (keys prism.hadamard.*), or None for one without.

Returns a dict: version, block_size, sign_mode ('identity' or 'explicit'), signs (width to int8 array), weight_names,
inverse_weight_names, tied_output, gdn_v_grouped, and rotations, which has the Rotation of every rotated tensor by its name.
FormatError (a ValueError) names the key that breaks the contract, OSError says why the file cannot be read.)");

    m.def(
        "machine_memory",
        [](const std::string & root) {
            const MachineMemory memory = machine_memory(root);
            return py::make_tuple(memory.total, memory.free);
        },
        py::arg("root") = "", R"(
(total, free): bytes of memory that there are, and that are to be had without swapping, in the machine or in the control
groups of this process (a container, a service), whichever is less; 0 where the system does not say. root: where the
system's /proc and /sys are found.)");

    m.def("read_gguf_header", &read_gguf_header, py::arg("path"), R"(
Read and check the header of a GGUF file.

Returns a dict: version, alignment, data_offset and file_size in bytes, metadata (key to number, bool, str, list, or
numpy array), and tensors, a list of dicts with name, type (id), shape (ggml's order: n_in first), offset into the data
section and nbytes. key_types (key to a pair) has the ids of each value's type and, for an array, of its elements' (else
None). key_extents (key to a pair) and each tensor's extent say where the entry begins and ends in the file; a
tensor's entry ends with its type, a u32, and its offset, a u64. legacy_q2_0 is true for a file that has PQ2_0's blocks
under the id of Q2_0; the type given is then that of the blocks, PQ2_0.
FormatError (a ValueError) says what is wrong with a file, OSError why it cannot be read.)");
}
