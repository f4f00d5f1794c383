// libFuzzer target for what reads GGUF headers that nobody vouches for, in the order that a load has: the header, what it says about
// the weights, its translation. Whatever the bytes, it returns or throws FormatError, and takes a small multiple of their memory.
//
//   tests/fuzz/run.sh [SECONDS]      builds with clang under ASan and UBSan and runs from tests/fuzz/corpus
#include "format/gguf_header.h"
#include "format/hadamard.h"
#include "format/ternary_types.h"
#include "model/translation.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sanitizer/allocator_interface.h>

namespace {

// ---- memory ----

// Of the bytes of an input. A key of 14 bytes becomes an entry of 48 and a node in a set of names, and so on.
constexpr size_t MOST_TIMES = 24;
constexpr size_t ALLOWANCE = 16 * 1024;

// A sparse file may have any size, so that whatever the header says of its data may be true.
constexpr uint64_t SPARSE_FILE = uint64_t{1} << 50;

size_t g_live = 0;
size_t g_limit = SIZE_MAX;

void on_allocation(const volatile void *, size_t size) {
    g_live += size;
    if (g_live > g_limit && g_limit != SIZE_MAX) {
        g_limit = SIZE_MAX;
        std::fprintf(stderr, "the input takes more than %zu times its memory\n", MOST_TIMES);
        __builtin_trap();
    }
}

void on_free(const volatile void * pointer) {
    const size_t size = pointer != nullptr ? __sanitizer_get_allocated_size(pointer) : 0;
    g_live -= size < g_live ? size : g_live;
}

// ---- the ids of a process ----

constexpr uint32_t SLOTS[] = {37, 38, 31, 32};  // plain and treated PQ2_0 and PTQ1_0

uint32_t plain(uint32_t type) {
    return type == tern::TYPE_PQ2_0 ? SLOTS[0] : type == tern::TYPE_PTQ1_0 ? SLOTS[1] : type;
}

uint32_t treated(uint32_t type) {
    return type == tern::TYPE_PQ2_0 ? SLOTS[2] : type == tern::TYPE_PTQ1_0 ? SLOTS[3] : 0;
}

bool is_ours(uint32_t type) {
    return type == SLOTS[0] || type == SLOTS[1] || type == SLOTS[2] || type == SLOTS[3];
}

// ---- what is read ----

uint64_t read_header(std::string_view bytes, uint64_t file_size) {
    const size_t size = bytes.size();
    uint64_t seen = 0;
    tern::GgufHeader header = tern::parse_gguf_header(bytes, file_size);
    // Everything that is handed out must lie inside the input: read it all.
    for (const tern::GgufKey & key : header.metadata) {
        for (const char c : key.value.bytes) {
            seen += static_cast<unsigned char>(c);
        }
    }
    for (const tern::GgufTensor & tensor : header.tensors) {
        if (tensor.type_position + sizeof(uint32_t) > size) {
            __builtin_trap();
        }
        seen += tensor.name.size();
    }
    seen += tern::resolve_legacy_q2_0(header, file_size) ? 1 : 0;
    tern::check_tensor_data(header, file_size);
    for (const tern::GgufTensor & tensor : header.tensors) {
        // What the check lets pass can be read.
        const uint64_t end = header.data_offset + tensor.offset + tern::tensor_bytes(tensor);
        if (end > file_size) {
            __builtin_trap();
        }
        seen += end <= size ? bytes[end - 1] : 0;
    }
    if (const auto contract = tern::read_hadamard_contract(header)) {
        for (const auto & [name, rotation] : contract->rotations) {
            rotation->check();
            seen += name.size();
            // P and its inverse touch nothing outside a row.
            if (rotation->n_in <= 1024) {
                std::vector<float> row(static_cast<size_t>(rotation->n_in), 1.0f);
                std::vector<float> out(row.size());
                tern::permute(*rotation, row.data(), 0, rotation->n_in, out.data());
                tern::permute_back(*rotation, out.data(), row.data());
            }
        }
    }
    return seen;
}

uint64_t translate(std::string_view bytes) {
    static const tern::ProcessTypes types{plain, treated, is_ours};
    tern::Models models;
    std::shared_ptr<tern::Model> reading;
    std::vector<std::string> remarks;
    uint64_t seen = 0;
    for (int times = 0; times < 2; times++) {  // the second time, all that it says is known
        const auto translated = tern::translate_header(bytes, "file", types, models, reading, remarks);
        if (!translated) {
            continue;
        }
        // Only type ids differ, and what results is a header again that needs no translation.
        const tern::GgufHeader before = tern::parse_gguf_header(bytes, bytes.size());
        const tern::GgufHeader after = tern::parse_gguf_header(*translated, bytes.size());
        if (translated->size() > bytes.size() || after.tensors.size() != before.tensors.size()) {
            __builtin_trap();
        }
        for (size_t i = 0; i < after.tensors.size(); i++) {
            if (after.tensors[i].name != before.tensors[i].name ||
                after.tensors[i].offset != before.tensors[i].offset ||
                plain(after.tensors[i].type) != after.tensors[i].type) {
                __builtin_trap();
            }
        }
        seen += translated->size();
    }
    return seen;
}

template <typename Read> uint64_t limited(Read read, std::string_view bytes) {
    g_live = 0;
    g_limit = MOST_TIMES * bytes.size() + ALLOWANCE;
    uint64_t seen = 0;
    try {
        seen = read(bytes);
    } catch (const tern::FormatError &) {
        seen = 1;
    }
    g_limit = SIZE_MAX;
    return seen;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    __sanitizer_install_malloc_and_free_hooks(on_allocation, on_free);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    const std::string_view bytes(reinterpret_cast<const char *>(data), size);
    static volatile uint64_t sink;
    sink = limited([](std::string_view all) { return read_header(all, all.size()); }, bytes);
    sink = sink + limited([](std::string_view header) { return read_header(header, SPARSE_FILE); }, bytes);
    sink = sink + limited(translate, bytes);
    return 0;
}
