"""What every part that images pass through promises, tried as `study.contracts` tries blocks of decoders.

Legend: B batch, L length, D width, N images a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from surefoot.blocks.base import EXAMPLE_VOCABULARY, EXAMPLE_WIDTH
from surefoot.blocks.encoders.vision import VisionConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.fusion.cross_attention import CrossAttentionConfig
from surefoot.blocks.fusion.projector import ProjectorConfig
from surefoot.blocks.fusion.resampler import ResamplerConfig
from surefoot.blocks.images import ImagePartConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.infer.states import stored_bytes
from surefoot.models.cross_fusion import CrossFusionConfig, SeeingAcross
from surefoot.models.decoder import DecoderConfig
from surefoot.models.late_fusion import LateFusionConfig
from surefoot.models.multimodal import Multimodal, MultimodalConfig
from surefoot.ops.documents import Documents
from surefoot.ops.loss import LossSums
from surefoot.study.contracts import (
    EXACT,
    LENGTH,
    BrokenError,
    Contract,
    Subject,
    at_most,
    complete,
    described,
    found_under,
    in_parts,
    named_examples,
    narrow,
    relative_error,
    saved,
)

IMAGE_TOKEN = 1
BOUNDS = (0, 15, LENGTH)
"""Of two documents, each with an image."""


@dataclass(frozen=True)
class ImageExample(Subject):
    """A part in a small model of text and images, two images a row."""

    config: ImagePartConfig

    @cached_property
    def model(self) -> MultimodalConfig:
        """The plainest model that has the part."""
        text = DecoderConfig(
            vocab_size=EXAMPLE_VOCABULARY,
            width=EXAMPLE_WIDTH,
            depth=2,
            mixer=AttentionConfig(num_heads=4, num_kv_heads=2, rope_theta=20.0),
            ffn=SwiGLUConfig(hidden=24),
        )
        vision = self.config if isinstance(self.config, VisionConfig) else VisionConfig.examples()[""]
        if isinstance(self.config, ResamplerConfig | CrossAttentionConfig):
            cross = CrossAttentionConfig.examples()["one gate"]
            cross, resampler = (
                (self.config, None) if isinstance(self.config, CrossAttentionConfig) else (cross, self.config)
            )
            return CrossFusionConfig(text=text, vision=vision, cross=cross, resampler=resampler)
        if isinstance(self.config, VisionConfig | ProjectorConfig):
            projector = self.config if isinstance(self.config, ProjectorConfig) else ProjectorConfig()
            return LateFusionConfig(
                text=text, vision=vision, projector=projector, image_token=IMAGE_TOKEN, feature_layer=-1
            )
        raise BrokenError(f"{type(self.config).__name__} has no model to be tried in: see ImageExample.model")

    @property
    def places(self) -> list[int]:
        """Where features stand in a row, image by image; nowhere if they are read across."""
        if not isinstance(self.model, LateFusionConfig):
            return []
        return [start + 3 + place for start in BOUNDS[:-1] for place in range(self.model.num_features)]

    def tokens(self, batch: int = 2) -> Tensor:
        """(B, L), features' places held."""
        generator = torch.Generator().manual_seed(3)
        tokens_BL = torch.randint(IMAGE_TOKEN + 1, EXAMPLE_VOCABULARY, (batch, LENGTH), generator=generator)
        tokens_BL[:, self.places] = IMAGE_TOKEN
        return tokens_BL

    def images(self, batch: int = 2) -> Tensor:
        """(B, 2, C, Y, X)."""
        vision, generator = self.model.vision, torch.Generator().manual_seed(4)
        shape = (batch, 2, vision.num_channels, vision.image_size, vision.image_size)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def seen(self, batch: int = 2) -> Tensor | None:
        """Each document sees its own image (B, L, N); None where places say that."""
        if isinstance(self.model, LateFusionConfig):
            return None
        return (_documents()[..., None] == torch.arange(2)).expand(batch, -1, -1)

    def hidden(self, model: Multimodal) -> Tensor:
        """See `Subject.hidden`."""
        return model(self.tokens(), Documents(None, LENGTH), self.images())  # type: ignore[no-any-return]

    def loss(self, model: Multimodal, dtype: torch.dtype | None = None) -> tuple[Tensor, LossSums]:
        """See `Subject.loss`."""
        tokens_BL = self.tokens()
        docs, images = Documents(None, LENGTH), self.images().to(model.text.embedding.weight.dtype)
        return model.loss(tokens_BL, tokens_BL.roll(-1, 1), docs, images, dtype=dtype)


