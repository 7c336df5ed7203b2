// One forward pass: the part of `tape.py` that handles saves and calls of planned modules.

#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/PyInterpreter.h>

#include <unordered_map>

#include "tape.h"

namespace memfit {

// Autograd saves this in place of a tensor: a capsule that holds a `Source`.
constexpr const char* PACKED = "memfit.packed";

inline PyObject* packed(Source source) {
  return PyCapsule_New(new Source(std::move(source)), PACKED,
                       [](PyObject* capsule) { delete static_cast<Source*>(PyCapsule_GetPointer(capsule, PACKED)); });
}

inline PyObject* Tape::pack(PyObject* object) {
  const auto& tensor = tensor_of(object);
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
    if (dropped) {
      save_hooks.dropped_is_saved();
      return packed(Source(std::move(dropped), Geometry(tensor)));
    }
  }
  // An op's own output refers to its autograd node, and the node is about to refer to what is returned here.
  auto alias = has_no_history(tensor) ? tensor : detached_alias(tensor);
  return packed(Source(make_intrusive<HeldTensor>(std::move(alias), frame->module, nullptr)));
}

inline PyObject* pack(PyObject* capsule, PyObject* tensor) {
  HANDLE_TH_ERRORS
  return static_cast<Tape*>(PyCapsule_GetPointer(capsule, nullptr))->pack(tensor);
  END_HANDLE_TH_ERRORS
}

inline py::object error_of(const TornValue& torn) {
  return python->torn_value_error(torn.maker, torn.torn_at, torn.version);
}

inline PyObject* unpack(PyObject* /*unused*/, PyObject* object) {
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
    const auto reader = held.reader == nullptr ? py::object(py::none()) : py::str(held.reader->name);
    set_error(python->stale_value_error(held.module->place, reader, tensor, held.version));
    return nullptr;
  } catch (const TornValue& torn) {
    set_error(error_of(torn));
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef pack_method = {"pack", pack, METH_O, nullptr};
inline PyMethodDef unpack_method = {"unpack", unpack, METH_O, nullptr};

inline c10::SafePyObject safe(const py::object& object) { return {Py_NewRef(object.ptr()), getPyInterpreter()}; }

// One forward pass, for `native_tape.py`: `Tape.run` for models without saved-tensor hooks around them.
class ForwardPass : public Tape {
 public:
  ForwardPass() {
    auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(static_cast<Tape*>(this), nullptr, nullptr));
    pack_hook_ = py::reinterpret_steal<py::object>(PyCFunction_New(&pack_method, capsule.ptr()));
    unpack_hook_ = py::reinterpret_steal<py::object>(PyCFunction_New(&unpack_method, nullptr));
  }

  ForwardPass(const ForwardPass&) = delete;

  py::object run(const intrusive_ptr<PlannedModule>& module, const py::object& forward, const py::tuple& args,
                 const py::dict& kwargs) {
    if (!begins_in_) {
      begins_in_ = module;
      save_hooks.begin_pass(module->last_passes.read(module->num_passes));
    }
    std::optional<Inside> inside;
    if (are_hooks_as_left()) inside.emplace(*this, module);
    auto result = py::reinterpret_steal<py::object>(PyObject_Call(forward.ptr(), args.ptr(), kwargs.ptr()));
    if (!result) throw py::error_already_set();
    if (inside) inside->note_unplanned_calls();
    return result;
  }

  // Returns the first calls of this pass that were not as planned.
  std::optional<UnplannedCalls> close() {
    Tape::close();
    if (begins_in_) {
      auto noted = save_hooks.end_pass();
      if (!noted.empty()) begins_in_->last_passes.write(std::move(noted));
      begins_in_.reset();
    }
    return unplanned_calls_;
  }

 private:
  class Inside {
   public:
    Inside(ForwardPass& forward_pass, const intrusive_ptr<PlannedModule>& module)
        : pass_(forward_pass),
          around_(pass_.frame),
          installs_hooks_(module->hooks_saves && !pass_.save_hooks.has_begun()),
          begins_recording_(module->records && !pass_.is_recording_) {
      if (installs_hooks_) pass_.save_hooks.begin(safe(pass_.pack_hook_), safe(pass_.unpack_hook_));
      if (module->records || around_ == nullptr)
        pass_.frame = &frame_.emplace(module, pass_.num_calls_[module.get()]++);
      entry_ = SaveHooks::module_call(frame_ ? static_cast<const void*>(&frame_->call) : module.get());
      pass_.save_hooks.next_call(entry_);
      if (begins_recording_) {
        recording_tape = &pass_;
        c10::impl::tls_set_dispatch_key_included(KEY, true);
        pass_.is_recording_ = true;
      }
    }
    ~Inside() {
      if (begins_recording_) {
        pass_.is_recording_ = false;
        c10::impl::tls_set_dispatch_key_included(KEY, false);
        recording_tape = nullptr;
      }
      pass_.frame = around_;
      pass_.save_hooks.next_call(entry_ + 1);
      if (installs_hooks_) pass_.save_hooks.end();
    }
    Inside(const Inside&) = delete;
    void note_unplanned_calls() {
      if (!frame_) return;
      frame_->log_calls();
      if (!pass_.unplanned_calls_) pass_.unplanned_calls_ = frame_->unplanned_calls();
    }

   private:
    ForwardPass& pass_;
    Frame* around_;
    std::optional<Frame> frame_;
    bool installs_hooks_;
    bool begins_recording_;
    uint64_t entry_ = 0;
  };

  bool are_hooks_as_left() const { return at::SavedTensorDefaultHooks::is_enabled() && save_hooks.are_hooks_as_left(); }

  std::optional<UnplannedCalls> unplanned_calls_;
  intrusive_ptr<PlannedModule> begins_in_;
  py::object pack_hook_;
  py::object unpack_hook_;
  bool is_recording_ = false;
  std::unordered_map<const PlannedModule*, size_t> num_calls_;
};

}  // namespace memfit
