// Typed kernels for common ops, which intercept a call at a tenth of the cost of the boxed fallback.
//
// The fallback receives boxed arguments: each in a variant, on a stack, with lists copied, and results alike. For an op
// that drops nothing in its module this is wasted. So common ops have a typed kernel each, which checks that first and
// redispatches the call unboxed. If something is dropped, the arguments are boxed once, to be kept, and the call is
// still redispatched unboxed. Only writes take the boxed path. Views, which the tape ignores, are not intercepted.
//
// An op that is missing here takes the fallback. An op here must not write to any argument but its first.

#include <ATen/Operators.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "typed_kernels.h"

namespace memfit {

using at::Tensor;

inline const Tensor* tensor_or_null(const Tensor& tensor) { return &tensor; }
template <typename Other>
const Tensor* tensor_or_null(const Other& /*unused*/) {
  return nullptr;
}
inline void add_outputs(const Tensor& result, Outputs& outputs) { outputs.push_back(&result); }
template <typename... Results>
void add_outputs(const std::tuple<Results...>& results, Outputs& outputs) {
  std::apply([&](const auto&... each) { (outputs.push_back(tensor_or_null(each)), ...); }, results);
}

// Whether an argument is, or has, a tensor of which ``is`` holds.
template <typename Is>
bool has_tensor(const Tensor& tensor, Is is) {
  return tensor.defined() && is(tensor);
}
template <typename Is>
bool has_tensor(const std::optional<Tensor>& tensor, Is is) {
  return tensor && has_tensor(*tensor, is);
}
template <typename Is>
bool has_tensor(const at::ITensorListRef& tensors, Is is) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const Tensor& tensor) { return has_tensor(tensor, is); });
}
template <typename Other, typename Is>
bool has_tensor(const Other& /*unused*/, Is /*unused*/) {
  return false;
}

inline constexpr auto is_meta = [](const Tensor& tensor) { return tensor.is_meta(); };
inline constexpr auto requires_grad = [](const Tensor& tensor) { return tensor.requires_grad(); };
// The same condition as in `is_plain_call`.
inline constexpr auto is_subclass = [](const Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python) || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
};

// The calls of ops of one signature that the tape records, or a handler in Python runs.
template <typename Signature>
struct RecordedCall;

template <typename Result, typename... Arguments>
struct RecordedCall<Result(Arguments...)> {
  using Run = Result (*)(c10::DispatchKeySet, Arguments...);

  [[gnu::noinline]] static Result boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                        Arguments... arguments) {
    auto stack = in_boxes(arguments...);
    dispatch_boxed_op(op, keys, &stack);
    if constexpr (std::is_reference_v<Result>) {
      return written(arguments...);
    } else {
      return c10::impl::PopResult<Result>::call(stack);
    }
  }

  [[gnu::noinline]] static Result record(const c10::OperatorHandle& op, const OpRule& rule, Run redispatch,
                                         c10::DispatchKeySet keys, Arguments... arguments) {
    if constexpr (std::is_reference_v<Result>) {
      return boxed(op, keys, std::forward<Arguments>(arguments)...);
    } else {
      std::optional<Result> result;
      run_plain_pure_op(op, rule, in_boxes(arguments...), [&](Outputs& outputs) {
        result.emplace(redispatch(below(keys), std::forward<Arguments>(arguments)...));
        add_outputs(*result, outputs);
      });
      return *std::move(result);
    }
  }

  static c10::DispatchKeySet below(c10::DispatchKeySet keys) {
    return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY);
  }

 private:
  [[gnu::noinline]] static torch::jit::Stack in_boxes(const std::remove_reference_t<Arguments>&... arguments) {
    torch::jit::Stack stack;
    stack.reserve(sizeof...(Arguments));
    torch::jit::push(stack, arguments...);
    return stack;
  }
  template <typename... Others>
  static Tensor& written(Tensor& first, const Others&... /*unused*/) {
    return first;
  }
};

template <typename Op, typename Signature = typename Op::schema>
struct UsualOp;

template <typename Op, typename Result, typename... Arguments>
struct UsualOp<Op, Result(Arguments...)> {
  using Recorded = RecordedCall<Result(Arguments...)>;

