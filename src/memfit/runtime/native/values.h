// The values and replay records of `values.py` and `replay_records.py`.
//
// References between them are the same, except that nothing is attached to storages: see `notes.h`.

#pragma once

#include <ATen/core/Generator.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "geometry.h"
#include "offloading.h"
#include "planned_modules.h"
#include "random_state.h"

namespace memfit {

// A tensor that a record or autograd reads, with the version that it must still have.
struct HeldTensor : c10::intrusive_ptr_target {
  Tensor tensor;
  int64_t version;
  intrusive_ptr<PlannedModule> module;
  const OpRule* reader;  // null: autograd

  HeldTensor(Tensor held, intrusive_ptr<PlannedModule> in, const OpRule* by)
      : tensor(std::move(held)), version(version_of(tensor)), module(std::move(in)), reader(by) {}

  void replace(Tensor copy) {
    version = version_of(copy);
    tensor = std::move(copy);
  }

  // Weak references keep this object alive, but must not keep what it holds.
  void release_resources() override {
    tensor.reset();
    module.reset();
  }
};

// Thrown where no Python error can be raised yet.
struct StaleValue {
  intrusive_ptr<HeldTensor> held;
};

// State that all values and records of one forward pass share.
struct PassState {
  // Two threads may run backward through one graph at once. The mutex guards ``record`` and ``tensor`` of values, and
  // all of ``offloading``.
  std::recursive_mutex mutex;
  const std::shared_ptr<Offloading> offloading = std::make_shared<Offloading>();
};

// The lock of a pass, for callers that may hold the GIL. They must release the GIL while they wait: the owner of the
// lock may need it, for instance for a replayed op with a kernel in Python, or for a dispatch mode.
class PassLock {
 public:
  explicit PassLock(PassState& pass) {
    if (PyGILState_Check()) no_gil_.emplace();
    lock_ = std::unique_lock(pass.mutex);
  }

 private:
  std::optional<py::gil_scoped_release> no_gil_;
  std::unique_lock<std::recursive_mutex> lock_;
};

struct ReplayRecord;

struct DroppedValue : c10::intrusive_ptr_target {
  const std::shared_ptr<PassState> pass;
  const bool is_offloaded;
  intrusive_ptr<ReplayRecord> record;
  Tensor tensor;
  Geometry geometry;
  size_t num_uses = 0;

  DroppedValue(intrusive_ptr<ReplayRecord> from, Geometry as);
  ~DroppedValue() override;
  void fill(Tensor replayed);
  void release_resources() override;
};

// A `HeldTensor` or a `DroppedUse`.
struct Source {
  intrusive_ptr<HeldTensor> held;
  intrusive_ptr<DroppedValue> value;
  std::optional<Geometry> geometry;

  explicit Source(intrusive_ptr<HeldTensor> tensor) : held(std::move(tensor)) {}
  Source(intrusive_ptr<DroppedValue> dropped, Geometry as) : value(std::move(dropped)), geometry(std::move(as)) {
    ++value->num_uses;
  }
};

// The position of a source among an op's arguments, and in the list if the argument is one.
struct Slot {
  size_t argument;
  std::optional<size_t> item;
};

// Returns a copy of ``argument`` with a list of its own.
inline IValue with_own_list(const IValue& argument) {
  return argument.isTensorList() ? IValue(argument.toTensorList().copy()) : IValue(argument.toList().copy());
}

// Puts ``tensor`` (None if undefined) into the argument, or into the argument's list.
inline void put(Tensor tensor, IValue& argument, const Slot& slot) {
  if (!slot.item) {
    argument = tensor.defined() ? IValue(std::move(tensor)) : IValue();
  } else if (argument.isTensorList()) {
    argument.toTensorList().set(*slot.item, std::move(tensor));
  } else {
    argument.toList().set(*slot.item, tensor.defined() ? IValue(std::move(tensor)) : IValue());
  }
}

struct ReplayRecord : c10::intrusive_ptr_target {
  enum class Kind { PURE, IN_PLACE, OVERWRITE, FETCH };

  size_t number;
  const std::shared_ptr<PassState> pass;
  Kind kind;
  c10::OperatorHandle op;
  std::vector<IValue> arguments;  // with None in place of the tensors
  std::vector<std::pair<Slot, Source>> sources;
  std::vector<std::pair<size_t, weak_intrusive_ptr<DroppedValue>>> outputs;
  std::optional<at::Generator> generator;
  std::optional<RandomState> generator_state;
  // For OVERWRITE; the geometry also for FETCH.
  std::optional<Geometry> geometry;
  std::optional<at::Device> device;
  // For FETCH.
  std::shared_ptr<OffloadedCopy> copy;

  ReplayRecord(size_t record_number, std::shared_ptr<PassState> of_pass, Kind of, c10::OperatorHandle call)
      : number(record_number), pass(std::move(of_pass)), kind(of), op(call) {}
  ~ReplayRecord() override;

  intrusive_ptr<DroppedValue> add_output(size_t position, const Tensor& output) {
    auto self = intrusive_ptr<ReplayRecord>::reclaim_copy(this);
    auto value = make_intrusive<DroppedValue>(std::move(self), Geometry(output));
    outputs.emplace_back(position, value);
    return value;
  }

  void run();

 private:
  Stack arguments_with_tensors() const;
  Stack call();
  Tensor fetched() const;
};

// Frees what records refer to iteratively: destructors of a chain of a thousand records would overflow the stack.
inline void release(std::vector<std::pair<Slot, Source>> sources) {
  thread_local std::vector<std::vector<std::pair<Slot, Source>>> waiting;
  thread_local bool is_releasing = false;
  waiting.push_back(std::move(sources));
  if (is_releasing) return;
  is_releasing = true;
  while (!waiting.empty()) {
    auto next = std::move(waiting.back());
    waiting.pop_back();
    next.clear();
  }
  is_releasing = false;
}

inline ReplayRecord::~ReplayRecord() { release(std::move(sources)); }

inline DroppedValue::DroppedValue(intrusive_ptr<ReplayRecord> from, Geometry as)
    : pass(from->pass),
      is_offloaded(from->kind == ReplayRecord::Kind::FETCH),
      record(std::move(from)),
      geometry(std::move(as)) {}
inline DroppedValue::~DroppedValue() = default;

inline void DroppedValue::release_resources() {
  record.reset();
  tensor.reset();
}

inline void DroppedValue::fill(Tensor replayed) {
  TORCH_CHECK(replayed.scalar_type() == geometry.dtype && replayed.sizes() == at::IntArrayRef(geometry.size),
              "memfit: an op gave a tensor of type ", geometry.dtype, " and size ", at::IntArrayRef(geometry.size),
              " in the forward pass, and one of type ", replayed.scalar_type(), " and size ", replayed.sizes(),
              " when it was replayed. Please report it with the model");
  if (replayed.strides() != at::IntArrayRef(geometry.stride) || replayed.storage_offset() != geometry.offset) {
    replayed = empty_with(geometry, replayed.device()).copy_(replayed);
  }
  tensor = std::move(replayed);
  record.reset();
}

}  // namespace memfit
