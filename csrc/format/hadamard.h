// Hadamard-rotated weights: the keys prism.hadamard.* of a GGUF file, and what they say about each tensor.
//
// A rotated (folded) weight is stored so that
//
//   y = W_stored . H(s * P(x))
//
// P reorders the activation (only that of ssm_out, see Rotation), s is a vector of +-1, and H is the normalized
// Sylvester-Walsh-Hadamard transform of every block of B values: H[r][c] = (-1)^popcount(r & c) / sqrt(B), its own inverse.
// The plain weight is therefore, row by row, w = P^-1(s * H(w_stored)); a rotated tensor means just this, wherever it is
// used: multiplied, or looked up as an embedding.
//
// Whoever ignores the keys gets fluent nonsense, not an error. So everything that is not exactly as the contract has it is
// refused, with the key named.
#pragma once

#include "gguf_header.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tern {

// How the activation of one weight is rotated.
struct Rotation {
    int64_t n_in = 0;
    int64_t block = 0;         // B: a power of two that divides n_in
    std::vector<float> signs;  // s, n_in values of +-1; empty where all are +1
    // P takes value heads from the order [head, k, repeat] of llama.cpp's graph, the leftmost fastest, to the checkpoint's
    // [head, repeat, k]; there are n_v = k * repeat of them, and k = n_k. 0: P changes nothing.
    int64_t n_k = 0;
    int64_t n_v = 0;

    bool operator==(const Rotation & other) const {
        return n_in == other.n_in && block == other.block && signs == other.signs && n_k == other.n_k &&
               n_v == other.n_v;
    }

    // Throws FormatError for a block that is no power of two or does not divide n_in, and for heads that do not fit it.
    void check() const;
};

// P: the n values from `begin` on of P(x).
void permute(const Rotation & rotation, const float * x, int64_t begin, int64_t n, float * out);
// P^-1 of a whole row.
void permute_back(const Rotation & rotation, const float * x, float * out);

struct HadamardContract {
    uint32_t version = 0;  // 2: the folded embedding serves as head too
    uint32_t block_size = 0;
    bool explicit_signs = false;
    std::map<uint64_t, std::vector<int8_t>> signs;  // by width
    std::vector<std::string_view> weight_names;
    std::vector<std::string_view> inverse_weight_names;
    bool gdn_v_grouped = false;
    // By name, of all that is rotated. Weights that are rotated alike share one: a file can name thousands of them.
    std::map<std::string_view, std::shared_ptr<Rotation>> rotations;
};

// The architectures whose weights may be rotated.
extern const std::vector<std::string_view> ROTATED_ARCHITECTURES;

// Whether the contract lets a weight of this name be rotated. The embedding's rotation is undone after the lookup.
bool may_be_rotated(std::string_view name);

// The contract of a file, or nothing for one without rotated weights. The names view the header.
// Throws FormatError, naming the key, for a file that breaks it.
std::optional<HadamardContract> read_hadamard_contract(const GgufHeader & header);

}  // namespace tern
