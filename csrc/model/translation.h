// The header of a GGUF file as a process reads it that does not know our types: each id that only files have is replaced by the
// one that the type has inside the process. An id is a u32 either way, so nothing moves. On the way, what the header says about
// the model's weights is taken up, and the keys of what is done here get names that no host knows: newer ones would do it too.
#pragma once

#include "models.h"
#include "process_types.h"

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tern {

// Translates the header of the GGUF file `gguf`. Returns its bytes up to the data section, or nothing where none differs or it
// is no GGUF file, which the host's own reader then says in its own words.
//
// gguf: the whole file. name: of the file. types: of the process. models: is told the treatments that the file's matrices need.
// reading: the model that this thread has read last, or nullptr; afterwards the one that this file belongs to, which is the same
// for a later part of a split model. remarks: sentences for the user are added to it.
// Memory: a small multiple of the header's bytes.
// Throws FormatError for a file that carries our types and is broken, or asks for what cannot be computed.
std::optional<std::string> translate_header(std::string_view gguf, const std::string & name, const ProcessTypes & types,
                                            Models & models, std::shared_ptr<Model> & reading,
                                            std::vector<std::string> & remarks);

}  // namespace tern
