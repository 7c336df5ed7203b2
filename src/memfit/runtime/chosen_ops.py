"""Hears the ops that a plan drops, and no others: kernels of our own at a dispatch key that nothing else uses.

A dispatch mode is called for every op that runs inside it, views included, and each of these calls costs as much Python
as an op costs to launch. Here, ops that are not chosen fall through the key as if it were not there. The key lies below
autograd and autocast, as dispatch modes do, and only has an effect where it is switched on.

What it cannot tell is who calls: an op that is not chosen may call a chosen one from within its kernel. A tape counts
the calls once, beside a dispatch mode, before it relies on this (`tape`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from memfit.runtime.op_rules import BATCH_NORMS, OpRule, rule_for
from memfit.runtime.torch_internals import SpareKey, all_op_names


class Listener(Protocol):
    """Who hears the chosen ops of a thread."""

    def hear(self, op: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call. The key is off."""
        ...


class _InThread(threading.local):
    listener: Listener | None = None


_in_thread = _InThread()
_key: SpareKey | None = SpareKey.take()
_lock = threading.Lock()
_libraries: dict[str, torch.library.Library] = {}
# With overloads, and by the names that plans use, without.
_overloads: set[str] = set()
_chosen: set[str] = set()
_is_choosing_writes = False
# Other ops fill what they have just made with these: hearing them would cost more than all that is chosen. A region
# whose trial shows that the model calls them chooses them too.
_OFTEN_WITHIN_OTHERS = {"copy_", "fill_", "zero_"}


def choose(op_names: Iterable[str]) -> bool:
    """Hear these ops from now on, wherever the key is on, and those that write; return whether that is possible."""
    if _key is None:
        return False
    with _lock:
        if not _is_choosing_writes:
            _choose_writes()
        return all(_is_chosen(name) for name in sorted({*op_names, *BATCH_NORMS}))


def listening(listener: Listener) -> AbstractContextManager[object]:
    """Let ``listener`` hear the chosen ops that this thread runs inside the block."""
    assert _key is not None
    return _Listening(listener, _key.on())


def not_listening() -> AbstractContextManager[object]:
    """Let nobody hear anything in this thread inside the block."""
    assert _key is not None
    return _key.off()


class _Listening:
    def __init__(self, listener: Listener, key_on: AbstractContextManager[object]) -> None:
        self._listener = listener
        self._before: Listener | None = None
        self._key_on = key_on

    def __enter__(self) -> None:
        self._before = _in_thread.listener
        _in_thread.listener = self._listener
        self._key_on.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._key_on.__exit__(*error)
        _in_thread.listener = self._before


def _is_chosen(name: str) -> bool:
    if name in _chosen:
        return True
    namespace, _, short_name = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), short_name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    for overload in packet.overloads():
        _choose_one(namespace, short_name, overload, getattr(packet, overload))
    _chosen.add(name)
    return True


def _choose_writes() -> None:
    """Choose the ops that write into an argument: what recipes hold of it must be copied before."""
    global _is_choosing_writes
    _is_choosing_writes = True
    for full_name in all_op_names():
        namespace, _, rest = full_name.partition("::")
        short_name, _, overload = rest.partition(".")
        may_write = short_name.endswith("_") or "out" in overload
        if namespace == "aten" and may_write and short_name not in _OFTEN_WITHIN_OTHERS:
            op = getattr(getattr(torch.ops.aten, short_name), overload or "default")
            if op._schema.is_mutable:
                _choose_one(namespace, short_name, overload, op)


def _choose_one(namespace: str, short_name: str, overload: str, op: Any) -> None:
    assert _key is not None
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    name = short_name if overload in ("", "default") else f"{short_name}.{overload}"
    if f"{namespace}::{name}" not in _overloads:
        _libraries[namespace].impl(name, _kernel_of(op, _key), _key.name)
        _overloads.add(f"{namespace}::{name}")


def _kernel_of(op: Any, key: SpareKey) -> Callable[..., Any]:
    rule = rule_for(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        listener = _in_thread.listener
        # What the op itself calls is none of the listener's business.
        with key.off():
            # A thread of autograd's may have the key on, but nobody who listens.
            return op(*args, **kwargs) if listener is None else listener.hear(op, rule, args, kwargs)

    return kernel
