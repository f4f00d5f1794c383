// Memory of a GPU in which ternary tensors lie as their twins: stock buffers whose functions for bytes translate on the way.
//
// The treatment of a matrix (model/models.h) is noted in its `extra`, which no stock backend that we take over uses for weights.
#include "grafted_device.h"
#include "twin.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tern {

namespace {

// Bytes that are translated at a time.
constexpr size_t PIECE = size_t{16} << 20;

const char * offered_name(ggml_backend_buffer_type_t type) {
    return device_of_buffer_type(type)->name.c_str();
}

GraftedDevice & device_of(ggml_backend_buffer_t buffer) {
    return *device_of_buffer_type(buffer->buft);
}

int64_t row_count(const ggml_tensor * w) {
    return w->ne[1] * w->ne[2] * w->ne[3];
}

size_t row_bytes(const ggml_tensor * w) {
    return ternary_type_of(w->type)->row_bytes(w->ne[0]);
}

// Calls work(first, n) for pieces of the rows [begin, end).
template <typename Work> void in_pieces(const ggml_tensor * w, int64_t begin, int64_t end, const Work & work) {
    const auto at_a_time = static_cast<int64_t>(std::max<size_t>(1, PIECE / twin_row_bytes(w)));
    for (int64_t first = begin; first < end; first += at_a_time) {
        work(first, std::min(at_a_time, end - first));
    }
}

void write_rows(ggml_backend_buffer_t buffer, const ggml_tensor * w, int64_t begin, int64_t end, const uint8_t * rows) {
    ggml_tensor twin = twin_of(w);
    std::vector<uint8_t> bytes;
    in_pieces(w, begin, end, [&](int64_t first, int64_t n) {
        bytes.resize(static_cast<size_t>(n) * twin_row_bytes(w));
        to_twin(w, rows + static_cast<size_t>(first - begin) * row_bytes(w), n, bytes.data());
        device_of(buffer).stock_buffer.set_tensor(buffer, &twin, bytes.data(),
                                                  static_cast<size_t>(first) * twin_row_bytes(w), bytes.size());
    });
}

void read_rows(ggml_backend_buffer_t buffer, const ggml_tensor * w, int64_t begin, int64_t end, uint8_t * rows) {
    const ggml_tensor twin = twin_of(w);
    std::vector<uint8_t> bytes;
    in_pieces(w, begin, end, [&](int64_t first, int64_t n) {
        bytes.resize(static_cast<size_t>(n) * twin_row_bytes(w));
        device_of(buffer).stock_buffer.get_tensor(buffer, &twin, bytes.data(),
                                                  static_cast<size_t>(first) * twin_row_bytes(w), bytes.size());
        from_twin(w, bytes.data(), n, rows + static_cast<size_t>(first - begin) * row_bytes(w));
    });
}

// The rows that hold the bytes [offset, offset + size) of a tensor.
struct Rows {
    int64_t begin;
    int64_t end;
    size_t before;  // bytes of row `begin` in front of them

    Rows(const ggml_tensor * w, size_t offset, size_t size)
        : begin(static_cast<int64_t>(offset / row_bytes(w))),
          end(static_cast<int64_t>((offset + size + row_bytes(w) - 1) / row_bytes(w))), before(offset % row_bytes(w)) {}

