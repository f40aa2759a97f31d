"""`Loader`: a run's batches in order, prepared on a thread while the step computes."""

from __future__ import annotations

import queue
import threading
from typing import Self

from surefoot.data.dataset import Batch, Dataset

PREFETCH = 2
"""Batches that wait ready: one in use next, one being spare for a slow read."""


class Loader:
    """Iterates over the batches of `samples_per_step` samples from `first_sample` on, without end.

    With `own`, only those of each step's samples are read: a rank's share. An exception of the dataset is raised by the
    `next` that would have returned its batch.
    """

    def __init__(
        self, dataset: Dataset, samples_per_step: int, first_sample: int = 0, own: slice | None = None
    ) -> None:
        self._dataset, self._samples_per_step, self._sample = dataset, samples_per_step, first_sample
        self._own = own or slice(0, samples_per_step)
        self._ready: queue.Queue[Batch | Exception] = queue.Queue(PREFETCH)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(first_sample,), name="surefoot-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._stopped.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, Exception):
            self.close()
            raise item
        self._sample += self._samples_per_step
        return item

    def state(self) -> dict[str, int]:
        """The first sample that `next` has not returned: all that a resumed run needs."""
        return {"sample": self._sample}

    def close(self) -> None:
        """Stop the thread; batches that wait are dropped. May be called twice."""
        self._stopped.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, sample: int) -> None:
        while not self._stopped.is_set():
            try:
                item: Batch | Exception = self._dataset.batch(
                    sample + self._own.start, self._own.stop - self._own.start
                )
            except Exception as error:  # handed to the consumer, whatever it is
                item = error
            while not self._stopped.is_set():
                try:
                    self._ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, Exception):
                return
            sample += self._samples_per_step
