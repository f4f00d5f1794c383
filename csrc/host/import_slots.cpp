// Reading the dynamic section of loaded objects.
#include "import_slots.h"

#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#if defined(__x86_64__)
#define TERN_R_JUMP_SLOT R_X86_64_JUMP_SLOT
#define TERN_R_GLOB_DAT R_X86_64_GLOB_DAT
#elif defined(__aarch64__)
#define TERN_R_JUMP_SLOT R_AARCH64_JUMP_SLOT
#define TERN_R_GLOB_DAT R_AARCH64_GLOB_DAT
#else
#error "ggml-tern takes import slots on Linux x86-64 and aarch64 only"
#endif

namespace tern {

namespace {

// The dynamic section of one loaded object. glibc relocates its pointers; others leave them relative to the base.
class Object {
  public:
    explicit Object(const dl_phdr_info & info) : info_(info) {
        const ElfW(Dyn) * dynamic = nullptr;
        for (int i = 0; i < info.dlpi_phnum; i++) {
            const ElfW(Phdr) & segment = info.dlpi_phdr[i];
            if (segment.p_type == PT_DYNAMIC) {
                dynamic = reinterpret_cast<const ElfW(Dyn) *>(info.dlpi_addr + segment.p_vaddr);
            }
        }
        for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; dynamic++) {
            switch (dynamic->d_tag) {
            case DT_SYMTAB: symbols_ = pointer<ElfW(Sym)>(dynamic); break;
            case DT_STRTAB: strings_ = pointer<char>(dynamic); break;
            case DT_JMPREL: tables_[0] = pointer<ElfW(Rela)>(dynamic); break;
            case DT_PLTRELSZ: sizes_[0] = dynamic->d_un.d_val / sizeof(ElfW(Rela)); break;
            case DT_RELA: tables_[1] = pointer<ElfW(Rela)>(dynamic); break;
            case DT_RELASZ: sizes_[1] = dynamic->d_un.d_val / sizeof(ElfW(Rela)); break;
            default: break;
            }
        }
    }

    bool contains(const void * address) const {
        const auto a = reinterpret_cast<uintptr_t>(address);
        for (int i = 0; i < info_.dlpi_phnum; i++) {
            const ElfW(Phdr) & segment = info_.dlpi_phdr[i];
            const uintptr_t begin = info_.dlpi_addr + segment.p_vaddr;
            if (segment.p_type == PT_LOAD && a >= begin && a < begin + segment.p_memsz) {
                return true;
            }
        }
        return false;
    }

    // Calls use(slot, import) for every slot of every import that is not taken yet.
    template <typename Use> void for_each_slot(const std::vector<Import> & imports, const Use & use) const {
        if (symbols_ == nullptr || strings_ == nullptr) {
            return;
        }
        std::vector<const Import *> foreign;
        for (const Import & import : imports) {
            if (!contains(import.original) && !contains(import.replacement)) {
                foreign.push_back(&import);
            }
        }
        for (int t = 0; t < 2; t++) {
            for (size_t i = 0; tables_[t] != nullptr && i < sizes_[t]; i++) {
                const ElfW(Rela) & relocation = tables_[t][i];
                const auto type = ELF64_R_TYPE(relocation.r_info);
                if (type != TERN_R_JUMP_SLOT && type != TERN_R_GLOB_DAT) {
                    continue;
                }
                const char * symbol = strings_ + symbols_[ELF64_R_SYM(relocation.r_info)].st_name;
                auto * slot = reinterpret_cast<const void **>(info_.dlpi_addr + relocation.r_offset);
                for (const Import * import : foreign) {
                    if (std::strcmp(symbol, import->symbol) == 0 &&
                        __atomic_load_n(slot, __ATOMIC_ACQUIRE) != import->replacement) {
                        use(slot, *import);
                    }
                }
            }
        }
    }

  private:
    template <typename T> const T * pointer(const ElfW(Dyn) * entry) const {
        const uintptr_t address = entry->d_un.d_ptr;
        return reinterpret_cast<const T *>(address < info_.dlpi_addr ? info_.dlpi_addr + address : address);
    }

    const dl_phdr_info & info_;
    const ElfW(Sym) * symbols_ = nullptr;
    const char * strings_ = nullptr;
    const ElfW(Rela) * tables_[2] = {};
    size_t sizes_[2] = {};
};

// An object with slots to take. Its data may be read only while the loader's lock is held or a handle keeps it loaded.
struct Candidate {
    dl_phdr_info info;
    std::string name;
};

struct Scan {
    const std::vector<Import> & imports;
    unsigned long long loads_seen;
    unsigned long long loads = 0;
    std::vector<Candidate> candidates;
};

int scan_object(dl_phdr_info * info, size_t, void * data) {
    auto & scan = *static_cast<Scan *>(data);
    scan.loads = info->dlpi_adds;
    if (scan.loads == scan.loads_seen) {
        return 1;
    }
    bool found = false;
    Object(*info).for_each_slot(scan.imports, [&](const void **, const Import &) { found = true; });
    if (found) {
        scan.candidates.push_back({*info, info->dlpi_name != nullptr ? info->dlpi_name : ""});
    }
    return 0;
}

// A handle that keeps the object loaded; nullptr if it is gone. Waits until a thread that is loading it has finished.
std::shared_ptr<void> keep_loaded(const Candidate & candidate) {
    void * handle = dlopen(candidate.name.empty() ? nullptr : candidate.name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) {
        return nullptr;
    }
    std::shared_ptr<void> object(handle, &dlclose);
    link_map * map = nullptr;
    const bool is_same =
        dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_addr == candidate.info.dlpi_addr;
    return is_same ? object : nullptr;
}

}  // namespace

ImportSlots::Found ImportSlots::find() const {
    // The loader holds a lock while it calls scan_object(), so that nothing disappears; but it must not be called from there.
    Scan scan{imports_, loads_seen_, 0, {}};
    dl_iterate_phdr(scan_object, &scan);
    Found found;
    found.loads = scan.loads;
    for (const Candidate & candidate : scan.candidates) {
        const std::shared_ptr<void> handle = keep_loaded(candidate);
        if (handle == nullptr) {
            continue;
        }
        const Object object(candidate.info);
        object.for_each_slot(imports_, [&](const void ** slot, const Import & import) {
            const void * value = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
            // Either bound to the very function, not to that of another copy of its library; or not bound yet and pointing at a
            // stub of the object's own, and then the loader knows what the name means to it.
            if (value == import.original ||
                (object.contains(value) && dlsym(handle.get(), import.symbol) == import.original)) {
                const auto * replacement = reinterpret_cast<const char *>(&import.replacement);
                found.patches.push_back({slot, std::string(replacement, sizeof(import.replacement))});
            }
        });
        found.objects.push_back(handle);
    }
    return found;
}

void ImportSlots::count(const Found & found) {
    taken_ += static_cast<int>(found.patches.size());
    unsigned long long seen = loads_seen_;
    while (seen < found.loads && !loads_seen_.compare_exchange_weak(seen, found.loads)) {
    }
}

bool ImportSlots::take(std::string & error) {
    const Found found = find();
    if (!write_patches(found.patches, error)) {
        return false;
    }
    count(found);
    return true;
}

}  // namespace tern
