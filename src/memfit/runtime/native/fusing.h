// Runs pointwise ops that are replayed one after the other as one kernel.
//
// An op that runs alone reads all of its arguments from device memory and writes its whole result back. A fused kernel
// reads only what comes from outside it, and writes only the results that are still referenced. `fused_kernels.py`
// generates the kernels, and only from ops whose results are bit-identical to torch's. All else is replayed op by op:
// other kinds of ops, sizes that are not a multiple of `WIDTH`, layouts that vector loads cannot read.

#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "values.h"

namespace memfit {

constexpr size_t MOST_INPUTS = 16;
constexpr size_t MOST_DIMENSIONS = 4;

// The signature of `cuLaunchKernel`.
using LaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                             void** extra);

// The kernels of one device type. Set by `fuse_on`, never while anything is replayed; never freed.
struct Fusing {
  at::DeviceType device_type;
  LaunchKernel launch;
  py::object kernel_of;  // (device index, program) -> address of a function; 0: there is none; None: not available now
  std::mutex mutex;
  std::unordered_map<std::string, void*> kernels;  // by device and program
  std::atomic<size_t> num_launched{0};
};
inline Fusing* fusing = nullptr;

Tensor read(const Source& source);

// The dimensions of a result in memory order, innermost first: their sizes and their numbers.
struct OrderedDimension {
  int64_t size;
  size_t place;
};
using Order = c10::SmallVector<OrderedDimension, 6>;

// Empty if the result is not dense in memory.
inline std::optional<Order> dense_order(const Geometry& result) {
  Order order;
  for (size_t place = 0; place < result.size.size(); ++place) order.push_back({result.size[place], place});
  std::stable_sort(order.begin(), order.end(), [&](const auto& one, const auto& other) {
    return result.stride[one.place] < result.stride[other.place];
  });
  int64_t expected = 1;
  for (const auto& [size, place] : order) {
    if (size != 1 && result.stride[place] != expected) return std::nullopt;
    expected *= size;
  }
  return order;
}

// The strides of an argument in that order, with as few dimensions as possible.
struct Dimension {
  int64_t size;
  int64_t stride;
};
using MergedStrides = c10::SmallVector<Dimension, 6>;

// Empty if the argument cannot be broadcast to the sizes of the result.
inline std::optional<MergedStrides> merged_strides(const Order& order, at::IntArrayRef size, at::IntArrayRef stride) {
  if (size.size() > order.size()) return std::nullopt;
  const auto missing = order.size() - size.size();
  MergedStrides found;
  for (const auto& [result_size, place] : order) {
    if (result_size == 1) continue;
    const bool is_repeated = place < missing || size[place - missing] == 1;
    if (!is_repeated && size[place - missing] != result_size) return std::nullopt;
    const auto step = is_repeated ? 0 : stride[place - missing];
    if (!found.empty() && found.back().stride * found.back().size == step) {
      found.back().size *= result_size;
    } else {
      found.push_back({result_size, step});
    }
  }
  return found;
}

inline bool is_flat(const MergedStrides& strides) {
  return strides.empty() || (strides.size() == 1 && strides[0].stride == 1);
}

inline const char* name_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "f32";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "f16";
    default:
      return nullptr;
  }
}

// Whether vector loads can read the tensor: each vector is one repeated element, or contiguous.
inline bool can_be_read(const Tensor& tensor, const MergedStrides& strides) {
  if (strides.size() > MOST_DIMENSIONS) return false;
  if (strides.empty() || strides[0].size % WIDTH != 0 || strides[0].stride > 1 || strides[0].stride < 0) return false;
  const bool is_contiguous = strides[0].stride == 1;
  const auto vector_bytes = WIDTH * tensor.element_size();
  if (is_contiguous && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % vector_bytes != 0) return false;
  int64_t reach = 0;
  for (size_t i = 0; i < strides.size(); ++i) {
    if (strides[i].stride < 0 || (i > 0 && is_contiguous && strides[i].stride % WIDTH != 0)) return false;
    reach += (strides[i].size - 1) * strides[i].stride;
  }
  return reach <= std::numeric_limits<int32_t>::max();
}

