// Runs the kernels of one instruction set on what a file holds, for tests of instruction sets that this processor may lack:
//
//   driver ISA INPUT OUTPUT
//
// INPUT: a number of jobs, each int64 operation and four more int64, then data. OUTPUT: the results, one after the other.
//
//   operation   numbers                     data                                   result
//   0 product   group, n_in, n_out, n_cols  tiles; x float [n_cols][n_in];         quantized columns, y float [n_cols][n_out]
//                                           columns at a time, dense?, int64
//   1 hadamard  block, n_blocks, signs?, -  float [n_blocks][block]; signs [block] float [n_blocks][block]
//   2 squared_relu_for_silu  n, -, -, -     float [n]                              float [n]
//   3 attention  n_tokens, n_heads,         d_k, d_v, type_k, type_v, int64;       float [n_tokens][n_heads][d_v]
//                n_kv_heads, n_kv           softcap, max_bias, float; q; k; v;
//                                           mask fp16 [n_tokens][n_kv]
//   4 multiply-adds  n_passes, -, -, -      -                                      int64 of a pass, int64 sum of the loop
#include "cpu/attention.h"
#include "cpu/dense_tiles.h"
#include "cpu/isas.h"
#include "cpu/product.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using tern::Isa;
using tern::Kernels;

const Isa * const ISAS[] = {
    &tern::generic::ISA,
#if defined(DRIVER_AVX2)
    &tern::avx2::ISA,
#endif
#if defined(DRIVER_VNNI)
    &tern::avxvnni::ISA, &tern::avx512::ISA,
#endif
#if defined(DRIVER_NEON)
    &tern::neon::ISA,    &tern::i8mm::ISA,
#endif
};

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "driver: %s\n", what);
    std::exit(1);
}

// A block of memory of exactly the size that is asked for, so that a sanitizer sees the first byte beyond.
template <typename T> std::vector<T> read(std::FILE * file, size_t n) {
    std::vector<T> values(n);
    if (std::fread(values.data(), sizeof(T), n, file) != n) {
        fail("the input is too short");
    }
    return values;
}

template <typename T> void write(std::FILE * file, const std::vector<T> & values) {
    if (std::fwrite(values.data(), sizeof(T), values.size(), file) != values.size()) {
        fail("cannot write");
    }
}

std::vector<uint8_t> condensed(const std::vector<uint8_t> & tiles, int64_t n_in) {
    const size_t stride = tern::tile_bytes(n_in, tern::DENSE_GROUP);
    const size_t dense_stride = tern::dense_tile_bytes(n_in);
    const size_t n_tiles = tiles.size() / stride;
    std::vector<uint8_t> dense(n_tiles * dense_stride);
    for (size_t i = 0; i < n_tiles; i++) {
        tern::condense_tile(tiles.data() + i * stride, n_in, dense.data() + i * dense_stride);
    }
    return dense;
}

void product(const Kernels & kernels, const int64_t * numbers, std::FILE * in, std::FILE * out) {
    const auto group = static_cast<int>(numbers[0]);
    const int64_t n_in = numbers[1];
    const int64_t n_out = numbers[2];
    const int64_t n_cols = numbers[3];
    const int64_t n_tiles = tern::tile_count(n_out);
    auto tiles = read<uint8_t>(in, n_tiles * tern::tile_bytes(n_in, group));
    const auto x = read<float>(in, n_cols * n_in);
    const auto options = read<int64_t>(in, 2);
    const int64_t at_a_time = options[0];
    const bool dense = options[1] != 0;
    if (dense) {
        tiles = condensed(tiles, n_in);
    }
    const tern::ProductMatrix matrix{{tiles.data(), n_in, n_out, group, dense}};
    const tern::ColumnLayout layout(n_in);
    std::vector<uint8_t> quantized(n_cols * layout.bytes);
    std::vector<float> y(n_cols * n_out);
    std::vector<const uint8_t *> columns;
    std::vector<float *> outputs;
    for (int64_t c = 0; c < n_cols; c++) {
        uint8_t * column = quantized.data() + c * layout.bytes;
        kernels.quantize_activation(layout, x.data() + c * n_in, 0, layout.n_groups, column);
        columns.push_back(column);
        outputs.push_back(y.data() + c * n_out);
    }
    for (int64_t c = 0; c < n_cols; c += at_a_time) {
        const int64_t n = std::min(at_a_time, n_cols - c);
        std::vector<uint8_t> panels(n * layout.bytes);
        tern::make_panels(kernels, layout, columns.data() + c, n, panels.data());
        tern::ThreadScratch scratch;
        scratch.reserve(1, tern::multiply_scratch_bytes(kernels, matrix, n));
        tern::multiply_panels(kernels, matrix, 0, n_tiles, layout, panels.data(), n, outputs.data() + c, scratch.of(0));
    }
    write(out, quantized);
    write(out, y);
}

