// The tests, and what they are compared with: see self_test.h.
#include "self_test.h"

#include "twin.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

namespace tern {

namespace {

constexpr int64_t N_OUT = 64;
constexpr int64_t N_EXPERTS = 4;
constexpr int64_t N_USED = 2;
// The most come first: what a backend sets aside for them does for the others, as when a model reads a prompt and then answers.
constexpr int64_t COLUMNS[] = {64, 8, 1};
// Of the inputs where no rotation has its own.
constexpr int64_t N_IN = 512;

// The mean squared difference, in units of the mean square. Quantized activations make about 1e-4 of it, a missing rotation 2.
constexpr double LIMIT = 2e-3;

bool is_wanted() {
    static const char * const word = std::getenv("TERN_GPU_SELF_TEST");
    return word == nullptr || std::strcmp(word, "0") != 0;
}

struct Freed {
    void operator()(ggml_context * context) const { host().ggml_free(context); }
    void operator()(ggml_backend_buffer_t buffer) const { host().ggml_backend_buffer_free(buffer); }
    void operator()(ggml_backend_t backend) const { host().ggml_backend_free(backend); }
};
using Context = std::unique_ptr<ggml_context, Freed>;
using Buffer = std::unique_ptr<ggml_backend_buffer, Freed>;
using Backend = std::unique_ptr<ggml_backend, Freed>;

// Puts tensors into a buffer of their own.
Buffer allocate(ggml_backend_buffer_type_t type, const std::vector<ggml_tensor *> & tensors) {
    const size_t alignment = std::max<size_t>(256, host().ggml_backend_buft_get_alignment(type));
    const auto bytes_of = [&](const ggml_tensor * tensor) {
        return (host().ggml_backend_buft_get_alloc_size(type, tensor) + alignment - 1) / alignment * alignment;
    };
    size_t n_bytes = 0;
    for (const ggml_tensor * tensor : tensors) {
        n_bytes += bytes_of(tensor);
    }
    Buffer buffer(host().ggml_backend_buft_alloc_buffer(type, n_bytes));
    if (buffer == nullptr) {
        throw std::runtime_error("has no memory for it");
    }
    auto * next = static_cast<char *>(host().ggml_backend_buffer_get_base(buffer.get()));
    for (ggml_tensor * tensor : tensors) {
        const size_t n = bytes_of(tensor);
        if (host().ggml_backend_tensor_alloc(buffer.get(), tensor, next) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("takes no tensor of type Q2_0");
        }
        next += n;
    }
    return buffer;
}

// H(s * P(x)), plainly.
std::vector<double> rotated(const float * x, int64_t n_in, const Rotation * rotation) {
    if (rotation == nullptr) {
        return {x, x + n_in};
    }
    std::vector<float> permuted(static_cast<size_t>(n_in));
    permute(*rotation, x, 0, n_in, permuted.data());
    std::vector<double> y(permuted.begin(), permuted.end());
    for (size_t i = 0; i < rotation->signs.size(); i++) {
        y[i] *= rotation->signs[i];
    }
    const auto block = static_cast<size_t>(rotation->block);
    for (size_t begin = 0; begin < y.size(); begin += block) {
        for (size_t half = 1; half < block; half *= 2) {
            for (size_t i = begin; i < begin + block; i++) {
                if ((i & half) == 0) {
                    const double a = y[i];
                    const double b = y[i + half];
                    y[i] = a + b;
                    y[i + half] = a - b;
                }
            }
        }
    }
    for (double & value : y) {
        value /= std::sqrt(static_cast<double>(block));
    }
    return y;
}

// A matrix, or a stack of them, with random codes and scales.
struct Weights {
    std::vector<uint8_t> bytes;
    std::vector<float> values;  // what the bytes stand for, row by row

    Weights(const TernaryType & type, int64_t n_in, int64_t n_rows, std::mt19937 & random)
        : bytes(type.row_bytes(n_in) * static_cast<size_t>(n_rows)), values(static_cast<size_t>(n_in * n_rows)) {
        std::vector<uint8_t> codes(static_cast<size_t>(n_in));
        std::vector<uint16_t> scales(static_cast<size_t>(n_in / type.block));
        for (int64_t row = 0; row < n_rows; row++) {
            for (uint8_t & code : codes) {
                code = static_cast<uint8_t>(random() % 3);
            }
            for (uint16_t & scale : scales) {
                scale = static_cast<uint16_t>(0x2800 + random() % 0x400);  // fp16, 1/32 to 1/16
            }
            uint8_t * const stored = bytes.data() + static_cast<size_t>(row) * type.row_bytes(n_in);
            pack_row(type, codes.data(), scales.data(), n_in, stored);
            dequantize_row(type, stored, n_in, values.data() + row * n_in);
        }
    }
};

class Test {
  public:
    // rotation: of the matrix, or nullptr.
    Test(GraftedDevice & device, const ggml_tensor * op, const Rotation * rotation)
        : device_(device), asked_(op), rotation_(rotation), n_in_(rotation != nullptr ? rotation->n_in : N_IN),
          weights_(*ternary_type_of(op->src[0]->type), n_in_, N_OUT * n_matrices(), random_) {
        treatment_.rotation = rotation;
    }

