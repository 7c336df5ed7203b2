// The regions of `regions.py`: what becomes of the values that are made at each call of each op.

#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

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

// The patterns of the calls of one op in a region, by the number of the call in one forward pass.
struct Calls {
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

struct Region : c10::intrusive_ptr_target {
  bool records = false;
  bool watches = false;
  size_t window_bytes = 0;                    // of what is offloaded, that may be on its way at a time
  py::object place;                           // tells, for an error message, whose tensors are met there
  std::string path;                           // of the place
  std::vector<std::unique_ptr<Calls>> calls;  // by the number of the op's name
  LastPass last_pass;                         // of those that begin here

  ~Region() override {
    if (!Py_IsInitialized()) {
      place.release();
      return;
    }
    py::gil_scoped_acquire gil;
    place = py::object();
  }
};

}  // namespace memfit
