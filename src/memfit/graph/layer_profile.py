"""What is known of a layer: its kind, the bytes of its activation, and the FLOPs to compute it again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from memfit.errors import InvalidParameterError
from memfit.validation import shown, whole_number


class LayerTypeHint(StrEnum):
    """The kind of a layer, as far as strategies care; ``str()`` gives the name that files and tables use."""

    ATTENTION = "Attention"
    FFN = "FFN"
    EMBEDDING = "Embedding"
    NORM = "Norm"
    OTHER = "Other"


@dataclass(frozen=True, slots=True)
class LayerMemoryProfile:
    """One layer of a model: the bytes its activation holds, and the FLOPs to compute it again.

    ``layer_idx`` names the layer in plans and is unique within a list; the order is the list's. Numbers are
    whole, from 0 to 2**64 - 1. ``name`` is for people and decides nothing.
    """

    layer_idx: int
    layer_type: LayerTypeHint
    activation_size_bytes: int
    recompute_flops: int
    name: str | None = None

    def __post_init__(self) -> None:
        # Integers of NumPy become Python's here, so that sums stay exact later.
        for field in ("layer_idx", "activation_size_bytes", "recompute_flops"):
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value < 2**63:
                object.__setattr__(self, field, whole_number(value, field))
        if not isinstance(self.layer_type, LayerTypeHint):
            allowed = ", ".join(f"LayerTypeHint.{hint.name}" for hint in LayerTypeHint)
            raise InvalidParameterError(f"layer_type must be one of {allowed}; got {shown(self.layer_type)}")
        if self.name is not None and not isinstance(self.name, str):
            raise InvalidParameterError(f"name must be a string or None; got {shown(self.name)}")

    @property
    def recompute_cost_ratio(self) -> float:
        """FLOPs paid for each byte freed; 0 where there is no byte to free."""
        if self.activation_size_bytes == 0:
            return 0.0
        return self.recompute_flops / self.activation_size_bytes


def checked_profiles(profiles: Iterable[LayerMemoryProfile]) -> list[LayerMemoryProfile]:
    """Return ``profiles`` as a list of profiles with distinct ``layer_idx``."""
    try:
        if isinstance(profiles, (str, bytes)):
            raise TypeError
        entries = iter(profiles)
    except TypeError:
        raise InvalidParameterError(
            f"profiles must be a list of LayerMemoryProfile, one per layer; got {shown(profiles)}"
        ) from None
    checked = list(entries)
    for position, profile in enumerate(checked):
        if not isinstance(profile, LayerMemoryProfile):
            raise InvalidParameterError(f"profiles[{position}] must be a LayerMemoryProfile; got {shown(profile)}")
    if len({profile.layer_idx for profile in checked}) < len(checked):
        last_of = {profile.layer_idx: position for position, profile in enumerate(checked)}
        first = next(position for position, profile in enumerate(checked) if last_of[profile.layer_idx] != position)
        layer_idx = checked[first].layer_idx
        raise InvalidParameterError(
            f"layer_idx {layer_idx} is given twice, in profiles[{first}] and profiles[{last_of[layer_idx]}]; "
            "each layer needs its own layer_idx"
        )
    return checked
