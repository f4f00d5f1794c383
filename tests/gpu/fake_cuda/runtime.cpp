// A CUDA runtime without a GPU, enough for a released libggml-cuda.so to load, and to run llama.cpp's graphs.
//
// Memory is on the heap and copies are made; kernels are not run, only written down. What they would have computed is zero. In the
// file that FAKE_CUDA_LOG names there is a line for each
//
//   launch GRID BLOCK NAME         a kernel; "captured" in the place of "launch" while a stream is being captured
//   copy KIND BYTES                kinds are CUDA's: 1 to the device, 2 to the host, 3 on the device, 4 whatever it is
//   capture begin, capture end N   with the number of kernels
//   graph instantiate N, graph update N, graph launch N, graph destroy
//   alloc WHAT ADDRESS BYTES, free WHAT ADDRESS    of memory of the device and of pinned memory, of streams, events and graphs
//   unexpected NAME                a function that does nothing here, and would have to
//
// FAKE_CUDA_DEVICES: how many GPUs there are; 1 unless it is set. FAKE_CUDA_MEMORY: bytes of each; beyond, there is no memory.
// FAKE_CUDA_DUMP: a folder; what is in a piece of device memory when it is freed goes to a file in it.
//
// The structures are those of CUDA 13, written down here for machines that have no CUDA: of cudaDeviceProp the fields that ggml
// reads, at their offsets.
#include "log.h"

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

using Error = int;
static constexpr Error SUCCESS = 0, OUT_OF_MEMORY = 2;

struct Dim3 {
    unsigned x, y, z;
};

struct LaunchConfig {
    Dim3 grid, block;
    size_t shared_bytes;
    void * stream;
    // Attributes follow, which are not read.
};

struct DeviceProperties {
    char bytes[1008];
    template <typename T> void set(size_t offset, T value) { memcpy(bytes + offset, &value, sizeof value); }
};

struct Graph {
    int n_launches;
};

namespace {

// Never destroyed: libraries call until the very end of the process.
template <typename T> T & forever() {
    static T & it = *new T;
    return it;
}

std::mutex & mutex() {
    return forever<std::mutex>();
}

struct Kernels : std::unordered_map<const void *, std::string> {};
struct Memory {
    const char * kind;
    size_t n_bytes;
};
struct Allocations : std::map<void *, Memory> {};

size_t number_from_environment(const char * name, size_t otherwise) {
    const char * text = getenv(name);
    return text == nullptr ? otherwise : size_t(strtoull(text, nullptr, 10));
}

size_t device_bytes() {
    static const size_t n = number_from_environment("FAKE_CUDA_MEMORY", size_t(4) << 30);
    return n;
}

int device_count() {
    return int(number_from_environment("FAKE_CUDA_DEVICES", 1));
}

thread_local int device;
thread_local LaunchConfig next_launch;
Graph * capturing;  // one at a time
size_t in_use;
int n_dumped;

Error launch(const void * function, Dim3 grid, Dim3 block) {
    const std::lock_guard lock(mutex());
    const auto & kernels = forever<Kernels>();
    const auto found = kernels.find(function);
    fake_cuda_log("%s %u,%u,%u %u,%u,%u %s", capturing ? "captured" : "launch", grid.x, grid.y, grid.z, block.x,
                  block.y, block.z, found == kernels.end() ? "?" : found->second.c_str());
    if (capturing != nullptr) {
        capturing->n_launches++;
    }
    return SUCCESS;
}

Error allocate(const char * kind, void ** address, size_t n_bytes) {
    const std::lock_guard lock(mutex());
    const bool on_device = strcmp(kind, "device") == 0;
    if (on_device && in_use + n_bytes > device_bytes()) {
        fake_cuda_log("refused %zu", n_bytes);
        return OUT_OF_MEMORY;
    }
    *address = aligned_alloc(256, (n_bytes + 511) / 256 * 256);
    memset(*address, 0, n_bytes);
    forever<Allocations>()[*address] = {kind, n_bytes};
    in_use += on_device ? n_bytes : 0;
    fake_cuda_log("alloc %s %p %zu", kind, *address, n_bytes);
    return SUCCESS;
}

void dump(const void * address, size_t n_bytes) {
    const char * folder = getenv("FAKE_CUDA_DUMP");
    if (folder == nullptr) {
        return;
    }
    const std::string path = std::string(folder) + "/" + std::to_string(n_dumped++);
    if (FILE * file = fopen(path.c_str(), "wb")) {
        fwrite(address, 1, n_bytes, file);
        fclose(file);
    }
}

Error release(void * address) {
    if (address == nullptr) {
        return SUCCESS;
    }
    const std::lock_guard lock(mutex());
    auto & allocations = forever<Allocations>();
    const auto found = allocations.find(address);
    if (found == allocations.end()) {
        fake_cuda_log("unexpected free of %p", address);
        return SUCCESS;
    }
    const Memory memory = found->second;
    if (strcmp(memory.kind, "device") == 0) {
        dump(address, memory.n_bytes);
        in_use -= memory.n_bytes;
    }
    fake_cuda_log("free %s %p", memory.kind, address);
    allocations.erase(found);
    free(address);
    return SUCCESS;
}

// Things that have no content: a handle of their own, which is an address.
Error make_handle(const char * kind, void ** handle) {
    *handle = malloc(1);
    fake_cuda_log("alloc %s %p 0", kind, *handle);
    return SUCCESS;
}

Error destroy_handle(const char * kind, void * handle) {
    fake_cuda_log("free %s %p", kind, handle);
    free(handle);
    return SUCCESS;
}

Error copy(void * to, const void * from, size_t n_bytes, int kind) {
    fake_cuda_log("copy %d %zu", kind, n_bytes);
    if (capturing == nullptr) {
        memcpy(to, from, n_bytes);
    }
    return SUCCESS;
}

}  // namespace

