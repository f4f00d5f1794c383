// Reader of GGUF headers: metadata and tensor table of a file that nobody vouches for.
//
// Every length is checked against the bytes that are left before it is used, so a hostile header costs no more memory
// than the file has bytes, and every offset is checked against the file's size. Format: the GGUF specification,
// versions 2 and 3, little endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tern {

// What is wrong with a file; the message names the tensor or key, what was found and what was expected.
class FormatError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// A name for a message: whatever bytes a file puts there, one line of plain ASCII comes out.
std::string quoted(std::string_view name);

enum class GgufValueType : uint32_t {
    UINT8 = 0,
    INT8 = 1,
    UINT16 = 2,
    INT16 = 3,
    UINT32 = 4,
    INT32 = 5,
    FLOAT32 = 6,
    BOOL = 7,
    STRING = 8,
    ARRAY = 9,
    UINT64 = 10,
    INT64 = 11,
    FLOAT64 = 12,
};

// Size in bytes of one value of a fixed-size type; 0 for strings and arrays.
size_t gguf_value_size(GgufValueType type);

// One metadata value. `bytes` views the header: the raw values one after another, strings with their u64 lengths.
struct GgufValue {
    GgufValueType type;  // of the value, or of each element of an array
    bool is_array = false;
    uint64_t count = 1;  // elements; 1 for a plain value
    std::string_view bytes;
};

struct GgufKey {
    std::string_view name;
    GgufValue value;
};

struct GgufTensor {
    std::string_view name;
    uint32_t type = 0;  // id as in the file
    uint32_t n_dims = 0;
    uint64_t shape[4] = {1, 1, 1, 1};  // ggml's order: shape[0] is n_in, the contiguous dimension
    uint64_t offset = 0;               // from the start of the data section
    size_t type_position = 0;          // of the type id, from the start of the file

    uint64_t n_elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
};

struct GgufHeader {
    uint32_t version = 0;
    uint64_t alignment = 32;
    uint64_t data_offset = 0;  // of the data section, from the start of the file
    std::vector<GgufKey> metadata;
    std::vector<GgufTensor> tensors;

    const GgufValue * find(std::string_view key) const;
    // The value of a key; nothing where it is missing or of another type.
    std::optional<std::string_view> text(std::string_view key) const;
    std::optional<uint32_t> u32(std::string_view key) const;
};

// Parses the header at the start of `data`. The result views `data`.
// file_size: size of the whole file, for the check of the tensor offsets.
// Throws FormatError.
GgufHeader parse_gguf_header(std::string_view data, uint64_t file_size);

// Name, weights per block and bytes per block of a tensor type as known to GGUF files; nullptr if unknown to us.
struct TensorTypeInfo {
    uint32_t id;
    const char * name;
    uint32_t block;
    uint32_t block_bytes;
    uint32_t tail_bytes = 0;  // behind the blocks of a whole tensor
};
const TensorTypeInfo * tensor_type_info(uint32_t id);
// All known types: for iteration, [0, *count).
const TensorTypeInfo * tensor_types(size_t * count);

// Bytes that a tensor's data takes. Throws FormatError, naming the tensor, for an unknown type and for a shape whose
// rows are no whole number of blocks.
uint64_t tensor_bytes(const GgufTensor & tensor);

// Before PQ2_0 had an id of its own, its blocks of 128 weights were written under the id of Q2_0, whose blocks hold 64;
// only the sizes tell such a file apart. If this is one, its Q2_0 tensors become PQ2_0 in `header` and true is returned.
// Throws FormatError for a file that can be read both ways, such as one whose only such tensor has some hundred weights.
bool resolve_legacy_q2_0(GgufHeader & header, uint64_t file_size);

// Checks that each tensor's type is known, its data lies inside the file, aligned, and overlaps no other's.
// Throws FormatError.
void check_tensor_data(const GgufHeader & header, uint64_t file_size);

// A file mapped read-only for as long as the object lives.
class MappedFile {
  public:
    // Throws std::system_error.
    explicit MappedFile(const std::string & path);
    explicit MappedFile(int fd);  // the descriptor stays the caller's
    ~MappedFile();
    MappedFile(const MappedFile &) = delete;
    MappedFile & operator=(const MappedFile &) = delete;

    std::string_view bytes() const { return {data_, size_}; }

  private:
    void map(int fd);

    const char * data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace tern
