"""Logits that are computed when they are read, and not at all if only their cross-entropy is needed.

`LazyLogits` has the shape and the type of an output projection's result. Casts, reshapes and slices of the tokens stay
lazy, and so does what models do to all logits before the loss: a scale, a bias, a softcap.
`torch.nn.functional.cross_entropy` of lazy logits is computed in chunks from the hidden states. Any other use computes
the logits by the very ops of the plain model, so that what follows has the same bits as without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.errors import StaleValueError
from memfit.runtime.chunked_loss.linear_cross_entropy import Softcap, linear_cross_entropy_with, loss_options
from memfit.runtime.torch_internals import TorchFunctionDisabled, storageless, tree_map


@dataclass(frozen=True, slots=True)
class Projection:
    """The call of an output projection: ``hidden @ weight.t() + bias``, to be cast to ``dtype``.

    With a ``cap``, the logits are ``cap * tanh`` of that. ``versions`` are those of the tensors when the call was made.
    What is written over since cannot be read again. ``autocast()`` is a block in which autocast is as it was then.
    ``note_chunked`` is called when a cross-entropy is computed in chunks.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    autocast: Callable[[], torch.autocast]
    dtype: torch.dtype
    versions: tuple[int, ...]
    note_chunked: Callable[[], None]
    cap: float | None = None

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None, note_chunked: Callable[[], None]) -> Projection:
        """Return the call that is to be made now."""
        device_type = hidden.device.type
        is_autocast, autocast_dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        autocast = partial(torch.autocast, device_type, autocast_dtype, is_autocast)
        dtype = autocast_dtype if is_autocast and hidden.dtype != torch.float64 else hidden.dtype
        return Projection(hidden, weight, bias, autocast, dtype, _versions(hidden, weight, bias), note_chunked)

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    def following(self, hidden: Tensor, bias: Tensor | None) -> Projection:
        """Return the projection of hidden states and a bias that follow from these."""
        hidden_version, bias_version = _versions(hidden, bias)
        return replace(self, hidden=hidden, bias=bias, versions=(hidden_version, self.versions[1], bias_version))

    def logits(self) -> Tensor:
        """Compute the logits as the plain model does."""
        self.refuse_stale()
        with torch.inference_mode(mode=False), torch.enable_grad(), self.autocast():
            return functional.linear(self.hidden, self.weight, self.bias)

    def refuse_stale(self) -> None:
        """Raise where the weight or the hidden states are no longer those of the forward pass."""
        if self.versions != _versions(self.hidden, self.weight, self.bias):
            raise StaleValueError(
                "these logits are read after the weight of the output projection (or its input) was changed, by the "
                "optimizer's step for example, and with chunk_loss=True they are computed when they are read. Read "
                "them before the optimizer's step, or leave chunk_loss out"
            )


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return how often each tensor has been written."""
    return tuple(0 if each is None or each.is_inference() else each._version for each in tensors)


class _Unread(torch.autograd.Function):
    """Gives lazy logits their place in the graph, for whatever differentiates them without reading them in Python."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, projection: Projection) -> Tensor:
        ctx.projection = projection
        return storageless(LazyLogits, projection.shape, projection.dtype, hidden.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        projection: Projection = ctx.projection
        projection.refuse_stale()
        required = ctx.needs_input_grad[:3]
        given = (projection.hidden, projection.weight, projection.bias)
        leaves = [
            None if each is None else each.detach().requires_grad_(requires_gradient)
            for each, requires_gradient in zip(given, required, strict=True)
        ]
        with torch.enable_grad(), projection.autocast():
            assert leaves[0] is not None
            assert leaves[1] is not None
            logits = functional.linear(leaves[0], leaves[1], leaves[2]).to(projection.dtype)
            if projection.cap is not None:
                logits = projection.cap * torch.tanh(logits)
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(logits, wanted, gradient))
        return (*(next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves), None)


