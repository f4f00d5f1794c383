// What stands in the place of the host's readers and writers of GGUF files.
//
// libllama reads a model's header with gguf_init_from_file(), which refuses type ids beyond its table, and then opens the file
// itself to read the tensor data by offset. Our function in that import slot (host/import_slots.h) hands the real one the
// translated header (model/translation.h) in front of the file's bytes. The file itself is only read.
//
// A model that is saved again gets the ids of files back, or is refused where the keys that llama.cpp writes do not say what its
// weights need.
#include "../format/gguf_header.h"
#include "../host/import_slots.h"
#include "../model/translation.h"
#include "backend.h"
#include "weight_layout.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <sys/mman.h>
#include <system_error>
#include <unistd.h>

namespace tern {

namespace {

Models & models() {
    static Models all;
    return all;
}

// The model that this thread has read last.
thread_local std::shared_ptr<Model> t_reading;

void report(const char * name, const std::string & what) {
    std::fprintf(stderr, "ggml-tern: %s: %s\n", name, what.c_str());
}

// Says a thing about a file once, however often its header is read.
void report_once(const char * name, const std::string & what) {
    static std::mutex mutex;
    static std::set<std::string> said;
    const std::lock_guard<std::mutex> lock(mutex);
    if (said.insert(name + what).second) {
        report(name, what);
    }
}

// ---- a translated header and the file behind it ----

struct TranslatedFile {
    std::string header;      // up to the data section
    std::string_view bytes;  // of the file
    uint64_t end_of_reads = 0;
};

std::optional<TranslatedFile> translate(const char * name, std::string_view gguf) {
    // Without our devices the host could not compute our types.
    if (!is_registered()) {
        return std::nullopt;
    }
    static const ProcessTypes types{slot_of_file_type, treated_slot_of_file_type, is_our_slot};
    std::vector<std::string> remarks;
    auto header = translate_header(gguf, name, types, models(), t_reading, remarks);
    for (const std::string & remark : remarks) {
        report_once(name, remark);
    }
    if (!header) {
        return std::nullopt;
    }
    tell_of_gpus();
    return TranslatedFile{std::move(*header), gguf};
}

size_t read_translated(void * data, void * output, uint64_t offset, size_t length) {
    auto & file = *static_cast<TranslatedFile *>(data);
    if (offset >= file.bytes.size()) {
        return 0;
    }
    length = std::min<uint64_t>(length, file.bytes.size() - offset);
    size_t from_header = 0;
    if (offset < file.header.size()) {
        from_header = std::min<uint64_t>(length, file.header.size() - offset);
        std::memcpy(output, file.header.data() + offset, from_header);
    }
    std::memcpy(static_cast<char *>(output) + from_header, file.bytes.data() + offset + from_header,
                length - from_header);
    file.end_of_reads = std::max(file.end_of_reads, offset + length);
    return length;
}

// ---- the same as a file in memory, for hosts that read only files ----

// What the system refused while a copy was made; the file is ours, so the host cannot go on without it.
std::runtime_error copy_error(const char * call) {
    const int number = errno;
    return std::runtime_error(std::string("cannot keep a translated header in memory: ") + call + ": " +
                              std::strerror(number) +
                              (number == EFBIG ? "; raise the limit on the size of files (ulimit -f)" : ""));
}

// A file that grows beyond the limit of its process (ulimit -f) ends the process by a signal. While this lives, the call fails
// instead.
class NoSizeSignal {
  public:
    NoSizeSignal() {
        sigemptyset(&signal_);
        sigaddset(&signal_, SIGXFSZ);
        sigset_t pending;
        sigpending(&pending);
        was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
        pthread_sigmask(SIG_BLOCK, &signal_, &before_);
    }
    ~NoSizeSignal() {
        const timespec no_time{};
        while (!was_pending_ && sigtimedwait(&signal_, nullptr, &no_time) < 0 && errno == EINTR) {
        }
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }
    NoSizeSignal(const NoSizeSignal &) = delete;
    NoSizeSignal & operator=(const NoSizeSignal &) = delete;

