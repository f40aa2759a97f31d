"""Every block keeps every contract, and each contract catches a block that does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from surefoot.blocks.base import Exact
from surefoot.blocks.ffn.swiglu import SwiGLU, SwiGLUConfig
from surefoot.blocks.fusion.cross_attention import CrossAttention, CrossAttentionConfig
from surefoot.blocks.fusion.projector import Projector, ProjectorConfig
from surefoot.blocks.fusion.resampler import ResamplerConfig, ResamplerLayer
from surefoot.blocks.images import ImagePartConfig
from surefoot.blocks.mixers.attention import Attention, AttentionConfig, KVState
from surefoot.blocks.routers.topk import TopK
from surefoot.cli.verbs import contracts as verb
from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.ops import attention
from surefoot.ops.documents import Documents
from surefoot.study.contracts import (
    SINGLE,
    BlockConfig,
    BrokenError,
    Example,
    Subject,
    examples_of,
    find_blocks,
    try_on,
)
from surefoot.study.image_contracts import IMAGES, ImageExample, find_image_parts, image_examples_of
from surefoot.study.laid_contracts import LAYOUTS, compiled, contracts_of, on_ranks
from tests.spread import spread

BLOCKS = find_blocks()
# One block without examples fails its own test below, and hides no other's.
BY_BLOCK = [examples_of(cls) for cls in BLOCKS if cls.examples()]
EXAMPLES = [example for examples in BY_BLOCK for example in examples]
IMAGE_EXAMPLES = [example for cls in find_image_parts() for example in image_examples_of(cls)]
FIRST = [examples[0] for examples in BY_BLOCK]


Fault = Callable[[pytest.MonkeyPatch], None]


def replaced(owner: type, name: str, wrong: object) -> Fault:
    return lambda patch: patch.setattr(owner, name, wrong)


@pytest.mark.parametrize("cls", BLOCKS, ids=lambda cls: cls.__name__)
def test_every_block_gives_examples(cls: type[BlockConfig]) -> None:
    assert examples_of(cls)


@pytest.mark.parametrize("contract", SINGLE)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_every_block_keeps_every_contract(example: Example, contract: str) -> None:
    finding = try_on(example, SINGLE[contract])
    assert finding.failure is None
    assert finding.reason is None, "every contract of one process applies to every block"


@pytest.mark.parametrize(
    ("example", "layouts"),
    spread(itertools.product(FIRST, LAYOUTS), 3),  # 3 and the number of layouts have no factor in common: all come up
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_layout_trains_every_block_alike(example: Example, layouts: str, pool: Pool) -> None:
    finding = try_on(example, on_ranks(LAYOUTS[layouts], pool))
    assert finding.failure is None
    assert finding.worst is not None or finding.reason


@pytest.mark.long
@pytest.mark.parametrize("example", [*EXAMPLES, *IMAGE_EXAMPLES], ids=lambda example: example.name)
def test_a_compiler_changes_no_gradient(example: Subject) -> None:
    assert try_on(example, compiled).failure is None


@pytest.mark.long
def test_gradients_that_a_compiler_spoils_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 that traces the hand-written gradient of attention."""
    example = next(e for e in EXAMPLES if e.name == "Attention: gqa")
    assert try_on(example, compiled).failure is None
    monkeypatch.setattr(attention, "apply", lambda function, *arguments: function.apply(*arguments))
    assert try_on(Example(example.name, example.config), compiled).failure is not None


@pytest.mark.parametrize("contract", IMAGES)
@pytest.mark.parametrize("example", IMAGE_EXAMPLES, ids=lambda example: example.name)
def test_every_part_for_images_keeps_every_contract(example: ImageExample, contract: str) -> None:
    finding = try_on(example, IMAGES[contract])
    assert finding.failure is None
    assert finding.reason is None


