"""Hearing chosen ops only: which calls the tape hears, when it falls back to hearing all, and that nothing stays on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.runtime import chosen_ops
from memfit.runtime.op_rules import OpRule
from memfit.runtime.regions import Region
from memfit.runtime.tape import Tape

FILLING = {"aten.copy_", "aten.fill_", "aten.zero_"}


class NotingTape(Tape):
    """Notes the names of the ops that it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def _run(self, op: Any, rule: OpRule, types: Any, args: Any, kwargs: Any) -> Any:
        self.heard.append(rule.name)
        return super()._run(op, rule, types, args, kwargs)


def heard_in_a_pass(region: Region, model: nn.Module, *batch: Tensor) -> list[str]:
    tape = NotingTape()
    output = tape.run(region, model, batch, {})
    tape.close()
    output.sum().backward()
    return tape.heard


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).view(2, 2, 8).transpose(0, 1)
        counter = torch.zeros(())
        counter += 1
        return functional.gelu(x).sigmoid() * functional.gelu(x * 2)


def is_same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_after_a_trial_only_chosen_ops_and_writes_are_heard() -> None:
    torch.manual_seed(0)
    model, x = Steps(), torch.randn(4, 8)
    model(x).sum().backward()
    expected = gradients(model)
    region = Region("", model, {"aten.gelu": True, "aten.mul": (False, False)})
    assert not region.is_tried
    assert {"aten.addmm", "aten.gelu", "aten.mul", "aten.sigmoid"} <= set(heard_in_a_pass(region, model, x))
    assert is_same(gradients(model), expected)
    assert region.is_tried
    assert not region.hears_all
    for _ in range(2):
        heard = heard_in_a_pass(region, model, x)
        # Which ops fill their own results is heard too, once some region has chosen it.
        assert [name for name in heard if name not in FILLING] == ["aten.add_", "aten.gelu", "aten.gelu"]
        assert is_same(gradients(model), expected)


def test_copies_are_heard_where_the_model_makes_them() -> None:
    """Elsewhere they are what ops fill their own results with."""

    class Copying(Steps):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.empty_like(x).copy_(x))

    torch.manual_seed(0)
    model, x = Copying(), torch.randn(4, 8)
    region = Region("", model, {"aten.gelu": True})
    for _ in range(3):
        assert "aten.copy_" in heard_in_a_pass(region, model, x)


class Lookup(nn.Module):
    """An embedding calls index_select from within."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, places: Tensor) -> Tensor:
        return self.embedding(places) * self.table.index_select(0, places).exp()


def test_where_a_chosen_op_is_called_by_others_all_ops_are_heard() -> None:
    torch.manual_seed(0)
    model, places = Lookup(), torch.tensor([3, 1, 1])
    model(places).sum().backward()
    expected = gradients(model)
    region = Region("", model, {"aten.index_select": True})
    for number in range(3):
        heard = heard_in_a_pass(region, model, places)
        assert heard.count("aten.index_select") == 1
        assert "aten.embedding" in heard
        assert is_same(gradients(model), expected)
        assert (region.is_tried, region.hears_all) == (True, True), number


@pytest.mark.parametrize("name", ["aten.relu_", "no_such_library.op", "aten.no_such_op"])
def test_what_cannot_be_chosen_is_heard_with_all_the_rest(name: str) -> None:
    region = Region("", nn.Identity(), {name: True})
    assert region.hears_all
    assert region.is_tried


def test_without_a_spare_key_all_ops_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_ops, "_key", None)
    torch.manual_seed(0)
    model, x = Steps(), torch.randn(4, 8)
    region = Region("", model, {"aten.gelu": True})
    assert region.hears_all
    for _ in range(2):
        assert "aten.addmm" in heard_in_a_pass(region, model, x)


def test_regions_inside_of_each_other_hear_what_each_needs() -> None:
    torch.manual_seed(0)
    inner, x = Steps(), torch.randn(4, 8)
    outer = nn.Sequential(inner, nn.GELU())
    around = Region("", outer, {"aten.gelu": True})
    inside = Region("0", outer, {"aten.gelu": True, "aten.mul": True, "aten.add_": True})
    assert inside.hears_all

    def forward(x: Tensor) -> Any:
        return outer[1](tape.run(inside, inner, (x,), {}))

    for number in range(3):
        tape = NotingTape()
        output = tape.run(around, forward, (x,), {})
        tape.close()
        output.sum().backward()
        assert tape.heard.count("aten.gelu") == 3
        assert tape.heard.count("aten.mul") == 2
        assert tape.heard.count("aten.addmm") == 1, number


@pytest.mark.parametrize("is_tried", [False, True])
def test_an_interrupted_pass_leaves_nothing_on(is_tried: bool) -> None:
    x = torch.randn(4, 8)
    model = Steps()
    region = Region("", model, {"aten.gelu": True})
    if is_tried:
        heard_in_a_pass(region, model, x)

    def interrupted(x: Tensor) -> Tensor:
        functional.gelu(x)
        raise KeyboardInterrupt

    tape = NotingTape()
    with pytest.raises(KeyboardInterrupt):
        tape.run(region, interrupted, (x,), {})
    tape.close()
    tape.heard.clear()
    functional.gelu(x)
    assert tape.heard == []
    assert chosen_ops._in_thread.listener is None
