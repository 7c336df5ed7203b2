// Autograd saves this in place of a tensor that the plan keeps: the tensor and the version that it must still have when
// it is read. With saved-tensor hooks, torch does not check versions itself.

#pragma once

#include <new>

#include "values.h"

namespace memfit {

struct KeptSave {
  PyObject ob_base;
  Tensor tensor;
  int64_t version;
  intrusive_ptr<PlannedModule> module;

  static bool is(PyObject* object) { return Py_TYPE(object) == type(); }
  static KeptSave& of(PyObject* object) { return *reinterpret_cast<KeptSave*>(object); }
  static PyTypeObject* type();

  // Returns null and sets the error if the tensor was written since.
  PyObject* read() const {
    if (version >= 0 && tensor._version() != version) {
      auto written = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
      set_error(python->stale_value_error(module->place, py::none(), written, version));
      return nullptr;
    }
    return THPVariable_Wrap(tensor);
  }
};

inline void free_kept_save(PyObject* object) {
  auto& save = KeptSave::of(object);
  save.tensor.~Tensor();
  save.module.~intrusive_ptr();
  PyObject_Free(object);
}

inline PyTypeObject* KeptSave::type() {
  static PyTypeObject* const ready = [] {
    static PyTypeObject made = {PyVarObject_HEAD_INIT(nullptr, 0)};
    made.tp_name = "memfit.KeptSave";
    made.tp_basicsize = sizeof(KeptSave);
    made.tp_dealloc = free_kept_save;
    made.tp_flags = Py_TPFLAGS_DEFAULT;
    return PyType_Ready(&made) == 0 ? &made : throw py::error_already_set();
  }();
  return ready;
}

inline PyObject* kept(Tensor tensor, const intrusive_ptr<PlannedModule>& module) {
  auto* object = PyObject_New(KeptSave, KeptSave::type());
  if (object == nullptr) return nullptr;
  object->version = version_of(tensor);
  new (&object->tensor) Tensor(std::move(tensor));
  new (&object->module) intrusive_ptr<PlannedModule>(module);
  return reinterpret_cast<PyObject*>(object);
}

}  // namespace memfit
