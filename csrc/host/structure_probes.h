// Whether the structures of a host are as the headers have them that we were compiled with.
#pragma once

#include "host_api.h"

namespace tern {

// Looks at structures of the host's own making, of every kind that we read or write: tensors, graphs, the table of types; its CPU
// backend's registry entry, device, backend, buffer type and buffer. What we read must be what the host's functions say, and
// each table of functions must have its gaps where the CPU backend leaves them.
// Returns what differs, in a few words, or nullptr.
const char * probe_structures(const HostApi & api);

}  // namespace tern
