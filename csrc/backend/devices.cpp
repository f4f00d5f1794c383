// The two devices, which differ only in how llama.cpp treats their kind.
//
// TERN0 is an integrated GPU to llama.cpp ("uses host memory"): it owns whole layers, the KV cache included, so that the
// graph stays in one piece. TERN_ACCEL is an accelerator: tensors that llama.cpp keeps on the CPU list whatever
// n_gpu_layers says (the token embedding; everything when it is 0) find their way to our kernels through it.
//
// llama.cpp gives an accelerator's weights and its activations the same buffer type. The weights want tiles; activations
// want plain memory, which the stock CPU backend can read without a copy. So the backend of TERN_ACCEL names a third
// device as its own, which the registry does not list and which differs in its buffer type.
#include "backend.h"

#include "../host/machine_memory.h"
#include "../plan/ternary_nodes.h"
#include "ternary_ops.h"

#include <string>

namespace tern {

namespace {

struct DeviceContext {
    const char * name;
    enum ggml_backend_dev_type type;
    ggml_backend_buffer_type_t (*default_buffer_type)();
};

// The first two are listed in the registry.
DeviceContext CONTEXTS[] = {
    // Plain memory comes first, so that weights which are not ternary stay mapped from the file; tiles are an extra type.
    {"TERN0", GGML_BACKEND_DEVICE_TYPE_IGPU, plain_buffer_type},
    {"TERN_ACCEL", GGML_BACKEND_DEVICE_TYPE_ACCEL, tiled_buffer_type},
    {"TERN_ACCEL", GGML_BACKEND_DEVICE_TYPE_ACCEL, plain_buffer_type},
};
constexpr size_t LISTED_DEVICES = 2;
constexpr size_t ACCELERATOR_BACKEND = 2;

ggml_backend_device g_devices[sizeof(CONTEXTS) / sizeof(CONTEXTS[0])];

const DeviceContext & context_of(ggml_backend_dev_t device) {
    return *static_cast<const DeviceContext *>(device->context);
}

bool is_accelerator(ggml_backend_dev_t device) {
    return context_of(device).type == GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

const char * get_name(ggml_backend_dev_t device) {
    return context_of(device).name;
}

const char * get_description(ggml_backend_dev_t) {
    static const std::string description = std::string("ggml-tern CPU kernels (") + isa().name + ")";
    return description.c_str();
}

void get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    const MachineMemory memory = machine_memory();
    *free = memory.free;
    *total = memory.total;
}

enum ggml_backend_dev_type get_type(ggml_backend_dev_t device) {
    // llama.cpp asks this of every device before it opens a model; what was loaded since is met in time.
    meet_newcomers();
    return context_of(device).type;
}

void get_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    props->name = get_name(device);
    props->description = get_description(device);
    props->type = get_type(device);
    get_memory(device, &props->memory_free, &props->memory_total);
    // Field by field: the host's structure may end before ours does.
    props->caps.async = false;
    props->caps.host_buffer = false;
    props->caps.buffer_from_host_ptr = !is_accelerator(device);
    props->caps.events = false;
    props->caps.mmap_support = true;  // in hosts that do not know it this byte is padding
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char *) {
    return backend_new(is_accelerator(device) ? &g_devices[ACCELERATOR_BACKEND] : device);
}

ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t device) {
    return context_of(device).default_buffer_type();
}

ggml_backend_buffer_t buffer_from_host_ptr(ggml_backend_dev_t, void * data, size_t size, size_t) {
    return plain_buffer_from_pointer(data, size);
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    if (is_ternary_op(op)) {
        // llama.cpp asks where a weight should live by showing it in an empty buffer of each type: in tiles, please.
        const ggml_backend_buffer_t buffer = op->src[0]->buffer;
        const bool only_asking = buffer != nullptr && buffer->size == 0 && op->src[0]->data == nullptr;
        if (only_asking && !is_tiled_buffer_type(buffer->buft)) {
            return false;
        }
        return supports_ternary_op(op);
    }
    // No other operation reads tiles, and the stock backend knows nothing of our types.
    if (is_our_slot(static_cast<uint32_t>(op->type)) && op->op != host().op_none) {
        return false;
    }
    for (const ggml_tensor * src : op->src) {
        if (src != nullptr && (is_our_slot(static_cast<uint32_t>(src->type)) ||
                               (src->buffer != nullptr && is_tiled_buffer_type(src->buffer->buft)))) {
            return false;
        }
    }
    return host().ggml_backend_dev_supports_op(stock_cpu_device(), op);
}

bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return is_tiled_buffer_type(type) || host().ggml_backend_buft_is_host(type);
}

const ggml_backend_device_i DEVICE_INTERFACE = {
    /* .get_name             = */ get_name,
    /* .get_description      = */ get_description,
    /* .get_memory           = */ get_memory,
    /* .get_type             = */ get_type,
    /* .get_props            = */ get_props,
    /* .init_backend         = */ init_backend,
    /* .get_buffer_type      = */ get_buffer_type,
    /* .get_host_buffer_type = */ nullptr,
    /* .buffer_from_host_ptr = */ buffer_from_host_ptr,
    /* .supports_op          = */ supports_op,
    /* .supports_buft        = */ supports_buft,
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ nullptr,
    /* .event_free           = */ nullptr,
    /* .event_synchronize    = */ nullptr,
};

}  // namespace

size_t device_count() {
    return LISTED_DEVICES;
}

void create_devices(ggml_backend_reg_t registry) {
    for (size_t i = 0; i < sizeof(CONTEXTS) / sizeof(CONTEXTS[0]); i++) {
        g_devices[i] = {DEVICE_INTERFACE, registry, &CONTEXTS[i]};
    }
    set_buffer_devices(&g_devices[0], &g_devices[0]);
}

ggml_backend_dev_t device_at(size_t index) {
    return index < LISTED_DEVICES ? &g_devices[index] : nullptr;
}

ggml_backend_dev_t stock_cpu_device() {
    return host().ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

}  // namespace tern
