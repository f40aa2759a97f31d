"""Mixers made of other mixers, each of which is laid out, cached and counted by its own rules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

import torch

from surefoot.blocks.base import FeedForward, Mixer, MixerState


class CompositeState:
    """The states of the mixers inside, in order."""

    def __init__(self, parts: list[MixerState]) -> None:
        self.parts = parts

    @property
    def length(self) -> int:
        """Positions seen so far."""
        return self.parts[0].length


class Composite(Mixer):
    """What one mixer says of itself, said of several."""

    @abstractmethod
    def mixers(self) -> Sequence[Mixer]:
        """The mixers inside, in the order in which their states lie."""

    def parts(self) -> Sequence[Mixer | FeedForward]:
        """See `Mixer.parts`."""
        return self.mixers()

    def use_plain(self) -> None:
        """See `Mixer.use_plain`."""
        for mixer in self.mixers():
            mixer.use_plain()

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> CompositeState:
        """See `Mixer.new_state`."""
        return CompositeState([mixer.new_state(batch, length, dtype) for mixer in self.mixers()])

    def flops(self, length: int, *, causal: bool) -> float:
        """See `Mixer.flops`."""
        return sum(mixer.flops(length, causal=causal) for mixer in self.mixers()) + self.flops_between()

    def decode_flops(self, length: int) -> float:
        """See `Mixer.decode_flops`."""
        return sum(mixer.decode_flops(length) for mixer in self.mixers()) + self.flops_between()

    def flops_between(self) -> float:
        """Forward FLOPs a token of what is not in a mixer."""
        return 0.0

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """See `Mixer.state_bytes`."""
        return sum(mixer.state_bytes(length, dtype) for mixer in self.mixers())

    def decode_bytes(self, length: int, dtype: torch.dtype) -> int:
        """See `Mixer.decode_bytes`."""
        return sum(mixer.decode_bytes(length, dtype) for mixer in self.mixers())


def inner_states(state: CompositeState | None, num: int) -> list[MixerState | None]:
    """One a mixer; None each where there is no state."""
    return [None] * num if state is None else cast(list[MixerState | None], state.parts)
