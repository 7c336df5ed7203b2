// What tapes know about storages, by the address of the StorageImpl. A weak reference prevents the address from being
// reused. The mutex is never held while anything is freed or run: both may wait for the GIL, whose owner may wait for
// the mutex.

#pragma once

#include <mutex>
#include <unordered_map>
#include <vector>

#include "values.h"

namespace memfit {

// What tapes know about one storage.
struct Note {
  weak_intrusive_ptr<c10::StorageImpl> storage;
  size_t tape;
  intrusive_ptr<DroppedValue> dropped;
  int64_t version = 0;
  std::vector<weak_intrusive_ptr<HeldTensor>> held;
};

class Notes {
 public:
  std::mutex mutex;

  // The caller holds the mutex, here and below.
  Note* on(const Tensor& tensor) {
    auto found = notes_.find(tensor.storage().unsafeGetStorageImpl());
    return found == notes_.end() ? nullptr : &found->second;
  }

  Note& written_by(size_t tape, const Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = notes_.find(storage);
    if (found == notes_.end()) {
      return notes_.emplace(storage, Note{tensor.storage().getWeakStorageImpl(), tape, {}, 0, {}}).first->second;
    }
    auto& note = found->second;
    if (note.tape != tape) {
      note.tape = tape;
      outdated_.push_back(std::move(note.dropped));
      note.dropped.reset();
      auto& held = note.held;
      held.erase(std::remove_if(held.begin(), held.end(), [](auto& one) { return one.expired(); }), held.end());
    }
    return note;
  }

  intrusive_ptr<DroppedValue> release(const c10::StorageImpl* storage, size_t tape) {
    auto found = notes_.find(storage);
    if (found == notes_.end() || found->second.tape != tape) return {};
    auto dropped = std::move(found->second.dropped);
    if (found->second.storage.expired()) notes_.erase(found);
    return dropped;
  }

  // Returns values that the caller must free after it releases the mutex.
  std::vector<intrusive_ptr<DroppedValue>> tidied() {
    auto outdated = std::move(outdated_);
    outdated_.clear();
    if (notes_.size() > 2 * num_after_tidying_ + 1024) {
      for (auto note = notes_.begin(); note != notes_.end();) {
        if (note->second.storage.expired()) {
          outdated.push_back(std::move(note->second.dropped));
          note = notes_.erase(note);
        } else {
          ++note;
        }
      }
      num_after_tidying_ = notes_.size();
    }
    return outdated;
  }

 private:
  std::unordered_map<const c10::StorageImpl*, Note> notes_;
  std::vector<intrusive_ptr<DroppedValue>> outdated_;
  size_t num_after_tidying_ = 0;
};
inline Notes& notes = *new Notes();

}  // namespace memfit
