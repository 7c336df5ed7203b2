"""The traps of the design, one test (at least) each, with the trap's number in its name.

Every model here is the smallest that falls into the trap. The zoo runs the same engine on real models.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.engine.plans import dropping
from tests.engine.zoo.example import quiet_compilation
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.runtime.allocation_meter import AllocationMeter
from memfit.runtime.torch_internals import DispatchMode

WIDTH = 8


class Model(nn.Module):
    """A model made of a function of its input and one weight."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight).square().sum()


class Ops(DispatchMode):
    """Counts the ops that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(op)] += 1
        return op(*args, **(kwargs or {}))


def batch() -> Tensor:
    return torch.linspace(-2, 2, 4 * WIDTH).reshape(4, WIDTH)


def plan_all(model: nn.Module, x: Any, **options: Any) -> memfit.Plan:
    return memfit.plan(memfit.profile(model, x), strategy=memfit.NoCheckpointing(), force_recompute=["*"], **options)


def gradients(model: nn.Module, x: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_same_as_plain(model: nn.Module, x: Any) -> memfit.Plan:
    """Assert that the model's gradients are the plain ones when all that can be is recomputed."""
    plain = gradients(model, x)
    plan = plan_all(model, x)
    assert memfit.Decision.RECOMPUTE in plan.decisions.values()
    with memfit.apply(model, plan):
        planned = gradients(model, x)
    assert len(plain) == len(planned) > 0
    for expected, got in zip(plain, planned, strict=True):
        assert torch.equal(expected, got)
    return plan


# 1. Values are told apart, whatever form they are saved in and whatever address they had.


def test_trap_01_a_reused_address_is_not_mistaken_for_the_value_that_was_there() -> None:
    addresses = []

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        total = x @ weight
        for step in range(20):
            # Made and dropped, so that the allocator hands its address to a later one: it is large enough for that.
            passing = (x + step).exp()
            addresses.append(passing.data_ptr())
            total = total + passing @ weight
            del passing
        return total

    assert_same_as_plain(Model(compute), batch().repeat(512, 1))
    assert len(set(addresses)) < len(addresses)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, weight: (x @ weight).exp(),  # saves its own output
        lambda x, weight: (x @ weight).t() @ x,  # saves a view
        lambda x, weight: (x @ weight)[1:, ::2].contiguous() * weight[0, ::2],
        lambda x, weight: functional.gelu((x @ weight).detach() + weight[0]),  # a detached alias in between
    ],
    ids=["own output", "transposed view", "strided view", "detached alias"],
)
def test_trap_01_a_value_is_known_in_any_form(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_same_as_plain(Model(compute), batch())


# 2. Memory returns to where it was without the garbage collector.


@contextmanager
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def block_model(num_blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1)

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    return Blocks()


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": memfit.Full()},
        {"strategy": memfit.NoCheckpointing(), "force_recompute": ["*"]},
        {"strategy": memfit.NoCheckpointing(), "force_recompute": ["*::aten.gelu"]},
    ],
    ids=["blocks", "all", "gelu"],
)
def test_trap_02_fifty_steps_end_with_the_bytes_they_began_with(options: dict[str, Any]) -> None:
    model, x = block_model(), batch()
    plan = memfit.plan(memfit.profile(model, x), **options)
    gradients(model, x)
    with memfit.apply(model, plan), without_gc(), AllocationMeter() as meter:
        live = []
        for _ in range(50):
            model.zero_grad()
            model(x).backward()
            live.append(meter.live_bytes)
    assert len(set(live)) == 1
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert live[0] == parameter_bytes  # the gradients, which were made inside


def test_trap_02_a_step_without_backward_lets_go_with_its_loss() -> None:
    model, x = block_model(), batch()
    with memfit.apply(model, plan_all(model, x)), without_gc(), AllocationMeter() as meter:
        loss = model(x)
        assert meter.live_bytes > 0
        del loss
        assert meter.live_bytes == 0


def test_trap_02_an_output_that_outlives_the_step_holds_nothing_else() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return functional.gelu(self.inner(x))

    model, x = Hidden(), batch()
    with memfit.apply(model, plan_all(model, x)), without_gc(), AllocationMeter() as meter:
        output = model(x)
        output.sum().backward()
        model.zero_grad()
        assert meter.live_bytes == output.nbytes


# 3. One op with several outputs is one record.


def test_trap_03_one_replay_fills_all_outputs_of_an_op() -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        largest, order = (x @ weight).sort(dim=1)
        return largest.exp() * order.float().add(1).mul(weight[0]).exp()

    model, x = Model(compute), batch()
    plan = assert_same_as_plain(model, x)
    with memfit.apply(model, plan):
        loss = model(x)
        with Ops() as ops:
            loss.backward()
    assert ops.counts["aten.sort.default"] == 1


