// The planned modules of `planned_modules.py`: the decision for each output of each op call in them.

#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "event_log.h"
#include "op_rules.h"
#include "save_hooks.h"
#include "shared.h"

namespace memfit {

// The decisions for the outputs of one op call: one for all, or one each.
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

// The decisions for one op, by the number of its call within one call of a module.
struct Calls {
  std::string op;
  size_t slot = 0;  // index of its counter
  bool drops_everything = false;
  std::vector<Pattern> patterns;
  std::optional<size_t> num_expected;

  // Null if all outputs are saved.
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

struct PlannedModule : c10::intrusive_ptr_target {
  bool records = false;
  bool hooks_saves = false;
  size_t window_bytes = 0;  // at most this many offloaded bytes are being copied at a time
  py::object place;         // names the module's tensors in error messages
  std::string path;         // of the place
  std::vector<CallPlan> calls;
  size_t beyond = 0;       // the one for all further calls
  size_t num_passes = 1;   // of the profiled step
  LastPasses last_passes;  // of those that begin in this module

  const CallPlan& call_plan(size_t number) const { return calls[number < calls.size() ? number : beyond]; }

  ~PlannedModule() override {
    if (!Py_IsInitialized()) {
      place.release();
      return;
    }
    py::gil_scoped_acquire gil;
    place = py::object();
  }
};

// How often an op ran in a call of a planned module, where the plan expects another number: the module's path, the op's
// name, the number planned and the number of calls.
using UnplannedCalls = std::tuple<std::string, std::string, size_t, size_t>;

// A running call of a planned module, and how often each op with decisions was called in it.
struct Frame {
  intrusive_ptr<PlannedModule> module;
  const CallPlan& call;
  c10::SmallVector<uint32_t, 16> num_calls;

  Frame(intrusive_ptr<PlannedModule> in, size_t number)
      : module(std::move(in)), call(module->call_plan(number)), num_calls(call.num_slots, 0) {}

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
    event_log.add("calls", module->path + text.str());
  }
  // The first by name, as in Python.
  std::optional<UnplannedCalls> unplanned_calls() const {
    const Calls* first = nullptr;
    for (const auto& calls : call.calls) {
      if (!calls || !calls->num_expected || num_calls[calls->slot] == *calls->num_expected) continue;
      if (first == nullptr || calls->op < first->op) first = calls.get();
    }
    if (first == nullptr) return std::nullopt;
    return UnplannedCalls(module->path, first->op, *first->num_expected, num_calls[first->slot]);
  }
};

}  // namespace memfit
