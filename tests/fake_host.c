/* A llama.cpp host that claims to be another version than it is. tests/test_hosts.py compiles it

     as a shared library that is linked to the real ggml, or to nothing: a plug-in that looks functions up in it finds
     those below first. FAKE_VERSION and FAKE_API_VERSION are what they say;
     as a program with FAKE_STATIC: a host that has ggml inside and exports none of it. */

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#ifdef FAKE_STATIC
#define EXPORTED __attribute__((visibility("hidden"), used))
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

/* A registry entry begins with the version of the backend interface; the rest is not looked at. */
struct ggml_backend_reg {
    int api_version;
    void * others[5];
};

static struct ggml_backend_reg cpu_reg = {FAKE_API_VERSION, {NULL}};

EXPORTED const char * ggml_version(void) {
    return FAKE_VERSION;
}
EXPORTED size_t ggml_backend_reg_count(void) {
    return 1;
}
EXPORTED struct ggml_backend_reg * ggml_backend_reg_get(size_t i) {
    return i == 0 ? &cpu_reg : NULL;
}

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
