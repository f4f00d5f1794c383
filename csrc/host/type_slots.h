// Our tensor types in the host's table of types.
//
// GGUF files carry PQ2_0 and PTQ1_0 under the ids 142 and 143, beyond the end of ggml's table. Six ids inside the table
// belong to types that were removed and are reserved for ever; inside the process our types live in them.
//
// PQ2_0, PTQ1_0 and Q2_0 have a second slot each, for matrices that need a treatment (model/models.h): the bytes are the same, but
// a product with them alone is not what the model means.
#pragma once

#include "../format/ternary_types.h"
#include "ggml.h"
#include "memory_protection.h"

#include <string>
#include <vector>

namespace tern {

// Retired ids: Q4_0_4_4, Q4_0_4_8, Q4_0_8_8, IQ4_NL_4_8 and IQ4_NL_8_8 become ours; IQ4_NL_4_4 becomes Q2_0 where the host does
// not know it (ggml < 0.20).
constexpr uint32_t SLOT_PQ2_0_TREATED = 31;
constexpr uint32_t SLOT_PTQ1_0_TREATED = 32;
constexpr uint32_t SLOT_Q2_0_TREATED = 33;
constexpr uint32_t SLOT_Q2_0 = 36;
constexpr uint32_t SLOT_PQ2_0 = 37;
constexpr uint32_t SLOT_PTQ1_0 = 38;

// Adds what is to be written to fill the slots: nothing for those that are filled already. Returns false and a line that says why
// when one of them is not retired in this host.
bool find_type_slots(std::vector<MemoryPatch> & patches, std::string & error);

// The id inside the process for an id in a file; the same id where nothing changes.
uint32_t slot_of_file_type(uint32_t file_type);

// The id for a matrix that needs a treatment, or 0 where that cannot be had.
uint32_t treated_slot_of_file_type(uint32_t file_type);

// The id in a file for one in this process.
uint32_t file_type_of(uint32_t type);

// Whether this id must not come from a file, because it is a slot of ours.
bool is_our_slot(uint32_t type);

// The ternary type of a tensor in this process, or nullptr.
const TernaryType * ternary_type_of(ggml_type type);

// Whether a tensor of this type needs a treatment.
bool is_treated(ggml_type type);

}  // namespace tern
