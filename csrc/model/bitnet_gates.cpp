// Reading the keys of a BitNet, and finding what stands between its gates and squared ReLU.
#include "bitnet_gates.h"

namespace tern {

namespace {

// Whether the name is blk.N and `end`.
bool is_in_block(std::string_view name, std::string_view end) {
    const size_t dot = name.find_first_not_of("0123456789", 4);
    return name.substr(0, 4) == "blk." && dot != std::string_view::npos && name.substr(dot) == end;
}

}  // namespace

bool is_gate(const GgufTensor & tensor) {
    return is_in_block(tensor.name, ".ffn_gate.weight");
}

bool wants_squared_relu(const GgufHeader & header) {
    if (header.text("general.architecture") != "bitnet" || header.find(ACTIVATION_KEY) == nullptr) {
        return false;
    }
    const auto activation = header.text(ACTIVATION_KEY);
    if (activation != "silu" && activation != "relu2") {
        throw FormatError("key " + quoted(ACTIVATION_KEY) + " is " + (activation ? quoted(*activation) : "no string") +
                          "; 'silu' and 'relu2' are all that can be computed");
    }
    return activation == "relu2";
}

std::string obstacle_to_squared_relu(const GgufHeader & header, const ProcessTypes & types) {
    for (const GgufTensor & tensor : header.tensors) {
        if (is_gate(tensor) && types.treated(tensor.type) == 0) {
            const TensorTypeInfo * type = tensor_type_info(tensor.type);
            return std::string(tensor.name) + " is " + (type != nullptr ? type->name : "of another type");
        }
        if (is_in_block(tensor.name, ".ffn_gate.scale")) {
            return std::string(tensor.name) + " is applied to the product";
        }
    }
    return "";
}

void refuse_adapter_of_gates(const GgufHeader & header) {
    if (header.text("general.type") != "adapter" || header.text("general.architecture") != "bitnet") {
        return;
    }
    for (const GgufTensor & tensor : header.tensors) {
        if (tensor.name.find(".ffn_gate.weight.lora_") != std::string_view::npos) {
            throw FormatError("this LoRA changes ffn_gate, which a BitNet with squared ReLU cannot take at run time; "
                              "merge it with ternconv --lora");
        }
    }
}

}  // namespace tern
