// Writing into memory of the host that its loader has made read-only: the one place that changes memory protection.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tern {

// Bytes to be put somewhere. Eight aligned ones are written at once, so that whoever reads a pointer there meanwhile gets the
// old one or the new one.
struct MemoryPatch {
    void * address;
    std::string bytes;
};

// Writes all patches, or, where the system does not let one of them be written, none. Every page then has the protection that
// it had before. On failure returns false and puts one line that says why into `error`.
bool write_patches(const std::vector<MemoryPatch> & patches, std::string & error);

}  // namespace tern
