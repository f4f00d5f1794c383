// Memory that is streamed through: in huge pages, which spare it most address translations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <sys/mman.h>

namespace tern {

struct FreeMemory {
    void operator()(uint8_t * memory) const { std::free(memory); }
};
using StreamedMemory = std::unique_ptr<uint8_t[], FreeMemory>;

// Memory of n_bytes, aligned to 64 at least, not cleared. Throws std::bad_alloc.
inline StreamedMemory allocate_streamed(size_t n_bytes) {
    constexpr size_t CACHE_LINE = 64;
    constexpr size_t HUGE_PAGE = size_t{2} << 20;
    const bool large = n_bytes >= 2 * HUGE_PAGE;
    void * memory = nullptr;
    if (posix_memalign(&memory, large ? HUGE_PAGE : CACHE_LINE, n_bytes) != 0) {
        throw std::bad_alloc();
    }
    if (large) {
        madvise(memory, n_bytes, MADV_HUGEPAGE);
    }
    return StreamedMemory(static_cast<uint8_t *>(memory));
}

}  // namespace tern
