/* A llama.cpp host that claims to be another version than it is. tests/test_hosts.py compiles it

     as a shared library that is linked to the real ggml, or to nothing: a plug-in that looks functions up in it finds
     those below first. FAKE_VERSION and FAKE_API_VERSION are what they say. FAKE_GROWN_X=N: the table of functions of its CPU
     backend's X has one more, the N-th. FAKE_TENSOR_GROWTH: its tensors are as many bytes longer. FAKE_PROPERTIES: the properties of
     its devices begin with something else. FAKE_MISREADS: see there;
     as a program with FAKE_STATIC: a host that has ggml inside and exports none of it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#ifdef FAKE_STATIC
#define EXPORTED __attribute__((visibility("hidden"), used))
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

/* The function of the real ggml behind one of ours: what it returns, its parameters. */
#define REAL(result, name, ...) ((result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

/* Structures as words: a table of functions comes first, in a registry entry behind one word. */
enum { WORDS = 64 };

#if defined(FAKE_GROWN_DEVICE) || defined(FAKE_GROWN_BACKEND) || defined(FAKE_GROWN_BUFFER_TYPE) ||                      \
    defined(FAKE_GROWN_BUFFER)
/* A copy of a structure of `size` words with one more word, a function's address, at index `at`. Kept for good. */
static void * grown(const void * structure, int size, int at) {
    static void * copies[16][WORDS];
    static int used;
    void ** copy = copies[used++ % 16];
    memcpy(copy, structure, (size_t)at * sizeof(void *));
    copy[at] = (void *)&grown;
    memcpy(copy + at + 1, (void * const *)structure + at, (size_t)(size - at) * sizeof(void *));
    return copy;
}
#endif

EXPORTED const char * ggml_version(void) {
    return FAKE_VERSION;
}
EXPORTED size_t ggml_backend_reg_count(void) {
    return 1;
}

/* An entry begins with the version of the backend interface. */
EXPORTED void * ggml_backend_reg_get(size_t i) {
    static void * entry[WORDS];
    void * (*real)(size_t) = REAL(void *, ggml_backend_reg_get, size_t);
    if (i != 0) {
        return NULL;
    }
    if (real != NULL) {
        memcpy(entry, real(0), 6 * sizeof(void *));
    }
    *(int *)entry = FAKE_API_VERSION;
    return entry;
}

#ifdef FAKE_GROWN_DEVICE
EXPORTED void * ggml_backend_dev_by_type(int type) {
    return grown(REAL(void *, ggml_backend_dev_by_type, int)(type), 17, FAKE_GROWN_DEVICE);
}
#endif
#ifdef FAKE_GROWN_BACKEND
EXPORTED void * ggml_backend_dev_init(void * device, const char * params) {
    void * backend = REAL(void *, ggml_backend_dev_init, void *, const char *)(device, params);
    return grown(backend, 19, 1 + FAKE_GROWN_BACKEND);
}
EXPORTED void ggml_backend_free(void * backend) {
    (void)backend;
}
#endif
#ifdef FAKE_GROWN_BUFFER_TYPE
EXPORTED void * ggml_backend_cpu_buffer_type(void) {
    return grown(REAL(void *, ggml_backend_cpu_buffer_type, void)(), 8, FAKE_GROWN_BUFFER_TYPE);
}
#endif
#ifdef FAKE_GROWN_BUFFER
EXPORTED void * ggml_backend_buft_alloc_buffer(void * type, size_t size) {
    void * buffer = REAL(void *, ggml_backend_buft_alloc_buffer, void *, size_t)(type, size);
    return grown(buffer, 15, FAKE_GROWN_BUFFER);
}
EXPORTED void ggml_backend_buffer_free(void * buffer) {
    (void)buffer;
}
#endif
#ifdef FAKE_TENSOR_GROWTH
EXPORTED size_t ggml_tensor_overhead(void) {
    return REAL(size_t, ggml_tensor_overhead, void)() + FAKE_TENSOR_GROWTH;
}
#endif
#ifdef FAKE_PROPERTIES
EXPORTED void ggml_backend_dev_get_props(void * device, void * properties) {
    REAL(void, ggml_backend_dev_get_props, void *, void *)(device, (void **)properties + 1);
}
#endif

/* Reads a structure of the plug-in's one word further on than it is: FAKE_MISREADS counts the structures. Those of the real ggml it
   reads as they are. */
#ifdef FAKE_MISREADS
static int is_real(const void * structure_with_function) {
    Dl_info info;
    return dladdr(*(void * const *)structure_with_function, &info) == 0 || strstr(info.dli_fname, "/libggml-tern.so") == NULL;
}
#if FAKE_MISREADS == 0
EXPORTED size_t ggml_backend_reg_dev_count(void * reg) {
    size_t (*function)(void *, size_t);
    memcpy(&function, (void **)reg + 3, sizeof(function));
    return is_real((void **)reg + 1) ? REAL(size_t, ggml_backend_reg_dev_count, void *)(reg) : function(reg, 1);
}
#elif FAKE_MISREADS == 1
EXPORTED void * ggml_backend_dev_backend_reg(void ** device) {
    return device[is_real(device) ? 15 : 16];
}
#elif FAKE_MISREADS == 2
EXPORTED void * ggml_backend_buft_get_device(void ** type) {
    return type[is_real(type) ? 6 : 7];
}
#elif FAKE_MISREADS == 3
EXPORTED size_t ggml_backend_buffer_get_size(void ** buffer) {
    return (size_t)buffer[is_real(buffer) ? 13 : 14];
}
#elif FAKE_MISREADS == 4
EXPORTED void * ggml_backend_get_device(void ** backend) {
    return backend[is_real(backend + 1) ? 17 : 18];
}
#endif
#endif

/* Loads a backend as ggml's own loader does: what its ggml_backend_init returns, or -1 if there is none to call. */
EXPORTED void * fake_host_load(const char * path) {
    void * handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return (void *)-1;
    }
    void * (*init)(void) = (void * (*)(void))dlsym(handle, "ggml_backend_init");
    if (init == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return (void *)-1;
    }
    /* volatile: a tail call would leave this function out of the return addresses. */
    void * volatile reg = init();
    return reg;
}

#ifdef FAKE_STATIC
int main(int argc, char ** argv) {
    if (argc != 2) {
        return 2;
    }
    printf("%s\n", fake_host_load(argv[1]) == NULL ? "refused" : "loaded");
    return 0;
}
#endif
