// Tensors as Python objects. Declared here because torch/csrc/autograd/python_variable.h takes long to compile.

#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

extern PyObject* THPVariableClass;
PyObject* THPVariable_Wrap(const at::TensorBase& var);

namespace torch::autograd {
int get_current_graph_task_id();
}  // namespace torch::autograd

namespace memfit {

// The beginning of torch's `THPVariable`.
struct PythonTensor {
  PyObject_HEAD;
  at::Tensor tensor;
};

inline const at::Tensor& tensor_of(PyObject* object) { return reinterpret_cast<PythonTensor*>(object)->tensor; }

// Whether torch's objects begin as declared above.
inline bool are_python_tensors_as_declared() {
  const auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                               caffe2::TypeMeta::Make<float>(), at::kCPU);
  auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
  return object && tensor_of(object.ptr()).unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl();
}

}  // namespace memfit
