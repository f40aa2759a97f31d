import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from surefoot.data.packing import IGNORED, Packing
from surefoot.data.shards import Names, Split

SEPARATOR, PAD = 0, 999
lengths_strategy = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def split_of(lengths: list[int]) -> Split:
    """Documents whose tokens are all different, so that every prediction can be told apart."""
    ids, ends, token = [], [], 1
    for length in lengths:
        ids += [SEPARATOR, *range(token, token + length), SEPARATOR]
        token += length
        ends.append(len(ids))
    return Split(
        np.array(ids, np.uint16), np.array(ends), Names(np.empty(0, np.uint8), np.zeros(len(lengths), np.int64))
    )


def plain_targets(split: Split) -> NDArray[np.int64]:
    """The target of every stored position, written the slow way."""
    targets = np.append(split.ids[1:].astype(np.int64), IGNORED)
    targets[split.ends - 1] = IGNORED
    return targets


@settings(deadline=None)
@given(lengths=lengths_strategy, length=st.integers(1, 30))
def test_every_target_is_predicted_once_from_the_token_before_it(lengths: list[int], length: int) -> None:
    split = split_of(lengths)
    packing = Packing(split, length, keep_last=True, pad=PAD)
    windows = [packing.window(index) for index in range(packing.num_windows)]
    tokens, targets = (np.concatenate([getattr(w, key) for w in windows]) for key in ("tokens_L", "targets_L"))
    size = len(split.ids)
    assert tokens[:size].tolist() == split.ids.tolist()
    assert targets[:size].tolist() == plain_targets(split).tolist()
    assert (tokens[size:] == PAD).all()
    assert (targets[size:] == IGNORED).all()
    assert packing.num_targets.tolist() == [(w.targets_L != IGNORED).sum() for w in windows]
    assert packing.num_targets.sum() == sum(lengths) + len(lengths)  # each token, and each end


@settings(deadline=None)
@given(lengths=lengths_strategy, length=st.integers(1, 30))
def test_training_drops_only_the_incomplete_window(lengths: list[int], length: int) -> None:
    split = split_of(lengths)
    kept, dropped = (Packing(split, length, keep_last=keep, pad=PAD) for keep in (True, False))
    assert dropped.num_windows == len(split.ids) // length
    assert kept.num_windows == -(-len(split.ids) // length)
    for index in range(dropped.num_windows):
        assert all(
            np.array_equal(getattr(kept.window(index), key), getattr(dropped.window(index), key))
            for key in ("tokens_L", "targets_L", "documents_L")
        )
    assert dropped.num_targets.tolist() == kept.num_targets[: dropped.num_windows].tolist()


@settings(deadline=None)
@given(lengths=lengths_strategy, length=st.integers(1, 30))
def test_documents_are_numbered_and_no_target_lies_in_another(lengths: list[int], length: int) -> None:
    split = split_of(lengths)
    packing = Packing(split, length, keep_last=True, pad=PAD)
    owner = np.repeat(np.arange(len(lengths)), np.diff(split.ends, prepend=0))
    for index in range(packing.num_windows):
        window = packing.window(index)
        here = owner[index * length : (index + 1) * length]
        assert window.documents_L.dtype == np.int32
        assert window.documents_L[: len(here)].tolist() == (here - here[0]).tolist()
        assert (window.documents_L[len(here) :] == here[-1] - here[0] + 1).all()
        for position in np.flatnonzero(window.targets_L != IGNORED):
            target = index * length + position + 1
            assert owner[target] == here[position]


@settings(deadline=None)
@given(lengths=lengths_strategy, length=st.integers(1, 30))
def test_windows_and_documents_find_each_other(lengths: list[int], length: int) -> None:
    split = split_of(lengths)
    packing = Packing(split, length, keep_last=True, pad=PAD)
    covered = {
        (document, index): end - start
        for index in range(packing.num_windows)
        for document, start, end in packing.documents_of(index)
    }
    assert set(covered) == {(doc, window) for doc in range(len(lengths)) for window in packing.windows_of(doc)}
    for document, size in enumerate(lengths):
        assert sum(length for (doc, _), length in covered.items() if doc == document) == size + 2


def test_a_written_out_window() -> None:
    window = Packing(split_of([2, 1]), 9, keep_last=True, pad=PAD).window(0)
    assert window.tokens_L.tolist() == [0, 1, 2, 0, 0, 3, 0, PAD, PAD]
    assert window.targets_L.tolist() == [1, 2, 0, IGNORED, 3, 0, IGNORED, IGNORED, IGNORED]
    assert window.documents_L.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("index", [-1, 2])
def test_no_window_outside(index: int) -> None:
    with pytest.raises(IndexError, match="of 2"):
        Packing(split_of([6]), 4, keep_last=False, pad=PAD).window(index)
