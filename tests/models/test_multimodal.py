"""Models that read images: what tokens see, over states and without, and where they are the language model alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.blocks.encoders.vision import VisionConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.fusion.cross_attention import CrossAttentionConfig
from surefoot.blocks.fusion.projector import ProjectorConfig
from surefoot.blocks.fusion.resampler import ResamplerConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.config import Config, ConfigError, from_dict, to_dict
from surefoot.infer.engine import generate
from surefoot.models.cross_fusion import CrossFusionConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.initialise import initialise
from surefoot.models.late_fusion import LateFusionConfig
from surefoot.models.multimodal import Multimodal, MultimodalConfig
from surefoot.ops.cross_attention import attend_all, attend_all_plain
from surefoot.ops.documents import Documents
from tests.redraw import redraw

IMAGE = 7
TEXT = DecoderConfig(
    vocab_size=32, width=16, depth=2, mixer=AttentionConfig(num_heads=2, num_kv_heads=1), ffn=SwiGLUConfig(hidden=24)
)
VISION = VisionConfig(image_size=4, patch_size=2, width=12, depth=2, num_heads=2, hidden=20)
LATE = LateFusionConfig(text=TEXT, vision=VISION, projector=ProjectorConfig(), image_token=IMAGE)
CROSS = CrossFusionConfig(
    text=TEXT,
    vision=VISION,
    cross=CrossAttentionConfig(num_heads=2, hidden=24, qk_norm="head"),
    resampler=ResamplerConfig(num_latents=3, depth=1, num_heads=2, head_size=4, qk_norm="head"),
)
BOTH = pytest.mark.parametrize("config", [LATE, CROSS], ids=["late", "cross"])


def batch(config: MultimodalConfig, num_images: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens, with places for images that lie apart where the model needs them, and images."""
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(8, 32, (2, 14), generator=generator)
    if isinstance(config, LateFusionConfig):
        tokens_BL[0, [1, 2, 3, 4, 6, 7, 8, 9]] = IMAGE
        tokens_BL[1, [0, 1, 2, 3, 8, 9, 10, 11]] = IMAGE
    return tokens_BL, torch.randn(2, num_images, 3, 4, 4, generator=generator).double()


