// The loops of attention over tiles of rows, pieces and chunks of positions; the arithmetic is in the kernel tables.
#include "attention.h"

#define TERN_ISA generic  // what is shared with the kernels, in plain C++
#include "attention_kernels.h"
#include "exp.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tern {

namespace {

// Rows that share a KV head and are computed together: their queries, sums and a decoded chunk stay in the second-level
// cache.
constexpr int MAX_ROWS = 64;
constexpr int64_t TILE_VALUES = 8192;

// Up to so many rows, kernels decode K and V as they go; for more, a chunk is decoded once.
constexpr int DIRECT_ROWS = 4;

// Positions that are taken for one KV head after the other.
constexpr int64_t STEP = 8;

constexpr size_t LINE = 64;  // of the cache, in bytes

// With so many tiles there is work for all threads without splitting them. Nor are they split where what the pieces leave
// behind would take more memory than this, in floats: the end of a prompt after a very long context, whose rows are many.
constexpr int64_t ENOUGH_TILES = 64;
constexpr int64_t MAX_SCRATCH = int64_t{8} << 20;

// What a thread works in.
struct Workspace {
    float * q;        // [rows][d_k], scaled
    float * scores;   // [rows][ATTENTION_CHUNK], then the weights
    float * decoded;  // [ATTENTION_CHUNK][d_k or d_v]
    float * sums;     // [rows][d_v], of a piece
    float * totals;   // [rows][d_v], of all pieces so far

    Workspace(const Attention & a, int64_t n_rows, Scratch scratch)
        : q(scratch.take<float>(n_rows * a.d_k)), scores(scratch.take<float>(n_rows * ATTENTION_CHUNK)),
          decoded(scratch.take<float>(ATTENTION_CHUNK * std::max(a.d_k, a.d_v))),
          sums(scratch.take<float>(n_rows * a.d_v)), totals(scratch.take<float>(n_rows * a.d_v)) {}

    static size_t bytes(const Attention & a, int64_t n_rows) {
        return Scratch::bytes<float>(n_rows * a.d_k) + Scratch::bytes<float>(n_rows * ATTENTION_CHUNK) +
               Scratch::bytes<float>(ATTENTION_CHUNK * std::max(a.d_k, a.d_v)) +
               2 * Scratch::bytes<float>(n_rows * a.d_v);
    }
};

float slope_of(const Attention & a, int64_t head) {
    if (a.max_bias <= 0) {
        return 1;
    }
    int64_t power = 1;  // the largest power of two up to n_heads
    while (2 * power <= a.n_heads) {
        power *= 2;
    }
    const auto n = static_cast<float>(power);
    return head < power ? std::pow(std::pow(2.0f, -a.max_bias / n), static_cast<float>(head + 1))
                        : std::pow(std::pow(2.0f, -a.max_bias / 2 / n), static_cast<float>(2 * (head - power) + 1));
}

bool is_finite(const float * values, int64_t n) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        top = std::max(top, bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
    }
    return top < 0x7f800000u;
}

// The pieces of a row, merged one after the other.
class Total {
  public:
    // values: memory for d_v floats.
    void begin(const Attention & a, int64_t head, float * values) {
        maximum_ = a.sinks != nullptr ? a.sinks[head] : -INFINITY;
        sum_ = a.sinks != nullptr ? 1.0f : 0.0f;
        values_ = values;
        d_ = a.d_v;
        std::fill(values_, values_ + d_, 0.0f);
    }

    void add(float maximum, float sum, const float * values) {
        if (sum == 0) {
            return;  // hidden as a whole
        }
        const float top = std::max(maximum_, maximum);
        const float shrink = generic::exp_or_zero(maximum_ - top);
        const float weight = generic::exp_or_zero(maximum - top);
        maximum_ = top;
        sum_ = sum_ * shrink + sum * weight;
        for (int64_t i = 0; i < d_; i++) {
            values_[i] = values_[i] * shrink + values[i] * weight;
        }
    }

    // A row that is hidden as a whole gives 0. -0 becomes 0.
    void finish(float * out) const {
        const float inverse = sum_ != 0 ? 1 / sum_ : 0.0f;
        for (int64_t i = 0; i < d_; i++) {
            out[i] = values_[i] * inverse + 0.0f;
        }
    }

