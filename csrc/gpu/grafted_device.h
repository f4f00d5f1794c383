// A GPU that was taken over, and how to find it.
#pragma once

#include "../host/buffer_types.h"
#include "graft.h"

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

namespace tern {

// Of buffer types there are two. llama.cpp tells them apart by name, so the one that it is offered has a name of its own. Stock
// backends know theirs by the function that tells the name, so the one that buffers have is the stock one's in that.
struct GraftedDevice {
    GraftedDevice(ggml_backend_dev_t device, const ModelFacts & facts);

    ggml_backend_dev_t device;
    ModelFacts facts;
    ggml_backend_device_i stock;  // its functions, before
    ggml_backend_buffer_type_t stock_buffer_type;
    std::string name;  // of the type that is offered
    BufferType offered_type;
    BufferType type_in_buffers;
    ggml_backend_buffer_i stock_buffer{};  // the functions of its buffers, known once there is one
    std::once_flag has_stock_buffer;

    // Of its self-test (self_test.h).
    std::mutex testing;
    std::set<std::tuple<int32_t, uint32_t, const Rotation *>> tested;  // operation, type of the matrix
    double test_ms = 0;
    std::string failure;  // what differed; empty where nothing did
};

// The device, or nullptr where it is not taken over.
GraftedDevice * grafted(ggml_backend_dev_t device);
// The device that has this buffer type of ours, or nullptr.
GraftedDevice * device_of_buffer_type(ggml_backend_buffer_type_t type);

// Whether the tensor is stored as its twin in memory of ours.
bool is_stored_as_twin(const ggml_tensor * w);

// The treatment of a matrix that is stored as its twin, or of a view of one; nullptr where that is not known.
const Treatment * gpu_treatment_of(const ggml_tensor * w);

}  // namespace tern
