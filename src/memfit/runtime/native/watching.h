// Which saves of a pass are watched.
//
// Autograd asks hooks about every tensor that it saves while there are any, which takes two microseconds each, most of
// them torch's own, and most tensors are nothing that is dropped. Who listens below autograd hears of a call when its
// arguments are saved already. But passes are mostly alike: so the calls of a pass are noted, and between which of them
// something dropped was saved, and in the next pass the hooks are there only then. From the first call on that is
// another one than in the pass before, all is watched, and noted anew. A save that is missed is kept as torch keeps it:
// that costs memory, not correctness.

#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <mutex>
#include <optional>
#include <stack>
#include <utility>
#include <vector>

#include "torch_names.h"

namespace memfit {

// A call, known by its op, by which of its arguments require gradients, and by whether it drops something: what it
// saves follows from these. And whether anything dropped was saved after it, before the next call was heard.
struct NotedCall {
  uint64_t call;
  bool dropped_was_saved_after;
};

// The calls of one pass; the first stands for its beginning.
using NotedPass = std::vector<NotedCall>;

// What the passes that begin in one place were like, the last time.
class LastPass {
 public:
  std::shared_ptr<const NotedPass> read() {
    std::lock_guard lock(mutex_);
    return noted_;
  }
  void write(NotedPass noted) {
    auto next = std::make_shared<const NotedPass>(std::move(noted));
    std::lock_guard lock(mutex_);
    noted_.swap(next);
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<const NotedPass> noted_;
};

// The hooks of one pass, on the thread's stack of them while they are wanted. Hooks that others put there have the say.
class Watching {
 public:
  void begin_pass(std::shared_ptr<const NotedPass> last) {
    last_ = std::move(last);
    is_as_last_ = last_ != nullptr;
    position_ = 0;
    if (!is_as_last_) noted_ = {{0, false}};
  }
  // Empty where it was as the one before.
  NotedPass end_pass() {
    last_.reset();
    return is_as_last_ ? NotedPass() : std::move(noted_);
  }

  // Between these two, in the same pass, saves are watched. The caller has Python's lock.
  void begin(c10::SafePyObject pack, c10::SafePyObject unpack) {
    ours_.emplace(std::move(pack), std::move(unpack));
    at::SavedTensorDefaultHooks::lazy_initialize();
    want(!is_as_last_ || (*last_)[position_].dropped_was_saved_after);
  }
  void end() {
    want(false);
    ours_.reset();
    spare_.reset();
  }
  bool has_begun() const { return ours_.has_value(); }
  // Whether nobody else has put hooks there.
  bool are_hooks_as_left() const { return hooks().empty() || are_ours_in_use(); }

  void heard(uint64_t call) {
    if (is_as_last_ && ++position_ < last_->size() && (*last_)[position_].call == call) {
      want((*last_)[position_].dropped_was_saved_after);
      return;
    }
    if (is_as_last_) {
      is_as_last_ = false;
      noted_.assign(last_->begin(), last_->begin() + position_);
      // What was before an unknown call is not known either.
      noted_.back().dropped_was_saved_after = true;
    } else if (ours_ && (!are_ours_in_use() || is_in_backward_pass())) {
      // Others' hooks may have been asked instead. And what is done to the copy of the stack that a backward pass
      // within the forward pass has is undone at its end: there ours stay all through.
      noted_.back().dropped_was_saved_after = true;
    }
    noted_.push_back({call, false});
    want(true);
  }
  void dropped_is_saved() {
    if (!is_as_last_) noted_.back().dropped_was_saved_after = true;
  }

 private:
  using Hooks = std::pair<c10::SafePyObject, c10::SafePyObject>;

  static const std::stack<Hooks>& hooks() { return at::SavedTensorDefaultHooks::get_tls_state().stack; }
  static bool is_in_backward_pass() { return torch::autograd::get_current_graph_task_id() != -1; }
  bool are_ours_in_use() const {
    return ours_ && !hooks().empty() &&
           hooks().top().first.ptr(getPyInterpreter()) == ours_->first.ptr(getPyInterpreter());
  }

  // Whether they are there, the stack knows, which may be a copy: see above.
  void want(bool wanted) {
    if (!ours_ || wanted == are_ours_in_use()) return;
    if (!wanted) {
      auto taken = at::SavedTensorDefaultHooks::pop_hooks();
      if (!spare_) spare_.emplace(std::move(taken));
    } else if (hooks().empty() && at::SavedTensorDefaultHooks::is_enabled()) {
      // To copy them takes Python's lock, to move them does not.
      if (!spare_) spare_.emplace(*ours_);
      at::SavedTensorDefaultHooks::push_hooks(std::move(spare_->first), std::move(spare_->second));
      spare_.reset();
    }
  }

  std::shared_ptr<const NotedPass> last_;
  NotedPass noted_ = {{0, false}};
  size_t position_ = 0;
  bool is_as_last_ = false;
  std::optional<Hooks> ours_;   // where saves are watched
  std::optional<Hooks> spare_;  // the same once more, while they are not on the stack
};

}  // namespace memfit