class FusedReplay {
 public:
  // Takes records from the end of ``pending``, as many as one kernel can run, and runs them. Returns whether it did.
  static bool run(std::vector<intrusive_ptr<ReplayRecord>>& pending) {
    if (fusing == nullptr || op_rules.of(pending.back()->op).pointwise.empty()) return false;
    // Dispatch modes and profilers must see each op.
    if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python)) return false;
    FusedReplay fused;
    for (auto next = pending.rbegin(); next != pending.rend() && fused.add(*next); ++next) {
    }
    if (!fused.is_worth_it()) return false;
    fused.find_wanted();
    if (!fused.fits_where_ops_would()) return false;
    auto* kernel = fused.kernel();
    if (kernel == nullptr) return false;
    fused.launch(kernel);
    // Results that are no longer referenced are freed with their records.
    pending.resize(pending.size() - fused.ops_.size());
    return true;
  }

 private:
  struct Input {
    const Source* source;
    Tensor tensor;
    MergedStrides strides;
  };
  struct Operand {
    bool is_input;
    size_t number;  // of the input, or of the op
    bool operator==(const Operand&) const = default;
  };
  struct Op {
    ReplayRecord* record;
    intrusive_ptr<DroppedValue> value;
    std::string name;
    c10::SmallVector<Operand, 2> operands;
    bool is_wanted = false;
  };

  bool add(const intrusive_ptr<ReplayRecord>& record);
  std::optional<Operand> operand(const Source& source, const Order& order, const Geometry& result, bool is_cast);
  bool is_worth_it() const;
  void find_wanted();
  bool fits_where_ops_would() const;
  std::string program() const;
  void* kernel() const;
  void launch(void* kernel);
  bool goes_with_the_last_op(const Input& input) const;
  size_t num_uses(const Source& source) const;

  static int64_t num_bytes(const DroppedValue& value) {
    return c10::multiply_integers(value.geometry.size) * c10::elementSize(value.geometry.dtype);
  }

  std::vector<Op> ops_;
  std::vector<Input> inputs_;
  int64_t num_elements_ = 0;
  std::optional<at::Device> device_;
};

// Whether the arguments that are not tensors have values that kernels support. Appends those that matter to ``name``.
inline bool are_usual(const ReplayRecord& record, const std::vector<ArgumentRule>& rules, at::Device device,
                      std::string& name) {
  for (size_t i = 0; i < rules.size(); ++i) {
    const auto& argument = record.arguments[i];
    switch (rules[i]) {
      case ArgumentRule::TENSOR:
      case ArgumentRule::ANY:
        break;
      case ArgumentRule::ONE:
        if (!argument.isScalar() || !argument.toScalar().equal(1)) return false;
        break;
      case ArgumentRule::OWN_DEVICE:
        if (!argument.isNone() && argument.toDevice() != device) return false;
        break;
      case ArgumentRule::TEXT:
        name += "." + argument.toStringRef();
        break;
    }
  }
  return true;
}

inline bool FusedReplay::add(const intrusive_ptr<ReplayRecord>& record) {
  const auto& rule = op_rules.of(record->op);
  if (rule.pointwise.empty() || record->kind != ReplayRecord::Kind::PURE || record->outputs.size() != 1) return false;
  auto value = record->outputs[0].second.lock();
  if (!value || value->tensor.defined()) return false;
  const auto& result = value->geometry;
  const auto order = dense_order(result);
  const auto num_elements = c10::multiply_integers(result.size);
  if (!order || result.offset != 0 || result.is_conj || result.is_neg || name_of(result.dtype) == nullptr) return false;
  if (!rule.is_exact && result.dtype == at::kFloat) return false;
  if (num_elements == 0 || num_elements % WIDTH != 0 || num_elements > std::numeric_limits<int32_t>::max())
    return false;
  if (!ops_.empty() && num_elements != num_elements_) return false;
  const auto num_tensors = std::count(rule.pointwise.begin(), rule.pointwise.end(), ArgumentRule::TENSOR);
  // A number that was wrapped in a tensor is not an input.
  if (record->sources.size() != static_cast<size_t>(num_tensors)) return false;

  const auto num_inputs = inputs_.size();
  const auto device = device_;
  Op op{record.get(), std::move(value), rule.name, {}};
  const bool is_cast = rule.casts;
  const bool fits = std::all_of(record->sources.begin(), record->sources.end(), [&](const auto& entry) {
    const auto& [slot, source] = entry;
    if (slot.item || rule.pointwise[slot.argument] != ArgumentRule::TENSOR) return false;
    auto found = operand(source, *order, op.value->geometry, is_cast);
    if (found) op.operands.push_back(*found);
    return found.has_value();
  });
  if (!fits || !are_usual(*record, rule.pointwise, *device_, op.name)) {
    inputs_.resize(num_inputs, Input{nullptr, Tensor(), {}});
    device_ = device;
    return false;
  }
  num_elements_ = num_elements;
  ops_.push_back(std::move(op));
  return true;
}

