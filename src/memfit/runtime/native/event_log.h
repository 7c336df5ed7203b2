// What the engine does in a step, as `event_log.py` has it for the engine in Python.

#pragma once

#include <atomic>
#include <sstream>

#include "torch_names.h"

namespace memfit {

class EventLog {
 public:
  // ``add`` takes each event, or is None.
  void send_to(py::object add) {
    is_on_ = !add.is_none();
    add_ = std::move(add);
  }

  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }

  template <typename... Parts>
  void add(const Parts&... parts) {
    if (!is_on()) return;
    std::ostringstream text;
    const char* space = "";
    ((text << std::exchange(space, " ") << parts), ...);
    py::gil_scoped_acquire gil;
    add_(text.str());
  }

 private:
  std::atomic<bool> is_on_{false};
  py::object add_ = py::none();
};
// Never freed: the interpreter may be gone before this library is.
inline EventLog& event_log = *new EventLog();

}  // namespace memfit
