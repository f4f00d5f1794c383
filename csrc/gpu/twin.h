// The twin of a ternary tensor on a GPU: a Q2_0 tensor with the same values.
//
// Stock GPU backends have kernels for Q2_0 and for no other of our types. Q2_0 has a scale for every 64 weights, the others for
// 128 or 256; so the translation writes each scale two or four times, keeps the codes, and loses nothing. A tensor of our type and
// its twin are the same memory: the twin says what lies there, our type what the model called it.
#pragma once

#include "../format/ternary_types.h"
#include "../host/host_api.h"
#include "../host/type_slots.h"

#include <cstddef>
#include <cstdint>

namespace tern {

// Whether a tensor of this type is stored as its twin.
bool has_twin(ggml_type type);

// The twin of such a tensor, or of a view of whole rows of one.
ggml_tensor twin_of(const ggml_tensor * w);

// Bytes of a row of its twin.
size_t twin_row_bytes(const ggml_tensor * w);

// n_rows rows of the tensor's type, back to back, to rows of its twin; and back. Several threads do it. Throws
// std::runtime_error for rows of a twin that are none of the type's, which never came from it.
void to_twin(const ggml_tensor * w, const uint8_t * rows, int64_t n_rows, uint8_t * twin);
void from_twin(const ggml_tensor * w, const uint8_t * twin, int64_t n_rows, uint8_t * rows);

}  // namespace tern
