// The regions of `regions.py`: what to drop at each call of each op.

#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "op_rules.h"

namespace memfit {

// Which outputs of one call to drop: all of them, or each as told.
struct Drop {
  bool is_all = false;
  std::vector<bool> outputs;

  bool operator[](size_t position) const { return is_all || (position < outputs.size() && outputs[position]); }
  bool is_any() const { return is_all || std::find(outputs.begin(), outputs.end(), true) != outputs.end(); }
};

// What to drop at each call of one op in a region, by the number of the call in one forward pass.
struct Calls {
  bool is_every = false;
  std::vector<Drop> drops;
  std::optional<size_t> num_expected;
};

struct Region : c10::intrusive_ptr_target {
  bool records = false;
  bool watches = false;
  py::object place;                           // tells, for an error message, whose tensors are met there
  std::vector<std::unique_ptr<Calls>> calls;  // by the number of the op's name

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
