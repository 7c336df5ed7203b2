// Replays dropped values, as `replay.py` does.

#pragma once

#include <functional>
#include <map>

#include "dispatch_guards.h"
#include "fusing.h"
#include "values.h"

namespace memfit {

inline std::vector<intrusive_ptr<ReplayRecord>> recipes_for(const DroppedValue& value) {
  std::map<size_t, intrusive_ptr<ReplayRecord>, std::greater<>> needed{{value.record->number, value.record}};
  std::vector<ReplayRecord*> stack{value.record.get()};
  while (!stack.empty()) {
    auto* record = stack.back();
    stack.pop_back();
    for (const auto& [slot, source] : record->sources) {
      if (!source.value || !source.value->record) continue;
      const auto& before = source.value->record;
      if (needed.emplace(before->number, before).second) stack.push_back(before.get());
    }
  }
  std::vector<intrusive_ptr<ReplayRecord>> last_first;
  last_first.reserve(needed.size());
  for (auto& [number, record] : needed) last_first.push_back(std::move(record));
  return last_first;
}

inline Tensor ReplayRecord::fetched() const { return tensor_with(*geometry, copy->fetch()); }

// FSDP2 frees gathered parameters between their uses.
inline bool is_freed(const Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().nbytes() == 0 && tensor.numel() > 0;
}

inline void gather(const HeldTensor& held) {
  py::gil_scoped_acquire gil;
  python->gather(held.module->place, py::reinterpret_steal<py::object>(THPVariable_Wrap(held.tensor)));
}

inline Tensor read(const Source& source) {
  if (source.held) {
    const auto& held = *source.held;
    if (is_freed(held.tensor)) gather(held);
    if (held.version >= 0 && held.tensor._version() != held.version) throw StaleValue{source.held};
    return held.tensor;
  }
  auto& value = *source.value;
  std::lock_guard lock(value.pass->mutex);
  if (!value.tensor.defined()) {
    BelowAutogradAndAutocast guard;
    value.pass->offloading->fetch_ahead();
    auto pending = recipes_for(value);
    while (!pending.empty()) {
      if (FusedReplay::run(pending)) continue;
      auto next = std::move(pending.back());
      pending.pop_back();
      next->run();
    }
  }
  return tensor_with(*source.geometry, value.tensor);
}

inline Stack ReplayRecord::arguments_with_tensors() const {
  Stack stack(arguments);
  std::optional<size_t> copied;
  for (const auto& [slot, source] : sources) {
    auto& argument = stack[slot.argument];
    // The record's own lists stay without tensors.
    if (slot.item && copied != slot.argument) {
      argument = with_own_list(argument);
      copied = slot.argument;
    }
    put(read(source), argument, slot);
  }
  return stack;
}

inline Stack ReplayRecord::call() {
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
      // Arguments that share the rewritten storage must see the write, as they did in the forward pass.
      for (const auto& [slot, source] : sources) {
        if (source.value == rewritten && !slot.item) stack[slot.argument] = tensor_with(*source.geometry, canvas);
      }
    }
  }
  op.callBoxed(&stack);
  return canvas.defined() ? Stack{std::move(canvas)} : stack;
}

inline void ReplayRecord::run() {
  if (event_log.is_on()) event_log.add(kind == Kind::FETCH ? "fetch" : "replay " + op_rules.of(op).name);
  Stack results;
  if (!generator) {
    results = call();
  } else {
    struct Rewound {
      at::Generator& generator;
      RandomState state_now;
      Rewound(at::Generator& of, const RandomState& to) : generator(of), state_now(of) { to.restore(generator); }
      ~Rewound() { state_now.restore(generator); }
    } rewound(*generator, *generator_state);
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
