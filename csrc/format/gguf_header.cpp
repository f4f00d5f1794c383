// The GGUF header reader; the rules of safety stand in gguf_header.h.
#include "gguf_header.h"

#include "float16.h"
#include "ternary_types.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <unordered_set>

namespace tern {

namespace {

constexpr uint32_t MAX_DIMS = 4;
constexpr uint64_t MAX_TENSOR_NAME = 63;  // ggml keeps names in 64 bytes with their terminator
constexpr uint64_t MAX_KEY = 65535;       // GGUF specification
// The shortest entries that can stand in a header: they bound the counts before anything is allocated.
constexpr uint64_t MIN_KEY_BYTES = 8 + 1 + 4 + 1;
constexpr uint64_t MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8;

const TensorTypeInfo TENSOR_TYPES[] = {
    {0, "F32", 1, 4},
    {1, "F16", 1, 2},
    {2, "Q4_0", 32, 18},
    {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},
    {7, "Q5_1", 32, 24},
    {8, "Q8_0", 32, 34},
    {9, "Q8_1", 32, 36},
    {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},
    {12, "Q4_K", 256, 144},
    {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},
    {15, "Q8_K", 256, 292},
    {16, "IQ2_XXS", 256, 66},
    {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98},
    {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},
    {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},
    {23, "IQ4_XS", 256, 136},
    {24, "I8", 1, 1},
    {25, "I16", 1, 2},
    {26, "I32", 1, 4},
    {27, "I64", 1, 8},
    {28, "F64", 1, 8},
    {29, "IQ1_M", 256, 56},
    {30, "BF16", 1, 2},
    {TYPE_TQ1_0, "TQ1_0", 256, 54},
    {TYPE_TQ2_0, "TQ2_0", 256, 66},
    // bitnet.cpp's own type: the tensor's one fp32 scale is in the tail. Stock llama.cpp never used the id in that way.
    {36, "I2_S", 128, 32, 32},
    {39, "MXFP4", 32, 17},
    {40, "NVFP4", 64, 36},
    {41, "Q1_0", 128, 18},
    {TYPE_Q2_0, "Q2_0", 64, 18},
    {TYPE_PQ2_0, "PQ2_0", 128, 34},
    {TYPE_PTQ1_0, "PTQ1_0", 128, 28},
};

// A cursor that never reads past the end.
class Reader {
  public:
    explicit Reader(std::string_view data) : data_(data) {}

    size_t position() const { return position_; }
    uint64_t left() const { return data_.size() - position_; }

    std::string_view take(uint64_t n, const char * what) {
        if (n > left()) {
            throw FormatError(std::string("the file ends inside ") + what + ": " + std::to_string(n) +
                              " bytes needed, " + std::to_string(left()) + " left; it is truncated or corrupt");
        }
        const std::string_view bytes = data_.substr(position_, n);
        position_ += n;
        return bytes;
    }

    template <typename T> T number(const char * what) {
        T value;
        std::memcpy(&value, take(sizeof(T), what).data(), sizeof(T));
        return value;
    }

    std::string_view string(const char * what) { return take(number<uint64_t>(what), what); }

