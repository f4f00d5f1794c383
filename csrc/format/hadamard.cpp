// Reading and checking the contract, key by key.
#include "hadamard.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace tern {

namespace {

constexpr std::string_view PREFIX = "prism.hadamard.";

const char * const KEYS[] = {"version",     "block_size",    "transform",           "axis",
                             "sign_mode",   "sign_widths",   "sign_values",         "weight_names",
                             "tied_output", "gdn_v_grouped", "inverse_weight_names"};

const char * const KINDS[] = {
    "attn_q",         "attn_k",       "attn_v",         "attn_qkv",         "attn_gate",   "attn_output",
    "ffn_gate",       "ffn_up",       "ffn_down",       "ffn_gate_exps",    "ffn_up_exps", "ffn_down_exps",
    "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate_up_exps", "ssm_out",
};

constexpr std::string_view EMBEDDING = "token_embd.weight";
constexpr std::string_view HEAD = "output.weight";

[[noreturn]] void refuse(std::string_view key, const std::string & why) {
    throw FormatError("key '" + std::string(key) + "' " + why);
}

std::string full_key(std::string_view key) {
    return std::string(PREFIX) + std::string(key);
}

// An array of numbers, integers of any size or floats, in the bytes of the file.
class Numbers {
  public:
    Numbers() = default;
    explicit Numbers(const GgufValue & value) : count_(value.count), type_(value.type), bytes_(value.bytes) {}

    uint64_t count() const { return count_; }

    // i < count()
    double operator[](uint64_t i) const {
        switch (type_) {
        case GgufValueType::UINT8: return at<uint8_t>(i);
        case GgufValueType::INT8: return at<int8_t>(i);
        case GgufValueType::UINT16: return at<uint16_t>(i);
        case GgufValueType::INT16: return at<int16_t>(i);
        case GgufValueType::UINT32: return at<uint32_t>(i);
        case GgufValueType::INT32: return at<int32_t>(i);
        case GgufValueType::UINT64: return at<uint64_t>(i);
        case GgufValueType::INT64: return at<int64_t>(i);
        case GgufValueType::FLOAT32: return at<float>(i);
        case GgufValueType::FLOAT64: return at<double>(i);
        case GgufValueType::BOOL:
        case GgufValueType::STRING:
        case GgufValueType::ARRAY: break;  // never an array of numbers
        }
        return 0;
    }

  private:
    template <typename T> double at(uint64_t i) const {
        T number;
        std::memcpy(&number, bytes_.data() + i * sizeof(T), sizeof(T));
        return static_cast<double>(number);
    }

    uint64_t count_ = 0;
    GgufValueType type_ = GgufValueType::UINT8;
    std::string_view bytes_;
};

// The reader of one header's keys. `key` is without the prefix.
class Keys {
  public:
    explicit Keys(const GgufHeader & header) : header_(header) {}

    [[noreturn]] static void refuse(std::string_view key, const std::string & why) { tern::refuse(full_key(key), why); }

    const GgufValue * find(std::string_view key) const { return header_.find(full_key(key)); }

    void require(std::string_view key) const {
        if (find(key) == nullptr) {
            refuse(key, "is missing");
        }
    }

    uint32_t u32(std::string_view key) const {
        require(key);
        const std::optional<uint32_t> number = header_.u32(full_key(key));
        if (!number) {
            refuse(key, "is not a u32");
        }
        return *number;
    }

    bool boolean(std::string_view key) const {
        const GgufValue * value = find(key);
        if (value == nullptr) {
            return false;
        }
        if (value->is_array || value->type != GgufValueType::BOOL) {
            refuse(key, "is not a bool");
        }
        return value->bytes[0] != 0;
    }

    std::string_view text(std::string_view key) const {
        require(key);
        const std::optional<std::string_view> text = header_.text(full_key(key));
        if (!text) {
            refuse(key, "is not a string");
        }
        return *text;
    }

    void require_text(std::string_view key, std::string_view wanted) const {
        const std::string_view found = text(key);
        if (found != wanted) {
            refuse(key, "is " + quoted(found) + "; " + quoted(wanted) + " is all that can be computed");
        }
    }

    // A missing array is an empty one.
    std::vector<std::string_view> texts(std::string_view key) const {
        std::vector<std::string_view> found;
        const GgufValue * value = find(key);
        if (value == nullptr) {
            return found;
        }
        if (!value->is_array || value->type != GgufValueType::STRING) {
            refuse(key, "is not an array of strings");
        }
        std::string_view bytes = value->bytes;
        for (uint64_t i = 0; i < value->count; i++) {
            uint64_t length;
            std::memcpy(&length, bytes.data(), sizeof(length));
            found.push_back(bytes.substr(sizeof(length), length));
            bytes.remove_prefix(sizeof(length) + length);
        }
        return found;
    }

