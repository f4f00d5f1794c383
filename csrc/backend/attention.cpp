// Reading a FLASH_ATTN_EXT node. Its sources: q [d_k, n_tokens, n_heads, n_sequences], k and v [d, n_kv, n_kv_heads,
// n_sequences], mask [n_kv, n_tokens or more, 1 or heads, 1 or sequences], sinks [n_heads]; its result: [d_v, n_heads,
// n_tokens, n_sequences], contiguous.
#include "attention.h"

#include "../cpu/isa.h"

#include <cstdlib>
#include <cstring>

namespace tern {

namespace {

bool stock_is_wanted() {
    static const char * const wanted = std::getenv("TERN_ATTENTION");
    return wanted != nullptr && std::strcmp(wanted, "stock") == 0;
}

float parameter(const ggml_tensor * node, int index) {
    float value;
    std::memcpy(&value, node->op_params + index, sizeof(value));
    return value;
}

AttentionRows rows_of(const ggml_tensor * t) {
    return {static_cast<const uint8_t *>(t->data), t->nb[1], t->nb[2], t->nb[3]};
}

Attention read_node(const ggml_tensor * node) {
    const ggml_tensor * q = node->src[0];
    const ggml_tensor * k = node->src[1];
    const ggml_tensor * v = node->src[2];
    const ggml_tensor * mask = node->src[3];
    const ggml_tensor * sinks = node->src[4];
    Attention a{};
    a.n_tokens = q->ne[1];
    a.n_heads = q->ne[2];
    a.n_kv_heads = k->ne[2];
    a.n_sequences = q->ne[3];
    a.n_kv = k->ne[1];
    a.d_k = k->ne[0];
    a.d_v = v->ne[0];
    a.type_k = static_cast<KvType>(k->type);
    a.type_v = static_cast<KvType>(v->type);
    a.q = rows_of(q);
    a.k = rows_of(k);
    a.v = rows_of(v);
    if (mask != nullptr) {
        a.mask = rows_of(mask);
        a.n_mask_heads = mask->ne[2];
        a.n_mask_sequences = mask->ne[3];
    }
    a.scale = parameter(node, 0);
    a.max_bias = parameter(node, 1);
    a.softcap = parameter(node, 2);
    a.sinks = sinks != nullptr ? static_cast<const float *>(sinks->data) : nullptr;
    a.out = static_cast<float *>(node->data);
    return a;
}

// Whether the kernels can read the rows: of a type that they know, as this host lays it out, in whole blocks of 32.
bool is_cache(const ggml_tensor * t) {
    const ggml_type_traits & traits = *host().ggml_get_type_traits(t->type);
    const auto values = static_cast<size_t>(traits.blck_size);
    const size_t bytes = kv_block_bytes(static_cast<uint32_t>(t->type));
    return bytes != 0 && traits.type_size * KV_BLOCK == bytes * values && t->nb[0] == traits.type_size &&
           t->ne[0] % KV_BLOCK == 0;
}

}  // namespace

bool is_our_attention(const ggml_tensor * node) {
    if (node->op != host().op_flash_attn_ext || stock_is_wanted()) {
        return false;
    }
    const ggml_tensor * q = node->src[0];
    const ggml_tensor * k = node->src[1];
    const ggml_tensor * v = node->src[2];
    const ggml_tensor * mask = node->src[3];
    return is_cache(k) && is_cache(v) && q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) &&
           (mask == nullptr || mask->type == GGML_TYPE_F16) && k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0 &&
           k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3];
}

AttentionTask::AttentionTask(const ggml_tensor * node, const ThreadScratch & scratch)
    : work(read_node(node)), scratch(scratch) {}

void attend(ggml_tensor *, int ith, int nth, void * data) {
    auto & task = *static_cast<AttentionTask *>(data);
    task.work.run(isa().attention, nth, task.partials, task.scratch.of(ith));
}

void combine_attention(ggml_tensor *, int ith, int nth, void * data) {
    const auto & task = *static_cast<const AttentionTask *>(data);
    task.work.combine(ith, nth, task.partials);
}

}  // namespace tern