inline std::optional<FusedReplay::Operand> FusedReplay::operand(const Source& source, const Order& order,
                                                                const Geometry& result, bool is_cast) {
  const auto is_of_usual_type = [&](at::ScalarType type) {
    return name_of(type) != nullptr && (is_cast || type == result.dtype || result.dtype == at::kFloat);
  };
  const auto made = std::find_if(ops_.begin(), ops_.end(), [&](const Op& op) { return op.value == source.value; });
  if (source.value && made != ops_.end()) {
    const auto& use = *source.geometry;
    const auto& whole = made->value->geometry;
    const auto strides = merged_strides(order, use.size, use.stride);
    const bool is_as_made = strides && is_flat(*strides) && use.dtype == whole.dtype && use.offset == whole.offset &&
                            !use.is_conj && !use.is_neg && is_of_usual_type(use.dtype);
    if (!is_as_made) return std::nullopt;
    return Operand{false, static_cast<size_t>(made - ops_.begin())};
  }
  // An earlier record has replayed it, or it was never dropped.
  if (source.value && !source.value->tensor.defined()) return std::nullopt;
  auto tensor = read(source);
  if (tensor.device().type() != fusing->device_type || (device_ && tensor.device() != *device_)) return std::nullopt;
  // Zero-dimensional tensors take the type of the other arguments.
  if (tensor.dim() == 0 || tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_conj() ||
      tensor.is_neg() || tensor._is_zerotensor() || !is_of_usual_type(tensor.scalar_type()) ||
      tensor.key_set().has(c10::DispatchKey::Python)) {
    return std::nullopt;
  }
  auto strides = merged_strides(order, tensor.sizes(), tensor.strides());
  if (!strides || !can_be_read(tensor, *strides)) return std::nullopt;
  device_ = tensor.device();
  for (size_t number = 0; number < inputs_.size(); ++number) {
    const auto& known = inputs_[number];
    if (known.tensor.const_data_ptr() == tensor.const_data_ptr() &&
        known.tensor.scalar_type() == tensor.scalar_type() &&
        std::equal(known.strides.begin(), known.strides.end(), strides->begin(), strides->end(),
                   [](auto& one, auto& other) { return one.size == other.size && one.stride == other.stride; })) {
      return Operand{true, number};
    }
  }
  if (inputs_.size() == MOST_INPUTS) return std::nullopt;
  inputs_.push_back({&source, std::move(tensor), std::move(*strides)});
  return Operand{true, inputs_.size() - 1};
}

// For a single op, torch's kernel is as fast, unless its arguments differ in layout or type.
inline bool FusedReplay::is_worth_it() const {
  if (ops_.size() != 1) return !ops_.empty();
  const auto type = ops_[0].value->geometry.dtype;
  return std::any_of(inputs_.begin(), inputs_.end(),
                     [&](const Input& input) { return !is_flat(input.strides) || input.tensor.scalar_type() != type; });
}

inline void FusedReplay::find_wanted() {
  for (auto& op : ops_) {
    size_t num_here = 1;  // the reference in `ops_`
    for (const auto& user : ops_) {
      for (const auto& [slot, source] : user.record->sources) num_here += source.value == op.value ? 1 : 0;
    }
    op.is_wanted = op.value.use_count() > num_here;
  }
}

inline size_t FusedReplay::num_uses(const Source& source) const {
  size_t num_uses = 0;
  for (const auto& op : ops_) {
    for (const auto& [slot, other] : op.record->sources) {
      num_uses += source.value ? other.value == source.value : other.held == source.held;
    }
  }
  return num_uses;
}

// Whether only these records hold the input's storage.
inline bool FusedReplay::goes_with_the_last_op(const Input& input) const {
  const auto& source = *input.source;
  const auto num_here = num_uses(source);
  if (source.value) return source.value.use_count() <= num_here;
  return source.held.use_count() <= num_here && input.tensor.storage().use_count() == 1;
}

// A fused kernel makes all results at once, while all of its inputs are live; op by op, some inputs would be freed
// before the last op runs. Plans assume the ops run one by one, so a kernel may not take more memory than that.
inline bool FusedReplay::fits_where_ops_would() const {
  std::vector<int64_t> freed_after(ops_.size(), 0);
  const auto free_after_last_use = [&](const Operand& operand, int64_t num_bytes) {
    for (size_t user = ops_.size(); user-- > 0;) {
      const auto& operands = ops_[user].operands;
      if (std::find(operands.begin(), operands.end(), operand) == operands.end()) continue;
      freed_after[user] += num_bytes;
      return;
    }
  };
  int64_t made_at_once = 0;
  for (size_t number = 0; number < ops_.size(); ++number) {
    const auto& op = ops_[number];
    if (op.is_wanted) {
      made_at_once += num_bytes(*op.value);
    } else {
      free_after_last_use({false, number}, num_bytes(*op.value));
    }
  }
  for (size_t number = 0; number < inputs_.size(); ++number) {
    const auto& input = inputs_[number];
    if (goes_with_the_last_op(input)) {
      free_after_last_use({true, number}, static_cast<int64_t>(input.tensor.storage().nbytes()));
    }
  }
  int64_t live = 0;
  int64_t most = 0;
  for (size_t number = 0; number < ops_.size(); ++number) {
    live += num_bytes(*ops_[number].value);
    most = std::max(most, live);
    live -= freed_after[number];
  }
  return made_at_once <= most;
}

