"""How the benchmarks measure: interleaved rounds, medians with their spread, peaks from the allocator."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from entrant import Entrant, Method
from gradients import compare, sums_in_a_fixed_order
from pinning import pinned
from rich.console import Console
from rich.table import Table
from rounds import Stopwatch, run_rounds
from rows import Row
from timing import Step, seconds_in_a_row
from torch import Tensor, nn

import memfit
from memfit.capture.measuring.clocks import wait_for
from memfit.runtime.allocation_meter import allocated_peak
from memfit.units import format_bytes

OutputAndLoss = Callable[[], tuple[Any, Tensor]]
_Result = TypeVar("_Result")

# After so many plain steps with the very same gradients, the kernels are taken to be deterministic.
_FEWEST_REPEATS = 4


class TimeLimitError(BaseException):
    """A method took longer than it was given. No ``Exception``, so that no caller in between handles it."""


def training_step(model: nn.Module, output_and_loss: OutputAndLoss, keep_gradients: bool) -> Step:
    """Return a training step that holds nothing but its loss in the backward pass.

    Where it keeps gradients allocated, its peak above the start is activations alone.
    """

    def step() -> None:
        model.zero_grad(set_to_none=not keep_gradients)
        loss = output_and_loss()[1]
        loss.backward()

    return step


class Race:
    """Ways to run one training step, measured beside the first of them. One that raises is out; its row says why."""

    def __init__(
        self,
        model: nn.Module,
        output_and_loss: OutputAndLoss,
        batch: Sequence[Tensor],
        *,
        keep_gradients: bool,
    ) -> None:
        self.device = next(model.parameters()).device
        self.gradient_noise = self.kernel_noise = 0.0
        self._bytes_before_graphs: int | None = None
        self._model = model
        self._batch = batch
        self._keep_gradients = keep_gradients
        self._step = training_step(model, output_and_loss, keep_gradients)
        self._entrants: dict[str, Entrant] = {}
        self._same_as: dict[str, str] = {}
        self._stopwatch = Stopwatch(self._step, self.device)

    def enter(self, name: str, method: Method, *, slow_limit_seconds: float | None = None) -> int | None:
        """Let a method take part and return the peak of its step, or None where it raised.

        With a ``slow_limit_seconds`` it is a slow method: it takes few steps, and if the first takes longer, no more.
        """
        entrant = self._entrants[name] = Entrant(method, is_slow=slow_limit_seconds is not None)
        begin = time.perf_counter()
        self._attempt(entrant, lambda: self._take_peak(entrant))
        seconds = time.perf_counter() - begin
        if slow_limit_seconds is not None and seconds > slow_limit_seconds and entrant.error is None:
            entrant.error = f"not timed: its first step took {seconds:.1f} s, more than {slow_limit_seconds:g} s"
        return entrant.peak_bytes

    def bytes_before(self, name: str) -> int:
        """Return what was there before the step of a method that did not raise."""
        entrant = self._entrants[name]
        assert entrant.peak_bytes is not None
        assert entrant.activation_peak_bytes is not None
        return entrant.peak_bytes - entrant.activation_peak_bytes

    def activation_peak_bytes(self, name: str) -> int:
        """Return how far the peak of a method that did not raise is above what was there before its step."""
        found = self._entrants[name].activation_peak_bytes
        assert found is not None
        return found

    def outcome(self, name: str) -> str:
        """Return the peak of a method in words, or why there is none."""
        entrant = self._entrants[self._same_as.get(name, name)]
        return entrant.error or format_bytes(entrant.peak_bytes or 0)

    def enter_as(self, name: str, same_as: str) -> None:
        """Let ``name`` have the results of ``same_as``, which does exactly the same."""
        self._same_as[name] = same_as

    def run_alone(self, name: str, method: Method, *, num_steps: int, reference: Sequence[Tensor]) -> None:
        """Take peak, gradients and times without leaving the method in between: for one that takes long to enter."""
        entrant = self._entrants[name] = Entrant(method)

        def run() -> None:
            self._take_peak(entrant)
            entrant.gradient_error = compare(self._gradients_of_a_step(), reference)
            entrant.seconds = seconds_in_a_row(self._step, self.device, num_steps)

        self._attempt(entrant, run)

    def run_captured(self, name: str, method: Method, *, num_steps: int, reference: Sequence[Tensor]) -> int | None:
        """Capture the step into a CUDA graph, and take its peak, its gradients and its times; return the peak."""
        entrant = self._entrants[name] = Entrant(method)

        def run() -> None:
            graph = self._captured(entrant)
            graph.replay()
            entrant.gradient_error = compare(self._gradients(), reference)
            entrant.seconds = seconds_in_a_row(graph.replay, self.device, num_steps)

        self._attempt(entrant, run)
        self._let_go()
        return entrant.peak_bytes

    def _captured(self, entrant: Entrant) -> torch.cuda.CUDAGraph:
        # As torch's documentation has it: libraries set themselves up on a stream that is not the default one.
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._let_go()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._step()
        entrant.activation_peak_bytes = torch.cuda.max_memory_allocated(self.device) - before
        # Each graph leaves a little behind, which is none of the next one's business.
        if self._bytes_before_graphs is None:
            self._bytes_before_graphs = before
        entrant.peak_bytes = self._bytes_before_graphs + entrant.activation_peak_bytes
        return graph

    def host_gradients(self) -> list[Tensor]:
        """Return a plain step's gradients in host memory, where no peak on a GPU counts them."""
        return [gradient.to("cpu", copy=True) for gradient in self._gradients_of_a_step()]

    def compare_gradients(self, *, num_repeats: int) -> None:
        """Compare all with the first method's gradients, and that with itself ``num_repeats`` times.

        ``kernel_noise`` is how far the first method differs from itself from run to run. Where it or another does, all
        are compared with kernels that sum in a fixed order, so that changed gradients are not mistaken for
        kernels that are not reproducible; ``gradient_noise`` is how far the first method differs from itself then. Call
        it after the peaks are taken, in which the reference must not be counted.
        """
        first, *others = self._entrants.values()
        with first.method():
            self.kernel_noise = self._distance_between_steps(min(num_repeats, _FEWEST_REPEATS))
        first.gradient_error = 0.0
        # Kernels that stray now and then may have been of one mind in the few plain steps.
        if self.kernel_noise or not self._all_equal(others):
            with sums_in_a_fixed_order(self._step):
                with first.method():
                    self.gradient_noise = self._distance_between_steps(num_repeats)
                self._all_equal(others)
        again = self._entrants.get("plain again", first).gradient_error
        self.gradient_noise = max(self.gradient_noise, again or 0.0)

    def _all_equal(self, others: Sequence[Entrant]) -> bool:
        """Compare the gradients of ``others`` with the first method's; return whether all are bit-identical."""
        with next(iter(self._entrants.values())).method():
            reference = [gradient.clone() for gradient in self._gradients_of_a_step()]
        for entrant in others:
            if entrant.error is None:
                entrant.gradient_error = self._attempt(entrant, lambda: compare(self._gradients_of_a_step(), reference))
        return not any(entrant.gradient_error for entrant in others)

    def _distance_between_steps(self, num_repeats: int) -> float:
        """Return how far the gradients of so many steps are from those of one before them, at most."""
        if num_repeats == 0:
            return 0.0
        reference = [gradient.clone() for gradient in self._gradients_of_a_step()]

        def distances(num_steps: int) -> list[float]:
            return [compare(self._gradients_of_a_step(), reference) for _ in range(num_steps)]

        # Kernels that stray do so nearly every time; how far, only many steps show.
        found = distances(min(num_repeats, _FEWEST_REPEATS))
        return max(found + distances(num_repeats - len(found)) if any(found) else found)

    def _gradients_of_a_step(self) -> list[Tensor]:
        # The same random numbers for all: dropout would make any two steps differ.
        torch.manual_seed(0)
        self._step()
        return self._gradients()

    def run_rounds(
        self, num_rounds: int, *, steps_per_round: int | None, fewest_rounds: int = 1, end_by: float | None = None
    ) -> int:
        """Time all methods in turn, and return the number of rounds; see `rounds.run_rounds`."""

        def take_turn(entrant: Entrant) -> None:
            self._attempt(entrant, lambda: self._stopwatch.time(entrant, steps_per_round))

        return run_rounds(
            list(self._entrants.values()), take_turn, num_rounds, fewest_rounds=fewest_rounds, end_by=end_by
        )

    def rows(self) -> list[Row]:
        """Return what was measured, in the order in which the methods came."""
        first = statistics.median(next(iter(self._entrants.values())).seconds)
        rows = {name: entrant.row(name, first) for name, entrant in self._entrants.items()}
        same = [replace(rows[other], method=name, same_as=other) for name, other in self._same_as.items()]
        return [*rows.values(), *same]

    def _attempt(self, entrant: Entrant, run: Callable[[], _Result]) -> _Result | None:
        try:
            with entrant.method():
                return run()
        except (Exception, TimeLimitError) as error:
            entrant.error = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        if entrant is next(iter(self._entrants.values())):
            raise RuntimeError(f"the method that all are compared with failed: {entrant.error}")
        # Out of the except block, with which the traceback went that held the tensors of the failed step.
        self._let_go()
        return None

    def _let_go(self) -> None:
        self._model.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _take_peak(self, entrant: Entrant) -> None:
        if not entrant.is_slow:
            self._step()
        if not self._keep_gradients:
            self._model.zero_grad()
        before = bytes_now(self.device, self._held())
        begin = time.perf_counter()
        entrant.peak_bytes = allocated_peak(self._step, self.device, self._held())
        wait_for(self.device)
        entrant.rough_seconds = time.perf_counter() - begin
        entrant.activation_peak_bytes = entrant.peak_bytes - before

    def _held(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers(), *self._gradients(), *self._batch]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]


