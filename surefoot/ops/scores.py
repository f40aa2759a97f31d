"""`Scores`: what turns products of queries and keys into scores, beside causality and documents."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.ops.documents import EVERYTHING, Reach


@dataclass(frozen=True)
class Scores:
    """score = cap(scale · q·k) where the query reaches the key, with cap(x) = softcap · tanh(x / softcap)."""

    scale: float | None = None
    softcap: float | None = None
    reach: Reach = EVERYTHING

    def factor(self, head_size: int) -> float:
        """The scale; 1/√K where none is given (Vaswani et al., 2017)."""
        return head_size**-0.5 if self.scale is None else self.scale


PLAIN = Scores()
