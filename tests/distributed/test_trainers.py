"""Trainers of other packages in two processes: ten steps as without memfit, within the budget, saved and resumed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.models import sharded
from tests.distributed.ranks_at_work import NUM_RANKS, RanksAtWork
from torch import Tensor, nn

BUDGET_SHARE = 0.9


@contextmanager
def as_started_by_torchrun(rank: int) -> Iterator[None]:
    """Set what torchrun sets in the environment: trainers read it, whether or not there is a process group already."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS}
    names |= {"GROUP_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "tests"}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def budget_of(peaks: list[int]) -> int:
    """Return a share of the peak of the fullest rank."""
    of_ranks: list[int] = [0] * NUM_RANKS
    torch.distributed.all_gather_object(of_ranks, max(peaks))
    return int(BUDGET_SHARE * max(of_ranks))


def weights(model: nn.Module) -> list[Tensor]:
    return [getattr(weight, "full_tensor", lambda weight=weight: weight)().detach() for weight in model.parameters()]


def agree(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, weights(a), weights(b)))


def found_of(fitted: Any, peaks: list[int], budget_bytes: int, **checks: bool) -> dict[str, Any]:
    """Return what a rank reports: the plan, whether each step was within the budget, and what else was checked."""
    return {
        "plan": {name: str(decision) for name, decision in fitted.plan.decisions.items()},
        "changes": fitted.plan.changes_anything,
        "holds": fitted.verification.holds,
        "within": len(peaks) == 10 and max(peaks) <= budget_bytes,
        **checks,
    }


def train_with_transformers(rank: int, folder: str) -> dict[str, Any]:
    from examples.transformers_trainer import new_trainer
    from tests.integrations.test_transformers_trainer import Watched, logged
    from transformers import Trainer, TrainerCallback

    from memfit.integrations.transformers import MemfitCallback

    def trainer(callbacks: list[TrainerCallback]) -> Trainer:
        options = {"max_steps": 10, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 8}
        return new_trainer(folder, callbacks, ddp_backend="gloo", **options)

    with as_started_by_torchrun(rank):
        plain_peaks, watched = Watched(), Watched()
        plain = trainer([plain_peaks])
        plain.train()
        budget_bytes = budget_of(plain_peaks.step_peaks.peaks)
        callback = MemfitCallback(budget_bytes)
        planned = trainer([callback, watched])
        planned.train()
        resumed = trainer([MemfitCallback(budget_bytes)])
        resumed.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-8"))
    return found_of(
        callback.fitted,
        watched.step_peaks.peaks,
        budget_bytes,
        is_wrapped=isinstance(planned.model_wrapped, nn.parallel.DistributedDataParallel),
        losses_agree=logged(planned) == logged(plain),
        weights_agree=agree(planned.model, plain.model),
        resumed_agrees=agree(resumed.model, plain.model),
    )


def train_with_lightning(rank: int, folder: str, shards: bool) -> dict[str, Any]:
    import lightning.pytorch as lightning
    from examples.lightning_module import Regression, train
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from tests.integrations.test_lightning_trainer import Watched

    from memfit.integrations.lightning import MemfitCallback

    class Sharded(Regression):
        def configure_model(self) -> None:
            if not hasattr(self, "is_sharded"):
                self.is_sharded = True
                sharded(self)

    def trained(*callbacks: lightning.Callback, **options: Any) -> Regression:
        strategy = (
            ModelParallelStrategy(data_parallel_size=NUM_RANKS, tensor_parallel_size=1) if shards else DDPStrategy()
        )
        module = Sharded() if shards else Regression()
        options = {"strategy": strategy, "devices": NUM_RANKS, "max_epochs": -1, **options}
        return train(module, callbacks, max_steps=10, **options)

    with as_started_by_torchrun(rank):
        plain_peaks, watched = Watched(), Watched()
        plain = trained(plain_peaks)
        budget_bytes = budget_of(plain_peaks.step_peaks.peaks)
        callback = MemfitCallback(budget_bytes)
        checkpoints = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=8)
        planned = trained(callback, watched, checkpoints, enable_checkpointing=True)
        (saved,) = Path(folder).glob("*.ckpt")
        resumed = trained(MemfitCallback(budget_bytes), checkpoint=str(saved))
        plainly_resumed = trained(checkpoint=str(saved))
    return found_of(
        callback.fitted,
        watched.step_peaks.peaks,
        budget_bytes,
        losses_agree=planned.losses == plain.losses,
        weights_agree=agree(planned, plain),
        resumed_agrees=resumed.losses == plainly_resumed.losses
        and len(resumed.losses) == 2
        and agree(resumed, plainly_resumed),
    )


def train_with_accelerate(rank: int, folder: str) -> dict[str, Any]:
    from tests.integrations.step_peaks import StepPeaks
    from tests.integrations.test_accelerate_loop import loss_of, prepared, steps

    from memfit.integrations.accelerate import fit_prepared

    def batch(number: int) -> Tensor:
        return torch.randn(128, 16, generator=torch.Generator().manual_seed(NUM_RANKS * number + rank))

    with as_started_by_torchrun(rank):
        plain_peaks, watched = StepPeaks(), StepPeaks()
        plain = prepared()
        losses = steps(plain, 10, plain_peaks, batch_of=batch)
        budget_bytes = budget_of(plain_peaks.peaks)
        parts = prepared()
        fitted = fit_prepared(*parts[:3], batch(0), loss=loss_of, budget=budget_bytes)
        planned_losses = steps(parts, 10, watched, batch_of=batch)
        parts[0].save_state(folder)
        resumed = prepared()
        fit_prepared(*resumed[:3], batch(0), loss=loss_of, budget=budget_bytes)
        resumed[0].load_state(folder)
        later = steps(plain, 2, batch_of=batch), steps(resumed, 2, batch_of=batch)
    return found_of(
        fitted,
        watched.peaks,
        budget_bytes,
        is_wrapped=isinstance(parts[1], nn.parallel.DistributedDataParallel),
        losses_agree=planned_losses == losses,
        weights_agree=agree(resumed[1], plain[1]),
        resumed_agrees=later[0] == later[1],
    )


@pytest.mark.parametrize(
    ("package", "train"),
    [
        ("accelerate", train_with_transformers),
        ("accelerate", train_with_accelerate),
        ("lightning", functools.partial(train_with_lightning, shards=False)),
        ("lightning", functools.partial(train_with_lightning, shards=True)),
    ],
    ids=["transformers", "accelerate", "lightning", "lightning with FSDP2"],
)
def test_ten_steps_of_a_trainer_are_the_plain_ones_in_all_ranks(
    package: str, train: Callable[..., dict[str, Any]], ranks: RanksAtWork, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    first, second = ranks.run(train, str(tmp_path))
    assert first == second
    assert first.pop("plan")
    assert first == dict.fromkeys(first, True)
