// Takes import slots of libraries that were linked in different ways, and tells what goes wrong. tests/test_host_process.py builds
// it and the libraries; usage: driver FOLDER WAY...
#include "host/import_slots.h"

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <thread>

namespace {

int replacement() {
    return 2;
}

void expect(bool ok, const std::string & what) {
    if (!ok) {
        std::printf("wrong: %s\n", what.c_str());
        std::exit(1);
    }
}

class Library {
  public:
    Library(const std::string & folder, const std::string & name)
        : handle_(dlopen((folder + "/lib" + name + ".so").c_str(), RTLD_LAZY | RTLD_LOCAL)) {
        expect(handle_ != nullptr, name + " does not load");
    }
    ~Library() { dlclose(handle_); }
    Library(const Library &) = delete;
    Library & operator=(const Library &) = delete;

    void * find(const char * symbol) const { return dlsym(handle_, symbol); }
    int call() const { return reinterpret_cast<int (*)()>(find("call"))(); }

  private:
    void * handle_;
};

tern::ImportSlots * g_slots = nullptr;

void take() {
    std::string error;
    expect(g_slots->take(error), error);
}

}  // namespace

extern "C" void called_by_a_constructor() {
    take();
}

int main(int argc, char ** argv) {
    expect(argc > 2, "usage: driver FOLDER WAY...");
    const std::string folder = argv[1];
    const Library callee(folder, "callee");
    const void * original = callee.find("answer");
    tern::ImportSlots slots({{"answer", original, reinterpret_cast<const void *>(&replacement)}});
    g_slots = &slots;

    for (int i = 2; i < argc; i++) {
        {
            const Library fresh(folder, argv[i]);  // before its first call: a lazy slot is not bound yet
            const int taken = slots.taken();
            take();
            expect(fresh.call() == 2, std::string(argv[i]) + " is not taken");
            expect(slots.taken() > taken, std::string(argv[i]) + " is not counted");
            take();
            expect(fresh.call() == 2, std::string(argv[i]) + " is lost again");
        }
        const Library called(folder, argv[i]);
        expect(called.call() == 1, std::string(argv[i]) + " comes back as it was");
        take();
        expect(called.call() == 2, std::string(argv[i]) + " is not taken after a call");
    }
    const Library other(folder, "calls_stranger");
    take();
    expect(other.call() == 1, "a function of the same name in another library is taken");

    // A library that comes and goes, whose constructor looks for slots too while the loader is locked.
    std::thread loads([&] {
        for (int i = 0; i < 2000; i++) {
            const Library constructor(folder, "constructor");
            take();
            expect(constructor.call() == 2, "a new library is not taken");
        }
    });
    std::thread looks([&] {
        for (int i = 0; i < 20000; i++) {
            take();
        }
    });
    loads.join();
    looks.join();
    std::printf("fine\n");
    return 0;
}
