// The table of our slots, and what each of them is to hold.
#include "type_slots.h"

#include "host_api.h"

#include <cstring>

namespace tern {

namespace {

template <TypeId ID> void to_float(const void * data, float * weights, int64_t n) {
    dequantize_row(*ternary_type(ID), static_cast<const uint8_t *>(data), n, weights);
}

struct Slot {
    uint32_t slot;
    uint32_t file_type;
    const char * name;  // in llama.cpp's log, which calls a type that it does not know "unknown type NAME"
    ggml_to_float_t to_float;
    bool treated = false;
};

const Slot SLOTS[] = {
    {SLOT_PQ2_0, TYPE_PQ2_0, "pq2_0 (of ggml-tern)", to_float<TYPE_PQ2_0>},
    {SLOT_PTQ1_0, TYPE_PTQ1_0, "ptq1_0 (of ggml-tern)", to_float<TYPE_PTQ1_0>},
    {SLOT_Q2_0, TYPE_Q2_0, "q2_0", to_float<TYPE_Q2_0>},
    // What the bytes decode to is not what the model means, so nobody gets a function for it.
    {SLOT_PQ2_0_TREATED, TYPE_PQ2_0, "pq2_0 (of ggml-tern, rotated or relu2)", nullptr, true},
    {SLOT_PTQ1_0_TREATED, TYPE_PTQ1_0, "ptq1_0 (of ggml-tern, rotated or relu2)", nullptr, true},
    {SLOT_Q2_0_TREATED, TYPE_Q2_0, "q2_0 (of ggml-tern, rotated or relu2)", nullptr, true},
};

bool is_used(const Slot & slot) {
    return slot.file_type != TYPE_Q2_0 || slot.treated || !host().knows_q2_0;
}

const Slot * find_slot(uint32_t slot) {
    for (const Slot & s : SLOTS) {
        if (s.slot == slot && is_used(s)) {
            return &s;
        }
    }
    return nullptr;
}

bool add_slot(const Slot & slot, std::vector<MemoryPatch> & patches, std::string & error) {
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
    ggml_type_traits filled = *entry;
    filled.type_name = slot.name;
    filled.blck_size = type.block;
    filled.type_size = static_cast<size_t>(type.block_bytes);
    filled.is_quantized = true;
    filled.to_float = slot.to_float;
    patches.push_back(
        {const_cast<ggml_type_traits *>(entry), std::string(reinterpret_cast<const char *>(&filled), sizeof(filled))});
    return true;
}

}  // namespace

bool find_type_slots(std::vector<MemoryPatch> & patches, std::string & error) {
    for (const Slot & slot : SLOTS) {
        if (is_used(slot) && !add_slot(slot, patches, error)) {
            return false;
        }
    }
    return true;
}

uint32_t slot_of_file_type(uint32_t file_type) {
    for (const Slot & slot : SLOTS) {
        if (slot.file_type == file_type && !slot.treated && is_used(slot)) {
            return slot.slot;
        }
    }
    return file_type;
}

uint32_t treated_slot_of_file_type(uint32_t file_type) {
    for (const Slot & slot : SLOTS) {
        if (slot.file_type == file_type && slot.treated) {
            return slot.slot;
        }
    }
    return 0;
}

uint32_t file_type_of(uint32_t type) {
    const Slot * slot = find_slot(type);
    return slot != nullptr ? slot->file_type : type;
}

bool is_our_slot(uint32_t type) {
    return find_slot(type) != nullptr;
}

const TernaryType * ternary_type_of(ggml_type type) {
    return ternary_type(file_type_of(static_cast<uint32_t>(type)));
}

bool is_treated(ggml_type type) {
    const Slot * slot = find_slot(static_cast<uint32_t>(type));
    return slot != nullptr && slot->treated;
}

}  // namespace tern