def read(model: Multimodal, tokens_BL: Tensor, images: Tensor, seen_BLN: Tensor | None = None) -> Tensor:
    return model(tokens_BL, Documents(None, tokens_BL.shape[1]), images, seen_BLN)


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_equals_its_reference(is_masked: bool) -> None:
    q, k, v = (torch.randn(2, n, 3, 4, dtype=torch.float64, requires_grad=True) for n in (5, 6, 6))
    seen = torch.rand(2, 5, 6) < 0.5 if is_masked else None
    if seen is not None:
        seen[0, 2] = False
    pull = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    found, wanted = attend_all(q, k, v, seen), attend_all_plain(q, k, v, seen)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert not is_masked or not found[0, 2].any()
    for one, other in zip(*(torch.autograd.grad(y, (q, k, v), pull) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("cut", [1, 5, 8, 13])
def test_reading_over_states_equals_one_pass(config: MultimodalConfig, cut: int) -> None:
    model = redraw(config.build())
    tokens_BL, images = batch(config)
    # Text sees the last image before it, and at first none.
    latest_BLN = torch.zeros(2, 14, 2, dtype=torch.bool)
    latest_BLN[:, 3:6, 0], latest_BLN[:, 6:, 1] = True, True
    seen_BLN = latest_BLN if config is CROSS else None
    with torch.no_grad():
        whole = read(model, tokens_BL, images, seen_BLN)
        seeing = model.seeing(images, None if seen_BLN is None else seen_BLN[:, :9])  # what follows sees as the last
        states = seeing.new_states(2, 14, torch.float64)
        ends = [cut, *range(cut + 1, 15)]
        parts = [
            seeing(tokens_BL[:, start:end], Documents(None, end - start, start=start), states)
            for start, end in zip([0, *ends], ends, strict=False)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


@BOTH
def test_text_sees_images_before_it_and_no_token_after_it(config: MultimodalConfig) -> None:
    model = redraw(config.build())
    tokens_BL, images = batch(config)
    before = read(model, tokens_BL, images)
    images[:, 1] += 1
    changed = (read(model, tokens_BL, images) != before).any(-1)
    assert changed[0].tolist() == ([False] * 6 + [True] * 8 if config is LATE else [True] * 14)
    images[:, 1] -= 1
    tokens_BL[:, -1] = 31 - tokens_BL[:, -1] % 8
    changed = (read(model, tokens_BL, images) - before).abs().amax((0, 2)) > 1e-12
    assert changed.tolist() == [False] * 13 + [True]


def test_tokens_that_see_no_image_read_none() -> None:
    model = redraw(CROSS.build())
    tokens_BL, images = batch(CROSS)
    seen_BLN = torch.zeros(2, 14, 2, dtype=torch.bool)
    assert torch.equal(read(model, tokens_BL, images, seen_BLN), read(model, tokens_BL, images + 1, seen_BLN))
    seen_BLN[:, 4:, 0] = True
    changed = (read(model, tokens_BL, images, seen_BLN) != read(model, tokens_BL, images + 1, seen_BLN)).any(-1)
    assert changed.tolist() == [[False] * 4 + [True] * 10] * 2


def test_cross_attention_starts_as_the_language_model_alone() -> None:
    model = CROSS.build()
    initialise(model, 0)
    tokens_BL, images = batch(CROSS)
    alone = model.text(tokens_BL, Documents(None, 14))
    assert torch.equal(read(model, tokens_BL, images.float()), alone)


@BOTH
def test_the_loss_is_of_text_and_pulls_at_all_that_is_read(config: MultimodalConfig) -> None:
    model = redraw(config.build())
    tokens_BL, images = batch(config)
    seeing = model.seeing(images)
    objective, sums = model.loss(tokens_BL, tokens_BL.roll(-1, 1), Documents(None, 14), images)
    scores = seeing.logits(seeing(tokens_BL, Documents(None, 14))).log_softmax(-1)
    targets = tokens_BL.roll(-1, 1)
    nll = -scores.gather(-1, targets[..., None])[..., 0]
    wanted = nll[targets != IMAGE].sum() if config is LATE else nll.sum()
    torch.testing.assert_close(sums.nll, wanted.detach(), rtol=1e-12, atol=0)
    objective.backward()
    dead = {name for name, weight in model.named_parameters() if weight.grad is None}
    unread = ("vision.norm_class", "vision.layers.1") if config is LATE else ("vision.norm_class",)
    assert {name for name in dead if not name.startswith(unread)} == set()
    assert all(any(name.startswith(part) for name in dead) for part in unread)


@BOTH
def test_cached_generation_equals_reading_again(config: MultimodalConfig) -> None:
    model = redraw(config.build())
    tokens_BL, images = batch(config)
    seeing, prompt = model.seeing(images[:1]), tokens_BL[0].tolist()

    def greedy(logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([IMAGE]), -torch.inf).argmax(-1)

    cached, again = (
        list(generate(seeing, prompt, 6, greedy, dtype=torch.float64, cached=cached)) for cached in (True, False)
    )
    assert cached == again


def test_what_does_not_fit_is_refused() -> None:
    late, cross = redraw(LATE.build()), redraw(CROSS.build())
    tokens_BL, images = batch(LATE)
    with pytest.raises(ValueError, match="image tokens, and their images 4 features"):
        read(late, tokens_BL, images[:, :1])
    with pytest.raises(ValueError, match="leave seen_BLN out"):
        late.seeing(images, torch.ones(2, 14, 2))
    with pytest.raises(ValueError, match=r"must be \(2, positions, 2\)"):
        cross.seeing(images, torch.ones(2, 14, 3))
    with pytest.raises(ValueError, match=r"must be \(3, 4, 4\)"):
        cross.seeing(images[..., :2])
    with pytest.raises(ValueError, match="rows, images a row"):
        cross.seeing(images[:, 0])


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (VISION, {"patch_size": 3}, "must divide image_size 4"),
        (VISION, {"num_heads": 5}, "must divide width 12"),
        (LATE, {"feature_layer": -4}, "must be from -3 to 2"),
        (LATE, {"image_token": 32}, "must be below vocab_size 32"),
        (CROSS, {"every": 3}, "must divide the depth"),
        (CROSS, {"cross": CrossAttentionConfig(num_heads=3, hidden=8)}, "must divide the width"),
        (LATE, {"text": dict(TEXT) | {"ffn": MoEConfig(hidden=8, num_experts=4, top_k=2)}}, "auxiliary losses"),
    ],
)
def test_bad_values_are_refused(base: Config, changes: dict[str, object], said: str) -> None:
    values = dict(base) | {
        key: DecoderConfig(**value) if isinstance(value, dict) else value for key, value in changes.items()
    }
    with pytest.raises(ConfigError, match=said):
        type(base)(**values)


@BOTH
def test_configurations_are_read_as_they_are_written(config: MultimodalConfig) -> None:
    assert from_dict(to_dict(config), type(config)) == config
