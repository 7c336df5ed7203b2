// The recorded modules of `recorded_modules.py`: what becomes of the values that are made at each call of each op.

#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "event_log.h"
#include "op_rules.h"
#include "watching.h"

namespace memfit {

enum class Fate { SAVE = 0, DROP, OFFLOAD };

// What becomes of the outputs of one call: the same of all, or of each as told.
struct Pattern {
  Fate all = Fate::SAVE;
  std::vector<Fate> outputs;

  Fate operator[](size_t position) const { return position < outputs.size() ? outputs[position] : all; }
  bool has(Fate fate) const { return all == fate || std::find(outputs.begin(), outputs.end(), fate) != outputs.end(); }
  bool saves_all() const { return !has(Fate::DROP) && !has(Fate::OFFLOAD); }
  Pattern without_drops() const {
    Pattern pattern = *this;
    if (pattern.all == Fate::DROP) pattern.all = Fate::SAVE;
    std::replace(pattern.outputs.begin(), pattern.outputs.end(), Fate::DROP, Fate::SAVE);
    return pattern;
  }
};

// What becomes of the outputs of one op, by the number of its call in one call of a module.
struct Calls {
  std::string op;
  size_t slot = 0;  // where its calls are counted
  bool drops_everything = false;
  std::vector<Pattern> patterns;
  std::optional<size_t> num_expected;

  // Null where all is saved.
  const Pattern* pattern_of(size_t call) const {
    static const Pattern everything{Fate::DROP, {}};
    if (drops_everything) return &everything;
    return call < patterns.size() && !patterns[call].saves_all() ? &patterns[call] : nullptr;
  }
};

// The decisions for one call of a recorded module.
struct CallPlan {
  std::vector<std::unique_ptr<Calls>> calls;  // by the number of the op's name
  size_t num_slots = 0;
};

struct Region : c10::intrusive_ptr_target {
  bool records = false;
  bool watches = false;
  size_t window_bytes = 0;  // of what is offloaded, that may be on its way at a time
  py::object place;         // says, for an error message, whose tensors are met there
  std::string path;         // of the place
  std::vector<CallPlan> calls;
  size_t beyond = 0;   // which of them further calls take
  LastPass last_pass;  // of those that begin here

  const CallPlan& next_call(size_t pass_round) {
    std::lock_guard lock(mutex_);
    if (pass_round != round_) num_calls_ = 0;
    round_ = pass_round;
    const auto number = num_calls_++;
    return calls[number < calls.size() ? number : beyond];
  }

  ~Region() override {
    if (!Py_IsInitialized()) {
      place.release();
      return;
    }
    py::gil_scoped_acquire gil;
    place = py::object();
  }

 private:
  std::mutex mutex_;
  std::optional<size_t> round_;
  size_t num_calls_ = 0;
};

// One call of a recorded module while it runs, and how often each op of which something is dropped was called.
struct Frame {
  intrusive_ptr<Region> region;
  const CallPlan& call;
  c10::SmallVector<uint32_t, 16> num_calls;

  Frame(intrusive_ptr<Region> in, size_t pass_round)
      : region(std::move(in)), call(region->next_call(pass_round)), num_calls(call.num_slots, 0) {}

  const Calls* calls_of(const OpRule& rule) const {
    return rule.number < call.calls.size() ? call.calls[rule.number].get() : nullptr;
  }
  void log_calls() const {
    if (!event_log.is_on()) return;
    std::map<std::string, uint32_t> counts;
    for (const auto& calls : call.calls) {
      if (calls && num_calls[calls->slot] > 0) counts.emplace(calls->op, num_calls[calls->slot]);
    }
    std::ostringstream text;
    for (const auto& [op, number] : counts) text << " " << op << "=" << number;
    event_log.add("calls", region->path + text.str());
  }
  bool is_as_planned() const {
    return std::all_of(call.calls.begin(), call.calls.end(), [&](const auto& calls) {
      return !calls || !calls->num_expected || num_calls[calls->slot] == *calls->num_expected;
    });
  }
};

}  // namespace memfit
