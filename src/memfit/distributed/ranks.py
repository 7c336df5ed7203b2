"""The processes that run a model's collectives together, and how they agree on a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import distributed, nn

from memfit.distributed.local_tensors import is_dtensor
from memfit.distributed.wrapped_models import ddp_modules
from memfit.errors import MemfitError

_T = TypeVar("_T")


class Ranks:
    """The processes of ``groups``; this process alone where there are none.

    Several groups are the dimensions of a device mesh, in order. All processes must make the same calls in the same
    order: each is a collective. Where they do not have the same model, as the stages of a pipeline, each has profiles
    and plans of its own, and they agree only on how often and whether to run.
    """

    def __init__(self, groups: tuple[Any, ...] = (), *, have_one_model: bool = True) -> None:
        self._groups = groups
        self._have_one_model = have_one_model

    @property
    def are_several(self) -> bool:
        """Whether there is another process."""
        return any(group.size() > 1 for group in self._groups)

    def agreed(self, value: _T) -> _T:
        """Return the ``value`` of the first process."""
        for group in self._groups:
            box = [value]
            distributed.broadcast_object_list(box, group=group, group_src=0)
            value = box[0]
        return value

    def of_model(self, value: _T) -> _T:
        """Return the ``value`` of the first process; this one's where their models differ."""
        return self.agreed(value) if self._have_one_model else value

    def decided(self, decide: Callable[[], _T]) -> _T:
        """Return what ``decide()`` returns in the first process, or raise the MemfitError that it raises there.

        Where the models differ, each process decides for its own, and all raise if one does.
        """
        decision: _T | None = None
        error: MemfitError | None = None
        if not self._have_one_model or all(group.rank() == 0 for group in self._groups):
            try:
                decision = decide()
            except MemfitError as raised:
                error = raised
        decision = self.of_model(decision)
        errors = [each for each in self.gathered(error) if each is not None]
        if errors:
            raise error or errors[0]
        return cast("_T", decision)

    def largest(self, value: _T, size: int) -> _T:
        """Return the ``value`` of the process with the largest ``size``; this one's where their models differ."""
        if not self._have_one_model:
            return value
        for group in self._groups:
            sizes = [0] * group.size()
            distributed.all_gather_object(sizes, size, group=group)
            box, size = [value], max(sizes)
            distributed.broadcast_object_list(box, group=group, group_src=sizes.index(size))
            value = box[0]
        return value

    def gathered(self, value: _T) -> list[_T]:
        """Return the values of all processes, in the same order everywhere."""
        values = [value]
        for group in self._groups:
            parts: list[list[_T]] = [[] for _ in range(group.size())]
            distributed.all_gather_object(parts, values, group=group)
            values = [value for part in parts for value in part]
        return values


def ranks_of(model: nn.Module, *, runs_collectives: bool = False, have_one_model: bool = True) -> Ranks:
    """Return the processes that run the collectives of ``model``, which must be wrapped already.

    With ``runs_collectives``, a model without a wrapper belongs to all processes: its step was seen to run some.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return Ranks()
    # A DTensor knows the mesh that it is spread over.
    meshes: list[Any] = [parameter.device_mesh for parameter in model.parameters() if is_dtensor(parameter)]  # type: ignore[attr-defined]
    if meshes:
        widest = max(meshes, key=lambda mesh: mesh.size())
        return Ranks(tuple(widest.get_all_groups()))
    groups = [module.process_group for module in ddp_modules(model)]
    if groups:
        return Ranks((groups[0],))
    return Ranks((distributed.group.WORLD,), have_one_model=have_one_model) if runs_collectives else Ranks()
