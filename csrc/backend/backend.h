// What the parts of the ggml backend share. The parts, in the order of ggml's own backends, a file each: buffers, the
// operations of a graph (which are ternary, the plan, its steps on the CPU; these have headers of their own), backend, devices
// and registry.
#pragma once

#include "../cpu/isa.h"
#include "../cpu/tiles.h"
#include "../host/host_api.h"
#include "../host/type_slots.h"
#include "../model/models.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tern {

// ---- loading.cpp ----

// Puts our types into the host's table, and ourselves in front of its readers and writers of GGUF files. Where that is not
// possible, changes nothing, returns false and says why.
bool enter_host(std::string & error);
// The same readers and writers for libraries that were loaded since. Cheap when there are none; safe from any thread.
void hook_loaders();
// How many import slots lead to us.
int hooked_slots();
// The layout for the model that this thread is loading.
TileLayout layout_while_loading();
// The treatment of a tensor by its bytes, or nullptr if none is known: see Models::find().
const Treatment * find_treatment(std::string_view name, uint32_t file_type, const int64_t * shape,
                                 std::string_view data);
// The rotations of all models that were opened so far.
std::vector<const Rotation *> known_rotations();

// ---- buffers.cpp ----

// Plain host memory: activations, KV cache, and weights of other types (these can stay mapped from the file).
ggml_backend_buffer_type_t plain_buffer_type();
// Host memory in which ternary matrices lie in tiles (cpu/tiles.h), in layout_while_loading(). A read gives back the bytes that
// were written.
ggml_backend_buffer_type_t tiled_buffer_type();
// Whether it is tiled_buffer_type(), of either layout.
bool is_tiled_buffer_type(ggml_backend_buffer_type_t type);
// Plain memory that somebody else owns, such as a mapped file.
ggml_backend_buffer_t plain_buffer_from_pointer(void * data, size_t size);
// The devices that the types above name as theirs.
void set_buffer_devices(ggml_backend_dev_t plain, ggml_backend_dev_t tiled);

// Whether a ternary matrix is stored in tiles.
bool is_tiled(const ggml_tensor * w);
// The tiles of matrix i of such a tensor, or of a view of one: they count through the third and fourth dimension.
Tiles tiles_of(const ggml_tensor * w, int64_t i);

// What a ternary matrix, or a view of one, needs beside its product; nullptr where that is not known.
const Treatment * treatment_of(const ggml_tensor * w);

// ---- backend.cpp ----

// A backend on one of our devices, with a stock CPU backend of its own for all that is not ours; nullptr on failure.
ggml_backend_t backend_new(ggml_backend_dev_t device);
void backend_set_n_threads(ggml_backend_t backend, int n_threads);
void backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data);

// ---- devices.cpp ----

// Makes the devices, once.
void create_devices(ggml_backend_reg_t registry);
size_t device_count();
// The device with this index in the registry, or nullptr.
ggml_backend_dev_t device_at(size_t index);
// The host's CPU device.
ggml_backend_dev_t stock_cpu_device();

// ---- registry.cpp ----

// Whether the host has us in its list of backends: not before it has loaded us, and not after it has unloaded us, for which a
// library stays in the process.
bool is_registered();
// Hooks the loaders of libraries that were loaded since (loading.cpp), and takes over the GPUs that appeared (gpu/graft.h).
void meet_newcomers();
// For a model of ours that is opened: says which GPUs it cannot use, once.
void tell_of_gpus();

}  // namespace tern