class LazyLogits(Tensor):
    """Logits that have not been read yet."""

    projection: Projection
    _compute: Callable[[], Tensor]
    _computed: Tensor | None

    @staticmethod
    def of(projection: Projection, compute: Callable[[], Tensor] | None = None) -> LazyLogits:
        """Return the logits of ``projection``; ``compute`` makes them, where that takes more than the projection."""
        lazy: LazyLogits = _Unread.apply(projection.hidden, projection.weight, projection.bias, projection)  # type: ignore[no-untyped-call]
        lazy._compute = projection.logits if compute is None else compute
        lazy._computed = None
        lazy.projection = projection
        return lazy

    def computed(self) -> Tensor:
        """Return the logits, computing them the first time."""
        if self._computed is None:
            self._computed = self._compute()
        return self._computed

    @property
    def was_read(self) -> bool:
        """Whether the logits were computed."""
        return self._computed is not None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _ABOUT_THE_OBJECT:
            with TorchFunctionDisabled():
                return function(*args, **kwargs)
        lazily = _LAZILY.get(function)
        if lazily is not None and args and isinstance(args[0], LazyLogits) and not args[0].was_read:
            result = lazily(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return function(*_read(args), **_read(kwargs))

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Below autograd, where functions in C++ and custom functions arrive; `_Unread` has the gradient.
        return op(*_read(args, detached=True), **_read(kwargs or {}, detached=True))


def _read(arguments: Any, *, detached: bool = False) -> Any:
    """Return ``arguments`` with the logits in place of lazy ones."""

    def read(value: Any) -> Any:
        if not isinstance(value, LazyLogits):
            return value
        return value.computed().detach() if detached else value.computed()

    return tree_map(read, arguments)


# What can be done without the numbers. Each returns lazy logits, or NotImplemented where it takes the numbers.


def _cast(logits: LazyLogits, dtype: torch.dtype) -> Any:
    own = logits.projection.dtype
    if dtype == own:
        return logits
    if dtype != torch.float32 or own not in (torch.float16, torch.bfloat16):
        return NotImplemented
    return LazyLogits.of(replace(logits.projection, dtype=dtype), lambda: logits.computed().to(dtype))


def _to(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1:
        return NotImplemented
    if isinstance(args[0], torch.dtype):
        return _cast(logits, args[0])
    is_here = isinstance(args[0], (str, torch.device)) and torch.device(args[0]) == logits.projection.hidden.device
    return logits if is_here else NotImplemented


def _contiguous(logits: LazyLogits, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else logits


def _reshaped(logits: LazyLogits, reshape: Callable[[Tensor], Tensor]) -> Any:
    """Reshape the tokens; ``reshape`` does it to a tensor of the logits' shape."""
    projection = logits.projection
    num_classes, width = projection.shape[-1], projection.hidden.shape[-1]
    shape = reshape(torch.empty(projection.shape, device="meta")).shape
    if not shape or shape[-1] != num_classes:
        return NotImplemented
    hidden = projection.hidden.reshape(*shape[:-1], width)
    return LazyLogits.of(projection.following(hidden, projection.bias), lambda: reshape(logits.computed()))


def _view(logits: LazyLogits, *shape: Any, **kwargs: Any) -> Any:
    if kwargs or (shape and isinstance(shape[0], torch.dtype)):
        return NotImplemented
    return _reshaped(logits, lambda tensor: tensor.reshape(*shape))


def _flatten(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return _reshaped(logits, lambda tensor: tensor.flatten(*args, **kwargs))


def _getitem(logits: LazyLogits, index: Any) -> Any:
    projection = logits.projection
    entries = index if isinstance(index, tuple) else (index,)
    leading = projection.hidden.dim() - 1
    if len(entries) == 1 and isinstance(entries[0], Tensor):
        tensor = entries[0]
        is_mask = tensor.dtype == torch.bool and 0 < tensor.dim() <= leading
        if isinstance(tensor, LazyLogits) or not (is_mask or (tensor.dtype == torch.int64 and leading > 0)):
            return NotImplemented
    else:
        if not all(each is Ellipsis or isinstance(each, slice) or type(each) is int for each in entries):
            return NotImplemented
        places = [each for each in entries if each is not Ellipsis]
        is_classes_indexed = len(places) > leading or (len(places) < len(entries) and entries[-1] is not Ellipsis)
        if is_classes_indexed and places[-1] != slice(None):
            return NotImplemented
    hidden = projection.hidden[index]
    return LazyLogits.of(projection.following(hidden, projection.bias), lambda: logits.computed()[index])


def _times(logits: LazyLogits, factor: Any) -> Any:
    return _scaled(logits, factor, lambda tensor: tensor * factor)


def _divided(logits: LazyLogits, divisor: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _scaled(logits, divisor, lambda tensor: tensor / divisor)


def _scaled(logits: LazyLogits, number: Any, scale: Callable[[Any], Any]) -> Any:
    """Scale the hidden states and the bias in place of the logits, or the cap."""
    if type(number) not in (int, float):
        return NotImplemented
    projection = logits.projection
    if projection.cap is not None:
        return LazyLogits.of(replace(projection, cap=scale(projection.cap)), lambda: scale(logits.computed()))
    with projection.autocast():
        bias = None if projection.bias is None else scale(projection.bias)
        follower = projection.following(scale(projection.hidden), bias)
    return LazyLogits.of(follower, lambda: scale(logits.computed()))


def _tanh(logits: LazyLogits) -> Any:
    if logits.projection.cap is not None:
        return NotImplemented
    return LazyLogits.of(replace(logits.projection, cap=1.0), lambda: torch.tanh(logits.computed()))


def _plus(logits: LazyLogits, other: Any, **kwargs: Any) -> Any:
    """Add to the bias what is the same for all tokens, as in BART."""
    projection = logits.projection
    if kwargs or projection.cap is not None or type(other) not in (Tensor, nn.Parameter):
        return NotImplemented
    if other.numel() != projection.shape[-1] or not other.dim():
        return NotImplemented
    dtype = torch.promote_types(projection.dtype, other.dtype)
    is_alike = other.dtype == projection.weight.dtype and other.device == projection.weight.device
    if other.shape[-1] != other.numel() or other.dim() > logits.dim() or not is_alike:
        return NotImplemented
    added = other.reshape(-1)
    bias = added if projection.bias is None else projection.bias + added
    follower = replace(projection.following(projection.hidden, bias), dtype=dtype)
    return LazyLogits.of(follower, lambda: logits.computed() + other)


def _cross_entropy(
    logits: LazyLogits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    projection = logits.projection
    if (
        any(each is not None for each in (weight, size_average, reduce))
        or reduction not in ("mean", "sum")
        or not isinstance(target, Tensor)
        or isinstance(target, LazyLogits)
        or target.dtype not in (torch.int64, torch.uint8)
        or logits.dim() != 2
        or target.shape != projection.shape[:-1]
        or target.device != projection.hidden.device
    ):
        return NotImplemented
    projection.refuse_stale()
    # The loss has the type that torch's would have here.
    is_autocast = torch.is_autocast_enabled(projection.hidden.device.type)
    dtype = torch.float32 if is_autocast and projection.dtype != torch.float64 else projection.dtype
    with projection.autocast():
        cap = None if projection.cap is None else Softcap(divisor=1.0, factor=projection.cap)
        options = loss_options(ignore_index, reduction, label_smoothing, cap)
        loss = linear_cross_entropy_with(options, projection.hidden, projection.weight, target, projection.bias)
    projection.note_chunked()
    return loss.to(dtype)


_LAZILY: dict[Any, Callable[..., Any]] = {
    Tensor.float: lambda logits, **kwargs: NotImplemented if kwargs else _cast(logits, torch.float32),
    Tensor.to: _to,
    Tensor.contiguous: _contiguous,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _getitem,
    Tensor.mul: _times,
    Tensor.__mul__: _times,
    Tensor.__rmul__: _times,
    torch.mul: _times,
    Tensor.div: _divided,
    Tensor.__truediv__: _divided,
    torch.div: _divided,
    Tensor.tanh: _tanh,
    torch.tanh: _tanh,
    functional.tanh: _tanh,
    Tensor.add: _plus,
    Tensor.__add__: _plus,
    Tensor.__radd__: _plus,
    torch.add: _plus,
    functional.cross_entropy: _cross_entropy,
}

_ATTRIBUTES = (
    "shape dtype device layout ndim requires_grad is_leaf grad_fn grad output_nr is_cuda is_cpu is_meta is_sparse "
    "is_nested is_quantized is_mkldnn is_xpu is_mps is_vulkan is_ipu is_xla is_maia itemsize nbytes _version"
)
_METHODS = (
    "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex is_signed "
    "is_inference storage_offset get_device __len__ __hash__"
)
# Questions that the object answers without its numbers.
_ABOUT_THE_OBJECT = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split() if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METHODS.split()]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference]
)
