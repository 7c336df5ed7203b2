"""Whole steps with compiled blocks: peaks by the allocator's events, gradients bit for bit, models left as they were.

Each model is compiled once, with few partitions; compiling takes seconds on a CPU.
"""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.compiled.compiled_models import (
    WIDTH,
    BranchingBlock,
    CountingBlock,
    DropoutBlock,
    RoutingBlock,
    SmallBlock,
    SmallBlocks,
    dropout_model,
    small_model,
)
from tests.compiled.measured_models import Case, compiled_profile, gradients, measured, same
from tests.loop_peaks import peaks_of_steps
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture.recording.blocks import find_blocks
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.compiled.partition_menus import LEAST
from memfit.planning.partitions.partition_mix import PartitionMix
from memfit.profiling import with_compiled_blocks
from memfit.progress import Quiet
from memfit.runtime.compiling.planned_blocks import PlannedBlocks


@pytest.fixture(scope="module", params=["gpt", "llama", "experts", "dropout"])
def case(request: pytest.FixtureRequest) -> Case:
    return measured(request.param)


@pytest.fixture(scope="module")
def with_dropout() -> Case:
    return measured("dropout")


class OtherBlock(SmallBlock):
    """A block that no other test compiles."""

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def test_compiled_code_keeps_neither_activations_nor_weights_alive() -> None:
    model = SmallBlocks(2)
    model.blocks = nn.ModuleList(OtherBlock() for _ in range(2))
    weight = weakref.ref(model.blocks[0].up.weight)
    batch = torch.ones(64, WIDTH)
    before = num_activations()
    memfit.profile(model, batch, compile=True)
    assert num_activations() == before
    del model
    gc.collect()
    assert weight() is None


def num_activations() -> int:
    """Return how many tensors of a batch's rows there are, fake ones left out."""
    gc.collect()
    return sum(type(found) is Tensor and found.shape[:1] == (64,) for found in gc.get_objects())


def test_peaks_are_as_predicted_and_gradients_those_of_the_step_that_saves_everything(case: Case) -> None:
    plans = [case.plan(share) for share in (1.0, 0.5, 0.0)]
    with memfit.apply(case.model, plans[0]):
        expected = gradients(case.model, case.batch)
    counted = [buffer.clone() for buffer in case.model.buffers()]
    peaks = []
    for plan in plans:
        with memfit.apply(case.model, plan):
            # Running statistics and counters are counted once a step, whatever is computed again.
            for buffer, content in zip(case.model.buffers(), counted, strict=True):
                buffer.copy_(content)
            assert same(expected, gradients(case.model, case.batch))
            of_plan = [buffer.clone() for buffer in case.model.buffers()]
            num_steps = 3 if plan is plans[-1] else 1
            found = peaks_of_steps(case.model, case.batch, lambda loss: loss, num_steps=num_steps)
        peaks.append(max(found))
        assert plan.budget_bytes is not None
        assert max(found) <= plan.budget_bytes
        assert max(found) == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
        if plan is plans[0]:
            statistics = of_plan
        assert same(statistics, of_plan)
    assert peaks[0] > peaks[1] > peaks[2]


@pytest.mark.parametrize(("name", "output_width"), [("outputs", WIDTH), ("passed on", 4 * WIDTH)])
def test_outputs_that_blocks_save_count_once_in_any_mixture(name: str, output_width: int) -> None:
    """An output may be held by the block that made it, by the one that reads it, by both or by none."""
    model, batch, profile = measured(name)
    assert profile.compiled is not None
    (kind,) = profile.compiled.kinds
    mix = PartitionMix(profile.compiled)
    outputs = {each.output_bytes for block in profile.compiled.blocks for each in block.measured}
    assert outputs == {0, 4 * len(batch) * output_width}
    for choice in itertools.product(range(len(kind.partitions)), repeat=len(kind.blocks)):
        partitions = {path: kind.partitions[place] for path, place in zip(kind.blocks, choice, strict=True)}
        with PlannedBlocks(model, partitions):
            (peak,) = peaks_of_steps(model, batch, lambda loss: loss, num_steps=1)
        assert peak == pytest.approx(mix.peak_bytes(choice), rel=0.01)