  private:
    sigset_t signal_;
    sigset_t before_;
    bool was_pending_;
};

void write_all(int fd, const char * data, size_t size, off_t offset) {
    while (size > 0) {
        const ssize_t written = pwrite(fd, data, size, offset);
        if (written < 0 && errno != EINTR) {
            throw copy_error("pwrite");
        }
        if (written > 0) {
            data += written;
            size -= static_cast<size_t>(written);
            offset += written;
        }
    }
}

// A sparse file, as long as the original, that holds the header alone (with_data: everything) from `start` on.
FILE * copy_in_memory(const TranslatedFile & file, size_t start, bool with_data) {
    const int fd = memfd_create("ggml-tern", MFD_CLOEXEC);
    if (fd < 0) {
        throw copy_error("memfd_create");
    }
    try {
        const NoSizeSignal no_signal;
        if (ftruncate(fd, static_cast<off_t>(start + file.bytes.size())) != 0) {
            throw copy_error("ftruncate");
        }
        write_all(fd, file.header.data(), file.header.size(), static_cast<off_t>(start));
        if (with_data) {
            write_all(fd, file.bytes.data() + file.header.size(), file.bytes.size() - file.header.size(),
                      static_cast<off_t>(start + file.header.size()));
        }
        FILE * copy = fdopen(fd, "rb");
        if (copy == nullptr) {
            throw copy_error("fdopen");
        }
        return copy;
    } catch (...) {
        close(fd);
        throw;
    }
}

// ---- reading ----

// The context of a translated file that begins at `start` of another one. end: where in the latter the reading ended.
gguf_context * read_context(TranslatedFile & file, size_t start, gguf_init_params params, off_t & end) {
    // A reader by callback knows no beginning but 0, and tells positions from there.
    if (host().gguf_init_from_callback != nullptr && start == 0) {
        gguf_context * context = host().gguf_init_from_callback(read_translated, &file, 0, file.bytes.size(), params);
        end = static_cast<off_t>(file.end_of_reads);
        return context;
    }
    FILE * copy = copy_in_memory(file, start, !params.no_alloc);
    fseeko(copy, static_cast<off_t>(start), SEEK_SET);
    gguf_context * context = host().gguf_init_from_file_ptr(copy, params);
    end = ftello(copy);
    fclose(copy);
    return context;
}

gguf_context * init_from_file(const char * path, gguf_init_params params) {
    try {
        const MappedFile mapped{std::string(path)};
        if (auto file = translate(path, mapped.bytes())) {
            off_t end;
            return read_context(*file, 0, params, end);
        }
    } catch (const std::system_error &) {
        // A file that cannot be opened or mapped: the host says so.
    } catch (const std::exception & error) {
        report(path, error.what());
        return nullptr;
    }
    return host().gguf_init_from_file(path, params);
}

// What a message calls a file that came without its name.
constexpr const char * OPEN_FILE = "(open file)";

gguf_context * init_from_file_ptr(FILE * file, gguf_init_params params) {
    try {
        const off_t start = ftello(file);
        const MappedFile mapped(fileno(file));
        if (start >= 0 && static_cast<size_t>(start) <= mapped.bytes().size()) {
            if (auto translated = translate(OPEN_FILE, mapped.bytes().substr(static_cast<size_t>(start)))) {
                off_t end;
                gguf_context * context = read_context(*translated, static_cast<size_t>(start), params, end);
                fseeko(file, end, SEEK_SET);
                return context;
            }
        }
    } catch (const std::system_error &) {
        // As above.
    } catch (const std::exception & error) {
        report(OPEN_FILE, error.what());
        return nullptr;
    }
    return host().gguf_init_from_file_ptr(file, params);
}

// ---- writing ----

// Whether tensors of ours are among those of a file to be written. Throws FormatError for one that must not be.
bool has_our_types(const gguf_context * context) {
    bool any = false;
    for (int64_t i = 0; i < host().gguf_get_n_tensors(context); i++) {
        const ggml_type type = host().gguf_get_tensor_type(context, i);
        if (is_treated(type)) {
            throw FormatError("not written: tensor " + quoted(host().gguf_get_tensor_name(context, i)) +
                              " is rotated, or a gate of squared ReLU, and llama.cpp would not write the keys that say "
                              "so; copy the file that it was loaded from, or change that with tern repack");
        }
        any = any || is_our_slot(static_cast<uint32_t>(type));
    }
    return any;
}

// Gives a file that was written with the ids of this process those of files. start: of the GGUF in it.
void restore_file_types(const std::string & path, size_t start) {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        throw std::system_error(errno, std::generic_category(), "cannot give its tensors the type ids of files");
    }
    try {
        const MappedFile mapped(fd);
        const std::string_view gguf = mapped.bytes().substr(std::min(start, mapped.bytes().size()));
        for (const GgufTensor & tensor : parse_gguf_header(gguf, gguf.size()).tensors) {
            const uint32_t type = file_type_of(tensor.type);
            if (type != tensor.type) {
                write_all(fd, reinterpret_cast<const char *>(&type), sizeof(type),
                          static_cast<off_t>(start + tensor.type_position));
            }
        }
    } catch (...) {
        close(fd);
        throw;
    }
    close(fd);
}

bool write_to_file(const gguf_context * context, const char * path, bool only_meta) {
    try {
        const bool is_ours = has_our_types(context);
        if (!host().gguf_write_to_file(context, path, only_meta)) {
            return false;
        }
        if (is_ours) {
            restore_file_types(path, 0);
        }
        return true;
    } catch (const std::exception & error) {
        report(path, error.what());
        return false;
    }
}

bool write_to_file_ptr(const gguf_context * context, FILE * file, bool only_meta) {
    try {
        const bool is_ours = has_our_types(context);
        const off_t start = ftello(file);
        if (!host().gguf_write_to_file_ptr(context, file, only_meta)) {
            return false;
        }
        if (is_ours) {
            if (start < 0 || std::fflush(file) != 0) {
                throw std::system_error(errno, std::generic_category(),
                                        "cannot give its tensors the type ids of files");
            }
            restore_file_types("/proc/self/fd/" + std::to_string(fileno(file)), static_cast<size_t>(start));
        }
        return true;
    } catch (const std::exception & error) {
        report(OPEN_FILE, error.what());
        return false;
    }
}

template <typename Function> const void * address(Function function) {
    return reinterpret_cast<const void *>(function);
}

ImportSlots & import_slots() {
    static ImportSlots slots = [] {
        std::vector<Import> imports = {
            {"gguf_init_from_file", address(host().gguf_init_from_file), address(init_from_file)},
            {"gguf_init_from_file_ptr", address(host().gguf_init_from_file_ptr), address(init_from_file_ptr)},
            {"gguf_write_to_file", address(host().gguf_write_to_file), address(write_to_file)},
        };
        if (host().gguf_write_to_file_ptr != nullptr) {
            imports.push_back(
                {"gguf_write_to_file_ptr", address(host().gguf_write_to_file_ptr), address(write_to_file_ptr)});
        }
        return ImportSlots(imports);
    }();
    return slots;
}

}  // namespace

bool enter_host(std::string & error) {
    ImportSlots::Found found = import_slots().find();
    std::vector<MemoryPatch> patches = found.patches;
    if (!find_type_slots(patches, error) || !write_patches(patches, error)) {
        return false;
    }
    import_slots().count(found);
    return true;
}

void hook_loaders() {
    std::string error;
    if (!import_slots().take(error)) {
        report_once("a library loaded since cannot read ternary files", error);
    }
}

int hooked_slots() {
    return import_slots().taken();
}

TileLayout layout_while_loading() {
    return layout_of_model(t_reading.get());
}

const Treatment * find_treatment(std::string_view name, uint32_t file_type, const int64_t * shape,
                                 std::string_view data) {
    return models().find(name, file_type, shape, data);
}

std::vector<const Rotation *> known_rotations() {
    return models().rotations();
}

}  // namespace tern
