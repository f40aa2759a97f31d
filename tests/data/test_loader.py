import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from surefoot.config import DataError
from surefoot.data.dataset import Batch, Corpus, Dataset
from surefoot.data.loader import PREFETCH, Loader


class Probe(Dataset):
    """Counts what is asked of it; fails at one sample."""

    num_samples_per_epoch = 1000

    def __init__(self, fail_at: int = -1) -> None:
        self.asked: list[int] = []
        self.fail_at = fail_at

    def batch(self, first_sample: int, count: int) -> Batch:
        self.asked.append(first_sample)
        if first_sample == self.fail_at:
            raise DataError("the disk is gone")
        rows = np.full((count, 2), first_sample)
        return Batch(rows, rows, rows.astype(np.int32), np.zeros(count, np.int32), count, count)

    def heldout(self, batch_size: int) -> Iterator[Batch]:
        yield self.batch(0, batch_size)


def settled(probe: Probe, count: int) -> bool:
    """Whether the thread stops after exactly `count` calls."""
    deadline = time.monotonic() + 5
    while len(probe.asked) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    return len(probe.asked) == count


def test_batches_come_in_order_from_any_sample() -> None:
    with Loader(Probe(), 4, first_sample=40) as loader:
        assert [int(next(loader).tokens_BL[0, 0]) for _ in range(5)] == [40, 44, 48, 52, 56]


@pytest.mark.parametrize("taken", range(4))
def test_the_state_is_what_was_taken_and_not_what_was_prepared(make_corpus: Callable[..., Corpus], taken: int) -> None:
    corpus = make_corpus({"a": [200] * 9})
    with Loader(corpus, 3, first_sample=6) as loader:
        for _ in range(taken):
            next(loader)
        state = loader.state()
        following = next(loader)
    assert state == {"sample": 6 + 3 * taken}
    with Loader(corpus, 3, state["sample"]) as resumed:
        assert np.array_equal(next(resumed).tokens_BL, following.tokens_BL)


def test_prepares_a_few_batches_ahead_and_no_more() -> None:
    probe = Probe()
    with Loader(probe, 1) as loader:
        assert settled(probe, PREFETCH + 1)  # those waiting, and the one in hand
        next(loader)
        assert settled(probe, PREFETCH + 2)


def test_an_error_reaches_the_batch_it_belongs_to() -> None:
    with Loader(Probe(fail_at=8), 4) as loader:
        assert [int(next(loader).tokens_BL[0, 0]) for _ in range(2)] == [0, 4]
        with pytest.raises(DataError, match="the disk is gone"):
            next(loader)
        assert loader.state() == {"sample": 8}
        with pytest.raises(StopIteration):
            next(loader)


def test_closing_ends_the_thread_and_may_be_repeated() -> None:
    before = threading.active_count()
    loader = Loader(Probe(), 1)
    next(iter(loader))
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(loader)
