// Making the constants: see gpu_constants.h.
#include "gpu_constants.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>

namespace tern {

ggml_tensor * GpuConstants::make(const int64_t * shape, const std::vector<float> & values) {
    Constant constant{};
    constant.context.reset(host().ggml_init({2 * host().ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    if (constant.context == nullptr) {
        throw std::bad_alloc();
    }
    constant.tensor = host().ggml_new_tensor_3d(constant.context.get(), GGML_TYPE_F32, shape[0], shape[1], shape[2]);
    constant.buffer.reset(
        host().ggml_backend_buft_alloc_buffer(type_, host().ggml_backend_buft_get_alloc_size(type_, constant.tensor)));
    if (constant.buffer == nullptr) {
        throw std::bad_alloc();
    }
    if (host().ggml_backend_tensor_alloc(constant.buffer.get(), constant.tensor,
                                         host().ggml_backend_buffer_get_base(constant.buffer.get())) !=
        GGML_STATUS_SUCCESS) {
        throw std::bad_alloc();
    }
    host().ggml_backend_tensor_set(constant.tensor, values.data(), 0, values.size() * sizeof(float));
    made_.push_back(std::move(constant));
    return made_.back().tensor;
}

ggml_tensor * GpuConstants::hadamard(int64_t n) {
    ggml_tensor *& found = hadamards_[n];
    if (found == nullptr) {
        std::vector<float> values(static_cast<size_t>(n * n));
        const float scale = 1 / std::sqrt(static_cast<float>(n));
        for (int64_t r = 0; r < n; r++) {
            for (int64_t c = 0; c < n; c++) {
                values[static_cast<size_t>(r * n + c)] =
                    __builtin_parityll(static_cast<unsigned long long>(r & c)) != 0 ? -scale : scale;
            }
        }
        const int64_t shape[] = {n, n, 1};
        found = make(shape, values);
    }
    return found;
}

ggml_tensor * GpuConstants::factors(const Rotation & rotation, int64_t n) {
    if (rotation.signs.empty() && n == rotation.block) {
        return nullptr;
    }
    ggml_tensor *& found = factors_[{&rotation, n}];
    if (found == nullptr) {
        const float scale = std::sqrt(static_cast<float>(n) / static_cast<float>(rotation.block));
        std::vector<float> values(static_cast<size_t>(rotation.n_in), scale);
        for (size_t i = 0; i < rotation.signs.size(); i++) {
            values[i] *= rotation.signs[i];
        }
        const int64_t flat[] = {rotation.n_in, 1, 1};
        const int64_t n_v = std::max<int64_t>(1, rotation.n_v);
        const int64_t n_k = std::max<int64_t>(1, rotation.n_k);
        const int64_t heads[] = {rotation.n_in / n_v, n_v / n_k, n_k};
        found = make(rotation.n_v != 0 ? heads : flat, values);
    }
    return found;
}

ggml_tensor * GpuConstants::product(const ggml_tensor * weights, const ggml_tensor * factors) {
    ggml_tensor *& found = products_[{weights, factors}];
    if (found == nullptr) {
        const auto n = static_cast<size_t>(factors->ne[0]);
        std::vector<float> values(n);
        std::vector<float> by(n);
        host().ggml_backend_tensor_get(weights, values.data(), 0, n * sizeof(float));
        host().ggml_backend_tensor_get(factors, by.data(), 0, n * sizeof(float));
        for (size_t i = 0; i < n; i++) {
            values[i] *= by[i];
        }
        const int64_t flat[] = {factors->ne[0], 1, 1};
        found = make(flat, values);
    }
    return found;
}

}  // namespace tern
