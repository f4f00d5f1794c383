// Functions of others that loaded objects call through a slot of their relocation table, and ours in their place.
//
// A call from one shared library into another goes through a slot, which the loader fills with the function's address. Whoever
// puts another address there gets the call, and can pass it on. This works for any function that any object imports, and changes
// nothing for those who look the function up by name.
#pragma once

#include "memory_protection.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace tern {

struct Import {
    const char * symbol;
    const void * original;  // slots that lead here, or will once they are bound, are taken
    const void * replacement;
};

// The slots of some imports in all objects of the process. Safe from any thread: no lock is held while the loader is asked, which
// has locks of its own and may be on its way to us with them.
class ImportSlots {
  public:
    // An object that contains an original or a replacement keeps its own slots: these functions call each other through them.
    explicit ImportSlots(std::vector<Import> imports) : imports_(std::move(imports)) {}

    // The slots that are not taken yet, as what is to be written. While this lives, no object that they lie in is unloaded.
    struct Found {
        std::vector<MemoryPatch> patches;
        std::vector<std::shared_ptr<void>> objects;
        unsigned long long loads = 0;  // the loader's count of objects ever loaded, when this was looked up
    };
    Found find() const;
    // To be called when what was found is written.
    void count(const Found & found);

    // Finds and writes. Cheap when nothing was loaded since the last time. On failure, returns false and says why.
    bool take(std::string & error);

    // How many slots have been taken.
    int taken() const { return taken_; }

  private:
    std::vector<Import> imports_;
    std::atomic<unsigned long long> loads_seen_{0};
    std::atomic<int> taken_{0};
};

}  // namespace tern
