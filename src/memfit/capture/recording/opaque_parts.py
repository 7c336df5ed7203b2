"""Names the parts of a recorded step that are opaque to memfit, in which no plan recomputes or offloads anything."""

from __future__ import annotations

from torch import nn

from memfit.capture.recording.module_scopes import is_compiled
from memfit.capture.recording.step_recording import Recording


def opaque_parts(model: nn.Module, recording: Recording) -> tuple[str, ...]:
    """Return a note on each kind of opaque part of the step that made ``recording``."""
    notes: list[str] = []
    compiled = [path or type(model).__name__ for path, module in model.named_modules() if is_compiled(module)]
    if compiled:
        notes.append(
            f"{_named(compiled)} compiled by torch.compile: what compiled code saves stays saved, unless it is "
            "planned as compiled blocks (compile=True)"
        )
    if recording.recomputed_modules:
        notes.append(
            f"{_named(recording.recomputed_modules)} recomputed as a whole in the backward pass "
            "(torch.utils.checkpoint): memfit cannot plan inside"
        )
    if recording.opaque_saves:
        notes.append(
            f"autograd saves tensors of the kind {', '.join(sorted(recording.opaque_saves))}, which are opaque to "
            "memfit: no plan recomputes or offloads them"
        )
    if recording.returns_cache:
        notes.append(
            "the model returns a cache of keys and values, which live as long as its output; use_cache=False lets "
            "plans drop them"
        )
    return tuple(notes)


def _named(paths: list[str] | tuple[str, ...]) -> str:
    return f"{paths[0]} is" if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more modules are"
