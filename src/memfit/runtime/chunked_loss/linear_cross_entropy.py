"""``linear_cross_entropy``: the output projection and the cross-entropy of a language model, in chunks of tokens.

The logits of a large vocabulary are often the largest tensors of a training step: 16,384 tokens and 32,000 classes take
2 GiB in float32, and autograd holds more than one such tensor. Here only one chunk of them exists at a time. The
gradient of each chunk is computed right after its loss, in the forward pass, so that nothing of its size is saved for
the backward pass: what is saved are the gradients of the hidden states, the weight and the bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from memfit.errors import InvalidParameterError, MemfitError
from memfit.runtime.torch_internals import FakeTensor, in_function_transform
from memfit.validation import real_number, shown, whole_number

# Chunks below this many tokens waste launches; logits that are this small need no chunks.
_FEWEST_TOKENS = 256
_SMALL_LOGITS_BYTES = 32 * 2**20
# So many rows of a gradient in a narrow type are widened at a time.
_SCALED_ROWS = 4096

_UNCHUNKED = "use torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight), targets)"

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return ``cross_entropy(linear(hidden, weight, bias), targets)`` without ever holding all logits.

    ``hidden`` has the shape ``(..., width)``, ``weight`` ``(classes, width)``, ``bias`` ``(classes,)`` and ``targets``,
    which are class indices, the shape of ``hidden`` without its last dimension. ``ignore_index``, ``reduction``
    (``"mean"`` or ``"sum"``) and ``label_smoothing`` mean the same as for `torch.nn.functional.cross_entropy`. Under
    autocast, products are computed in autocast's type. The loss is in float32, or in float64 for float64 inputs. With a
    ``softcap``, as Gemma 2 has it, the logits are ``softcap * tanh(logits / softcap)``.

    ``chunk_tokens`` is how many tokens are processed at a time. By default it is chosen by memory: the logits of a
    chunk take no more than the gradient of the weight, each in float32.

    Gradients are computed in the forward pass, where they are required. Those of the weight and the bias are summed
    over the chunks in float32. Sums run in another order than in the unchunked loss, so bits differ: in float32 and
    float64 the loss and all gradients are within ``64 * eps`` of the exact ones, relative to their norms; in bfloat16
    and float16 within ``4 * eps`` of the type. That holds for logits up to 100, because the rounding error of a logit
    is the relative error of its probability, and for gradients that do not underflow, which in float16 takes a loss
    scale. Differentiating twice is not supported.
    """
    options = loss_options(ignore_index, reduction, label_smoothing, _softcap_of(softcap))
    return linear_cross_entropy_with(options, hidden, weight, targets, bias, chunk_tokens)


