// What models say about their weights, and how that finds its way from the file to the tensor.
//
// The header of a file tells what single matrices need beside their product: the gates of a BitNet want squared ReLU, rotated
// weights want their rotation. The tensor that llama.cpp makes of such a matrix has a type id of its own, so that nobody can
// mistake it for a plain one; which treatment it is that it needs is asked here when its bytes arrive. The answer goes by name,
// type, shape and the first and last bytes. So it does not matter which models are loaded, in what order, in which thread, how
// often; and what is not recognised is never computed.
#pragma once

#include "../format/hadamard.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tern {

// What a matrix needs beside its product.
struct Treatment {
    bool squared_relu = false;            // the product passes through squared ReLU (cpu/squared_relu.h)
    const Rotation * rotation = nullptr;  // of the activation

    bool is_none() const { return !squared_relu && rotation == nullptr; }
    bool operator==(const Treatment & other) const {
        return squared_relu == other.squared_relu && rotation == other.rotation;
    }
};

// One model while a thread reads it: llama.cpp reads the parts of a split model one after the other, in the thread that then
// creates its tensors.
struct Model {
    std::string name;  // of the file, or of the first part
    uint32_t n_parts = 1;
    uint32_t n_read = 0;                   // parts read so far
    bool squared_relu = false;             // whether its gates should pass through squared ReLU
    std::map<uint32_t, double> n_weights;  // by type as in the files, of all parts read so far
    // Whether its ternary matrices are to be stored densely: who stores them decides it when all parts are read.
    std::optional<bool> dense;
};

// The treatments of all models that were ever opened.
class Models {
  public:
    // A tensor that needs a treatment. data: of the tensor, as in the file. type: as in the file, with PQ2_0 for the blocks that
    // legacy files call Q2_0.
    struct Entry {
        const GgufTensor * tensor;
        std::string_view data;
        Treatment treatment;
    };

    // The rotation, kept for good; equal ones are kept once, so that pointers can be compared.
    const Rotation * keep(std::shared_ptr<const Rotation> rotation);

    // All that are kept.
    std::vector<const Rotation *> rotations() const;

    // Remembers all of these or none. Throws FormatError where another file has the very same tensor with another treatment, so
    // that nothing would tell the two apart.
    void remember(const std::vector<Entry> & entries);

    // The treatment of a tensor that needs one, or nullptr if none is known. It lives as long as this object.
    const Treatment * find(std::string_view name, uint32_t file_type, const int64_t * shape,
                           std::string_view data) const;

    // Whether any matrix passes through squared ReLU.
    bool any_squared_relu() const;

  private:
    mutable std::mutex mutex_;
    std::vector<std::shared_ptr<const Rotation>> rotations_;
    std::unordered_map<std::string, Treatment> treatments_;  // by fingerprint
    bool any_squared_relu_ = false;
};

}  // namespace tern
