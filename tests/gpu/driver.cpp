// Runs models in whatever llama.cpp it is given, and tells what came out: logits, tokens, into how many pieces the graph was split.
//
// usage: driver LIBLLAMA < commands          one command a line, words separated by blanks:
//
//   backend FILE                             loads a backend
//   backends FOLDER                          loads the backends of a folder, as llama.cpp's programs do, and GGML_BACKEND_PATH
//   rpc HOST:PORT                            adds the devices of an RPC server
//   unload NAME                              unloads the backend of this name
//   devices                                  prints "device NAME" for each
//   model NAME FILE [KEY=VALUE...]           loads a model: n_gpu_layers, load_mode, devices (names, separated by commas),
//                                            on_cpu, on_gpu (a pattern of names of tensors, as -ot has it)
//   context NAME MODEL [KEY=VALUE...]        n_ctx, n_batch, n_threads, flash_attn, type_k, type_v, lora (a file)
//   logits CONTEXT FILE TOKEN...             evaluates tokens, and writes float32 [n_tokens, n_vocabulary]
//   greedy CONTEXT COUNT TOKEN...            evaluates tokens, and prints "tokens T..." with what is likeliest to follow
//   free NAME                                a context, a model
//
// After logits and greedy it prints "splits N...", of each graph that was computed. All that llama.cpp says goes to stderr.
//
// It is linked with no llama.cpp, and fits all whose structures of parameters begin alike, which it checks.
#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void * libllama;

// A function of the host, or of a library that it is linked with.
template <typename Function> Function * of_host(const char * name) {
    void * found = dlsym(libllama, name);
    if (found == nullptr) {
        throw std::runtime_error(std::string("the host has no ") + name);
    }
    return reinterpret_cast<Function *>(found);
}
#define HOST(name) of_host<decltype(name)>(#name)

std::vector<int> splits;

// Parameters of a host whose structure may have more at its end than ours. They are given by value: in memory, from their start.
template <typename Known> union Parameters {
    Known known;
    char room[1024];
};
using ModelParameters = Parameters<llama_model_params>;
using ContextParameters = Parameters<llama_context_params>;

ModelParameters model_defaults() {
    auto found = of_host<ModelParameters()>("llama_model_default_params")();
    if (found.known.n_gpu_layers != -1 || found.known.load_mode != LLAMA_LOAD_MODE_AUTO ||
        found.known.devices != nullptr) {
        throw std::runtime_error("the host has other parameters of models");
    }
    return found;
}

ContextParameters context_defaults() {
    auto found = of_host<ContextParameters()>("llama_context_default_params")();
    if (found.known.n_ctx != 512 || found.known.n_batch != 2048 ||
        found.known.flash_attn_type != LLAMA_FLASH_ATTN_TYPE_AUTO || found.known.type_k != GGML_TYPE_F16 ||
        found.known.type_v != GGML_TYPE_F16) {
        throw std::runtime_error("the host has other parameters of contexts");
    }
    return found;
}

struct Context {
    llama_context * context;
    llama_model * model;
};
std::map<std::string, llama_model *> models;
std::map<std::string, Context> contexts;
// What models were given to look at while they live.
std::deque<std::vector<ggml_backend_dev_t>> device_lists;
std::deque<std::string> patterns;

using Options = std::map<std::string, std::string>;

Options read_options(std::istream & words) {
    Options options;
    for (std::string word; words >> word;) {
        const size_t at = word.find('=');
        options[word.substr(0, at)] = at == std::string::npos ? "" : word.substr(at + 1);
    }
    return options;
}

// Sets a number that an option says, and forgets the option.
template <typename Number> void take(Options & options, const char * name, Number & number) {
    if (auto found = options.find(name); found != options.end()) {
        number = Number(std::stol(found->second));
        options.erase(found);
    }
}

std::string take_text(Options & options, const char * name) {
    std::string text;
    if (auto found = options.find(name); found != options.end()) {
        text = found->second;
        options.erase(found);
    }
    return text;
}

void check_all_taken(const Options & options) {
    if (!options.empty()) {
        throw std::runtime_error("no such option: " + options.begin()->first);
    }
}

