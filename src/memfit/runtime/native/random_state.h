// The state of a random number generator, kept by a record until its op is replayed.
//
// The state of a CPU generator is copied into plain memory: a tensor would take memory that plans count.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <memory>
#include <mutex>
#include <optional>

namespace memfit {

class RandomState {
 public:
  explicit RandomState(at::Generator generator) {
    std::lock_guard lock(generator.mutex());
    if (auto* cpu = cpu_generator(generator)) {
      cpu_ = std::make_shared<const CpuState>(
          CpuState{cpu->engine(), cpu->next_float_normal_sample(), cpu->next_double_normal_sample()});
    } else {
      tensor_ = generator.get_state();
    }
  }

  void restore(at::Generator& generator) const {
    std::lock_guard lock(generator.mutex());
    if (!cpu_) {
      generator.set_state(tensor_);
      return;
    }
    auto* cpu = cpu_generator(generator);
    cpu->set_engine(cpu_->engine);
    cpu->set_next_float_normal_sample(cpu_->next_float);
    cpu->set_next_double_normal_sample(cpu_->next_double);
  }

 private:
  struct CpuState {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
  };

  static at::CPUGeneratorImpl* cpu_generator(const at::Generator& generator) {
    return dynamic_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  }

  std::shared_ptr<const CpuState> cpu_;
  at::Tensor tensor_;
};

}  // namespace memfit
