"""One thread for torch, as in the engine's tests: the models are tiny."""

from tests.engine.conftest import one_torch_thread

__all__ = ["one_torch_thread"]