def test_trap_03_statistics_are_saved() -> None:
    plan = memfit.plan(memfit.profile(block_model(), batch()), strategy=memfit.Full())
    assert plan.decisions["blocks.0.norm::aten.native_layer_norm#0"] is memfit.Decision.RECOMPUTE
    assert plan.decisions["blocks.0.norm::aten.native_layer_norm#0.1"] is memfit.Decision.SAVE
    assert plan.decisions["blocks.0.norm::aten.native_layer_norm#0.2"] is memfit.Decision.SAVE


# 4. Replay is iterative, and nothing is replayed twice.


def test_trap_04_a_long_chain_replays_without_recursion_each_op_once() -> None:
    num_ops = 3000

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        for _ in range(num_ops):
            y = y.sin()
        return y

    model, x = Model(compute), batch()
    plan = plan_all(model, x)
    plain = gradients(model, x)
    with memfit.apply(model, plan):
        loss = model(x)
        with Ops() as ops:
            loss.backward()
    assert torch.equal(plain[0], model.weight.grad - plain[0])  # added to the plain gradient, and equal to it
    # The last sine is not saved by autograd (its square's input is), every other one is replayed once.
    assert ops.counts["aten.sin.default"] == num_ops
    assert ops.counts["aten.mm.default"] == 2  # once replayed, once for the gradient of the weight


# 5. What a record needs is copied before it is written, or the error names it.


def test_trap_05_a_value_about_to_be_written_is_copied_first() -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        offset = torch.ones(WIDTH)
        y = functional.gelu(x @ weight + offset)
        offset.mul_(100)  # autograd saved nothing of it, but the replay of the sum needs what it was
        return y + offset

    assert_same_as_plain(Model(compute), batch())


def test_trap_05_a_written_part_counts_as_a_write() -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        z = functional.gelu(y.clone())
        y[1:, 2] = 5.0
        return z + functional.gelu(y.clone())

    assert_same_as_plain(Model(compute), batch())


@pytest.mark.parametrize("records_at_root", [False, True])
def test_trap_05_a_write_that_the_profile_did_not_see(records_at_root: bool) -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6))
            self.is_writing = False

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                if self.is_writing:
                    x.mul_(3)
            return x.square().sum()

    model, x = Outside(), batch()
    plan = memfit.plan(
        memfit.profile(model, x),
        strategy=memfit.NoCheckpointing(),
        force_recompute=["*"] if records_at_root else ["blocks.2", "blocks.3"],
    )
    assert ("" in plan.recorded_modules) is records_at_root
    model.is_writing = True
    plain = gradients(model, x)
    with memfit.apply(model, plan):
        assert all(map(torch.equal, gradients(model, x), plain))


@pytest.mark.parametrize("change", ["parameter", "input"])
def test_trap_05_a_changed_tensor_is_named(change: str) -> None:
    class Gelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.shift = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return functional.gelu(x * self.scale + self.shift).sum()

    model, x = Gelu(), batch()
    with memfit.apply(model, plan_all(model, x)):
        loss = model(x)
        with torch.no_grad():
            (model.shift if change == "parameter" else x).add_(1)
        expected = "the parameter 'shift'" if change == "parameter" else r"a tensor of shape \(4, 8\)"
        with pytest.raises(memfit.StaleValueError, match=expected):
            loss.backward()


def test_trap_05_a_saved_tensor_that_changed_is_an_error_as_in_the_plain_step() -> None:
    model, x = block_model(), batch()
    plan = memfit.plan(memfit.profile(model, x), strategy=memfit.NoCheckpointing(), force_recompute=["*::aten.gelu"])
    with memfit.apply(model, plan):
        loss = model(x)
        with torch.no_grad():
            model.blocks[0].down.weight.mul_(2)
        with pytest.raises(memfit.StaleValueError, match=r"the parameter 'blocks\.0\.down\.weight'"):
            loss.backward()


# 6. Random numbers are drawn once.


@pytest.mark.parametrize(
    "draw",
    [
        lambda y: functional.dropout(y, 0.5),
        lambda y: functional.alpha_dropout(y, 0.5, training=True),
        lambda y: y * torch.bernoulli(torch.full_like(y, 0.5)),
        lambda y: y * torch.empty_like(y).normal_(generator=torch.Generator().manual_seed(3)),
    ],
    ids=["dropout", "alpha dropout", "bernoulli", "own generator"],
)
def test_trap_06_random_values_come_back_and_the_generator_stays(draw: Callable[[Tensor], Tensor]) -> None:
    model, x = Model(lambda x, weight: functional.gelu(draw(x @ weight))), batch()
    plan = assert_same_as_plain(model, x)
    torch.manual_seed(7)
    model(x).backward()
    state = torch.get_rng_state()
    with memfit.apply(model, plan):
        torch.manual_seed(7)
        model(x).backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_trap_06_a_dropped_mask_is_replayed_not_saved() -> None:
    model, x = Model(lambda x, weight: functional.dropout(x @ weight, 0.5)), batch()
    plan = plan_all(model, x)
    assert plan.decisions["::aten.bernoulli_#0"] is memfit.Decision.RECOMPUTE
    with memfit.apply(model, plan):
        loss = model(x)
        with Ops() as ops:
            loss.backward()
    assert ops.counts["aten.bernoulli_.float"] == 1


