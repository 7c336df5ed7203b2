"""Whether budgets hold in the first three steps of models on a GPU, and how long profiling them takes.

    python benchmarks/gpu_budgets.py [NAME ...] [--json benchmarks/results/gpu-budgets.json] [--small]

Each model is profiled once, and planned for four budgets: the smallest that is feasible, the measured peak of torch's
checkpointing of every block, and 0.5 and 0.8 of the distance from the smallest to the plain peak. Each plan is applied
to the model as a new user would, and three steps of a loop are run that holds nothing but the loss. Peaks are those of
the device's allocator. With --small, tiny models run on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from frontier_models import AutocastClassifier
from peers import checkpointed
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memfit
from memfit.capture.measuring.clocks import wait_for
from memfit.environment import environment_facts
from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.applying.batch_tensors import tensors_of
from memfit.runtime.engine.native_tape import engine_name
from memfit.units import format_bytes

SHARES = (0.0, 0.5, 0.8)


class Built(NamedTuple):
    """A model that returns its loss or an output that has one, its batch, and its repeated blocks."""

    model: nn.Module
    batch: dict[str, Tensor]
    blocks: Sequence[nn.Module]


def llama_gqa(device: torch.device, *, small: bool) -> Built:
    """A Llama with four query heads for each key head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _language_model(LlamaForCausalLM, LlamaConfig, device, small, layers=12, width=2048, heads=16, key_heads=4)


def qwen3(device: torch.device, *, small: bool) -> Built:
    """Qwen3 0.6B with a smaller vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _language_model(Qwen3ForCausalLM, Qwen3Config, device, small, layers=28, width=1024, heads=16, key_heads=8)


def _language_model(
    kind: Any, config: Any, device: torch.device, small: bool, *, layers: int, width: int, heads: int, key_heads: int
) -> Built:
    if small:
        layers, width = 3, 64
    settings = config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=width // heads,
        vocab_size=256 if small else 32_000,
        use_cache=False,
    )
    with device:
        model = kind(settings).to(torch.float32 if small else torch.bfloat16).train()
        ids = torch.randint(0, settings.vocab_size, (2, 64) if small else (4, 2048))
    return Built(model, {"input_ids": ids, "labels": ids}, list(model.model.layers))


class DiTBlock(nn.Module):
    """A block of a diffusion transformer: its norms are shifted, scaled and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.second_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition)[:, None].chunk(6, dim=-1)
        inside = self.first_norm(x) * (1 + scale) + shift
        batch, length, width = x.shape
        query, key, value = self.qkv(inside).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        x = x + gate * self.out(attended.reshape(batch, length, width))
        return x + mlp_gate * self.mlp(self.second_norm(x) * (1 + mlp_scale) + mlp_shift)


