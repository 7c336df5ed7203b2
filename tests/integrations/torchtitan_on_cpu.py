"""Trains the example's Llama with torchtitan's Trainer on the CPU, and prints the losses and peaks of its steps.

Without arguments, it runs the example as it stands. torchtitan takes a CUDA device where there is no other one, so that
it is given the CPU as one. Its 0.3.0 also calls a function that torch has after 2.13 only, and imports kernels for
exchanges between GPUs, which need triton.
"""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from typing import Any
from unittest.mock import MagicMock

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
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

import examples.torchtitan_trainer as example  # noqa: E402
from tests.integrations.step_peaks import StepPeaks  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from memfit.integrations.torchtitan import MemfitAC  # noqa: E402


class Watched(Trainer):
    """Notes the loss and the peak of each step; of the first from where the step is fitted, in its forward pass."""

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        self.losses: list[float] = []
        self.peaks = StepPeaks()
        self.metrics_processor.should_log = lambda step: True
        self.metrics_processor.log = lambda step, loss, *args, **kwargs: self.losses.append(loss)
        # Fitting runs steps inside the first one.
        self.num_open = 0
        self.hook = self.model_parts[0].register_forward_pre_hook(self.begin)

    def begin(self, model: torch.nn.Module, _: Any) -> None:
        if self.num_open == 1:
            self.hook.remove()
            self.peaks.begin(model, self.optimizers.optimizers[0])

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        self.num_open += 1
        try:
            return super().forward_backward_step(**batch)
        finally:
            self.num_open -= 1

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.peaks.end_step()

    def train(self) -> None:
        super().train()
        self.peaks.end()


def main(folder: str, budget: str, **training: Any) -> None:
    torch.set_num_threads(1)
    policy: ActivationCheckpointing.Config | None = MemfitAC.Config(budget=int(budget)) if int(budget) else None
    config = example.small_llama(folder, policy=policy, **training)
    config.debug.seed = 1
    config.checkpoint = CheckpointManager.Config(enable=True, interval=8, last_save_model_only=False)
    trainer = Watched(config)
    trainer.train()
    print(json.dumps({"losses": trainer.losses, "tokens": trainer.ntokens_seen, "peaks": trainer.peaks.peaks}))
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*sys.argv[1:3], **json.loads(sys.argv[3]))
    else:
        example.main()