  private:
    std::string_view data_;
    size_t position_ = 0;
};

GgufValueType value_type(uint32_t id, std::string_view key) {
    if (id > static_cast<uint32_t>(GgufValueType::FLOAT64)) {
        throw FormatError("key " + quoted(key) + " has unknown value type " + std::to_string(id));
    }
    return static_cast<GgufValueType>(id);
}

// Views `count` values of one type, having read past them.
std::string_view read_values(Reader & in, GgufValueType type, uint64_t count, std::string_view key) {
    const size_t size = gguf_value_size(type);
    if (size != 0) {
        if (count > in.left() / size) {
            throw FormatError("key " + quoted(key) + " claims " + std::to_string(count) +
                              " values, more than the file holds");
        }
        return in.take(count * size, "a metadata value");
    }
    if (count > in.left() / 8) {
        throw FormatError("key " + quoted(key) + " claims " + std::to_string(count) +
                          " strings, more than the file holds");
    }
    Reader ahead = in;
    for (uint64_t i = 0; i < count; i++) {
        ahead.string("a metadata string");
    }
    return in.take(ahead.position() - in.position(), "a metadata value");
}

GgufKey read_key(Reader & in) {
    GgufKey key;
    key.name = in.string("a metadata key");
    if (key.name.empty() || key.name.size() > MAX_KEY) {
        throw FormatError("a metadata key is " + std::to_string(key.name.size()) +
                          " bytes long; 1 to 65535 are allowed");
    }
    key.value.type = value_type(in.number<uint32_t>("a metadata value"), key.name);
    if (key.value.type == GgufValueType::ARRAY) {
        key.value.is_array = true;
        key.value.type = value_type(in.number<uint32_t>("a metadata array"), key.name);
        if (key.value.type == GgufValueType::ARRAY) {
            throw FormatError("key " + quoted(key.name) + " is an array of arrays, which llama.cpp does not read");
        }
        key.value.count = in.number<uint64_t>("a metadata array");
    }
    key.value.bytes = read_values(in, key.value.type, key.value.count, key.name);
    return key;
}

GgufTensor read_tensor(Reader & in) {
    GgufTensor tensor;
    tensor.name = in.string("a tensor name");
    if (tensor.name.empty() || tensor.name.size() > MAX_TENSOR_NAME) {
        throw FormatError("a tensor name is " + std::to_string(tensor.name.size()) +
                          " bytes long; 1 to 63 are allowed");
    }
    tensor.n_dims = in.number<uint32_t>("the tensor table");
    if (tensor.n_dims == 0 || tensor.n_dims > MAX_DIMS) {
        throw FormatError("tensor " + quoted(tensor.name) + " has " + std::to_string(tensor.n_dims) +
                          " dimensions; 1 to 4 are allowed");
    }
    uint64_t elements = 1;
    for (uint32_t d = 0; d < tensor.n_dims; d++) {
        const uint64_t size = in.number<uint64_t>("the tensor table");
        if (size == 0 || size > INT64_MAX / elements) {
            throw FormatError("tensor " + quoted(tensor.name) + " has an impossible shape: dimension " +
                              std::to_string(d) + " is " + std::to_string(size));
        }
        elements *= size;
        tensor.shape[d] = size;
    }
    tensor.type_position = in.position();
    tensor.type = in.number<uint32_t>("the tensor table");
    tensor.offset = in.number<uint64_t>("the tensor table");
    return tensor;
}

}  // namespace

std::string quoted(std::string_view name) {
    std::string text = "'";
    for (const char c : name.substr(0, 80)) {
        if (c >= ' ' && c <= '~') {
            text += c;
        } else {
            const char * digits = "0123456789abcdef";
            text += {'\\', 'x', digits[static_cast<unsigned char>(c) >> 4], digits[c & 15]};
        }
    }
    return text + "'";
}

size_t gguf_value_size(GgufValueType type) {
    switch (type) {
    case GgufValueType::UINT8:
    case GgufValueType::INT8:
    case GgufValueType::BOOL: return 1;
    case GgufValueType::UINT16:
    case GgufValueType::INT16: return 2;
    case GgufValueType::UINT32:
    case GgufValueType::INT32:
    case GgufValueType::FLOAT32: return 4;
    case GgufValueType::UINT64:
    case GgufValueType::INT64:
    case GgufValueType::FLOAT64: return 8;
    case GgufValueType::STRING:
    case GgufValueType::ARRAY: break;
    }
    return 0;
}

const GgufValue * GgufHeader::find(std::string_view key) const {
    for (const GgufKey & k : metadata) {
        if (k.name == key) {
            return &k.value;
        }
    }
    return nullptr;
}

std::optional<std::string_view> GgufHeader::text(std::string_view key) const {
    const GgufValue * value = find(key);
    if (value == nullptr || value->is_array || value->type != GgufValueType::STRING) {
        return std::nullopt;
    }
    return value->bytes.substr(sizeof(uint64_t));
}

std::optional<uint32_t> GgufHeader::u32(std::string_view key) const {
    const GgufValue * value = find(key);
    if (value == nullptr || value->is_array || value->type != GgufValueType::UINT32) {
        return std::nullopt;
    }
    uint32_t number;
    std::memcpy(&number, value->bytes.data(), sizeof(number));
    return number;
}

GgufHeader parse_gguf_header(std::string_view data, uint64_t file_size) {
    Reader in(data);
    if (data.size() < 4 || in.take(4, "the magic") != "GGUF") {
        throw FormatError("not a GGUF file: it does not begin with 'GGUF'");
    }
    GgufHeader header;
    header.version = in.number<uint32_t>("the header");
    if (header.version != 2 && header.version != 3) {
        throw FormatError("GGUF version " + std::to_string(header.version) +
                          " is not supported; 2 and 3 are (little endian)");
    }
    const uint64_t n_tensors = in.number<uint64_t>("the header");
    const uint64_t n_keys = in.number<uint64_t>("the header");
    if (n_keys > in.left() / MIN_KEY_BYTES) {
        throw FormatError("the header claims " + std::to_string(n_keys) + " metadata keys, more than the file holds");
    }
    if (n_tensors > in.left() / MIN_TENSOR_BYTES) {
        throw FormatError("the header claims " + std::to_string(n_tensors) + " tensors, more than the file holds");
    }

    std::unordered_set<std::string_view> names;
    header.metadata.reserve(n_keys);
    for (uint64_t i = 0; i < n_keys; i++) {
        header.metadata.push_back(read_key(in));
        if (!names.insert(header.metadata.back().name).second) {
            throw FormatError("key " + quoted(header.metadata.back().name) + " appears twice");
        }
    }
    if (header.find("general.alignment") != nullptr) {
        const std::optional<uint32_t> value = header.u32("general.alignment");
        if (!value) {
            throw FormatError("key 'general.alignment' is not a u32");
        }
        if (*value == 0 || (*value & (*value - 1)) != 0) {
            throw FormatError("key 'general.alignment' is " + std::to_string(*value) + ", not a power of two");
        }
        header.alignment = *value;
    }

    names.clear();
    header.tensors.reserve(n_tensors);
    for (uint64_t i = 0; i < n_tensors; i++) {
        header.tensors.push_back(read_tensor(in));
        if (!names.insert(header.tensors.back().name).second) {
            throw FormatError("tensor " + quoted(header.tensors.back().name) + " appears twice");
        }
    }
    header.data_offset = (in.position() + header.alignment - 1) / header.alignment * header.alignment;
    if (header.data_offset > file_size && !header.tensors.empty()) {
        throw FormatError("the file ends before its tensor data; it is truncated");
    }
    return header;
}

const TensorTypeInfo * tensor_types(size_t * count) {
    *count = sizeof(TENSOR_TYPES) / sizeof(TENSOR_TYPES[0]);
    return TENSOR_TYPES;
}

const TensorTypeInfo * tensor_type_info(uint32_t id) {
    for (const TensorTypeInfo & type : TENSOR_TYPES) {
        if (type.id == id) {
            return &type;
        }
    }
    return nullptr;
}

uint64_t tensor_bytes(const GgufTensor & tensor) {
    const TensorTypeInfo * type = tensor_type_info(tensor.type);
    if (type == nullptr) {
        throw FormatError("tensor " + quoted(tensor.name) + " has unknown type " + std::to_string(tensor.type));
    }
    if (tensor.shape[0] % type->block != 0) {
        throw FormatError("tensor " + quoted(tensor.name) + " has rows of " + std::to_string(tensor.shape[0]) +
                          " weights, which is no multiple of the " + std::to_string(type->block) + " in a block of " +
                          type->name);
    }
    const uint64_t blocks = tensor.n_elements() / type->block;
    if (blocks > static_cast<uint64_t>((INT64_MAX - type->tail_bytes) / type->block_bytes)) {
        throw FormatError("tensor " + quoted(tensor.name) + " has an impossible shape");
    }
    return blocks * type->block_bytes + type->tail_bytes;
}

bool resolve_legacy_q2_0(GgufHeader & header, uint64_t file_size) {
    const uint64_t data_size = file_size - std::min(header.data_offset, file_size);
    std::vector<uint64_t> ends = {data_size};
    for (const GgufTensor & tensor : header.tensors) {
        ends.push_back(tensor.offset);
    }
    std::sort(ends.begin(), ends.end());

    // A tensor tells by the space it has, where that is exactly what blocks of one size take and not of the other.
    bool any_says_64 = false;
    bool any_says_128 = false;
    const GgufTensor * undecided = nullptr;
    for (const GgufTensor & tensor : header.tensors) {
        if (tensor.type != TYPE_Q2_0) {
            continue;
        }
        const auto end = std::upper_bound(ends.begin(), ends.end(), tensor.offset);
        if (tensor.shape[0] % 128 != 0 || end == ends.end()) {
            return false;
        }
        const uint64_t space = *end - tensor.offset;
        const auto takes = [&](uint32_t type) {
            GgufTensor other = tensor;
            other.type = type;
            const uint64_t bytes = tensor_bytes(other);
            const uint64_t padded = (bytes + header.alignment - 1) / header.alignment * header.alignment;
            return space == padded || (space == bytes && *end == data_size);
        };
        const bool takes_64 = takes(TYPE_Q2_0);
        const bool takes_128 = takes(TYPE_PQ2_0);
        any_says_64 = any_says_64 || (takes_64 && !takes_128);
        any_says_128 = any_says_128 || (takes_128 && !takes_64);
        undecided = &tensor;
    }
    if (undecided == nullptr || any_says_64) {
        return false;
    }
    if (!any_says_128) {
        throw FormatError(
            "tensor " + quoted(undecided->name) +
            " has type Q2_0, whose blocks hold 64 weights or, in files from before PQ2_0 had an id of its "
            "own, 128; the space that it has does not tell which");
    }
    for (GgufTensor & tensor : header.tensors) {
        tensor.type = tensor.type == TYPE_Q2_0 ? uint32_t{TYPE_PQ2_0} : tensor.type;
    }
    return true;
}

void check_tensor_data(const GgufHeader & header, uint64_t file_size) {
    const uint64_t data_size = file_size - std::min(header.data_offset, file_size);
    std::vector<const GgufTensor *> by_offset;
    for (const GgufTensor & tensor : header.tensors) {
        if (tensor.offset % header.alignment != 0) {
            throw FormatError("the data of tensor " + quoted(tensor.name) + " begins at " +
                              std::to_string(tensor.offset) + ", which is not aligned to " +
                              std::to_string(header.alignment));
        }
        const uint64_t bytes = tensor_bytes(tensor);
        if (tensor.offset > data_size || bytes > data_size - tensor.offset) {
            throw FormatError("the data of tensor " + quoted(tensor.name) + " ends at " +
                              std::to_string(tensor.offset) + " + " + std::to_string(bytes) + " bytes, beyond the " +
                              std::to_string(data_size) + " bytes of data in the file; it is truncated or corrupt");
        }
        by_offset.push_back(&tensor);
    }
    std::sort(by_offset.begin(), by_offset.end(), [](const auto * a, const auto * b) { return a->offset < b->offset; });
    for (size_t i = 1; i < by_offset.size(); i++) {
        if (by_offset[i]->offset - by_offset[i - 1]->offset < tensor_bytes(*by_offset[i - 1])) {
            throw FormatError("the data of tensors " + quoted(by_offset[i - 1]->name) + " and " +
                              quoted(by_offset[i]->name) + " overlap");
        }
    }
}

MappedFile::MappedFile(const std::string & path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        throw std::system_error(errno, std::generic_category(), path);
    }
    try {
        map(fd);
    } catch (...) {
        close(fd);
        throw;
    }
    close(fd);
}

MappedFile::MappedFile(int fd) {
    map(fd);
}

void MappedFile::map(int fd) {
    struct stat status;
    if (fstat(fd, &status) != 0) {
        throw std::system_error(errno, std::generic_category(), "fstat");
    }
    if (!S_ISREG(status.st_mode)) {
        throw std::system_error(EINVAL, std::generic_category(), "not a regular file");
    }
    size_ = static_cast<size_t>(status.st_size);
    if (size_ == 0) {
        return;
    }
    void * data = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(), "mmap");
    }
    data_ = static_cast<const char *>(data);
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) {
        munmap(const_cast<char *>(data_), size_);
    }
}

}  // namespace tern
