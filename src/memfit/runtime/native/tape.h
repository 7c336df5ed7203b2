// The tape of `tape.py`. Each function implements the one of the same name there, where its rule is explained.

#pragma once

#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call_arguments.h"
#include "dispatch_guards.h"
#include "interception.h"
#include "notes.h"
#include "replay.h"
#include "save_hooks.h"

namespace memfit {

// Nested tensors report a strided layout but have neither sizes nor strides.
inline bool is_strided(const Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested();
}

inline bool has_no_history(const Tensor& tensor) {
  return tensor.is_leaf() || (tensor.is_view() && tensor._base().is_leaf());
}

// Shares the tensor's version counter; hidden from dispatch modes.
inline Tensor detached_alias(const Tensor& tensor) {
  UnseenByDispatchModes unseen;
  const auto* tensor_impl = tensor.unsafeGetTensorImpl();
  return Tensor(tensor_impl->shallow_copy_and_detach(tensor_impl->version_counter(), false));
}

inline bool covers_its_storage(const Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() &&
         static_cast<size_t>(tensor.numel()) * tensor.element_size() == tensor.storage().nbytes();
}

class Tape {
 public:
  Tape() {
    static std::atomic<size_t> num_tapes{0};
    number_ = ++num_tapes;
  }

  Frame* frame = nullptr;  // of the innermost recorded module
  SaveHooks save_hooks;

  void dispatch_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);
  bool passes_by(const OpRule& rule, bool is_meta, bool is_plain, const Tensor* written, uint64_t requiring_grad);
  void run_plain_pure_op(const c10::OperatorHandle& op, const OpRule& rule, std::vector<IValue> arguments,
                         RunPlainOp run);
  PyObject* pack(PyObject* object);
  void close();

 private:
  const Pattern* pattern_of_call(const OpRule& rule, at::ArrayRef<IValue> arguments, Pattern& kept);
  const Pattern* next_pattern(const OpRule& rule);
  void run_pure_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, const OpRule& rule,
                   const Pattern& pattern, std::vector<IValue> record_arguments);
  void decide_on(at::ArrayRef<const Tensor*> outputs, const c10::OperatorHandle& op, const OpRule& rule,
                 const Pattern& pattern, std::vector<IValue> record_arguments, std::optional<Draw> draw);
  void run_batch_norm(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, const OpRule& rule,
                      const Pattern* pattern);
  void run_writing_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, const OpRule& rule,
                      Fate fate);
  void offload(const Tensor& output, int64_t version, const c10::OperatorHandle& op, const OpRule& rule);
  void before_write(const std::vector<Tensor>& written, const OpRule& rule);
  intrusive_ptr<ReplayRecord> add_record(ReplayRecord::Kind kind, const c10::OperatorHandle& op, const OpRule& rule,
                                         std::vector<IValue> arguments, std::optional<Draw> draw);
  Source source(const Tensor& tensor, const OpRule& rule);
  intrusive_ptr<DroppedValue> content(Note& note, const Tensor& tensor);
  void drop(const Tensor& tensor, intrusive_ptr<DroppedValue> value, int64_t version);
  void forget_dead_storages();

  size_t number_;
  const std::shared_ptr<PassState> state_ = std::make_shared<PassState>();
  size_t num_records_ = 0;
  std::vector<std::pair<const c10::StorageImpl*, weak_intrusive_ptr<c10::StorageImpl>>> dropping_;
  // Values of storages that hold other content by now; freed at the next call.
  std::vector<intrusive_ptr<DroppedValue>> outdated_;
};

inline void dispatch_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  // Ops that the op itself calls are not recorded.
  c10::impl::ExcludeDispatchKeyGuard unheard(KEY);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY);
  // Threads of autograd may include the key without a tape.
  if (recording_tape == nullptr) {
    if (!is_handled(op, stack)) op.redispatchBoxed(below, stack);
  } else if (recording_tape->frame == nullptr) {
    op.redispatchBoxed(below, stack);
  } else {
    recording_tape->dispatch_op(op, below, stack);
  }
}

