// What the typed kernels of `usual_ops.cpp` need of the tape. They are compiled in a unit of their own, without the
// tape and without pybind11: that takes half of the time, and both units are compiled at the same time.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <vector>

namespace memfit {

// The key at which ops are intercepted: below autograd and autocast. torch reserves it for a mode that does not exist.
constexpr auto KEY = c10::DispatchKey::Fake;

class Tape;
struct OpRule;

// The tape that records the ops of this thread.
inline thread_local Tape* recording_tape = nullptr;

// The outputs of a call; null stands for an output that is not a tensor.
using Outputs = c10::SmallVector<const at::Tensor*, 4>;
// Calls an op without boxing its arguments, and adds its outputs.
using RunPlainOp = c10::function_ref<void(Outputs& outputs)>;

// Defined in `module.cpp`. The last two need a tape that records.
void dispatch_boxed_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
const OpRule& rule_of(const c10::OperatorHandle& op);
bool has_op_handler();
bool passes_by(const OpRule& rule, bool is_meta, bool is_plain, const at::Tensor* written, uint64_t requiring_grad);
void run_plain_pure_op(const c10::OperatorHandle& op, const OpRule& rule, std::vector<c10::IValue> arguments,
                       RunPlainOp run);

}  // namespace memfit