    // A missing array is an empty one.
    Numbers numbers(std::string_view key) const {
        const GgufValue * value = find(key);
        if (value == nullptr) {
            return Numbers();
        }
        if (!value->is_array || value->type == GgufValueType::STRING || value->type == GgufValueType::BOOL) {
            refuse(key, "is not an array of numbers");
        }
        return Numbers(*value);
    }

  private:
    const GgufHeader & header_;
};

bool is_power_of_two(uint64_t n) {
    return n != 0 && (n & (n - 1)) == 0;
}

// Whether the name is that of a weight whose activation the contract lets be rotated.
bool may_be_folded(std::string_view name) {
    if (name == HEAD) {
        return true;
    }
    constexpr std::string_view BLOCK = "blk.";
    constexpr std::string_view END = ".weight";
    if (name.substr(0, BLOCK.size()) != BLOCK || name.size() < END.size() ||
        name.substr(name.size() - END.size()) != END) {
        return false;
    }
    name = name.substr(BLOCK.size(), name.size() - BLOCK.size() - END.size());
    const size_t dot = name.find_first_not_of("0123456789");
    if (dot == 0 || dot == std::string_view::npos || name[dot] != '.') {
        return false;
    }
    const std::string_view kind = name.substr(dot + 1);
    return std::find(std::begin(KINDS), std::end(KINDS), kind) != std::end(KINDS);
}

bool is_ssm_out(std::string_view name) {
    constexpr std::string_view END = ".ssm_out.weight";
    return name.size() > END.size() && name.substr(name.size() - END.size()) == END;
}

using Tensors = std::unordered_map<std::string_view, const GgufTensor *>;

// A tensor of the file that `key` names.
const GgufTensor & find_matrix(const Tensors & tensors, const char * key, std::string_view name) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) {
        Keys::refuse(key, "names " + quoted(name) + ", which is not in the file");
    }
    if (found->second->n_dims < 2) {
        Keys::refuse(key, "names " + quoted(name) + ", which is not a matrix");
    }
    return *found->second;
}

std::string_view architecture_of(const GgufHeader & header) {
    const std::string_view found = header.text("general.architecture").value_or(std::string_view());
    if (std::find(ROTATED_ARCHITECTURES.begin(), ROTATED_ARCHITECTURES.end(), found) == ROTATED_ARCHITECTURES.end()) {
        refuse("general.architecture",
               "is " + quoted(found) +
                   ", for which rotated weights (prism.hadamard.*) are not defined; they are for "
                   "llama, qwen3, qwen3moe, qwen35, qwen35moe and qwen3next");
    }
    return found;
}

// A count that P needs.
int64_t head_count(const GgufHeader & header, std::string_view architecture, const char * name) {
    const std::string key = std::string(architecture) + name;
    const std::optional<uint32_t> count = header.u32(key);
    if (!count) {
        Keys::refuse("gdn_v_grouped", "is true, but '" + key + "' is not a u32 in the file");
    }
    return *count;
}

void read_signs(const Keys & keys, HadamardContract & contract) {
    const std::string_view mode = keys.text("sign_mode");
    if (mode != "identity" && mode != "explicit") {
        Keys::refuse("sign_mode", "is " + quoted(mode) + "; 'identity' and 'explicit' are all that can be computed");
    }
    contract.explicit_signs = mode == "explicit";
    const Numbers widths = keys.numbers("sign_widths");
    const Numbers values = keys.numbers("sign_values");
    const uint64_t n_widths = widths.count();
    const uint64_t n_values = values.count();
    if (!contract.explicit_signs) {
        if (n_widths != 0 || n_values != 0) {
            Keys::refuse(n_widths != 0 ? "sign_widths" : "sign_values",
                         "is there although 'prism.hadamard.sign_mode' is 'identity'");
        }
        return;
    }
    if (n_widths == 0) {
        Keys::refuse("sign_widths", "is missing or empty although 'prism.hadamard.sign_mode' is 'explicit'");
    }
    uint64_t begin = 0;
    for (uint64_t w = 0; w < n_widths; w++) {
        const double width = widths[w];
        if (!(width >= 1 && width <= static_cast<double>(n_values - begin)) || width != std::floor(width)) {
            Keys::refuse("sign_widths", "does not match 'prism.hadamard.sign_values', which holds " +
                                            std::to_string(n_values) + " values");
        }
        const auto n = static_cast<uint64_t>(width);
        std::vector<int8_t> & signs = contract.signs[n];
        if (!signs.empty()) {
            Keys::refuse("sign_widths", "has the width " + std::to_string(n) + " twice");
        }
        signs.reserve(n);
        for (uint64_t i = begin; i < begin + n; i++) {
            const double sign = values[i];
            if (sign != 1 && sign != -1) {
                Keys::refuse("sign_values", "has a value other than -1 and +1 at position " + std::to_string(i));
            }
            signs.push_back(static_cast<int8_t>(sign));
        }
        begin += n;
    }
    if (begin != n_values) {
        Keys::refuse("sign_values", "holds " + std::to_string(n_values) +
                                        " values, of which 'prism.hadamard.sign_widths' accounts for " +
                                        std::to_string(begin));
    }
}