// Identifies a call for `SaveHooks`.
inline uint64_t call_of(const OpRule& rule, uint64_t requiring_grad, bool drops) {
  return (requiring_grad << 24U) + (static_cast<uint64_t>(rule.number) << 1U) + static_cast<uint64_t>(drops);
}

// Returns the decisions for the outputs of a call that is about to run, null if all are saved. ``kept`` may hold them.
inline const Pattern* Tape::pattern_of_call(const OpRule& rule, at::ArrayRef<IValue> arguments, Pattern& kept) {
  forget_dead_storages();
  const auto* pattern = is_plain_call(arguments) ? next_pattern(rule) : nullptr;
  if (pattern != nullptr && !is_repeatable(rule, arguments)) {
    if (rule.treatment == Treatment::PURE) kept = pattern->without_drops();
    pattern = kept.saves_all() ? nullptr : &kept;
  }
  save_hooks.next_call(call_of(rule, requiring_grad(arguments), pattern != nullptr));
  return pattern;
}

inline void Tape::dispatch_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& rule = op_rules.of(op);
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const auto* tensor = rule.treatment == Treatment::VIEW ? nullptr : first_tensor(arguments);
  // Meta tensors are used to trace what an op would do.
  if (rule.treatment == Treatment::VIEW || (tensor != nullptr && tensor->is_meta())) {
    op.redispatchBoxed(keys, stack);
    return;
  }
  Pattern kept;
  const auto* pattern = pattern_of_call(rule, arguments, kept);
  if (!rule.written.empty()) {
    run_writing_op(op, keys, stack, rule, pattern == nullptr ? Fate::SAVE : (*pattern)[0]);
  } else if (rule.batch_norm_arguments) {
    run_batch_norm(op, keys, stack, rule, pattern);
  } else if (pattern == nullptr) {
    op.redispatchBoxed(keys, stack);
  } else {
    run_pure_op(op, keys, stack, rule, *pattern, arguments.vec());
  }
}

// Returns whether the call only has to run. If so, counts it, as `dispatch_op` would.
inline bool Tape::passes_by(const OpRule& rule, bool is_meta, bool is_plain, const Tensor* written,
                            uint64_t requiring_grad) {
  if (frame == nullptr || is_meta) return true;
  if (written != nullptr && is_strided(*written)) {
    std::lock_guard lock(notes.mutex);
    if (notes.on(*written) != nullptr) return false;
  }
  const auto* calls = is_plain && at::GradMode::is_enabled() ? frame->calls_of(rule) : nullptr;
  if (calls != nullptr) {
    auto& num_calls = frame->num_calls[calls->slot];
    if (calls->pattern_of(num_calls) != nullptr) return false;
    ++num_calls;
  }
  save_hooks.next_call(call_of(rule, requiring_grad, false));
  forget_dead_storages();
  return true;
}

inline const Pattern* Tape::next_pattern(const OpRule& rule) {
  const auto* calls = frame->calls_of(rule);
  return calls == nullptr ? nullptr : calls->pattern_of(frame->num_calls[calls->slot]++);
}

inline bool lies_under(const c10::StorageImpl* storage, at::ArrayRef<IValue> arguments) {
  return any_tensor(arguments, [&](const Slot&, const Tensor& tensor) {
    return is_strided(tensor) && tensor.storage().unsafeGetStorageImpl() == storage;
  });
}

inline void Tape::run_pure_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, const OpRule& rule,
                              const Pattern& pattern, std::vector<IValue> record_arguments) {
  auto draw = pattern.has(Fate::DROP) ? generator_and_state(rule, record_arguments) : std::nullopt;
  op.redispatchBoxed(keys, stack);
  const auto results = torch::jit::last(*stack, op.schema().returns().size());
  const bool is_list = results.size() == 1 && results[0].isTensorList();
  Outputs outputs;
  for (const auto& result : is_list ? results[0].toListRef() : results)
    outputs.push_back(result.isTensor() ? &result.toTensor() : nullptr);
  decide_on(outputs, op, rule, pattern, std::move(record_arguments), std::move(draw));
}

