// How the engine treats each op. Read from `op_rules.py`, once per op.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "shared.h"
#include "torch_names.h"

namespace memfit {

struct OpRule {
  explicit OpRule(c10::OperatorName of) : operator_name(std::move(of)) {}

  c10::OperatorName operator_name;
  std::string name;
  size_t number = 0;  // of the name: overloads share it
  Treatment treatment = Treatment::OPAQUE;
  std::vector<size_t> written;
  bool draws_random = false;
  bool is_deterministic_on_cuda = false;
  std::optional<size_t> dropout_argument;
  std::optional<std::array<size_t, 3>> batch_norm_arguments;
  std::optional<size_t> generator_argument;
  std::vector<ArgumentRule> pointwise;  // of each argument; empty for other ops
  bool casts = false;                   // accepts an argument of any type
  bool is_exact = false;                // bit-identical in all types, not only in 16-bit ones
};

class OpRules {
 public:
  const OpRule& of(const c10::OperatorHandle& op) {
    thread_local std::unordered_map<const c10::FunctionSchema*, const OpRule*> seen;
    auto& rule = seen[&op.schema()];
    // An op may have been deregistered and another one registered under its name.
    if (rule == nullptr || !(rule->operator_name == op.operator_name())) rule = &read(op);
    return *rule;
  }

  size_t number_of(const std::string& name) {
    std::lock_guard lock(mutex_);
    return numbers_.emplace(name, numbers_.size()).first->second;
  }

 private:
  const OpRule& read(const c10::OperatorHandle& op) {
    const auto& operator_name = op.operator_name();
    {
      std::lock_guard lock(mutex_);
      auto known = rules_.find(operator_name);
      if (known != rules_.end()) return *known->second;
    }
    auto rule = std::make_unique<OpRule>(operator_name);
    {
      py::gil_scoped_acquire gil;
      auto described = python->rule_of(operator_name.name, operator_name.overload_name).cast<py::tuple>();
      rule->name = described[0].cast<std::string>();
      rule->treatment = static_cast<Treatment>(described[1].cast<int>());
      rule->written = described[2].cast<std::vector<size_t>>();
      rule->draws_random = described[3].cast<bool>();
      rule->is_deterministic_on_cuda = described[4].cast<bool>();
      rule->dropout_argument = described[5].cast<std::optional<size_t>>();
      rule->batch_norm_arguments = described[6].cast<std::optional<std::array<size_t, 3>>>();
      for (const auto& argument : described[7])
        rule->pointwise.push_back(static_cast<ArgumentRule>(argument.cast<int>()));
      rule->casts = described[8].cast<bool>();
      rule->is_exact = described[9].cast<bool>();
    }
    rule->number = number_of(rule->name);
    const auto& arguments = op.schema().arguments();
    for (size_t position = 0; position < arguments.size(); ++position) {
      if (arguments[position].name() == "generator") rule->generator_argument = position;
    }
    std::lock_guard lock(mutex_);
    return *rules_.emplace(operator_name, std::move(rule)).first->second;
  }

  std::mutex mutex_;
  std::unordered_map<c10::OperatorName, std::unique_ptr<OpRule>> rules_;
  std::unordered_map<std::string, size_t> numbers_;
};
inline OpRules& op_rules = *new OpRules();

}  // namespace memfit