    size_t bytes(const ggml_tensor * w) const { return static_cast<size_t>(end - begin) * row_bytes(w); }
};

// The whole tensor's bytes, as in the file, say what it needs.
void note_treatment(const GraftedDevice & device, ggml_tensor * w, const uint8_t * bytes) {
    const Treatment * treatment = device.facts.find_treatment(
        w->name, ternary_type_of(w->type)->id, w->ne,
        {reinterpret_cast<const char *>(bytes), static_cast<size_t>(row_count(w)) * row_bytes(w)});
    w->extra = const_cast<Treatment *>(treatment);
}

enum ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    const auto stock = device_of(buffer).stock_buffer.init_tensor;
    if (!has_twin(tensor->type)) {
        return stock != nullptr ? stock(buffer, tensor) : GGML_STATUS_SUCCESS;
    }
    tensor->extra = nullptr;
    if (stock == nullptr || tensor->view_src != nullptr) {
        return GGML_STATUS_SUCCESS;
    }
    ggml_tensor twin = twin_of(tensor);
    const enum ggml_status status = stock(buffer, &twin);
    return status == GGML_STATUS_SUCCESS && twin.extra != nullptr ? GGML_STATUS_FAILED : status;
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    if (!has_twin(tensor->type)) {
        device_of(buffer).stock_buffer.set_tensor(buffer, tensor, data, offset, size);
        return;
    }
    const auto * bytes = static_cast<const uint8_t *>(data);
    const Rows rows(tensor, offset, size);
    std::vector<uint8_t> whole;  // where bytes begin or end within a row
    if (rows.before != 0 || rows.bytes(tensor) != size) {
        whole.resize(rows.bytes(tensor));
        read_rows(buffer, tensor, rows.begin, rows.end, whole.data());
        std::memcpy(whole.data() + rows.before, data, size);
        bytes = whole.data();
    }
    write_rows(buffer, tensor, rows.begin, rows.end, bytes);
    if (is_treated(tensor->type)) {
        if (rows.end - rows.begin < row_count(tensor)) {
            whole.resize(static_cast<size_t>(row_count(tensor)) * row_bytes(tensor));
            read_rows(buffer, tensor, 0, row_count(tensor), whole.data());
            bytes = whole.data();
        }
        note_treatment(device_of(buffer), tensor, bytes);
    }
}

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    if (!has_twin(tensor->type)) {
        device_of(buffer).stock_buffer.get_tensor(buffer, tensor, data, offset, size);
        return;
    }
    const Rows rows(tensor, offset, size);
    std::vector<uint8_t> whole(rows.bytes(tensor));
    read_rows(buffer, tensor, rows.begin, rows.end, whole.data());
    std::memcpy(data, whole.data() + rows.before, size);
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    if (!has_twin(tensor->type)) {
        device_of(buffer).stock_buffer.memset_tensor(buffer, tensor, value, offset, size);
        return;
    }
    const std::vector<uint8_t> bytes(size, value);
    set_tensor(buffer, tensor, bytes.data(), offset, size);
}

// The host copies by reading and writing where this says no.
bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    const auto stock = device_of(buffer).stock_buffer.cpy_tensor;
    return stock != nullptr && !has_twin(dst->type) && !has_twin(src->type) && stock(buffer, src, dst);
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    GraftedDevice & device = *device_of_buffer_type(type);
    ggml_backend_buffer_t buffer = host().ggml_backend_buft_alloc_buffer(device.stock_buffer_type, size);
    if (buffer == nullptr) {
        return nullptr;
    }
    std::call_once(device.has_stock_buffer, [&] { device.stock_buffer = buffer->iface; });
    // free_buffer and get_base stay: by them stock backends tell their own buffers.
    buffer->iface.init_tensor = init_tensor;
    buffer->iface.set_tensor = set_tensor;
    buffer->iface.get_tensor = get_tensor;
    if (buffer->iface.memset_tensor != nullptr) {
        buffer->iface.memset_tensor = memset_tensor;
    }
    buffer->iface.set_tensor_2d = nullptr;  // the host then copies row by row
    buffer->iface.get_tensor_2d = nullptr;
    buffer->iface.cpy_tensor = cpy_tensor;
    buffer->buft = device.type_in_buffers.handle();
    return buffer;
}

size_t get_alloc_size(ggml_backend_buffer_type_t type, const ggml_tensor * tensor) {
    const ggml_backend_buffer_type_t stock = device_of_buffer_type(type)->stock_buffer_type;
    if (!has_twin(tensor->type)) {
        return host().ggml_backend_buft_get_alloc_size(stock, tensor);
    }
    const ggml_tensor twin = twin_of(tensor);
    return host().ggml_backend_buft_get_alloc_size(stock, &twin);
}

}  // namespace

GraftedDevice::GraftedDevice(ggml_backend_dev_t device, const ModelFacts & facts)
    : device(device), facts(facts), stock(device->iface),
      stock_buffer_type(host().ggml_backend_dev_buffer_type(device)),
      name(std::string(host().ggml_backend_buft_name(stock_buffer_type)) + "_TERN"),
      offered_type(stock_buffer_type, offered_name, alloc_buffer, get_alloc_size),
      type_in_buffers(stock_buffer_type, stock_buffer_type->iface.get_name, alloc_buffer, get_alloc_size) {}

const Treatment * gpu_treatment_of(const ggml_tensor * w) {
    static const Treatment none;
    if (!is_treated(w->type)) {
        return &none;
    }
    const ggml_tensor * whole = w->view_src != nullptr ? w->view_src : w;
    return static_cast<const Treatment *>(whole->extra);
}

}  // namespace tern
