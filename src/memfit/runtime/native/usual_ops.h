// Typed kernels for common ops, which intercept a call at a tenth of the cost of the boxed fallback.
//
// The fallback receives boxed arguments: each in a variant, on a stack, with lists copied, and results alike. For an op
// that drops nothing in its module this is wasted. So common ops have a typed kernel each, which checks that first and
// redispatches the call unboxed. If something is dropped, the arguments are boxed once, to be kept, and the call is
// still redispatched unboxed. Only writes take the boxed path. Views, which the tape ignores, are not intercepted.
//
// An op that is missing here takes the fallback. An op here must not write to any argument but its first.

#pragma once

#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clamp_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/constant_pad_nd_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/cumsum_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/empty_like_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/floor_divide_ops.h>
#include <ATen/ops/gather_ops.h>
#include <ATen/ops/ge_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/histc_ops.h>
#include <ATen/ops/index_ops.h>
#include <ATen/ops/index_put_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/max_pool2d_with_indices_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_group_norm_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/rsub_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/sort_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/topk_ops.h>
#include <ATen/ops/upsample_nearest2d_ops.h>
#include <ATen/ops/where_ops.h>
#if __has_include(<ATen/ops/_grouped_mm_ops.h>)
#include <ATen/ops/_grouped_mm_ops.h>
#endif

#include "tape.h"

namespace memfit {

template <typename Op, typename Signature = typename Op::schema>
struct UsualOp;

template <typename Op, typename Result, typename... Arguments>
struct UsualOp<Op, Result(Arguments...)> {
  static Result dispatch_op(c10::DispatchKeySet keys, Arguments... arguments) {
    // Ops that the op itself calls are not recorded.
    c10::impl::ExcludeDispatchKeyGuard unheard(KEY);
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    const auto run = [&]() -> Result {
      const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY);
      return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    };
    static const auto boxed = c10::BoxedKernel::makeFromFunction<&memfit::dispatch_op>();
    using Boxing = c10::impl::BoxedKernelWrapper<Result(Arguments...)>;
    if (recording_tape == nullptr && op_handler.load(std::memory_order_relaxed) != nullptr)
      return Boxing::call(boxed, op, keys, std::forward<Arguments>(arguments)...);
    if (passes_by(op, arguments...)) return run();
    if constexpr (std::is_reference_v<Result>) {
      return Boxing::call(boxed, op, keys, std::forward<Arguments>(arguments)...);
    } else {
      auto kept = c10::impl::boxArgs<Arguments...>(static_cast<Arguments>(arguments)...);
      return recording_tape->run_plain_pure_op(op, op_rules.of(op), std::move(kept), run);
    }
  }

 private:
  // Threads of autograd may include the key without a tape.
  static bool passes_by(const c10::OperatorHandle& op, const std::remove_reference_t<Arguments>&... arguments) {
    if (recording_tape == nullptr) return true;
    thread_local const OpRule& rule = op_rules.of(op);
    return recording_tape->passes_by(rule, (is_meta(arguments) || ...), !(is_subclass(arguments) || ...),
                                     written_of(arguments...), requiring_grad(arguments...));
  }

  static bool is_meta(const Tensor& tensor) { return tensor.defined() && tensor.is_meta(); }
  static bool is_meta(const at::ITensorListRef& tensors) { return tensors.size() > 0 && is_meta(*tensors.begin()); }
  template <typename Other>
  static bool is_meta(const Other& /*unused*/) {
    return false;
  }

  // The same condition as in `is_plain_call`.
  static bool is_subclass(const Tensor& tensor) {
    return tensor.defined() && (tensor.key_set().has(c10::DispatchKey::Python) ||
                                tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides());
  }
  static bool is_subclass(const std::optional<Tensor>& tensor) { return tensor && is_subclass(*tensor); }
  static bool is_subclass(const at::ITensorListRef& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) { return is_subclass(tensor); });
  }
  template <typename Other>
  static bool is_subclass(const Other& /*unused*/) {
    return false;
  }

  static uint64_t requiring_grad(const std::remove_reference_t<Arguments>&... arguments) {
    uint64_t bits = 0;
    ((bits = bits << 1U | static_cast<uint64_t>(requires_grad(arguments))), ...);
    return bits;
  }
  static bool requires_grad(const Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }
  static bool requires_grad(const std::optional<Tensor>& tensor) { return tensor && requires_grad(*tensor); }
  static bool requires_grad(const at::ITensorListRef& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) { return requires_grad(tensor); });
  }
  template <typename Other>
  static bool requires_grad(const Other& /*unused*/) {
    return false;
  }

  template <typename First, typename... Others>
  static const Tensor* written_of(const First& first, const Others&... /*unused*/) {
    if constexpr (std::is_same_v<Result, Tensor&>) return &first;
    return nullptr;
  }
};

template <typename... Ops>
void register_usual(torch::Library& library) {
  const auto name_of = [](std::string name, const std::string& overload) {
    return overload.empty() ? name : name + "." + overload;
  };
  (library.impl(name_of(Ops::name, Ops::overload_name).c_str(), TORCH_FN(UsualOp<Ops>::dispatch_op)), ...);
}

inline void register_usual_ops(torch::Library& library) {
  namespace ops = at::_ops;
  register_usual<
      ops::_log_softmax, ops::_scaled_dot_product_cudnn_attention, ops::_scaled_dot_product_efficient_attention,
      ops::_scaled_dot_product_flash_attention, ops::_scaled_dot_product_flash_attention_for_cpu, ops::_softmax,
      ops::_to_copy, ops::add_Scalar, ops::add_Tensor, ops::add__Tensor, ops::addmm, ops::bmm, ops::cat, ops::clamp_,
      ops::clone, ops::constant_pad_nd, ops::convolution, ops::cos, ops::cumsum, ops::div_Scalar, ops::div_Tensor,
      ops::div__Tensor, ops::embedding, ops::empty_like, ops::exp, ops::floor_divide, ops::gather, ops::ge_Scalar,
      ops::gelu, ops::histc, ops::index_Tensor, ops::index_put_, ops::masked_fill_Scalar, ops::masked_fill__Scalar,
      ops::max_pool2d_with_indices, ops::mean_dim, ops::mm, ops::mul_Scalar, ops::mul_Tensor, ops::mul__Tensor,
      ops::native_group_norm, ops::native_layer_norm, ops::neg, ops::pow_Tensor_Scalar, ops::relu, ops::relu_,
      ops::rsqrt, ops::rsub_Scalar, ops::sigmoid, ops::silu, ops::sin, ops::sort, ops::sort_stable, ops::sub_Scalar,
      ops::sub_Tensor, ops::sum_dim_IntList, ops::tanh, ops::topk, ops::upsample_nearest2d, ops::where_self>(library);
#if __has_include(<ATen/ops/_grouped_mm_ops.h>)
  register_usual<ops::_grouped_mm>(library);
#endif
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

inline void let_views_through(torch::Library& library) {
  for (const auto* view : USUAL_VIEWS) library.impl(view, torch::CppFunction::makeFallthrough());
}

}  // namespace memfit
