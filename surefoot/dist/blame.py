"""Which rank broke a step: the many that wait are told from the one they wait for.

In this order: a rank that failed by an error of its own; one that no longer answers; one that is in no collective while
others are; one that is behind the others. Where none of these is there, all wait for each other and the network is named.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Collective:
    """The newest collective of a rank, as torch's flight recorder has it: the `number`-th of the group of `ranks`."""

    name: str
    number: int
    ranks: tuple[int, ...]
    state: Literal["waits", "done"]

    def describe(self, num_ranks: int) -> str:
        """In words."""
        of = "all ranks" if len(self.ranks) == num_ranks else _list(self.ranks)
        return f"{self.name} #{self.number} of {of}"


@dataclass(frozen=True)
class Sign:
    """What a rank has last said of itself.

    `runs`: all is well; `closing`: it has reported and is about to end, because of what it or another rank found;
    `failed`: by an error of its own; `ended`: at the end of the run. `beat` counts the phases that it has entered: every
    rank goes through the same ones, so that a smaller number is behind.
    """

    rank: int
    status: Literal["runs", "closing", "failed", "ended"]
    beat: int
    step: int
    phase: str
    seconds: float
    process: int
    machine: str
    ticks: int = 0
    collective: Collective | None = None
    error: str | None = None

    def text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> Sign:
        """What `text` wrote."""
        values = json.loads(text)
        if (found := values.pop("collective")) is not None:
            found = Collective(**found | {"ranks": tuple(found["ranks"])})
        return cls(**values, collective=found)

    @property
    def place(self) -> str:
        """In words."""
        return f"step {self.step} ({self.phase})"

    @property
    def waits(self) -> bool:
        """Whether it waits for others, or did until that failed."""
        return self.error is not None or (self.collective is not None and self.collective.state == "waits")


@dataclass(frozen=True)
class Verdict:
    """The ranks to blame, possibly none, and one line that says why."""

    ranks: tuple[int, ...]
    text: str


def judge(signs: Mapping[int, Sign], silent: Mapping[int, str], timeout: float) -> Verdict:
    """Blame by the last `signs` of all ranks; `silent` are those that gave no answer, and what is known of each."""
    num_ranks = max([*signs, *silent]) + 1
    answering = {rank: sign for rank, sign in signs.items() if rank not in silent}
    if failed := [sign for sign in answering.values() if sign.status == "failed"]:
        parts = [f"rank {sign.rank} failed in {sign.place}: {sign.error}" for sign in failed]
        return Verdict(tuple(sign.rank for sign in failed), "; ".join(parts))
    others = _wait_of([sign for sign in answering.values() if sign.status == "closing"], num_ranks)
    if silent:
        parts = [f"rank {rank} {said}{_since(signs.get(rank))}" for rank, said in silent.items()]
        return Verdict(tuple(silent), "; ".join(parts) + others)
    closing = [sign for sign in answering.values() if sign.status == "closing"]
    if gone := [sign for sign in answering.values() if sign.status == "ended"]:
        parts = [f"rank {sign.rank} ended the run while others go on" for sign in gone]
        return Verdict(tuple(sign.rank for sign in gone), "; ".join(parts) + others)
    busy = [sign for sign in closing if not sign.waits]
    first = min((sign.beat for sign in busy), default=None)
    if culprits := [sign for sign in busy if sign.beat == first]:
        return _hung(culprits, [sign for sign in closing if sign not in culprits], num_ranks, timeout)
    if behind := _behind(closing):
        parts = [f"rank {sign.rank} is in {_wait_of_one(sign, num_ranks)} of {sign.place}" for sign in behind]
        others = _wait_of([sign for sign in closing if sign not in behind], num_ranks)
        return Verdict(tuple(sign.rank for sign in behind), "; ".join(parts) + " and behind" + others)
    return Verdict((), "no rank is behind; look at the network between them" + others)


def _hung(culprits: Sequence[Sign], others: Sequence[Sign], num_ranks: int, timeout: float) -> Verdict:
    ranks = tuple(sign.rank for sign in culprits)
    text = f"{_list(ranks)} hung in {culprits[0].place}: no progress for {max(sign.seconds for sign in culprits):.0f} s"
    if len(culprits) == 1 and culprits[0].collective is not None:
        text += f", last in {culprits[0].collective.describe(num_ranks)}"
    if not others:
        text += f" and no rank waits for another; if that is how long it takes, raise train.timeout above {timeout:g}"
    return Verdict(ranks, text + _wait_of(others, num_ranks))


def _behind(signs: Sequence[Sign]) -> list[Sign]:
    """The ranks that are less far than the rest, by step and phase, else by the number of a group's collectives."""
    first, last = min(sign.beat for sign in signs), max(sign.beat for sign in signs)
    if first != last:
        return [sign for sign in signs if sign.beat == first]
    numbers: dict[tuple[int, ...], list[int]] = {}
    for sign in signs:
        if sign.collective is not None:
            numbers.setdefault(sign.collective.ranks, []).append(sign.collective.number)
    return [
        sign
        for sign in signs
        if sign.collective is not None and sign.collective.number < max(numbers[sign.collective.ranks])
    ]


def _wait_of(signs: Sequence[Sign], num_ranks: int) -> str:
    """Where most of them wait."""
    waits = Counter(_wait_of_one(sign, num_ranks) for sign in signs if sign.waits)
    if not waits:
        return ""
    where, count = waits.most_common(1)[0]
    who = "the others wait" if count == len(signs) and count > 1 else _list([s.rank for s in signs if s.waits], "waits")
    return f"; {who} in {where}"


def _wait_of_one(sign: Sign, num_ranks: int) -> str:
    return sign.place if sign.collective is None else sign.collective.describe(num_ranks)


def _since(sign: Sign | None) -> str:
    return ", before its first sign" if sign is None else f", last seen in {sign.place}"


def _list(ranks: Sequence[int], verb: str = "") -> str:
    """ "rank 3" or "ranks 0, 1, 4"; with the verb in its number."""
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", …" if len(ranks) > 8 else "")
    text = f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
    return f"{text} {verb if len(ranks) == 1 else verb.removesuffix('s')}".strip()
