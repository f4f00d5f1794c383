// Exact least-squares ternarization, LANES groups side by side.
//
// Trying every k needs the magnitudes sorted. A sorting network does the same compare-exchanges whatever the data, so
// LANES groups are laid out as columns and sorted together: every step is a plain minimum and maximum of two vectors,
// and no shuffles or branches are left. The running sums that follow vectorize the same way.
#include "ternarize.h"

#include "float16.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// One copy of the hot functions for AVX2 machines, chosen when the library is loaded. Sanitizers cannot see through the
// loader's choice (ifunc), and other processors need none.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__) && !defined(TERN_SANITIZED)
#define TERN_CLONES __attribute__((target_clones("avx2,fma", "default")))
#else
#define TERN_CLONES
#endif

namespace tern {

namespace {

constexpr int LANES = 8;

// A column of the working array: value i of LANES groups. A vector of the compiler's own: two SSE or one AVX register.
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

// Batcher's odd-even merge sort of `n` columns (a power of two), largest first.
TERN_CLONES void sort_columns(Lanes * x, int n) {
    for (int p = 1; p < n; p *= 2) {
        for (int k = p; k >= 1; k /= 2) {
            for (int j = k % p; j + k < n; j += 2 * k) {
                // Partners lie k apart, within the same run of 2p columns.
                for (int i = j; i < j + k; i++) {
                    if (i / (2 * p) == (i + k) / (2 * p)) {
                        const Lanes a = x[i];
                        const Lanes b = x[i + k];
                        x[i] = a > b ? a : b;
                        x[i + k] = a > b ? b : a;
                    }
                }
            }
        }
    }
}

// The best scale of each lane: the mean of the k largest magnitudes for the k with the largest S_k^2 / k.
TERN_CLONES void best_scales(const Lanes * sorted, int n, float * scale) {
    Lanes sum{};
    Lanes gain{};
    Lanes best{};
    for (int k = 1; k <= n; k++) {
        sum += sorted[k - 1];
        const Lanes mean = sum * (1.0f / static_cast<float>(k));
        const Lanes g = sum * mean;
        best = g > gain ? mean : best;
        gain = g > gain ? g : gain;
    }
    for (int l = 0; l < LANES; l++) {
        scale[l] = best[l];
    }
}

TERN_CLONES void to_fp32(const void * src, WeightFormat format, int64_t offset, int n, float * dst) {
    switch (format) {
    case WeightFormat::F32: std::copy_n(static_cast<const float *>(src) + offset, n, dst); break;
    case WeightFormat::F16:
        for (int i = 0; i < n; i++) {
            dst[i] = fp32_from_fp16(static_cast<const uint16_t *>(src)[offset + i]);
        }
        break;
    case WeightFormat::BF16:
        for (int i = 0; i < n; i++) {
            dst[i] = fp32_from_bf16(static_cast<const uint16_t *>(src)[offset + i]);
        }
        break;
    }
}

// Codes, zeros and squared errors of one group for a given scale; n is a multiple of LANES.
TERN_CLONES void assign_codes(const float * w, int n, float d, uint8_t * codes, TernarizeStats & stats) {
    const float threshold = 0.5f * d;
    int zeros = 0;
    Lanes sum_sq{};
    Lanes sum_sq_error{};
    for (int i = 0; i < n; i += LANES) {
        Lanes x;
        std::memcpy(&x, w + i, sizeof(x));
        const Lanes zero{};
        const Lanes value = x > threshold ? zero + d : (x < -threshold ? zero - d : zero);
        const Lanes error = x - value;
        sum_sq += x * x;
        sum_sq_error += error * error;
    }
    for (int i = 0; i < n; i++) {
        const int code = 1 + (w[i] > threshold) - (w[i] < -threshold);
        codes[i] = static_cast<uint8_t>(code);
        zeros += code == 1;
    }
    stats.n += n;
    stats.zeros += zeros;
    for (int l = 0; l < LANES; l++) {
        stats.sum_sq += sum_sq[l];
        stats.sum_sq_error += sum_sq_error[l];
    }
}

// The magnitude a of a group that holds nothing but -a, 0 and a; -1 if it holds anything else. Magnitudes are compared as
// integers, which have the same order and, unlike floats, vectorize.
TERN_CLONES float ternary_scale(const float * w, int n) {
    constexpr uint32_t MAGNITUDE = 0x7fffffffu;
    int32_t largest = 0;
    for (int i = 0; i < n; i++) {
        largest = std::max(largest, static_cast<int32_t>(bit_cast<uint32_t>(w[i]) & MAGNITUDE));
    }
    int others = 0;
    for (int i = 0; i < n; i++) {
        const auto magnitude = static_cast<int32_t>(bit_cast<uint32_t>(w[i]) & MAGNITUDE);
        others += static_cast<int>(magnitude != largest) & static_cast<int>(magnitude != 0);
    }
    return others == 0 ? bit_cast<float>(largest) : -1.0f;
}

// The same for a group of nothing but -a, 0 and a, whose scale a is rounded to d.
TERN_CLONES void assign_ternary_codes(const float * w, int n, float a, float d, uint8_t * codes,
                                      TernarizeStats & stats) {
    int zeros = 0;
    for (int i = 0; i < n; i++) {
        const int code = d > 0.0f ? 1 + (w[i] > 0.0f) - (w[i] < 0.0f) : 1;
        codes[i] = static_cast<uint8_t>(code);
        zeros += w[i] == 0.0f;
    }
    const double nonzeros = n - zeros;
    const double scale = a;
    const double error = std::fabs(scale - d);
    stats.n += n;
    stats.zeros += d > 0.0f ? zeros : n;
    stats.sum_sq += nonzeros * scale * scale;
    stats.sum_sq_error += nonzeros * error * error;
    stats.ternary_groups++;
    stats.exact_groups += error == 0;
    stats.max_scale_error = std::max(stats.max_scale_error, error == 0 ? 0 : error / scale);
}

bool all_finite(const float * w, int n) {
    uint32_t found = 0;
    for (int i = 0; i < n; i++) {
        found |= (bit_cast<uint32_t>(w[i]) & 0x7f800000u) == 0x7f800000u;
    }
    return found == 0;
}

}  // namespace

void TernarizeStats::add(const TernarizeStats & other) {
    n += other.n;
    zeros += other.zeros;
    sum_sq += other.sum_sq;
    sum_sq_error += other.sum_sq_error;
    groups += other.groups;
    ternary_groups += other.ternary_groups;
    exact_groups += other.exact_groups;
    max_scale_error = std::max(max_scale_error, other.max_scale_error);
}

TernarizeStats ternarize_row(const TernaryType & type, const void * weights, WeightFormat format, int64_t n_in,
                             uint8_t * data) {
    TernarizeStats stats;
    float w[LANES * MAX_BLOCK];
    Lanes columns[MAX_BLOCK];
    float scale[LANES];
    float own_scale[LANES];
    uint8_t codes[MAX_BLOCK];

    const int block = type.block;
    const int64_t n_blocks = n_in / block;
    for (int64_t first = 0; first < n_blocks; first += LANES) {
        const int lanes = static_cast<int>(std::min<int64_t>(LANES, n_blocks - first));
        to_fp32(weights, format, first * block, lanes * block, w);
        if (!all_finite(w, lanes * block)) {
            const float * bad = std::find_if(w, w + lanes * block, [](float x) { return !std::isfinite(x); });
            stats.non_finite = first * block + (bad - w);
            return stats;
        }
        int ternary = 0;
        for (int l = 0; l < lanes; l++) {
            own_scale[l] = ternary_scale(w + l * block, block);
            ternary += own_scale[l] >= 0.0f;
        }
        if (ternary < lanes) {
            for (int i = 0; i < block; i++) {
                for (int l = 0; l < LANES; l++) {
                    columns[i][l] = l < lanes ? std::fabs(w[l * block + i]) : 0.0f;
                }
            }
            sort_columns(columns, block);
            best_scales(columns, block, scale);
        }
        for (int l = 0; l < lanes; l++) {
            // The scale that a ternary group has already: a mean of equal numbers could round to another.
            const float best = own_scale[l] >= 0.0f ? own_scale[l] : scale[l];
            const uint16_t d = fp16_from_fp32(best);
            if (d == 0x7c00u) {
                const float * group = w + l * block;
                const float * largest = std::max_element(group, group + block,
                                                         [](float a, float b) { return std::fabs(a) < std::fabs(b); });
                stats.non_finite = first * block + (largest - w);
                return stats;
            }
            stats.groups++;
            if (own_scale[l] >= 0.0f) {
                assign_ternary_codes(w + l * block, block, best, fp32_from_fp16(d), codes, stats);
            } else {
                assign_codes(w + l * block, block, fp32_from_fp16(d), codes, stats);
            }
            type.pack_block(codes, d, data + (first + l) * type.block_bytes);
        }
    }
    return stats;
}

}  // namespace tern