  private:
    float maximum_;
    float sum_;
    float * values_;
    int64_t d_;
};

// One row of a tile.
struct Row {
    int64_t head;
    int64_t index;          // of the result
    const uint16_t * mask;  // of position 0, or nullptr
    float slope;
    float maximum;  // of the scores of a piece
    float sum;      // of its weights
};

// K or V.
struct Cache {
    const AttentionRows & rows;
    KvType type;
    int64_t d;
};

// Positions of one head, as the kernels take them.
struct Cells {
    KvType type;
    const uint8_t * data;
    size_t stride;
    int n;
};

// Which rows make a tile: n_rows from row first_row on (the heads that go by a KV head, token by token) of each of
// n_heads KV heads from kv_head on.
struct TileRange {
    int64_t sequence;
    int64_t kv_head;
    int64_t n_heads;
    int64_t first_row;
    int64_t n_rows;
};

class Tile {
  public:
    Tile(const AttentionKernels & kernels, const Attention & a, const TileRange & range, const Scratch & scratch)
        : kernels_(kernels), a_(a), range_(range), k_{a.k, a.type_k, a.d_k}, v_{a.v, a.type_v, a.d_v},
          group_(a.n_heads / a.n_kv_heads), memory_(a, range.n_heads * range.n_rows, scratch) {
        const float scale = a.softcap != 0 ? a.scale / a.softcap : a.scale;
        for (int64_t h = range.kv_head; h < range.kv_head + range.n_heads; h++) {
            for (int64_t r = range.first_row; r < range.first_row + range.n_rows; r++) {
                const int64_t token = r / group_;
                const int64_t head = h * group_ + r % group_;
                const uint8_t * mask = a.mask.data == nullptr ? nullptr
                                                              : a.mask.row(token, head % a.n_mask_heads,
                                                                           range.sequence % a.n_mask_sequences);
                rows_[n_rows_] = {head,
                                  (range.sequence * a.n_tokens + token) * a.n_heads + head,
                                  reinterpret_cast<const uint16_t *>(mask),
                                  slope_of(a, head),
                                  -INFINITY,
                                  0};
                const auto * q = reinterpret_cast<const float *>(a.q.row(token, head, range.sequence));
                for (int64_t i = 0; i < a.d_k; i++) {
                    memory_.q[n_rows_ * a.d_k + i] = q[i] * scale;
                }
                n_rows_++;
            }
        }
    }

    int n_rows() const { return n_rows_; }
    const Row & row(int r) const { return rows_[r]; }
    const float * sums(int r) const { return memory_.sums + r * a_.d_v; }
    float * total(int r) const { return memory_.totals + r * a_.d_v; }

    // Maxima, sums of weights and weighted sums of values over one piece.
    void compute_piece(int64_t piece) {
        const int64_t begin = piece * ATTENTION_PIECE;
        const int64_t end = std::min(begin + ATTENTION_PIECE, a_.n_kv);
        compute(0, n_rows_, begin, end, /*skip_hidden=*/false);
        for (int r = 0; r < n_rows_; r++) {
            if (!is_finite(sums(r), a_.d_v)) {
                compute(r, 1, begin, end, /*skip_hidden=*/true);
            }
        }
    }

  private:
    // The same for rows [first, first + n): all of them, or one. skip_hidden: values of weight 0 are not looked at.
    void compute(int first, int n, int64_t begin, int64_t end, bool skip_hidden) {
        std::fill_n(memory_.sums + first * a_.d_v, n * a_.d_v, 0.0f);
        for (int r = first; r < first + n; r++) {
            rows_[r].maximum = -INFINITY;
            rows_[r].sum = 0;
        }
        for (int64_t chunk = begin; chunk < end; chunk += ATTENTION_CHUNK) {
            const int64_t seen = chunk + count_seen(first, n, chunk, std::min(chunk + ATTENTION_CHUNK, end));
            if (seen == chunk) {
                continue;
            }
            const auto multiply = [&](int row, int n_rows, int64_t position, const Cells & k) {
                kernels_.multiply(k.type, k.data, k.stride, k.n, a_.d_k, memory_.q + row * a_.d_k, n_rows,
                                  memory_.scores + row * ATTENTION_CHUNK + (position - chunk));
            };
            const auto accumulate = [&](int row, int n_rows, int64_t position, const Cells & v) {
                const float * weights = memory_.scores + row * ATTENTION_CHUNK + (position - chunk);
                float * sums = memory_.sums + row * a_.d_v;
                if (!skip_hidden) {
                    kernels_.accumulate(v.type, v.data, v.stride, v.n, a_.d_v, weights, n_rows, sums);
                    return;
                }
                for (int p = 0; p < v.n; p++) {
                    if (weights[p] != 0) {
                        kernels_.accumulate(v.type, v.data + p * v.stride, v.stride, 1, a_.d_v, weights + p, 1, sums);
                    }
                }
            };
            for_cells(k_, first, n, chunk, seen, multiply);
            for (int r = first; r < first + n; r++) {
                weigh(r, chunk, static_cast<int>(seen - chunk));
            }
            for_cells(v_, first, n, chunk, seen, accumulate);
        }
    }

