"""What it saves to replay pointwise ops in one kernel: chains of them as models have them, and whole steps.

    python benchmarks/fusing.py [MODEL ...] [--rounds N] [--out FILE]

Each chain is dropped and replayed many times. The table has the microseconds of the device, op by op and at
once, and the bytes a second that the one kernel reads and writes. Of a model, the step takes turns with half of its
memory above the smallest peak: plain, op by op and fused.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from frontier_models import SUBJECTS, Subject
from measuring import machine
from pinning import pinned
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memfit
from memfit.runtime.engine.native_tape import engine_name, new_tape
from memfit.runtime.engine.planned_modules import PlannedModule
from memfit.runtime.fusing.fusing import start_fusing
from memfit.runtime.fusing.pointwise_ops import POINTWISE_OPS
from memfit.runtime.native.native_build import native_module
from memfit.runtime.torch_internals import keep_gpu_busy

ROWS, WIDTH = 8 * 2048, 2048
STEPS = 4


def norm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return weight * (x.to(torch.float32) * scale).to(x.dtype)


def gate(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.nn.functional.silu(one) * other


def residual(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).to(torch.float32)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


# Each with what it takes, and the bytes for each element that must be read and written.
CHAINS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]], int]] = {
    "norm": (
        norm,
        lambda: [*tensors((ROWS, WIDTH), (WIDTH,)), *tensors((ROWS, 1), dtype=torch.float32)],
        2 + 4 + 2 + 2,
    ),
    "silu and product of halves": (gate, lambda: tensors((ROWS, 2 * WIDTH)), 2 + 2 + 2 + 2),
    "sum, and wide": (residual, lambda: tensors((ROWS, WIDTH), (ROWS, WIDTH)), 2 + 2 + 4),
}


@contextmanager
def op_by_op() -> Iterator[None]:
    native = native_module()
    native.fuse_nothing()
    yield
    start_fusing(native)


def microseconds_to_come_back(forward: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    leaves = tuple(tensor.requires_grad_() for tensor in inputs)
    tape = new_tape()
    result = tape.run(
        PlannedModule("", nn.Identity(), dict.fromkeys(POINTWISE_OPS, True)),
        lambda *inputs: forward(*inputs).sin(),
        leaves,
        {},
    )
    tape.close()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    keep_gpu_busy(2_000_000)
    start.record()
    # Reading what was saved brings it back.
    kept = result.grad_fn._saved_self
    end.record()
    end.synchronize()
    assert kept.shape == result.shape
    return start.elapsed_time(end) * 1e3


def measured_chains(num_rounds: int) -> Iterator[dict[str, Any]]:
    for name, (forward, inputs_of, bytes_each) in CHAINS.items():
        inputs = inputs_of()
        microseconds_to_come_back(forward, inputs)
        one_by_one, at_once = [], []
        for _ in range(num_rounds):
            with op_by_op():
                one_by_one.append(microseconds_to_come_back(forward, inputs))
            at_once.append(microseconds_to_come_back(forward, inputs))
        rate = ROWS * WIDTH * bytes_each / (median(at_once) * 1e-6)
        yield {
            "chain": name,
            "one_by_one_us": median(one_by_one),
            "one_by_one_quartiles_us": quartiles(one_by_one),
            "at_once_us": median(at_once),
            "at_once_quartiles_us": quartiles(at_once),
            "bytes_per_second": rate,
        }


def quartiles(numbers: list[float]) -> list[float]:
    first, _, third = quantiles(numbers, n=4, method="inclusive")
    return [first, third]


def step_ms(subject: Subject) -> float:
    times = []
    for _ in range(STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        subject.model.zero_grad(set_to_none=True)
        start.record()
        _, loss = subject.output_and_loss()
        loss.backward()
        del loss
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[1:])


def measured_model(name: str, num_rounds: int, profiles: Path | None) -> dict[str, Any]:
    torch.manual_seed(0)
    subject = SUBJECTS[name](torch.device("cuda"), small=False)
    profile = memfit.profile(subject.model, subject.batch)
    smallest = memfit.frontier(profile, points=2)[-1].peak_bytes
    plan = memfit.plan(profile, budget=(profile.peak_bytes + smallest) // 2)
    if profiles is not None:
        profile.save(profiles / f"{name}.profile.json.gz")
    plain, one_by_one, at_once = [], [], []
    for _ in range(num_rounds):
        plain.append(step_ms(subject))
        with memfit.apply(subject.model, plan):
            with op_by_op():
                one_by_one.append(step_ms(subject))
            at_once.append(step_ms(subject))
    ratios = [
        [planned / base for planned, base in zip(methods, plain, strict=True)] for methods in (one_by_one, at_once)
    ]
    return {
        "model": name,
        "plain_ms": median(plain),
        "one_by_one": median(ratios[0]),
        "one_by_one_quartiles": quartiles(ratios[0]),
        "at_once": median(ratios[1]),
        "at_once_quartiles": quartiles(ratios[1]),
        "predicted": 1 + plan.predicted_overhead,
    }


def spread(middle: float, quartiles: list[float], num_digits: int) -> str:
    low, high = quartiles
    return f"{middle:.{num_digits}f} ({low:.{num_digits}f} to {high:.{num_digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--profiles", type=Path, metavar="DIR", help="save the profiles here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here, and ops are replayed in one kernel only there")
    if unknown := [name for name in options.models if name not in SUBJECTS]:
        parser.error(f"no model is called {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
    engine_name()
    results: dict[str, Any] = {"machine": machine(), "chains": list(measured_chains(options.rounds)), "models": []}
    table = Table("chain", "one by one us", "at once us", "at once TB/s", title=f"{ROWS} x {WIDTH}, {machine()}")
    for row in results["chains"]:
        times = [spread(row[f"{method}_us"], row[f"{method}_quartiles_us"], 1) for method in ("one_by_one", "at_once")]
        table.add_row(row["chain"], *times, f"{row['bytes_per_second'] * 1e-12:.2f}")
    Console(width=120).print(table)
    table = Table("model", "plain ms", "half, one by one", "half, at once", "predicted", title=machine())
    with pinned(torch.device("cuda")):
        for name in options.models:
            row = measured_model(name, options.rounds, options.profiles)
            results["models"].append(row)
            ratios = [spread(row[method], row[f"{method}_quartiles"], 3) for method in ("one_by_one", "at_once")]
            table.add_row(name, f"{row['plain_ms']:.1f}", *ratios, f"{row['predicted']:.3f}")
            gc.collect()
            torch.cuda.empty_cache()
    if options.models:
        Console(width=120).print(table)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
