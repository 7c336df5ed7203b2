"""How the benchmarks measure: interleaved rounds, medians with their spread, peaks from the allocator or the ledger."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memfit
from memfit.runtime.ledger import peak_of
from memfit.units import format_bytes

Step = Callable[[], object]
OutputAndLoss = Callable[[], tuple[Any, Tensor]]
# What to enter around steps to run them in one way.
Way = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Row:
    """One way to run the step. ``ratio`` is to the first way of the same run; peaks are whole and above the model."""

    way: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio: float
    peak_bytes: int
    activation_peak_bytes: int
    gradients_equal: bool
    gradient_error: float


def training_step(model: nn.Module, output_and_loss: OutputAndLoss, keep_gradients: bool) -> Step:
    """Return a training step that holds its output until backward is done, as training loops do.

    Where it keeps gradients allocated, its peak above the start is activations alone.
    """

    def step() -> None:
        model.zero_grad(set_to_none=not keep_gradients)
        _output, loss = output_and_loss()
        loss.backward()

    return step


def measure(
    ways: Mapping[str, Way],
    output_and_loss: OutputAndLoss,
    model: nn.Module,
    batch: Sequence[Tensor],
    *,
    num_rounds: int,
    steps_per_round: int,
    keep_gradients: bool,
) -> list[Row]:
    """Train in all ``ways`` in turn, round after round, and compare with the first of them."""
    step = training_step(model, output_and_loss, keep_gradients)
    device = next(model.parameters()).device

    def held() -> list[Tensor]:
        return [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *batch]

    peaks = {}
    for name, way in ways.items():
        with way():
            step()
            if not keep_gradients:
                model.zero_grad()
            before = bytes_now(device, held())
            peaks[name] = (peak_of(step, device, held()), before)
    # After the peaks, in which the reference must not be counted.
    errors = gradient_errors(ways, step, model)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, way in ways.items():
            with way():
                step()
                seconds[name].extend(seconds_of(step, device) for _ in range(steps_per_round))
    first = statistics.median(next(iter(seconds.values())))
    return [
        Row(
            way=name,
            median_ms=1e3 * statistics.median(times),
            quartiles_ms=tuple(1e3 * quartile for quartile in statistics.quantiles(times, n=4)[::2]),
            ratio=statistics.median(times) / first,
            peak_bytes=peaks[name][0],
            activation_peak_bytes=peaks[name][0] - peaks[name][1],
            gradients_equal=errors[name] == 0.0,
            gradient_error=errors[name],
        )
        for name, times in seconds.items()
    ]


def gradient_errors(ways: Mapping[str, Way], step: Step, model: nn.Module) -> dict[str, float]:
    """Return how far each way's gradients are from those of the first way."""
    reference: list[Tensor] = []
    errors = {}
    for name, way in ways.items():
        with way():
            step()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        reference = reference or [gradient.clone() for gradient in gradients]
        errors[name] = compare(gradients, reference)
    return errors


def compare(gradients: list[Tensor], reference: list[Tensor]) -> float:
    """Return 0.0 where all bits agree, else the largest difference of a tensor relative to its largest number."""
    errors = [
        0.0 if torch.equal(a, b) else float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(gradients, reference, strict=True)
    ]
    return max(errors)


def bytes_now(device: torch.device, held: Iterable[Tensor]) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def seconds_of(step: Step, device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


def machine() -> str:
    """Return what the numbers were measured on."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}, memfit {memfit.__version__}"


def print_rows(title: str, rows: list[Row]) -> None:
    table = Table("way", "median ms", "quartiles", "ratio", "activations", "peak", "gradients", title=title)
    for row in rows:
        low, high = row.quartiles_ms
        table.add_row(
            row.way,
            f"{row.median_ms:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{row.ratio:.3f}",
            format_bytes(row.activation_peak_bytes),
            format_bytes(row.peak_bytes),
            "equal" if row.gradients_equal else f"within {row.gradient_error:.0e}",
        )
    Console(width=140).print(table)


def as_data(rows: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
