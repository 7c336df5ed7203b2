// The engine in C++: the tape, its values, recipes and replays, and the way to the host, by
// the same rules as in Python, at a tenth of the cost.
//
// A dispatch mode in Python hears an op for about 15 microseconds; a kernel at a dispatch key hears it for one or two.
// Nothing is decided here. How an op is treated is asked of `op_rules.py`; what to drop is told by the plan's regions.
// The files are named after the Python files that they stand for. `native_build.py` builds them, `native_tape.py` is
// the other side of what is defined below.

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/PyInterpreter.h>

#include "tape.h"

namespace memfit {

// What autograd is handed in place of a tensor: a capsule with a `Source` in it.
constexpr const char* PACKED = "memfit.packed";

PyObject* packed(Source source) {
  return PyCapsule_New(new Source(std::move(source)), PACKED,
                       [](PyObject* capsule) { delete static_cast<Source*>(PyCapsule_GetPointer(capsule, PACKED)); });
}

PyObject* Tape::pack(PyObject* object) {
  const auto& tensor = THPVariable_Unpack(object);
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != THPVariableClass && type != python->parameter_class.ptr()) {
    if (tensor.is_leaf()) return Py_NewRef(object);
    return PyObject_CallMethod(object, "detach", nullptr);
  }
  forget_dead_storages();
  if (is_strided(tensor)) {
    intrusive_ptr<DroppedValue> dropped;
    {
      std::lock_guard lock(notes.mutex);
      auto* note = notes.on(tensor);
      if (note != nullptr && note->tape == number_) dropped = content(*note, tensor);
    }
    if (dropped) return packed(Source(std::move(dropped), Geometry(tensor)));
  }
  // An op's own output refers to its autograd node, and the node is about to refer to what is returned here.
  auto alias = has_no_history(tensor) ? tensor : detached_alias(tensor);
  return packed(Source(make_intrusive<HeldTensor>(std::move(alias), region, nullptr)));
}

PyObject* pack(PyObject* capsule, PyObject* tensor) {
  HANDLE_TH_ERRORS
  return static_cast<Tape*>(PyCapsule_GetPointer(capsule, nullptr))->pack(tensor);
  END_HANDLE_TH_ERRORS
}