void check_names(const Keys & keys, const HadamardContract & contract) {
    if (contract.weight_names.empty()) {
        keys.require("weight_names");
        Keys::refuse("weight_names", "is empty");
    }
    std::unordered_set<std::string_view> seen;
    for (const std::string_view name : contract.weight_names) {
        if (!may_be_folded(name)) {
            Keys::refuse("weight_names", "names " + quoted(name) + ", whose activation cannot be rotated");
        }
        if (!seen.insert(name).second) {
            Keys::refuse("weight_names", "names " + quoted(name) + " twice");
        }
    }
    const auto & inverse = contract.inverse_weight_names;
    if (inverse.size() > 1 || (inverse.size() == 1 && inverse[0] != EMBEDDING)) {
        Keys::refuse("inverse_weight_names", "must be empty or name 'token_embd.weight' alone");
    }
}

// Version 1 keeps a head of its own beside a folded embedding, version 2 has none.
void check_head(const Keys & keys, const Tensors & tensors, const HadamardContract & contract) {
    const bool tied = keys.boolean("tied_output");
    const bool has_head = tensors.count(HEAD) != 0;
    const bool folded_embedding = !contract.inverse_weight_names.empty();
    if (contract.version == 2) {
        if (!tied) {
            Keys::refuse("tied_output", "is missing or false; version 2 has one table for embedding and head");
        }
        if (has_head) {
            Keys::refuse("tied_output", "is true, but the file has an output.weight of its own");
        }
        if (!folded_embedding) {
            Keys::refuse("inverse_weight_names", "is empty; version 2 has the rotated token_embd.weight as head");
        }
    } else {
        if (tied) {
            Keys::refuse("tied_output", "is true, which version 1 does not have");
        }
        if (folded_embedding && !has_head) {
            Keys::refuse("version", "is 1, but the rotated token_embd.weight is the head too, as there is no "
                                    "output.weight; version 2 has that");
        }
    }
}

// The rotations of a contract, made when a weight needs them; weights that are rotated alike get the same one.
class RotationMaker {
  public:
    RotationMaker(const GgufHeader & header, const HadamardContract & contract, std::string_view architecture)
        : header_(header), contract_(contract), architecture_(architecture) {}

    std::shared_ptr<Rotation> rotation_of(const GgufTensor & tensor) {
        const bool grouped = contract_.gdn_v_grouped && is_ssm_out(tensor.name);
        std::shared_ptr<Rotation> & made = made_[{tensor.shape[0], grouped}];
        if (made == nullptr) {
            made = std::make_shared<Rotation>(make(tensor, grouped));
        }
        return made;
    }

  private:
    // grouped: whether value heads are reordered.
    Rotation make(const GgufTensor & tensor, bool grouped) const {
        const uint64_t width = tensor.shape[0];
        Rotation rotation;
        rotation.n_in = static_cast<int64_t>(width);
        rotation.block = contract_.block_size;
        if (width % contract_.block_size != 0) {
            Keys::refuse("block_size", "is " + std::to_string(contract_.block_size) + ", which does not divide the " +
                                           std::to_string(width) + " inputs of " + quoted(tensor.name));
        }
        if (grouped) {
            rotation.n_v = head_count(header_, architecture_, ".ssm.time_step_rank");
            rotation.n_k = head_count(header_, architecture_, ".ssm.group_count");
            if (rotation.n_v == 0 || rotation.n_k == 0) {
                Keys::refuse("gdn_v_grouped", "is true, but there are no heads to group");
            }
        }
        try {
            rotation.check();
        } catch (const FormatError & error) {
            Keys::refuse("gdn_v_grouped", "does not fit " + quoted(tensor.name) + ": " + error.what());
        }
        if (contract_.explicit_signs) {
            const auto signs = contract_.signs.find(width);
            if (signs == contract_.signs.end()) {
                Keys::refuse("sign_widths",
                             "has no vector for the " + std::to_string(width) + " inputs of " + quoted(tensor.name));
            }
            rotation.signs.assign(signs->second.begin(), signs->second.end());
        }
        return rotation;
    }

