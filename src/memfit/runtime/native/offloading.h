// Copies offloaded values to the host's memory and back. `offloading.py` explains the rules; each function implements
// the one of the same name there.
//
// Streams and events are c10's, for any kind of device; nothing depends on CUDA. Callers hold the lock of the pass.
// Destructors need no lock and run where the last reference is released: in a thread of autograd, without the GIL, or
// after the interpreter is finalized. They never throw and never call Python.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dispatch_guards.h"
#include "geometry.h"

namespace memfit {

// The stream on which a value was made, and the one for its copies. The CPU has none.
struct Streams {
  c10::Stream main;
  c10::Stream out;
  c10::Stream back;
};

inline c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Created once per device and kept.
inline std::pair<c10::Stream, c10::Stream> side_streams(at::Device device) {
  static auto& mutex = *new std::mutex();
  static auto& known = *new std::unordered_map<at::Device, std::pair<c10::Stream, c10::Stream>>();
  std::lock_guard lock(mutex);
  auto found = known.find(device);
  if (found == known.end()) {
    const c10::impl::VirtualGuardImpl streams(device.type());
    const auto out = streams.getStreamFromGlobalPool(device);
    found = known.emplace(device, std::make_pair(out, streams.getStreamFromGlobalPool(device))).first;
  }
  return found->second;
}

inline std::optional<Streams> streams_for(at::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  const auto [out, back] = side_streams(device);
  return Streams{current_stream(device), out, back};
}

// Whether the tensor can be offloaded: it has memory, and no graph is being captured.
inline bool can_leave(const Tensor& tensor) {
  if (tensor.key_set().has(c10::DispatchKey::Python)) return false;
  return tensor.is_cpu() || (tensor.is_cuda() && !is_being_captured());
}

inline size_t storage_bytes(const Tensor& tensor) {
  // The CUDA caching allocator hands out multiples of this many bytes.
  constexpr size_t granularity = 512;
  const auto num_bytes = tensor.storage().nbytes();
  return tensor.is_cuda() ? (num_bytes + granularity - 1) / granularity * granularity : num_bytes;
}

// Memory for values that are offloaded from the CPU itself. Like the host's memory of a GPU, plans do not count it.
inline Tensor buffer_apart(int64_t num_bytes) {
  auto* bytes = std::malloc(std::max<int64_t>(num_bytes, 1));
  TORCH_CHECK_WITH(OutOfMemoryError, bytes != nullptr, "could not allocate ", num_bytes, " bytes");
  return at::from_blob(bytes, {num_bytes}, [](void* address) { std::free(address); }, at::TensorOptions(at::kByte));
}

inline Tensor host_buffer(int64_t num_bytes, bool is_pinned) {
  try {
    if (!is_pinned) return buffer_apart(num_bytes);
    return at::empty({num_bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(true));
  } catch (c10::Error& error) {
    TORCH_RETHROW(
        error, "memfit was about to offload ", num_bytes,
        " bytes to the host's memory, which could not be allocated. A plan for a smaller host_budget takes less of it");
  }
}

// Starts a copy on ``side`` after all work launched on the current stream, and returns the event of its end. The pinned
// allocator records the copy, so that host buffers can be released at any time.
inline std::optional<c10::Event> copied_beside(Tensor target, const Tensor& source, std::optional<c10::Stream> side) {
  BelowAutogradAndAutocast below;
  UnseenByDispatchModes unseen;
  if (!side) {
    target.copy_(source);
    return std::nullopt;
  }
  // One event serves both directions: waiting for it waits for what was recorded last.
  c10::Event event(side->device_type());
  event.record(current_stream(side->device()));
  event.block(*side);
  {
    c10::StreamGuard on_side(*side);
    target.copy_(source, /*non_blocking=*/true);
  }
  event.record(*side);
  return event;
}

// Makes the computing streams wait for ``event``: the one on which the value was made, and the current one.
inline void wait_for(const std::optional<c10::Event>& event, const std::optional<Streams>& streams) {
  if (!event || !streams) return;
  event->block(streams->main);
  const auto current = current_stream(streams->main.device());
  if (current != streams->main) event->block(current);
}

// Makes the stream that owns the memory wait for the copy that may still use it, before the memory is freed.
inline void wait_before_freeing(const std::optional<c10::Event>& event,
                                const std::optional<Streams>& streams) noexcept {
  if (!event || !streams) return;
  try {
    event->block(streams->main);
  } catch (...) {
    // The device is lost or broken. The next op on it raises the error.
  }
}

// Thrown where no Python error can be raised yet: the copy may mix old and new content.
struct TornValue {
  std::string maker;
  int64_t torn_at;
  int64_t version;
};

// A storage that is being copied to the host. It must not be freed or written before the copy ends.
class Departure {
 public:
  const at::Device device;
  const size_t num_bytes;
  const std::optional<Streams> streams;

  Departure(Tensor tensor, int64_t version, std::string maker)
      : device(tensor.device()),
        num_bytes(storage_bytes(tensor)),
        streams(streams_for(device)),
        original_(std::move(tensor)),
        version_(version),
        maker_(std::move(maker)) {}
  Departure(const Departure&) = delete;
  Departure& operator=(const Departure&) = delete;
  ~Departure() {
    if (original_.defined()) wait_before_freeing(left_, streams);
  }

  Tensor host_copy() {
    const auto content = storage_as_bytes(original_);
    Tensor host;
    {
      BelowAutogradAndAutocast below;
      UnseenByDispatchModes unseen;
      host = host_buffer(content.numel(), /*is_pinned=*/streams.has_value());
    }
    left_ = copied_beside(host, content, streams ? std::optional(streams->out) : std::nullopt);
    return host;
  }

  void settle(int num_counted = 0) {
    wait_for(left_, streams);
    if (is_settled_) return;
    const auto version_now = version_of(original_);
    if (version_now > version_ + num_counted) torn_at_ = version_now;
    is_settled_ = true;
  }

  void release() {
    settle();
    original_.reset();
  }

  void refuse_if_torn() const {
    if (torn_at_) throw TornValue{maker_, *torn_at_, version_};
  }

 private:
  Tensor original_;
  const int64_t version_;
  const std::string maker_;
  std::optional<c10::Event> left_;
  bool is_settled_ = false;
  // The version at which an early write was found.
  std::optional<int64_t> torn_at_;
};

class OffloadedCopy;

// The offloaded values of one forward pass.
class Offloading : public std::enable_shared_from_this<Offloading> {
 public:
  std::shared_ptr<OffloadedCopy> send(Tensor tensor, int64_t version, std::string maker, size_t window_bytes);
  void end_forward();
  void fetch_ahead();
  void note_read(size_t number);

 private:
  void release_first();

  size_t window_bytes_ = 0;
  std::vector<std::weak_ptr<OffloadedCopy>> copies_;
  std::deque<std::shared_ptr<Departure>> leaving_;
  size_t bytes_leaving_ = 0;
  // Numbers of copies: those whose fetch has not started, in order, and those that are fetched but not yet read.
  std::vector<size_t> waiting_;
  std::vector<size_t> ahead_;
};

// Over all passes, for tests.
inline std::atomic<size_t> num_copies_made{0};
inline std::atomic<size_t> num_copies_alive{0};

// One value in the host's memory, or being fetched. The destructor frees its memory on both sides.
class OffloadedCopy {
 public:
  OffloadedCopy(std::shared_ptr<Offloading> offloading, size_t number, std::shared_ptr<Departure> departure)
      : offloading_(std::move(offloading)),
        number_(number),
        departure_(std::move(departure)),
        host_(departure_->host_copy()) {
    ++num_copies_made;
    ++num_copies_alive;
  }
  OffloadedCopy(const OffloadedCopy&) = delete;
  OffloadedCopy& operator=(const OffloadedCopy&) = delete;
  ~OffloadedCopy() {
    // It was being fetched, and will not be read.
    wait_before_freeing(arrived_, departure_->streams);
    --num_copies_alive;
  }

  size_t num_bytes() const { return departure_->num_bytes; }

  void before_write(int num_counted) { departure_->settle(num_counted); }

  void start() {
    departure_->settle();
    const auto& streams = departure_->streams;
    const c10::OptionalStreamGuard on_main(streams ? std::optional(streams->main) : std::nullopt);
    auto buffer = at::empty({host_.numel()}, at::TensorOptions().dtype(at::kByte).device(departure_->device));
    arrived_ = copied_beside(buffer, host_, streams ? std::optional(streams->back) : std::nullopt);
    buffer_ = std::move(buffer);
  }

  // Returns the storage's content as bytes on its device. Can be called once.
  Tensor fetch() {
    if (!buffer_.defined()) start();
    departure_->refuse_if_torn();
    wait_for(arrived_, departure_->streams);
    offloading_->note_read(number_);
    host_.reset();
    arrived_.reset();
    return std::move(buffer_);
  }

 private:
  const std::shared_ptr<Offloading> offloading_;
  const size_t number_;
  const std::shared_ptr<Departure> departure_;
  Tensor host_;
  Tensor buffer_;
  std::optional<c10::Event> arrived_;
};

inline std::shared_ptr<OffloadedCopy> Offloading::send(Tensor tensor, int64_t version, std::string maker,
                                                       size_t window_bytes) {
  if (!can_leave(tensor)) return nullptr;
  window_bytes_ = window_bytes;
  auto departure = std::make_shared<Departure>(std::move(tensor), version, std::move(maker));
  auto copy = std::make_shared<OffloadedCopy>(shared_from_this(), copies_.size(), departure);
  waiting_.push_back(copies_.size());
  copies_.push_back(copy);
  bytes_leaving_ += departure->num_bytes;
  leaving_.push_back(std::move(departure));
  while (bytes_leaving_ > window_bytes) release_first();
  return copy;
}

inline void Offloading::end_forward() {
  while (!leaving_.empty()) release_first();
}

inline void Offloading::release_first() {
  const auto departure = std::move(leaving_.front());
  leaving_.pop_front();
  bytes_leaving_ -= departure->num_bytes;
  departure->release();
}

inline void Offloading::fetch_ahead() {
  size_t bytes_ahead = 0;
  for (const auto number : ahead_) {
    if (const auto copy = copies_[number].lock()) bytes_ahead += copy->num_bytes();
  }
  while (!waiting_.empty()) {
    const auto number = waiting_.back();
    // Values that are no longer referenced are not fetched.
    if (const auto copy = copies_[number].lock()) {
      bytes_ahead += copy->num_bytes();
      if (bytes_ahead > window_bytes_) return;
      copy->start();
      ahead_.push_back(number);
    }
    waiting_.pop_back();
  }
}

inline void Offloading::note_read(size_t number) {
  for (auto* numbers : {&ahead_, &waiting_}) {
    const auto found = std::find(numbers->rbegin(), numbers->rend(), number);
    if (found == numbers->rend()) continue;
    numbers->erase(std::next(found).base());
    return;
  }
}

}  // namespace memfit