def measure(
    methods: Mapping[str, Method],
    output_and_loss: OutputAndLoss,
    model: nn.Module,
    batch: Sequence[Tensor],
    *,
    num_rounds: int,
    steps_per_round: int,
    keep_gradients: bool,
) -> list[Row]:
    """Train in all ``methods`` in turn, round after round, and compare with the first of them. None may fail."""
    race = Race(model, output_and_loss, batch, keep_gradients=keep_gradients)
    for name, method in methods.items():
        race.enter(name, method)
    race.compare_gradients(num_repeats=0)
    with pinned(race.device, num_cores=1):
        race.run_rounds(num_rounds, steps_per_round=steps_per_round)
    rows = race.rows()
    failed = [f"{row.method}: {row.error}" for row in rows if row.error is not None]
    if failed:
        raise RuntimeError("; ".join(failed))
    return rows


def bytes_now(device: torch.device, held: Sequence[Tensor]) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def machine() -> str:
    """Return what the numbers were measured on."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}, memfit {memfit.__version__}"


def print_rows(title: str, rows: Sequence[Row]) -> None:
    table = Table("method", "median ms", "quartiles", "ratio", "activations", "peak", "gradients", title=title)
    for row in rows:
        cells = [row.method]
        if row.median_ms is None or row.quartiles_ms is None or row.ratio is None:
            cells += ["", row.error or "", ""]
        else:
            low, high = row.quartiles_ms
            cells += [f"{row.median_ms:.2f}", f"{low:.2f} to {high:.2f}", f"{row.ratio:.3f}"]
        cells += ["" if size is None else format_bytes(size) for size in (row.activation_peak_bytes, row.peak_bytes)]
        off = "" if row.gradient_error is None else f"within {row.gradient_error:.0e}"
        cells.append("equal" if row.gradients_equal else off)
        table.add_row(*cells)
    Console(width=140).print(table)


def as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [row.as_data() for row in rows]
