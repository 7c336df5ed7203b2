// Logs what the engine does in a step. `event_log.py` lists the events.

#pragma once

#include <atomic>
#include <sstream>

#include "torch_names.h"

namespace memfit {

class EventLog {
 public:
  // ``add`` is called with each event; None stops logging.
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
// Never freed: the interpreter may be finalized before this library is unloaded.
inline EventLog& event_log = *new EventLog();

}  // namespace memfit
