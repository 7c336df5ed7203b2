"""Records the ops of a forward pass and the values they make, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from memfit.capture.scopes import ModuleScopes
from memfit.graph.model_profile import RecordedOp, RecordedValue, Replay, Save
from memfit.graph.names import ValueName
from memfit.runtime.call_arguments import covers_its_storage, is_repeatable, tensors_in, written_tensors
from memfit.runtime.op_rules import OpRule, Treatment, rule_for
from memfit.runtime.torch_internals import DispatchMode, detached_alias


class StepRecorder(DispatchMode):
    """A dispatch mode that writes down every op inside `recording`, and which values autograd saves there."""

    def __init__(self, scopes: ModuleScopes, model: nn.Module) -> None:
        super().__init__()
        owned = [*model.named_parameters(), *model.named_buffers()]
        self._names_of_owned = {tensor.untyped_storage()._cdata: name for name, tensor in owned}
        self.ops: list[RecordedOp] = []
        self._scopes = scopes
        self._values: list[tuple[str, int, int | None]] = []
        self._saved: set[int] = set()
        self._num_calls: Counter[tuple[str | None, str]] = Counter()
        self._token = object()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _itself), self:
            yield

    @property
    def values(self) -> list[RecordedValue]:
        """The values recorded so far."""
        return [
            RecordedValue(name, num_bytes, op_index, storage=index, saves=(Save(0, 0),) if index in self._saved else ())
            for index, (name, num_bytes, op_index) in enumerate(self._values)
        ]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = rule_for(op)
        if rule.treatment is Treatment.VIEW or types:
            return op(*args, **kwargs)
        module = self._scopes.current
        call = self._num_calls[module, rule.name]
        self._num_calls[module, rule.name] += 1
        written = written_tensors(rule, args, kwargs)
        rewrites = tuple(index for tensor in written if (index := self._value_of(tensor)) is not None)
        replay = _replay_of(rule, args, written)
        overwritten = set(rewrites) if rule.treatment is Treatment.OVERWRITE else set()
        read = [self._value_of(tensor) for tensor in tensors_in((args, kwargs))]
        inputs = tuple(dict.fromkeys(index for index in read if index is not None and index not in overwritten))
        result = op(*args, **kwargs)
        results = written or (result if isinstance(result, (tuple, list)) else (result,))
        self.ops.append(
            RecordedOp(
                module=module,
                op=rule.name,
                call=call,
                inputs=inputs,
                outputs=tuple(
                    self._new_value(tensor, ValueName(module or "", rule.name, call, position), bool(written))
                    for position, tensor in enumerate(results)
                ),
                rewrites=rewrites,
                flops=_flops(op, args, kwargs, result),
                replay=replay,
            )
        )
        return result

    def _new_value(self, result: Any, name: ValueName, is_rewritten: bool) -> int | None:
        """Number the new content of a result's storage; None where the op made no new content."""
        if not isinstance(result, Tensor) or result.layout is not torch.strided:
            return None
        storage = result.untyped_storage()
        if self._number_on(storage) is not None and not is_rewritten:
            return None
        return self._number(storage, str(name), len(self.ops))

    def _value_of(self, tensor: Tensor) -> int | None:
        """Return the number of what the tensor's storage holds, numbering it now if it came from outside."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        index = self._number_on(storage)
        if index is not None:
            return index
        name = self._names_of_owned.get(storage._cdata, f"outside#{len(self._values)}")
        return self._number(storage, name, None)

    def _number(self, storage: torch.UntypedStorage, name: str, op_index: int | None) -> int:
        index = len(self._values)
        self._values.append((name, storage.nbytes(), op_index))
        storage._memfit_number = (self._token, index)  # type: ignore[attr-defined]
        return index

    def _number_on(self, storage: torch.UntypedStorage) -> int | None:
        # An attribute of a storage lives as long as the storage: no later one at its address can be mistaken for it.
        token, index = getattr(storage, "_memfit_number", (None, None))
        return index if token is self._token else None

    def _pack(self, tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor or isinstance(tensor, torch.nn.Parameter):
            index = self._value_of(tensor)
            if index is not None:
                self._saved.add(index)
            return tensor if tensor.is_leaf else detached_alias(tensor)
        return tensor if tensor.is_leaf else tensor.detach()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _replay_of(rule: OpRule, args: Any, written: list[Tensor]) -> Replay:
    if rule.treatment is Treatment.OPAQUE:
        return Replay.STATEFUL
    if rule.treatment is Treatment.OVERWRITE and not covers_its_storage(written[0]):
        return Replay.STATEFUL
    if not torch.is_grad_enabled():
        return Replay.NO_GRAD
    return Replay.YES if is_repeatable(rule, args) else Replay.UNORDERED


def _flops(op: Any, args: Any, kwargs: Any, result: Any) -> int:
    count = flop_registry.get(getattr(op, "_overloadpacket", None))
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0
