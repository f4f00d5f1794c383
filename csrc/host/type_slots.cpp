// Writing into the host's table of types, which lies in memory that the loader has made read-only.
#include "type_slots.h"

#include "host_api.h"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace tern {

namespace {

template <TypeId ID> void to_float(const void * data, float * weights, int64_t n) {
    dequantize_row(*ternary_type(ID), static_cast<const uint8_t *>(data), n, weights);
}

struct Slot {
    uint32_t slot;
    uint32_t file_type;
    const char * name;
    ggml_to_float_t to_float;
    bool special = false;
};

const Slot SLOTS[] = {
    {SLOT_PQ2_0, TYPE_PQ2_0, "pq2_0", to_float<TYPE_PQ2_0>},
    {SLOT_PTQ1_0, TYPE_PTQ1_0, "ptq1_0", to_float<TYPE_PTQ1_0>},
    {SLOT_Q2_0, TYPE_Q2_0, "q2_0", to_float<TYPE_Q2_0>},
    // What the bytes decode to is not what the model means, so nobody gets a function for it.
    {SLOT_PQ2_0_SPECIAL, TYPE_PQ2_0, "pq2_0_special", nullptr, true},
    {SLOT_PTQ1_0_SPECIAL, TYPE_PTQ1_0, "ptq1_0_special", nullptr, true},
};

bool is_used(const Slot & slot) {
    return slot.file_type != TYPE_Q2_0 || !host().knows_q2_0;
}

const Slot * find_slot(uint32_t slot) {
    for (const Slot & s : SLOTS) {
        if (s.slot == slot && is_used(s)) {
            return &s;
        }
    }
    return nullptr;
}

bool fill_slot(const Slot & slot, std::string & error) {
    const auto * entry = host().ggml_get_type_traits(static_cast<ggml_type>(slot.slot));
    const TernaryType & type = *ternary_type(slot.file_type);
    if (entry->type_name != nullptr && std::strcmp(entry->type_name, slot.name) == 0 &&
        entry->type_size == static_cast<size_t>(type.block_bytes)) {
        return true;
    }
    if (entry->blck_size != 0 || entry->type_size != 0 || entry->to_float != nullptr) {
        error = "type id " + std::to_string(slot.slot) + " is in use in this llama.cpp (" +
                (entry->type_name != nullptr ? entry->type_name : "unnamed") + "); a newer ggml-tern is needed";
        return false;
    }
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = reinterpret_cast<uintptr_t>(entry) & ~(page - 1);
    const uintptr_t last = (reinterpret_cast<uintptr_t>(entry) + sizeof(*entry) - 1) & ~(page - 1);
    const size_t length = last - first + page;
    if (mprotect(reinterpret_cast<void *>(first), length, PROT_READ | PROT_WRITE) != 0) {
        error =
            std::string("this system does not let the table of types be changed: mprotect: ") + std::strerror(errno);
        return false;
    }
    auto * writable = const_cast<ggml_type_traits *>(entry);
    writable->type_name = slot.name;
    writable->blck_size = type.block;
    writable->type_size = static_cast<size_t>(type.block_bytes);
    writable->is_quantized = true;
    writable->to_float = slot.to_float;
    mprotect(reinterpret_cast<void *>(first), length, PROT_READ);
    return true;
}

}  // namespace

bool fill_type_slots(std::string & error) {
    for (const Slot & slot : SLOTS) {
        if (is_used(slot) && !fill_slot(slot, error)) {
            return false;
        }
    }
    return true;
}

uint32_t slot_of_file_type(uint32_t file_type) {
    for (const Slot & slot : SLOTS) {
        if (slot.file_type == file_type && !slot.special && is_used(slot)) {
            return slot.slot;
        }
    }
    return file_type;
}

uint32_t special_slot_of_file_type(uint32_t file_type) {
    for (const Slot & slot : SLOTS) {
        if (slot.file_type == file_type && slot.special) {
            return slot.slot;
        }
    }
    return 0;
}

bool is_our_slot(uint32_t type) {
    return find_slot(type) != nullptr;
}

const TernaryType * ternary_type_of(ggml_type type) {
    const Slot * slot = find_slot(static_cast<uint32_t>(type));
    return ternary_type(slot != nullptr ? slot->file_type : static_cast<uint32_t>(type));
}

bool is_special(ggml_type type) {
    const Slot * slot = find_slot(static_cast<uint32_t>(type));
    return slot != nullptr && slot->special;
}

}  // namespace tern
