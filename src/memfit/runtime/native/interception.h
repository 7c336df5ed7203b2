// Passes op calls to a Python handler at the point where the engine in C++ records them, so that a profile has the same
// calls. Under a dispatch mode torch runs a few other ops, such as an out-of-place `add` in a linear layer.

#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <atomic>
#include <utility>
#include <vector>

#include "torch_names.h"

// Declared here because torch/csrc/jit/python/pybind_utils.h takes long to compile.
namespace torch::jit {
py::object toPyObject(IValue ivalue);
IValue toIValue(py::handle obj, const c10::TypePtr& type, std::optional<int32_t> N);
}  // namespace torch::jit

namespace memfit {

// Called as ``handler(op, types, args, kwargs)``, like `__torch_dispatch__`. Shared by all threads; a thread passes its
// ops to it while the key is included and no tape records.
inline std::atomic<PyObject*> op_handler{nullptr};

inline py::object argument_in_python(const c10::Argument& argument, const IValue& value) {
  if (value.isNone()) return py::none();
  const auto* type = argument.real_type().get();
  if (const auto optional = argument.real_type()->cast<c10::OptionalType>()) type = optional->getElementType().get();
  if (value.isInt()) {
    const auto number = value.toInt();
    switch (type->kind()) {
      case c10::TypeKind::ScalarTypeType:
        return py::reinterpret_borrow<py::object>(
            reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(number))));
      case c10::TypeKind::LayoutType:
        return py::reinterpret_borrow<py::object>(
            reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<at::Layout>(number))));
      case c10::TypeKind::MemoryFormatType:
        return py::reinterpret_borrow<py::object>(
            torch::utils::getTHPMemoryFormat(static_cast<at::MemoryFormat>(number)));
      default:
        break;
    }
  }
  return torch::jit::toPyObject(value);
}

inline void add_types(const IValue& value, py::list& types) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (!tensor.defined() || !tensor.key_set().has(c10::DispatchKey::Python)) return;
    auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    types.append(py::type::of(object));
  } else if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
    for (const auto& item : value.toListRef()) add_types(item, types);
  }
}

inline void call_handler(PyObject* handler, const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& expected = schema.arguments();
  const auto values = torch::jit::pop(*stack, expected.size());
  size_t num_positional = 0;
  const auto is_default = [&](size_t place) {
    return expected[place].default_value() && *expected[place].default_value() == values[place];
  };
  for (size_t place = 0; place < values.size() && !expected[place].kwarg_only(); ++place)
    if (!is_default(place)) num_positional = place + 1;
  py::list args, types;
  py::dict kwargs;
  for (size_t place = 0; place < values.size(); ++place) {
    add_types(values[place], types);
    if (place < num_positional) {
      args.append(argument_in_python(expected[place], values[place]));
    } else if (expected[place].kwarg_only() && !is_default(place)) {
      kwargs[expected[place].name().c_str()] = argument_in_python(expected[place], values[place]);
    }
  }
  auto result = py::reinterpret_steal<py::object>(
      PyObject_CallFunctionObjArgs(handler, torch::detail::getTorchApiFunction(op).ptr(), py::tuple(types).ptr(),
                                   py::tuple(args).ptr(), kwargs.ptr(), nullptr));
  if (!result) throw py::error_already_set();
  const auto& returns = schema.returns();
  if (returns.size() == 1) {
    torch::jit::push(*stack, torch::jit::toIValue(result, returns[0].real_type(), std::nullopt));
  } else if (!returns.empty()) {
    const auto results = result.cast<py::sequence>();
    for (size_t place = 0; place < returns.size(); ++place) {
      const py::object item = results[place];
      torch::jit::push(*stack, torch::jit::toIValue(item, returns[place].real_type(), std::nullopt));
    }
  }
}

// Whether ops run on fake tensors or are traced, as when a model compiles a part of itself.
inline bool is_traced() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  return TorchDispatchModeTLS::any_modes_set() && (TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE) ||
                                                   TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY) ||
                                                   TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL));
}

// Returns whether the handler ran the op. The caller has excluded the key.
inline bool is_handled(const c10::OperatorHandle& op, Stack* stack) {
  if (op_handler.load() == nullptr || is_traced()) return false;
  py::gil_scoped_acquire gil;
  const auto handler = py::reinterpret_borrow<py::object>(op_handler.load());
  if (!handler) return false;
  try {
    call_handler(handler.ptr(), op, stack);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error raised;
    raised.persist();
    throw raised;
  }
  return true;
}

// Sets the handler (None: no handler) and returns the previous one. Affects the ops of this thread.
inline py::object intercept(const py::object& handler) {
  auto* before = op_handler.exchange(handler.is_none() ? nullptr : handler.inc_ref().ptr());
  c10::impl::tls_set_dispatch_key_included(KEY, !handler.is_none());
  return before == nullptr ? py::none() : py::reinterpret_steal<py::object>(before);
}

}  // namespace memfit
