"""One pool of eight ranks for the whole session: starting it takes seconds, a job on it a tenth of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from surefoot.dist.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool(8, timeout=20)
    yield pool
    pool.close()
