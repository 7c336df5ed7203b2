// Finds the tensors among an op call's arguments, as `call_arguments.py` does.

#pragma once

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include "values.h"

namespace memfit {

// Calls `visit(slot, tensor)` for each tensor among the arguments, until it returns true; returns whether it did.
template <typename Visit>
inline bool any_tensor(at::ArrayRef<IValue> arguments, Visit visit) {
  for (size_t position = 0; position < arguments.size(); ++position) {
    const auto& argument = arguments[position];
    if (argument.isTensor()) {
      if (argument.toTensor().defined() && visit(Slot{position, std::nullopt}, argument.toTensor())) return true;
    } else if (argument.isList() && !argument.isIntList() && !argument.isDoubleList() && !argument.isBoolList()) {
      const auto list = argument.toListRef();
      for (size_t item = 0; item < list.size(); ++item) {
        if (list[item].isTensor() && list[item].toTensor().defined() &&
            visit(Slot{position, item}, list[item].toTensor())) {
          return true;
        }
      }
    }
  }
  return false;
}

inline const Tensor* first_tensor(at::ArrayRef<IValue> arguments) {
  const Tensor* first = nullptr;
  any_tensor(arguments, [&](const Slot&, const Tensor& tensor) {
    first = &tensor;
    return true;
  });
  return first;
}

// One bit per tensor; the lowest bit is the last tensor's.
inline uint64_t requiring_grad(at::ArrayRef<IValue> arguments) {
  uint64_t bits = 0;
  any_tensor(arguments, [&](const Slot&, const Tensor& tensor) {
    bits = bits << 1U | static_cast<uint64_t>(tensor.requires_grad());
    return false;
  });
  return bits;
}

inline bool is_random(const OpRule& rule, at::ArrayRef<IValue> arguments) {
  if (!rule.draws_random) return false;
  return !rule.dropout_argument || arguments[*rule.dropout_argument].toScalar().toDouble() != 0.0;
}

inline bool is_repeatable(const OpRule& rule, at::ArrayRef<IValue> arguments) {
  if (rule.treatment == Treatment::OPAQUE) return false;
  if (rule.is_deterministic_on_cuda && !rule.draws_random) return true;
  const auto* tensor = first_tensor(arguments);
  if (tensor == nullptr || !tensor->is_cuda()) return tensor != nullptr;
  if (!rule.is_deterministic_on_cuda) return false;
  return !is_random(rule, arguments) || !is_being_captured();
}

// Whether the model itself made the call, on tensors that the engine can identify by their storages.
inline bool is_plain_call(at::ArrayRef<IValue> arguments) {
  return at::GradMode::is_enabled() && !any_tensor(arguments, [](const Slot&, const Tensor& tensor) {
           return tensor.key_set().has(c10::DispatchKey::Python) ||
                  tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
         });
}

struct Draw {
  at::Generator generator;
  RandomState state;
};

inline std::optional<Draw> generator_and_state(const OpRule& rule, at::ArrayRef<IValue> arguments) {
  if (!is_random(rule, arguments)) return std::nullopt;
  at::Generator generator;
  if (rule.generator_argument && arguments[*rule.generator_argument].isGenerator()) {
    generator = arguments[*rule.generator_argument].toGenerator();
  } else {
    generator = at::globalContext().defaultGenerator(first_tensor(arguments)->device());
  }
  return Draw{generator, RandomState(generator)};
}

}  // namespace memfit
