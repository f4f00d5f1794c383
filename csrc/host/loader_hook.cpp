// The hook itself: finding the slots, and the functions that stand in them.
#include "loader_hook.h"

#include "../format/gguf_header.h"
#include "bitnet_gates.h"
#include "host_api.h"
#include "treatments.h"
#include "type_slots.h"
#include "weight_layout.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <sys/mman.h>
#include <system_error>
#include <unistd.h>
#include <vector>

#if defined(__x86_64__)
#define TERN_R_JUMP_SLOT R_X86_64_JUMP_SLOT
#define TERN_R_GLOB_DAT R_X86_64_GLOB_DAT
#elif defined(__aarch64__)
#define TERN_R_JUMP_SLOT R_AARCH64_JUMP_SLOT
#define TERN_R_GLOB_DAT R_AARCH64_GLOB_DAT
#else
#error "ggml-tern hooks the loader on Linux x86-64 and aarch64 only"
#endif

namespace tern {

namespace {

// ---- what the hooked functions do ----

// What the system refused while a copy was made; the file is ours, so the host cannot go on without it.
std::runtime_error copy_error(const char * call) {
    return std::runtime_error(std::string("cannot keep a translated header in memory: ") + call + ": " +
                              std::strerror(errno));
}

void write_all(int fd, const char * data, size_t size, off_t offset) {
    while (size > 0) {
        const ssize_t written = pwrite(fd, data, size, offset);
        if (written < 0 && errno != EINTR) {
            throw copy_error("pwrite");
        }
        if (written > 0) {
            data += written;
            size -= static_cast<size_t>(written);
            offset += written;
        }
    }
}

void report(const char * name, const std::string & what) {
    std::fprintf(stderr, "ggml-tern: %s: %s\n", name, what.c_str());
}

// Says a thing about a file once, however often its header is read.
void report_once(const char * name, const std::string & what) {
    static std::mutex mutex;
    static std::set<std::string> said;
    const std::lock_guard<std::mutex> lock(mutex);
    if (said.insert(name + what).second) {
        report(name, what);
    }
}

// The number of parts of a model that is split into several files.
uint64_t part_count(const GgufHeader & header) {
    const GgufValue * count = header.find("split.count");
    uint16_t parts = 1;
    if (count != nullptr && !count->is_array && count->type == GgufValueType::UINT16) {
        std::memcpy(&parts, count->bytes.data(), sizeof(parts));
    }
    return parts;
}

// The rotations of a file, by tensor name. Throws FormatError for a contract that is broken or cannot be honoured here.
std::map<std::string_view, Rotation> find_rotations(const GgufHeader & header) {
    std::optional<HadamardContract> contract;
    if (part_count(header) == 1) {
        contract = read_hadamard_contract(header);
    } else if (std::any_of(header.metadata.begin(), header.metadata.end(),
                           [](const GgufKey & key) { return key.name.substr(0, 15) == "prism.hadamard."; })) {
        throw FormatError(
            "its weights are Hadamard-rotated (prism.hadamard.*), and it is split into several files, which "
            "do not all say so; join them with tern repack");
    }
    if (!contract) {
        return {};
    }
    for (const GgufTensor & tensor : header.tensors) {
        if (contract->rotations.count(tensor.name) != 0 && special_slot_of_file_type(tensor.type) == 0) {
            const TensorTypeInfo * type = tensor_type_info(tensor.type);
            throw FormatError("key 'prism.hadamard.weight_names' or 'prism.hadamard.inverse_weight_names' names " +
                              quoted(tensor.name) + " of type " +
                              (type != nullptr ? type->name : std::to_string(tensor.type)) +
                              ", which llama.cpp would multiply without its rotation; PQ2_0 and PTQ1_0 can be rotated");
        }
    }
    return std::move(contract->rotations);
}

// The GGUF that begins at `start` in `file`, with its type ids translated: a sparse file in memory, as long as the
// original, that holds the header alone (with_data: everything). nullptr when no id needs translation.
// Throws FormatError for a file that carries our types and is broken, std::runtime_error when the system refuses.
// name: of the file, for a message.
FILE * translated_copy(const char * name, std::string_view file, size_t start, bool with_data) {
    const std::string_view gguf = file.substr(start);
    GgufHeader header;
    try {
        header = parse_gguf_header(gguf, gguf.size());
    } catch (const FormatError &) {
        return nullptr;  // the host's reader says what is wrong in its own words
    }
    const bool is_legacy = resolve_legacy_q2_0(header, gguf.size());
    choose_layout(name, header);
    const std::map<std::string_view, Rotation> rotations = find_rotations(header);
    std::string obstacle;
    const bool squared_relu = gates_have_squared_relu(header, obstacle);
    if (!obstacle.empty()) {
        report_once(name, "computes SiLU where the model was trained with squared ReLU, since " + obstacle +
                              "; convert with --type ptq1_0 or pq2_0");
    }
    std::vector<Treatment> treatments;  // of the tensors, in their order
    for (const GgufTensor & tensor : header.tensors) {
        const auto rotation = rotations.find(tensor.name);
        treatments.push_back(
            {squared_relu && is_gate(tensor), rotation != rotations.end() ? keep_rotation(rotation->second) : nullptr});
    }
    const auto slot_of = [&](size_t i) {
        const uint32_t type = header.tensors[i].type;
        return treatments[i].is_none() ? slot_of_file_type(type) : special_slot_of_file_type(type);
    };
    bool ours = is_legacy;
    for (size_t i = 0; i < header.tensors.size(); i++) {
        const GgufTensor & tensor = header.tensors[i];
        if (is_our_slot(tensor.type)) {
            throw FormatError("tensor " + quoted(tensor.name) + " has type " + std::to_string(tensor.type) +
                              ", which is retired and must not stand in a file");
        }
        ours = ours || slot_of(i) != tensor.type;
    }
    if (!ours) {
        return nullptr;
    }
    check_tensor_data(header, gguf.size());

    std::string bytes(gguf.substr(0, header.data_offset));
    for (size_t i = 0; i < header.tensors.size(); i++) {
        const GgufTensor & tensor = header.tensors[i];
        const uint32_t slot = slot_of(i);
        std::memcpy(&bytes[tensor.type_position], &slot, sizeof(slot));
        if (!treatments[i].is_none()) {
            const std::string_view data = gguf.substr(header.data_offset + tensor.offset, tensor_bytes(tensor));
            remember_treatment(tensor, data, treatments[i]);
        }
    }
    const int fd = memfd_create("ggml-tern", MFD_CLOEXEC);
    if (fd < 0) {
        throw copy_error("memfd_create");
    }
    try {
        if (ftruncate(fd, static_cast<off_t>(file.size())) != 0) {
            throw copy_error("ftruncate");
        }
        write_all(fd, bytes.data(), bytes.size(), static_cast<off_t>(start));
        if (with_data) {
            write_all(fd, gguf.data() + bytes.size(), gguf.size() - bytes.size(),
                      static_cast<off_t>(start + bytes.size()));
        }
        FILE * copy = fdopen(fd, "rb");
        if (copy == nullptr) {
            throw copy_error("fdopen");
        }
        return copy;
    } catch (...) {
        close(fd);
        throw;
    }
}

gguf_context * hooked_init_from_file(const char * path, gguf_init_params params) {
    FILE * copy = nullptr;
    try {
        const MappedFile file{std::string(path)};
        copy = translated_copy(path, file.bytes(), 0, !params.no_alloc);
    } catch (const std::system_error &) {
        copy = nullptr;  // a file that cannot be opened or mapped: the host says so
    } catch (const std::exception & error) {
        report(path, error.what());
        return nullptr;
    }
    if (copy == nullptr) {
        return host().gguf_init_from_file(path, params);
    }
    gguf_context * context = host().gguf_init_from_file_ptr(copy, params);
    fclose(copy);
    return context;
}

// What a message calls a file that came without its name.
constexpr const char * OPEN_FILE = "(open file)";

gguf_context * hooked_init_from_file_ptr(FILE * file, gguf_init_params params) {
    const off_t start = ftello(file);
    FILE * copy = nullptr;
    try {
        const MappedFile mapped(fileno(file));
        if (start >= 0 && static_cast<size_t>(start) <= mapped.bytes().size()) {
            copy = translated_copy(OPEN_FILE, mapped.bytes(), static_cast<size_t>(start), !params.no_alloc);
        }
    } catch (const std::system_error &) {
        copy = nullptr;
    } catch (const std::exception & error) {
        report(OPEN_FILE, error.what());
        return nullptr;
    }
    if (copy == nullptr) {
        return host().gguf_init_from_file_ptr(file, params);
    }
    fseeko(copy, start, SEEK_SET);
    gguf_context * context = host().gguf_init_from_file_ptr(copy, params);
    fseeko(file, ftello(copy), SEEK_SET);
    fclose(copy);
    return context;
}

// ---- finding and filling the slots ----

struct Hook {
    const char * symbol;
    const void * original;
    const void * replacement;
};

std::mutex g_mutex;
unsigned long long g_objects_seen = 0;  // the loader's count of objects ever loaded, at the last scan
int g_hooked = 0;

// The dynamic section of one loaded object. glibc relocates its pointers; others leave them relative to the base.
struct Object {
    const dl_phdr_info * info;
    const ElfW(Sym) * symbols = nullptr;
    const char * strings = nullptr;
    const ElfW(Rela) * tables[2] = {};
    size_t sizes[2] = {};
    uintptr_t relro_begin = 0;
    uintptr_t relro_end = 0;