def linear_cross_entropy_with(
    options: LossOptions,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the loss of `linear_cross_entropy` with ``options``."""
    _check_tensors(hidden, weight, targets, bias)
    rows, classes = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if chunk_tokens is None:
        num_tokens = default_chunk_tokens(*weight.shape)
    else:
        num_tokens = whole_number(chunk_tokens, "chunk_tokens", minimum=1)
    if not torch.compiler.is_compiling() and in_function_transform():
        raise MemfitError(f"linear_cross_entropy cannot be transformed by torch.func (grad, vmap, jvp); {_UNCHUNKED}")
    if not rows.is_cuda:
        _check_classes(classes, weight.shape[0], options.ignore_index)
    loss: Tensor = _ChunkedLoss.apply(rows, weight, bias, classes, options, num_tokens)  # type: ignore[no-untyped-call]
    return loss


def default_chunk_tokens(num_classes: int, width: int) -> int:
    """Return how many tokens have logits that take no more memory than the weight's gradient, each in float32."""
    largest = max(width, _SMALL_LOGITS_BYTES // (4 * max(num_classes, 1)), _FEWEST_TOKENS)
    return 1 << (largest.bit_length() - 1)


class Softcap(NamedTuple):
    """Logits that are ``factor * tanh(logits / divisor)``."""

    divisor: float
    factor: float


class LossOptions(NamedTuple):
    """What the loss of given logits is."""

    ignore_index: int
    is_mean: bool
    label_smoothing: float
    softcap: Softcap | None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LossOptions,
        chunk_tokens: int,
    ) -> Tensor:
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        narrow = _type_of_products(rows)
        weight_narrow = weight.detach().to(narrow)
        bias_narrow = None if bias is None else bias.detach().to(narrow)
        total = torch.zeros((), dtype=wide, device=rows.device)
        rows_gradient = torch.empty_like(rows, requires_grad=False) if needs_rows else None
        weight_sum = torch.zeros_like(weight, dtype=wide, requires_grad=False) if needs_weight else None
        bias_sum = torch.zeros_like(bias, dtype=wide, requires_grad=False) if needs_bias and bias is not None else None
        # Autocast would cast the weight anew for every chunk.
        with torch.autocast(rows.device.type, enabled=False):
            for start in range(0, len(targets), chunk_tokens):
                part = slice(start, start + chunk_tokens)
                chunk = rows.detach()[part].to(narrow)
                logits = torch.nn.functional.linear(chunk, weight_narrow, bias_narrow)
                if not (needs_rows or needs_weight or needs_bias):
                    wide_logits = logits.to(wide)
                    _cap(wide_logits, options.softcap)
                    total += _loss(wide_logits, targets[part], options)[0]
                    continue
                loss_and_gradient = _kernels().loss_and_gradient if _runs_on_gpu(rows) else _eager_loss_and_gradient
                loss, gradient = loss_and_gradient(logits, targets[part], options, wide)
                del logits
                total += loss
                if rows_gradient is not None:
                    rows_gradient[part] = gradient @ weight_narrow
                if weight_sum is not None:
                    _add_product(weight_sum, gradient.t(), chunk)
                if bias_sum is not None:
                    bias_sum += gradient.sum(0, dtype=wide)
        count = (targets != options.ignore_index).sum().to(wide) if options.is_mean else torch.ones_like(total)
        # Where no token counts, the mean is NaN and its gradients are zero.
        scale = count.clamp(min=1).reciprocal()
        # Sums over tokens may be too large for a narrow type, means are not. The gradients of single tokens are scaled
        # in the backward pass: divided by the number of tokens, they would underflow in float16.
        weight_gradient = None if weight_sum is None else _scaled(weight_sum, scale, weight.dtype)
        bias_gradient = None if bias_sum is None or bias is None else _scaled(bias_sum, scale, bias.dtype)
        ctx.save_for_backward(rows_gradient, weight_gradient, bias_gradient, scale)
        return total / count

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows_gradient, weight_gradient, bias_gradient, scale = ctx.saved_tensors
        is_differentiated = torch.is_grad_enabled()
        with torch.no_grad():
            factor = loss_gradient.to(scale.dtype)
            gradients = [
                None if rows_gradient is None else _scaled(rows_gradient, factor * scale, rows_gradient.dtype),
                None if weight_gradient is None else _scaled(weight_gradient, factor, weight_gradient.dtype),
                None if bias_gradient is None else _scaled(bias_gradient, factor, bias_gradient.dtype),
            ]
        if is_differentiated:
            gradients = [None if each is None else _refusing_second_derivatives(each) for each in gradients]
        return (*gradients, None, None, None)


class _DifferentiatedOnce(torch.autograd.Function):
    """Passes a gradient on in a backward pass with ``create_graph=True``, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise MemfitError(
            "linear_cross_entropy computes its gradients in the forward pass and cannot be differentiated twice; "
            f"{_UNCHUNKED}"
        )


def _refusing_second_derivatives(gradient: Tensor) -> Tensor:
    refusing: Tensor = _DifferentiatedOnce.apply(gradient.requires_grad_())  # type: ignore[no-untyped-call]
    return refusing


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``gradient * factor`` in ``dtype``, where the factor is not rounded to the gradient's type first."""
    if gradient.dtype == factor.dtype == dtype:
        return gradient * factor
    return (
        _kernels().scaled(gradient, factor, dtype) if _runs_on_gpu(gradient) else _eager_scaled(gradient, factor, dtype)
    )


def _eager_scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale so many rows at a time that what is widened takes little memory."""
    scaled = torch.empty_like(gradient, dtype=dtype)
    for result, part in zip(scaled.split(_SCALED_ROWS), gradient.split(_SCALED_ROWS), strict=True):
        torch.mul(part.to(factor.dtype), factor, out=result)
    return scaled


def _fusible_scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the same in one kernel."""
    return (gradient.to(factor.dtype) * factor).to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total``, which may be of a wider type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _runs_on_gpu(total) and torch.version.hip is None:
        # Half the memory traffic of a product in the narrow type, and no rounding before the sum.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.dtype == torch.float16:
        # A sum over thousands of tokens may pass the largest number of float16.
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    else:
        total += left @ right


def _cap(logits: Tensor, softcap: Softcap | None) -> Tensor | None:
    """Give the logits their softcap in place; return the factor that it has in their gradient."""
    if softcap is None:
        return None
    slope = logits.div_(softcap.divisor).tanh_().square().neg_().add_(1).mul_(softcap.factor / softcap.divisor)
    logits.mul_(softcap.factor)
    return slope


def _loss(logits: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss, and what its gradient needs: log-normalizers, which rows count, and their classes."""
    counted = targets != options.ignore_index
    classes = torch.where(counted, targets, 0)[:, None]
    normalizers = torch.logsumexp(logits, -1, keepdim=True)
    losses = normalizers - (1 - options.label_smoothing) * logits.gather(1, classes)
    if options.label_smoothing:
        losses = losses - options.label_smoothing * logits.mean(-1, keepdim=True)
    return torch.where(counted[:, None], losses, 0).sum(), normalizers, counted[:, None], classes


def _eager_loss_and_gradient(
    narrow_logits: Tensor, targets: Tensor, options: LossOptions, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a chunk, and the gradient of its loss by the logits, in the logits' type."""
    # The logits are overwritten: they have no other reader.
    logits = narrow_logits.to(wide)
    slope = _cap(logits, options.softcap)
    loss, normalizers, counted, classes = _loss(logits, targets, options)
    gradient = logits.sub_(normalizers).exp_().sub_(options.label_smoothing / logits.shape[1])
    gradient.scatter_add_(1, classes, torch.full_like(normalizers, options.label_smoothing - 1))
    if slope is not None:
        gradient.mul_(slope)
    return loss, gradient.mul_(counted).to(narrow_logits.dtype)


def _fusible_loss_and_gradient(
    narrow_logits: Tensor, targets: Tensor, options: LossOptions, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute the same from pointwise ops and reductions alone, which a compiler turns into two kernels."""
    logits = narrow_logits.to(wide)
    slope = torch.ones_like(logits)
    if options.softcap is not None:
        tanh = torch.tanh(logits / options.softcap.divisor)
        logits = tanh * options.softcap.factor
        slope = (1 - tanh * tanh) * (options.softcap.factor / options.softcap.divisor)
    loss, normalizers, counted, classes = _loss(logits, targets, options)
    is_target = torch.arange(logits.shape[1], device=logits.device) == classes
    expected = is_target.to(wide) * (1 - options.label_smoothing) + options.label_smoothing / logits.shape[1]
    gradient = (torch.exp(logits - normalizers) - expected) * slope * counted
    return loss, gradient.to(narrow_logits.dtype)


class _Kernels(NamedTuple):
    """What is compiled on GPUs, where it is faster and takes less memory."""

    loss_and_gradient: Callable[[Tensor, Tensor, LossOptions, torch.dtype], tuple[Tensor, Tensor]]
    scaled: Callable[[Tensor, Tensor, torch.dtype], Tensor]


@cache
def _kernels() -> _Kernels:
    return _Kernels(
        _compiled_or_eager(_fusible_loss_and_gradient, _eager_loss_and_gradient),
        _compiled_or_eager(_fusible_scaled, _eager_scaled),
    )


def _runs_on_gpu(tensor: Tensor) -> bool:
    """Return whether kernels run on a GPU right now, rather than being traced."""
    return tensor.device.type == "cuda" and not torch.compiler.is_compiling() and not isinstance(tensor, FakeTensor)


def _compiled_or_eager(
    fusible: Callable[_Arguments, _Result], eager: Callable[_Arguments, _Result]
) -> Callable[_Arguments, _Result]:
    """Return ``fusible`` compiled; where it cannot be, which its first call shows, ``eager``."""
    compiled = torch.compile(fusible)
    failures: list[Exception] = []

    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not failures:
            try:
                return compiled(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # No Triton, no C compiler, a device that is too old: what cannot be compiled runs in eager mode.
                failures.append(error)
        return eager(*args, **kwargs)

    return call


def _type_of_products(rows: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(rows.device.type) and rows.dtype != torch.float64:
        return torch.get_autocast_dtype(rows.device.type)
    return rows.dtype


def loss_options(ignore_index: int, reduction: str, label_smoothing: float, softcap: Softcap | None) -> LossOptions:
    """Return the options of a loss, checked."""
    if reduction not in ("mean", "sum"):
        raise InvalidParameterError(
            'reduction must be "mean" or "sum", because gradients are computed in the forward pass; got '
            f"{shown(reduction)}"
        )
    smoothing = real_number(label_smoothing, "label_smoothing", "a number from 0 to 1")
    if not 0 <= smoothing <= 1:
        raise InvalidParameterError(f"label_smoothing must be a number from 0 to 1; got {shown(label_smoothing)}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise InvalidParameterError(f"ignore_index must be a whole number; got {shown(ignore_index)}")
    return LossOptions(ignore_index, reduction == "mean", float(smoothing), softcap)


def _softcap_of(softcap: float | None) -> Softcap | None:
    if softcap is None:
        return None
    cap = float(real_number(softcap, "softcap", "a positive number, or None for logits without a softcap"))
    if not 0 < cap < math.inf:
        raise InvalidParameterError(f"softcap must be a positive number; got {shown(softcap)}")
    return Softcap(cap, cap)


def _check_tensors(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        if not isinstance(tensor, Tensor):
            raise InvalidParameterError(f"{name} must be a tensor; got {shown(tensor)}")
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise InvalidParameterError(
            "hidden must have the shape (..., width) and weight (classes, width); got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.is_floating_point() and targets.shape == (*hidden.shape[:-1], weight.shape[0]):
        raise InvalidParameterError(
            "targets must be class indices; got class probabilities, which are as large as the logits themselves: "
            f"{_UNCHUNKED}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise InvalidParameterError(
            f"targets must have the shape of hidden without its last dimension, {tuple(hidden.shape[:-1])}; got "
            f"{tuple(targets.shape)}"
        )
    if targets.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise InvalidParameterError(f"targets must be class indices (int64); got {targets.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidParameterError(f"bias must have the shape {(weight.shape[0],)}; got {tuple(bias.shape)}")
    devices = {tensor.device for tensor in (hidden, weight, targets, bias) if tensor is not None}
    if len(devices) > 1:
        raise InvalidParameterError(f"all tensors must be on one device; got {', '.join(sorted(map(str, devices)))}")
    is_autocast = torch.is_autocast_enabled(hidden.device.type)
    if not hidden.is_floating_point() or (hidden.dtype != weight.dtype and not is_autocast):
        raise InvalidParameterError(
            "hidden and weight must have one floating type, or run under autocast; got "
            f"{hidden.dtype} and {weight.dtype}"
        )


def _check_classes(targets: Tensor, num_classes: int, ignore_index: int) -> None:
    """Refuse classes that do not exist. On a GPU, asking would wait for the device; there, the kernel asserts."""
    if torch.compiler.is_compiling() or isinstance(targets, FakeTensor):
        return
    is_wrong = (targets != ignore_index) & ((targets < 0) | (targets >= num_classes))
    if is_wrong.any():
        wrong = int(targets[is_wrong][0])
        raise InvalidParameterError(
            f"targets must be from 0 to {num_classes - 1}, or ignore_index={ignore_index}; got {wrong}"
        )