def test_verification_says_what_it_compares_with(with_dropout: Case) -> None:
    verification = memfit.verify(with_dropout.model, with_dropout.plan(0.0), with_dropout.batch)
    assert verification.gradients_equal
    assert verification.plain_reproducible
    assert verification.compared_with == "compiled step that saves everything"
    assert verification.within_budget
    assert abs(verification.peak_miss) < 0.02


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchs_own_memory_budget_draws_random_numbers_anew(with_dropout: Case) -> None:
    """Why random ops are always saved here: with torch's budget of 0, gradients of a block with dropout are off."""
    block = DropoutBlock()
    batch = torch.randn(64, WIDTH)

    def gradient(memory_budget: float) -> Tensor:
        torch._dynamo.reset_code(DropoutBlock.forward.__code__)
        block.zero_grad()
        torch.manual_seed(3)
        with torch._functorch.config.patch(activation_memory_budget=memory_budget):
            torch.compile(block, backend="aot_eager_decomp_partition")(batch).sum().backward()
        assert block.up.weight.grad is not None
        return block.up.weight.grad.clone()

    saved, recomputed = gradient(1.0), gradient(0.0)
    assert (recomputed - saved).norm() > 0.1 * saved.norm()


def test_a_step_with_dropout_is_recomputed_with_the_same_random_numbers(with_dropout: Case) -> None:
    model, batch, _ = with_dropout
    plan = with_dropout.plan(0.0)
    assert plan.compiled is not None
    assert set(plan.compiled.choice.values()) != {"everything"}
    with memfit.apply(model, plan):
        recomputed = gradients(model, batch)
    with memfit.apply(model, memfit.plan(with_dropout.profile, budget="1GiB")):
        fastest = gradients(model, batch)
    assert same(recomputed, fastest)
    assert not same(recomputed[:-1], gradients(model, batch, seed=6)[:-1])


def test_profiling_leaves_running_statistics_and_random_numbers_alone() -> None:
    model, batch = dropout_model()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    random_state = torch.get_rng_state()
    step = TrainingStep(model, StepArguments(batch, None, None, None, None, "fresh"))
    with_compiled_blocks(memfit.profile(model, batch), step, num_cuts=2)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plan_from_a_file_runs_on_a_new_model_without_compiling_again(with_dropout: Case, tmp_path: Path) -> None:
    plan = with_dropout.plan(0.5)
    plan.save(tmp_path / "plan.json")
    with memfit.apply(with_dropout.model, plan):
        expected = gradients(with_dropout.model, with_dropout.batch)
    model, batch = dropout_model()
    model.load_state_dict(with_dropout.model.state_dict())
    with torch.compiler.set_stance("fail_on_recompile"), memfit.apply(model, memfit.Plan.load(tmp_path / "plan.json")):
        again = gradients(model, batch)
    assert same(expected, again)


def test_a_removed_plan_leaves_the_eager_model(with_dropout: Case) -> None:
    model, batch, _ = with_dropout
    eager = gradients(model, batch)
    names = [set(vars(module)) for module in model.modules()]
    applied = memfit.apply(model, with_dropout.plan(0.0))
    assert not same(eager, gradients(model, batch))
    applied.remove()
    assert same(eager, gradients(model, batch))
    assert [set(vars(module)) for module in model.modules()] == names


@pytest.fixture(scope="module")
def small() -> Case:
    return measured("small")


