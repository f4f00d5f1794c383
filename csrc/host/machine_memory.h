// How much memory there is.
#pragma once

#include <cstddef>

namespace tern {

struct MachineMemory {
    size_t total;  // in bytes
    size_t free;   // of it, to be had without swapping
};

// What the machine has, or what a container may use of it, whichever is less.
MachineMemory machine_memory();

}  // namespace tern
