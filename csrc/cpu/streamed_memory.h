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

constexpr size_t HUGE_PAGE = size_t{2} << 20;

// Asks for huge pages for as much of the memory as whole ones fit.
inline void use_huge_pages(void * memory, size_t n_bytes) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t begin = (address + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = (address + n_bytes) / HUGE_PAGE * HUGE_PAGE;
    if (begin < end) {
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
    }
}

// Memory of n_bytes, aligned to 64 at least, not cleared. Throws std::bad_alloc.
inline StreamedMemory allocate_streamed(size_t n_bytes) {
    constexpr size_t CACHE_LINE = 64;
    void * memory = nullptr;
    if (posix_memalign(&memory, n_bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : CACHE_LINE, n_bytes) != 0) {
        throw std::bad_alloc();
    }
    use_huge_pages(memory, n_bytes);
    return StreamedMemory(static_cast<uint8_t *>(memory));
}

}  // namespace tern
