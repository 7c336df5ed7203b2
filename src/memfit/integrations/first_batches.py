"""The largest of a data loader's first batches, taken without changing what training will see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from memfit.capture.state.random_states import kept_random_states
from memfit.errors import InvalidParameterError
from memfit.runtime.applying.batch_tensors import tensors_of

_NUM_BATCHES = 8


def largest_first_batch(loader: Iterable[Any]) -> Any:
    """Return the batch with the most elements among the first few of ``loader``.

    Random number generators, and the counters and generators of torch's data loaders and samplers, are left as they
    were. A data set that can be iterated once only is not.
    """
    # Loaders of accelerate stand around one of torch, and count how often they are iterated.
    loader = getattr(loader, "base_dataloader", loader)
    with kept_random_states(), _kept_positions(loader):
        batches = list(islice(loader, _NUM_BATCHES))
    if not batches:
        raise InvalidParameterError("the training data loader has no batches, so that no step can be measured")
    return max(batches, key=_num_elements)


def _num_elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_of(batch))


@contextmanager
def _kept_positions(loader: Any) -> Iterator[None]:
    """Put back the attributes of the loader and its samplers, and the states of their generators."""
    found: list[Any] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if part is None or any(part is other for other in found):
            continue
        found.append(part)
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
    attributes = [(part, dict(vars(part))) for part in found if hasattr(part, "__dict__")]
    generators = [value for _, before in attributes for value in before.values() if isinstance(value, torch.Generator)]
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for part, before in attributes:
            vars(part).clear()
            vars(part).update(before)
        for generator, state in states:
            generator.set_state(state)
