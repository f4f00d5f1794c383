// The backend: a stream of graphs, each run on a stock CPU backend with our kernels in it.
#include "backend.h"

#include "../host/thread_pools.h"
#include "cpu_steps.h"
#include "ggml-cpu.h"

#include <cstdio>
#include <string>

namespace tern {

namespace {

struct BackendContext {
    ggml_backend_t cpu;
    int n_threads = GGML_DEFAULT_N_THREADS;  // of `cpu`
    CpuSteps steps;

    explicit BackendContext(ggml_backend_t cpu) : cpu(cpu) {}
    ~BackendContext() { host().ggml_backend_free(cpu); }
};

BackendContext & context_of(ggml_backend_t backend) {
    return *static_cast<BackendContext *>(backend->context);
}

const char * get_name(ggml_backend_t backend) {
    return backend->device->iface.get_name(backend->device);
}

void free_backend(ggml_backend_t backend) {
    delete &context_of(backend);
    delete backend;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    BackendContext & context = context_of(backend);
    return context.steps.compute(context.cpu, graph, context.n_threads);
}

const ggml_backend_i BACKEND_INTERFACE = {
    /* .get_name            = */ get_name,
    /* .free                = */ free_backend,
    /* .set_tensor_async    = */ nullptr,
    /* .get_tensor_async    = */ nullptr,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ nullptr,
    /* .synchronize         = */ nullptr,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ graph_compute,
    /* .event_record        = */ nullptr,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ nullptr,
};

ggml_guid_t guid() {
    static ggml_guid id = {0x74, 0x65, 0x72, 0x6e, 0x9d, 0x11, 0x4f, 0x0c,
                           0xa2, 0x58, 0x6b, 0xe3, 0x1c, 0x77, 0x90, 0x2d};
    return &id;
}

// What the stock CPU backend offers beside its interface; nullptr for what this host does not have.
struct CpuFunctions {
    ggml_backend_set_n_threads_t set_n_threads;
    decltype(&::ggml_backend_cpu_set_threadpool) set_thread_pool;
    ggml_backend_set_abort_callback_t set_abort_callback;

    CpuFunctions() {
        find("ggml_backend_set_n_threads", set_n_threads);
        find("ggml_backend_cpu_set_threadpool", set_thread_pool);
        find("ggml_backend_set_abort_callback", set_abort_callback);
        // From now on the host finds functions of ours in place of the first two.
        std::string error;
        if (!watch_thread_pools(error)) {
            std::fprintf(stderr, "ggml-tern: this host keeps --cpu-mask, --prio and --poll to itself: %s\n",
                         error.c_str());
        }
    }

  private:
    template <typename Function> static void find(const char * name, Function & function) {
        ggml_backend_reg_t registry = host().ggml_backend_dev_backend_reg(stock_cpu_device());
        function = reinterpret_cast<Function>(host().ggml_backend_reg_get_proc_address(registry, name));
    }
};

const CpuFunctions & cpu_functions() {
    static const CpuFunctions functions;
    return functions;
}

}  // namespace

ggml_backend_t backend_new(ggml_backend_dev_t device) {
    cpu_functions();  // before llama.cpp gives its first pool of threads
    ggml_backend_t cpu = host().ggml_backend_dev_init(stock_cpu_device(), nullptr);
    if (cpu == nullptr) {
        return nullptr;
    }
    return new ggml_backend{
        /* .guid    = */ guid(),
        /* .iface   = */ BACKEND_INTERFACE,
        /* .device  = */ device,
        /* .context = */ new BackendContext(cpu),
    };
}

void backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    BackendContext & context = context_of(backend);
    const CpuFunctions & functions = cpu_functions();
    if (functions.set_n_threads != nullptr) {
        functions.set_n_threads(context.cpu, n_threads);
        context.n_threads = n_threads;
    }
    const auto pool = given_thread_pool();
    if (pool && functions.set_thread_pool != nullptr) {
        functions.set_thread_pool(context.cpu, *pool);
    }
}

void backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    if (cpu_functions().set_abort_callback != nullptr) {
        cpu_functions().set_abort_callback(context_of(backend).cpu, callback, data);
    }
}

}  // namespace tern
