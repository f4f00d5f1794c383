// Memory as /proc/meminfo and the control group tell it.
#include "machine_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

namespace tern {

namespace {

// A line of /proc/meminfo in bytes, or 0.
size_t meminfo(const char * key) {
    std::ifstream file("/proc/meminfo");
    std::string line;
    while (std::getline(file, line)) {
        size_t kib;
        if (line.compare(0, std::strlen(key), key) == 0 &&
            std::sscanf(line.c_str() + std::strlen(key), ": %zu", &kib) == 1) {
            return kib * 1024;
        }
    }
    return 0;
}

// A number in a control-group file; `none` when there is no limit.
size_t cgroup_value(const char * path, size_t none) {
    std::ifstream file(path);
    size_t value;
    return file >> value ? value : none;
}

}  // namespace

MachineMemory machine_memory() {
    MachineMemory memory{meminfo("MemTotal"), meminfo("MemAvailable")};
    const size_t limit = cgroup_value("/sys/fs/cgroup/memory.max", memory.total);
    if (limit < memory.total) {
        const size_t used = cgroup_value("/sys/fs/cgroup/memory.current", 0);
        memory = {limit, std::min(memory.free, limit - std::min(limit, used))};
    }
    return memory;
}

}  // namespace tern