void load_model(std::istream & words) {
    std::string name, path;
    words >> name >> path;
    Options options = read_options(words);
    ModelParameters parameters = model_defaults();
    take(options, "n_gpu_layers", parameters.known.n_gpu_layers);
    take(options, "load_mode", parameters.known.load_mode);
    if (std::istringstream names(take_text(options, "devices")); names.rdbuf()->in_avail() > 0) {
        std::vector<ggml_backend_dev_t> devices;
        for (std::string device; std::getline(names, device, ',');) {
            devices.push_back(HOST(ggml_backend_dev_by_name)(device.c_str()));
            if (devices.back() == nullptr) {
                throw std::runtime_error("no device " + device);
            }
        }
        devices.push_back(nullptr);
        device_lists.push_back(devices);
        parameters.known.devices = device_lists.back().data();
    }
    llama_model_tensor_buft_override overrides[] = {{}, {nullptr, nullptr}};
    if (std::string pattern = take_text(options, "on_cpu"); !pattern.empty()) {
        patterns.push_back(pattern);
        overrides[0] = {patterns.back().c_str(), HOST(ggml_backend_cpu_buffer_type)()};
        parameters.known.tensor_buft_overrides = overrides;
    }
    if (std::string pattern = take_text(options, "on_gpu"); !pattern.empty()) {
        patterns.push_back(pattern);
        overrides[0] = {patterns.back().c_str(), HOST(ggml_backend_dev_buffer_type)(
                                                     HOST(ggml_backend_dev_by_type)(GGML_BACKEND_DEVICE_TYPE_GPU))};
        parameters.known.tensor_buft_overrides = overrides;
    }
    check_all_taken(options);
    models[name] =
        of_host<llama_model *(const char *, ModelParameters)>("llama_model_load_from_file")(path.c_str(), parameters);
    if (models[name] == nullptr) {
        throw std::runtime_error("not loaded: " + path);
    }
}

void make_context(std::istream & words) {
    std::string name, model_name;
    words >> name >> model_name;
    llama_model * model = models.at(model_name);
    Options options = read_options(words);
    ContextParameters parameters = context_defaults();
    parameters.known.n_threads = parameters.known.n_threads_batch = 1;
    take(options, "n_ctx", parameters.known.n_ctx);
    take(options, "n_batch", parameters.known.n_batch);
    parameters.known.n_ubatch = parameters.known.n_batch;
    take(options, "n_threads", parameters.known.n_threads);
    parameters.known.n_threads_batch = parameters.known.n_threads;
    take(options, "flash_attn", parameters.known.flash_attn_type);
    take(options, "type_k", parameters.known.type_k);
    take(options, "type_v", parameters.known.type_v);
    const std::string lora = take_text(options, "lora");
    check_all_taken(options);
    auto * init = of_host<llama_context *(llama_model *, ContextParameters)>("llama_init_from_model");
    llama_context * context = init(model, parameters);
    if (context == nullptr) {
        throw std::runtime_error("no context for " + model_name);
    }
    contexts[name] = {context, model};
    if (!lora.empty()) {
        llama_adapter_lora * adapter = HOST(llama_adapter_lora_init)(model, lora.c_str());
        float scale = 1;
        if (adapter == nullptr || HOST(llama_set_adapters_lora)(context, &adapter, 1, &scale) != 0) {
            throw std::runtime_error("no LoRA of " + lora);
        }
    }
}

// Evaluates tokens behind those before, in batches of what the context takes. each(row) gets the logits of every token.
template <typename Each> void evaluate(const Context & context, std::vector<llama_token> tokens, const Each & each) {
    const auto n_batch = size_t(HOST(llama_n_batch)(context.context));
    for (size_t begin = 0; begin < tokens.size(); begin += n_batch) {
        const auto n = int32_t(std::min(n_batch, tokens.size() - begin));
        std::vector<int8_t> wanted(size_t(n), 1);
        llama_batch batch = HOST(llama_batch_get_one)(tokens.data() + begin, n);
        batch.logits = wanted.data();
        if (const int status = HOST(llama_decode)(context.context, batch); status != 0) {
            throw std::runtime_error("llama_decode gives " + std::to_string(status));
        }
        for (int32_t i = 0; i < n; i++) {
            each(HOST(llama_get_logits_ith)(context.context, i));
        }
    }
}

std::vector<llama_token> read_tokens(std::istream & words) {
    std::vector<llama_token> tokens;
    for (llama_token token; words >> token;) {
        tokens.push_back(token);
    }
    return tokens;
}

int n_vocabulary(const Context & context) {
    return HOST(llama_vocab_n_tokens)(HOST(llama_model_get_vocab)(context.model));
}

void print(const char * what, const std::vector<int> & numbers) {
    printf("%s", what);
    for (int number : numbers) {
        printf(" %d", number);
    }
    printf("\n");
    fflush(stdout);
}