# What dynamo warns of itself while the user's own functions are compiled.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", ["block.compile()", "torch.compile(block)"])
def test_blocks_that_the_user_compiled_are_planned_and_given_back(small: Case, how: str) -> None:
    model, batch = small_model()
    for number, block in enumerate(model.blocks):
        if how == "block.compile()":
            block.compile(backend="eager")
        else:
            model.blocks[number] = torch.compile(block, backend="eager")
    theirs = [(set(vars(block)), block._compiled_call_impl) for block in model.blocks]
    profile = compiled_profile(model, batch)
    assert profile.compiled is not None
    assert {kind.name for kind in profile.compiled.kinds} == {"SmallBlock"}
    with memfit.apply(small.model, small.plan(0.0)):
        expected = gradients(small.model, batch)
    with memfit.apply(model, memfit.plan(profile, budget=small.plan(0.0).predicted_peak_bytes)):
        assert same(expected, gradients(model, batch))
    assert [(set(vars(block)), block._compiled_call_impl) for block in model.blocks] == theirs


def test_modules_that_the_user_compiled_are_alike_by_their_own_class() -> None:
    modules = [SmallBlock(), SmallBlock(), CountingBlock(), nn.Sequential(nn.Linear(2, 2))]
    model = nn.Sequential(*(torch.compile(module) for module in modules[1:]), modules[0])
    assert find_blocks(model, [path for path, _ in model.named_modules()]) == ["0", "3"]


@pytest.mark.parametrize("how", ["model.compile()", "torch.compile(model)"])
def test_a_model_that_is_compiled_as_a_whole_is_refused(how: str) -> None:
    model, batch = small_model()
    if how == "model.compile()":
        model.compile()
    else:
        model = torch.compile(model)
    with pytest.raises(memfit.InvalidParameterError, match="is compiled as a whole"):
        memfit.fit(model, batch, budget="1GiB", compile=True)
    with pytest.raises(memfit.InvalidParameterError, match="is compiled as a whole"):
        memfit.profile(model, batch, compile=True)


def test_hooks_on_blocks_run_once_and_checkpointing_inside_blocks_goes_on(small: Case) -> None:
    model, batch = small_model()

    def checkpointed(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(plain, x, use_reentrant=False)

    for block in model.blocks:
        block.forward = checkpointed(block.forward)
    seen: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.blocks[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    expected = gradients(model, batch)
    profile = compiled_profile(model, batch)
    assert profile.compiled is not None
    assert dict(profile.compiled.not_compiled) == {}
    least = memfit.frontier(profile, points=2)[-1].peak_bytes
    with memfit.apply(model, memfit.plan(profile, budget=least)):
        seen.clear()
        assert same(expected, gradients(model, batch))
    assert seen == ["forward", "backward"]


def test_steps_without_gradients_run_in_eager(with_dropout: Case) -> None:
    model, batch, _ = with_dropout
    model.eval()
    try:
        with torch.no_grad():
            eager = model(batch)
            with memfit.apply(model, with_dropout.plan(0.0)):
                assert torch.equal(model(batch), eager)
    finally:
        model.train()


def test_fit_keeps_the_budget_with_compiled_blocks(with_dropout: Case) -> None:
    model, batch = dropout_model()
    eager = gradients(model, batch)
    budget = with_dropout.plan(0.4).predicted_peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = memfit.fit(model, batch, budget=budget, compile=True)
        with torch.compiler.set_stance("fail_on_recompile"):
            fitted = memfit.fit(model, batch, budget=budget, compile=True)
    assert fitted.plan.compiled is not None
    assert fitted.verification.holds
    assert fitted.verification.peak_bytes <= budget
    assert "compiled" in repr(fitted.plan)
    fitted.remove()
    assert same(eager, gradients(model, batch))


def test_auto_keeps_the_faster_of_both() -> None:
    model, batch = small_model()
    with warnings.catch_warnings():
        # The plain step may be the faster.
        warnings.filterwarnings("ignore", message="the plan changes nothing")
        fitted = memfit.fit(model, batch, budget="1GiB", compile="auto")
    with fitted:
        assert fitted.verification.holds
        assert ("compiled" in repr(fitted.plan)) is (fitted.plan.compiled is not None)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (BranchingBlock, "Data-dependent branching: Detected data-dependent branching"),
        (RoutingBlock, "Could not guard on data-dependent expression"),
        (CountingBlock, "its forward changes a number in its code from step to step"),
    ],
)
def test_blocks_that_cannot_be_compiled_stay_in_eager_and_say_why(block: type[nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(3)))
    batch = torch.randn(8, WIDTH)
    step = TrainingStep(model, StepArguments(batch, torch.sum, None, None, None, "fresh"))
    profile = memfit.profile(model, batch, loss=torch.sum)
    compiled = with_compiled_blocks(profile, step, num_cuts=2).compiled
    assert compiled is not None
    assert compiled.kinds == ()
    assert set(compiled.not_compiled) == {"0", "1", "2"}
    assert compiled.not_compiled["0"].startswith(reason)
    with pytest.warns(UserWarning, match="3 blocks stay in eager"), pytest.warns(match="the plan changes nothing"):
        fitted = memfit.fit(model, batch, loss=torch.sum, budget=profile.peak_bytes, compile=True)
    assert fitted.plan.compiled is None
    assert fitted.verification.holds


