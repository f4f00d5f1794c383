// Finding the host's ggml and making sure that we understand it.
#include "host_api.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <vector>

namespace tern {

namespace {

HostApi g_host;
bool g_connected = false;

// The versions between which the structures that we share with the host are known to be the same.
constexpr int FIRST_MINOR = 15;
constexpr int LAST_MINOR = 26;

std::string wrong_version(const std::string & found) {
    return "this llama.cpp has ggml " + found + ", and this build of ggml-tern understands ggml 0." +
           std::to_string(FIRST_MINOR) + " to 0." + std::to_string(LAST_MINOR) +
           "; use one of those, or a ggml-tern made for it";
}

std::string not_understood(const std::string & what) {
    return wrong_version(std::string(g_host.ggml_version()) + " (" + what + ")");
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

bool resolve(void * library, std::string & missing) {
#define X(name)                                                                                                        \
    g_host.name = reinterpret_cast<decltype(g_host.name)>(dlsym(library, #name));                                      \
    if (g_host.name == nullptr) {                                                                                      \
        missing = #name;                                                                                               \
        return false;                                                                                                  \
    }
    TERN_HOST_FUNCTIONS(X)
#undef X
    return true;
}

// The number of an operation, by its name. The names of all hosts end with GLU; past it the table must not be read.
bool find_op(const char * name, ggml_op & op) {
    for (int i = 0; i < 256; i++) {
        const char * found = g_host.ggml_op_name(static_cast<ggml_op>(i));
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

bool find_ops(std::string & missing) {
    const struct {
        const char * name;
        ggml_op & op;
    } wanted[] = {
        {"MUL_MAT", g_host.op_mul_mat},     {"MUL_MAT_ID", g_host.op_mul_mat_id},
        {"GET_ROWS", g_host.op_get_rows},   {"CUSTOM", g_host.op_custom},
        {"NONE", g_host.op_none},           {"VIEW", g_host.op_view},
        {"RESHAPE", g_host.op_reshape},     {"PERMUTE", g_host.op_permute},
        {"TRANSPOSE", g_host.op_transpose}, {"FLASH_ATTN_EXT", g_host.op_flash_attn_ext},
    };
    for (const auto & w : wanted) {
        if (!find_op(w.name, w.op)) {
            missing = w.name;
            return false;
        }
    }
    return true;
}

// Builds tensors and a graph with the host's own functions and compares what they did with what we read.
// Returns what differs, or nullptr.
const char * probe_structures() {
    ggml_init_params params{1 << 20, nullptr, /*no_alloc=*/true};
    ggml_context * context = g_host.ggml_init(params);
    if (context == nullptr) {
        return "ggml_init fails";
    }
    ggml_tensor * w = g_host.ggml_new_tensor_3d(context, GGML_TYPE_F16, 64, 5, 3);
    ggml_tensor * x = g_host.ggml_new_tensor_3d(context, GGML_TYPE_F32, 64, 7, 3);
    ggml_tensor * y = g_host.ggml_mul_mat(context, w, x);
    ggml_tensor * view = g_host.ggml_view_1d(context, x, 3, 16);
    ggml_tensor * experts_x = g_host.ggml_new_tensor_3d(context, GGML_TYPE_F32, 64, 2, 7);
    ggml_tensor * ids = g_host.ggml_new_tensor_3d(context, GGML_TYPE_I32, 2, 7, 1);
    ggml_tensor * experts_y = g_host.ggml_mul_mat_id(context, w, experts_x, ids);
    g_host.ggml_set_output(y);
    ggml_cgraph * graph = g_host.ggml_new_graph(context);
    g_host.ggml_build_forward_expand(graph, y);
    g_host.ggml_build_forward_expand(graph, experts_y);

    const char * wrong = nullptr;
    const auto expect = [&](bool ok, const char * what) {
        if (!ok && wrong == nullptr) {
            wrong = what;
        }
    };
    expect(w->type == GGML_TYPE_F16 && w->ne[0] == 64 && w->ne[1] == 5 && w->ne[2] == 3 && w->ne[3] == 1,
           "another tensor shape");
    expect(w->nb[0] == 2 && w->nb[1] == 128 && w->nb[2] == 640 && w->op == g_host.op_none, "another tensor layout");
    expect(w->buffer == nullptr && w->data == nullptr && w->extra == nullptr, "another tensor layout");
    expect(std::strncmp(w->name, "leaf_", 5) == 0, "another tensor layout");  // the graph named it
    expect(y->op == g_host.op_mul_mat && y->src[0] == w && y->src[1] == x && y->src[2] == nullptr, "another MUL_MAT");
    expect(y->ne[0] == 5 && y->ne[1] == 7 && y->ne[2] == 3 && y->type == GGML_TYPE_F32, "another MUL_MAT");
    expect(y->flags & GGML_TENSOR_FLAG_OUTPUT, "other tensor flags");
    expect(view->view_src == x && view->view_offs == 16 && view->op == g_host.op_view, "another view");
    expect(experts_y->src[2] == ids && experts_y->ne[0] == 5 && experts_y->ne[1] == 2 && experts_y->ne[2] == 7,
           "another MUL_MAT_ID");
    expect(graph->n_nodes == 2 && graph->n_nodes == g_host.ggml_graph_n_nodes(graph), "another graph layout");
    expect(graph->nodes == g_host.ggml_graph_nodes(graph) && graph->nodes[0] == y && graph->nodes[1] == experts_y,
           "another graph layout");
    expect(graph->n_leafs == 4 && graph->use_counts != nullptr && graph->visited_hash_set.keys != nullptr,
           "another graph layout");
    expect(graph->visited_hash_set.size >= 6, "another graph layout");
    expect(!g_host.has_graph_uids || graph->uid == 0, "another graph layout");

    const ggml_type_traits * traits = g_host.ggml_get_type_traits(GGML_TYPE_Q8_0);
    expect(traits->blck_size == 32 && traits->type_size == 34 && traits->is_quantized &&
               std::strcmp(traits->type_name, "q8_0") == 0 && traits->to_float != nullptr,
           "another table of types");
    g_host.ggml_free(context);
    return wrong;
}

bool connect(void * library, std::string & error) {
    auto version_function = reinterpret_cast<decltype(&::ggml_version)>(dlsym(library, "ggml_version"));
    if (version_function == nullptr) {
        error = "this program shows no ggml functions to plug-ins (linked statically, or too old); "
                "use a llama.cpp built with shared libraries (-DBUILD_SHARED_LIBS=ON), or `tern run`";
        return false;
    }
    int major = 0;
    int minor = 0;
    if (std::sscanf(version_function(), "%d.%d", &major, &minor) != 2 || major != 0 || minor < FIRST_MINOR ||
        minor > LAST_MINOR) {
        error = wrong_version(version_function());
        return false;
    }
    std::string missing;
    if (!resolve(library, missing)) {
        error = wrong_version(std::string(version_function()) + " without " + missing + "()");
        return false;
    }
    // A registry entry begins with the version of the interface; the host's own CPU backend has registered before us.
    if (g_host.ggml_backend_reg_count() == 0) {
        error = "no backend is registered in this program yet; load the CPU backend (ggml_backend_load_all) before "
                "ggml-tern";
        return false;
    }
    g_host.api_version = g_host.ggml_backend_reg_get(0)->api_version;
    if (g_host.api_version != 2 && g_host.api_version != 3) {
        error = not_understood("backend API version " + std::to_string(g_host.api_version) + ", expected 2 or 3");
        return false;
    }
    if (!find_ops(missing)) {
        error = not_understood("without the operation " + missing);
        return false;
    }
    g_host.has_graph_uids = dlsym(library, "ggml_graph_next_uid") != nullptr;
    if (const char * wrong = probe_structures()) {
        error = not_understood(wrong);
        return false;
    }
    g_host.knows_q2_0 = dlsym(library, "quantize_q2_0") != nullptr;
    return true;
}

}  // namespace

const HostApi * connect_host(const void * caller, std::string & error) {
    // A process may call this for several copies of ggml, but a plug-in can serve one only.
    static const void * connected_to = nullptr;
    std::string name;
    void * library = library_of(caller, name);
    if (library == nullptr) {
        error = "cannot tell which library loads the plug-in";
        return nullptr;
    }
    if (g_connected) {
        if (dlsym(library, "ggml_backend_reg_count") != connected_to) {
            error = "already loaded into another copy of libggml in this process; load it into one only (with "
                    "`ggml_tern.enable()` in Python)";
            return nullptr;
        }
        return &g_host;
    }
    if (!connect(library, error)) {
        return nullptr;
    }
    connected_to = reinterpret_cast<const void *>(g_host.ggml_backend_reg_count);
    g_connected = true;
    return &g_host;
}

const HostApi & host() {
    return g_host;
}

}  // namespace tern
