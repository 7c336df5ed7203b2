"""The states of the random number generators that everybody shares."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class RandomStates:
    """The states of torch's, Python's and, where it is in use, NumPy's generators; of GPUs, those of ``devices``."""

    def __init__(self, devices: Iterable[int] | None = None) -> None:
        if devices is None:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._cpu = torch.get_rng_state()
        self._gpus = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        """Let the generators go on from there."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._gpus:
            torch.cuda.set_rng_state(state, device)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Put the states back that all generators have now."""
    states = RandomStates()
    try:
        yield
    finally:
        states.restore()
