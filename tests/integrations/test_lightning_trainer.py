"""`MemfitCallback` in Lightning: losses as without, peaks within the budget, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as lightning
import torch
from examples.lightning_module import Block, Regression, train
from lightning.pytorch.utilities import CombinedLoader
from tests.integrations.step_peaks import StepPeaks
from torch import Tensor, nn

from memfit.integrations.lightning import MemfitCallback

# torch and the frameworks warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore")
BUDGET = "270KiB"


class Watched(lightning.Callback):
    """The peak of each step."""

    def __init__(self) -> None:
        self.step_peaks = StepPeaks()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step_peaks.begin(pl_module, trainer.optimizers[0])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.step_peaks.end_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.step_peaks.end()


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = lightning.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2)
    train(Regression(), [MemfitCallback(BUDGET), checkpoint], max_steps=2, enable_checkpointing=True)
    (saved,) = tmp_path.glob("*.ckpt")
    resumed = train(Regression(), [MemfitCallback(BUDGET)], checkpoint=str(saved), max_steps=4)
    plain = train(Regression(), [], checkpoint=str(saved), max_steps=4)
    assert resumed.losses == plain.losses
    assert len(plain.losses) == 2


class ByHand(Regression):
    """Two optimizers, a schedule that counts its steps, and a list that grows with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(Block(16), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        made = self.blocks(batch)
        second.zero_grad()
        self.manual_backward((self.critic(made.detach()) - self.critic(batch)).mean())
        second.step()
        first.zero_grad()
        loss = -self.critic(made).mean()
        self.manual_backward(loss)
        first.step()
        self.lr_schedulers().step()
        self.losses.append(loss.item())

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizers = torch.optim.Adam(self.blocks.parameters()), torch.optim.SGD(self.critic.parameters(), lr=0.1)
        return list(optimizers), [torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.1, total_steps=11)]


class Accumulating(Regression):
    """Steps its optimizer in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = self.blocks(batch).square().mean()
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return {"loss": loss.detach()}


class Zeroing(Regression):
    """Takes a row from each of two loaders, and fills gradients with zeros."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch["one"] + batch["other"], batch_idx)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class Lengths(torch.utils.data.Dataset[Tensor]):
    """Batches of two sizes, and larger ones after those that are looked at before training."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        num_rows = 16 + index % 2 * 8 if index < 8 else 64
        return torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(index))


def losses_both_ways(make: Callable[[], Regression], share: float, **options: Any) -> list[float]:
    """Train plainly and within ``share`` of the peak of that; check that losses agree and each step is within it."""
    plain_peaks = Watched()
    plain = train(make(), [plain_peaks], **options)
    budget_bytes = int(share * max(plain_peaks.step_peaks.peaks))
    callback, watched = MemfitCallback(budget_bytes), Watched()
    fitted = train(make(), [callback, watched], **options)
    assert fitted.losses == plain.losses
    assert all(map(torch.equal, fitted.parameters(), plain.parameters()))
    assert callback.fitted is not None
    assert callback.fitted.verification.gradients_equal
    assert max(watched.step_peaks.peaks) <= budget_bytes
    return plain.losses


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}], ids=str)
def test_ten_steps_are_those_of_plain_training_and_each_is_within_the_budget(options: dict[str, Any]) -> None:
    options = {"max_steps": 10, "max_epochs": -1, "gradient_clip_val": 1.0, **options}
    assert len(losses_both_ways(Regression, 0.9, **options)) == 10 * options.get("accumulate_grad_batches", 1)


def test_manual_optimization_with_several_optimizers_is_measured_as_it_is() -> None:
    assert len(losses_both_ways(ByHand, 0.9, max_steps=20, max_epochs=-1)) == 10


def test_a_module_that_steps_its_optimizer_in_some_steps_only_is_within_the_budget_in_all() -> None:
    assert len(losses_both_ways(Accumulating, 0.9, max_steps=4, max_epochs=-1)) == 8


def test_gradients_are_cleared_as_the_module_says_and_several_loaders_give_one_batch() -> None:
    rows = [torch.randn(512, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    loaders = [torch.utils.data.DataLoader(each, batch_size=64, shuffle=True) for each in rows]
    loader = CombinedLoader(dict(zip(("one", "other"), loaders, strict=True)), "min_size")
    assert len(losses_both_ways(Zeroing, 0.9, max_steps=4, loader=loader)) == 4


def test_larger_batches_are_planned_for_when_they_come() -> None:
    loader = torch.utils.data.DataLoader(Lengths(), batch_size=None)
    with pytest.warns(UserWarning, match="a batch of size 64 is larger than the largest that was planned for"):
        losses_both_ways(Regression, 0.9, max_steps=10, loader=loader)