extern "C" {

void fake_cuda_log(const char * format, ...) {
    static FILE * const file = getenv("FAKE_CUDA_LOG") ? fopen(getenv("FAKE_CUDA_LOG"), "a") : nullptr;
    if (file == nullptr) {
        return;
    }
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(file, "%s\n", line);
    fflush(file);
}

// ---- kernels: what the compiler's own start-up code calls, and launches ----

void ** __cudaRegisterFatBinary(void *) {
    static void * handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterVar(...) {}

void __cudaRegisterFunction(void **, const void * host_function, char *, const char * name, ...) {
    int status = 0;
    char * plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    const std::lock_guard lock(mutex());
    forever<Kernels>()[host_function] = plain == nullptr ? name : plain;
    free(plain);
}

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared_bytes, void * stream) {
    next_launch = {grid, block, shared_bytes, stream};
    return 0;
}
Error __cudaPopCallConfiguration(Dim3 * grid, Dim3 * block, size_t * shared_bytes, void ** stream) {
    *grid = next_launch.grid;
    *block = next_launch.block;
    *shared_bytes = next_launch.shared_bytes;
    *stream = next_launch.stream;
    return SUCCESS;
}
Error __cudaGetKernel(const void ** kernel, const void * function) {
    *kernel = function;
    return SUCCESS;
}
Error __cudaLaunchKernel(const void * kernel, Dim3 grid, Dim3 block, void **, size_t, void *) {
    return launch(kernel, grid, block);
}
Error cudaLaunchCooperativeKernel(const void * function, Dim3 grid, Dim3 block, void **, size_t, void *) {
    return launch(function, grid, block);
}
Error cudaLaunchKernelExC(const LaunchConfig * config, const void * function, void **) {
    return launch(function, config->grid, config->block);
}
Error cudaFuncGetAttributes(void * attributes, const void *) {
    constexpr size_t ATTRIBUTES_BYTES = 144;
    memset(attributes, 0, ATTRIBUTES_BYTES);
    return SUCCESS;
}
Error cudaFuncSetAttribute(...) {
    return SUCCESS;
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int * n_blocks, const void *, int, size_t, unsigned) {
    *n_blocks = 1;
    return SUCCESS;
}

// ---- devices ----

Error cudaGetDeviceCount(int * n) {
    *n = device_count();
    return SUCCESS;
}
Error cudaGetDevice(int * id) {
    *id = device;
    return SUCCESS;
}
Error cudaSetDevice(int id) {
    device = id;
    return SUCCESS;
}
Error cudaSetDeviceFlags(unsigned) {
    return SUCCESS;
}
// Of the Ada generation: it has tensor cores, and neither NVLink nor thread block clusters.
Error cudaGetDeviceProperties(DeviceProperties * properties, int) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->bytes, "Fake GPU");
    properties->set(288, device_bytes());
    properties->set(296, size_t(49152));  // shared memory of a block
    properties->set(308, 32);             // warp
    properties->set(360, 8);              // compute capability 8.9
    properties->set(364, 9);
    properties->set(384, 128);             // multiprocessors
    properties->set(672, size_t(101376));  // shared memory of a block that asks for more
    return SUCCESS;
}
Error cudaDeviceGetAttribute(int * value, int, int) {
    *value = 0;
    return SUCCESS;
}
Error cudaDeviceGetPCIBusId(char * text, int n, int id) {
    snprintf(text, size_t(n), "0000:%02x:00.0", id + 1);
    return SUCCESS;
}
Error cudaDeviceCanAccessPeer(int * can, int, int) {
    *can = 0;
    return SUCCESS;
}
Error cudaDeviceEnablePeerAccess(int, unsigned) {
    fake_cuda_log("unexpected cudaDeviceEnablePeerAccess");
    return SUCCESS;
}
Error cudaDeviceSynchronize() {
    return SUCCESS;
}
Error cudaGetLastError() {
    return SUCCESS;
}
Error cudaPeekAtLastError() {
    return SUCCESS;
}
const char * cudaGetErrorString(Error error) {
    return error == OUT_OF_MEMORY ? "out of memory" : "no error";
}