def find_image_parts() -> list[type[ImagePartConfig]]:
    """Every concrete one under `surefoot.blocks`."""
    return found_under(ImagePartConfig)


def image_examples_of(cls: type[ImagePartConfig]) -> list[ImageExample]:
    """Those that a part gives; `BrokenError` where it gives none."""
    return [ImageExample(name, config) for name, config in named_examples(cls, cls.examples())]


def causal(example: ImageExample) -> float:
    """No output depends on a later token or on an image that it does not see, by value or by gradient; those after one do."""
    model, tokens_BL, images = example.built(), example.tokens(1), example.images(1).requires_grad_()
    seen_BLN, docs = example.seen(1), Documents(None, LENGTH)
    hidden_BLD = model(tokens_BL, docs, images, seen_BLN)
    worst = 0.0
    for place in sorted(set(range(1, LENGTH)) - set(example.places)):
        changed_BL = tokens_BL.clone()
        changed_BL[0, place] = IMAGE_TOKEN + 1 + (changed_BL[0, place] - IMAGE_TOKEN) % (EXAMPLE_VOCABULARY - 2)
        other_BLD = model(changed_BL, docs, images, seen_BLN)
        if torch.equal(other_BLD[:, place], hidden_BLD[:, place]):
            raise BrokenError("an output does not depend on its own token")
        worst = max(worst, relative_error(other_BLD[:, :place], hidden_BLD[:, :place]))
    # The second image is seen from the second document on, or from where it stands.
    since = example.places[len(example.places) // 2] if example.places else BOUNDS[1]
    for run, is_seen in ((slice(0, since), False), (slice(since, LENGTH), True)):
        (grads,) = torch.autograd.grad(hidden_BLD[:, run].square().sum(), images, retain_graph=True)
        found = float(grads[:, 1].abs().max())
        if is_seen and found == 0:
            raise BrokenError("no output depends on an image")
        worst = max(worst, 0.0 if is_seen else found)
    return at_most(worst, EXACT, "outputs change with what they do not see")


def isolated(example: ImageExample) -> float:
    """A packed document with its image is as if alone."""
    model, tokens_BL, images = example.built(), example.tokens(), example.images()
    packed_BLD = model(tokens_BL, Documents(_documents().expand(2, -1), LENGTH), images, example.seen())
    worst = 0.0
    for number, (start, stop) in enumerate(itertools.pairwise(BOUNDS)):
        own = images[:, number : number + 1]
        alone_BLD = model(tokens_BL[:, start:stop], Documents(None, stop - start), own)
        worst = max(worst, relative_error(packed_BLD[:, start:stop], alone_BLD))
    return at_most(worst, EXACT, "documents packed together see each other's images")


@torch.no_grad()
def stepwise(example: ImageExample) -> float:
    """One full pass equals any prefill in two parts, and one step a token, with images encoded once."""
    return in_parts(example.built().seeing(example.images(), example.seen()), example.tokens())


def counted(example: ImageExample) -> float:
    """FLOPs of a pass forward are what torch's counter measures over the plain path."""
    model = example.built().float()
    for mixer in model.text.mixers():
        mixer.use_plain()
    images = example.images().float()
    # torch's fused attention goes by a name that its counter does not know on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.text.logits(model(example.tokens(), Documents(None, LENGTH), images))
    declared, measured = 2 * model.flops(LENGTH, 2), counter.get_total_flops()
    if declared != measured:
        raise BrokenError(f"declares {declared:.0f} FLOPs where {measured} are measured")
    return 0.0


@torch.no_grad()
def held(example: ImageExample) -> float:
    """What is kept of images while a text is decoded has the declared bytes, counted from its storages."""
    for dtype in (torch.float32, torch.bfloat16):
        model = example.built().to(torch.float32)
        seeing = model.seeing(example.images(1).float(), dtype=dtype)
        kept = seeing.memories if isinstance(seeing, SeeingAcross) else seeing.features_BFD
        declared, found = model.held_bytes(2, dtype), stored_bytes([kept])
        if declared != found:
            raise BrokenError(f"declares {declared} bytes of two images in {dtype} and holds {found}")
    return 0.0


IMAGES: Mapping[str, Contract] = {
    "causal": causal,
    "packing": isolated,
    "steps": stepwise,
    "meta": complete,
    "FLOPs": counted,
    "bytes": held,
    "bf16": narrow,
    "files": saved,
    "config": described,
}
"""Contracts that one process tries in a moment, by the head of their column."""


def _documents() -> Tensor:
    """Numbers of the two documents of a row (1, L)."""
    runs: Sequence[int] = [stop - start for start, stop in itertools.pairwise(BOUNDS)]
    return torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))[None]
