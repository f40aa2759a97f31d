"""Several mixers in one layer (Hymba; Dong et al., 2024; Falcon-H1; Zuo et al., 2025). Legend: B batch, L length, D width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from surefoot.blocks.base import Mixer, MixerConfig, Shared
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.composite import Composite, CompositeState, inner_states
from surefoot.blocks.mixers.mamba2 import Mamba2Config
from surefoot.config import FieldError
from surefoot.ops.documents import Documents


class SideBySideConfig(MixerConfig):
    """All read the same input, and their outputs are added, each times its factor."""

    mixers: tuple[MixerConfig, ...] = Field(min_length=2)
    factors: tuple[float, ...] | None = Field(default=None, description="of the outputs, in order; 1 where not given")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.factors is not None and len(self.factors) != len(self.mixers):
            raise FieldError("factors", self.factors, f"must be {len(self.mixers)} numbers, one a mixer")
        for mixer in self.mixers:
            if mixer.leaves_shared or mixer.needs_shared or mixer.reads_embedded or mixer.is_common:
                raise FieldError(
                    "mixers",
                    type(mixer).__name__,
                    "has to do with other layers (leaves, reads or shares something); give it layers of its own",
                )
        rows = {mixer.token_rows for mixer in self.mixers} - {None}
        if len(rows) > 1:
            raise FieldError("mixers", sorted(cast(set[int], rows)), "look up tokens in tables of different value_rows")
        return self

    @property
    def token_rows(self) -> int | None:
        """That of the mixers that look up tokens."""
        return next((mixer.token_rows for mixer in self.mixers if mixer.token_rows is not None), None)

    def check_width(self, width: int) -> None:
        """See `MixerConfig.check_width`."""
        for mixer in self.mixers:
            mixer.check_width(width)

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        attention = AttentionConfig(num_heads=4, num_kv_heads=2, window=7, rope_theta=20.0)
        space = Mamba2Config(num_heads=4, head_size=8, state_size=6, block=8)
        return {"attention and Mamba-2": cls(mixers=(attention, space), factors=(0.7, 1.5))}

    def build(self, *, width: int, output_scale: float) -> SideBySide:
        """The mixer itself."""
        return SideBySide(self, width, output_scale)


class SideBySide(Composite):
    """See `SideBySideConfig`."""

    def __init__(self, config: SideBySideConfig, width: int, output_scale: float) -> None:
        super().__init__()
        # What is added up from several starts as large as what comes from one.
        scale = output_scale * len(config.mixers) ** -0.5
        self.inner = nn.ModuleList(mixer.build(width=width, output_scale=scale) for mixer in config.mixers)
        self.factors = config.factors or (1.0,) * len(config.mixers)

    def mixers(self) -> Sequence[Mixer]:
        """See `Composite.mixers`."""
        return cast(list[Mixer], list(self.inner))

    def forward(
        self, x_BLD: Tensor, docs: Documents, state: CompositeState | None = None, shared: Shared | None = None
    ) -> Tensor:
        """See `Mixer.forward`."""
        states = inner_states(state, len(self.inner))
        found = [
            factor * mixer(x_BLD, docs, own, shared)
            for mixer, factor, own in zip(self.mixers(), self.factors, states, strict=True)
        ]
        return torch.stack(found).sum(0) if len(found) > 2 else found[0] + found[1]