    const GgufHeader & header_;
    const HadamardContract & contract_;
    std::string_view architecture_;
    std::map<std::pair<uint64_t, bool>, std::shared_ptr<Rotation>> made_;  // by width and whether grouped
};

}  // namespace

const std::vector<std::string_view> ROTATED_ARCHITECTURES = {"llama",  "qwen3",     "qwen3moe",
                                                             "qwen35", "qwen35moe", "qwen3next"};

bool may_be_rotated(std::string_view name) {
    return name == EMBEDDING || may_be_folded(name);
}

void Rotation::check() const {
    if (!is_power_of_two(static_cast<uint64_t>(block)) || n_in <= 0 || n_in % block != 0) {
        throw FormatError("block " + std::to_string(block) + " is no power of two that divides " +
                          std::to_string(n_in) + " inputs");
    }
    if ((n_v != 0 || n_k != 0) && (n_v <= 0 || n_k <= 0 || n_v % n_k != 0 || n_in % n_v != 0)) {
        throw FormatError(std::to_string(n_v) + " value heads in groups of " + std::to_string(n_k) +
                          " key heads do not divide " + std::to_string(n_in) + " inputs");
    }
}

void permute(const Rotation & rotation, const float * x, int64_t begin, int64_t n, float * out) {
    if (rotation.n_v == 0) {
        std::memcpy(out, x + begin, static_cast<size_t>(n) * sizeof(float));
        return;
    }
    const int64_t head = rotation.n_in / rotation.n_v;
    const int64_t repeat = rotation.n_v / rotation.n_k;
    for (int64_t j = begin; j < begin + n;) {
        const int64_t within = j % head;
        const int64_t r = j / head % repeat;
        const int64_t k = j / head / repeat;
        const int64_t length = std::min(head - within, begin + n - j);
        std::memcpy(out, x + within + head * (k + rotation.n_k * r), static_cast<size_t>(length) * sizeof(float));
        out += length;
        j += length;
    }
}

void permute_back(const Rotation & rotation, const float * x, float * out) {
    const size_t head = static_cast<size_t>(rotation.n_v == 0 ? rotation.n_in : rotation.n_in / rotation.n_v);
    const int64_t repeat = rotation.n_v == 0 ? 1 : rotation.n_v / rotation.n_k;
    for (int64_t v = 0; v < rotation.n_in / static_cast<int64_t>(head); v++, x += head) {
        const int64_t r = v % repeat;
        const int64_t k = v / repeat;
        std::memcpy(out + static_cast<int64_t>(head) * (k + rotation.n_k * r), x, head * sizeof(float));
    }
}

std::optional<HadamardContract> read_hadamard_contract(const GgufHeader & header) {
    bool any = false;
    for (const GgufKey & key : header.metadata) {
        if (key.name.substr(0, PREFIX.size()) != PREFIX) {
            continue;
        }
        any = true;
        const std::string_view name = key.name.substr(PREFIX.size());
        if (std::find(std::begin(KEYS), std::end(KEYS), name) == std::end(KEYS)) {
            throw FormatError("key " + quoted(key.name) + " is unknown, so the rotation that it is a part of is too");
        }
    }
    if (!any) {
        return std::nullopt;
    }
    const Keys keys(header);
    HadamardContract contract;
    contract.version = keys.u32("version");
    if (contract.version != 1 && contract.version != 2) {
        Keys::refuse("version", "is " + std::to_string(contract.version) + "; 1 and 2 are known");
    }
    const std::string_view architecture = architecture_of(header);
    keys.require_text("transform", "normalized-sylvester-walsh-hadamard");
    keys.require_text("axis", "input-last-dimension");
    contract.block_size = keys.u32("block_size");
    if (!is_power_of_two(contract.block_size)) {
        Keys::refuse("block_size", "is " + std::to_string(contract.block_size) + ", not a power of two");
    }
    read_signs(keys, contract);
    contract.weight_names = keys.texts("weight_names");
    contract.inverse_weight_names = keys.texts("inverse_weight_names");
    contract.gdn_v_grouped = keys.boolean("gdn_v_grouped");
    check_names(keys, contract);
    Tensors tensors;
    for (const GgufTensor & tensor : header.tensors) {
        tensors.emplace(tensor.name, &tensor);
    }
    check_head(keys, tensors, contract);
    RotationMaker maker(header, contract, architecture);
    for (const std::string_view name : contract.weight_names) {
        contract.rotations[name] = maker.rotation_of(find_matrix(tensors, "weight_names", name));
    }
    for (const std::string_view name : contract.inverse_weight_names) {
        contract.rotations[name] = maker.rotation_of(find_matrix(tensors, "inverse_weight_names", name));
    }
    return contract;
}

}  // namespace tern
