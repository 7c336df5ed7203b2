"""For all tests: one thread for torch and its compiler, no deadlines, and quick garbage collections.

The models are tiny: threads would only wait, and several test processes share the machine. How long an example takes on
a machine that also does other things says nothing about the example.
"""

from __future__ import annotations

import gc
import os

from hypothesis import settings

# Before torch is imported, and for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

settings.register_profile("memfit", deadline=None)
settings.load_profile("memfit")


def pytest_collection_finish() -> None:
    """Leave what imports made, millions of objects, out of all later garbage collections."""
    gc.collect()
    gc.freeze()
