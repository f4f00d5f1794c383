// Taking over the tables of GPU backends: see graft.h.
#include "graft.h"

#include "../host/memory_protection.h"
#include "../plan/ternary_nodes.h"
#include "gpu_steps.h"
#include "grafted_device.h"
#include "self_test.h"
#include "twin.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_map>

namespace tern {

namespace {

// ---- what was taken over ----
//
// None of it is destroyed when the process ends: a host may leave its backends alive, whose library may be gone by then.

// Only ever added to; whoever is asked for an operation looks here without a lock.
struct Devices {
    static constexpr size_t MAX = 64;
    std::array<std::atomic<GraftedDevice *>, MAX> list{};
    std::atomic<size_t> count{0};
};

Devices & devices() {
    static Devices & all = *new Devices;
    return all;
}

template <typename Matches> GraftedDevice * find_device(const Matches & matches) {
    // The last one first: an address may be used again when a backend was unloaded.
    for (size_t i = devices().count.load(std::memory_order_acquire); i-- > 0;) {
        GraftedDevice * device = devices().list[i].load(std::memory_order_relaxed);
        if (matches(*device)) {
            return device;
        }
    }
    return nullptr;
}

// The functions of registries, before.
struct Registries {
    std::mutex mutex;
    std::map<ggml_backend_reg_t, decltype(ggml_backend_reg_i::get_proc_address)> stock;
};

Registries & registries() {
    static Registries & all = *new Registries;
    return all;
}

// A backend's functions, before, and what carries out our plan on it.
struct GraftedBackend {
    ggml_backend_i stock;
    GpuSteps steps;
};

struct Backends {
    std::mutex mutex;
    std::unordered_map<ggml_backend_t, std::unique_ptr<GraftedBackend>> all;
};

Backends & backends() {
    static Backends & all = *new Backends;
    return all;
}

// ---- functions of a backend ----

enum ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    GraftedBackend * grafted;
    {
        const std::lock_guard<std::mutex> lock(backends().mutex);
        grafted = backends().all.at(backend).get();
    }
    return grafted->steps.compute(graph,
                                  [&](ggml_cgraph * made) { return grafted->stock.graph_compute(backend, made); });
}

void free_backend(ggml_backend_t backend) {
    std::unique_ptr<GraftedBackend> grafted;
    {
        const std::lock_guard<std::mutex> lock(backends().mutex);
        const auto found = backends().all.find(backend);
        grafted = std::move(found->second);
        backends().all.erase(found);
    }
    const auto stock_free = grafted->stock.free;
    grafted.reset();  // its memory belongs to the backend's device
    stock_free(backend);
}

// ---- functions of a device ----

ggml_backend_t init_backend(ggml_backend_dev_t device, const char * params) {
    GraftedDevice & of_device = *grafted(device);
    ggml_backend_t backend = of_device.stock.init_backend(device, params);
    if (backend == nullptr || backend->device != device || backend->iface.graph_compute == nullptr) {
        return backend;
    }
    auto of_backend = std::make_unique<GraftedBackend>(
        GraftedBackend{backend->iface, GpuSteps(backend, of_device.stock_buffer_type)});
    {
        const std::lock_guard<std::mutex> lock(backends().mutex);
        backends().all[backend] = std::move(of_backend);
    }
    backend->iface.graph_compute = graph_compute;
    backend->iface.free = free_backend;
    return backend;
}

// Whether a tensor, or what it is a view of, is of a type that only we know, or lies in memory of ours as its twin.
bool is_ours(const ggml_tensor * tensor) {
    return tensor != nullptr && (is_our_slot(static_cast<uint32_t>(tensor->type)) || is_stored_as_twin(tensor));
}

bool supports_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    const auto stock = grafted(device)->stock.supports_op;
    const bool any = is_ours(op) || std::any_of(std::begin(op->src), std::end(op->src), is_ours);
    if (!any) {
        return stock(device, op);
    }
    if (op->op == host().op_none || !is_ternary_op(op) || !is_stored_as_twin(op->src[0]) || op->type != GGML_TYPE_F32) {
        return op->op == host().op_none && stock(device, op);
    }
    const ggml_tensor * w = op->src[0];
    const ggml_tensor * whole = w->view_src != nullptr ? w->view_src : w;
    if (device_of_buffer_type(whole->buffer->buft)->device != device) {
        return false;
    }
    if (op->op == host().op_get_rows ? is_treated(w->type) : op->src[1]->type != GGML_TYPE_F32) {
        return false;  // nobody rotates rows back here
    }
    const TernaryType & type = *ternary_type_of(w->type);
    if (w->nb[0] != static_cast<size_t>(type.block_bytes) || w->nb[1] % type.row_bytes(w->ne[0]) != 0 ||
        w->view_offs % type.row_bytes(w->ne[0]) != 0) {
        return false;  // not whole rows
    }
    ggml_tensor twin = twin_of(w);
    twin.buffer = nullptr;  // it may be one that llama.cpp made up to ask, which the stock backend does not know
    ggml_tensor of_twin = *op;
    of_twin.src[0] = &twin;
    if (!stock(device, &of_twin)) {
        return false;
    }
    // A matrix without memory is one for which llama.cpp looks for a place.
    return whole->data != nullptr || passes_self_test(*grafted(device), op);
}

