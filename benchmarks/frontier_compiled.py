"""torch.compile per block at several of torch's own activation-memory budgets, beside the plain step.

A group of its own: compiled code is fast for other reasons than memory, and its budgets change what is compiled. So
each budget is compiled and measured in one go, and ratios are to the plain, uncompiled step of the same process. Its
gradients are rounded otherwise, and its dropout draws other numbers: their distances say nothing about right or wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from frontier_models import Subject
from measuring import Race, TimeLimitError, as_data, machine, print_rows
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1)
# Blocks of one class share their code; a ResNet's come in more shapes than torch would compile code for by default.
_RECOMPILE_LIMIT = 64


def budgets_of(options: argparse.Namespace) -> Sequence[float]:
    """Return torch's budgets that are asked for: all that are compared, unless some are named."""
    return options.budget or BUDGETS


def run_compiled(name: str, subject: Subject, options: argparse.Namespace, num_steps: int) -> dict[str, Any]:
    """Measure each budget, for at most ``options.budget_seconds``, compilation included."""
    race = Race(subject.model, subject.output_and_loss, subject.tensors(), keep_gradients=False)
    race.run_alone("plain", contextlib.nullcontext, num_steps=num_steps, reference=race.host_gradients())
    reference = race.host_gradients()
    seconds = {}
    for budget in budgets_of(options):
        label = f"torch.compile at a budget of {budget}"
        begin = time.perf_counter()
        race.run_alone(
            label,
            _within(options.budget_seconds, lambda budget=budget: compiled(subject.blocks, budget)),
            num_steps=num_steps,
            reference=reference,
        )
        seconds[label] = time.perf_counter() - begin
        print(f"{name}: {label} took {seconds[label]:.1f} s, compilation included", flush=True)
    race.run_alone("plain again", contextlib.nullcontext, num_steps=num_steps, reference=reference)
    rows = race.rows()
    print_rows(f"{name}, compiled, {machine()}", rows)
    return {"machine": machine(), "rows": as_data(rows), "seconds": seconds}


def compile_ahead(name: str, options: argparse.Namespace) -> None:
    """Compile a model at each budget into torch's cache, in several processes at once.

    Compiling takes one core most of the time, so that budgets one after the other take as many times as long. What
    does not get done in time is left to the run itself, as is what does not fit the GPU beside the others.
    """
    command = [sys.executable, str(Path(__file__).with_name("frontier.py")), name, "--compiled"]
    command += ["--rounds", "1", "--steps", "1", "--budget-seconds", str(options.budget_seconds)]
    if options.small:
        command.append("--small")

    def compile_at(budget: float) -> None:
        process = subprocess.run([*command, "--budget", str(budget)], capture_output=True, check=False)
        print(f"{name}: compiled ahead at a budget of {budget}, exit status {process.returncode}", flush=True)

    with ThreadPoolExecutor(options.ahead) as pool:
        list(pool.map(compile_at, budgets_of(options)))


@contextmanager
def compiled(blocks: Sequence[nn.Module], budget: float) -> Iterator[None]:
    """Compile each of ``blocks`` at a budget of torch's partitioner, a share of what it would save; undone after."""
    torch._dynamo.reset()
    with (
        functorch_config.patch(activation_memory_budget=budget),
        dynamo_config.patch(recompile_limit=_RECOMPILE_LIMIT),
    ):
        try:
            for block in blocks:
                # Shapes never change here; a second shape among the blocks must not make the code dynamic.
                block.compile(dynamic=False)
            yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None
            torch._dynamo.reset()


def _within(
    seconds: float, method: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    @contextmanager
    def limited() -> Iterator[None]:
        with time_limit(seconds), method():
            yield

    return limited


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError inside the block when ``seconds`` have passed. For the main thread."""

    def stop(*_: object) -> None:
        raise TimeLimitError(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again, should a callback swallow the first one.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
