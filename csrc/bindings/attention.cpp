// ggml_tern._core.attention: the plug-in's attention on numpy arrays.
#include "../cpu/attention.h"
#include "../cpu/team.h"
#include "arguments.h"
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace tern {

namespace {

// An array [token or position][head][values]; its last dimension has no gaps.
AttentionRows require_rows(const py::array & array, const char * name) {
    if (array.ndim() != 3 || array.strides(2) != array.itemsize()) {
        throw py::value_error(std::string(name) + " must have 3 dimensions, the last one contiguous");
    }
    return {static_cast<const uint8_t *>(array.data()), static_cast<size_t>(array.strides(0)),
            static_cast<size_t>(array.strides(1)), 0};
}

// The same for a cache: also its type and the values of a head.
std::pair<AttentionRows, int64_t> require_cache(uint32_t type, const py::array & array, const char * name) {
    require_dtype(array, name, 'u', 1, "uint8");
    const size_t block = kv_block_bytes(type);
    if (block == 0) {
        throw py::value_error("type " + std::to_string(type) + " is not one of a KV cache");
    }
    const AttentionRows rows = require_rows(array, name);
    if (array.shape(2) == 0 || array.shape(2) % static_cast<py::ssize_t>(block) != 0) {
        throw py::value_error(std::string(name) + " has rows of " + std::to_string(array.shape(2)) +
                              " bytes, which is no multiple of the " + std::to_string(block) +
                              " that 32 values of its type take");
    }
    return {rows, array.shape(2) / static_cast<int64_t>(block) * KV_BLOCK};
}

py::array_t<float> attention(const py::array & q, uint32_t type_k, const py::array & k, uint32_t type_v,
                             const py::array & v, const std::optional<py::array> & mask, std::optional<float> scale,
                             float max_bias, float softcap, const std::optional<std::vector<float>> & sinks,
                             const std::optional<std::string> & isa, int n_threads) {
    Attention a{};
    require_dtype(q, "q", 'f', 4, "float32");
    a.q = require_rows(q, "q");
    std::tie(a.k, a.d_k) = require_cache(type_k, k, "k");
    std::tie(a.v, a.d_v) = require_cache(type_v, v, "v");
    a.type_k = static_cast<KvType>(type_k);
    a.type_v = static_cast<KvType>(type_v);
    a.n_tokens = q.shape(0);
    a.n_heads = q.shape(1);
    a.n_kv = k.shape(0);
    a.n_kv_heads = k.shape(1);
    a.n_sequences = 1;
    if (q.shape(2) != a.d_k || v.shape(0) != a.n_kv || v.shape(1) != a.n_kv_heads || a.n_kv_heads == 0 ||
        a.n_heads % a.n_kv_heads != 0) {
        throw py::value_error(
            "q, k and v do not fit: [n_tokens, n_heads, d_k], [n_kv, n_kv_heads, bytes of d_k] and [n_kv, "
            "n_kv_heads, bytes of d_v] are wanted, n_heads a multiple of n_kv_heads");
    }
    if (mask) {
        require_dtype(*mask, "mask", 'f', 2, "float16");
        require_matrix(*mask, "mask");
        if (mask->shape(0) != a.n_tokens || mask->shape(1) != a.n_kv) {
            throw py::value_error("mask must be [n_tokens, n_kv]");
        }
        a.mask = {static_cast<const uint8_t *>(mask->data()), static_cast<size_t>(mask->strides(0)), 0, 0};
    }
    if (sinks && static_cast<int64_t>(sinks->size()) != a.n_heads) {
        throw py::value_error("there must be one sink for each of the n_heads");
    }
    a.n_mask_heads = 1;
    a.n_mask_sequences = 1;
    a.scale = scale.value_or(1 / std::sqrt(static_cast<float>(a.d_k)));
    a.max_bias = max_bias;
    a.softcap = softcap;
    a.sinks = sinks ? sinks->data() : nullptr;
    const AttentionKernels & kernels = isa_by_name(isa).attention;
    py::array_t<float> out(std::vector<py::ssize_t>{a.n_tokens, a.n_heads, a.d_v});
    a.out = out.mutable_data();

    const py::gil_scoped_release unlocked;
    AttentionWork work(a);
    std::vector<float> partials(work.n_partials());
    const int threads = thread_count(n_threads);
    ThreadScratch scratch;
    scratch.reserve(threads, work.scratch_bytes());
    for_each_thread(threads, [&](int ith) { work.run(kernels, threads, partials.data(), scratch.of(ith)); });
    if (work.is_split()) {
        for_each_thread(threads, [&](int ith) { work.combine(ith, threads, partials.data()); });
    }
    return out;
}

}  // namespace

void bind_attention(py::module_ & m) {
    m.def("attention", &attention, py::arg("q"), py::arg("type_k"), py::arg("k"), py::arg("type_v"), py::arg("v"),
          py::arg("mask") = py::none(), py::arg("scale") = py::none(), py::arg("max_bias") = 0.0f,
          py::arg("softcap") = 0.0f, py::arg("sinks") = py::none(), py::arg("isa") = py::none(),
          py::arg("n_threads") = 0, R"(
Attend as the plug-in does, in fp32 whatever the types of the cache.

q: float32 [n_tokens, n_heads, d_k]. k, v: uint8 [n_kv, n_kv_heads, bytes of d_k or d_v values] in the types (ids) type_k and
type_v: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0; d_k and d_v multiples of 32. These may be views with gaps. mask:
float16 [n_tokens, n_kv], added to the scores, -inf where a position is hidden. scale: of the scores, None for 1 / sqrt(d_k).
max_bias: of ALiBi, whose slopes multiply the mask. softcap: c > 0 for scores c * tanh(score / c). sinks: a score for each
head that counts in the sum of the weights. isa: as for matmul.
Returns float32 [n_tokens, n_heads, d_v]. ValueError or TypeError for what does not fit.)");
}

}  // namespace tern
