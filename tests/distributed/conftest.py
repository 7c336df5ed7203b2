from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.distributed.ranks_at_work import RanksAtWork


@pytest.fixture(scope="session")
def ranks() -> Iterator[RanksAtWork]:
    at_work = RanksAtWork()
    yield at_work
    at_work.end()
