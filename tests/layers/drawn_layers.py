"""Hypothesis strategies for lists of layers, shared by the planner's tests."""

from __future__ import annotations

from hypothesis import strategies as st

from memfit import LayerMemoryProfile, LayerTypeHint

# Small numbers collide and tie; large ones leave the range in which floats are exact.
whole_numbers = st.one_of(st.integers(0, 4), st.integers(0, 1000), st.integers(0, 10**18))


@st.composite
def layer_lists(draw: st.DrawFn, min_size: int = 0, max_size: int = 12) -> list[LayerMemoryProfile]:
    indices = draw(st.lists(st.integers(0, 2**64 - 1), unique=True, min_size=min_size, max_size=max_size))
    numbers = draw(st.sampled_from([st.integers(0, 4), st.integers(0, 1000), st.integers(0, 10**18), whole_numbers]))
    return [
        LayerMemoryProfile(index, draw(st.sampled_from(LayerTypeHint)), draw(numbers), draw(numbers))
        for index in indices
    ]