    // The scores of row r for n positions of a chunk become weights.
    void weigh(int r, int64_t chunk, int n) {
        Row & row = rows_[r];
        const uint16_t * mask = row.mask != nullptr ? row.mask + chunk : nullptr;
        const float shrink =
            kernels_.weigh(memory_.scores + r * ATTENTION_CHUNK, n, mask, row.slope, a_.softcap, row.maximum, row.sum);
        if (shrink != 1) {
            kernels_.scale(memory_.sums + r * a_.d_v, a_.d_v, shrink);
        }
    }

    // Calls function(first row, rows, first position, cells) for the rows of every KV head in [first, first + n) and for
    // positions [begin, end).
    //
    // The heads of a position lie side by side, in a row that is much longer than one of them. So a few positions are taken
    // for all heads in turn: nearly the order of the memory, which doubles what it yields.
    template <class Function>
    void for_cells(const Cache & cache, int first, int n, int64_t begin, int64_t end, const Function & function) const {
        const auto n_rows = static_cast<int>(std::min<int64_t>(n, range_.n_rows));
        const int64_t step = n == n_rows ? ATTENTION_CHUNK : STEP;
        for (int64_t position = begin; position < end; position += step) {
            for (int row = first; row < first + n; row += n_rows) {
                const uint8_t * data = cache.rows.row(position, rows_[row].head / group_, range_.sequence);
                const auto n_cells = static_cast<int>(std::min(step, end - position));
                const Cells stored{cache.type, data, cache.rows.token_stride, n_cells};
                function(row, n_rows, position, n_rows <= DIRECT_ROWS ? stored : decode(stored, cache.d));
            }
        }
    }

    Cells decode(const Cells & stored, int64_t d) const {
        kernels_.decode(stored.type, stored.data, stored.stride, stored.n, d, memory_.decoded);
        return {KvType::F32, reinterpret_cast<const uint8_t *>(memory_.decoded), static_cast<size_t>(d) * sizeof(float),
                stored.n};
    }

    // How many positions of [chunk, end) are left without those at the end that no row sees.
    int count_seen(int first, int n_rows, int64_t chunk, int64_t end) const {
        const auto n = static_cast<int>(end - chunk);
        int seen = 0;
        const uint16_t * looked_at = nullptr;
        for (int r = first; r < first + n_rows && seen < n; r++) {
            const uint16_t * mask = rows_[r].mask;
            if (mask == nullptr) {
                return n;
            }
            if (mask == looked_at) {
                continue;
            }
            looked_at = mask;
            int last = n;
            while (last > seen && mask[chunk + last - 1] == FP16_MINUS_INFINITY) {
                last--;
            }
            seen = last;
        }
        return seen;
    }

    const AttentionKernels & kernels_;
    const Attention & a_;
    const TileRange range_;
    const Cache k_;
    const Cache v_;
    const int64_t group_;
    const Workspace memory_;
    int n_rows_ = 0;
    Row rows_[MAX_ROWS];
};

}  // namespace

size_t kv_block_bytes(uint32_t type) {
    return block_bytes(static_cast<KvType>(type));
}