// Runs a call that drops an output, of an op that writes to nothing.
inline void Tape::run_plain_pure_op(const c10::OperatorHandle& op, const OpRule& rule, std::vector<IValue> arguments,
                                    RunPlainOp run) {
  Pattern kept;
  const auto* pattern = pattern_of_call(rule, arguments, kept);
  Outputs outputs;
  if (pattern == nullptr) return run(outputs);
  auto draw = pattern->has(Fate::DROP) ? generator_and_state(rule, arguments) : std::nullopt;
  run(outputs);
  decide_on(outputs, op, rule, *pattern, std::move(arguments), std::move(draw));
}

// Drops, offloads or saves each output of a call; null stands for an output that is not a tensor.
inline void Tape::decide_on(at::ArrayRef<const Tensor*> outputs, const c10::OperatorHandle& op, const OpRule& rule,
                            const Pattern& pattern, std::vector<IValue> record_arguments, std::optional<Draw> draw) {
  intrusive_ptr<ReplayRecord> record;
  if (pattern.has(Fate::DROP)) {
    record = add_record(ReplayRecord::Kind::PURE, op, rule, std::move(record_arguments), std::move(draw));
    record_arguments.clear();
  }
  for (size_t position = 0; position < outputs.size(); ++position) {
    const auto fate = pattern[position];
    if (fate == Fate::SAVE || outputs[position] == nullptr) continue;
    const auto& output = *outputs[position];
    if (!is_strided(output)) continue;
    {
      std::lock_guard lock(notes.mutex);
      // An op that returns an argument made no new value. Arguments of recorded calls have notes.
      if (notes.on(output) != nullptr) continue;
    }
    if (fate == Fate::DROP) {
      event_log.add("drop", frame->module->path, rule.name, position);
      drop(output, record->add_output(position, output), version_of(output));
    } else if (record || !lies_under(output.storage().unsafeGetStorageImpl(), record_arguments)) {
      offload(output, version_of(output), op, rule);
    }
  }
}

inline void Tape::offload(const Tensor& output, int64_t version, const c10::OperatorHandle& op, const OpRule& rule) {
  if (output.key_set().has(c10::DispatchKey::Python)) return;
  auto alias = detached_alias(output);
  std::shared_ptr<OffloadedCopy> copy;
  {
    PassLock lock(*state_);
    copy = state_->offloading->send(std::move(alias), version, frame->module->path + "::" + rule.name,
                                    frame->module->window_bytes);
  }
  if (!copy) return;
  event_log.add("offload", frame->module->path, rule.name);
  auto record = make_intrusive<ReplayRecord>(++num_records_, state_, ReplayRecord::Kind::FETCH, op);
  record->copy = std::move(copy);
  record->geometry.emplace(output);
  drop(output, record->add_output(0, output), version);
}

// Whether the dtype of a batch norm's result depends on that of its running statistics.
inline bool decides_on_type(const std::vector<IValue>& arguments, size_t statistic) {
  const auto& weight = arguments[1];
  const bool has_weight = weight.isTensor() && weight.toTensor().defined();
  return !has_weight && arguments[0].toTensor().scalar_type() != arguments[statistic].toTensor().scalar_type();
}

inline void Tape::run_batch_norm(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                                 const OpRule& rule, const Pattern* pattern) {
  auto record_arguments = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  const auto [mean, variance, training] = *rule.batch_norm_arguments;
  const bool drops = pattern != nullptr && pattern->has(Fate::DROP);
  if (record_arguments[training].toBool()) {
    std::vector<Tensor> written;
    for (auto position : {mean, variance}) {
      const auto& statistic = record_arguments[position];
      const bool is_given = statistic.isTensor() && statistic.toTensor().defined();
      if (is_given) written.push_back(statistic.toTensor());
      const bool decides_type = is_given && drops && decides_on_type(record_arguments, position);
      record_arguments[position] = decides_type ? IValue(at::empty_like(written.back())) : IValue();
    }
    before_write(written, rule);
  }
  if (pattern == nullptr) {
    op.redispatchBoxed(keys, stack);
  } else {
    run_pure_op(op, keys, stack, rule, *pattern, std::move(record_arguments));
  }
}

