"""The first batches of a data loader, taken without changing what training will see, and fitting a model to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import distributed, nn

from memfit.capture.state.random_states import kept_random_states
from memfit.capture.step_arguments import StepArguments, StepFunction
from memfit.errors import InvalidParameterError
from memfit.fitted import Fitted
from memfit.fitting import fit
from memfit.runtime.applying.batch_tensors import tensors_of
from memfit.sizes.batch_form import BatchForm

MOST_MICRO_BATCHES = 2
"""How many a measured step has: the gradients of the first exist while the second one runs, as in all that follow."""

_NUM_BATCHES = 8


def smallest_and_largest(loader: Iterable[Any]) -> tuple[Any, Any]:
    """Return the batches with the fewest and with the most elements among the first few of ``loader``.

    Random number generators, and the counters and generators of torch's data loaders and samplers, are left as they
    were. A data set that can be iterated once only is not.
    """
    # Loaders of accelerate stand around one of torch, and count how often they are iterated.
    loader = getattr(loader, "base_dataloader", loader)
    with kept_random_states(), _kept_positions(loader):
        batches = list(islice(loader, _NUM_BATCHES))
    if not batches:
        raise InvalidParameterError("the training data loader has no batches, so that no step can be measured")
    return min(batches, key=_num_elements), max(batches, key=_num_elements)


def fit_sizes(model: nn.Module, smallest: Any, largest: Any, *, step: StepFunction, **options: Any) -> Fitted:
    """Fit ``model`` to batches of every size up to the ``largest``, where that and the ``smallest`` differ in sizes.

    To the largest alone where they do not differ, differ in other ways, or where blocks are compiled. Processes of one
    job see batches of different sizes, and would not measure equally often; they plan for the largest, too.
    """
    is_one_of_several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if options["compile"] or is_one_of_several or not _differ_in_sizes(smallest, largest, step):
        return fit(model, largest, step=step, **options)
    fitted = fit(model, batches=[smallest, largest], step=step, **options)
    if fitted.profile.inputs:
        return fitted
    # The step calls parts of the model and never the model itself, which is where plans are chosen by size.
    fitted.remove()
    return fit(model, largest, step=step, **options)


def _differ_in_sizes(smallest: Any, largest: Any, step: StepFunction) -> bool:
    try:
        BatchForm(StepArguments(largest, step=step), [smallest, largest])
    except InvalidParameterError:
        return False
    return True


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
        # Lightning puts several loaders in one, which has them as `flattened`.
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
        waiting += getattr(part, "flattened", ())
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
