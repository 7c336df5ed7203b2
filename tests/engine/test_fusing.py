"""Pointwise ops that are replayed one after the other run as one kernel, with the bits that they have one by one.

The kernels run on the host here, see `host_kernels.py`; tests/engine/test_fusing_on_gpu.py has those of the GPU.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.host_kernels import HostKernels
from tests.engine.plans import applied, every_value
from tests.engine.pointwise_chains import norm, numbers
from tests.engine.step_comparison import assert_same, trace_steps
from tests.engine.zoo import ZOO, Example
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.runtime.engine.native_tape import NativeTape, new_tape
from memfit.runtime.engine.planned_modules import PlannedModule
from memfit.runtime.fusing.pointwise_ops import POINTWISE_OPS
from memfit.runtime.native.native_build import native_module

Forward = Callable[..., Tensor]


@pytest.fixture(scope="session")
def built_kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def kernels(built_kernels: HostKernels) -> Iterator[HostKernels]:
    native = native_module()
    built_kernels.start(native)
    yield built_kernels
    native.fuse_nothing()


def num_launched() -> int:
    num: int = native_module().num_fused_kernels_launched()
    return num


def loss_where_dropped(forward: Forward, leaves: list[Tensor], dropped: tuple[str, ...]) -> Tensor:
    """Return the loss of a pass in which what the ops named ``dropped`` make is dropped."""
    tape = new_tape()
    assert isinstance(tape, NativeTape)
    try:
        result = tape.run(PlannedModule("", nn.Identity(), dict.fromkeys(dropped, True)), forward, tuple(leaves), {})
    finally:
        tape.close()
    return result.float().square().sum()


def gradients(forward: Forward, *inputs: Tensor, dropped: tuple[str, ...] = tuple(POINTWISE_OPS)) -> list[Tensor]:
    """Return the gradients of ``inputs`` where what the ops named ``dropped`` make is dropped."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    loss_where_dropped(forward, leaves, dropped).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def peak_of_backward(forward: Forward, *inputs: Tensor, dropped: tuple[str, ...]) -> int:
    """Return the most bytes that are there in the backward pass, of what the step has made."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    # What others left must not be collected meanwhile, and a dispatch mode would be shown each op.
    gc.collect()
    gc.disable()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = loss_where_dropped(forward, leaves, dropped)
        begin = time.time_ns()
        loss.backward()
    gc.enable()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    totals = itertools.accumulate(num_bytes for _, num_bytes in changes)
    return max(total for total, (moment, _) in zip(totals, changes, strict=True) if moment >= begin)


def plain_gradients(forward: Forward, *inputs: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    forward(*leaves).float().square().sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_a_norm_is_one_kernel(kernels: HostKernels) -> None:
    x, weight = numbers(4, 6, 16), numbers(16, seed=1)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        normed = norm(x.exp(), weight)
        return normed @ normed.transpose(1, 2)

    assert_same_bits(gradients(forward, x, weight), plain_gradients(forward, x, weight))
    assert kernels.programs == [
        "bf16 flat;f32 one 2;bf16 row 2;"
        "aten._to_copy f32 kept i0;aten.mul f32 passed v0 i1;aten._to_copy bf16 kept v1;aten.mul bf16 kept i2 v2;"
    ]


def test_halves_of_one_tensor_are_read_in_rows(kernels: HostKernels) -> None:
    def forward(x: Tensor) -> Tensor:
        gate, up = x.exp().chunk(2, dim=-1)
        return ((gate + up) * up) @ up.T

    x = numbers(8, 32)
    assert_same_bits(gradients(forward, x), plain_gradients(forward, x))
    assert kernels.programs == ["bf16 row 2;bf16 row 2;aten.add bf16 kept i0 i1;aten.mul bf16 kept v0 i1;"]


def test_each_program_is_built_once(kernels: HostKernels) -> None:
    def forward(x: Tensor) -> Tensor:
        return ((x.exp() * x) * x).sin()

    for rows in (2, 4, 8):
        gradients(forward, numbers(rows, 8))
    assert len(kernels.programs) == 1
    assert num_launched() == 3


@pytest.mark.parametrize(
    ("name", "forward", "shape"),
    [
        ("a number", lambda x: ((x * 2.0) * 3.0).sin(), (16,)),
        ("a scalar tensor", lambda x: (x * torch.tensor(2.0)).sin(), (16,)),
        ("twice the other", lambda x: torch.add(x, x.exp(), alpha=2).sin(), (16,)),
        ("sizes that are no multiple of a vector", lambda x: ((x * x) + x).sin(), (3, 5)),
        ("rows that are no multiple of a vector", lambda x: ((x[:, :6] * x[:, 4:]) + x[:, 4:]).sin(), (8, 10)),
        ("columns", lambda x: ((x.T * x.exp()) + x.T).sin(), (16, 16)),
        ("rows that begin between vectors", lambda x: ((x[:, 1:9] * x[:, 2:10]) + x[:, 3:11]).sin(), (8, 16)),
        ("other types", lambda x: ((x.double() * x) + x).sin(), (16,)),
        ("one op", lambda x: (x * x).sin(), (16,)),
    ],
)
def test_what_does_not_fit_is_replayed_op_by_op(
    kernels: HostKernels, name: str, forward: Forward, shape: tuple[int, ...]
) -> None:
    x = numbers(*shape)
    assert_same_bits(gradients(forward, x), plain_gradients(forward, x))
    assert kernels.programs == [], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("aten.mul", "a * b * 1.0000001f"), ("aten.add", "a + b + 1e-40f"), ("aten.neg", "a == 0.0f ? a : -a")],
)
def test_ops_that_do_not_give_the_same_bits_are_not_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(POINTWISE_OPS, name, dataclasses.replace(POINTWISE_OPS[name], expressions={"": wrong}))
    kernels = HostKernels(tmp_path)
    native = native_module()
    kernels.start(native)
    try:

        def forward(x: Tensor) -> Tensor:
            return (-(x * x + x)).sin()

        x = numbers(16, dtype=dtype)
        assert_same_bits(gradients(forward, x), plain_gradients(forward, x))
        assert any(name in program for program in kernels.programs)
        assert not any(name in program for program in kernels.built)
    finally:
        native.fuse_nothing()


def test_functions_of_libraries_are_not_fused_where_they_cannot_all_be_tried(kernels: HostKernels) -> None:
    def forward(x: Tensor) -> Tensor:
        return ((x * x).sigmoid() * x).sin()

    x = numbers(16, dtype=torch.float32)
    assert_same_bits(gradients(forward, x), plain_gradients(forward, x))
    assert kernels.programs == []


def test_kernels_are_tried_whatever_the_users_defaults_are(tmp_path: Path) -> None:
    kernels = HostKernels(tmp_path)
    native = native_module()
    kernels.start(native)
    try:
        x = numbers(16)
        state = torch.get_rng_state()
        with torch.device("meta"):
            found = gradients(lambda x: (-(x * x + x)).sin(), x)
        assert_same_bits(found, plain_gradients(lambda x: (-(x * x + x)).sin(), x))
        assert len(kernels.built) == 1
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        native.fuse_nothing()


class Ops(TorchDispatchMode):
    """Notes the names of the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_looks_on_sees_each_op(kernels: HostKernels) -> None:
    x = numbers(16).requires_grad_()
    tape = new_tape()
    result = tape.run(PlannedModule("", nn.Identity(), {"aten.mul": True}), lambda x: ((x * x) * x).sin(), (x,), {})
    tape.close()
    with Ops() as ops:
        result.sum().backward()
    assert kernels.programs == []
    # Two that are replayed, and those of the gradients.
    assert ops.names.count("aten.mul.Tensor") == 2 + 5


