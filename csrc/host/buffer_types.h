// Buffer types in the shape that the host's version expects.
//
// The table of a buffer type grew two functions with version 3 of the backend interface, both of which may stay empty.
#pragma once

#include "host_api.h"

namespace tern {

struct BufferTypeV3 {
    const char * (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    void * alloc_buffer_n;
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor *);
    void * get_alloc_size_n;
    bool (*is_host)(ggml_backend_buffer_type_t);
    ggml_backend_dev_t device;
    void * context;
};

// One buffer type, of our own or a copy of another.
class BufferType {
  public:
    explicit BufferType(const ggml_backend_buffer_type_i & iface) : v3_{} {
        if (host().api_version >= 3) {
            v3_ = {iface.get_name,
                   iface.alloc_buffer,
                   nullptr,
                   iface.get_alignment,
                   iface.get_max_size,
                   iface.get_alloc_size,
                   nullptr,
                   iface.is_host,
                   nullptr,
                   nullptr};
        } else {
            v2_ = {iface, nullptr, nullptr};
        }
    }

    // A copy of `original` with some functions of its own. What works on several tensors at a time is left out: the host then
    // does it one by one.
    BufferType(ggml_backend_buffer_type_t original, decltype(ggml_backend_buffer_type_i::get_name) get_name,
               decltype(ggml_backend_buffer_type_i::alloc_buffer) alloc_buffer,
               decltype(ggml_backend_buffer_type_i::get_alloc_size) get_alloc_size)
        : v3_{} {
        if (host().api_version >= 3) {
            v3_ = *reinterpret_cast<const BufferTypeV3 *>(original);
            v3_.get_name = get_name;
            v3_.alloc_buffer = alloc_buffer;
            v3_.alloc_buffer_n = nullptr;
            v3_.get_alloc_size = get_alloc_size;
            v3_.get_alloc_size_n = nullptr;
        } else {
            v2_ = *original;
            v2_.iface.get_name = get_name;
            v2_.iface.alloc_buffer = alloc_buffer;
            v2_.iface.get_alloc_size = get_alloc_size;
        }
    }

    void set_device(ggml_backend_dev_t device) { (host().api_version >= 3 ? v3_.device : v2_.device) = device; }

    ggml_backend_buffer_type_t handle() { return &v2_; }

  private:
    union {
        ggml_backend_buffer_type v2_;
        BufferTypeV3 v3_;
    };
};

}  // namespace tern
