// Attention: for every query row (one head of one token)
//
//   out = sum over positions j of  w_j v_j / sum of w_j      with  w_j = e^(s_j),  s_j = scale * q.k_j + slope * mask_j
//
// over a KV cache in any of ggml's cache types, which is decoded in registers (or, where many rows share a KV head, chunk
// by chunk into the first-level cache) and never written out.
//
// The result of a row has the same bits whatever the number of threads and whatever other rows are computed with it, and
// positions that the mask hides do not change it. This is how:
// - Positions are taken in chunks of ATTENTION_CHUNK and pieces of ATTENTION_PIECE, which begin at multiples of these.
// - A score is summed over the dimensions in an order that the instruction set alone decides. The weighted values are
//   summed position by position, each element for itself. Neither depends on how many rows or positions a kernel
//   takes at a time, nor on whether it decodes K and V itself or finds them decoded.
// - A hidden position has the weight 0, and so has what is missing to a whole chunk. Adding 0 changes no sum (but for the
//   sign of a zero, which the end of the computation takes away), nor does a chunk of such positions change the maximum:
//   so they may be skipped or not.
// - Each piece starts anew, with a maximum of its own. The pieces of a row are merged one after the other in their order,
//   by one thread that has computed them all or after several have. A piece that is hidden as a whole is left out.
// - 0 times infinity or NaN is not 0, and a hidden cell of the cache may hold anything. A row whose sums come out as no
//   finite numbers is done again alone, with the positions of weight 0 left out.
#pragma once

#include "scratch.h"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tern {

struct AttentionKernels;

constexpr int ATTENTION_CHUNK = 64;
constexpr int ATTENTION_PIECE = 256;

// Types of a KV cache, by their ids in ggml and GGUF. All of them come in blocks of 32 values, as far as we look.
enum class KvType : uint32_t { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, BF16 = 30 };
constexpr int KV_BLOCK = 32;

// Bytes of 32 values; 0 for an id that is none of the above.
size_t kv_block_bytes(uint32_t type);

// A tensor of rows: those of a token (position), head and sequence begin where the strides, in bytes, say.
struct AttentionRows {
    const uint8_t * data;
    size_t token_stride;
    size_t head_stride;
    size_t sequence_stride;

    const uint8_t * row(int64_t token, int64_t head, int64_t sequence) const {
        return data + token * token_stride + head * head_stride + sequence * sequence_stride;
    }
};

struct Attention {
    int64_t n_tokens;
    int64_t n_heads;
    int64_t n_kv_heads;  // divides n_heads: head h goes by KV head h / (n_heads / n_kv_heads)
    int64_t n_sequences;
    int64_t n_kv;  // positions
    int64_t d_k;   // values of a head of Q and K, a multiple of KV_BLOCK
    int64_t d_v;   // values of a head of V and of the result, a multiple of KV_BLOCK
    KvType type_k;
    KvType type_v;
    AttentionRows q;  // float
    AttentionRows k;
    AttentionRows v;
    AttentionRows mask;        // fp16, n_kv to a row, -inf where a position is hidden; no mask if data is nullptr
    int64_t n_mask_heads;      // head h goes by mask head h % n_mask_heads
    int64_t n_mask_sequences;  // likewise
    float scale;
    float max_bias;       // of ALiBi (https://arxiv.org/abs/2108.12409): the slopes of the heads go by it; 0: all are 1
    float softcap;        // c > 0: scores become c * tanh(score / c)
    const float * sinks;  // one for each head: a score with no value, that counts in the sum of the weights; or nullptr
    float * out;          // [n_sequences][n_tokens][n_heads][d_v]
};

// The work on one attention. Every thread calls run() once and then, if is_split(), after all are through, combine().
class AttentionWork {
  public:
    explicit AttentionWork(const Attention & attention);

    // Whether the pieces of a row are computed apart: where there are few rows, several threads share them.
    bool is_split() const { return n_splits_ > 1; }
    // What the pieces leave for combine(), in floats, and what a thread works in.
    size_t n_partials() const;
    size_t scratch_bytes() const;

    // Before the work is done again.
    void reset() { next_unit_.store(0, std::memory_order_relaxed); }

    void run(const AttentionKernels & kernels, int n_threads, float * partials, Scratch scratch);
    void combine(int thread, int n_threads, const float * partials) const;

  private:
    int64_t n_rows() const { return attention_.n_sequences * attention_.n_tokens * attention_.n_heads; }
    int64_t partial_size() const { return attention_.d_v + 2; }
    int64_t heads_per_tile(int n_threads) const;

    Attention attention_;
    int64_t max_rows_;       // of a tile
    int64_t rows_per_tile_;  // of one KV head
    int64_t tiles_per_head_;
    int64_t n_pieces_;
    int64_t n_splits_;  // the units of work that the pieces of a tile make: one for all, or one for each
    std::atomic<int64_t> next_unit_{0};
};

}  // namespace tern