def test_what_would_take_more_memory_at_once_is_replayed_op_by_op(kernels: HostKernels) -> None:
    """The sine goes when it is narrowed; in one kernel it would be there beside both results."""

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin().to(torch.bfloat16) * y).cos()

    x, y = numbers(16, dtype=torch.float32), numbers(16, seed=1)
    dropped = ("aten.sin", "aten._to_copy", "aten.mul")
    assert_same_bits(gradients(forward, x, y, dropped=dropped), plain_gradients(forward, x, y))
    assert kernels.programs == []

    # Where somebody else has it, it does not go.
    def forward_with_reader(x: Tensor, y: Tensor) -> Tensor:
        wide = x.sin()
        other = wide.exp()
        return (wide.to(torch.bfloat16) * y).cos() + other

    gradients(forward_with_reader, x, y, dropped=(*dropped, "aten.exp"))
    assert kernels.programs == ["f32 flat;bf16 flat;aten._to_copy bf16 kept i0;aten.mul bf16 kept v0 i1;"]


def test_a_written_input_is_an_error_as_ever(kernels: HostKernels) -> None:
    x, other = numbers(16).requires_grad_(), numbers(16)
    tape = new_tape()
    planned = PlannedModule("", nn.Identity(), {"aten.mul": True})
    result = tape.run(planned, lambda x: ((x * other) * other).sin(), (x,), {})
    tape.close()
    other.add_(1)
    with pytest.raises(memfit.errors.StaleValueError, match="was changed between"):
        result.sum().backward()


