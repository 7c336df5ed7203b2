// Counts the allocations of torch's CPU allocator by the events that it reports to profilers.
//
// A library of its own, which builds in seconds: it needs few of torch's headers. `allocation_meter.py` calls it.

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
#include <vector>

namespace {

// torch treats whatever is registered as the profiler as one, and asks it whether it records ops.
class Meter : public torch::profiler::impl::ProfilerStateBase {
 public:
  Meter() : ProfilerStateBase(torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled)) {}

  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }
  bool memoryProfilingEnabled() const override { return true; }

  // The size in a report comes from a table that outlives meters and can be stale. The table here is not.
  void reportMemoryUsage(void* address, int64_t num_bytes, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) return;
    std::lock_guard lock(mutex_);
    // An address that is allocated again was freed unreported, in a thread without the meter.
    if (const auto block = blocks_.find(address); block != blocks_.end()) {
      live_bytes_ -= block->second.num_bytes;
      blocks_.erase(block);
    }
    if (num_bytes <= 0) return;
    blocks_[address] = {num_bytes, is_holding_};
    live_bytes_ += num_bytes;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
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

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  bool is_holding_ = false;
};

struct ActiveMeter {
  std::shared_ptr<Meter> meter;
  int log_level;
};

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void* memfit_meter_start() {
  auto* active = new ActiveMeter{std::make_shared<Meter>(), FLAGS_caffe2_log_level};
  // The allocator logs a warning when memory is freed whose allocation it did not report.
  FLAGS_caffe2_log_level = std::max(FLAGS_caffe2_log_level, 2);
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, active->meter);
  return active;
}

__attribute__((visibility("default"))) void memfit_meter_hold(void* active, void* address, size_t num_bytes) {
  static_cast<ActiveMeter*>(active)->meter->hold(address, num_bytes);
}

// Returns whether the meter was still the innermost one.
__attribute__((visibility("default"))) bool memfit_meter_stop(void* address) {
  std::unique_ptr<ActiveMeter> active(static_cast<ActiveMeter*>(address));
  active->meter->release_held();
  FLAGS_caffe2_log_level = active->log_level;
  try {
    c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

__attribute__((visibility("default"))) int64_t memfit_meter_live_bytes(void* active) {
  return static_cast<ActiveMeter*>(active)->meter->live_bytes();
}

__attribute__((visibility("default"))) int64_t memfit_meter_peak_bytes(void* active) {
  return static_cast<ActiveMeter*>(active)->meter->peak_bytes();
}

__attribute__((visibility("default"))) void memfit_meter_restart_peak(void* active) {
  static_cast<ActiveMeter*>(active)->meter->restart_peak();
}

}  // extern "C"
