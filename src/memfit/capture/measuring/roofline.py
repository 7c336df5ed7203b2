"""Estimates an op's time from its work: the longer of its FLOPs and its bytes at the rates the device reaches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch

from memfit.capture.measuring.clocks import clock_for
from memfit.capture.recording.step_recording import OpFacts


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates of a device. ``flops_per_second`` is by precision; one that is not there runs at the lowest of them."""

    flops_per_second: Mapping[torch.dtype | None, float]
    bytes_per_second: float
    shortest_seconds: float = 0.0

    def seconds_of(self, fact: OpFacts) -> float:
        """Return the estimated seconds of an op; none for one that does nothing, such as an allocation."""
        if fact.flops == 0 and fact.moved_bytes == 0:
            return 0.0
        seconds = max(fact.moved_bytes / self.bytes_per_second, self.shortest_seconds)
        if fact.flops and self.flops_per_second:
            rate = self.flops_per_second.get(fact.dtype) or min(self.flops_per_second.values())
            seconds = max(seconds, fact.flops / rate)
        return seconds

    @staticmethod
    def of_measured(measured: Iterable[tuple[OpFacts, float]]) -> Roofline | None:
        """Return the rates that measured ops reached on the whole, or None where none determines the memory's."""
        flops: dict[torch.dtype | None, float] = defaultdict(float)
        flop_seconds: dict[torch.dtype | None, float] = defaultdict(float)
        moved_bytes, byte_seconds, fast_path = 0, 0.0, float("inf")
        for fact, seconds in measured:
            if seconds <= 0:
                continue
            if fact.flops:
                flops[fact.dtype] += fact.flops
                flop_seconds[fact.dtype] += seconds
            elif fact.moved_bytes:
                moved_bytes += fact.moved_bytes
                byte_seconds += seconds
                fast_path = min(fast_path, seconds)
        if not byte_seconds:
            return None
        return Roofline(
            {dtype: flops[dtype] / flop_seconds[dtype] for dtype in flops}, moved_bytes / byte_seconds, fast_path
        )

    @staticmethod
    def of_device(device: torch.device, dtypes: Iterable[torch.dtype] = ()) -> Roofline:
        """Measure the device: a product of large matrices in each of ``dtypes``, and a copy beyond its caches."""
        rates: dict[torch.dtype | None, float] = {}
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for dtype in dict.fromkeys(dtypes):
                rates[dtype] = _flops_per_second(device, dtype)
            return Roofline(rates, copied_bytes_per_second(device), _shortest_seconds(device))


@cache
def _shortest_seconds(device: torch.device) -> float:
    """Return how long the smallest op takes."""
    one = torch.ones(1, device=device)
    return clock_for(device).seconds_of(partial(torch.add, one, one))


@cache
def _flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return how fast matrices are multiplied, as large ones as there is room for."""
    width = 4096 if device.type == "cuda" else 512
    while True:
        try:
            # Random numbers: a chip runs products of equal ones faster than it ever runs a model's.
            matrix = torch.randn(width, width, device=device).to(dtype)
            return 2 * width**3 / clock_for(device).seconds_of(partial(torch.mm, matrix, matrix))
        except torch.OutOfMemoryError:
            width //= 2
            if width < 64:
                raise


@cache
def copied_bytes_per_second(device: torch.device) -> float:
    """Return how fast a copy runs, counting what is read and what is written, on as much as there is room for.

    Rates of a device are measured once, so that estimates for several steps can be compared.
    """
    num_bytes = 2**28 if device.type == "cuda" else 2**24
    while True:
        try:
            source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            break
        except torch.OutOfMemoryError:
            num_bytes //= 2
            if num_bytes < 2**16:
                raise
    return 2 * num_bytes / clock_for(device).seconds_of(partial(target.copy_, source))