inline void Tape::run_writing_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                                 const OpRule& rule, Fate fate) {
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  std::vector<Tensor> written;
  for (auto position : rule.written) {
    any_tensor(at::ArrayRef<IValue>(arguments[position]), [&](const Slot&, const Tensor& tensor) {
      written.push_back(tensor);
      return false;
    });
  }
  before_write(written, rule);
  intrusive_ptr<ReplayRecord> record;
  std::optional<Geometry> geometry;
  if (written.empty() || !is_strided(written[0])) fate = Fate::SAVE;
  // Autograd increments the version after this call returns.
  const auto version = fate == Fate::SAVE ? 0 : version_of(written[0]) + 1;
  if (fate == Fate::DROP) {
    const auto& target = written[0];
    auto draw = generator_and_state(rule, arguments);
    if (rule.treatment == Treatment::OVERWRITE && covers_its_storage(target)) {
      geometry.emplace(target);
      auto record_arguments = arguments;
      record_arguments[0] = IValue();
      record = add_record(ReplayRecord::Kind::OVERWRITE, op, rule, std::move(record_arguments), std::move(draw));
      record->geometry = geometry;
      record->device = target.device();
    } else if (rule.treatment == Treatment::IN_PLACE) {
      intrusive_ptr<DroppedValue> before;
      {
        std::lock_guard lock(notes.mutex);
        before = content(notes.written_by(number_, target), target);
      }
      // For content that is held anyway, a record would save nothing: a copy of the content would have to be held.
      if (before) {
        geometry = before->geometry;
        record = add_record(ReplayRecord::Kind::IN_PLACE, op, rule, arguments, std::move(draw));
      }
    }
  }
  arguments.clear();
  op.redispatchBoxed(keys, stack);
  for (const auto& tensor : written) {
    if (!is_strided(tensor)) continue;
    std::lock_guard lock(notes.mutex);
    auto* stale = notes.on(tensor);
    if (stale != nullptr && stale->dropped) outdated_.push_back(std::move(stale->dropped));
    if (stale != nullptr) stale->dropped.reset();
  }
  if (fate == Fate::OFFLOAD) offload(written[0], version, op, rule);
  if (record) {
    event_log.add("drop", frame->module->path, rule.name, 0);
    auto value = make_intrusive<DroppedValue>(record, *geometry);
    record->outputs.emplace_back(0, value);
    drop(written[0], std::move(value), version);
  }
}

// Waits until the storage of an offloaded ``value`` may be written. A restored value has no record and needs no wait.
inline void before_write_to(const DroppedValue& value, int num_counted) {
  PassLock lock(*value.pass);
  if (value.record) value.record->copy->before_write(num_counted);
}

inline void Tape::before_write(const std::vector<Tensor>& written, const OpRule& rule) {
  // Ops of libraries may increment versions before they are intercepted.
  const auto num_counted = rule.name.compare(0, 5, "aten.") == 0 ? 0 : 1;
  for (const auto& tensor : written) {
    if (!is_strided(tensor)) continue;
    std::vector<intrusive_ptr<HeldTensor>> holders;
    intrusive_ptr<DroppedValue> offloaded;
    {
      std::lock_guard lock(notes.mutex);
      auto* note = notes.on(tensor);
      if (note == nullptr) continue;
      if (note->dropped && note->dropped->is_offloaded) offloaded = note->dropped;
      for (const auto& reference : note->held) {
        auto holder = reference.lock();
        // A tensor over content that was written without being recorded must not get a copy of that content.
        if (holder && version_of(holder->tensor) - holder->version <= num_counted) holders.push_back(std::move(holder));
      }
      note->held.clear();
    }
    if (offloaded) before_write_to(*offloaded, num_counted);
    if (holders.empty()) continue;
    const auto copy = at::clone(storage_as_bytes(tensor));
    for (const auto& holder : holders) holder->replace(tensor_with(Geometry(holder->tensor), copy));
  }
}

