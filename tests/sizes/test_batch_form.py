"""Which sizes batches vary in, and batches of other sizes, without a model."""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.step_arguments import StepArguments
from memfit.graph.inputs import Input
from memfit.sizes.batch_form import BatchForm


def form_of(*batches: Any) -> BatchForm:
    return BatchForm(StepArguments(batch=batches), list(batches))


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {
        "ids": torch.arange(rows * length).view(rows, length),
        "mask": torch.ones(rows, 1, length, length, dtype=torch.bool),
        "labels": torch.zeros(rows, length + 1),
    }


def inputs(**shapes: tuple[str, tuple[int, ...]]) -> tuple[Input, ...]:
    return tuple(Input(name, dtype, shape) for name, (dtype, shape) in shapes.items())


def test_lengths_that_differ_by_the_same_amounts_are_one_size() -> None:
    form = form_of(tokens(2, 16), tokens(2, 4))
    # Labels have one more, and are the longest of equally many.
    assert form.least_sizes == (4,)
    assert form.most_sizes == (16,)
    assert form.multiples == (4,)
    assert form.shapes_at((7,)) == ((2, 7), (2, 1, 7, 7), (2, 8))
    batch = form.at(form.shapes_at((7,))).batch
    assert torch.equal(batch["ids"], form.arguments[-1].batch["ids"][:, :7])
    assert form.at(form.shapes[0]) is form.arguments[0]


def test_rows_and_lengths_are_two_sizes() -> None:
    form = form_of(tokens(2, 4), tokens(8, 16))
    assert form.most_sizes == (8, 16)
    assert form.shapes_at((3, 5)) == ((3, 5), (3, 1, 5, 5), (3, 6))
    form.tie_axes()
    # Together: as far from the smallest to the largest.
    (most,) = form.most_sizes
    assert form.shapes_at((most,)) == form.shapes[-1]
    assert form.shapes_at((10,)) == ((5, 10), (5, 1, 10, 10), (5, 11))


def test_a_larger_batch_has_the_shapes_that_its_inputs_need() -> None:
    form = form_of(tokens(2, 4), tokens(2, 16))
    planned = inputs(ids=("int64", (2, 16)), mask=("bool", (2, 1, 16, 16)))
    longer = inputs(ids=("int64", (2, 20)), mask=("bool", (2, 1, 20, 20)))
    assert form.shapes_for(longer, planned) == ((2, 20), (2, 1, 20, 20), (2, 21))
    # An eighth to spare, as a multiple of what lengths are multiples of.
    assert form.shapes_for(longer, planned, spare=1 / 8) == ((2, 24), (2, 1, 24, 24), (2, 25))
    # A batch that is no such multiple shows that the model takes others.
    odd = inputs(ids=("int64", (2, 33)), mask=("bool", (2, 1, 33, 33)))
    assert form.shapes_for(odd, planned, spare=1 / 8)[0] == (2, 38)
    # Rows did not vary; labels, which the model does not see, have as many.
    more_rows = inputs(ids=("int64", (3, 8)), mask=("bool", (3, 1, 8, 8)))
    assert form.shapes_for(more_rows, planned) == ((3, 8), (3, 1, 8, 8), (3, 9))
    assert form.shapes_for(more_rows, planned, fills=True) == ((3, 16), (3, 1, 16, 16), (3, 17))
    assert form.is_within_largest(form.shapes_at((9,)))
    assert not form.is_within_largest(form.shapes_for(more_rows, planned))


def test_sides_of_images_may_grow_differently_though_they_varied_together() -> None:
    form = form_of(torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 32, 32))
    assert form.most_sizes == (32,)
    planned = inputs(x=("float32", (2, 3, 32, 32)))
    wide = inputs(x=("float32", (2, 3, 16, 40)))
    assert form.shapes_for(wide, planned) == ((2, 3, 16, 40),)


def test_inputs_that_are_made_of_the_batch_grow_as_it_does() -> None:
    form = form_of(torch.zeros(2, 9), torch.zeros(2, 17))
    # The step gives the model all tokens but the last.
    planned = inputs(x=("float32", (2, 16)))
    assert form.shapes_for(inputs(x=("float32", (2, 24))), planned) == ((2, 26),)


def test_a_larger_batch_repeats_the_largest() -> None:
    form = form_of(
        {"ids": torch.arange(4).view(1, 4), "empty": torch.zeros(0, 2)},
        {"ids": torch.arange(6).view(1, 6), "empty": torch.zeros(0, 2)},
    )
    batch = form.at(((2, 8), (3, 2))).batch
    assert batch["ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]] * 2
    assert batch["empty"].shape == (3, 2)


def test_sizes_are_put_in_words() -> None:
    form = form_of(tokens(2, 4), tokens(2, 16))
    assert form.in_words(form.shapes_at((9,))) == "9"
    assert form.in_words(((3, 9), (3, 1, 9, 9), (3, 10))) == "9 (with 3 in place of 2 in dimension 0)"
