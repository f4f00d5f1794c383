// Finding the host's ggml and making sure that we understand it.
#include "host_api.h"

#include "structure_probes.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <vector>

namespace tern {

namespace {

HostApi g_host;

// The versions that were tried. Older ones are refused; whether a newer one fits is what the probes tell.
constexpr int FIRST_MINOR = 15;
constexpr int LAST_MINOR = 27;

std::string tried_versions() {
    return "ggml 0." + std::to_string(FIRST_MINOR) + " to 0." + std::to_string(LAST_MINOR);
}

std::string wrong_version(const std::string & found) {
    return "this llama.cpp has ggml " + found + ", and this build of ggml-tern understands " + tried_versions() +
           "; use one of those, or a ggml-tern made for it";
}

// A handle to the library that contains `address`, kept open for good: the host outlives us.
void * library_of(const void * address, std::string & name) {
    Dl_info info;
    if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) {
        return nullptr;
    }
    name = info.dli_fname;
    if (void * handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) {
        return handle;
    }
    return dlopen(nullptr, RTLD_LAZY);  // the caller is the program itself
}

template <typename Function> void look_up(void * library, const char * name, Function & function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
}

bool resolve(void * library, HostApi & api, std::string & missing) {
#define X(name)                                                                                                        \
    look_up(library, #name, api.name);                                                                                 \
    if (api.name == nullptr) {                                                                                         \
        missing = #name;                                                                                               \
        return false;                                                                                                  \
    }
    TERN_HOST_FUNCTIONS(X)
#undef X
    look_up(library, "gguf_init_from_callback", api.gguf_init_from_callback);
    look_up(library, "gguf_write_to_file_ptr", api.gguf_write_to_file_ptr);
    look_up(library, "ggml_graph_next_uid", api.ggml_graph_next_uid);
    return true;
}

// The number of an operation, by its name. The names of all hosts end with GLU; past it the table must not be read.
bool find_op(const HostApi & api, const char * name, ggml_op & op) {
    for (int i = 0; i < 256; i++) {
        const char * found = api.ggml_op_name(static_cast<ggml_op>(i));
        if (found == nullptr) {
            return false;
        }
        if (std::strcmp(found, name) == 0) {
            op = static_cast<ggml_op>(i);
            return true;
        }
        if (std::strcmp(found, "GLU") == 0) {
            return false;
        }
    }
    return false;
}

bool find_ops(HostApi & api, std::string & missing) {
    const struct {
        const char * name;
        ggml_op & op;
    } wanted[] = {
        {"MUL_MAT", api.op_mul_mat},
        {"MUL_MAT_ID", api.op_mul_mat_id},
        {"GET_ROWS", api.op_get_rows},
        {"CUSTOM", api.op_custom},
        {"NONE", api.op_none},
        {"VIEW", api.op_view},
        {"RESHAPE", api.op_reshape},
        {"PERMUTE", api.op_permute},
        {"TRANSPOSE", api.op_transpose},
        {"FLASH_ATTN_EXT", api.op_flash_attn_ext},
        {"MUL", api.op_mul},
        {"RMS_NORM", api.op_rms_norm},
        {"UNARY", api.op_unary},
        {"GLU", api.op_glu},
    };
    for (const auto & w : wanted) {
        if (!find_op(api, w.name, w.op)) {
            missing = w.name;
            return false;
        }
    }
    return true;
}

// Whether the host's reader by callback takes what we would give it, tried on the shortest GGUF file that there is.
bool reads_from_callback(const HostApi & api) {
    struct File {
        char magic[4] = {'G', 'G', 'U', 'F'};
        uint32_t version = 3;
        uint64_t n_tensors = 0;
        uint64_t n_keys = 0;
    } file;
    const GgufReader reader = [](void * data, void * output, uint64_t offset, size_t length) -> size_t {
        if (offset > sizeof(File) || length > sizeof(File) - offset) {
            return 0;
        }
        std::memcpy(output, static_cast<const char *>(data) + offset, length);
        return length;
    };
    gguf_context * context =
        api.gguf_init_from_callback(reader, &file, 0, sizeof(file), {/*no_alloc=*/true, /*ctx=*/nullptr});
    if (context == nullptr) {
        return false;
    }
    const bool is_empty = api.gguf_get_n_tensors(context) == 0;
    api.gguf_free(context);
    return is_empty;
}

bool connect(void * library, HostApi & api, std::string & error) {
    decltype(&::ggml_version) version_function;
    look_up(library, "ggml_version", version_function);
    if (version_function == nullptr) {
        error = "this program shows no ggml functions to plug-ins (linked statically, or too old); "
                "use a llama.cpp built with shared libraries (-DBUILD_SHARED_LIBS=ON), or `tern run`";
        return false;
    }
    const std::string version = version_function();
    int major = 0;
    int minor = 0;
    if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2 || (major == 0 && minor < FIRST_MINOR)) {
        error = wrong_version(version);
        return false;
    }
    const auto not_understood = [&](const std::string & what) {
        error = wrong_version(version + " (" + what + ")");
        return false;
    };
    std::string missing;
    if (!resolve(library, api, missing)) {
        error = wrong_version(version + " without " + missing + "()");
        return false;
    }
    // A registry entry begins with the version of the interface; the host's own CPU backend has registered before us.
    if (api.ggml_backend_reg_count() == 0 || api.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) {
        error = "no CPU backend is registered in this program yet; load it (ggml_backend_load_all) before ggml-tern";
        return false;
    }
    api.api_version = api.ggml_backend_reg_get(0)->api_version;
    if (api.api_version != 2 && api.api_version != 3) {
        return not_understood("backend API version " + std::to_string(api.api_version) + ", expected 2 or 3");
    }
    if (!find_ops(api, missing)) {
        return not_understood("without the operation " + missing);
    }
    api.has_graph_uids = api.ggml_graph_next_uid != nullptr;
    api.knows_q2_0 = dlsym(library, "quantize_q2_0") != nullptr;
    if (const char * wrong = probe_structures(api)) {
        return not_understood(wrong);
    }
    if (api.gguf_init_from_callback != nullptr && !reads_from_callback(api)) {
        api.gguf_init_from_callback = nullptr;
    }
    if (major > 0 || minor > LAST_MINOR) {
        api.remark = "this llama.cpp has ggml " + version + ", which this version was not tried with (it was with " +
                     tried_versions() + "); its structures are as expected";
    }
    return true;
}

}  // namespace

const HostApi * connect_host(const void * caller, std::string & error) {
    // What asks the loader comes before the lock: the loader may have come here with locks of its own.
    std::string name;
    void * library = library_of(caller, name);
    if (library == nullptr) {
        error = "cannot tell which library loads the plug-in";
        return nullptr;
    }
    HostApi api;
    const bool fits = connect(library, api, error);
    // A process may call this for several copies of ggml, but a plug-in can serve one only.
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    static bool is_connected = false;
    if (is_connected && (!fits || api.ggml_backend_reg_count != g_host.ggml_backend_reg_count)) {
        error = "already loaded into another copy of libggml in this process; load it into one only (with "
                "`ggml_tern.enable()` in Python)";
        return nullptr;
    }
    if (!fits) {
        return nullptr;
    }
    if (!is_connected) {
        g_host = api;
        is_connected = true;
    }
    return &g_host;
}

const HostApi & host() {
    return g_host;
}

}  // namespace tern