// The program of a kernel as text, all that it depends on: its inputs, then its ops in order.
inline std::string FusedReplay::program() const {
  std::string text;
  for (const auto& input : inputs_) {
    text += name_of(input.tensor.scalar_type());
    text += is_flat(input.strides) ? " flat" : input.strides[0].stride == 1 ? " row " : " one ";
    if (!is_flat(input.strides)) text += std::to_string(input.strides.size());
    text += ";";
  }
  for (const auto& op : ops_) {
    text += op.name + " " + name_of(op.value->geometry.dtype) + (op.is_wanted ? " kept" : " passed");
    for (const auto& operand : op.operands) text += (operand.is_input ? " i" : " v") + std::to_string(operand.number);
    text += ";";
  }
  return text;
}

inline void* FusedReplay::kernel() const {
  const auto text = program();
  const auto key = std::to_string(device_->index()) + " " + text;
  {
    std::lock_guard lock(fusing->mutex);
    const auto known = fusing->kernels.find(key);
    if (known != fusing->kernels.end()) return known->second;
  }
  void* function = nullptr;
  {
    py::gil_scoped_acquire gil;
    const auto described = fusing->kernel_of(static_cast<int>(device_->index()), text);
    if (described.is_none()) return nullptr;
    function = reinterpret_cast<void*>(described.cast<uintptr_t>());
  }
  std::lock_guard lock(fusing->mutex);
  return fusing->kernels.emplace(key, function).first->second;
}

// Division by ``divisor`` as a multiplication and a shift, for numbers below 2^31: multiply, add the number to the
// upper half of the product, shift. Integer division is slow on devices.
inline std::pair<uint32_t, uint32_t> magic_of(uint32_t divisor) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < divisor) ++shift;
  const auto magic = ((uint64_t{1} << 32U) * ((uint64_t{1} << shift) - divisor)) / divisor + 1;
  return {static_cast<uint32_t>(magic), shift};
}

inline void* launching_stream(at::Device device) {
  if (device.is_cpu()) return nullptr;
  const c10::impl::VirtualGuardImpl of_type(device.type());
  return of_type.getStreamNativeHandle(of_type.getStream(device));
}

inline void FusedReplay::launch(void* kernel) {
  std::vector<Tensor> made;
  c10::SmallVector<uint64_t, 32> values;
  for (const auto& input : inputs_) values.push_back(reinterpret_cast<uintptr_t>(input.tensor.const_data_ptr()));
  for (const auto& op : ops_) {
    if (!op.is_wanted) continue;
    made.push_back(empty_with(op.value->geometry, *device_));
    values.push_back(reinterpret_cast<uintptr_t>(made.back().data_ptr()));
  }
  const auto num_vectors = num_elements_ / WIDTH;
  // 32-bit integers from here on. The machines are little-endian, so these are the first four bytes.
  values.push_back(static_cast<uint32_t>(num_vectors));
  for (const auto& input : inputs_) {
    if (is_flat(input.strides)) continue;
    for (size_t i = 0; i + 1 < input.strides.size(); ++i) {
      const auto size = static_cast<uint32_t>(input.strides[i].size);
      const auto [magic, shift] = magic_of(size);
      for (auto value : {size, magic, shift, static_cast<uint32_t>(input.strides[i + 1].stride)})
        values.push_back(value);
    }
  }
  c10::SmallVector<void*, 32> parameters;
  for (auto& value : values) parameters.push_back(&value);
  const c10::DeviceGuard on_its_device(*device_);
  const auto num_blocks = static_cast<unsigned>((num_vectors + VECTORS_OF_BLOCK - 1) / VECTORS_OF_BLOCK);
  const auto error = fusing->launch(kernel, num_blocks, 1, 1, THREADS, 1, 1, 0, launching_stream(*device_),
                                    parameters.data(), nullptr);
  TORCH_CHECK(error == 0, "memfit: a kernel that replays ", ops_.size(), " ops could not be launched (CUDA error ",
              error, "). MEMFIT_FUSE=0 replays op by op");
  ++fusing->num_launched;
  size_t position = 0;
  for (const auto& op : ops_) {
    if (op.is_wanted) op.value->fill(std::move(made[position++]));
  }
}

}  // namespace memfit