  static Result dispatch_op(c10::DispatchKeySet keys, Arguments... arguments) {
    // Ops that the op itself calls are not recorded.
    c10::impl::ExcludeDispatchKeyGuard unrecorded(KEY);
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    // Threads of autograd may include the key without a tape.
    if (recording_tape == nullptr && has_op_handler())
      return Recorded::boxed(op, keys, std::forward<Arguments>(arguments)...);
    if (recording_tape == nullptr || passes_by(rule_of_this(op), arguments...))
      return Op::redispatch(Recorded::below(keys), std::forward<Arguments>(arguments)...);
    return Recorded::record(op, rule_of_this(op), &Op::redispatch, keys, std::forward<Arguments>(arguments)...);
  }

 private:
  // In each thread anew: finding it may take the GIL, whose owner may wait in another thread's initialization.
  static const OpRule& rule_of_this(const c10::OperatorHandle& op) {
    thread_local const OpRule& rule = rule_of(op);
    return rule;
  }
  static bool passes_by(const OpRule& rule, const std::remove_reference_t<Arguments>&... arguments) {
    uint64_t requiring_grad = 0;
    ((requiring_grad = requiring_grad << 1U | static_cast<uint64_t>(has_tensor(arguments, requires_grad))), ...);
    return memfit::passes_by(rule, (has_tensor(arguments, is_meta) || ...),
                             !(has_tensor(arguments, is_subclass) || ...), written_of(arguments...), requiring_grad);
  }

  template <typename First, typename... Others>
  static const Tensor* written_of(const First& first, const Others&... /*unused*/) {
    if constexpr (std::is_same_v<Result, Tensor&>) return &first;
    return nullptr;
  }
};

// The kernel is given as a pointer, not as a template argument, so that torch's wrappers are compiled once per
// signature.
[[gnu::noinline]] void register_kernel(torch::Library& library, std::string name, const char* overload,
                                       torch::CppFunction kernel) {
  if (*overload != '\0') name.append(".").append(overload);
  library.impl(name.c_str(), std::move(kernel));
}

template <typename... Ops>
void register_usual(torch::Library& library) {
  (register_kernel(library, Ops::name, Ops::overload_name, torch::CppFunction(&UsualOp<Ops>::dispatch_op)), ...);
}

void register_usual_ops(torch::Library& library) {
  namespace ops = at::_ops;
  register_usual<ops::_grouped_mm, ops::_log_softmax, ops::_scaled_dot_product_cudnn_attention,
                 ops::_scaled_dot_product_efficient_attention, ops::_scaled_dot_product_flash_attention,
                 ops::_scaled_dot_product_flash_attention_for_cpu, ops::_softmax, ops::_to_copy, ops::add_Scalar,
                 ops::add_Tensor, ops::add__Tensor, ops::addmm, ops::bmm, ops::cat, ops::clamp_, ops::clone,
                 ops::constant_pad_nd, ops::convolution, ops::cos, ops::cumsum, ops::div_Scalar, ops::div_Tensor,
                 ops::div__Tensor, ops::embedding, ops::empty_like, ops::exp, ops::floor_divide, ops::gather,
                 ops::ge_Scalar, ops::gelu, ops::histc, ops::index_Tensor, ops::index_put_, ops::masked_fill_Scalar,
                 ops::masked_fill__Scalar, ops::max_pool2d_with_indices, ops::mean_dim, ops::mm, ops::mul_Scalar,
                 ops::mul_Tensor, ops::mul__Tensor, ops::native_group_norm, ops::native_layer_norm, ops::neg,
                 ops::pow_Tensor_Scalar, ops::relu, ops::relu_, ops::rsqrt, ops::rsub_Scalar, ops::sigmoid, ops::silu,
                 ops::sin, ops::sort, ops::sort_stable, ops::sub_Scalar, ops::sub_Tensor, ops::sum_dim_IntList,
                 ops::tanh, ops::topk, ops::upsample_nearest2d, ops::where_self>(library);
}

// Views that call only each other. Other views are intercepted and ignored.
constexpr const char* USUAL_VIEWS[] = {
    "_reshape_alias", "_unsafe_view", "alias",        "as_strided",
    "detach",         "diagonal",     "expand",       "permute",
    "select.int",     "slice.Tensor", "split.Tensor", "split_with_sizes",
    "squeeze",        "squeeze.dim",  "squeeze.dims", "t",
    "transpose.int",  "unbind.int",   "unfold",       "unsqueeze",
    "view",
};

void let_views_through(torch::Library& library) {
  for (const auto* view : USUAL_VIEWS) library.impl(view, torch::CppFunction::makeFallthrough());
}

}  // namespace memfit

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&memfit::dispatch_boxed_op>());
}
TORCH_LIBRARY_IMPL(aten, Fake, library) {
  memfit::register_usual_ops(library);
  memfit::let_views_through(library);
}
