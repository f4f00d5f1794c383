// How the tensor types of files are called inside the process.
#pragma once

#include <cstdint>

namespace tern {

struct ProcessTypes {
    // The id of a type inside the process; the same where nothing changes.
    uint32_t (*plain)(uint32_t file_type);
    // The id for a matrix of this type that needs a treatment (models.h), or 0 where that cannot be had.
    uint32_t (*treated)(uint32_t file_type);
    // Whether this is such an id, which must not stand in a file.
    bool (*is_ours)(uint32_t type);
};

}  // namespace tern
