"""Finds the output projection of a language model, and lets it return lazy logits in training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memfit.errors import InvalidParameterError
from memfit.runtime.applying.forward_wrapping import Forward, bare_forward, wrap_forward
from memfit.runtime.chunked_loss.lazy_logits import LazyLogits, Projection
from memfit.runtime.torch_internals import FakeTensor, refuses_saved_tensors_hooks

_USUAL_NAMES = ("lm_head", "embed_out")


class Head(NamedTuple):
    """The output projection of a language model, and its path in the model."""

    path: str
    module: nn.Linear


def head_of(model: nn.Module) -> Head:
    """Return the output projection of ``model`` whose logits can be lazy; raise where there is none.

    That is the module that a ``get_output_embeddings()`` in the model returns, as transformers' models have it, or the
    one named ``lm_head``.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    candidates: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        candidate = module if path.rpartition(".")[2] in _USUAL_NAMES else _output_embeddings(module)
        if candidate is not None and id(candidate) in paths:
            candidates[id(candidate)] = candidate
    if not candidates:
        raise InvalidParameterError(
            f"chunk_loss=True needs the output projection of a language model, and this {type(model).__name__} has no "
            "module named lm_head and no get_output_embeddings(). Call memfit.linear_cross_entropy in the model's loss "
            "instead, or leave chunk_loss out"
        )
    first = next(iter(candidates.values()))
    if len(candidates) == 1 and isinstance(first, nn.Linear) and _is_plain(first):
        return Head(paths[id(first)], first)
    named = ", ".join(f"{paths[key]} ({type(module).__name__})" for key, module in candidates.items())
    raise InvalidParameterError(
        "chunk_loss=True needs one output projection that is an nn.Linear with plain weights, without an adapter, "
        f"quantization or parametrization; this {type(model).__name__} has {named}. Leave chunk_loss out"
    )


def chunk_loss_of(model: nn.Module) -> Callable[[], None]:
    """Let the model's output projection return lazy logits from now on; return what ends that."""
    return wrap_forward(head_of(model).module, LazyHead())


@contextmanager
def loss_in_chunks(model: nn.Module) -> Iterator[LazyHead]:
    """Let the model's output projection return lazy logits inside the block."""
    lazy_head = LazyHead()
    unwrap = wrap_forward(head_of(model).module, lazy_head)
    try:
        yield lazy_head
    finally:
        unwrap()


@contextmanager
def noting_type_of_logits(model: nn.Module, noted: list[torch.dtype]) -> Iterator[None]:
    """Append the type of the logits to ``noted`` at each call of the output projection inside the block."""

    def note(head: nn.Module, args: tuple[Any, ...], logits: Any) -> None:
        noted.append(logits.dtype)

    hook = head_of(model).module.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()


class LazyHead:
    """Stands around the forward of the output projection. ``has_chunked`` is whether any loss was chunked so far."""

    def __init__(self) -> None:
        self.has_chunked = False

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        head = getattr(bare_forward(forward), "__self__", None)
        if len(args) != 1 or kwargs or not isinstance(head, nn.Linear) or not _may_be_lazy(head, args[0]):
            return forward(*args, **kwargs)
        return LazyLogits.of(Projection.of(args[0], head.weight, head.bias, self._note_chunked))

    def _note_chunked(self) -> None:
        self.has_chunked = True


def _may_be_lazy(head: nn.Linear, hidden: Any) -> bool:
    """Return whether this call is part of a training step on plain tensors."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not refuses_saved_tensors_hooks()
        and type(hidden) in (Tensor, nn.Parameter, FakeTensor)
        and hidden.is_floating_point()
        and hidden.dim() > 0
        and (hidden.requires_grad or head.weight.requires_grad)
        and (hidden.dtype == head.weight.dtype or torch.is_autocast_enabled(hidden.device.type))
    )


def _output_embeddings(module: nn.Module) -> nn.Module | None:
    get = getattr(module, "get_output_embeddings", None)
    if not callable(get):
        return None
    try:
        found = get()
    except Exception:  # Of a class that inherits the method, and has no such module.
        return None
    return found if isinstance(found, nn.Module) else None


def _is_plain(module: nn.Linear) -> bool:
    """Return whether the module is a linear layer and nothing more, on plain weights."""
    weights = [each for each in (module.weight, module.bias) if each is not None]
    return type(module) is nn.Linear and all(
        isinstance(each, FakeTensor) or type(each) is nn.Parameter for each in weights
    )