# 7. What is not a function of its inputs is saved.


@torch.library.custom_op("memfit_tests::counted_twice", mutates_args=())
def counted_twice(x: Tensor) -> Tensor:
    num_custom_calls.append(1)
    return x * 2


num_custom_calls: list[int] = []
counted_twice.register_autograd(lambda context, gradient: gradient * 2)


def test_trap_07_ops_of_unknown_namespaces_and_factories_are_saved() -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        canvas = torch.zeros(4, WIDTH)
        return functional.gelu(counted_twice(x @ weight) + canvas)

    model, x = Model(compute), batch()
    plan = assert_same_as_plain(model, x)
    assert plan.decisions["::memfit_tests.counted_twice (no gradients)#0"] is memfit.Decision.SAVE
    assert plan.decisions["::aten.zeros#0"] is memfit.Decision.SAVE
    num_custom_calls.clear()
    with memfit.apply(model, plan):
        model(x).backward()
    assert len(num_custom_calls) == 1


def test_trap_07_ops_that_write_several_arguments_are_saved() -> None:
    model, x = Model(lambda x, weight: functional.rrelu(x @ weight, training=True)), batch()
    plan = assert_same_as_plain(model, x)
    assert plan.decisions["::aten.rrelu_with_noise#0"] is memfit.Decision.SAVE


# 8. Kernels that the dispatcher does not see are found by calibration.


def test_trap_08_a_value_written_behind_the_dispatchers_back_is_saved() -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        # As a raw kernel would: no op, no version, no trace.
        y.detach().numpy()[...] *= 3
        return functional.gelu(y)

    model, x = Model(compute), batch()
    plan = assert_same_as_plain(model, x)
    assert plan.decisions["::aten.mm#0"] is memfit.Decision.SAVE
    assert plan.decisions["::aten.gelu#0"] is memfit.Decision.RECOMPUTE


def test_trap_08_kernels_inside_an_autograd_function_are_not_trusted() -> None:
    class Raw(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            y = x * 1.0
            y.numpy()[...] += 1
            context.save_for_backward(y)
            return y.exp()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            (y,) = context.saved_tensors
            return gradient * y.exp()

    model, x = Model(lambda x, weight: functional.gelu(Raw.apply(x @ weight))), batch()
    plan = assert_same_as_plain(model, x)
    assert plan.decisions["::aten.mul (no gradients)#0"] is memfit.Decision.SAVE


# 9. Views: the base is held, the view replayed.


def test_trap_09_views_of_a_saved_value_hold_it_once() -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        return functional.gelu(y[:, :4]).sum() + functional.gelu(y[:, 4:]).sum() + functional.gelu(y.t()).sum()

    model, x = Model(compute), batch()
    assert_same_as_plain(model, x)
    plan = dropping(memfit.profile(model, x), "*::aten.gelu#*")
    with without_gc():
        with AllocationMeter() as plain_meter:
            loss = model(x)
            plain_bytes = plain_meter.live_bytes
        del loss
        with memfit.apply(model, plan), AllocationMeter() as meter:
            loss = model(x)
            assert loss.requires_grad
            assert meter.live_bytes == plain_bytes


def test_trap_09_views_that_read_the_bits_otherwise() -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x @ weight)
        parts = torch.view_as_real(spectrum)
        return parts.exp().sum(-1) * spectrum.conj().imag.cos()

    assert_same_as_plain(Model(compute), batch())


# 10. Backward in every way it can be called (more of them in test_scenarios.py).


def test_trap_10_two_backwards_through_a_retained_graph() -> None:
    model, x = block_model(), batch()
    plan = plan_all(model, x)

    def twice() -> list[Tensor]:
        torch.manual_seed(7)
        loss = model(x)
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return [*first, *torch.autograd.grad(loss, list(model.parameters()))]

    plain = twice()
    with memfit.apply(model, plan):
        assert all(map(torch.equal, twice(), plain))


def test_trap_10_double_backward() -> None:
    model, x = block_model(), batch().double().requires_grad_()
    model.double()
    plan = plan_all(model, x)

    def penalty() -> list[Tensor]:
        torch.manual_seed(7)
        (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), list(model.parameters()), allow_unused=True))

    plain = penalty()
    with memfit.apply(model, plan):
        planned = penalty()
    for expected, got in zip(plain, planned, strict=True):
        assert expected is got is None or torch.equal(expected, got)