bool supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    GraftedDevice & of_device = *grafted(device);
    return type == of_device.offered_type.handle() || of_device.stock.supports_buft(device, type);
}

// ---- functions of a registry ----

// Memory that the stock backend offers beside its usual one, and ours. nullptr ends the list.
ggml_backend_buffer_type_t * get_extra_buffer_types(ggml_backend_dev_t device) {
    thread_local std::vector<ggml_backend_buffer_type_t> types;
    types.clear();
    decltype(ggml_backend_reg_i::get_proc_address) stock;
    {
        const std::lock_guard<std::mutex> lock(registries().mutex);
        stock = registries().stock.at(device->reg);
    }
    const auto stock_types = stock != nullptr ? reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
                                                    stock(device->reg, "ggml_backend_dev_get_extra_bufts"))
                                              : nullptr;
    for (ggml_backend_buffer_type_t * type = stock_types != nullptr ? stock_types(device) : nullptr;
         type != nullptr && *type != nullptr; type++) {
        types.push_back(*type);
    }
    if (GraftedDevice * of_device = grafted(device)) {
        types.push_back(of_device->offered_type.handle());
    }
    types.push_back(nullptr);
    return types.data();
}

void * get_proc_address(ggml_backend_reg_t registry, const char * name) {
    if (std::strcmp(name, "ggml_backend_dev_get_extra_bufts") == 0) {
        return reinterpret_cast<void *>(get_extra_buffer_types);
    }
    decltype(ggml_backend_reg_i::get_proc_address) stock;
    {
        const std::lock_guard<std::mutex> lock(registries().mutex);
        stock = registries().stock.at(registry);
    }
    return stock != nullptr ? stock(registry, name) : nullptr;
}

// ---- taking over ----

template <typename Function> MemoryPatch patch(Function & entry, Function ours) {
    return {&entry, std::string(reinterpret_cast<const char *>(&ours), sizeof(ours))};
}

// Whether the device multiplies with Q2_0.
bool multiplies_twins(ggml_backend_dev_t device) {
    ggml_init_params params{1 << 16, nullptr, /*no_alloc=*/true};
    ggml_context * context = host().ggml_init(params);
    if (context == nullptr) {
        return false;
    }
    ggml_tensor * w = host().ggml_new_tensor_3d(context, static_cast<ggml_type>(TYPE_Q2_0), 512, 64, 1);
    ggml_tensor * x = host().ggml_new_tensor_3d(context, GGML_TYPE_F32, 512, 8, 1);
    const bool does = host().ggml_backend_dev_supports_op(device, host().ggml_mul_mat(context, w, x));
    host().ggml_free(context);
    return does;
}

// Why a device has to be left alone, or nothing.
std::string obstacle(ggml_backend_dev_t device) {
    const ggml_backend_device_i & iface = device->iface;
    if (iface.supports_op == nullptr || iface.supports_buft == nullptr || iface.init_backend == nullptr ||
        iface.get_buffer_type == nullptr || iface.get_name == nullptr ||
        iface.get_name(device) != host().ggml_backend_dev_name(device)) {
        return "its functions are not where they are in other devices";
    }
    if (!host().knows_q2_0) {
        return std::string("ggml ") + host().ggml_version() + " has no Q2_0, in which it would compute";
    }
    if (!multiplies_twins(device)) {
        return "its backend has no kernels for Q2_0";
    }
    ggml_backend_buffer_type_t type = host().ggml_backend_dev_buffer_type(device);
    if (type == nullptr || host().ggml_backend_buft_get_device(type) != device) {
        return "its memory is not that of one device";
    }
    return "";
}

struct Statuses {
    std::mutex mutex;
    std::map<ggml_backend_dev_t, GpuStatus> all;
};

Statuses & statuses() {
    static Statuses & all = *new Statuses;
    return all;
}

void note(ggml_backend_dev_t device, const std::string & refusal) {
    GpuStatus & status = statuses().all[device];
    status = {host().ggml_backend_dev_name(device), host().ggml_backend_dev_description(device), refusal};
}