void set_error(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

py::object error_of(const TornValue& torn) { return python->torn_value_error(torn.maker, torn.torn_at, torn.version); }

PyObject* unpack(PyObject* /*unused*/, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!PyCapsule_IsValid(object, PACKED)) return Py_NewRef(object);
  const auto& source = *static_cast<Source*>(PyCapsule_GetPointer(object, PACKED));
  try {
    Tensor tensor;
    {
      py::gil_scoped_release no_gil;
      tensor = read(source);
    }
    return THPVariable_Wrap(tensor);
  } catch (const StaleValue& stale) {
    const auto& held = *stale.held;
    auto tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(held.tensor));
    auto reader = held.reader == nullptr ? py::object(py::none()) : py::object(py::str(held.reader->name));
    set_error(python->stale_value_error(held.region->place, reader, tensor, held.version));
    return nullptr;
  } catch (const TornValue& torn) {
    set_error(error_of(torn));
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_method = {"pack", pack, METH_O, nullptr};
PyMethodDef unpack_method = {"unpack", unpack, METH_O, nullptr};

c10::SafePyObject safe(const py::object& object) { return {Py_NewRef(object.ptr()), getPyInterpreter()}; }

class ForwardPass;

// Whose pass is under way in this thread, and which.
struct UnderWay {
  PyObject* owner = nullptr;
  ForwardPass* pass = nullptr;
};
thread_local UnderWay under_way;

// One forward pass, as `native_tape.py` sees it: `Tape.run`, where there are no hooks around the model.
class ForwardPass {
 public:
  ForwardPass() : tape_(std::make_unique<Tape>()) {
    auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(tape_.get(), nullptr, nullptr));
    pack_hook_ = py::reinterpret_steal<py::object>(PyCFunction_New(&pack_method, capsule.ptr()));
    unpack_hook_ = py::reinterpret_steal<py::object>(PyCFunction_New(&unpack_method, nullptr));
  }

  ~ForwardPass() { leave(); }
  ForwardPass(const ForwardPass&) = delete;

  // From now on this is the pass of ``owner`` in this thread.
  void begin(const py::object& owner) {
    around_ = under_way;
    under_way = {owner.ptr(), this};
  }
  // Null where Python raised.
  PyObject* run(const intrusive_ptr<Region>& region, PyObject* forward, PyObject* args, PyObject* kwargs) {
    std::optional<Inside> inside;
    if (are_hooks_as_left()) inside.emplace(*this, region);
    return PyObject_Call(forward, args, kwargs);
  }
  bool has_heard_what_was_planned() const { return tape_->has_heard_what_was_planned(); }
  void close() {
    leave();
    tape_->close();
  }

 private:
  // Wherever it stands among the passes of this thread: whoever began one inside may still be at it.
  void leave() {
    auto* link = &under_way;
    while (link->pass != nullptr && link->pass != this) link = &link->pass->around_;
    if (link->pass == this) *link = std::exchange(around_, {});
  }

  class Inside {
   public:
    Inside(ForwardPass& forward_pass, const intrusive_ptr<Region>& region)
        : pass_(forward_pass),
          around_(pass_.tape_->region),
          begins_watching_(region->watches && !pass_.is_watching_),
          begins_recording_(region->records && !pass_.is_recording_) {
      if (begins_watching_) {
        at::SavedTensorDefaultHooks::lazy_initialize();
        at::SavedTensorDefaultHooks::push_hooks(safe(pass_.pack_hook_), safe(pass_.unpack_hook_));
        pass_.is_watching_ = true;
      }
      if (region->records || !around_) pass_.tape_->go_into(region);
      if (begins_recording_) {
        listening_tape = pass_.tape_.get();
        c10::impl::tls_set_dispatch_key_included(KEY, true);
        pass_.is_recording_ = true;
      }
    }
    ~Inside() {
      if (begins_recording_) {
        pass_.is_recording_ = false;
        c10::impl::tls_set_dispatch_key_included(KEY, false);
        listening_tape = nullptr;
      }
      pass_.tape_->region = std::move(around_);
      if (begins_watching_) {
        pass_.is_watching_ = false;
        at::SavedTensorDefaultHooks::pop_hooks();
      }
    }
    Inside(const Inside&) = delete;

   private:
    ForwardPass& pass_;
    intrusive_ptr<Region> around_;
    bool begins_watching_;
    bool begins_recording_;
  };

  bool are_hooks_as_left() const {
    if (!at::SavedTensorDefaultHooks::is_enabled()) return false;
    const auto hooks = at::SavedTensorDefaultHooks::get_hooks(true);
    if (!is_watching_) return !hooks;
    return hooks && hooks->first.ptr(getPyInterpreter()) == pack_hook_.ptr();
  }

  std::unique_ptr<Tape> tape_;
  UnderWay around_;
  py::object pack_hook_;
  py::object unpack_hook_;
  bool is_watching_ = false;
  bool is_recording_ = false;
};

// The way into a region without any Python, while a pass of ``owner`` is under way. What else there is to be seen to,
// ``longer_way`` does.
struct WayIn {
  intrusive_ptr<Region> region;
  py::object owner;
  py::object longer_way;
};
constexpr const char* WAY_IN = "memfit.way_in";

// Takes what `forward_wrapping.Runner` does: the forward, its positional and its keyword arguments.
PyObject* go_in(PyObject* capsule, PyObject* const* arguments, Py_ssize_t num_arguments) {
  HANDLE_TH_ERRORS
  const auto& way = *static_cast<WayIn*>(PyCapsule_GetPointer(capsule, WAY_IN));
  const auto [owner, pass] = under_way;
  if (owner != way.owner.ptr() || num_arguments != 3 || !at::GradMode::is_enabled() || is_in_transform())
    return PyObject_Vectorcall(way.longer_way.ptr(), arguments, num_arguments, nullptr);
  return pass->run(way.region, arguments[0], arguments[1], arguments[2]);
  END_HANDLE_TH_ERRORS
}

