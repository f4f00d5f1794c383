// FLASH_ATTN_EXT of the graph as an AttentionWork (cpu/attention.h).
#pragma once

#include "../cpu/attention.h"
#include "../host/host_api.h"

namespace tern {

// Whether our kernels take the node: a FLASH_ATTN_EXT with head sizes in whole blocks and a cache type that they know. The
// others are the stock backend's, and so are all if the environment variable TERN_ATTENTION is "stock".
bool is_our_attention(const ggml_tensor * node);

// An attention of a graph, and where its threads meet.
struct AttentionTask {
    AttentionWork work;
    float * partials = nullptr;  // work.n_partials() floats
    const ThreadScratch & scratch;

    // node: one that is_our_attention() accepts
    AttentionTask(const ggml_tensor * node, const ThreadScratch & scratch);
};

// The functions of the custom operations, one after the other; data: an AttentionTask. The second is for split work only.
void attend(ggml_tensor * dst, int ith, int nth, void * data);
void combine_attention(ggml_tensor * dst, int ith, int nth, void * data);

}  // namespace tern
