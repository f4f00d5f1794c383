// The treatments of all files that were ever opened in this process.
#include "treatments.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>

namespace tern {

namespace {

constexpr size_t SAMPLE = 64;  // bytes at either end that help to recognise a tensor

std::mutex g_mutex;
std::deque<Rotation> g_rotations;
std::unordered_map<std::string, Treatment> g_treatments;  // by fingerprint()

std::string fingerprint(std::string_view name, uint32_t type, const int64_t * shape, std::string_view data) {
    std::string print(name);
    print += '\0';
    print.append(reinterpret_cast<const char *>(&type), sizeof(type));
    print.append(reinterpret_cast<const char *>(shape), 4 * sizeof(*shape));
    print += data.substr(0, SAMPLE);
    print += data.substr(data.size() - std::min(SAMPLE, data.size()));
    return print;
}

}  // namespace

const Rotation * keep_rotation(const Rotation & rotation) {
    const std::lock_guard<std::mutex> lock(g_mutex);
    const auto found = std::find(g_rotations.begin(), g_rotations.end(), rotation);
    return found != g_rotations.end() ? &*found : &g_rotations.emplace_back(rotation);
}

void remember_treatment(const GgufTensor & tensor, std::string_view data, const Treatment & treatment) {
    int64_t shape[4];
    std::copy(std::begin(tensor.shape), std::end(tensor.shape), shape);
    const std::lock_guard<std::mutex> lock(g_mutex);
    const auto [entry, is_new] =
        g_treatments.try_emplace(fingerprint(tensor.name, tensor.type, shape, data), treatment);
    if (!is_new &&
        (entry->second.squared_relu != treatment.squared_relu || entry->second.rotation != treatment.rotation)) {
        throw FormatError("another file that was opened before has the same bytes in tensor " + quoted(tensor.name) +
                          " and rotates it otherwise; load the two in processes of their own");
    }
}

const Treatment * find_treatment(std::string_view name, uint32_t file_type, const int64_t * shape,
                                 std::string_view data) {
    const std::lock_guard<std::mutex> lock(g_mutex);
    const auto found = g_treatments.find(fingerprint(name, file_type, shape, data));
    return found != g_treatments.end() ? &found->second : nullptr;
}

}  // namespace tern
