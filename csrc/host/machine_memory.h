// How much memory there is.
#pragma once

#include <cstddef>
#include <string>

namespace tern {

struct MachineMemory {
    size_t total;  // in bytes
    size_t free;   // of it, to be had without swapping
};

// What the machine has, or what the control groups of this process (a container, a service) may use of it, whichever is
// less. 0 where the system does not say.
// root: where the system's /proc and /sys are found.
MachineMemory machine_memory(const std::string & root = "");

}  // namespace tern
