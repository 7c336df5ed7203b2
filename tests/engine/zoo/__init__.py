"""The zoo: tiny models of every family that the engine must run bit for bit. One file per family."""

from __future__ import annotations

from tests.engine.zoo import (
    arguments,
    attention,
    complex_numbers,
    composition,
    convolution,
    custom_functions,
    functional,
    gpt,
    indexing,
    kept_state,
    mutation,
    parametrised,
    randomness,
    recurrent,
    routing,
    sharing,
    small,
    transformers_models,
)
from tests.engine.zoo.example import Example as Example

FAMILIES = (
    small,
    gpt,
    convolution,
    routing,
    recurrent,
    sharing,
    mutation,
    kept_state,
    arguments,
    custom_functions,
    functional,
    complex_numbers,
    randomness,
    indexing,
    parametrised,
    attention,
    composition,
    transformers_models,
)
ZOO: tuple[Example, ...] = tuple(example for family in FAMILIES for example in family.EXAMPLES)
BY_NAME = {example.name: example for example in ZOO}
assert len(BY_NAME) == len(ZOO), "two examples of the zoo have one name"
