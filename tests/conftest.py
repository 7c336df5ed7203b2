"""For all tests: how long an example takes on a machine that also does other things says nothing about the example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("memfit", deadline=None)
settings.load_profile("memfit")