PyMethodDef go_in_method = {"go_in", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(go_in)), METH_FASTCALL,
                            nullptr};

py::object way_in(intrusive_ptr<Region> region, py::object owner, py::object longer_way) {
  auto* way = new WayIn{std::move(region), std::move(owner), std::move(longer_way)};
  const auto forget = [](PyObject* capsule) { delete static_cast<WayIn*>(PyCapsule_GetPointer(capsule, WAY_IN)); };
  auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(way, WAY_IN, forget));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&go_in_method, capsule.ptr()));
}

Pattern pattern_from(const py::handle& told) {
  Pattern pattern;
  if (py::isinstance<py::int_>(told)) {
    pattern.all = static_cast<Fate>(told.cast<int>());
  } else {
    for (const auto& fate : told) pattern.outputs.push_back(static_cast<Fate>(fate.cast<int>()));
  }
  return pattern;
}

intrusive_ptr<Region> region_from(py::object place, const py::dict& patterns, const py::dict& num_calls,
                                  size_t window_bytes, bool records, bool watches) {
  auto region = make_intrusive<Region>();
  region->records = records;
  region->watches = watches;
  region->window_bytes = window_bytes;
  region->path = place.attr("path").cast<std::string>();
  region->place = std::move(place);
  for (const auto& [name, told] : patterns) {
    if (py::isinstance<py::bool_>(told) && !told.cast<bool>()) continue;
    const auto number = op_rules.number_of(name.cast<std::string>());
    if (number >= region->calls.size()) region->calls.resize(number + 1);
    auto& calls = region->calls[number] = std::make_unique<Calls>();
    if (num_calls.contains(name)) calls->num_expected = num_calls[name].cast<size_t>();
    if (py::isinstance<py::bool_>(told)) {
      calls->drops_everything = true;
    } else {
      for (const auto& pattern : told) calls->patterns.push_back(pattern_from(pattern));
    }
  }
  return region;
}

// The way to the host by itself, as `offloading.py` has it: for those who measure what it takes, and look at its rules.
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
             return offloading.send(THPVariable_Unpack(tensor.ptr()), version, maker, window_bytes);
           })
      .def("fetch_ahead", &Offloading::fetch_ahead)
      .def("end_forward", &Offloading::end_forward);
  module.def("num_copies_made", [] { return num_copies_made.load(); });
  module.def("num_copies_alive", [] { return num_copies_alive.load(); });
}

}  // namespace memfit

TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&memfit::hear>()); }

PYBIND11_MODULE(MEMFIT_MODULE, module) {
  using namespace memfit;
  py::class_<Region, intrusive_ptr<Region>>(module, "Region").def(py::init(&region_from));
  py::class_<ForwardPass>(module, "ForwardPass")
      .def(py::init<>())
      .def("begin", &ForwardPass::begin)
      .def("run",
           [](ForwardPass& forward_pass, const intrusive_ptr<Region>& region, const py::object& forward,
              const py::tuple& args, const py::dict& kwargs) {
             auto* result = forward_pass.run(region, forward.ptr(), args.ptr(), kwargs.ptr());
             if (result == nullptr) throw py::error_already_set();
             return py::reinterpret_steal<py::object>(result);
           })
      .def("has_heard_what_was_planned", &ForwardPass::has_heard_what_was_planned)
      .def("close", &ForwardPass::close);
  module.def("way_in", &way_in);
  define_offloading(module);
  module.attr("key_name") = c10::toString(KEY);
  module.def("is_listening", [] { return listening_tape != nullptr; });
  module.def("tell_of_memory", [](py::object listener) {
    std::swap(python->memory_listener, listener);
    python->tells_of_memory = !python->memory_listener.is_none();
    return listener;
  });
  module.def("configure", [](py::object rule_of, py::object is_capturing, py::object stale_error, py::object torn_error,
                             py::object parameter) {
    python = new Python{std::move(rule_of), std::move(is_capturing), std::move(stale_error), std::move(torn_error),
                        std::move(parameter)};
  });
}