    explicit Object(const dl_phdr_info * info) : info(info) {
        const ElfW(Dyn) * dynamic = nullptr;
        for (int i = 0; i < info->dlpi_phnum; i++) {
            const ElfW(Phdr) & segment = info->dlpi_phdr[i];
            if (segment.p_type == PT_DYNAMIC) {
                dynamic = reinterpret_cast<const ElfW(Dyn) *>(info->dlpi_addr + segment.p_vaddr);
            } else if (segment.p_type == PT_GNU_RELRO) {
                relro_begin = info->dlpi_addr + segment.p_vaddr;
                relro_end = relro_begin + segment.p_memsz;
            }
        }
        for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; dynamic++) {
            switch (dynamic->d_tag) {
            case DT_SYMTAB: symbols = pointer<ElfW(Sym)>(dynamic); break;
            case DT_STRTAB: strings = pointer<char>(dynamic); break;
            case DT_JMPREL: tables[0] = pointer<ElfW(Rela)>(dynamic); break;
            case DT_PLTRELSZ: sizes[0] = dynamic->d_un.d_val / sizeof(ElfW(Rela)); break;
            case DT_RELA: tables[1] = pointer<ElfW(Rela)>(dynamic); break;
            case DT_RELASZ: sizes[1] = dynamic->d_un.d_val / sizeof(ElfW(Rela)); break;
            default: break;
            }
        }
    }

