"""Parts that images pass through: what encoders and their joints to language models have in common."""

from __future__ import annotations

from typing import ClassVar, Self

from torch import nn

from surefoot.config import Config


class ImagePartConfig(Config):
    """Describes an encoder, or what joins one to a language model."""

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`; for encoders of `EXAMPLE_IMAGE` pixels a side and a decoder of `EXAMPLE_WIDTH`."""
        return {}


class ImagePart(nn.Module):
    """Base of every such module, beside `Block` where it has weights of its own: layouts keep what lies under one whole."""

    entries: ClassVar[tuple[str, ...]] = ()
    """Methods beside `forward` that a model calls: weights may have to be gathered for them."""


EXAMPLE_IMAGE = 4
"""Height and width of images in which examples of parts are tried."""
