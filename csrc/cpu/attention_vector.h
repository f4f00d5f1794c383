// Attention for processors with vectors of floats. An instruction set brings a class V, a vector of V::LANES floats:
//
//   V::zero(), V::all(float), V::load(const float *), v.store(float *)
//   V::fma(a, b, c)               a * b + c, rounded once
//   a * b, a + b
//   v.sum()                       of the lanes, in an order that depends on nothing
//   V::all_fp16(p)                one fp16 number for all lanes
//   V::fp16(p), V::bf16(p)        LANES numbers, widened
//   V::int8(p)                    LANES signed bytes as floats
//   V::nibbles(p, shift)          (p[lane] >> shift & 15) as floats, shift 0 or 4
//   V::nibbles(p, shift, fifth)   ... with bit `lane` of `fifth` as the bit of value 16
//
// and gets a table of kernels, attention_table<V>().
//
// A sum keeps one register from its first term to its last: one position times one row has LANES sums over every LANES-th
// dimension; an element of the weighted values is a lane of its own. How many of them a kernel holds at a time is thereby
// a matter of speed alone.
#pragma once

#include "attention_kernels.h"
#include "attention_softmax.h"

#include <cstring>
#include <type_traits>

namespace tern::TERN_ISA {

namespace {  // on purpose: one copy for each instruction set

// Blocks of 32 values; values<V>(block, i) are those of vector i.
template <KvType TYPE> struct Block;

// Where in the 16 bytes of nibbles the vector is, and in which half of them.
template <class V> struct Nibbles {
    const uint8_t * p;
    int shift;

    Nibbles(const uint8_t * nibbles, int i)
        : p(nibbles + i * V::LANES % 16), shift(i * V::LANES < KV_BLOCK / 2 ? 0 : 4) {}
};

template <class V> inline uint32_t fifth_bits(const uint8_t * bits, int i) {
    uint32_t word;
    std::memcpy(&word, bits, sizeof(word));
    return word >> i * V::LANES;
}

// (n + offset) * scale in one operation, and exactly: all of it fits the 24 bits of a float.
template <class V> inline V centered(V n, float offset, V scale) {
    return V::fma(n, scale, scale * V::all(offset));
}

template <> struct Block<KvType::F32> {
    template <class V> static V values(const uint8_t * block, int i) {
        return V::load(reinterpret_cast<const float *>(block) + i * V::LANES);
    }
};

template <> struct Block<KvType::F16> {
    template <class V> static V values(const uint8_t * block, int i) { return V::fp16(block + 2 * i * V::LANES); }
};

template <> struct Block<KvType::BF16> {
    template <class V> static V values(const uint8_t * block, int i) { return V::bf16(block + 2 * i * V::LANES); }
};

template <> struct Block<KvType::Q4_0> {
    template <class V> static V values(const uint8_t * block, int i) {
        const Nibbles<V> at(block + 2, i);
        return centered(V::nibbles(at.p, at.shift), -8, V::all_fp16(block));
    }
};

template <> struct Block<KvType::Q4_1> {
    template <class V> static V values(const uint8_t * block, int i) {
        const Nibbles<V> at(block + 4, i);
        return V::fma(V::nibbles(at.p, at.shift), V::all_fp16(block), V::all_fp16(block + 2));
    }
};

template <> struct Block<KvType::Q5_0> {
    template <class V> static V values(const uint8_t * block, int i) {
        const Nibbles<V> at(block + 6, i);
        return centered(V::nibbles(at.p, at.shift, fifth_bits<V>(block + 2, i)), -16, V::all_fp16(block));
    }
};

template <> struct Block<KvType::Q5_1> {
    template <class V> static V values(const uint8_t * block, int i) {
        const Nibbles<V> at(block + 8, i);
        return V::fma(V::nibbles(at.p, at.shift, fifth_bits<V>(block + 4, i)), V::all_fp16(block),
                      V::all_fp16(block + 2));
    }
};

template <> struct Block<KvType::Q8_0> {
    template <class V> static V values(const uint8_t * block, int i) {
        return V::int8(block + 2 + i * V::LANES) * V::all_fp16(block);
    }
};

// Where K and V are decoded as they are read, memory is waited for: so the kernels ask for the position so far ahead, a line
// of the cache at a time between their products.
constexpr int PREFETCH_POSITIONS = 8;

template <class V, KvType TYPE> struct AttentionOf {
    static constexpr int VECTORS = KV_BLOCK / V::LANES;  // in a block
    static constexpr size_t BYTES = block_bytes(TYPE);

    // Block b of a row, at the first of those that share a line. F32 is what was decoded before, in the first-level cache.
    __attribute__((always_inline)) static void prefetch(const uint8_t * block, int64_t b, size_t stride) {
        constexpr int64_t PER_LINE = BYTES < 64 ? 64 / BYTES : 1;
        if (TYPE != KvType::F32 && b % PER_LINE == 0) {
            __builtin_prefetch(block + PREFETCH_POSITIONS * stride);
        }
    }

    static void decode(const uint8_t * rows, size_t stride, int n_positions, int64_t d, float * values) {
        for (int p = 0; p < n_positions; p++) {
            const uint8_t * block = rows + p * stride;
            for (int64_t b = 0; b < d; b += KV_BLOCK, block += BYTES) {
                for (int i = 0; i < VECTORS; i++) {
                    Block<TYPE>::template values<V>(block, i).store(values + p * d + b + i * V::LANES);
                }
            }
        }
    }

    // ROWS rows times POSITIONS positions.
    template <int ROWS, int POSITIONS>
    static void multiply_some(const uint8_t * k, size_t stride, int64_t d, const float * q, float * scores) {
        V sums[POSITIONS][ROWS];
        for (auto & of_position : sums) {
            for (V & sum : of_position) {
                sum = V::zero();
            }
        }
        for (int64_t b = 0; b < d / KV_BLOCK; b++) {
            for (int p = 0; p < POSITIONS; p++) {
                prefetch(k + p * stride + b * BYTES, b, stride);
            }
            for (int i = 0; i < VECTORS; i++) {
                V x[ROWS];
                for (int r = 0; r < ROWS; r++) {
                    x[r] = V::load(q + r * d + b * KV_BLOCK + i * V::LANES);
                }
                for (int p = 0; p < POSITIONS; p++) {
                    const V values = Block<TYPE>::template values<V>(k + p * stride + b * BYTES, i);
                    for (int r = 0; r < ROWS; r++) {
                        sums[p][r] = V::fma(x[r], values, sums[p][r]);
                    }
                }
            }
        }
        for (int p = 0; p < POSITIONS; p++) {
            for (int r = 0; r < ROWS; r++) {
                scores[r * ATTENTION_CHUNK + p] = sums[p][r].sum();
            }
        }
    }

    template <int ROWS>
    static void multiply_rows(const uint8_t * k, size_t stride, int n_positions, int64_t d, const float * q,
                              float * scores) {
        constexpr int POSITIONS = ROWS >= 3 ? 2 : 4;  // 4 to 8 sums at a time
        int p = 0;
        for (; p + POSITIONS <= n_positions; p += POSITIONS) {
            multiply_some<ROWS, POSITIONS>(k + p * stride, stride, d, q, scores + p);
        }
        for (; p < n_positions; p++) {
            multiply_some<ROWS, 1>(k + p * stride, stride, d, q, scores + p);
        }
    }

    // ROWS rows, N vectors of block b from vector i on.
    template <int ROWS, int N>
    static void accumulate_some(const uint8_t * v, int64_t b, int i, size_t stride, int n_positions, int64_t d,
                                const float * weights, float * sums) {
        const uint8_t * block = v + b * BYTES;
        sums += b * KV_BLOCK + i * V::LANES;
        V sum[ROWS][N];
        for (int r = 0; r < ROWS; r++) {
            for (int x = 0; x < N; x++) {
                sum[r][x] = V::load(sums + r * d + x * V::LANES);
            }
        }
        for (int p = 0; p < n_positions; p++, block += stride) {
            if (i == 0) {
                prefetch(block, b, stride);
            }
            V values[N];
            for (int x = 0; x < N; x++) {
                values[x] = Block<TYPE>::template values<V>(block, i + x);
            }
            for (int r = 0; r < ROWS; r++) {
                const V weight = V::all(weights[r * ATTENTION_CHUNK + p]);
                for (int x = 0; x < N; x++) {
                    sum[r][x] = V::fma(weight, values[x], sum[r][x]);
                }
            }
        }
        for (int r = 0; r < ROWS; r++) {
            for (int x = 0; x < N; x++) {
                sum[r][x].store(sums + r * d + x * V::LANES);
            }
        }
    }

    template <int ROWS>
    static void accumulate_rows(const uint8_t * v, size_t stride, int n_positions, int64_t d, const float * weights,
                                float * sums) {
        constexpr int N = ROWS >= 3 && VECTORS > 2 ? 2 : VECTORS;
        for (int64_t b = 0; b < d / KV_BLOCK; b++) {
            for (int i = 0; i < VECTORS; i += N) {
                accumulate_some<ROWS, N>(v, b, i, stride, n_positions, d, weights, sums);
            }
        }
    }
};

// Calls function(AttentionOf<V, type>()).
template <class V, class Function> void with_type(KvType type, const Function & function) {
    switch (type) {
    case KvType::F32: return function(AttentionOf<V, KvType::F32>());
    case KvType::F16: return function(AttentionOf<V, KvType::F16>());
    case KvType::BF16: return function(AttentionOf<V, KvType::BF16>());
    case KvType::Q4_0: return function(AttentionOf<V, KvType::Q4_0>());
    case KvType::Q4_1: return function(AttentionOf<V, KvType::Q4_1>());
    case KvType::Q5_0: return function(AttentionOf<V, KvType::Q5_0>());
    case KvType::Q5_1: return function(AttentionOf<V, KvType::Q5_1>());
    case KvType::Q8_0: return function(AttentionOf<V, KvType::Q8_0>());
    }
}

// Calls function(first row, constant number of rows) for rows in fours and what is left.
template <class Function> void by_rows(int n_rows, const Function & function) {
    int r = 0;
    for (; r + 4 <= n_rows; r += 4) {
        function(r, std::integral_constant<int, 4>());
    }
    switch (n_rows - r) {
    case 1: return function(r, std::integral_constant<int, 1>());
    case 2: return function(r, std::integral_constant<int, 2>());
    case 3: return function(r, std::integral_constant<int, 3>());
    }
}

template <class V>
void decode(KvType type, const uint8_t * rows, size_t stride, int n_positions, int64_t d, float * values) {
    with_type<V>(type, [&](auto of) { decltype(of)::decode(rows, stride, n_positions, d, values); });
}

template <class V>
void multiply(KvType type, const uint8_t * k, size_t stride, int n_positions, int64_t d, const float * q, int n_rows,
              float * scores) {
    with_type<V>(type, [&](auto of) {
        by_rows(n_rows, [&](int r, auto n) {
            decltype(of)::template multiply_rows<decltype(n)::value>(k, stride, n_positions, d, q + r * d,
                                                                     scores + r * ATTENTION_CHUNK);
        });
    });
}

template <class V>
void accumulate(KvType type, const uint8_t * v, size_t stride, int n_positions, int64_t d, const float * weights,
                int n_rows, float * sums) {
    with_type<V>(type, [&](auto of) {
        by_rows(n_rows, [&](int r, auto n) {
            decltype(of)::template accumulate_rows<decltype(n)::value>(v, stride, n_positions, d,
                                                                       weights + r * ATTENTION_CHUNK, sums + r * d);
        });
    });
}

template <class V> constexpr AttentionKernels attention_table() {
    return {decode<V>, multiply<V>, accumulate<V>, weigh, scale};
}

}  // namespace

}  // namespace tern::TERN_ISA
