// Which instruction sets this processor has, and the choice among them.
#include "isa.h"

#include "isas.h"

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

std::vector<const Isa *> find_isas() {
    std::vector<const Isa *> found;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
#if defined(TERN_AVX512)
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni")) {
            found.push_back(&avx512::ISA);
        }
#endif
#if defined(TERN_AVXVNNI)
        if (has_avxvnni()) {
            found.push_back(&avxvnni::ISA);
        }
#endif
        found.push_back(&avx2::ISA);
    }
#endif
#if defined(TERN_NEON)
    if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) {
#if defined(TERN_I8MM)
        if ((getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0) {
            found.push_back(&i8mm::ISA);
        }
#endif
        found.push_back(&neon::ISA);
    }
#endif
    found.push_back(&generic::ISA);
    return found;
}

const std::vector<const Isa *> & found_isas() {
    static const std::vector<const Isa *> found = find_isas();
    return found;
}

const Isa * choose_isa() {
    const auto & found = found_isas();
    const char * wanted = std::getenv("TERN_ISA");
    if (wanted == nullptr || *wanted == '\0') {
        return found.front();
    }
    for (const Isa * candidate : found) {
        if (std::strcmp(candidate->name, wanted) == 0) {
            return candidate;
        }
    }
    std::fprintf(stderr, "ggml-tern: TERN_ISA=%s is unknown or this processor lacks it; using %s\n", wanted,
                 found.front()->name);
    return found.front();
}

}  // namespace

const Isa & isa() {
    static const Isa * const chosen = choose_isa();
    return *chosen;
}

const Kernels & kernels() {
    return isa().kernels;
}

const Isa * const * available_isas(int * count) {
    *count = static_cast<int>(found_isas().size());
    return found_isas().data();
}

}  // namespace tern
