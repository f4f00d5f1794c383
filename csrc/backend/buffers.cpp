// The buffer types of the devices: plain host memory, and host memory that stores ternary matrices in tiles.
#include "../cpu/streamed_memory.h"
#include "../host/buffer_types.h"
#include "backend.h"

#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>

namespace tern {

namespace {

constexpr size_t ALIGNMENT = 64;

size_t get_alignment(ggml_backend_buffer_type_t) {
    return ALIGNMENT;
}

// ---- plain host memory: the host's own CPU buffers under our name ----

const char * plain_get_name(ggml_backend_buffer_type_t) {
    return "TERN";
}

ggml_backend_buffer_t plain_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = host().ggml_backend_buft_alloc_buffer(host().ggml_backend_cpu_buffer_type(), size);
    if (buffer != nullptr) {
        buffer->buft = type;
        use_huge_pages(buffer->iface.get_base(buffer), buffer->size);  // the KV cache is here
    }
    return buffer;
}

bool plain_is_host(ggml_backend_buffer_type_t) {
    return true;
}

// ---- tiles ----

BufferType & tiled_type(TileLayout layout);

TileLayout layout_of(ggml_backend_buffer_type_t type) {
    return type == tiled_type(TileLayout::DENSE).handle() ? TileLayout::DENSE : TileLayout::FAST;
}

// A ternary matrix, or a stack of them: [n_in, n_out, count].
struct Matrices {
    const TernaryType & type;
    TileLayout layout;
    int64_t n_in;
    int64_t n_out;
    int64_t count;

    // In a buffer of this type, where it is tiled.
    Matrices(const ggml_tensor * w, ggml_backend_buffer_type_t buffer_type)
        : type(*ternary_type_of(w->type)), layout(layout_of(buffer_type)), n_in(w->ne[0]), n_out(w->ne[1]),
          count(w->ne[2] * w->ne[3]) {}
    explicit Matrices(const ggml_tensor * w) : Matrices(w, w->buffer->buft) {}

    size_t plain_bytes() const { return type.row_bytes(n_in) * static_cast<size_t>(n_out); }
    size_t tile_bytes() const { return tiled_bytes(type, layout, n_in, n_out); }

    void pack(const uint8_t * plain, uint8_t * tiles) const {
        for (int64_t i = 0; i < count; i++) {
            pack_tiles(type, layout, plain + i * plain_bytes(), n_in, n_out, tiles + i * tile_bytes());
        }
    }

    void unpack(const uint8_t * tiles, uint8_t * plain) const {
        for (int64_t i = 0; i < count; i++) {
            unpack_tiles(type, layout, tiles + i * tile_bytes(), n_in, n_out, plain + i * plain_bytes());
        }
    }
};

// A base-3 byte has 256 values for 243 meanings. Whether a row consists of the usual bytes, those that we write.
bool is_canonical(const TernaryType & type, const uint8_t * row, int64_t n_in) {
    uint8_t codes[MAX_BLOCK];
    uint8_t again[MAX_BLOCK];
    for (int64_t b = 0; b < n_in / type.block; b++, row += type.block_bytes) {
        uint16_t d;
        type.unpack_block(row, codes, &d);
        type.pack_block(codes, d, again);
        if (std::memcmp(row, again, static_cast<size_t>(type.block_bytes)) != 0) {
            return false;
        }
    }
    return true;
}

struct TiledBuffer {
    StreamedMemory memory;
    // Tensors with bytes that the tiles cannot give back, and those bytes.
    std::mutex mutex;
    std::unordered_map<const ggml_tensor *, std::vector<uint8_t>> originals;