def test_trap_10_a_part_of_the_graph_only() -> None:
    model, x = block_model(), batch()
    plan = plan_all(model, x)

    def partial() -> Tensor:
        torch.manual_seed(7)
        return torch.autograd.grad(model(x), model.blocks[2].up.weight)[0]

    plain = partial()
    with memfit.apply(model, plan):
        assert torch.equal(partial(), plain)


# 11. Other machinery inside a planned planned.


def test_trap_11_a_compiled_block_stays_compiled() -> None:
    num_graphs_run = []

    def counting_backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            num_graphs_run.append(1)
            return graph.forward(*args)

        return run

    model, x = block_model(), batch()
    with quiet_compilation():
        model.blocks[1] = torch.compile(model.blocks[1], backend=counting_backend)
        plain = gradients(model, x)
        plan = plan_all(model, x)
        with memfit.apply(model, plan):
            num_graphs_run.clear()
            assert all(map(torch.equal, gradients(model, x), plain))
            assert num_graphs_run == [1]
        num_graphs_run.clear()
        gradients(model, x)
        assert num_graphs_run == [1]


def test_trap_11_a_compiled_function_inside_a_region_stays_compiled() -> None:
    num_graphs_run = []

    def counting_backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            num_graphs_run.append(1)
            return graph.forward(*args)

        return run

    with quiet_compilation():
        compiled = torch.compile(lambda y: functional.gelu(y) * 2, backend=counting_backend)
        model, x = Model(lambda x, weight: compiled(x @ weight).exp()), batch()
        plan = plan_all(model, x)  # the very first call of the function, inside the recording
        num_graphs_run.clear()
        with memfit.apply(model, plan):
            planned = gradients(model, x)
        assert num_graphs_run == [1]
        assert all(map(torch.equal, planned, gradients(model, x)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_trap_11_torch_checkpoint_inside_a_region(use_reentrant: bool) -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        inner = torch.utils.checkpoint.checkpoint(functional.gelu, x @ weight, use_reentrant=use_reentrant)
        return functional.gelu(inner)

    assert_same_as_plain(Model(compute), batch())


def test_trap_11_tensors_that_are_kept_reach_the_hooks_around_the_step() -> None:
    model, x = block_model(), batch()
    plan = memfit.plan(memfit.profile(model, x), strategy=memfit.NoCheckpointing(), force_recompute=["*::aten.gelu"])
    plain = gradients(model, x)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        num_plain = gradients(model, x) and len(packed)
        packed.clear()
        with memfit.apply(model, plan):
            assert all(map(torch.equal, gradients(model, x), plain))
    assert len(packed) == num_plain - 4  # all but the four results of gelu


def test_trap_11_tensor_subclasses_pass_through() -> None:
    class Tagged(Tensor):
        pass

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        return functional.gelu(x @ weight).as_subclass(Tagged).exp().as_subclass(Tensor)

    assert_same_as_plain(Model(compute), batch())


# 13. Higher-order operators.


def test_trap_13_higher_order_operators_run_and_are_saved() -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        chosen = torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))
        return functional.gelu(chosen)

    with quiet_compilation():
        assert_same_as_plain(Model(compute), batch())


# 14. Replays run where backward asks.


def test_trap_14_backward_in_another_thread() -> None:
    model, x = block_model(), batch()
    plain = gradients(model, x)
    with memfit.apply(model, plan_all(model, x)):
        model.zero_grad()
        torch.manual_seed(7)
        loss = model(x)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert all(torch.equal(p.grad, expected) for p, expected in zip(model.parameters(), plain, strict=True))


def test_trap_14_two_threads_run_backward_through_one_graph_at_once() -> None:
    model, x = block_model(), batch()
    parameters = list(model.parameters())
    with memfit.apply(model, plan_all(model, x)), ThreadPoolExecutor(2) as threads:
        for _ in range(100):
            loss = model(x)
            both_ready = threading.Barrier(2)

            def backward(loss: Tensor = loss, both_ready: threading.Barrier = both_ready) -> tuple[Tensor, ...]:
                both_ready.wait()
                return torch.autograd.grad(loss, parameters, retain_graph=True)

            one, other = threads.submit(backward), threads.submit(backward)
            assert all(torch.equal(a, b) for a, b in zip(one.result(), other.result(), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a CUDA device")
def test_trap_14_forward_on_a_side_stream() -> None:
    model, x = block_model().cuda(), batch().cuda()
    plain = gradients(model, x)
    with memfit.apply(model, plan_all(model, x)):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            planned = gradients(model, x)
        torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, planned, plain))