    // The worst of the differences. Throws std::runtime_error where the device does not even compute.
    double worst_difference() {
        const Backend backend(host().ggml_backend_dev_init(device_.device, nullptr));
        if (backend == nullptr) {
            throw std::runtime_error("does not start");
        }
        const Context context(host().ggml_init({64 * host().ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
        if (context == nullptr) {
            throw std::bad_alloc();
        }
        ggml_tensor * w = host().ggml_new_tensor_3d(context.get(), asked_->src[0]->type, n_in_, N_OUT, n_matrices());
        const Buffer of_w = allocate(device_.offered_type.handle(), {w});
        host().ggml_backend_tensor_set(w, weights_.bytes.data(), 0, weights_.bytes.size());
        w->extra = &treatment_;
        double worst = 0;
        for (const int64_t n_cols : COLUMNS) {
            worst = std::max(worst, difference(backend.get(), w, n_cols));
        }
        return worst;
    }

  private:
    bool is_product() const { return asked_->op == host().op_mul_mat; }
    bool is_look_up() const { return asked_->op == host().op_get_rows; }
    int64_t n_matrices() const { return asked_->op == host().op_mul_mat_id ? N_EXPERTS : 1; }

    double difference(ggml_backend_t backend, ggml_tensor * w, int64_t n_cols) {
        const Context context(
            host().ggml_init({1024 * host().ggml_tensor_overhead() + (size_t{1} << 20), nullptr, /*no_alloc=*/true}));
        if (context == nullptr) {
            throw std::bad_alloc();
        }
        ggml_context * c = context.get();
        std::vector<ggml_tensor *> tensors;
        ggml_tensor * x = nullptr;
        ggml_tensor * ids = nullptr;
        ggml_tensor * y;
        if (is_look_up()) {
            ids = host().ggml_new_tensor_3d(c, GGML_TYPE_I32, n_cols, 1, 1);
            y = host().ggml_get_rows(c, w, ids);
        } else if (is_product()) {
            x = host().ggml_new_tensor_3d(c, GGML_TYPE_F32, n_in_, n_cols, 1);
            y = host().ggml_mul_mat(c, w, x);
        } else {
            x = host().ggml_new_tensor_3d(c, GGML_TYPE_F32, n_in_, 1, n_cols);
            ids = host().ggml_new_tensor_3d(c, GGML_TYPE_I32, N_USED, n_cols, 1);
            y = host().ggml_mul_mat_id(c, w, x, ids);
        }
        for (ggml_tensor * tensor : {x, ids, y}) {
            if (tensor != nullptr) {
                tensors.push_back(tensor);
            }
        }
        ggml_cgraph * graph = host().ggml_new_graph(c);
        host().ggml_build_forward_expand(graph, y);
        const Buffer buffer = allocate(device_.stock_buffer_type, tensors);

        std::vector<float> columns(static_cast<size_t>(n_in_ * n_cols));
        std::normal_distribution<float> normal;
        std::generate(columns.begin(), columns.end(), [&] { return normal(random_); });
        std::vector<int32_t> chosen(static_cast<size_t>(is_look_up() ? n_cols : N_USED * n_cols));
        const int64_t n_choices = is_look_up() ? N_OUT : N_EXPERTS;
        for (size_t i = 0; i < chosen.size(); i++) {
            // Different experts for a column.
            chosen[i] = static_cast<int32_t>((random_() % static_cast<unsigned>(n_choices / N_USED)) * N_USED +
                                             i % static_cast<size_t>(N_USED));
        }
        if (x != nullptr) {
            host().ggml_backend_tensor_set(x, columns.data(), 0, columns.size() * sizeof(float));
        }
        if (ids != nullptr) {
            host().ggml_backend_tensor_set(ids, chosen.data(), 0, chosen.size() * sizeof(int32_t));
        }
        if (host().ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("does not compute it");
        }
        std::vector<float> results(host().ggml_nbytes(y) / sizeof(float));
        host().ggml_backend_tensor_get(y, results.data(), 0, results.size() * sizeof(float));
        return compare(results, columns, chosen, n_cols);
    }

    double compare(const std::vector<float> & results, const std::vector<float> & columns,
                   const std::vector<int32_t> & chosen, int64_t n_cols) const {
        if (is_look_up()) {
            double squares = 0;
            double errors = 0;
            for (int64_t r = 0; r < n_cols; r++) {
                for (int64_t i = 0; i < n_in_; i++) {
                    const double value =
                        weights_.values[static_cast<size_t>(chosen[static_cast<size_t>(r)] * n_in_ + i)];
                    const double error = results[static_cast<size_t>(r * n_in_ + i)] - value;
                    errors += error * error;
                    squares += value * value;
                }
            }
            return errors / squares;
        }
        const int64_t n_used = is_product() ? 1 : N_USED;
        std::vector<double> errors(static_cast<size_t>(n_cols));
        std::vector<double> squares(static_cast<size_t>(n_cols));
        for (int64_t c = 0; c < n_cols; c++) {
            const std::vector<double> x = rotated(columns.data() + c * n_in_, n_in_, rotation_);
            for (int64_t u = 0; u < n_used; u++) {
                const int64_t first = is_product() ? 0 : chosen[static_cast<size_t>(c * N_USED + u)] * N_OUT;
                for (int64_t row = 0; row < N_OUT; row++) {
                    const float * w = weights_.values.data() + (first + row) * n_in_;
                    double sum = 0;
                    for (int64_t i = 0; i < n_in_; i++) {
                        sum += w[i] * x[static_cast<size_t>(i)];
                    }
                    const double error = results[static_cast<size_t>((c * n_used + u) * N_OUT + row)] - sum;
                    errors[static_cast<size_t>(c)] += error * error;
                    squares[static_cast<size_t>(c)] += sum * sum;
                }
            }
        }
        double worst = 0;
        for (size_t c = 0; c < errors.size(); c++) {
            worst = std::max(worst, errors[c] / squares[c]);
            if (std::isnan(errors[c])) {
                return errors[c];
            }
        }
        return worst;
    }

    GraftedDevice & device_;
    const ggml_tensor * asked_;
    const Rotation * rotation_;
    int64_t n_in_;
    std::mt19937 random_{1};
    Weights weights_;
    Treatment treatment_;
};

std::string described(const ggml_tensor * op, const Rotation * rotation) {
    std::string what = std::string(host().ggml_op_name(op->op)) + " with " + ternary_type_of(op->src[0]->type)->name;
    if (rotation != nullptr) {
        what += ", rotated in blocks of " + std::to_string(rotation->block);
    }
    return what;
}

// What went wrong, or nothing.
std::string run(GraftedDevice & device, const ggml_tensor * op, const Rotation * rotation) {
    try {
        const double difference = Test(device, op, rotation).worst_difference();
        if (difference <= LIMIT) {
            return "";
        }
        char text[64];
        std::snprintf(text, sizeof(text), " is off by %.2g of its mean square", difference);
        return described(op, rotation) + text;
    } catch (const std::exception & error) {
        return "for " + described(op, rotation) + " it " + error.what();
    }
}

// Tests an operation with a matrix that is rotated in each of these ways (nullptr: not), where that was not done yet.
bool passes(GraftedDevice & device, const ggml_tensor * op, const std::vector<const Rotation *> & rotations) {
    if (!is_wanted()) {
        return true;
    }
    const std::lock_guard<std::mutex> lock(device.testing);
    for (const Rotation * rotation : rotations) {
        const std::tuple kind(static_cast<int32_t>(op->op), static_cast<uint32_t>(op->src[0]->type), rotation);
        if (!device.failure.empty() || device.tested.count(kind) != 0) {
            continue;
        }
        const auto start = std::chrono::steady_clock::now();
        device.failure = run(device, op, rotation);
        device.test_ms += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
        device.tested.insert(kind);
        if (!device.failure.empty()) {
            std::fprintf(stderr,
                         "ggml-tern: %s is left alone: its self-test failed: %s; ternary matrices stay on the CPU "
                         "(TERN_GPU_SELF_TEST=0 takes the device at its word)\n",
                         host().ggml_backend_dev_name(device.device), device.failure.c_str());
        }
    }
    return device.failure.empty();
}

}  // namespace

bool passes_self_test(GraftedDevice & device, const ggml_tensor * op) {
    std::vector<const Rotation *> rotations{nullptr};
    if (is_treated(op->src[0]->type)) {
        const std::vector<const Rotation *> known = device.facts.rotations();
        rotations.insert(rotations.end(), known.begin(), known.end());
    }
    return passes(device, op, rotations);
}

void test_products(GraftedDevice & device) {
    static const Rotation rotation = [] {
        constexpr int64_t BLOCK = 1024;
        Rotation made{2 * BLOCK, BLOCK, std::vector<float>(2 * BLOCK, 1), 0, 0};
        for (size_t i = 0; i < made.signs.size(); i += 3) {
            made.signs[i] = -1;
        }
        return made;
    }();
    const Context context(host().ggml_init({8 * host().ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    if (context == nullptr) {
        return;
    }
    ggml_tensor * x = host().ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, N_IN, 1, 1);
    for (const uint32_t slot : {SLOT_PQ2_0, SLOT_PQ2_0_TREATED}) {
        ggml_tensor * w = host().ggml_new_tensor_3d(context.get(), static_cast<ggml_type>(slot), N_IN, N_OUT, 1);
        passes(device, host().ggml_mul_mat(context.get(), w, x), {slot == SLOT_PQ2_0 ? nullptr : &rotation});
    }
}

}  // namespace tern