@pytest.mark.parametrize("example", ZOO, ids=str)
def test_models_have_the_same_bits(kernels: HostKernels, example: Example) -> None:
    plain = trace_steps(example.build(), training=True, context=example.context)
    model, batch, loss = example.build()
    with applied(model, every_value(example)):
        fused = trace_steps((model, batch, loss), training=True, context=example.context)
    assert_same(plain, fused)


OTHERS = ("aten.sin", "aten.exp", "aten.cat")
SHAPES = ((4, 16), (2, 4, 16), (2, 2, 8, 8))


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Draw ops by what they take of the results before them."""
    num_ops = draw(st.integers(2, 7))
    names = ["add", "sub", "mul", "div", "neg", "bf16", "f16", "f32", "view", "half", "row", "column", "sin", "exp"]
    kinds = st.sampled_from(names)
    return [(draw(kinds), draw(st.integers(0, 99)), draw(st.integers(0, 99))) for _ in range(num_ops)]


def run_chain(chain: list[tuple[Any, ...]], x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    made = [x.exp(), x]
    for kind, first, second in chain:
        a, b = made[first % len(made)], made[second % len(made)]
        if kind in ("bf16", "f16", "f32"):
            made.append(a.to({"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[kind]))
        elif kind in ("neg", "sin", "exp"):
            made.append(getattr(torch, kind)(a))
        elif kind == "view":
            made.append(a.transpose(0, 1).contiguous().transpose(0, 1) if second % 2 else a.reshape(-1).view(a.shape))
        elif kind == "half":
            made.append(torch.cat([a.chunk(2, -1)[0] * b.chunk(2, -1)[1]] * 2, -1))
        elif kind == "row":
            made.append(a * row)
        elif kind == "column":
            made.append(a * column)
        else:
            made.append(getattr(torch, kind)(a, b))
    total = made[-1].cos()
    for (_, first, _), one in zip(chain, made[1:], strict=False):
        if first % 2:
            total = total + one.cos()
    return total


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chain=chains(), how_many=st.integers(1, len(POINTWISE_OPS)))
def test_no_chain_takes_more_memory_than_op_by_op(
    kernels: HostKernels, chain: list[tuple[Any, ...]], how_many: int
) -> None:
    x, row, column = numbers(64, 64), numbers(64, seed=1), numbers(64, 1, seed=2)

    def forward(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return run_chain(chain, x, row, column)

    native = native_module()
    kernels.start(native)
    dropped = OTHERS + tuple(POINTWISE_OPS)[:how_many]
    # What trying a kernel takes, it takes once.
    gradients(forward, x, row, column, dropped=dropped)
    fused = peak_of_backward(forward, x, row, column, dropped=dropped)
    native.fuse_nothing()
    op_by_op = peak_of_backward(forward, x, row, column, dropped=dropped)
    # Numbers that take part are made tensors.
    assert fused <= op_by_op + 64


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chain=chains(), which=st.integers(0, len(SHAPES) - 1), how_many=st.integers(1, len(POINTWISE_OPS)))
def test_any_chain_has_the_same_bits(
    kernels: HostKernels, chain: list[tuple[Any, ...]], which: int, how_many: int
) -> None:
    shape = SHAPES[which]
    x, row, column = numbers(*shape), numbers(shape[-1], seed=1), numbers(*shape[:-1], 1, seed=2)

    def forward(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return run_chain(chain, x, row, column)

    dropped = tuple(POINTWISE_OPS)[:how_many]
    assert_same_bits(gradients(forward, x, row, column, dropped=dropped), plain_gradients(forward, x, row, column))