inline intrusive_ptr<ReplayRecord> Tape::add_record(ReplayRecord::Kind kind, const c10::OperatorHandle& op,
                                                    const OpRule& rule, std::vector<IValue> arguments,
                                                    std::optional<Draw> draw) {
  event_log.add("record", frame->module->path, rule.name);
  auto record = make_intrusive<ReplayRecord>(++num_records_, state_, kind, op);
  // More are rare.
  record->sources.reserve(3);
  std::vector<std::pair<Slot, Tensor>> numbers;
  any_tensor(arguments, [&](const Slot& slot, const Tensor& tensor) {
    // A number that was wrapped in a tensor; no one else refers to it.
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      numbers.emplace_back(slot, uncounted_number(tensor));
    } else {
      record->sources.emplace_back(slot, source(tensor, rule));
    }
    return false;
  });
  std::optional<size_t> copied;
  for (const auto& [slot, source] : record->sources) {
    auto& argument = arguments[slot.argument];
    if (slot.item && copied != slot.argument) {
      argument = with_own_list(argument);
      copied = slot.argument;
    }
    put(Tensor(), argument, slot);
  }
  for (auto& [slot, number] : numbers) put(std::move(number), arguments[slot.argument], slot);
  record->arguments = std::move(arguments);
  if (draw) {
    record->generator = std::move(draw->generator);
    record->generator_state = std::move(draw->state);
  }
  return record;
}

inline Source Tape::source(const Tensor& tensor, const OpRule& rule) {
  if (!is_strided(tensor)) return Source(make_intrusive<HeldTensor>(tensor, frame->module, &rule));
  {
    std::lock_guard lock(notes.mutex);
    if (auto dropped = content(notes.written_by(number_, tensor), tensor)) {
      return Source(std::move(dropped), Geometry(tensor));
    }
  }
  if (tensor.is_inference()) {
    // Writes to it are not counted.
    return Source(make_intrusive<HeldTensor>(at::clone(tensor), frame->module, &rule));
  }
  auto held =
      make_intrusive<HeldTensor>(has_no_history(tensor) ? tensor : detached_alias(tensor), frame->module, &rule);
  std::lock_guard lock(notes.mutex);
  notes.written_by(number_, tensor).held.emplace_back(held);
  return Source(std::move(held));
}

inline intrusive_ptr<DroppedValue> Tape::content(Note& note, const Tensor& tensor) {
  if (note.dropped && version_of(tensor) != note.version) {
    outdated_.push_back(std::move(note.dropped));
    note.dropped.reset();
  }
  return note.dropped;
}

inline void Tape::drop(const Tensor& tensor, intrusive_ptr<DroppedValue> value, int64_t version) {
  auto storage = tensor.storage().getWeakStorageImpl();
  std::lock_guard lock(notes.mutex);
  auto& note = notes.written_by(number_, tensor);
  note.dropped.swap(value);
  note.version = version;
  if (value) outdated_.push_back(std::move(value));
  dropping_.emplace_back(tensor.storage().unsafeGetStorageImpl(), std::move(storage));
}

inline void Tape::forget_dead_storages() {
  if (dropping_.empty() && outdated_.empty()) return;
  std::vector<intrusive_ptr<DroppedValue>> outdated;
  outdated.swap(outdated_);
  const auto is_alive = [](const auto& entry) { return !entry.second.expired(); };
  const auto dead = std::partition(dropping_.begin(), dropping_.end(), is_alive);
  if (dead == dropping_.end()) return;
  std::lock_guard lock(notes.mutex);
  for (auto entry = dead; entry != dropping_.end(); ++entry) outdated.push_back(notes.release(entry->first, number_));
  dropping_.erase(dead, dropping_.end());
}

inline void Tape::close() {
  {
    PassLock lock(*state_);
    state_->offloading->end_forward();
  }
  std::vector<intrusive_ptr<DroppedValue>> outdated;
  outdated.swap(outdated_);
  std::lock_guard lock(notes.mutex);
  for (const auto& [storage, reference] : dropping_) outdated.push_back(notes.release(storage, number_));
  dropping_.clear();
  for (auto& dropped : notes.tidied()) outdated.push_back(std::move(dropped));
}

}  // namespace memfit
