"""The zoo on a CUDA device: the same bits as the plain step, wherever the plain step has the same bits twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.engine.plans import applied
from tests.engine.step_comparison import StepsDifferError, Trace, assert_same, trace_steps
from tests.engine.zoo import ZOO, Example

import memfit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def reproducible_kernels() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def trace_on_gpu(example: Example, plan: memfit.Plan | None) -> Trace:
    with torch.device("cuda"):
        model, batch, loss = example.build()
        if plan is None:
            return trace_steps((model, batch, loss), training=True, context=example.context)
        with applied(model, plan):
            return trace_steps((model, batch, loss), training=True, context=example.context)


def all_that_replays(example: Example) -> memfit.Plan:
    with torch.device("cuda"), example.context():
        model, batch, loss = example.build()
        profile = memfit.profile(model, batch, loss=loss)
    return memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*"])


def plain_trace(example: Example) -> Trace:
    """Return the plain model's trace; skip where it does not run on this device or differs from itself."""
    try:
        trace = trace_on_gpu(example, None)
        assert_same(trace, trace_on_gpu(example, None))
    except StepsDifferError as difference:
        pytest.skip(f"the plain step differs from itself here: {difference}")
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"the plain step does not run on this device: {error}")
    return trace


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", ZOO, ids=str)
def test_training_steps_are_those_of_the_plain_model(example: Example) -> None:
    expected = plain_trace(example)
    assert_same(expected, trace_on_gpu(example, all_that_replays(example)))
