"""Trains the example's Llama with torchtitan's Trainer on the CPU, and prints the losses and peaks of its steps.

torchtitan takes a CUDA device where there is no other one, so that it is given the CPU as one. Its 0.3.0 also calls a
function that torch has after 2.13 only.
"""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from typing import Any

import torch
import torch.distributed

cpu = types.ModuleType("cpu")
vars(cpu).update({name: getattr(torch.cpu, name) for name in dir(torch.cpu)})
cpu.get_device_name = lambda device=None: "CPU"
cpu.current_device = lambda: 0
cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**34, name="CPU")
cpu.memory_stats = lambda device=None: Counter()
cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda name: cpu
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = lambda timeout, group: None

from examples.torchtitan_trainer import small_llama  # noqa: E402
from tests.integrations.step_peaks import StepPeaks  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from memfit.integrations.torchtitan import MemfitAC  # noqa: E402


class Watched(Trainer):
    """Notes the loss and the peak of each step but the first, in which the step is fitted."""

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        self.losses: list[float] = []
        self.peaks = StepPeaks()
        self.metrics_processor.should_log = lambda step: True
        self.metrics_processor.log = lambda step, loss, *args, **kwargs: self.losses.append(loss)

    def train_step(self, data_iterator: Any) -> None:
        if len(self.losses) == 1:
            self.peaks.begin(self.model_parts[0], self.optimizers.optimizers[0])
        super().train_step(data_iterator)
        if len(self.losses) > 1:
            self.peaks.end_step()

    def train(self) -> None:
        super().train()
        self.peaks.end()


def main(folder: str, budget: str, **training: Any) -> None:
    torch.set_num_threads(1)
    policy: ActivationCheckpointing.Config | None = MemfitAC.Config(budget=int(budget)) if int(budget) else None
    config = small_llama(folder, policy=policy, **training)
    config.debug.seed = 1
    config.checkpoint = CheckpointManager.Config(enable=True, interval=8, last_save_model_only=False)
    trainer = Watched(config)
    trainer.train()
    print(json.dumps({"losses": trainer.losses, "tokens": trainer.ntokens_seen, "peaks": trainer.peaks.peaks}))
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], **json.loads(sys.argv[3]))
