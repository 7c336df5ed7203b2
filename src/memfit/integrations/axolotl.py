"""memfit as a plugin of axolotl."""

from __future__ import annotations

from typing import Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from memfit.fitted import Fitted
from memfit.integrations.transformers import MemfitCallback


class MemfitArgs(BaseModel):  # type: ignore[misc, unused-ignore]
    """What `MemfitPlugin` reads from axolotl's configuration. The arguments are those of `memfit.fit`."""

    memfit_budget: str | int | float
    memfit_host_budget: str | int | float = 0
    memfit_compile: bool | Literal["auto"] = False
    memfit_chunk_loss: bool = False


class MemfitPlugin(BasePlugin):  # type: ignore[misc]
    """Fits axolotl's training step into a budget, by adding `memfit.integrations.transformers.MemfitCallback`.

    In the configuration::

        plugins:
          - memfit.integrations.axolotl.MemfitPlugin
        memfit_budget: 20GiB

    ``memfit_host_budget``, ``memfit_compile`` and ``memfit_chunk_loss`` are optional. ``fitted`` is the result once
    training has begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self._callback: MemfitCallback | None = None

    @property
    def fitted(self) -> Fitted | None:
        """The result of `memfit.fit`; None before training has begun."""
        return None if self._callback is None else self._callback.fitted

    def get_input_args(self) -> str:
        """Return the class of the plugin's part of the configuration."""
        return f"{__name__}.{MemfitArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[MemfitCallback]:
        """Return the callback that fits the step when training begins."""
        self._callback = MemfitCallback(
            cfg.memfit_budget,
            host_budget=cfg.memfit_host_budget or 0,
            compile=cfg.memfit_compile or False,
            chunk_loss=cfg.memfit_chunk_loss or False,
        )
        return [self._callback]

    def post_train(self, cfg: Any, model: Any) -> None:
        """Print what was measured."""
        print(self.fitted)
