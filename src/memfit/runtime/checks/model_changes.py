"""Notices that a planned model was changed after its plan was made: modules replaced, checkpointing switched on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import nn

from memfit.errors import InvalidParameterError

# What transformers and diffusers, and timm, call the switch of each module that can be recomputed as a whole.
_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")


class ModelChanges:
    """Warns of each change of ``model`` since the last look, in the words of what was done."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._note()

    def see(self) -> bool:
        """Look at the model, and return whether it has changed.

        It takes a few microseconds per hundred modules where nothing has.
        """
        if all(tuple(children.values()) == before for _, children, before in self._children) and all(
            getattr(module, name, False) == before for _, module, name, before in self._switches
        ):
            return False
        replaced, switched_on = next(self._replaced(), None), next(self._switched_on(), None)
        self._note()
        if replaced is not None:
            warnings.warn(
                f"the model was changed after its plan was made ({replaced}): gradients are right, the predicted peak "
                "does not hold. Fit the model again as it is now",
                stacklevel=5,
            )
        if switched_on is not None:
            warnings.warn(
                f"gradient checkpointing was switched on after the plan was made ({switched_on}): it recomputes blocks "
                "as a whole, and the plan does nothing inside them. Gradients are right, the predicted peak does not "
                "hold. Switch it off, such as by gradient_checkpointing_disable(), or fit the model again",
                stacklevel=5,
            )
        return True

    def _note(self) -> None:
        modules = dict(self._model.named_modules())
        self._children = [
            (path, module._modules, tuple(module._modules.values()))
            for path, module in modules.items()
            if module._modules
        ]
        self._switches = [
            (path, module, name, getattr(module, name))
            for path, module in modules.items()
            for name in _SWITCHES
            if isinstance(getattr(module, name, None), bool)
        ]

    def _replaced(self) -> Iterator[str]:
        for path, children, before in self._children:
            prefix = f"{path}." if path else ""
            known = {id(module) for module in before}
            for name, module in children.items():
                if module is not None and id(module) not in known:
                    yield f"{prefix + name!r} is another {type(module).__name__} now"
            if len(children) < len(before):
                yield f"{path!r} has {len(children)} modules now, and had {len(before)}"

    def _switched_on(self) -> Iterator[str]:
        for path, module, name, before in self._switches:
            if not before and getattr(module, name, False):
                yield f"{name} of {path or type(module).__name__!r}"


def checkpointed_in(model: nn.Module) -> str | None:
    """Return the first module of ``model`` that is recomputed as a whole in training, in words; None where none is."""
    for path, module in model.named_modules():
        named = path or type(module).__name__
        if type(module).__name__ == "CheckpointWrapper":
            return f"{named!r} is a CheckpointWrapper"
        for name in _SWITCHES:
            # Methods of that name are no switches, and in evaluation mode the switch does nothing.
            if getattr(module, name, False) is True and module.training:
                return f"{name} of {named!r} is on"
    return None


def warn_of_checkpointing(model: nn.Module, *, stacklevel: int) -> None:
    """Warn where parts of ``model`` are recomputed as a whole."""
    found = checkpointed_in(model)
    if found is not None:
        warnings.warn(
            f"the model uses gradient checkpointing ({found}): memfit cannot plan inside blocks that are recomputed "
            "as a whole. Switch it off, such as by gradient_checkpointing_disable(), and the plan decides what is "
            "recomputed",
            stacklevel=stacklevel + 1,
        )


def refuse_compiled_as_a_whole(model: nn.Module) -> None:
    """Raise where ``model``, or a part of it that has a list of modules, is compiled as a whole."""
    for path, module in model.named_modules():
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules
        if is_compiled and any(isinstance(inner, nn.ModuleList) and len(inner) > 1 for inner in module.modules()):
            named = f"the module {path!r}" if path else f"this {type(module).__name__}"
            raise InvalidParameterError(
                f"{named} is compiled as a whole, which leaves nothing to plan block by block. Give the model as it is "
                "without torch.compile(model) or model.compile(): memfit.fit(..., compile=True) compiles its blocks. "
                "Blocks that are compiled one by one are fine"
            )
