// Counts the bytes that torch's CPU allocator allocates in a thread and in its autograd, as `allocation_meter.py` says.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace memfit {

class AllocationEvents;

class AllocationMeter {
 public:
  void start();
  // Counts memory that was allocated before, until it is freed.
  void hold(uintptr_t address, size_t num_bytes);
  // Returns whether the meter was still the innermost one. The numbers stay those at the end.
  bool stop();
  int64_t live_bytes() const;
  int64_t peak_bytes() const;
  void restart_peak();

 private:
  std::shared_ptr<AllocationEvents> events_;
  int64_t last_bytes_ = 0;
  int64_t last_peak_bytes_ = 0;
  int log_level_ = 0;
};

}  // namespace memfit