// Before its functions are replaced, the registry's must know what was there.
std::string take_over(ggml_backend_dev_t device, const ModelFacts & facts) {
    const size_t count = devices().count.load(std::memory_order_relaxed);
    if (count == Devices::MAX) {
        return "there are too many devices";
    }
    ggml_backend_reg_t registry = device->reg;
    std::vector<MemoryPatch> patches = {
        patch(device->iface.supports_op, &supports_op),
        patch(device->iface.supports_buft, &supports_buft),
        patch(device->iface.init_backend, &init_backend),
    };
    {
        const std::lock_guard<std::mutex> lock(registries().mutex);
        if (registry->iface.get_proc_address != get_proc_address) {
            registries().stock[registry] = registry->iface.get_proc_address;
            patches.push_back(patch(registry->iface.get_proc_address, &get_proc_address));
        }
    }
    devices().list[count].store(new GraftedDevice(device, facts), std::memory_order_relaxed);
    devices().count.store(count + 1, std::memory_order_release);
    std::string error;
    write_patches(patches, error);
    return error;
}

// Our own registry, whose devices must not be asked for anything while a lock is held: they look for newcomers first.
std::atomic<ggml_backend_reg_t> g_ours{nullptr};

// Calls work(device) for those that are registered: others may have been unloaded.
template <typename Work> void for_each_gpu(const Work & work) {
    for (size_t r = 0; r < host().ggml_backend_reg_count(); r++) {
        ggml_backend_reg_t registry = host().ggml_backend_reg_get(r);
        if (registry == g_ours) {
            continue;
        }
        for (size_t d = 0; d < host().ggml_backend_reg_dev_count(registry); d++) {
            ggml_backend_dev_t device = host().ggml_backend_reg_dev_get(registry, d);
            const auto type = host().ggml_backend_dev_type(device);
            if (type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU) {
                work(device);
            }
        }
    }
}

bool is_wanted() {
    static const char * const word = std::getenv("TERN_GPU");
    return word == nullptr || std::strcmp(word, "0") != 0;
}

}  // namespace

GraftedDevice * grafted(ggml_backend_dev_t device) {
    return find_device([&](GraftedDevice & found) { return found.device == device; });
}

GraftedDevice * device_of_buffer_type(ggml_backend_buffer_type_t type) {
    return find_device([&](GraftedDevice & found) {
        return found.offered_type.handle() == type || found.type_in_buffers.handle() == type;
    });
}

bool is_stored_as_twin(const ggml_tensor * w) {
    const ggml_tensor * whole = w->view_src != nullptr ? w->view_src : w;
    return has_twin(w->type) && whole->buffer != nullptr && device_of_buffer_type(whole->buffer->buft) != nullptr;
}

void graft_gpus(ggml_backend_reg_t ours, const ModelFacts & facts) {
    if (!is_wanted()) {
        return;
    }
    g_ours = ours;
    const std::lock_guard<std::mutex> lock(statuses().mutex);
    for_each_gpu([&](ggml_backend_dev_t device) {
        if (device->iface.supports_op == supports_op) {
            return;
        }
        const auto known = statuses().all.find(device);
        if (known != statuses().all.end() && !known->second.refusal.empty()) {
            return;
        }
        std::string refusal = obstacle(device);
        if (refusal.empty()) {
            refusal = take_over(device, facts);
        }
        note(device, refusal);
    });
}

void tell_refusals() {
    const std::lock_guard<std::mutex> lock(statuses().mutex);
    for (auto & entry : statuses().all) {
        GpuStatus & status = entry.second;
        if (!status.refusal.empty() && !status.told) {
            status.told = true;
            std::fprintf(stderr, "ggml-tern: %s is left alone: %s; ternary matrices stay on the CPU\n",
                         status.name.c_str(), status.refusal.c_str());
        }
    }
}

void test_gpus() {
    for_each_gpu([](ggml_backend_dev_t device) {
        if (device->iface.supports_op == supports_op) {
            test_products(*grafted(device));
        }
    });
}

std::vector<GpuStatus> gpu_statuses() {
    const std::lock_guard<std::mutex> lock(statuses().mutex);
    std::vector<GpuStatus> found;
    for_each_gpu([&](ggml_backend_dev_t device) {
        const auto known = statuses().all.find(device);
        if (known == statuses().all.end()) {
            return;
        }
        found.push_back(known->second);
        if (GraftedDevice * of_device = grafted(device)) {
            const std::lock_guard<std::mutex> testing(of_device->testing);
            found.back().n_tests = of_device->tested.size();
            found.back().test_ms = of_device->test_ms;
            if (!of_device->failure.empty()) {
                found.back().refusal = "its self-test failed: " + of_device->failure;
            }
        }
    });
    return found;
}

}  // namespace tern