    explicit TiledBuffer(size_t size) : memory(allocate_streamed(size)) {}
};

TiledBuffer & context_of(ggml_backend_buffer_t buffer) {
    return *static_cast<TiledBuffer *>(buffer->context);
}

void tiled_free_buffer(ggml_backend_buffer_t buffer) {
    delete &context_of(buffer);
}

void * tiled_get_base(ggml_backend_buffer_t buffer) {
    return context_of(buffer).memory.get();
}

// Zero, as in cleared memory, is a valid header: nothing is known of the matrix yet.
ggml_status tiled_init_tensor(ggml_backend_buffer_t, ggml_tensor * tensor) {
    if (is_tiled(tensor) && tensor->view_src == nullptr) {
        const Matrices m(tensor);
        for (int64_t i = 0; i < m.count; i++) {
            std::memset(static_cast<uint8_t *>(tensor->data) + i * m.tile_bytes(), 0, TILES_HEADER);
        }
    }
    return GGML_STATUS_SUCCESS;
}

// The whole tensor as the file has it.
std::vector<uint8_t> plain_bytes(TiledBuffer & context, const ggml_tensor * tensor) {
    const std::lock_guard<std::mutex> lock(context.mutex);
    const auto original = context.originals.find(tensor);
    if (original != context.originals.end()) {
        return original->second;
    }
    const Matrices m(tensor);
    std::vector<uint8_t> plain(m.plain_bytes() * m.count);
    m.unpack(static_cast<const uint8_t *>(tensor->data), plain.data());
    return plain;
}

// The name that a tensor has in the file. Where ggml's scheduler copies a weight to another device, it calls the copy
// "DEVICE#name#number".
std::string_view name_in_file(const ggml_tensor * w) {
    const std::string_view name = w->name;
    const size_t begin = name.find('#');
    const size_t end = name.rfind('#');
    return begin == end ? name : name.substr(begin + 1, end - begin - 1);
}

const Treatment * look_up(const ggml_tensor * w, const uint8_t * plain) {
    const Matrices m(w);
    return find_treatment(name_in_file(w), m.type.id, w->ne,
                          {reinterpret_cast<const char *>(plain), m.plain_bytes() * m.count});
}

void set_plain_bytes(TiledBuffer & context, ggml_tensor * tensor, const uint8_t * plain) {
    const Matrices m(tensor);
    auto * tiles = static_cast<uint8_t *>(tensor->data);
    m.pack(plain, tiles);
    if (is_treated(tensor->type)) {
        header_of_tiles(tiles).note = look_up(tensor, plain);
    }
    bool canonical = true;
    if (m.type.base_3) {
        for (int64_t row = 0; row < m.n_out * m.count && canonical; row++) {
            canonical = is_canonical(m.type, plain + row * m.type.row_bytes(m.n_in), m.n_in);
        }
    }
    const std::lock_guard<std::mutex> lock(context.mutex);
    context.originals.erase(tensor);
    if (!canonical) {
        context.originals.emplace(tensor, std::vector<uint8_t>(plain, plain + m.plain_bytes() * m.count));
    }
}

void tiled_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                      size_t size) {
    if (!is_tiled(tensor)) {
        std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
        return;
    }
    const Matrices m(tensor);
    if (offset == 0 && size == m.plain_bytes() * m.count) {
        set_plain_bytes(context_of(buffer), tensor, static_cast<const uint8_t *>(data));
        return;
    }
    std::vector<uint8_t> plain = plain_bytes(context_of(buffer), tensor);
    std::memcpy(plain.data() + offset, data, size);
    set_plain_bytes(context_of(buffer), tensor, plain.data());
}

void tiled_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                      size_t size) {
    if (!is_tiled(tensor)) {
        std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
        return;
    }
    const std::vector<uint8_t> plain = plain_bytes(context_of(buffer), tensor);
    std::memcpy(data, plain.data() + offset, size);
}

void tiled_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset,
                         size_t size) {
    const std::vector<uint8_t> bytes(size, value);
    tiled_set_tensor(buffer, tensor, bytes.data(), offset, size);
}

// Nobody asks for another value than 0, and no other makes tiles.
void tiled_clear(ggml_backend_buffer_t buffer, uint8_t) {
    TiledBuffer & context = context_of(buffer);
    std::memset(context.memory.get(), 0, buffer->size);
    const std::lock_guard<std::mutex> lock(context.mutex);
    context.originals.clear();
}

const ggml_backend_buffer_i TILED_BUFFER_INTERFACE = {
    /* .free_buffer   = */ tiled_free_buffer,
    /* .get_base      = */ tiled_get_base,
    /* .init_tensor   = */ tiled_init_tensor,
    /* .memset_tensor = */ tiled_memset_tensor,
    /* .set_tensor    = */ tiled_set_tensor,
    /* .get_tensor    = */ tiled_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ tiled_clear,
    /* .reset         = */ nullptr,
};