class DiT(nn.Module):
    """A diffusion transformer on patches, with its loss."""

    def __init__(self, layers: int, width: int, heads: int, channels: int = 16) -> None:
        super().__init__()
        self.patches, self.time = nn.Linear(channels, width), nn.Linear(256, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, channels)

    def forward(self, noisy: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        x, condition = self.patches(noisy), self.time(time)
        for block in self.blocks:
            x = block(x, condition)
        return nn.functional.mse_loss(self.out(x), noise)


def dit(device: torch.device, *, small: bool) -> Built:
    """DiT-L with 1,024 patches."""
    layers, width, heads = (3, 64, 4) if small else (24, 1024, 16)
    batch, length = (2, 16) if small else (32, 1024)
    with device:
        model = DiT(layers, width, heads).to(torch.float32 if small else torch.bfloat16)
        dtype = model.out.weight.dtype
        made = {
            "noisy": torch.randn(batch, length, 16, dtype=dtype),
            "time": torch.randn(batch, 256, dtype=dtype),
            "noise": torch.randn(batch, length, 16, dtype=dtype),
        }
    return Built(model, made, list(model.blocks))


def convnext(device: torch.device, *, small: bool) -> Built:
    """ConvNeXt-Base under bf16 autocast."""
    import timm

    with device:
        network = timm.create_model("convnext_atto" if small else "convnext_base", drop_path_rate=0.1)
        images = torch.randn((2, 3, 64, 64) if small else (128, 3, 224, 224))
        labels = torch.randint(0, 1000, (len(images),))
    blocks = [block for stage in network.stages for block in stage.blocks]
    return Built(AutocastClassifier(network), {"images": images, "labels": labels}, blocks)


def whisper(device: torch.device, *, small: bool) -> Built:
    """Whisper small: encoder and decoder of 12 layers."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers, width, frames, length = (2, 32, 100, 16) if small else (12, 768, 3000, 256)
    config = WhisperConfig(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=2 if small else 12,
        decoder_attention_heads=2 if small else 12,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        vocab_size=256 if small else 51_865,
        max_source_positions=frames // 2,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    with device:
        model = WhisperForConditionalGeneration(config).to(torch.float32 if small else torch.bfloat16).train()
        features = torch.randn(2 if small else 16, config.num_mel_bins, frames, dtype=model.dtype)
        labels = torch.randint(0, config.vocab_size, (len(features), length))
    blocks = [*model.model.encoder.layers, *model.model.decoder.layers]
    return Built(model, {"input_features": features, "labels": labels}, blocks)


MODELS: dict[str, Callable[..., Built]] = {
    "llama-gqa": llama_gqa,
    "qwen3": qwen3,
    "dit": dit,
    "convnext": convnext,
    "whisper": whisper,
}


@dataclass(frozen=True)
class PlanRow:
    """One plan, and the peaks of three steps by it."""

    budget: str
    budget_bytes: int
    predicted_bytes: int
    peak_bytes: list[int]

    @property
    def over(self) -> float:
        """By which share of the budget the highest peak is above it; negative below."""
        return max(self.peak_bytes) / self.budget_bytes - 1


@dataclass(frozen=True)
class ModelRow:
    """One model: peaks of plain and of checkpointed steps, the smallest budget, what profiling took, and the plans."""

    name: str
    plain_bytes: int = 0
    profiled_bytes: int = 0
    checkpointed_bytes: int = 0
    smallest_bytes: int = 0
    plain_seconds: float = 0.0
    profiling_seconds: float = 0.0
    plans: list[PlanRow] = field(default_factory=list)
    error: str | None = None


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output, which the caller no longer holds."""
    return output if isinstance(output, Tensor) else output.loss


class Loop:
    """Steps of a training loop that holds nothing but the loss."""

    def __init__(self, built: Built, device: torch.device) -> None:
        self._model, self._batch = built.model, built.batch
        self._device = device

    def step(self) -> None:
        """Run a step that starts without gradients."""
        loss_of(self._model(**self._batch)).backward()

    def peaks(self, num_steps: int = 3) -> list[int]:
        """Return the peak of each of the next steps."""
        found = []
        for _ in range(num_steps):
            self._model.zero_grad(set_to_none=True)
            held = [*self._model.parameters(), *self._model.buffers(), *tensors_of(self._batch)]
            found.append(allocated_peak(self.step, self._device, held))
        self._model.zero_grad(set_to_none=True)
        return found

    def seconds(self, num_steps: int = 5) -> float:
        """Return the median of the seconds of the next steps."""
        found = []
        for _ in range(num_steps):
            self._model.zero_grad(set_to_none=True)
            wait_for(self._device)
            begin = time.perf_counter()
            self.step()
            wait_for(self._device)
            found.append(time.perf_counter() - begin)
        self._model.zero_grad(set_to_none=True)
        return median(found)


def measured(name: str, device: torch.device, *, small: bool) -> ModelRow:
    """Return what the budgets of one model came to."""
    try:
        torch.manual_seed(0)
        built = MODELS[name](device, small=small)
        loop = Loop(built, device)
        loop.peaks()
        plain_bytes, plain_seconds = max(loop.peaks()), loop.seconds()
        with checkpointed(built.blocks):
            checkpointed_bytes = max(loop.peaks())
        begin = time.perf_counter()
        profile = memfit.profile(built.model, built.batch)
        profiling_seconds = time.perf_counter() - begin
        try:
            smallest = memfit.plan(profile, budget=1).predicted_peak_bytes
        except memfit.InfeasibleBudgetError as error:
            smallest = error.minimum_bytes
        budgets = {f"{share:g}": round(smallest + share * (profile.peak_bytes - smallest)) for share in SHARES}
        budgets["checkpointed"] = checkpointed_bytes
        rows = []
        for label, budget in budgets.items():
            if budget < smallest:
                continue
            plan = memfit.plan(profile, budget=budget)
            with memfit.apply(built.model, plan):
                rows.append(PlanRow(label, budget, plan.predicted_peak_bytes, loop.peaks()))
    except Exception as error:
        traceback.print_exc()
        return ModelRow(name, error=f"{type(error).__name__}: {error}"[:300])
    return ModelRow(
        name,
        plain_bytes,
        profile.peak_bytes,
        checkpointed_bytes,
        smallest,
        plain_seconds,
        profiling_seconds,
        rows,
    )


def table_of(rows: Sequence[ModelRow]) -> Table:
    """Return the rows as a table."""
    table = Table("model", "plain", "profiled", "checkpointed", "smallest", "plain step", "profile()", "over budget")
    for row in rows:
        if row.error is not None:
            table.add_row(row.name, row.error[:80])
            continue
        table.add_row(
            row.name,
            format_bytes(row.plain_bytes),
            f"{row.profiled_bytes / row.plain_bytes - 1:+.2%}",
            format_bytes(row.checkpointed_bytes),
            f"{row.smallest_bytes / row.checkpointed_bytes - 1:+.1%}",
            f"{1e3 * row.plain_seconds:.0f} ms",
            f"{row.profiling_seconds:.1f} s",
            ", ".join(f"{plan.budget}: {plan.over:+.2%}" for plan in row.plans),
        )
    return table


def main() -> int:
    """Measure, print a table, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; all where none is named")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device("cpu" if options.small else "cuda")
    begin = time.perf_counter()
    engine = engine_name()
    print(f"engine: {engine}, ready after {time.perf_counter() - begin:.1f} s", flush=True)
    rows = []
    for name in options.names or MODELS:
        rows.append(measured(name, device, small=options.small))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {rows[-1].error or [f'{plan.over:+.2%}' for plan in rows[-1].plans]}", flush=True)
        if options.json is not None:
            facts = environment_facts() | {"transformers": version("transformers"), "engine": engine}
            result = {"environment": facts, "rows": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=140).print(table_of(rows))
    plans = [plan for row in rows for plan in row.plans]
    num_over = sum(plan.over > 0 for plan in plans)
    print(f"{num_over} of {len(plans)} plans of {len(rows)} models are over their budget in some step")
    return 1 if num_over or any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
