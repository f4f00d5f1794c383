// A function of ours in the registry entry of the host's CPU backend: see thread_pools.h.
#include "thread_pools.h"

#include "ggml-cpu.h"
#include "memory_protection.h"

#include <cstring>
#include <mutex>

namespace tern {

namespace {

using SetThreadPool = decltype(&::ggml_backend_cpu_set_threadpool);

// Those of the host that ours stand in for. Written before ours can be called.
void * (*g_get_proc_address)(ggml_backend_reg_t, const char *) = nullptr;
SetThreadPool g_set_thread_pool = nullptr;
ggml_backend_set_n_threads_t g_set_n_threads = nullptr;

thread_local std::optional<ggml_threadpool_t> g_given;

void set_thread_pool(ggml_backend_t cpu, ggml_threadpool_t pool) {
    g_given = pool;
    g_set_thread_pool(cpu, pool);
}

// The CPU backend is the last that is told. Later the pool may be gone.
void set_n_threads(ggml_backend_t cpu, int n_threads) {
    g_given.reset();
    g_set_n_threads(cpu, n_threads);
}

void * get_proc_address(ggml_backend_reg_t registry, const char * name) {
    if (std::strcmp(name, "ggml_backend_cpu_set_threadpool") == 0) {
        return reinterpret_cast<void *>(set_thread_pool);
    }
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(set_n_threads);
    }
    return g_get_proc_address(registry, name);
}

}  // namespace

bool watch_thread_pools(std::string & error) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (g_get_proc_address != nullptr) {
        return true;
    }
    ggml_backend_reg_t registry =
        host().ggml_backend_dev_backend_reg(host().ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    const auto host_address = [&](const char * name) {
        return host().ggml_backend_reg_get_proc_address(registry, name);
    };
    void * const set_pool = host_address("ggml_backend_cpu_set_threadpool");
    void * const set_threads = host_address("ggml_backend_set_n_threads");
    if (set_pool == nullptr || set_threads == nullptr ||
        registry->iface.get_proc_address(registry, "ggml_backend_cpu_set_threadpool") != set_pool) {
        error = "its CPU backend takes no pool of threads";
        return false;
    }
    g_set_thread_pool = reinterpret_cast<SetThreadPool>(set_pool);
    g_set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(set_threads);
    g_get_proc_address = registry->iface.get_proc_address;
    const auto ours = reinterpret_cast<uintptr_t>(get_proc_address);
    if (!write_patches(
            {{&registry->iface.get_proc_address, std::string(reinterpret_cast<const char *>(&ours), sizeof(ours))}},
            error)) {
        g_get_proc_address = nullptr;
        return false;
    }
    return true;
}

std::optional<ggml_threadpool_t> given_thread_pool() {
    return g_given;
}

}  // namespace tern
