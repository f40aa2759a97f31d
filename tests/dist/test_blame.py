"""Verdicts over what ranks say of themselves: the one that holds the others up, not the many that wait."""

from __future__ import annotations

from typing import Any

from surefoot.dist.blame import Collective, Sign, judge

WORLD = (0, 1, 2, 3)


def waits(number: int, ranks: tuple[int, ...] = WORLD, name: str = "all_reduce") -> Collective:
    return Collective(name, number, ranks, "waits")


def sign(rank: int, beat: int = 30, **values: Any) -> Sign:
    known = {"status": "closing", "step": 7, "phase": "data", "seconds": 60.0, "process": 1, "machine": "a"}
    return Sign(**known | {"rank": rank, "beat": beat} | values)


def verdict(*signs: Sign, silent: dict[int, str] | None = None) -> tuple[tuple[int, ...], str]:
    found = judge({one.rank: one for one in signs}, silent or {}, 60.0)
    return found.ranks, found.text


def test_a_sign_goes_through_text() -> None:
    one = sign(2, collective=waits(4), error="x")
    assert Sign.read(one.text()) == one


def test_the_one_that_is_in_no_collective() -> None:
    ranks, text = verdict(
        sign(0, collective=waits(57)),
        sign(1, collective=waits(57)),
        sign(2, collective=waits(57)),
        sign(3, collective=Collective("all_reduce", 56, WORLD, "done")),
    )
    assert ranks == (3,)
    assert text == (
        "rank 3 hung in step 7 (data): no progress for 60 s, last in all_reduce #56 of all ranks; "
        "the others wait in all_reduce #57 of all ranks"
    )


def test_of_several_busy_ranks_the_one_that_is_behind() -> None:
    """Rank 1 waits for rank 0 in a part of the grid, and rank 2 has gone on to the next phase."""
    ranks, _ = verdict(sign(0), sign(1, collective=waits(3, (0, 1))), sign(2, beat=31))
    assert ranks == (0,)


def test_ranks_that_are_all_busy_are_told_to_take_their_time() -> None:
    ranks, text = verdict(*(sign(rank) for rank in WORLD))
    assert ranks == WORLD
    assert text.endswith("raise train.timeout above 60")


def test_a_rank_that_failed_comes_before_one_that_is_silent() -> None:
    ranks, text = verdict(
        sign(0, collective=waits(1)), sign(1, status="failed", error="disk full"), silent={2: "is dead"}
    )
    assert ranks == (1,)
    assert text == "rank 1 failed in step 7 (data): disk full"


def test_a_silent_rank_comes_before_those_that_wait() -> None:
    ranks, text = verdict(
        sign(0, error="Connection closed"), sign(1, beat=29, status="runs"), sign(2), silent={1: "is dead"}
    )
    assert ranks == (1,)
    assert text == "rank 1 is dead, last seen in step 7 (data); rank 0 waits in step 7 (data)"


def test_ranks_that_wait_in_different_places() -> None:
    """By phase, then by the number of a group's collective."""
    assert verdict(sign(0, beat=29, collective=waits(8)), sign(1, collective=waits(9)))[0] == (0,)
    assert verdict(sign(0, collective=waits(9)), sign(1, collective=waits(8)))[0] == (1,)
    ranks, text = verdict(sign(0, collective=waits(8)), sign(1, collective=waits(8)))
    assert ranks == ()
    assert "network" in text
