// Recognising tensors by their fingerprint.
#include "models.h"

#include <algorithm>

namespace tern {

namespace {

constexpr size_t SAMPLE = 64;  // bytes at either end that help to recognise a tensor

std::string fingerprint(std::string_view name, uint32_t type, const int64_t * shape, std::string_view data) {
    std::string print(name);
    print += '\0';
    print.append(reinterpret_cast<const char *>(&type), sizeof(type));
    print.append(reinterpret_cast<const char *>(shape), 4 * sizeof(*shape));
    print += data.substr(0, SAMPLE);
    print += data.substr(data.size() - std::min(SAMPLE, data.size()));
    return print;
}

std::string fingerprint(const Models::Entry & entry) {
    int64_t shape[4];
    std::copy(std::begin(entry.tensor->shape), std::end(entry.tensor->shape), shape);
    return fingerprint(entry.tensor->name, entry.tensor->type, shape, entry.data);
}

}  // namespace

const Rotation * Models::keep(std::shared_ptr<const Rotation> rotation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto & kept : rotations_) {
        if (*kept == *rotation) {
            return kept.get();
        }
    }
    return rotations_.emplace_back(std::move(rotation)).get();
}

std::vector<const Rotation *> Models::rotations() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<const Rotation *> all;
    all.reserve(rotations_.size());
    for (const auto & kept : rotations_) {
        all.push_back(kept.get());
    }
    return all;
}

void Models::remember(const std::vector<Entry> & entries) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Entry & entry : entries) {
        const auto known = treatments_.find(fingerprint(entry));
        if (known != treatments_.end() && !(known->second == entry.treatment)) {
            throw FormatError("another file that was opened before has the same bytes in tensor " +
                              quoted(entry.tensor->name) +
                              " and rotates it otherwise; load the two in processes of their own");
        }
    }
    for (const Entry & entry : entries) {
        treatments_.emplace(fingerprint(entry), entry.treatment);
        any_squared_relu_ = any_squared_relu_ || entry.treatment.squared_relu;
    }
}

const Treatment * Models::find(std::string_view name, uint32_t file_type, const int64_t * shape,
                               std::string_view data) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = treatments_.find(fingerprint(name, file_type, shape, data));
    return found != treatments_.end() ? &found->second : nullptr;
}

bool Models::any_squared_relu() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return any_squared_relu_;
}

}  // namespace tern