const char * tiled_get_name(ggml_backend_buffer_type_t type) {
    return layout_of(type) == TileLayout::DENSE ? "TERN_DENSE_TILES" : "TERN_TILES";
}

ggml_backend_buffer_t tiled_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    // Decode streams through all of this memory for every token.
    std::unique_ptr<TiledBuffer> context;
    try {
        context = std::make_unique<TiledBuffer>(size);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
    return host().ggml_backend_buffer_init(type, TILED_BUFFER_INTERFACE, context.release(), size);
}

size_t tiled_get_alloc_size(ggml_backend_buffer_type_t type, const ggml_tensor * tensor) {
    if (ternary_type_of(tensor->type) == nullptr) {
        return host().ggml_nbytes(tensor);
    }
    const Matrices m(tensor, type);
    return m.tile_bytes() * static_cast<size_t>(m.count);
}

bool tiled_is_host(ggml_backend_buffer_type_t) {
    return false;
}

BufferType & plain_type() {
    static BufferType type({
        /* .get_name       = */ plain_get_name,
        /* .alloc_buffer   = */ plain_alloc_buffer,
        /* .get_alignment  = */ get_alignment,
        /* .get_max_size   = */ nullptr,
        /* .get_alloc_size = */ nullptr,
        /* .is_host        = */ plain_is_host,
    });
    return type;
}

BufferType & tiled_type(TileLayout layout) {
    static const ggml_backend_buffer_type_i iface = {
        /* .get_name       = */ tiled_get_name,
        /* .alloc_buffer   = */ tiled_alloc_buffer,
        /* .get_alignment  = */ get_alignment,
        /* .get_max_size   = */ nullptr,
        /* .get_alloc_size = */ tiled_get_alloc_size,
        /* .is_host        = */ tiled_is_host,
    };
    static BufferType fast(iface);
    static BufferType dense(iface);
    return layout == TileLayout::DENSE ? dense : fast;
}

}  // namespace

ggml_backend_buffer_type_t plain_buffer_type() {
    return plain_type().handle();
}

ggml_backend_buffer_type_t tiled_buffer_type() {
    return tiled_type(layout_while_loading()).handle();
}

bool is_tiled_buffer_type(ggml_backend_buffer_type_t type) {
    return type == tiled_type(TileLayout::FAST).handle() || type == tiled_type(TileLayout::DENSE).handle();
}

ggml_backend_buffer_t plain_buffer_from_pointer(void * data, size_t size) {
    ggml_backend_buffer_t buffer = host().ggml_backend_cpu_buffer_from_ptr(data, size);
    if (buffer != nullptr) {
        buffer->buft = plain_buffer_type();
    }
    return buffer;
}

void set_buffer_devices(ggml_backend_dev_t plain, ggml_backend_dev_t tiled) {
    plain_type().set_device(plain);
    tiled_type(TileLayout::FAST).set_device(tiled);
    tiled_type(TileLayout::DENSE).set_device(tiled);
}

const Treatment * treatment_of(const ggml_tensor * w) {
    static const Treatment none;
    if (!is_treated(w->type)) {
        return &none;
    }
    const ggml_tensor * whole = w->view_src != nullptr ? w->view_src : w;
    const auto * data = static_cast<const uint8_t *>(whole->data);
    return is_tiled(whole) ? static_cast<const Treatment *>(header_of_tiles(data).note) : look_up(whole, data);
}

bool is_tiled(const ggml_tensor * w) {
    return w->buffer != nullptr && is_tiled_buffer_type(w->buffer->buft) && ternary_type_of(w->type) != nullptr;
}

Tiles tiles_of(const ggml_tensor * w, int64_t i) {
    const Matrices m(w);
    return tiles_of(m.type, m.layout, static_cast<const uint8_t *>(w->data) + static_cast<size_t>(i) * m.tile_bytes(),
                    m.n_in, m.n_out);
}

}  // namespace tern
