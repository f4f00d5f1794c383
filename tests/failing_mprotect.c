/* Preloaded: the system refuses to make memory writable the FAIL_AT-th time that a library asks for it, and every time after.
   (The loader and malloc do not ask through here.) At the end it tells how often it was asked. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static int asked;

int mprotect(void * address, size_t length, int protection) {
    int (*real)(void *, size_t, int) = (int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "mprotect");
    const char * fail_at = getenv("FAIL_AT");
    if ((protection & PROT_WRITE) != 0 && ++asked >= (fail_at != NULL ? atoi(fail_at) : 1000000)) {
        errno = EACCES;
        return -1;
    }
    return real(address, length, protection);
}

int times_asked_for_writable_memory(void) {
    return asked;
}
