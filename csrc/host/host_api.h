// The functions of the host's ggml, found at run time.
//
// The plug-in is linked against no ggml at all. A process may hold several copies of libggml (a Python wheel keeps three
// files with the same code), and each copy has a registry of its own; the right one is the one that calls us. So the
// library that contains the caller of ggml_backend_init() is looked up, and every function is taken from it and from
// what it depends on. The same binary thereby fits hosts whose libraries have other names or versions, and a host
// without exported symbols can be told what to do instead of failing in the dynamic linker.
#pragma once

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "gguf.h"

#include <cstdint>
#include <cstdio>
#include <string>

namespace tern {

#define TERN_HOST_FUNCTIONS(X)                                                                                         \
    X(ggml_version)                                                                                                    \
    X(ggml_op_name)                                                                                                    \
    X(ggml_op_desc)                                                                                                    \
    X(ggml_get_type_traits)                                                                                            \
    X(ggml_nbytes)                                                                                                     \
    X(ggml_init)                                                                                                       \
    X(ggml_free)                                                                                                       \
    X(ggml_tensor_overhead)                                                                                            \
    X(ggml_new_tensor_3d)                                                                                              \
    X(ggml_mul_mat)                                                                                                    \
    X(ggml_mul_mat_id)                                                                                                 \
    X(ggml_get_rows)                                                                                                   \
    X(ggml_view_1d)                                                                                                    \
    X(ggml_view_4d)                                                                                                    \
    X(ggml_reshape_4d)                                                                                                 \
    X(ggml_permute)                                                                                                    \
    X(ggml_cont)                                                                                                       \
    X(ggml_add)                                                                                                        \
    X(ggml_sub)                                                                                                        \
    X(ggml_mul)                                                                                                        \
    X(ggml_relu)                                                                                                       \
    X(ggml_sqr)                                                                                                        \
    X(ggml_custom_4d)                                                                                                  \
    X(ggml_new_graph)                                                                                                  \
    X(ggml_build_forward_expand)                                                                                       \
    X(ggml_graph_size)                                                                                                 \
    X(ggml_graph_n_nodes)                                                                                              \
    X(ggml_graph_nodes)                                                                                                \
    X(ggml_set_output)                                                                                                 \
    X(ggml_backend_reg_count)                                                                                          \
    X(ggml_backend_reg_get)                                                                                            \
    X(ggml_backend_reg_name)                                                                                           \
    X(ggml_backend_reg_dev_count)                                                                                      \
    X(ggml_backend_reg_dev_get)                                                                                        \
    X(ggml_backend_reg_get_proc_address)                                                                               \
    X(ggml_backend_dev_by_type)                                                                                        \
    X(ggml_backend_dev_name)                                                                                           \
    X(ggml_backend_dev_description)                                                                                    \
    X(ggml_backend_dev_type)                                                                                           \
    X(ggml_backend_dev_get_props)                                                                                      \
    X(ggml_backend_dev_init)                                                                                           \
    X(ggml_backend_dev_buffer_type)                                                                                    \
    X(ggml_backend_dev_supports_op)                                                                                    \
    X(ggml_backend_dev_backend_reg)                                                                                    \
    X(ggml_backend_name)                                                                                               \
    X(ggml_backend_get_device)                                                                                         \
    X(ggml_backend_graph_compute)                                                                                      \
    X(ggml_backend_synchronize)                                                                                        \
    X(ggml_backend_free)                                                                                               \
    X(ggml_backend_buft_name)                                                                                          \
    X(ggml_backend_buft_is_host)                                                                                       \
    X(ggml_backend_buft_get_alignment)                                                                                 \
    X(ggml_backend_buft_get_alloc_size)                                                                                \
    X(ggml_backend_buft_get_device)                                                                                    \
    X(ggml_backend_buft_alloc_buffer)                                                                                  \
    X(ggml_backend_buffer_init)                                                                                        \
    X(ggml_backend_buffer_get_base)                                                                                    \
    X(ggml_backend_buffer_get_size)                                                                                    \
    X(ggml_backend_buffer_get_type)                                                                                    \
    X(ggml_backend_buffer_free)                                                                                        \
    X(ggml_backend_tensor_alloc)                                                                                       \
    X(ggml_backend_tensor_set)                                                                                         \
    X(ggml_backend_tensor_get)                                                                                         \
    X(ggml_backend_cpu_buffer_type)                                                                                    \
    X(ggml_backend_cpu_buffer_from_ptr)                                                                                \
    X(gguf_init_from_file)                                                                                             \
    X(gguf_init_from_file_ptr)                                                                                         \
    X(gguf_write_to_file)                                                                                              \
    X(gguf_free)                                                                                                       \
    X(gguf_get_n_tensors)                                                                                              \
    X(gguf_get_tensor_name)                                                                                            \
    X(gguf_get_tensor_type)

// Reads up to `length` bytes of a GGUF file at `offset`, and returns how many.
using GgufReader = size_t (*)(void * data, void * output, uint64_t offset, size_t length);

struct HostApi {
#define X(name) decltype(&::name) name = nullptr;
    TERN_HOST_FUNCTIONS(X)
#undef X

    // What not every host has; declared here, as not every header has it either.
    gguf_context * (*gguf_init_from_callback)(GgufReader reader, void * data, size_t max_chunk, uint64_t file_size,
                                              gguf_init_params params) = nullptr;
    bool (*gguf_write_to_file_ptr)(const gguf_context * context, FILE * file, bool only_meta) = nullptr;
    uint64_t (*ggml_graph_next_uid)() = nullptr;

    std::string remark;  // what to tell the user about this host, if anything

    // Facts about this host that differ between versions.
    int api_version = 0;   // of the backend interface: 2 or 3
    ggml_op op_mul_mat{};  // operation numbers move between versions; these are looked up by name
    ggml_op op_mul_mat_id{};
    ggml_op op_get_rows{};
    ggml_op op_flash_attn_ext{};
    ggml_op op_custom{};
    ggml_op op_none{};
    ggml_op op_view{};
    ggml_op op_reshape{};
    ggml_op op_permute{};
    ggml_op op_transpose{};
    ggml_op op_unary{};
    ggml_op op_glu{};
    ggml_op op_mul{};
    ggml_op op_rms_norm{};
    bool knows_q2_0 = false;      // whether type 42 is the host's own
    bool has_graph_uids = false;  // whether graphs that are the same can be told by ggml_cgraph::uid
};

// Resolves and checks the host whose code contains `caller`. On failure returns nullptr and puts one line, without a
// newline, that says what was found and what to do, into `error`. The result is the same for every later call.
const HostApi * connect_host(const void * caller, std::string & error);

// The connected host. Only valid after connect_host() succeeded.
const HostApi & host();

}  // namespace tern
