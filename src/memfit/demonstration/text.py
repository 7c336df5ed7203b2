"""Text generated on the spot, from a handful of words, with enough grammar for a small model to learn some."""

from __future__ import annotations

import random

import torch
from torch import Tensor

_DETERMINERS = ("the", "a", "every", "no")
_ADJECTIVES = ("small", "large", "quiet", "old", "green", "hidden")
_NOUNS = ("tensor", "graph", "kernel", "layer", "river", "garden", "clock", "letter")
_VERBS = ("saves", "recomputes", "holds", "forgets", "finds", "carries")


def generated_text(num_characters: int, seed: int = 0) -> str:
    """Return that many characters of made-up sentences."""
    choose = random.Random(seed).choice
    sentences: list[str] = []
    length = 0
    while length < num_characters:
        subject, thing = (f"{choose(_DETERMINERS)} {choose(_ADJECTIVES)} {choose(_NOUNS)}" for _ in range(2))
        sentences.append(f"{subject} {choose(_VERBS)} {thing}. ")
        length += len(sentences[-1])
    return "".join(sentences)[:num_characters]


class CharacterBatches:
    """Draws batches of token ids, one for each character, from a text."""

    def __init__(self, text: str, batch: int, length: int) -> None:
        self.alphabet = sorted(set(text))
        self._ids = torch.tensor([self.alphabet.index(character) for character in text])
        self._batch, self._length = batch, length

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return ``batch`` pieces of ``length`` + 1 characters; the last of each is only predicted."""
        starts = torch.randint(len(self._ids) - self._length, (self._batch,), generator=generator)
        return torch.stack([self._ids[start : start + self._length + 1] for start in starts.tolist()])
