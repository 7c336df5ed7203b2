"""Which ops the host has to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.capture.recording.op_facts import facts_of
from memfit.runtime.engine.op_rules import rule_for


class AnswerNotes(TorchDispatchMode):
    """Notes the ops for whose results the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        results = result if isinstance(result, (list, tuple)) else (result,)
        if facts_of(op, rule_for(op), args, kwargs or {}, results, 0).is_answer:
            self.names.append(rule_for(op).name)
        return result


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda x: x.sum().item(), ["aten._local_scalar_dense"]),
        (lambda x: bool((x > 0).all()), ["aten._local_scalar_dense"]),
        (lambda x: x.nonzero(), ["aten.nonzero"]),
        (lambda x: x[x > 0], ["aten.index"]),
        (lambda x: x.relu().sum(), []),
        (lambda x: x.cpu(), []),  # it is there already
    ],
)
def test_numbers_and_sizes_that_only_the_device_knows_are_answers(
    ask: Callable[[Tensor], object], names: list[str]
) -> None:
    tensor = torch.tensor([1.0, -2.0, 3.0])
    with AnswerNotes() as notes:
        ask(tensor)
    assert notes.names == names


@pytest.mark.parametrize(
    ("move", "names"),
    [
        (lambda x: x.cpu(), ["aten._to_copy"]),
        (lambda x: torch.empty(3).copy_(x), ["aten.copy_"]),
        (lambda x: x + 1, []),
        (lambda x: torch.add(x, torch.ones(())), []),  # read from the host
    ],
)
def test_what_is_copied_to_the_host_is_an_answer(move: Callable[[Tensor], object], names: list[str]) -> None:
    with FakeTensorMode():
        tensor = torch.ones(3, device="cuda")
        with AnswerNotes() as notes:
            move(tensor)
    assert notes.names == names
