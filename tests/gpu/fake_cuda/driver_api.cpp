// A CUDA driver that has no virtual memory management, for which alone ggml-cuda asks it.
#include "log.h"

#define FUNCTION(name)                                                                                                 \
    extern "C" int name(...) {                                                                                         \
        fake_cuda_log("unexpected " #name);                                                                            \
        return 1;                                                                                                      \
    }

FUNCTION(cuMemAddressFree)
FUNCTION(cuMemAddressReserve)
FUNCTION(cuMemCreate)
FUNCTION(cuMemGetAllocationGranularity)
FUNCTION(cuMemMap)
FUNCTION(cuMemRelease)
FUNCTION(cuMemSetAccess)
FUNCTION(cuMemUnmap)
FUNCTION(cuGetErrorString)

extern "C" {

int cuDeviceGet(int * device, int id) {
    *device = id;
    return 0;
}
int cuDeviceGetAttribute(int * value, int, int) {
    *value = 0;
    return 0;
}

}  // extern "C"
