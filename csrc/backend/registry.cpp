// The registry: what the host sees when it loads the plug-in.
#include "backend.h"

#include "../host/loader_hook.h"

#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#ifndef TERN_VERSION
#error "TERN_VERSION is set by the build"
#endif

namespace tern {

namespace {

const char * get_name(ggml_backend_reg_t) {
    return "TERN";
}

size_t get_device_count(ggml_backend_reg_t) {
    return device_count();
}

ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t index) {
    return device_at(index);
}

ggml_backend_feature * get_features(ggml_backend_reg_t) {
    static ggml_backend_feature features[] = {
        {"TERN_VERSION", TERN_VERSION},
        {"TERN_ISA", kernels().isa},
        {nullptr, nullptr},
    };
    return features;
}

// How the plug-in sits in its host, for `tern doctor` and for tests: one "key=value" a line.
const char * get_status() {
    static std::mutex mutex;
    static std::string status;
    const std::lock_guard<std::mutex> lock(mutex);
    hook_loaders();
    status = std::string("version=") + TERN_VERSION + "\nggml_version=" + host().ggml_version() +
             "\napi_version=" + std::to_string(host().api_version) + "\nisa=" + kernels().isa +
             "\nhooked_slots=" + std::to_string(hooked_slots()) + "\nknows_q2_0=" + (host().knows_q2_0 ? "1" : "0") +
             "\n";
    return status.c_str();
}

void * get_proc_address(ggml_backend_reg_t, const char * name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(backend_set_n_threads);
    }
    if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return reinterpret_cast<void *>(backend_set_abort_callback);
    }
    if (std::strcmp(name, "ggml_backend_dev_get_extra_bufts") == 0) {
        return reinterpret_cast<void *>(+[](ggml_backend_dev_t) {
            static ggml_backend_buffer_type_t types[2];
            types[0] = tiled_buffer_type();
            return types;
        });
    }
    if (std::strcmp(name, "ggml_backend_get_features") == 0) {
        return reinterpret_cast<void *>(get_features);
    }
    if (std::strcmp(name, "ggml_tern_status") == 0) {
        return reinterpret_cast<void *>(get_status);
    }
    return nullptr;
}

ggml_backend_reg_t registry() {
    static ggml_backend_reg registry = {
        /* .api_version = */ host().api_version,
        /* .iface       = */
        {
            /* .get_name         = */ get_name,
            /* .get_device_count = */ get_device_count,
            /* .get_device       = */ get_device,
            /* .get_proc_address = */ get_proc_address,
        },
        /* .context     = */ nullptr,
    };
    static const bool created = [] {
        create_devices(&registry);
        return true;
    }();
    (void)created;
    return &registry;
}

ggml_backend_reg_t connect_and_register(const void * caller) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    std::string error;
    if (connect_host(caller, error) == nullptr || !fill_type_slots(error)) {
        std::fprintf(stderr, "ggml-tern: %s\n", error.c_str());
        return nullptr;
    }
    hook_loaders();
    return registry();
}

}  // namespace

}  // namespace tern

extern "C" {

__attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void);
__attribute__((visibility("default"))) int ggml_backend_score(void);

// The caller's address tells which of the process's copies of ggml loads us.
__attribute__((noinline)) ggml_backend_reg_t ggml_backend_init(void) {
    return tern::connect_and_register(__builtin_extract_return_addr(__builtin_return_address(0)));
}

int ggml_backend_score(void) {
    return 1;
}

}  // extern "C"
