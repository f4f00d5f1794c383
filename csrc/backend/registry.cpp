// The registry: what the host sees when it loads the plug-in.
#include "../gpu/graft.h"
#include "backend.h"

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
        {"TERN_ISA", isa().name},
        {nullptr, nullptr},
    };
    return features;
}

// How the plug-in sits in its host, for `tern doctor` and for tests: one "key=value" a line. Of each GPU, separated by tabs: its name, its
// description, how many tests it was put to, how many milliseconds they took, and why it is left alone, if it is.
const char * get_status() {
    static std::mutex mutex;
    static std::string status;
    const std::lock_guard<std::mutex> lock(mutex);
    meet_newcomers();
    status = std::string("version=") + TERN_VERSION + "\nggml_version=" + host().ggml_version() +
             "\napi_version=" + std::to_string(host().api_version) + "\nisa=" + isa().name +
             "\nhooked_slots=" + std::to_string(hooked_slots()) + "\nknows_q2_0=" + (host().knows_q2_0 ? "1" : "0") +
             "\n";
    const std::vector<GpuStatus> gpus = gpu_statuses();
    for (size_t i = 0; i < gpus.size(); i++) {
        char tests[64];
        std::snprintf(tests, sizeof(tests), "%zu\t%.0f", gpus[i].n_tests, gpus[i].test_ms);
        status += "gpu" + std::to_string(i) + "=" + gpus[i].name + "\t" + gpus[i].description + "\t" + tests + "\t" +
                  gpus[i].refusal + "\n";
    }
    return status.c_str();
}

// For `tern doctor`: has the GPUs prove what they compute, without a model.
void test_all_gpus() {
    meet_newcomers();
    test_gpus();
}

// Of a device: tiles, in the layout for the model that is being loaded. nullptr ends the list.
ggml_backend_buffer_type_t * get_extra_buffer_types(ggml_backend_dev_t) {
    thread_local ggml_backend_buffer_type_t types[2];
    types[0] = tiled_buffer_type();
    return types;
}

void * get_proc_address(ggml_backend_reg_t, const char * name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(backend_set_n_threads);
    }
    if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return reinterpret_cast<void *>(backend_set_abort_callback);
    }
    if (std::strcmp(name, "ggml_backend_dev_get_extra_bufts") == 0) {
        return reinterpret_cast<void *>(get_extra_buffer_types);
    }
    if (std::strcmp(name, "ggml_backend_get_features") == 0) {
        return reinterpret_cast<void *>(get_features);
    }
    if (std::strcmp(name, "ggml_tern_test_gpus") == 0) {
        return reinterpret_cast<void *>(test_all_gpus);
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

// Whether the host's functions find in our structures what we have put there. Returns where they do not, or nullptr. Texts are
// compared by their address: the wrong function may have returned anything.
const char * what_the_host_misreads() {
    ggml_backend_reg_t reg = registry();
    ggml_backend_dev_t device = device_at(0);
    if (host().ggml_backend_reg_name(reg) != get_name(reg) ||
        host().ggml_backend_reg_dev_count(reg) != device_count() || host().ggml_backend_reg_dev_get(reg, 0) != device) {
        return "registry entry";
    }
    if (host().ggml_backend_dev_backend_reg(device) != reg ||
        host().ggml_backend_dev_buffer_type(device) != plain_buffer_type()) {
        return "device";
    }
    ggml_backend_buffer_type_t type = tiled_buffer_type();
    if (host().ggml_backend_buft_get_device(type) != device || host().ggml_backend_buft_is_host(type) ||
        !host().ggml_backend_buft_is_host(plain_buffer_type()) ||
        host().ggml_backend_buft_get_alignment(type) != host().ggml_backend_buft_get_alignment(plain_buffer_type())) {
        return "buffer type";
    }
    constexpr size_t SIZE = 4096;
    ggml_backend_buffer_t buffer = host().ggml_backend_buft_alloc_buffer(type, SIZE);
    if (buffer == nullptr || host().ggml_backend_buffer_get_type(buffer) != type ||
        host().ggml_backend_buffer_get_size(buffer) != SIZE || host().ggml_backend_buffer_get_base(buffer) == nullptr) {
        return "buffer";
    }
    host().ggml_backend_buffer_free(buffer);
    ggml_backend_t backend = host().ggml_backend_dev_init(device, nullptr);
    if (backend == nullptr || host().ggml_backend_get_device(backend) != device ||
        host().ggml_backend_name(backend) != host().ggml_backend_dev_name(device)) {
        return "backend";
    }
    host().ggml_backend_free(backend);
    return nullptr;
}

// Takes no lock: it asks the loader, which may have come here with its own.
ggml_backend_reg_t connect_and_register(const void * caller) {
    std::string error;
    if (connect_host(caller, error) != nullptr) {
        if (const char * structure = what_the_host_misreads()) {
            error = std::string("ggml ") + host().ggml_version() + " of this llama.cpp finds other things in a " +
                    structure + " than what was put there; a ggml-tern made for it is needed";
        } else if (enter_host(error)) {
            static std::once_flag said;
            std::call_once(said, [] {
                if (!host().remark.empty()) {
                    std::fprintf(stderr, "ggml-tern: %s\n", host().remark.c_str());
                }
            });
            return registry();
        }
    }
    std::fprintf(stderr, "ggml-tern: %s\n", error.c_str());
    return nullptr;
}

}  // namespace

void meet_newcomers() {
    hook_loaders();
    if (is_registered()) {
        graft_gpus(registry(), {find_treatment, known_rotations});
    }
}

void tell_of_gpus() {
    meet_newcomers();
    tell_refusals();
}

bool is_registered() {
    for (size_t i = 0; i < host().ggml_backend_reg_count(); i++) {
        if (host().ggml_backend_reg_get(i) == registry()) {
            return true;
        }
    }
    return false;
}

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