void write_logits(std::istream & words) {
    std::string name, path;
    words >> name >> path;
    const Context & context = contexts.at(name);
    FILE * file = fopen(path.c_str(), "wb");
    if (file == nullptr) {
        throw std::runtime_error("cannot write " + path);
    }
    const auto n = size_t(n_vocabulary(context));
    evaluate(context, read_tokens(words), [&](const float * row) { fwrite(row, sizeof *row, n, file); });
    fclose(file);
}

void greedy(std::istream & words) {
    std::string name;
    int count = 0;
    words >> name >> count;
    const Context & context = contexts.at(name);
    std::vector<int> said;
    for (std::vector<llama_token> tokens = read_tokens(words); int(said.size()) < count; tokens = {said.back()}) {
        const float * last = nullptr;
        evaluate(context, tokens, [&](const float * row) { last = row; });
        said.push_back(int(std::max_element(last, last + n_vocabulary(context)) - last));
        print("token", {said.back()});
    }
    print("tokens", said);
}

// What llama.cpp says, but for what it says to its developers.
void log(ggml_log_level level, const char * text, void *) {
    static bool shown = true;
    if (level != GGML_LOG_LEVEL_CONT) {
        shown = level != GGML_LOG_LEVEL_DEBUG;
    }
    if (shown) {
        fputs(text, stderr);
    }
}

void add_rpc_server(const std::string & endpoint) {
    ggml_backend_reg_t rpc = HOST(ggml_backend_reg_by_name)("RPC");
    if (rpc == nullptr) {
        throw std::runtime_error("no RPC backend is loaded");
    }
    void * found = HOST(ggml_backend_reg_get_proc_address)(rpc, "ggml_backend_rpc_add_server");
    ggml_backend_reg_t server = reinterpret_cast<ggml_backend_reg_t (*)(const char *)>(found)(endpoint.c_str());
    if (server == nullptr) {
        throw std::runtime_error("no RPC server at " + endpoint);
    }
    HOST(ggml_backend_register)(server);
}

void run(const std::string & line) {
    std::istringstream words(line);
    std::string command, name;
    words >> command;
    splits.clear();
    if (command == "backend") {
        words >> name;
        if (HOST(ggml_backend_load)(name.c_str()) == nullptr) {
            throw std::runtime_error("not loaded: " + name);
        }
    } else if (command == "backends") {
        words >> name;
        HOST(ggml_backend_load_all_from_path)(name.c_str());
    } else if (command == "unload") {
        words >> name;
        ggml_backend_reg_t backend = HOST(ggml_backend_reg_by_name)(name.c_str());
        if (backend == nullptr) {
            throw std::runtime_error("no such backend: " + name);
        }
        HOST(ggml_backend_unload)(backend);
    } else if (command == "rpc") {
        words >> name;
        add_rpc_server(name);
    } else if (command == "devices") {
        for (size_t i = 0; i < HOST(ggml_backend_dev_count)(); i++) {
            printf("device %s\n", HOST(ggml_backend_dev_name)(HOST(ggml_backend_dev_get)(i)));
        }
    } else if (command == "model") {
        load_model(words);
    } else if (command == "context") {
        make_context(words);
    } else if (command == "logits") {
        write_logits(words);
        print("splits", splits);
    } else if (command == "greedy") {
        greedy(words);
        print("splits", splits);
    } else if (command == "free") {
        words >> name;
        if (auto context = contexts.find(name); context != contexts.end()) {
            HOST(llama_free)(context->second.context);
            contexts.erase(context);
        } else {
            HOST(llama_model_free)(models.at(name));
            models.erase(name);
        }
    } else {
        throw std::runtime_error("no such command: " + line);
    }
}

}  // namespace

// A program's own functions come before those of libraries that it opens: libllama calls this one.
extern "C" ggml_status ggml_backend_sched_graph_compute_async(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    splits.push_back(HOST(ggml_backend_sched_get_n_splits)(sched));
    return HOST(ggml_backend_sched_graph_compute_async)(sched, graph);
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: driver LIBLLAMA < commands\n");
        return 2;
    }
    libllama = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (libllama == nullptr) {
        fprintf(stderr, "driver: %s\n", dlerror());
        return 1;
    }
    try {
        HOST(llama_log_set)(log, nullptr);
        std::string line;
        while (std::getline(std::cin, line)) {
            run(line);
        }
        for (const auto & [name, context] : contexts) {
            HOST(llama_free)(context.context);
        }
        for (const auto & [name, model] : models) {
            HOST(llama_model_free)(model);
        }
    } catch (const std::exception & error) {
        fprintf(stderr, "driver: %s\n", error.what());
        return 1;
    }
}