    template <typename T> const T * pointer(const ElfW(Dyn) * entry) const {
        const uintptr_t address = entry->d_un.d_ptr;
        return reinterpret_cast<const T *>(address < info->dlpi_addr ? info->dlpi_addr + address : address);
    }

    bool contains(const void * address) const {
        const uintptr_t a = reinterpret_cast<uintptr_t>(address);
        for (int i = 0; i < info->dlpi_phnum; i++) {
            const ElfW(Phdr) & segment = info->dlpi_phdr[i];
            const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
            if (segment.p_type == PT_LOAD && a >= begin && a < begin + segment.p_memsz) {
                return true;
            }
        }
        return false;
    }
};

// Whether the slot leads, or will lead once it is bound, to the host's function and not to that of another copy of ggml.
bool leads_to(const Object & object, const void * value, const Hook & hook) {
    if (value == hook.original) {
        return true;
    }
    if (!object.contains(value)) {
        return false;
    }
    // Not bound yet: the slot points at the object's own stub. Ask what its name means to this object.
    const char * name = object.info->dlpi_name;
    void * handle = dlopen(name != nullptr && *name != '\0' ? name : nullptr, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) {
        return false;
    }
    const void * meaning = dlsym(handle, hook.symbol);
    dlclose(handle);
    return meaning == hook.original;
}

void fill(const Object & object, const void ** slot, const void * replacement) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(slot);
    const bool read_only = address >= object.relro_begin && address < object.relro_end;
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    void * start = reinterpret_cast<void *>(address & ~(page - 1));
    if (read_only && mprotect(start, page, PROT_READ | PROT_WRITE) != 0) {
        std::fprintf(stderr, "ggml-tern: this system does not let %s be hooked: mprotect: %s\n", object.info->dlpi_name,
                     std::strerror(errno));
        return;
    }
    __atomic_store_n(slot, replacement, __ATOMIC_RELEASE);
    if (read_only) {
        mprotect(start, page, PROT_READ);
    }
    g_hooked++;
}