void hadamard(const Kernels & kernels, const int64_t * numbers, std::FILE * in, std::FILE * out) {
    const int64_t block = numbers[0];
    auto x = read<float>(in, numbers[1] * block);
    const auto signs = read<float>(in, numbers[2] != 0 ? block : 0);
    for (int64_t i = 0; i < numbers[1]; i++) {
        kernels.hadamard(x.data() + i * block, signs.empty() ? nullptr : signs.data(), block);
    }
    write(out, x);
}

void squared_relu(const Kernels & kernels, const int64_t * numbers, std::FILE * in, std::FILE * out) {
    auto values = read<float>(in, numbers[0]);
    kernels.squared_relu_for_silu(values.data(), numbers[0]);
    write(out, values);
}

void attention(const tern::AttentionKernels & kernels, const int64_t * numbers, std::FILE * in, std::FILE * out) {
    tern::Attention a{};
    a.n_tokens = numbers[0];
    a.n_heads = numbers[1];
    a.n_kv_heads = numbers[2];
    a.n_kv = numbers[3];
    a.n_sequences = a.n_mask_heads = a.n_mask_sequences = 1;
    const auto shape = read<int64_t>(in, 4);
    a.d_k = shape[0];
    a.d_v = shape[1];
    a.type_k = static_cast<tern::KvType>(shape[2]);
    a.type_v = static_cast<tern::KvType>(shape[3]);
    const auto options = read<float>(in, 2);
    a.softcap = options[0];
    a.max_bias = options[1];
    a.scale = 1 / std::sqrt(static_cast<float>(a.d_k));
    const auto q = read<float>(in, a.n_tokens * a.n_heads * a.d_k);
    const auto cache = [&](int64_t d, int64_t type, std::vector<uint8_t> & memory) {
        const size_t bytes = d / tern::KV_BLOCK * tern::kv_block_bytes(static_cast<uint32_t>(type));
        memory = read<uint8_t>(in, a.n_kv * a.n_kv_heads * bytes);
        return tern::AttentionRows{memory.data(), a.n_kv_heads * bytes, bytes, 0};
    };
    std::vector<uint8_t> k, v;
    a.k = cache(a.d_k, shape[2], k);
    a.v = cache(a.d_v, shape[3], v);
    const auto mask = read<uint16_t>(in, a.n_tokens * a.n_kv);
    a.q = {reinterpret_cast<const uint8_t *>(q.data()), a.n_heads * a.d_k * sizeof(float), a.d_k * sizeof(float), 0};
    a.mask = {reinterpret_cast<const uint8_t *>(mask.data()), a.n_kv * sizeof(uint16_t), 0, 0};
    std::vector<float> y(a.n_tokens * a.n_heads * a.d_v);
    a.out = y.data();
    tern::AttentionWork work(a);
    std::vector<float> partials(work.n_partials());
    tern::ThreadScratch scratch;
    scratch.reserve(1, work.scratch_bytes());
    work.run(kernels, 1, partials.data(), scratch.of(0));
    if (work.is_split()) {
        work.combine(0, 1, partials.data());
    }
    write(out, y);
}

void multiply_adds(const tern::MultiplyAddLoop & loop, const int64_t * numbers, std::FILE * out) {
    write(out, std::vector<int64_t>{loop.multiply_adds_a_pass, loop.run(numbers[0])});
}

}  // namespace

#if defined(DRIVER_NO_NEON_ATTENTION)
// Where SIMDe stands in for the instructions of NEON: it lacks what attention wants of fp16.
const tern::AttentionKernels tern::neon::ATTENTION = tern::generic::ATTENTION;
#endif

int main(int argc, char ** argv) {
    if (argc != 4) {
        fail("usage: driver ISA INPUT OUTPUT");
    }
    const Isa * isa = nullptr;
    for (const Isa * candidate : ISAS) {
        if (std::strcmp(candidate->name, argv[1]) == 0) {
            isa = candidate;
        }
    }
    std::FILE * in = std::fopen(argv[2], "rb");
    std::FILE * out = std::fopen(argv[3], "wb");
    if (isa == nullptr || in == nullptr || out == nullptr) {
        fail("no such instruction set or file");
    }
    const int64_t n_jobs = read<int64_t>(in, 1)[0];
    for (int64_t job = 0; job < n_jobs; job++) {
        const auto numbers = read<int64_t>(in, 5);
        switch (numbers[0]) {
        case 0: product(isa->kernels, numbers.data() + 1, in, out); break;
        case 1: hadamard(isa->kernels, numbers.data() + 1, in, out); break;
        case 2: squared_relu(isa->kernels, numbers.data() + 1, in, out); break;
        case 3: attention(isa->attention, numbers.data() + 1, in, out); break;
        case 4: multiply_adds(isa->multiply_adds, numbers.data() + 1, out); break;
        default: fail("no such operation");
        }
    }
    std::fclose(in);
    return std::fclose(out) == 0 ? 0 : 1;
}
