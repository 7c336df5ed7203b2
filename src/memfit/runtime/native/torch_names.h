// The names of torch and Python that the engine uses. Names beyond torch's public headers, checked on 2.11.0 and
// 2.13.0: the dispatch key, the beginning of THPVariable (checked when the module is loaded),
// at::SavedTensorDefaultHooks and the stack in its TLS state, c10::StorageImpl's weak references,
// TensorImpl::shallow_copy_and_detach, c10::impl::VirtualGuardImpl with getStreamNativeHandle,
// c10::impl::BoxedKernelWrapper, c10::impl::boxArgs, torch::autograd::get_current_graph_task_id, at::_ops.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

#include <atomic>

#include "python_tensors.h"
#include "typed_kernels.h"

namespace memfit {

namespace py = pybind11;

using at::Tensor;
using c10::intrusive_ptr;
using c10::IValue;
using c10::make_intrusive;
using c10::weak_intrusive_ptr;
using torch::jit::Stack;

// Functions in Python, set once by `configure`. Never freed: the interpreter may be finalized before this library.
struct Python {
  py::object rule_of;            // (name, overload) -> the op's rule
  py::object is_capturing;       // () -> whether a CUDA graph is being captured
  py::object stale_value_error;  // (place, op name or None, tensor, version it had) -> the error
  py::object torn_value_error;   // (maker, version when it was found, version it had) -> the error
  py::object gather;             // (place, tensor): allocates and gathers a tensor that FSDP2 has freed
  py::object parameter_class;
};
inline Python* python = nullptr;

inline void set_error(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

inline bool is_being_captured() {
  py::gil_scoped_acquire gil;
  return python->is_capturing().cast<bool>();
}

}  // namespace memfit
