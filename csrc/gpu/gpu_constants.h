// Constants of rotations in the memory of a GPU: Hadamard matrices, and signs.
#pragma once

#include "../format/hadamard.h"
#include "../host/host_api.h"

#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace tern {

// What is made once per backend, and lives as long as this does.
class GpuConstants {
  public:
    explicit GpuConstants(ggml_backend_buffer_type_t type) : type_(type) {}

    // H(n) / sqrt(n), [n, n]. Throws std::bad_alloc, as the next one does, where the device has no memory.
    ggml_tensor * hadamard(int64_t n);

    // What the values of x, or of P(x), are multiplied with before H(n) is taken and blocks of n are joined: the signs, times
    // what joining does not do. [n_in], or [head, repeat, n_k] where P swaps heads. nullptr where all are 1.
    ggml_tensor * factors(const Rotation & rotation, int64_t n);

    // The weights of a norm times such factors, [n_in]. Reads the weights from the device.
    ggml_tensor * product(const ggml_tensor * weights, const ggml_tensor * factors);

  private:
    struct Freed {
        void operator()(ggml_context * context) const { host().ggml_free(context); }
        void operator()(ggml_backend_buffer_t buffer) const { host().ggml_backend_buffer_free(buffer); }
    };
    struct Constant {
        std::unique_ptr<ggml_context, Freed> context;
        std::unique_ptr<ggml_backend_buffer, Freed> buffer;
        ggml_tensor * tensor;
    };

    ggml_tensor * make(const int64_t * shape, const std::vector<float> & values);

    ggml_backend_buffer_type_t type_;
    std::vector<Constant> made_;
    std::map<int64_t, ggml_tensor *> hadamards_;
    std::map<std::pair<const Rotation *, int64_t>, ggml_tensor *> factors_;
    std::map<std::pair<const ggml_tensor *, const ggml_tensor *>, ggml_tensor *> products_;
};

}  // namespace tern
