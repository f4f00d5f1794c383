// libFuzzer target for the readers of GGUF headers and of the contract of rotated weights: whatever the bytes, they return or
// throw FormatError.
//
//   tests/fuzz/run.sh [SECONDS]      builds with clang under ASan and UBSan and runs from tests/fuzz/corpus
#include "format/gguf_header.h"
#include "format/hadamard.h"

#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    const std::string_view bytes(reinterpret_cast<const char *>(data), size);
    uint64_t seen = 0;
    try {
        tern::GgufHeader header = tern::parse_gguf_header(bytes, size);
        // Everything that is handed out must lie inside the input: read it all.
        for (const tern::GgufKey & key : header.metadata) {
            for (const char c : key.value.bytes) {
                seen += static_cast<unsigned char>(c);
            }
            seen += header.find(key.name) == &key.value ? 0 : 1;
        }
        for (const tern::GgufTensor & tensor : header.tensors) {
            if (tensor.type_position + sizeof(uint32_t) > size) {
                __builtin_trap();
            }
            seen += tensor.name.size();
        }
        seen += tern::resolve_legacy_q2_0(header, size) ? 1 : 0;
        tern::check_tensor_data(header, size);
        for (const tern::GgufTensor & tensor : header.tensors) {
            // What the check lets pass can be read.
            const uint64_t end = header.data_offset + tensor.offset + tern::tensor_bytes(tensor);
            if (end > size) {
                __builtin_trap();
            }
            seen += bytes[end - 1];
        }
        if (const auto contract = tern::read_hadamard_contract(header)) {
            for (const auto & [name, rotation] : contract->rotations) {
                rotation.check();
                // P and its inverse touch nothing outside a row.
                std::vector<float> row(static_cast<size_t>(rotation.n_in), 1.0f);
                std::vector<float> out(row.size());
                if (row.size() <= 4096) {
                    tern::permute(rotation, row.data(), 0, rotation.n_in, out.data());
                    tern::permute_back(rotation, out.data(), row.data());
                }
                seen += name.size();
            }
        }
    } catch (const tern::FormatError &) {
        return 0;
    }
    static volatile uint64_t sink;
    sink = seen;
    return 0;
}
