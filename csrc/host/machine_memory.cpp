// Memory as /proc/meminfo and the control groups tell it.
#include "machine_memory.h"

#include <algorithm>
#include <fstream>

namespace tern {

namespace {

// The number behind a key at the beginning of a line, or 0.
size_t value_of(const std::string & path, const std::string & key) {
    std::ifstream file(path);
    std::string word;
    while (file >> word) {
        size_t value;
        if (word == key && file >> value) {
            return value;
        }
        std::getline(file, word);
    }
    return 0;
}

// The number that a file consists of; `none` without one ("max", or no such file).
size_t only_value(const std::string & path, size_t none) {
    std::ifstream file(path);
    size_t value;
    return file >> value ? value : none;
}

// The two versions of control groups: how the line of /proc/self/cgroup has their name, where their folders are, and files
// and keys in these.
struct Hierarchy {
    const char * controllers;
    const char * folder;
    const char * limit;
    const char * used;
    const char * inactive_file;
};
constexpr Hierarchy HIERARCHIES[] = {
    {"", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"},
    {"memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"},
};

// The group of this process as a path such as /system.slice/tern.service; in a container, which sees its own as the root of
// all, / or a path that it cannot see.
std::string own_group(const std::string & root, const Hierarchy & hierarchy) {
    std::ifstream file(root + "/proc/self/cgroup");
    std::string line;
    while (std::getline(file, line)) {
        // number:controllers:path
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (second != std::string::npos && line.substr(first + 1, second - first - 1) == hierarchy.controllers) {
            return line.substr(second + 1);
        }
    }
    return "/";
}

}  // namespace

MachineMemory machine_memory(const std::string & root) {
    constexpr size_t KIB = 1024;
    const std::string meminfo = root + "/proc/meminfo";
    MachineMemory memory{value_of(meminfo, "MemTotal:") * KIB, value_of(meminfo, "MemAvailable:") * KIB};
    const size_t all = memory.total;
    for (const Hierarchy & hierarchy : HIERARCHIES) {
        // A group may use no more than each of those that it is in.
        std::string group = own_group(root, hierarchy);
        for (bool at_root = false; !at_root; group.erase(std::min(group.rfind('/'), group.size()))) {
            at_root = group.find('/') == std::string::npos;
            const std::string folder = root + hierarchy.folder + group + "/";
            const size_t limit = only_value(folder + hierarchy.limit, all);
            if (limit >= all) {
                continue;
            }
            memory.total = std::min(memory.total, limit);
            // Files that were read some time ago make room.
            const size_t used = only_value(folder + hierarchy.used, 0);
            const size_t can_go = value_of(folder + "memory.stat", hierarchy.inactive_file);
            memory.free = std::min(memory.free, limit - std::min(limit, used - std::min(used, can_go)));
        }
    }
    return memory;
}

}  // namespace tern