// ---- memory ----

Error cudaMemGetInfo(size_t * n_free, size_t * n_total) {
    const std::lock_guard lock(mutex());
    *n_total = device_bytes();
    *n_free = *n_total - std::min(in_use, *n_total);
    return SUCCESS;
}
Error cudaMalloc(void ** address, size_t n_bytes) {
    return allocate("device", address, n_bytes);
}
Error cudaMallocManaged(void ** address, size_t n_bytes, unsigned) {
    return allocate("device", address, n_bytes);
}
Error cudaMallocHost(void ** address, size_t n_bytes) {
    return allocate("pinned", address, n_bytes);
}
Error cudaHostAlloc(void ** address, size_t n_bytes, unsigned) {
    return allocate("pinned", address, n_bytes);
}
Error cudaFree(void * address) {
    return release(address);
}
Error cudaFreeHost(void * address) {
    return release(address);
}
Error cudaHostRegister(void *, size_t, unsigned) {
    return SUCCESS;
}
Error cudaHostUnregister(void *) {
    return SUCCESS;
}
Error cudaHostGetDevicePointer(void ** address, void * host, unsigned) {
    *address = host;
    return SUCCESS;
}
Error cudaMemcpyAsync(void * to, const void * from, size_t n_bytes, int kind, void *) {
    return copy(to, from, n_bytes, kind);
}
Error cudaMemcpyPeerAsync(void * to, int, const void * from, int, size_t n_bytes, void *) {
    return copy(to, from, n_bytes, 3);
}
Error cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width, size_t height,
                        int kind, void *) {
    for (size_t row = 0; row < height; row++) {
        copy(static_cast<char *>(to) + row * to_pitch, static_cast<const char *>(from) + row * from_pitch, width, kind);
    }
    return SUCCESS;
}
Error cudaMemset(void * to, int value, size_t n_bytes) {
    memset(to, value, n_bytes);
    return SUCCESS;
}
Error cudaMemsetAsync(void * to, int value, size_t n_bytes, void *) {
    if (capturing == nullptr) {
        memset(to, value, n_bytes);
    }
    return SUCCESS;
}

// ---- streams, events, graphs ----

Error cudaStreamCreateWithFlags(void ** stream, unsigned) {
    return make_handle("stream", stream);
}
Error cudaStreamDestroy(void * stream) {
    return destroy_handle("stream", stream);
}
Error cudaStreamSynchronize(void *) {
    return SUCCESS;
}
Error cudaStreamWaitEvent(void *, void *, unsigned) {
    return SUCCESS;
}
Error cudaEventCreateWithFlags(void ** event, unsigned) {
    return make_handle("event", event);
}
Error cudaEventDestroy(void * event) {
    return destroy_handle("event", event);
}
Error cudaEventRecord(void *, void *) {
    return SUCCESS;
}
Error cudaEventSynchronize(void *) {
    return SUCCESS;
}

Error cudaStreamBeginCapture(void *, int) {
    fake_cuda_log("capture begin");
    capturing = new Graph{0};
    return SUCCESS;
}
Error cudaStreamEndCapture(void *, Graph ** graph) {
    fake_cuda_log("capture end %d", capturing->n_launches);
    fake_cuda_log("alloc graph %p 0", static_cast<void *>(capturing));
    *graph = capturing;
    capturing = nullptr;
    return SUCCESS;
}
Error cudaStreamIsCapturing(void *, int * status) {
    *status = capturing == nullptr ? 0 : 1;
    return SUCCESS;
}
Error cudaGraphInstantiate(Graph ** instance, Graph * graph, unsigned long long) {
    *instance = new Graph(*graph);
    fake_cuda_log("graph instantiate %d", graph->n_launches);
    fake_cuda_log("alloc instance %p 0", static_cast<void *>(*instance));
    return SUCCESS;
}
Error cudaGraphExecUpdate(Graph * instance, Graph * graph, void *) {
    fake_cuda_log("graph update %d", graph->n_launches);
    *instance = *graph;
    return SUCCESS;
}
Error cudaGraphLaunch(Graph * instance, void *) {
    fake_cuda_log("graph launch %d", instance->n_launches);
    return SUCCESS;
}
Error cudaGraphDestroy(Graph * graph) {
    fake_cuda_log("free graph %p", static_cast<void *>(graph));
    delete graph;
    return SUCCESS;
}
Error cudaGraphExecDestroy(Graph * instance) {
    fake_cuda_log("free instance %p", static_cast<void *>(instance));
    delete instance;
    return SUCCESS;
}

}  // extern "C"
