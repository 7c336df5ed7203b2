// The engine in C++: the tape, its values and replay records, replays and offloading, by the same rules as in Python.
//
// A dispatch mode in Python takes about 15 microseconds per op, a kernel at a dispatch key one or two. `op_rules.py`
// says how each op is treated, the planned modules say what to drop; nothing is decided here. Files are named after the
// Python files that they implement. `native_build.py` builds them; `native_tape.py` uses what is defined below.

#include "allocation_meter.h"
#include "forward_pass.h"

namespace memfit {

void dispatch_boxed_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  dispatch_op(op, keys, stack);
}
const OpRule& rule_of(const c10::OperatorHandle& op) { return op_rules.of(op); }
bool has_op_handler() { return op_handler.load(std::memory_order_relaxed) != nullptr; }
bool passes_by(const OpRule& rule, bool is_meta, bool is_plain, const Tensor* written, uint64_t requiring_grad) {
  return recording_tape->passes_by(rule, is_meta, is_plain, written, requiring_grad);
}
void run_plain_pure_op(const c10::OperatorHandle& op, const OpRule& rule, std::vector<IValue> arguments,
                       RunPlainOp run) {
  recording_tape->run_plain_pure_op(op, rule, std::move(arguments), run);
}

Pattern pattern_from(const py::handle& described) {
  Pattern pattern;
  if (py::isinstance<py::int_>(described)) {
    pattern.all = static_cast<Fate>(described.cast<int>());
  } else {
    for (const auto& fate : described) pattern.outputs.push_back(static_cast<Fate>(fate.cast<int>()));
  }
  return pattern;
}

CallPlan call_plan_from(const py::dict& patterns, const py::dict& num_calls) {
  CallPlan call;
  for (const auto& [name, described] : patterns) {
    if (py::isinstance<py::bool_>(described) && !described.cast<bool>()) continue;
    const auto number = op_rules.number_of(name.cast<std::string>());
    if (number >= call.calls.size()) call.calls.resize(number + 1);
    auto& calls = call.calls[number] = std::make_unique<Calls>();
    calls->op = name.cast<std::string>();
    calls->slot = call.num_slots++;
    if (num_calls.contains(name)) calls->num_expected = num_calls[name].cast<size_t>();
    if (py::isinstance<py::bool_>(described)) {
      calls->drops_everything = true;
    } else {
      for (const auto& pattern : described) calls->patterns.push_back(pattern_from(pattern));
    }
  }
  return call;
}

// From the one of `planned_modules.py`.
intrusive_ptr<PlannedModule> planned_module_from(const py::object& described) {
  auto planned = make_intrusive<PlannedModule>();
  planned->records = described.attr("records").cast<bool>();
  planned->hooks_saves = described.attr("hooks_saves").cast<bool>();
  planned->num_passes = described.attr("num_passes").cast<size_t>();
  planned->window_bytes = described.attr("window_bytes").cast<size_t>();
  planned->path = described.attr("path").cast<std::string>();
  planned->place = described.attr("place");
  planned->beyond = described.attr("beyond").cast<size_t>();
  for (const auto& call : described.attr("calls"))
    planned->calls.push_back(call_plan_from(call.attr("patterns"), call.attr("num_calls")));
  return planned;
}

// Offloading by itself, as in `offloading.py`, for measurements and tests.
void define_offloading(py::module_& module) {
  py::class_<OffloadedCopy, std::shared_ptr<OffloadedCopy>>(module, "OffloadedCopy")
      .def("before_write", &OffloadedCopy::before_write, py::arg("num_counted"))
      .def("fetch", [](OffloadedCopy& copy) {
        try {
          return py::reinterpret_steal<py::object>(THPVariable_Wrap(copy.fetch()));
        } catch (const TornValue& torn) {
          set_error(error_of(torn));
          throw py::error_already_set();
        }
      });
  py::class_<Offloading, std::shared_ptr<Offloading>>(module, "Offloading")
      .def(py::init<>())
      .def("send",
           [](Offloading& offloading, const py::object& tensor, int64_t version, const py::object& place,
              const std::string& op_name, size_t window_bytes) {
             const auto maker = place.attr("path").cast<std::string>() + "::" + op_name;
             return offloading.send(tensor_of(tensor.ptr()), version, maker, window_bytes);
           })
      .def("fetch_ahead", &Offloading::fetch_ahead)
      .def("end_forward", &Offloading::end_forward);
  module.def("num_copies_made", [] { return num_copies_made.load(); });
  module.def("num_copies_alive", [] { return num_copies_alive.load(); });
}

}  // namespace memfit

PYBIND11_MODULE(MEMFIT_MODULE, module) {
  using namespace memfit;
  if (!are_python_tensors_as_declared()) throw py::import_error("this torch lays out Python tensors in another way");
  py::class_<PlannedModule, intrusive_ptr<PlannedModule>>(module, "PlannedModule").def(py::init(&planned_module_from));
  py::class_<ForwardPass>(module, "ForwardPass")
      .def(py::init<>())
      .def("run", &ForwardPass::run)
      .def("close", &ForwardPass::close);
  py::class_<AllocationMeter>(module, "AllocationMeter")
      .def(py::init<>())
      .def("start", &AllocationMeter::start)
      .def("hold", &AllocationMeter::hold)
      .def("stop", &AllocationMeter::stop)
      .def("live_bytes", &AllocationMeter::live_bytes)
      .def("peak_bytes", &AllocationMeter::peak_bytes)
      .def("restart_peak", &AllocationMeter::restart_peak);
  define_offloading(module);
  module.attr("key_name") = c10::toString(KEY);
  module.def("intercept", &intercept);
  module.def("detached_alias", [](const py::object& tensor) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(detached_alias(tensor_of(tensor.ptr()))));
  });
  module.def("log_events", [](py::object add) { event_log.send_to(std::move(add)); });
  module.def("is_recording", [] { return recording_tape != nullptr; });
  // Sets the kernels for one device type.
  module.def("fuse_on", [](const std::string& device_type, uintptr_t launch, py::object kernel_of) {
    fusing = new Fusing{at::Device(device_type).type(), reinterpret_cast<LaunchKernel>(launch), std::move(kernel_of)};
  });
  module.def("fuse_nothing", [] { fusing = nullptr; });
  module.def("num_fused_kernels_launched", [] { return fusing == nullptr ? 0 : fusing->num_launched.load(); });
  module.def("configure", [](py::object rule_of, py::object is_capturing, py::object stale_error, py::object torn_error,
                             py::object gather, py::object parameter) {
    python = new Python{std::move(rule_of),    std::move(is_capturing), std::move(stale_error),
                        std::move(torn_error), std::move(gather),       std::move(parameter)};
  });
}