class _NoCompilerForMenus(Quiet):
    """Takes the C++ compiler away once the blocks were compiled for the first time."""

    def stage(self, name: str, num_steps: int | None = None) -> None:
        if name == "compiling blocks" and num_steps is not None:
            inductor_config.cpp.cxx = ("no-such-compiler",)


# Code that an earlier run of the test left in a cache needs no compiler.
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_partitions_that_cannot_be_compiled_are_left_out_with_a_warning() -> None:
    torch.manual_seed(0)
    # Of a width of its own, so that no other test has compiled it.
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH + 8, WIDTH + 8), nn.GELU()) for _ in range(3)))
    step = TrainingStep(model, StepArguments(torch.randn(4, WIDTH + 8), torch.sum))
    profile = memfit.profile(model, step.batch, loss=torch.sum)
    with (
        inductor_config.patch({"force_disable_caches": True, "cpp.cxx": inductor_config.cpp.cxx}),
        pytest.warns(UserWarning, match="partitions are left out, since compiling a block failed with them"),
    ):
        compiled = with_compiled_blocks(profile, step, _NoCompilerForMenus(), num_cuts=2).compiled
    assert compiled is not None
    assert [partition.name for kind in compiled.kinds for partition in kind.partitions] == [LEAST.name]
    assert compiled.not_compiled == {}


_drifting = itertools.count(1)


class DriftingBlocks(SmallBlocks):
    """Returns another multiple of its loss each time, by a counter that nobody puts back."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        return super().forward(x) * next(_drifting)


def test_partitions_with_other_gradients_than_the_first_are_not_in_the_menu(small: Case) -> None:
    model = DriftingBlocks()
    compiled = compiled_profile(model, small.batch).compiled
    assert compiled is not None
    assert compiled.kinds
    assert {each.name for kind in compiled.kinds for each in kind.partitions} == {"everything"}


def test_what_a_block_raises_is_passed_on_and_the_block_stays_compiled(small: Case) -> None:
    model, batch = small.model, small.batch
    with warnings.catch_warnings(), memfit.apply(model, small.plan(0.0)):
        warnings.simplefilter("error")
        expected = gradients(model, batch)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model.blocks[1](batch[:, 1:])
        with torch.compiler.set_stance("fail_on_recompile"):
            assert same(expected, gradients(model, batch))


def test_compile_is_true_false_or_auto() -> None:
    with pytest.raises(memfit.InvalidParameterError, match="compile is True, False or \"auto\"; got 'always'"):
        memfit.fit(nn.Linear(2, 2), torch.ones(1, 2), budget="1GiB", compile="always")  # type: ignore[arg-type]
