"""Parts that images pass through: what encoders and their joints to language models have in common."""

from __future__ import annotations

from typing import Self

from surefoot.config import Config


class ImagePartConfig(Config):
    """Describes an encoder, or what joins one to a language model."""

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`; for encoders of `EXAMPLE_IMAGE` pixels a side and a decoder of `EXAMPLE_WIDTH`."""
        return {}


EXAMPLE_IMAGE = 4
"""Height and width of images in which examples of parts are tried."""
