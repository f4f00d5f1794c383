// The protection that each page has is read from /proc/self/maps: what the loader makes read-only, and up to which page, differs
// between linkers, page sizes and ways to link.
#include "memory_protection.h"

#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

namespace tern {

namespace {

// The pages that patches touch, by their address, with the protection that they have (-1: not mapped).
using Pages = std::map<uintptr_t, int>;

uintptr_t page_size() {
    return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
}

Pages pages_of(const std::vector<MemoryPatch> & patches) {
    Pages pages;
    const uintptr_t size = page_size();
    for (const MemoryPatch & patch : patches) {
        const auto begin = reinterpret_cast<uintptr_t>(patch.address);
        for (uintptr_t page = begin & ~(size - 1); page < begin + patch.bytes.size(); page += size) {
            pages[page] = -1;
        }
    }
    return pages;
}

bool read_protections(Pages & pages, std::string & error) {
    const std::unique_ptr<FILE, int (*)(FILE *)> maps(std::fopen("/proc/self/maps", "re"), &std::fclose);
    if (maps == nullptr) {
        error = std::string("cannot read how memory is protected: /proc/self/maps: ") + std::strerror(errno);
        return false;
    }
    char line[4096];
    bool is_start = true;  // of a line: a long path does not fit
    while (std::fgets(line, sizeof(line), maps.get()) != nullptr) {
        uintptr_t begin;
        uintptr_t end;
        char flags[5];
        if (is_start && std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &begin, &end, flags) == 3) {
            for (auto page = pages.lower_bound(begin); page != pages.end() && page->first < end; ++page) {
                page->second = (flags[0] == 'r' ? PROT_READ : 0) | (flags[1] == 'w' ? PROT_WRITE : 0) |
                               (flags[2] == 'x' ? PROT_EXEC : 0);
            }
        }
        is_start = std::strchr(line, '\n') != nullptr;
    }
    for (const auto & [page, protection] : pages) {
        if (protection < 0) {
            char address[32];
            std::snprintf(address, sizeof(address), "%#" PRIxPTR, page);
            error = std::string("memory that is to be written is not mapped: ") + address;
            return false;
        }
    }
    return true;
}

// Makes the pages writable, or gives them back what they had; returns whether that was possible.
bool protect(const Pages & pages, int more, std::string & error) {
    for (auto page = pages.begin(); page != pages.end(); ++page) {
        if ((page->second & PROT_WRITE) == 0 &&
            mprotect(reinterpret_cast<void *>(page->first), page_size(), page->second | more) != 0) {
            error =
                std::string("this system does not let read-only memory be changed: mprotect: ") + std::strerror(errno);
            if (more != 0) {
                std::string ignored;
                protect(Pages(pages.begin(), page), 0, ignored);
            }
            return false;
        }
    }
    return true;
}

void write(const MemoryPatch & patch) {
    uint64_t word;
    if (patch.bytes.size() == sizeof(word) && reinterpret_cast<uintptr_t>(patch.address) % sizeof(word) == 0) {
        std::memcpy(&word, patch.bytes.data(), sizeof(word));
        __atomic_store_n(static_cast<uint64_t *>(patch.address), word, __ATOMIC_RELEASE);
    } else {
        std::memcpy(patch.address, patch.bytes.data(), patch.bytes.size());
    }
}

}  // namespace

bool write_patches(const std::vector<MemoryPatch> & patches, std::string & error) {
    if (patches.empty()) {
        return true;
    }
    // Two threads must not find each other's pages writable.
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    Pages pages = pages_of(patches);
    if (!read_protections(pages, error) || !protect(pages, PROT_WRITE, error)) {
        return false;
    }
    for (const MemoryPatch & patch : patches) {
        write(patch);
    }
    std::string ignored;  // what was allowed before
    protect(pages, 0, ignored);
    return true;
}

}  // namespace tern