def mixed(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A projector that mixes the images of a batch."""
    return lambda self, x: real(self, x + x.mean(0, keepdim=True))


@pytest.mark.parametrize(
    ("part", "contract", "fault", "said"),
    [
        (ProjectorConfig, "packing", replaced(Projector, "forward", mixed(Projector.forward)), "each other's images"),
        (ProjectorConfig, "causal", replaced(Projector, "forward", mixed(Projector.forward)), "do not see"),
        (CrossAttentionConfig, "bytes", replaced(CrossAttention, "memory_bytes", lambda *_: 7), "declares 14 bytes"),
        (CrossAttentionConfig, "FLOPs", replaced(CrossAttention, "flops", lambda *_: 1.0), "are measured"),
        (ResamplerConfig, "FLOPs", replaced(ResamplerLayer, "flops", lambda *_: 1.0), "are measured"),
    ],
)
def test_contracts_of_images_catch_their_faults(
    part: type[ImagePartConfig], contract: str, fault: Fault, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert said in (try_on(image_examples_of(part)[0], IMAGES[contract]).failure or "")


@pytest.mark.parametrize(
    ("example", "layouts"),
    spread(itertools.product(IMAGE_EXAMPLES, LAYOUTS), 3),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_layout_trains_every_part_for_images_alike(example: ImageExample, layouts: str, pool: Pool) -> None:
    finding = try_on(example, contracts_of(example, pool)[layouts])
    assert finding.failure is None
    if layouts == "expert":
        assert "the model has no experts to share out" in (finding.reason or "")
    else:
        assert finding.worst is not None


@pytest.mark.long
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("example", [e for e in EXAMPLES if e not in FIRST], ids=lambda example: example.name)
def test_every_layout_trains_every_option_alike(example: Example, layouts: str, pool: Pool) -> None:
    test_every_layout_trains_every_block_alike(example, layouts, pool)


def test_blocks_are_found_in_every_folder() -> None:
    assert {AttentionConfig, SwiGLUConfig} < set(BLOCKS)
    assert {cls.__module__.split(".")[2] for cls in BLOCKS} == {"mixers", "ffn", "routers", "connections"}
    assert len(BLOCKS) == len(set(BLOCKS))


class Silent(SwiGLUConfig):
    """A block that forgot its examples."""

    @classmethod
    def examples(cls) -> dict[str, Silent]:
        return {}


def test_a_block_without_examples_is_broken() -> None:
    with pytest.raises(BrokenError, match="Silent gives no examples"):
        examples_of(Silent)


def forward(change: Callable[[Attention, Tensor, Documents, object], Tensor]) -> Fault:
    """Attention with something wrong."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = Attention.forward

        def wrong(self: Attention, x: Tensor, docs: Documents, state: object = None, shared: object = None) -> Tensor:
            return real(self, x, docs, state, shared) + change(self, x, docs, state)

        patch.setattr(Attention, "forward", wrong)

    return plant


def trace(x_BLD: Tensor, decay: float) -> Tensor:
    """A sum over the past that knows of no document."""
    y = [torch.zeros_like(x_BLD[:, 0])]
    for place in range(x_BLD.shape[1] - 1):
        y.append(decay * y[-1] + x_BLD[:, place])
    return torch.stack(y, 1)


def stray_weight(patch: pytest.MonkeyPatch) -> None:
    real = Attention.__init__

    def init(self: Attention, config: AttentionConfig, width: int, scale: float) -> None:
        real(self, config, width, scale)
        self.stray = torch.nn.Parameter(torch.ones(3))

    patch.setattr(Attention, "__init__", init)


def solid_buffer(patch: pytest.MonkeyPatch) -> None:
    real = Attention.__init__

    def init(self: Attention, config: AttentionConfig, width: int, scale: float) -> None:
        real(self, config, width, scale)
        self.table = torch.ones(3, device="cpu")

    patch.setattr(Attention, "__init__", init)


def unsaved(patch: pytest.MonkeyPatch) -> None:
    """What a block computes depends on a number that is drawn when it is built and lies in no checkpoint."""
    real, numbers = SwiGLU.__init__, iter(range(100))

    def init(self: SwiGLU, config: SwiGLUConfig, width: int, scale: float) -> None:
        real(self, config, width, scale)
        self.offset = next(numbers)

    patch.setattr(SwiGLU, "__init__", init)
    patch.setattr(SwiGLU, "forward", lambda self, x: x * self.offset)


def narrow_overflow(patch: pytest.MonkeyPatch) -> None:
    real = Exact.linear

    def linear(self: Exact, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return real(self, x, weights) * (float("inf") if x.dtype is torch.bfloat16 else 1)

    patch.setattr(Exact, "linear", linear)


@pytest.mark.parametrize(
    ("contract", "fault", "said"),
    [
        ("causal", forward(lambda _s, x, _d, _t: x.roll(-1, 1)), "outputs change with later tokens"),
        ("causal", forward(lambda _s, x, _d, _t: x.mean(1, keepdim=True).detach()), "outputs change with later tokens"),
        ("causal", replaced(TopK, "looks_ahead", True), "no leak is found"),
        ("packing", forward(lambda _s, x, _d, _t: trace(x, 0.99)), "see each other"),
        ("packing", forward(lambda _s, x, _d, _t: 1e-6 * trace(x, 0.01)), "see each other"),
        ("steps", forward(lambda _s, x, _d, _t: trace(x, 0.99)), "passes in parts differ"),
        ("meta", stray_weight, "names no axes"),
        ("meta", solid_buffer, "table has memory on meta"),
        ("FLOPs", replaced(SwiGLU, "flops", lambda _: 1.0), "are measured"),
        ("FLOPs", replaced(Attention, "use_plain", lambda _: None), "are measured"),
        ("bytes", replaced(Attention, "state_bytes", lambda *_: 7), "declares 7 bytes after 5 positions"),
        ("bf16", narrow_overflow, "not finite"),
        ("files", unsaved, "a model read back computes something else"),
    ],
)
def test_each_contract_catches_its_fault(
    contract: str, fault: Fault, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = next(e for e in EXAMPLES if e.name == ("TopK: over all" if "leak" in said else "SwiGLU"))
    fresh = Example(example.name, example.config)
    fault(monkeypatch)
    failure = try_on(fresh, SINGLE[contract]).failure
    assert failure is not None
    assert said in failure


def test_a_state_that_keeps_too_much_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVState.extend

    def hoard(self: KVState, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.kept = [*getattr(self, "kept", []), k.clone()]
        return real(self, k, v)

    monkeypatch.setattr(KVState, "extend", hoard)
    example = next(e for e in EXAMPLES if e.name == "Attention: gqa")
    assert "and holds" in (try_on(example, SINGLE["bytes"]).failure or "")


@cache
def table(name: str) -> int:
    return verb.run(name)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert table("swiglu") == 0
    said = capsys.readouterr().out
    assert "1 examples of 1 blocks, 0 failures" in said
    assert "has no experts to share out" in said
    with pytest.raises(ConfigError, match="is no block; there are add, attention"):
        verb.run("nonsense")
