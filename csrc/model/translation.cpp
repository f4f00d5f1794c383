// From the bytes of a file to those of its translated header: what is cheap to check comes first, what is built from the file's
// numbers last.
#include "translation.h"

#include "bitnet_gates.h"

#include <algorithm>
#include <cstring>

namespace tern {

namespace {

using Rotations = std::map<std::string_view, std::shared_ptr<Rotation>>;

constexpr std::string_view ROTATION_KEYS = "prism.hadamard.";

bool is_of_rotation(const GgufKey & key) {
    return key.name.substr(0, ROTATION_KEYS.size()) == ROTATION_KEYS;
}

bool is_rotated(const GgufHeader & header) {
    return std::any_of(header.metadata.begin(), header.metadata.end(), is_of_rotation);
}

// A number of a split model's part; `otherwise` where the header does not have it.
uint16_t split_number(const GgufHeader & header, const char * key, uint16_t otherwise) {
    const GgufValue * value = header.find(key);
    if (value != nullptr && !value->is_array && value->type == GgufValueType::UINT16) {
        std::memcpy(&otherwise, value->bytes.data(), sizeof(otherwise));
    }
    return otherwise;
}

// The model that a file belongs to. reading: as for translate_header().
std::shared_ptr<Model> model_of(const GgufHeader & header, const std::string & name,
                                const std::shared_ptr<Model> & reading) {
    const uint32_t n_parts = std::max<uint16_t>(1, split_number(header, "split.count", 1));
    const uint32_t number = split_number(header, "split.no", 0);
    std::shared_ptr<Model> model = reading;
    if (number == 0 || model == nullptr || model->n_parts != n_parts || model->n_read != number) {
        model = std::make_shared<Model>();
        model->name = name;
        model->n_parts = n_parts;
        model->n_read = number;
        model->squared_relu = wants_squared_relu(header);
    }
    model->n_read++;
    model->dense.reset();
    for (const GgufTensor & tensor : header.tensors) {
        model->n_weights[tensor.type] += static_cast<double>(tensor.n_elements());
    }
    return model;
}

// Throws FormatError for a contract that is broken or cannot be honoured here.
Rotations find_rotations(const GgufHeader & header, const Model & model, const ProcessTypes & types) {
    if (!is_rotated(header)) {
        return {};
    }
    if (model.n_parts > 1) {
        throw FormatError(
            "its weights are Hadamard-rotated (prism.hadamard.*), and it is split into several files, which "
            "do not all say so; join them with tern repack");
    }
    Rotations rotations = read_hadamard_contract(header)->rotations;
    for (const GgufTensor & tensor : header.tensors) {
        if (rotations.count(tensor.name) != 0 && types.treated(tensor.type) == 0) {
            const TensorTypeInfo * type = tensor_type_info(tensor.type);
            throw FormatError(
                "key 'prism.hadamard.weight_names' or 'prism.hadamard.inverse_weight_names' names " +
                quoted(tensor.name) + " of type " + (type != nullptr ? type->name : std::to_string(tensor.type)) +
                ", which llama.cpp would multiply without its rotation; PQ2_0, PTQ1_0 and Q2_0 can be rotated");
        }
    }
    return rotations;
}

// The treatments of the tensors, in their order.
std::vector<Treatment> find_treatments(const GgufHeader & header, const Model & model, const ProcessTypes & types,
                                       Models & models, std::vector<std::string> & remarks) {
    const Rotations rotations = find_rotations(header, model, types);
    bool squared_relu = model.squared_relu;
    if (squared_relu) {
        const std::string obstacle = obstacle_to_squared_relu(header, types);
        squared_relu = obstacle.empty();
        if (!squared_relu) {
            remarks.push_back("computes SiLU where the model was trained with squared ReLU, since " + obstacle +
                              "; convert with --type ptq1_0 or pq2_0");
        }
    }
    std::vector<Treatment> treatments;
    treatments.reserve(header.tensors.size());
    for (const GgufTensor & tensor : header.tensors) {
        const auto rotation = rotations.find(tensor.name);
        treatments.push_back(
            {squared_relu && is_gate(tensor), rotation != rotations.end() ? models.keep(rotation->second) : nullptr});
    }
    return treatments;
}

}  // namespace

std::optional<std::string> translate_header(std::string_view gguf, const std::string & name, const ProcessTypes & types,
                                            Models & models, std::shared_ptr<Model> & reading,
                                            std::vector<std::string> & remarks) {
    GgufHeader header;
    try {
        header = parse_gguf_header(gguf, gguf.size());
    } catch (const FormatError &) {
        return std::nullopt;
    }
    bool is_ours = resolve_legacy_q2_0(header, gguf.size());
    for (const GgufTensor & tensor : header.tensors) {
        if (types.is_ours(tensor.type)) {
            throw FormatError("tensor " + quoted(tensor.name) + " has type " + std::to_string(tensor.type) +
                              ", which is retired and must not stand in a file");
        }
        is_ours = is_ours || types.plain(tensor.type) != tensor.type;
    }
    reading = model_of(header, name, reading);
    if (models.any_squared_relu()) {
        refuse_adapter_of_gates(header);
    }
    if (!is_ours && !reading->squared_relu && !is_rotated(header)) {
        return std::nullopt;
    }
    check_tensor_data(header, gguf.size());
    const std::vector<Treatment> treatments = find_treatments(header, *reading, types, models, remarks);

    std::string bytes(gguf.substr(0, header.data_offset));
    std::vector<Models::Entry> entries;
    bool has_squared_relu = false;
    for (size_t i = 0; i < header.tensors.size(); i++) {
        const GgufTensor & tensor = header.tensors[i];
        const uint32_t type = treatments[i].is_none() ? types.plain(tensor.type) : types.treated(tensor.type);
        std::memcpy(&bytes[tensor.type_position], &type, sizeof(type));
        has_squared_relu = has_squared_relu || treatments[i].squared_relu;
        if (!treatments[i].is_none()) {
            entries.push_back(
                {&tensor, gguf.substr(header.data_offset + tensor.offset, tensor_bytes(tensor)), treatments[i]});
        }
    }
    // A host that knows these keys would do a second time what is done already.
    for (const GgufKey & key : header.metadata) {
        if (is_of_rotation(key) || (key.name == ACTIVATION_KEY && has_squared_relu)) {
            bytes[static_cast<size_t>(key.name.data() - gguf.data()) + key.name.find('.')] = '-';
        }
    }
    models.remember(entries);
    return bytes != gguf.substr(0, header.data_offset) ? std::optional(std::move(bytes)) : std::nullopt;
}

}  // namespace tern
