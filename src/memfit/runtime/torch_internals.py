"""The names of torch that are not public, and nothing else.

Checked on torch 2.11.0 (CUDA) and 2.13.0 (CPU).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map as tree_map

TorchFunctionDisabled = torch._C.DisableTorchFunctionSubclass

# What iterating over a data loader returns.
DataLoaderIterator: type = torch.utils.data.dataloader._BaseDataLoaderIter

# Where fake tensors log, with a traceback, that an op refused its arguments; the error itself is raised as well.
FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")

PackHook = Callable[[torch.Tensor], Any]
UnpackHook = Callable[[Any], torch.Tensor]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that lets compiled code stay compiled and higher-order operators through."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    # Without this, flex attention or `cond` inside the mode raises instead of reaching it.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # With False, dynamo runs compiled functions in eager inside the mode, and they stay eager afterwards.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # With True, every __torch_dispatch__ call is wrapped once more in Python, for about a microsecond each.
        return False


def is_in_backward() -> bool:
    """Return whether this thread runs inside autograd's engine, in a backward pass or a hook of one."""
    return torch._C._current_graph_task_id() != -1


def num_references(storage: torch.UntypedStorage) -> int:
    """Return how many tensors share ``storage``, and one more for the ``storage`` object of Python."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_tracing() -> bool:
    """Return whether torch.compile traces a function now, in this thread."""
    return torch._guards.TracingContext.try_get() is not None


def is_fake_mode_active() -> bool:
    """Return whether ops run on fake tensors now."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def outer_saved_tensors_hooks() -> tuple[PackHook, UnpackHook] | None:
    """Return the saved-tensor hooks in force, or None. torch itself only ever calls the innermost pair."""
    # The argument includes the hooks while tracing, which never happens here.
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def refuses_saved_tensors_hooks() -> bool:
    """Return whether torch refuses saved-tensor hooks now: in transforms of torch.func, and where they are disabled."""
    return in_function_transform() or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def in_function_transform() -> bool:
    """Return whether this runs inside a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def let_higher_order_operators_through(key_name: str) -> None:
    """Let higher-order operators, which have a dispatcher of their own in Python, pass the dispatch key by."""
    key = torch._C._dispatch_key_parse(key_name)
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor over the same storage whose numbers are the negatives of ``tensor``'s."""
    return torch._neg_view(tensor)


def keep_gpu_busy(num_cycles: int) -> None:
    """Keep the GPU busy, so that ops launched meanwhile run back-to-back afterwards."""
    torch.cuda._sleep(num_cycles)


def unseen_by_dispatch_modes() -> AbstractContextManager[object]:
    """Return a context in which ops are hidden from dispatch modes."""
    guard: AbstractContextManager[object] = torch._C._DisableTorchDispatch()
    return guard


def detached_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.detach()``, hidden from dispatch modes. To be called above autograd."""
    with unseen_by_dispatch_modes():
        return tensor.detach()


def detached_alias_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.detach()`` from within ``__torch_dispatch__``, sharing the tensor's version counter.

    Below autograd a plain ``detach()`` gets a counter of its own, and later writes would not be noticed.
    """
    # The guard behind the public torch.overrides.enable_reentrant_dispatch, without that one's generator.
    with torch._C._RestorePythonTLSSnapshot(), unseen_by_dispatch_modes():  # type: ignore[attr-defined]
        return tensor.detach()


def pytree_children(value: object) -> list[Any] | None:
    """Return what is in ``value`` if its class is registered with torch's pytrees, else None."""
    node = _pytree.SUPPORTED_NODES.get(type(value))
    return None if node is None else node.flatten_fn(value)[0]


def storageless(cls: type[torch.Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an object of the subclass ``cls`` that has a shape and a type, and no storage."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


@contextmanager
def profilers_paused() -> Iterator[None]:
    """Let a profiler that is active in this thread record nothing inside the block."""
    # An allocation meter takes the profiler's place, where the recording of ops would look for the profiler.
    is_profiling = torch._C._autograd._profiler_enabled()
    if is_profiling:
        torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        if is_profiling:
            torch._C._autograd._enable_record_function(True)


class MemoryEvent(NamedTuple):
    """An allocation that the CPU's allocator reported, or with negative ``num_bytes`` a free.

    Without an ``address``, it was recorded by `record_free`.
    """

    address: int | None
    num_bytes: int


_FREE_EVENT = "memfit frees "


def record_free(num_bytes: int) -> None:
    """Let a profiler record that so many bytes are freed now, which the allocator will not report."""
    if torch._C._autograd._profiler_enabled():
        with torch.autograd.profiler.record_function(f"{_FREE_EVENT}{num_bytes}"):
            pass


@contextmanager
def recorded_memory_events() -> Iterator[list[MemoryEvent]]:
    """Record the events of the CPU's allocator inside the block; the list is filled at its end, in order of time."""
    events: list[MemoryEvent] = []
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profiler:
        yield events
    assert profiler.kineto_results is not None
    nodes = sorted(_nodes(profiler.kineto_results.experimental_event_tree()), key=lambda node: node.start_time_ns)
    for node in nodes:
        if node.name.startswith(_FREE_EVENT):
            events.append(MemoryEvent(None, -int(node.name.removeprefix(_FREE_EVENT))))
        elif node.name == "[memory]" and node.extra_fields.device.type == "cpu":
            events.append(MemoryEvent(node.extra_fields.ptr, node.extra_fields.alloc_size))


def _nodes(roots: Any) -> Iterator[Any]:
    waiting = [*roots]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


def gather_buffers(fsdp_module: Any) -> list[torch.Tensor]:
    """Return the tensors over the memory that FSDP2 gathers a module's parameters into; none before its first step.

    FSDP2 allocates and frees their storages in place, unseen by any dispatch mode.
    """
    state = fsdp_module._get_fsdp_state()
    # Releases before 2.13 have one group.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    parameters = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
    return [buffer for parameter in parameters for buffer in parameter.all_gather_outputs]
