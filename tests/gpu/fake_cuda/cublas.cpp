// A cuBLAS that computes nothing and tells runtime.cpp's log who asked it to: a line "cublas NAME" for each call.
#include "log.h"

#define FUNCTION(name)                                                                                                 \
    extern "C" int name(...) {                                                                                         \
        fake_cuda_log("cublas " #name);                                                                                \
        return 0;                                                                                                      \
    }

FUNCTION(cublasGemmBatchedEx)
FUNCTION(cublasGemmEx)
FUNCTION(cublasGemmStridedBatchedEx)
FUNCTION(cublasSgemmBatched)
FUNCTION(cublasSgemmStridedBatched)
FUNCTION(cublasSgemm_v2)
FUNCTION(cublasStrsmBatched)

// What asks for nothing to be computed.
extern "C" {

int cublasCreate_v2(void ** handle) {
    static int something;
    *handle = &something;
    return 0;
}
int cublasDestroy_v2(void *) {
    return 0;
}
int cublasSetMathMode(void *, int) {
    return 0;
}
int cublasSetStream_v2(void *, void *) {
    return 0;
}
int cublasSetWorkspace_v2(void *, void *, unsigned long) {
    return 0;
}
const char * cublasGetStatusString(int) {
    return "no error";
}

}  // extern "C"
