// Choice of the kernel table.
#include "kernels.h"

#include "kernel_tables.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(TERN_AVXVNNI)
#include <cpuid.h>
#endif
#if defined(TERN_NEON)
#include <sys/auxv.h>
#endif

namespace tern {

namespace {

#if defined(TERN_AVXVNNI)
// CPUID leaf 7, subleaf 1, bit 4 of eax; older compilers have no name for it.
bool has_avxvnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}
#endif

std::vector<const Kernels *> find_kernels() {
    std::vector<const Kernels *> found;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
#if defined(TERN_AVX512)
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni")) {
            found.push_back(&KERNELS_AVX512);
        }
#endif
#if defined(TERN_AVXVNNI)
        if (has_avxvnni()) {
            found.push_back(&KERNELS_AVXVNNI);
        }
#endif
        found.push_back(&KERNELS_AVX2);
    }
#endif
#if defined(TERN_NEON)
    if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) {
#if defined(TERN_I8MM)
        if ((getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0) {
            found.push_back(&KERNELS_I8MM);
        }
#endif
        found.push_back(&KERNELS_NEON);
    }
#endif
    found.push_back(&KERNELS_GENERIC);
    return found;
}

const std::vector<const Kernels *> & found_kernels() {
    static const std::vector<const Kernels *> found = find_kernels();
    return found;
}

const Kernels * choose_kernels() {
    const auto & found = found_kernels();
    const char * wanted = std::getenv("TERN_ISA");
    if (wanted == nullptr || *wanted == '\0') {
        return found.front();
    }
    for (const Kernels * k : found) {
        if (std::strcmp(k->isa, wanted) == 0) {
            return k;
        }
    }
    std::fprintf(stderr, "ggml-tern: TERN_ISA=%s is unknown or this processor lacks it; using %s\n", wanted,
                 found.front()->isa);
    return found.front();
}

}  // namespace

const Kernels & kernels() {
    static const Kernels * const chosen = choose_kernels();
    return *chosen;
}

const Kernels * const * available_kernels(int * count) {
    *count = static_cast<int>(found_kernels().size());
    return found_kernels().data();
}

}  // namespace tern
