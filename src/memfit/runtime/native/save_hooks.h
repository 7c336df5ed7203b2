// Installs saved-tensor hooks only where a pass saves dropped values.
//
// While hooks are installed, autograd calls them for every tensor that it saves, which takes about two microseconds per
// tensor, and few of these tensors are dropped. The engine, below autograd, sees a call only after autograd has saved
// its arguments, so it cannot decide call by call. But most passes are alike: this class notes the calls of a pass and
// between which of them a dropped value was saved, and installs the hooks in later passes only there. The passes of a
// step may differ: several are kept in mind, and the hooks are installed wherever one that is alike so far needs them.
// From the first call that differs from all of them on, the hooks stay installed and the calls are noted anew. A save
// that is missed holds its tensor as torch does: that costs memory, not correctness.

#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <stack>
#include <utility>
#include <vector>

#include "torch_names.h"

namespace memfit {

// A call, identified by its op, by which arguments require gradients, and by whether it drops an output: these
// determine what it saves. ``dropped_was_saved_after`` is whether a dropped value was saved between this call and the
// next.
struct PassCall {
  uint64_t call;
  bool dropped_was_saved_after;

  bool operator==(const PassCall& other) const {
    return call == other.call && dropped_was_saved_after == other.dropped_was_saved_after;
  }
};

// The calls of one pass. The first entry is the beginning of the pass.
using PassCalls = std::vector<PassCall>;

using KnownPasses = std::vector<std::shared_ptr<const PassCalls>>;

// The calls of the last passes that began in one module, of each kind once.
class LastPasses {
 public:
  // Empty until as many passes were noted as a step has.
  KnownPasses read(size_t num_passes_of_step) {
    std::lock_guard lock(mutex_);
    return num_noted_ < num_passes_of_step ? KnownPasses() : known_;
  }
  void write(PassCalls noted) {
    constexpr size_t most = 4;
    std::lock_guard lock(mutex_);
    ++num_noted_;
    for (const auto& known : known_) {
      if (*known == noted) return;
    }
    known_.insert(known_.begin(), std::make_shared<const PassCalls>(std::move(noted)));
    if (known_.size() > most) known_.pop_back();
  }

 private:
  std::mutex mutex_;
  KnownPasses known_;
  size_t num_noted_ = 0;
};

// The hooks of one pass, on the thread's stack of hooks while they are needed. Hooks of others take precedence.
class SaveHooks {
 public:
  void begin_pass(KnownPasses known) {
    alike_ = std::move(known);
    is_known_ = !alike_.empty();
    position_ = 0;
    if (!is_known_) noted_ = {{0, false}};
  }
  // Empty if the pass was like a known one.
  PassCalls end_pass() {
    alike_.clear();
    return is_known_ ? PassCalls() : std::move(noted_);
  }

  // Between begin() and end(), within one pass, the hooks are installed where needed. The caller holds the GIL.
  void begin(c10::SafePyObject pack, c10::SafePyObject unpack) {
    ours_.emplace(std::move(pack), std::move(unpack));
    at::SavedTensorDefaultHooks::lazy_initialize();
    want(!is_known_ || is_dropped_saved_after(position_));
  }
  void end() {
    want(false);
    ours_.reset();
    spare_.reset();
  }
  bool has_begun() const { return ours_.has_value(); }
  // Whether no one else has installed hooks.
  bool are_hooks_as_left() const { return hooks().empty() || are_ours_in_use(); }

  // The number of the beginning of a call of a module, as the first of which another pass may differ: ops alike may run
  // in blocks that drop other values. That of its end is the next one.
  static uint64_t module_call(const void* call) { return (uint64_t{1} << 63U) | reinterpret_cast<uint64_t>(call); }
  void next_call(uint64_t call) {
    if (is_known_) {
      const auto next = position_ + 1;
      const auto differs = [&](const auto& pass) { return next >= pass->size() || (*pass)[next].call != call; };
      if (!std::all_of(alike_.begin(), alike_.end(), differs)) {
        alike_.erase(std::remove_if(alike_.begin(), alike_.end(), differs), alike_.end());
        position_ = next;
        want(is_dropped_saved_after(position_));
        return;
      }
      is_known_ = false;
      noted_.clear();
      for (size_t place = 0; place < next; ++place)
        noted_.push_back({(*alike_.front())[place].call, is_dropped_saved_after(place)});
      // What was saved before an unknown call is unknown, too.
      noted_.back().dropped_was_saved_after = true;
    } else if (ours_ && (!are_ours_in_use() || is_in_backward_pass())) {
      // Hooks of others may have been called instead. And a backward pass within the forward pass works on a copy of
      // the stack, whose changes are undone at its end: the hooks stay installed throughout it.
      noted_.back().dropped_was_saved_after = true;
    }
    noted_.push_back({call, false});
    want(true);
  }
  void dropped_is_saved() {
    if (!is_known_) noted_.back().dropped_was_saved_after = true;
  }

 private:
  using Hooks = std::pair<c10::SafePyObject, c10::SafePyObject>;

  // Whether one of the passes that are alike so far saves a dropped value after the call at ``place``.
  bool is_dropped_saved_after(size_t place) const {
    return std::any_of(alike_.begin(), alike_.end(),
                       [&](const auto& pass) { return (*pass)[place].dropped_was_saved_after; });
  }

  static const std::stack<Hooks>& hooks() { return at::SavedTensorDefaultHooks::get_tls_state().stack; }
  static bool is_in_backward_pass() { return torch::autograd::get_current_graph_task_id() != -1; }
  bool are_ours_in_use() const {
    return ours_ && !hooks().empty() &&
           hooks().top().first.ptr(getPyInterpreter()) == ours_->first.ptr(getPyInterpreter());
  }

  // Whether the hooks are installed is read from the stack, which may be a copy: see above.
  void want(bool wanted) {
    if (!ours_ || wanted == are_ours_in_use()) return;
    if (!wanted) {
      auto taken = at::SavedTensorDefaultHooks::pop_hooks();
      if (!spare_) spare_.emplace(std::move(taken));
    } else if (hooks().empty() && at::SavedTensorDefaultHooks::is_enabled()) {
      // Copying the hooks takes the GIL, moving them does not.
      if (!spare_) spare_.emplace(*ours_);
      at::SavedTensorDefaultHooks::push_hooks(std::move(spare_->first), std::move(spare_->second));
      spare_.reset();
    }
  }

  KnownPasses alike_;  // those known whose calls were the same so far
  PassCalls noted_ = {{0, false}};
  size_t position_ = 0;
  bool is_known_ = false;
  std::optional<Hooks> ours_;   // set between begin() and end()
  std::optional<Hooks> spare_;  // a second copy, while the hooks are not on the stack
};

}  // namespace memfit
