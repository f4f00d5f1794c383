// Files with our type ids, read by a host that does not know them.
//
// libllama reads a model's header with gguf_init_from_file(), which refuses ids beyond its table, and then opens the file
// itself to read the tensor data by offset. The call goes through a slot of libllama's own relocation table. We put a
// function of ours into that slot. It hands the real function a copy of the header in memory, in which each of our ids
// is replaced by its slot (type_slots.h); an id is a u32 either way, so nothing moves. The file itself is only read.
#pragma once

namespace tern {

// Hooks every object in the process that imports gguf_init_from_file() or gguf_init_from_file_ptr() from the connected
// host. Cheap when nothing was loaded since the last call; safe from any thread.
void hook_loaders();

// How many slots are hooked.
int hooked_slots();

}  // namespace tern
