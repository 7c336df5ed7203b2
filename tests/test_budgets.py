"""Budgets of the host's memory: what they may be, and what they come to for a profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.planning.model_families import chain

from memfit.budgets import HostBudgetLike, host_budget_in_bytes
from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import Link, ModelProfile

GIB = 2**30


def on_gpu(link: Link | None) -> ModelProfile:
    return replace(chain(num_layers=2), device="cuda:0", link=link)


LINK = Link(50e9, 40e9, 1e-5, host_free_bytes=100 * GIB + 1)


@pytest.mark.parametrize(
    ("host_budget", "num_bytes"),
    [
        (0, 0),
        (1, 1),
        (200 * GIB, 200 * GIB),
        (np.int32(200), 200),
        ("64GiB", 64 * GIB),
        (" 1.5 kB ", 1500),
        ("0B", 0),
        ("auto", 50 * GIB),
        (" AUTO", 50 * GIB),
    ],
)
def test_host_budgets_may_be_bytes_texts_and_auto(host_budget: HostBudgetLike, num_bytes: int) -> None:
    found = host_budget_in_bytes(host_budget, on_gpu(LINK))
    assert (type(found), found) == (int, num_bytes)


@pytest.mark.parametrize("nothing", [0, "0GiB", np.int64(0)])
def test_nothing_on_the_host_needs_no_link(nothing: HostBudgetLike) -> None:
    assert host_budget_in_bytes(nothing, on_gpu(None)) == 0
    assert host_budget_in_bytes(nothing, replace(chain(num_layers=2), device="cpu")) == 0


@pytest.mark.parametrize("host_budget", [1, "64GiB", "auto"])
def test_without_a_link_anything_else_is_told_with_what_to_do(host_budget: HostBudgetLike) -> None:
    given = f"host_budget={host_budget!r} needs the speed of the link"
    with pytest.raises(InvalidParameterError, match=f"^{given} from 'cuda:0'.*profile again on the GPU"):
        host_budget_in_bytes(host_budget, on_gpu(None))
    with pytest.raises(InvalidParameterError, match=f"^{given} from 'cpu'.*a CPU's memory is the host's"):
        host_budget_in_bytes(host_budget, replace(chain(num_layers=2), device="cpu"))


@pytest.mark.parametrize(
    ("host_budget", "told"),
    [
        (0.5, r"got 0\.5 \(float\)"),
        (0.0, r"got 0\.0 \(float\)"),
        (np.float32(1), r"got np\.float32"),
        (True, r"got True \(bool\)"),
        (False, r"got False \(bool\)"),
        (np.False_, r"got np\.False_"),
        (-1, "got -1, which is negative"),
        (None, r"got None \(NoneType\)"),
        (np.array([200]), r"got array\(\[200\]\)"),
    ],
)
def test_a_wrong_host_budget_is_told_with_what_is_allowed(host_budget: object, told: str) -> None:
    with pytest.raises(InvalidParameterError, match=rf'^host_budget is an int of bytes, a text.* or "auto".*{told}'):
        host_budget_in_bytes(host_budget, on_gpu(LINK))  # type: ignore[arg-type]


def test_a_text_that_is_no_size_is_told_with_the_units() -> None:
    with pytest.raises(InvalidParameterError, match="'much' is not a size"):
        host_budget_in_bytes("much", on_gpu(LINK))


def test_a_step_captured_into_a_cuda_graph_offloads_nothing() -> None:
    captured = on_gpu(LINK).for_cuda_graph()
    assert captured == on_gpu(None).for_cuda_graph()
    assert captured.link is None
    with pytest.raises(InvalidParameterError, match="or for a CUDA graph"):
        host_budget_in_bytes("auto", captured)
