// Counts the allocations of torch's CPU allocator by the events that it reports to profilers.

#include "allocation_meter.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Logging.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace memfit {

// torch treats whatever is registered as the profiler as one, and asks it whether it records ops.
class AllocationEvents : public torch::profiler::impl::ProfilerStateBase,
                         public std::enable_shared_from_this<AllocationEvents> {
 public:
  AllocationEvents()
      : ProfilerStateBase(torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled)) {}

  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }
  bool memoryProfilingEnabled() const override { return true; }

  // The size in a report comes from a table that outlives meters and can be stale. The table here is not.
  void reportMemoryUsage(void* address, int64_t num_bytes, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) return;
    std::lock_guard lock(mutex_);
    // An address that is allocated again was freed unreported.
    forget(address);
    if (num_bytes <= 0) return;
    blocks_[address] = {num_bytes, is_holding_};
    live_bytes_ += num_bytes;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
  }

  void see_free(void* address) {
    std::lock_guard lock(mutex_);
    forget(address);
  }

  // Counts memory that was allocated before, and makes the allocator report when it is freed.
  void hold(void* address, size_t num_bytes) {
    is_holding_ = true;
    c10::profiledCPUMemoryReporter().New(address, num_bytes);
    is_holding_ = false;
  }

  void release_held() {
    std::vector<void*> held;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [address, block] : blocks_) {
        if (block.is_held) held.push_back(address);
      }
    }
    for (auto* address : held) c10::profiledCPUMemoryReporter().Delete(address);
  }

  int64_t live_bytes() {
    std::lock_guard lock(mutex_);
    return live_bytes_;
  }

  int64_t peak_bytes() {
    std::lock_guard lock(mutex_);
    return peak_bytes_;
  }

  void restart_peak() {
    std::lock_guard lock(mutex_);
    peak_bytes_ = live_bytes_;
  }

 private:
  struct Block {
    int64_t num_bytes;
    bool is_held;
  };

  void forget(void* address) {
    if (const auto block = blocks_.find(address); block != blocks_.end()) {
      live_bytes_ -= block->second.num_bytes;
      blocks_.erase(block);
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  bool is_holding_ = false;
};

// Stands in for torch's CPU allocator while there are meters. What it allocates in a thread with a meter is reported to
// that meter when it is freed, in whatever thread: torch reports frees to the meter of their own thread only, and
// threads of collectives, which have none, may be the last to hold a buffer. Storages refer to their allocator, so that
// this one is never destroyed.
class ReportingAllocator final : public c10::Allocator {
 public:
  static ReportingAllocator& instance() {
    static auto* allocator = new ReportingAllocator();
    return *allocator;
  }

  void begin() {
    std::lock_guard lock(mutex_);
    if (num_meters_++ > 0) return;
    auto* current = c10::GetAllocator(c10::kCPU);
    // Where somebody else's allocator may take addresses apart otherwise, only the frees that torch reports are known.
    if (current != c10::GetDefaultCPUAllocator()) return;
    c10::SetAllocator(c10::kCPU, this);
  }

  void end() {
    std::lock_guard lock(mutex_);
    if (--num_meters_ > 0) return;
    if (c10::GetAllocator(c10::kCPU) == this) c10::SetAllocator(c10::kCPU, c10::GetDefaultCPUAllocator());
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    auto data = torchs().allocate(num_bytes);
    auto* state = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
    auto* events = dynamic_cast<AllocationEvents*>(state);
    if (events == nullptr || !data.compare_exchange_deleter(torchs().raw_deleter(), &free_reported)) return data;
    std::lock_guard lock(mutex_);
    events_of_[data.get()] = events->weak_from_this();
    return data;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_reported; }

  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    torchs().copy_data(to, from, num_bytes);
  }

 private:
  static c10::Allocator& torchs() { return *c10::GetDefaultCPUAllocator(); }

  static void free_reported(void* address) {
    if (const auto events = instance().taken_events_of(address)) events->see_free(address);
    torchs().raw_deleter()(address);
  }

  std::shared_ptr<AllocationEvents> taken_events_of(void* address) {
    std::lock_guard lock(mutex_);
    const auto found = events_of_.find(address);
    if (found == events_of_.end()) return nullptr;
    auto events = found->second.lock();
    events_of_.erase(found);
    return events;
  }

  std::mutex mutex_;
  std::unordered_map<void*, std::weak_ptr<AllocationEvents>> events_of_;
  int num_meters_ = 0;
};

void AllocationMeter::start() {
  events_ = std::make_shared<AllocationEvents>();
  log_level_ = FLAGS_caffe2_log_level;
  // The allocator logs a warning when memory is freed whose allocation it did not report.
  FLAGS_caffe2_log_level = std::max(FLAGS_caffe2_log_level, 2);
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, events_);
  ReportingAllocator::instance().begin();
}

void AllocationMeter::hold(uintptr_t address, size_t num_bytes) {
  events_->hold(reinterpret_cast<void*>(address), num_bytes);
}

bool AllocationMeter::stop() {
  last_bytes_ = live_bytes();
  last_peak_bytes_ = peak_bytes();
  ReportingAllocator::instance().end();
  std::exchange(events_, nullptr)->release_held();
  FLAGS_caffe2_log_level = log_level_;
  try {
    c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

int64_t AllocationMeter::live_bytes() const { return events_ ? events_->live_bytes() : last_bytes_; }
int64_t AllocationMeter::peak_bytes() const { return events_ ? events_->peak_bytes() : last_peak_bytes_; }
void AllocationMeter::restart_peak() { events_->restart_peak(); }

}  // namespace memfit
