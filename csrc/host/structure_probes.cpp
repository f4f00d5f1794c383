// The probes. A table of functions that has grown, or whose functions have moved, shows by its gaps (functions that the CPU backend
// does not have) and by the fields behind it.
#include "structure_probes.h"

#include <cstring>

namespace tern {

namespace {

// The first thing that differs.
class Findings {
  public:
    void expect(bool ok, const char * what) {
        if (!ok && wrong_ == nullptr) {
            wrong_ = what;
        }
    }
    const char * wrong() const { return wrong_; }

  private:
    const char * wrong_ = nullptr;
};

// Whether a table of functions has entries where `pattern` has an x, and gaps where it has a dot.
bool has_functions(const void * table, const char * pattern) {
    const auto * entries = static_cast<const char *>(table);
    for (; *pattern != '\0'; pattern++, entries += sizeof(void *)) {
        void * entry;
        std::memcpy(&entry, entries, sizeof(entry));
        if ((entry != nullptr) != (*pattern == 'x')) {
            return false;
        }
    }
    return true;
}

void no_operation(ggml_tensor *, int, int, void *) {}

// Builds tensors and a graph with the host's own functions.
void probe_graphs(const HostApi & api, Findings & findings) {
    const auto expect = [&](bool ok, const char * what) { findings.expect(ok, what); };
    ggml_init_params params{1 << 20, nullptr, /*no_alloc=*/true};
    ggml_context * context = api.ggml_init(params);
    if (context == nullptr) {
        expect(false, "ggml_init fails");
        return;
    }
    ggml_tensor * w = api.ggml_new_tensor_3d(context, GGML_TYPE_F16, 64, 5, 3);
    ggml_tensor * x = api.ggml_new_tensor_3d(context, GGML_TYPE_F32, 64, 7, 3);
    ggml_tensor * y = api.ggml_mul_mat(context, w, x);
    ggml_tensor * view = api.ggml_view_1d(context, x, 3, 16);
    ggml_tensor * experts_x = api.ggml_new_tensor_3d(context, GGML_TYPE_F32, 64, 2, 7);
    ggml_tensor * ids = api.ggml_new_tensor_3d(context, GGML_TYPE_I32, 2, 7, 1);
    ggml_tensor * experts_y = api.ggml_mul_mat_id(context, w, experts_x, ids);
    ggml_tensor * custom = api.ggml_custom_4d(context, GGML_TYPE_F32, 5, 1, 1, 1, &x, 1, no_operation, 3, context);
    api.ggml_set_output(y);
    ggml_cgraph * graph = api.ggml_new_graph(context);
    api.ggml_build_forward_expand(graph, y);
    api.ggml_build_forward_expand(graph, experts_y);

    // A node of ours is a copy of the host's, so there must be nothing in it that we do not know.
    expect(api.ggml_tensor_overhead() == sizeof(ggml_tensor) + 32, "another tensor size");
    expect(w->type == GGML_TYPE_F16 && w->ne[0] == 64 && w->ne[1] == 5 && w->ne[2] == 3 && w->ne[3] == 1,
           "another tensor shape");
    expect(w->nb[0] == 2 && w->nb[1] == 128 && w->nb[2] == 640 && w->op == api.op_none, "another tensor layout");
    expect(w->buffer == nullptr && w->data == nullptr && w->extra == nullptr, "another tensor layout");
    expect(std::strncmp(w->name, "leaf_", 5) == 0, "another tensor layout");  // the graph named it
    expect(y->op == api.op_mul_mat && y->src[0] == w && y->src[1] == x && y->src[2] == nullptr, "another MUL_MAT");
    expect(y->ne[0] == 5 && y->ne[1] == 7 && y->ne[2] == 3 && y->type == GGML_TYPE_F32, "another MUL_MAT");
    expect(y->flags & GGML_TENSOR_FLAG_OUTPUT, "other tensor flags");
    expect(view->view_src == x && view->view_offs == 16 && view->op == api.op_view, "another view");
    size_t view_offset;
    std::memcpy(&view_offset, view->op_params, sizeof(view_offset));
    expect(view_offset == 16, "another view");
    expect(experts_y->src[2] == ids && experts_y->ne[0] == 5 && experts_y->ne[1] == 2 && experts_y->ne[2] == 7,
           "another MUL_MAT_ID");
    ggml_custom_op_params custom_params;
    std::memcpy(&custom_params, custom->op_params, sizeof(custom_params));
    expect(custom->op == api.op_custom && custom->src[0] == x && custom_params.fun == no_operation &&
               custom_params.n_tasks == 3 && custom_params.userdata == context,
           "another custom operation");
    expect(graph->size == api.ggml_graph_size(graph) && graph->grads == nullptr && graph->grad_accs == nullptr &&
               graph->order == GGML_CGRAPH_EVAL_ORDER_LEFT_TO_RIGHT,
           "another graph layout");
    expect(graph->n_nodes == 2 && graph->n_nodes == api.ggml_graph_n_nodes(graph), "another graph layout");
    expect(graph->nodes == api.ggml_graph_nodes(graph) && graph->nodes[0] == y && graph->nodes[1] == experts_y,
           "another graph layout");
    expect(graph->n_leafs == 4 && graph->leafs != nullptr && graph->leafs[0] == w && graph->use_counts != nullptr &&
               graph->visited_hash_set.keys != nullptr,
           "another graph layout");
    expect(graph->visited_hash_set.size >= 6, "another graph layout");
    expect(!api.has_graph_uids || graph->uid == 0, "another graph layout");
    api.ggml_free(context);

    const ggml_type_traits * traits = api.ggml_get_type_traits(GGML_TYPE_Q8_0);
    expect(traits->blck_size == 32 && traits->type_size == 34 && traits->is_quantized &&
               std::strcmp(traits->type_name, "q8_0") == 0 && traits->to_float != nullptr,
           "another table of types");
}

void probe_device(const HostApi & api, ggml_backend_dev_t device, Findings & findings) {
    // Nothing tells the functions of a registry entry apart but what the host makes of ours.
    findings.expect(has_functions(&device->iface, "xxxxxxx.xxx....") &&
                        device->reg == api.ggml_backend_dev_backend_reg(device),
                    "another device layout");
    if (findings.wrong() != nullptr) {
        return;
    }
    findings.expect(device->reg->api_version == api.api_version, "another version in another registry entry");
    // In memory that would hold a larger structure too.
    union {
        ggml_backend_dev_props props;
        char bytes[1024];
    } memory;
    std::memset(memory.bytes, 0, sizeof(memory.bytes));
    api.ggml_backend_dev_get_props(device, &memory.props);
    const ggml_backend_dev_props & props = memory.props;
    findings.expect(props.type == GGML_BACKEND_DEVICE_TYPE_CPU && props.name != nullptr &&
                        std::strcmp(props.name, api.ggml_backend_dev_name(device)) == 0 &&
                        props.description != nullptr && props.caps.buffer_from_host_ptr && !props.caps.async &&
                        !props.caps.host_buffer && !props.caps.events,
                    "other device properties");
}

void probe_backend(const HostApi & api, ggml_backend_dev_t device, Findings & findings) {
    ggml_backend_t backend = api.ggml_backend_dev_init(device, nullptr);
    if (backend == nullptr) {
        findings.expect(false, "the CPU backend does not start");
        return;
    }
    findings.expect(has_functions(&backend->iface, "xx......xx.xx...") && backend->guid != nullptr &&
                        backend->device == device && api.ggml_backend_get_device(backend) == device &&
                        backend->context != nullptr &&
                        backend->iface.get_name(backend) == api.ggml_backend_name(backend),
                    "another backend layout");
    api.ggml_backend_free(backend);
}

void probe_buffers(const HostApi & api, Findings & findings) {
    ggml_backend_buffer_type_t type = api.ggml_backend_cpu_buffer_type();
    // get_name, alloc_buffer, get_alignment, get_max_size, get_alloc_size, is_host, and with version 3 two more.
    findings.expect(has_functions(type, api.api_version >= 3 ? "xx.x...x" : "xxx..x") &&
                        type->iface.get_name(type) == api.ggml_backend_buft_name(type),
                    "another buffer type layout");
    if (findings.wrong() != nullptr) {
        return;
    }
    constexpr size_t SIZE = 4096;
    ggml_backend_buffer_t buffer = api.ggml_backend_buft_alloc_buffer(type, SIZE);
    if (buffer == nullptr) {
        findings.expect(false, "the CPU backend allocates no memory");
        return;
    }
    findings.expect(has_functions(&buffer->iface, "xx.xxx..xx.") && buffer->buft == type &&
                        buffer->context != nullptr && buffer->size == api.ggml_backend_buffer_get_size(buffer) &&
                        buffer->size >= SIZE && buffer->usage == GGML_BACKEND_BUFFER_USAGE_ANY,
                    "another buffer layout");
    if (findings.wrong() == nullptr) {
        findings.expect(buffer->iface.get_base(buffer) == api.ggml_backend_buffer_get_base(buffer),
                        "another buffer layout");
    }
    api.ggml_backend_buffer_free(buffer);
}

}  // namespace

const char * probe_structures(const HostApi & api) {
    Findings findings;
    probe_graphs(api, findings);
    ggml_backend_dev_t cpu = api.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (findings.wrong() == nullptr) {
        probe_device(api, cpu, findings);
    }
    if (findings.wrong() == nullptr) {
        probe_backend(api, cpu, findings);
    }
    if (findings.wrong() == nullptr) {
        probe_buffers(api, findings);
    }
    return findings.wrong();
}

}  // namespace tern