AttentionWork::AttentionWork(const Attention & attention) : attention_(attention) {
    const Attention & a = attention_;
    const int64_t rows_per_head = a.n_tokens * (a.n_heads / a.n_kv_heads);
    max_rows_ = std::clamp<int64_t>(TILE_VALUES / std::max(a.d_k, a.d_v) / 4 * 4, 8, MAX_ROWS);
    rows_per_tile_ = std::clamp<int64_t>(rows_per_head, 1, max_rows_);
    tiles_per_head_ = (rows_per_head + rows_per_tile_ - 1) / rows_per_tile_;
    n_pieces_ = (a.n_kv + ATTENTION_PIECE - 1) / ATTENTION_PIECE;
    const int64_t n_tiles = a.n_sequences * a.n_kv_heads * tiles_per_head_;
    const bool is_short = n_tiles < ENOUGH_TILES && n_rows() * n_pieces_ * partial_size() <= MAX_SCRATCH;
    n_splits_ = is_short ? std::max<int64_t>(n_pieces_, 1) : 1;
}

size_t AttentionWork::n_partials() const {
    return is_split() ? static_cast<size_t>(n_rows() * n_pieces_ * partial_size()) : 0;
}

size_t AttentionWork::scratch_bytes() const {
    return Workspace::bytes(attention_, max_rows_);
}

// Several KV heads make a tile, which is then read nearly in the order of the memory, as long as there is one for each thread.
int64_t AttentionWork::heads_per_tile(int n_threads) const {
    const int64_t n_heads = attention_.n_kv_heads;
    const int64_t units_per_head = attention_.n_sequences * tiles_per_head_ * n_splits_;
    for (int64_t n = max_rows_ / rows_per_tile_; n > 1; n--) {
        if (n_heads % n == 0 && n_heads / n * units_per_head >= n_threads) {
            return n;
        }
    }
    return 1;
}

void AttentionWork::run(const AttentionKernels & kernels, int n_threads, float * partials, Scratch scratch) {
    const Attention & a = attention_;
    const int64_t heads = heads_per_tile(n_threads);
    const int64_t groups = a.n_kv_heads / heads;
    const int64_t n_units = a.n_sequences * groups * tiles_per_head_ * n_splits_;
    for (int64_t unit; (unit = next_unit_.fetch_add(1, std::memory_order_relaxed)) < n_units;) {
        const int64_t split = unit % n_splits_;
        const int64_t first_row = unit / n_splits_ % tiles_per_head_ * rows_per_tile_;
        const int64_t group = unit / n_splits_ / tiles_per_head_ % groups;
        const int64_t sequence = unit / n_splits_ / tiles_per_head_ / groups;
        const int64_t n_rows = std::min(rows_per_tile_, a.n_tokens * (a.n_heads / a.n_kv_heads) - first_row);
        Tile tile(kernels, a, {sequence, group * heads, heads, first_row, n_rows}, scratch);
        if (is_split()) {
            tile.compute_piece(split);
            for (int r = 0; r < tile.n_rows(); r++) {
                float * partial = partials + (tile.row(r).index * n_pieces_ + split) * partial_size();
                partial[0] = tile.row(r).maximum;
                partial[1] = tile.row(r).sum;
                std::copy_n(tile.sums(r), a.d_v, partial + 2);
            }
            continue;
        }
        Total totals[MAX_ROWS];
        for (int r = 0; r < tile.n_rows(); r++) {
            totals[r].begin(a, tile.row(r).head, tile.total(r));
        }
        for (int64_t piece = 0; piece < n_pieces_; piece++) {
            tile.compute_piece(piece);
            for (int r = 0; r < tile.n_rows(); r++) {
                totals[r].add(tile.row(r).maximum, tile.row(r).sum, tile.sums(r));
            }
        }
        for (int r = 0; r < tile.n_rows(); r++) {
            totals[r].finish(a.out + tile.row(r).index * a.d_v);
        }
    }
}

void AttentionWork::combine(int thread, int n_threads, const float * partials) const {
    const int64_t end = n_rows() * (thread + 1) / n_threads;
    for (int64_t index = n_rows() * thread / n_threads; index < end; index++) {
        float * out = attention_.out + index * attention_.d_v;
        Total total;
        total.begin(attention_, index % attention_.n_heads, out);
        for (int64_t piece = 0; piece < n_pieces_; piece++) {
            const float * partial = partials + (index * n_pieces_ + piece) * partial_size();
            total.add(partial[0], partial[1], partial + 2);
        }
        total.finish(out);
    }
}

}  // namespace tern
