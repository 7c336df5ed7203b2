"""Verifications as files."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import PlanFileError
from memfit.graph.verification import Quartiles, Verification
from memfit.graph.verification_file import verification_document, verification_from_document

ratios = st.floats(allow_nan=False, allow_infinity=False)
errors = st.none() | st.floats(min_value=0, allow_nan=False)
counts = st.integers(0, 2**64 - 1)
quartiles = st.builds(Quartiles, ratios, ratios)
verifications = st.builds(
    Verification,
    gradients_equal=st.none() | st.booleans(),
    max_gradient_error=errors,
    plain_reproducible=st.none() | st.booleans(),
    plain_gradient_error=errors,
    differing_parameters=st.lists(st.text(), max_size=3).map(tuple),
    plain_peak_bytes=st.none() | counts,
    peak_bytes=counts,
    predicted_peak_bytes=counts,
    budget_bytes=st.none() | counts,
    plain_step_seconds=st.none() | ratios,
    step_seconds=ratios,
    overhead=st.none() | ratios,
    plain_step_quartiles_seconds=st.none() | quartiles,
    step_quartiles_seconds=quartiles,
    overhead_quartiles=st.none() | quartiles,
    num_rounds=counts,
    device=st.text(),
    device_name=st.text(),
    torch_version=st.text(),
    fingerprint=st.text(),
    plain_gradient_distance=errors,
    host_bytes=counts,
)


def example() -> Verification:
    return Verification(
        gradients_equal=False,
        max_gradient_error=math.inf,
        plain_reproducible=True,
        plain_gradient_error=0.0,
        differing_parameters=("head.weight",),
        plain_peak_bytes=200,
        peak_bytes=120,
        predicted_peak_bytes=100,
        budget_bytes=110,
        plain_step_seconds=1.0,
        step_seconds=1.5,
        overhead=0.5,
        plain_step_quartiles_seconds=Quartiles(0.9, 1.1),
        step_quartiles_seconds=Quartiles(1.4, 1.6),
        overhead_quartiles=Quartiles(0.4, 0.6),
        num_rounds=5,
        device="cpu",
        device_name="a processor",
        torch_version="2.13.0",
        fingerprint="0123456789abcdef",
    )


@given(verifications)
def test_what_is_written_is_read_back(verification: Verification) -> None:
    document = json.loads(json.dumps(verification_document(verification), allow_nan=False))
    assert verification_from_document(document, "file") == verification


def test_a_file_tells_what_follows_from_it_too(tmp_path: Path) -> None:
    example().save(tmp_path / "verification.json")
    document = json.loads((tmp_path / "verification.json").read_text(encoding="utf-8"))
    assert document["within_budget"] is False
    assert document["holds"] is False
    assert document["max_gradient_error"] == "infinite"
    assert Verification.load(tmp_path / "verification.json") == example()


@pytest.mark.parametrize(
    ("error", "noise", "hold"),
    [
        (1e-6, 1e-6, True),
        (4e-6, 1e-6, True),
        (5e-6, 1e-6, False),
        (12.0, 12.0, True),
    ],
)
def test_gradients_hold_within_noise_and_noise_is_small(error: float, noise: float, hold: bool) -> None:
    verification = replace(
        example(), gradients_equal=False, max_gradient_error=error, plain_reproducible=False, plain_gradient_error=noise
    )
    assert verification.gradients_hold is hold
    assert ("as the plain step's" in repr(verification)) is hold


@pytest.mark.parametrize("distance", [2e-2, 3e-2, math.inf])
def test_what_is_farther_from_itself_than_rounding_takes_it_proves_nothing(distance: float) -> None:
    verification = replace(
        example(),
        gradients_equal=False,
        max_gradient_error=0.5,
        plain_reproducible=False,
        plain_gradient_error=0.5,
        plain_gradient_distance=distance,
    )
    assert verification.plain_differs is (distance > 2e-2)
    assert verification.gradients_hold is (distance <= 2e-2)


def test_a_peak_over_its_prediction_is_told_as_a_share_of_it() -> None:
    assert example().peak_miss == pytest.approx(0.2)


@pytest.mark.parametrize("name", [field.name for field in fields(Verification)])
@pytest.mark.parametrize("wrong", [object, {}, [1], -1.5j, 10**400])
def test_a_field_of_the_wrong_kind_is_refused_by_name(name: str, wrong: object) -> None:
    document = verification_document(example()) | {name: wrong}
    with pytest.raises(PlanFileError, match=f"file: {name} must be"):
        verification_from_document(document, "file")


def test_a_file_cut_in_half_says_so(tmp_path: Path) -> None:
    path = tmp_path / "verification.json"
    example().save(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(PlanFileError, match=r"line .*: not JSON"):
        Verification.load(path)


def test_a_missing_field_and_a_later_version_are_refused() -> None:
    document = verification_document(example())
    del document["overhead"]
    with pytest.raises(PlanFileError, match='"overhead" is missing'):
        verification_from_document(document, "file")
    with pytest.raises(PlanFileError, match="version 2 of memfit-verification is newer than this memfit"):
        verification_from_document(verification_document(example()) | {"version": 2}, "file")