void hook_object(const Object & object) {
    const Hook hooks[] = {
        {"gguf_init_from_file", reinterpret_cast<const void *>(host().gguf_init_from_file),
         reinterpret_cast<const void *>(&hooked_init_from_file)},
        {"gguf_init_from_file_ptr", reinterpret_cast<const void *>(host().gguf_init_from_file_ptr),
         reinterpret_cast<const void *>(&hooked_init_from_file_ptr)},
    };
    // Neither the host's own library (the real functions call each other through such slots) nor ourselves.
    if (object.symbols == nullptr || object.strings == nullptr || object.contains(hooks[0].original) ||
        object.contains(reinterpret_cast<const void *>(&hook_loaders))) {
        return;
    }
    for (int t = 0; t < 2; t++) {
        for (size_t i = 0; object.tables[t] != nullptr && i < object.sizes[t]; i++) {
            const ElfW(Rela) & relocation = object.tables[t][i];
            const auto type = ELF64_R_TYPE(relocation.r_info);
            if (type != TERN_R_JUMP_SLOT && type != TERN_R_GLOB_DAT) {
                continue;
            }
            const char * symbol = object.strings + object.symbols[ELF64_R_SYM(relocation.r_info)].st_name;
            auto ** slot = reinterpret_cast<const void **>(object.info->dlpi_addr + relocation.r_offset);
            for (const Hook & hook : hooks) {
                if (std::strcmp(symbol, hook.symbol) == 0 && *slot != hook.replacement &&
                    leads_to(object, *slot, hook)) {
                    fill(object, slot, hook.replacement);
                }
            }
        }
    }
}

}  // namespace

void hook_loaders() {
    const std::lock_guard<std::mutex> lock(g_mutex);
    std::vector<dl_phdr_info> objects;
    dl_iterate_phdr(
        [](dl_phdr_info * info, size_t, void * list) {
            if (info->dlpi_adds == g_objects_seen) {
                return 1;
            }
            static_cast<std::vector<dl_phdr_info> *>(list)->push_back(*info);
            return 0;
        },
        &objects);
    // Outside the iteration, since it holds the loader's lock and dlopen() wants it too.
    for (const dl_phdr_info & info : objects) {
        hook_object(Object(&info));
        g_objects_seen = info.dlpi_adds;
    }
}

int hooked_slots() {
    const std::lock_guard<std::mutex> lock(g_mutex);
    return g_hooked;
}

}  // namespace tern
