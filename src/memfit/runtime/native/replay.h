// Brings dropped values back, as `replay.py` does.

#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <functional>
#include <map>

#include "values.h"

namespace memfit {

// A recipe holds a call as it was below autograd and autocast; neither may act on it again.
struct BelowAutogradAndAutocast {
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autograd{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  // Backward itself may run under a function transform, which what was recorded did not.
  c10::impl::ExcludeDispatchKeyGuard no_transforms{c10::DispatchKeySet(
      {c10::DispatchKey::VmapMode, c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
  c10::impl::ExcludeDispatchKeyGuard unheard{KEY};
};

inline std::vector<intrusive_ptr<Recipe>> recipes_for(const DroppedValue& value) {
  std::map<size_t, intrusive_ptr<Recipe>, std::greater<>> needed{{value.recipe->number, value.recipe}};
  std::vector<Recipe*> stack{value.recipe.get()};
  while (!stack.empty()) {
    auto* recipe = stack.back();
    stack.pop_back();
    for (const auto& [slot, source] : recipe->sources) {
      if (!source.value || !source.value->recipe) continue;
      const auto& before = source.value->recipe;
      if (needed.emplace(before->number, before).second) stack.push_back(before.get());
    }
  }
  std::vector<intrusive_ptr<Recipe>> last_first;
  last_first.reserve(needed.size());
  for (auto& [number, recipe] : needed) last_first.push_back(std::move(recipe));
  return last_first;
}

// Calls a method of an object of `offloading.py`.
template <typename... Arguments>
inline py::object asked_of(const c10::SafePyObject& object, const char* method, Arguments&&... arguments) {
  return py::handle(object.ptr(getPyInterpreter())).attr(method)(std::forward<Arguments>(arguments)...);
}

inline void fetch_ahead(const PassState& pass) {
  if (!pass.has_offloaded) return;
  py::gil_scoped_acquire gil;
  asked_of(pass.offloading, "fetch_ahead");
}

inline Tensor Recipe::fetched() const {
  py::gil_scoped_acquire gil;
  return tensor_with(*geometry, THPVariable_Unpack(asked_of(*copy, "fetch").ptr()));
}

inline Tensor read(const Source& source) {
  if (source.held) {
    const auto& held = *source.held;
    if (held.version >= 0 && held.tensor._version() != held.version) throw StaleValue{source.held};
    return held.tensor;
  }
  auto& value = *source.value;
  std::lock_guard lock(value.pass->mutex);
  if (!value.tensor.defined()) {
    BelowAutogradAndAutocast guard;
    fetch_ahead(*value.pass);
    auto pending = recipes_for(value);
    while (!pending.empty()) {
      auto next = std::move(pending.back());
      pending.pop_back();
      next->run();
    }
  }
  return tensor_with(*source.geometry, value.tensor);
}

inline Stack Recipe::arguments_with_tensors() const {
  Stack stack(arguments);
  std::optional<size_t> copied;
  for (const auto& [slot, source] : sources) {
    auto& argument = stack[slot.argument];
    // The lists of the recipe itself stay as they are, without tensors.
    if (slot.item && copied != slot.argument) {
      argument = with_own_list(argument);
      copied = slot.argument;
    }
    put(read(source), argument, slot);
  }
  return stack;
}

inline Stack Recipe::call() {
  if (kind == Kind::FETCH) return Stack{fetched()};
  auto stack = arguments_with_tensors();
  Tensor canvas;
  if (kind == Kind::OVERWRITE) {
    canvas = empty_with(*geometry, *device);
    stack[0] = canvas;
  } else if (kind == Kind::IN_PLACE) {
    const auto& rewritten = sources.front().second.value;
    canvas = rewritten->tensor;
    if (rewritten->num_uses > 1) {
      canvas = empty_with(rewritten->geometry, canvas.device()).copy_(canvas);
      // Every argument that lies in the rewritten memory must see the writes, as it did in the forward pass.
      for (const auto& [slot, source] : sources) {
        if (source.value == rewritten && !slot.item) stack[slot.argument] = tensor_with(*source.geometry, canvas);
      }
    }
  }
  op.callBoxed(&stack);
  return canvas.defined() ? Stack{std::move(canvas)} : stack;
}

inline void Recipe::run() {
  Stack results;
  if (!generator) {
    results = call();
  } else {
    struct Rewound {
      at::Generator& generator;
      Tensor state_now;
      Rewound(at::Generator& of, const Tensor& to) : generator(of) {
        std::lock_guard lock(generator.mutex());
        state_now = generator.get_state();
        generator.set_state(to);
      }
      ~Rewound() {
        std::lock_guard lock(generator.mutex());
        generator.set_state(state_now);
      }
    } rewound(*generator, generator_state);
    results = call();
  }
  const bool is_list = results.size() == 1 && results[0].isTensorList();
  for (const auto& [position, reference] : outputs) {
    auto value = reference.lock();
    if (value && !value->tensor.defined()) {
      value->fill(is_list ? results[0].toTensorList().get(position) : results[position].toTensor());
    }
  }
}

}  // namespace memfit
