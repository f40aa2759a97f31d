"""What every block promises, tried on the small examples that each gives of itself.

Blocks are found by import: a new file in a folder of `surefoot.blocks` is held to all of this without being named anywhere.
A contract is a function of an example: it returns the worst error that it met, or raises `BrokenError`, or
`InapplicableError` with the mathematical reason. All is in fp64 on models of two layers whose every weight has moved
away from where it starts; where nothing says otherwise, equal means within `EXACT` of the values' size.

Legend: B batch, L length, D width, V vocabulary.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import pkgutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from surefoot import blocks
from surefoot.blocks.base import (
    EXAMPLE_EXPERTS,
    EXAMPLE_VOCABULARY,
    EXAMPLE_WIDTH,
    ConnectionConfig,
    FeedForwardConfig,
    MixerConfig,
    Routed,
    RouterConfig,
)
from surefoot.blocks.connections.add import AddConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.checkpoint.load import load_into, open_checkpoint
from surefoot.checkpoint.save import save
from surefoot.config import from_dict, to_dict, to_json
from surefoot.data.dataset import CorpusConfig, WeightedSource
from surefoot.data.sources.stdlib import StdlibConfig
from surefoot.data.tokenizers.bytes import BytesConfig
from surefoot.infer.states import stored_bytes
from surefoot.models.count import build_meta, flops_per_token
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.models.initialise import (
    constant_starts,
    generator_for,
    initialise,
    materialise,
    named_states,
    named_weights,
)
from surefoot.models.multimodal import MultimodalConfig
from surefoot.models.routing import routers
from surefoot.ops.documents import Documents
from surefoot.ops.loss import LossSums
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.schedule import LinearToZero
from surefoot.precision.policy import PrecisionConfig
from surefoot.study.trial import Share
from surefoot.study.verify import reference_of
from surefoot.train.run import Run, TrainConfig

EXACT = 1e-10
BF16 = 0.03
"""How far the loss may be off, relatively, where activations are bf16."""
VOCABULARY, LENGTH = EXAMPLE_VOCABULARY, 32

BlockConfig = MixerConfig | FeedForwardConfig | RouterConfig | ConnectionConfig
Kind = TypeVar("Kind")
KINDS: tuple[type[BlockConfig], ...] = (MixerConfig, FeedForwardConfig, RouterConfig, ConnectionConfig)


class BrokenError(Exception):
    """A block does not keep a contract; the text says what was found."""


class InapplicableError(Exception):
    """A contract has no meaning for a block; the text is the mathematical reason."""


@dataclass(frozen=True)
class Subject:
    """What contracts are tried on: a part in a small model. `name` is its class without `Config`, and what sets it apart."""

    name: str

    @property
    @abstractmethod
    def model(self) -> Any:
        """The configuration of the model."""

    @abstractmethod
    def hidden(self, model: Any) -> Tensor:
        """What a model makes of a fixed batch."""

    @abstractmethod
    def loss(self, model: Any, dtype: torch.dtype | None = None) -> tuple[Tensor, LossSums]:
        """Its objective on that batch, and the parts."""

    @property
    def reader(self) -> MultimodalConfig | None:
        """The model, if it reads images."""
        return self.model if isinstance(self.model, MultimodalConfig) else None

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether it says that in training it chooses among the tokens of a whole batch."""
        return any(router.looks_ahead for router in routers(build_meta(self.model)))

    @cached_property
    def run(self) -> Run:
        """A run of the model, or of the decoder of one that reads images; its data is never read."""
        reader = self.reader
        source = WeightedSource(source=StdlibConfig())
        return Run(
            name="contract",
            model=self.model if reader is None else reader.text,
            data=CorpusConfig(sources=(source,), tokenizer=BytesConfig(), sequence_length=LENGTH),
            optim=AdamWConfig(lr=0.01),
            schedule=LinearToZero(),
            precision=PrecisionConfig(compute="fp64"),
            train=TrainConfig(num_steps=1, batch=16),
        )

    @cached_property
    def reference(self) -> tuple[list[Share], dict[str, float]]:
        """What one process trains, and how far from it a layout may be."""
        return reference_of(self.run, reader=self.reader)

    def built(self) -> Any:
        """The model in fp64, its weights drawn and those that all start alike drawn anew; states too."""
        model = self.model.build().double()
        initialise(model, 0)
        starts = constant_starts(model)
        with torch.no_grad():
            for full_name, block, name in itertools.chain(named_weights(model), named_states(model)):
                tensor: Tensor = getattr(block, name)
                if not tensor.is_floating_point():
                    tensor.add_(3)
                elif full_name in starts or name in block.states:
                    noise = torch.randn(tensor.shape, generator=generator_for(1, full_name), dtype=torch.float64)
                    tensor.add_(0.3 * noise)
        return model


@dataclass(frozen=True)
class Example(Subject):
    """A block of a decoder."""

    config: BlockConfig

    @cached_property
    def model(self) -> DecoderConfig:
        """Two layers that have the block, beside the plainest of what else a layer needs."""
        mixer: MixerConfig = AttentionConfig(num_heads=4, num_kv_heads=2, rope_theta=20.0)
        ffn: FeedForwardConfig = SwiGLUConfig(hidden=24)
        connection: ConnectionConfig = AddConfig()
        pattern: dict[str, Any] = {}
        if isinstance(self.config, MixerConfig):
            mixer = self.config
            if (writer := mixer.example_writer) is not None:
                mixer, pattern = writer, {"other_mixers": {"r": mixer}, "mixer_pattern": "mr"}
        elif isinstance(self.config, FeedForwardConfig):
            ffn = self.config
        elif isinstance(self.config, ConnectionConfig):
            # Where streams start equal, a norm of what a part reads hides its size: a gradient of 0 would be compared as noise.
            connection, pattern = self.config, {"norm_placement": "post"}
            mixer = AttentionConfig(num_heads=4, num_kv_heads=2, rope_theta=20.0, qk_norm="none")
        else:
            ffn = MoEConfig(num_experts=EXAMPLE_EXPERTS, top_k=2, hidden=12, router=self.config)
        return DecoderConfig(
            vocab_size=VOCABULARY,
            width=EXAMPLE_WIDTH,
            depth=2,
            mixer=mixer,
            ffn=ffn,
            connection=connection,
            z_loss=0.01,
            **pattern,
        )

    def hidden(self, model: Decoder) -> Tensor:
        """See `Subject.hidden`."""
        return model(_tokens(2), Documents(None, LENGTH))  # type: ignore[no-any-return]

    def loss(self, model: Decoder, dtype: torch.dtype | None = None) -> tuple[Tensor, LossSums]:
        """See `Subject.loss`."""
        return model.loss(*_batch(), Documents(None, LENGTH), dtype=dtype)


@dataclass(frozen=True)
class Finding:
    """How one example fares with one contract: the worst error, why it does not apply, or what is wrong."""

    worst: float | None = None
    reason: str | None = None
    failure: str | None = None


Contract = Callable[[Any], float]
"""Of a `Subject` of one kind; those that speak of no kind hold for all."""


def find_blocks() -> list[type[BlockConfig]]:
    """Every concrete block of a decoder under `surefoot.blocks`."""
    return [cls for kind in KINDS for cls in found_under(kind)]


def found_under(kind: type[Kind]) -> list[type[Kind]]:
    """Every concrete class of a kind under `surefoot.blocks`, whose modules are all imported."""
    for module in pkgutil.walk_packages(blocks.__path__, f"{blocks.__name__}."):
        importlib.import_module(module.name)
    found = [cls for cls in _descendants(kind) if cls.__module__.startswith(f"{blocks.__name__}.")]
    return [cls for cls in found if not inspect.isabstract(cls)]


def examples_of(cls: type[BlockConfig]) -> list[Example]:
    """Those that a block gives; `BrokenError` where it gives none."""
    return [Example(name, config) for name, config in named_examples(cls, cls.examples())]


def named_examples(cls: type[Kind], given: Mapping[str, Kind]) -> list[tuple[str, Kind]]:
    """With the class's name; `BrokenError` where there are none."""
    name = cls.__name__.removesuffix("Config")
    if not given:
        raise BrokenError(f"{cls.__name__} gives no examples: see MixerConfig.examples")
    return [(f"{name}: {what}" if what else name, config) for what, config in given.items()]


def try_on(example: Subject, contract: Contract) -> Finding:
    """Run one contract. Whatever the block itself raises is a failure as well, and hides no other block's."""
    try:
        worst = contract(example)
    except InapplicableError as reason:
        return Finding(reason=str(reason))
    except BrokenError as failure:
        return Finding(failure=str(failure))
    except Exception as error:
        return Finding(failure=f"{type(error).__name__}: {error}")
    return Finding(worst=worst)


def causal(example: Example) -> float:
    """No output depends on a later token, by value or by gradient, and a mixer's do depend on earlier ones.

    A router that says it looks ahead is caught looking in training, and does not look where nothing is trained.
    """
    model, tokens_BL = example.built(), _distinct_tokens()
    with torch.no_grad():
        leaked = max(_leak(model, tokens_BL, place) for place in range(1, LENGTH))
    in_training = max(_leak(model, tokens_BL, place) for place in range(1, LENGTH))
    in_training = max(in_training, _gradient_leak(model, tokens_BL))
    if example.looks_ahead:
        if in_training <= EXACT:
            raise BrokenError("says that it looks ahead in training, and no leak is found")
        return at_most(leaked, EXACT, "outputs change with later tokens where nothing is trained")
    return at_most(max(leaked, in_training), EXACT, "outputs change with later tokens")


def isolated(example: Example) -> float:
    """A packed document is as if alone: its outputs, and no gradient of theirs, meet its neighbours."""
    model, tokens_BL = example.built(), _distinct_tokens()
    bounds = (0, 5, 18, 19, LENGTH)
    ids_BL = torch.cat([torch.full((1, stop - start), number) for number, (start, stop) in _runs(bounds)], 1)
    worst = 0.0
    # What looks ahead in training sees the whole batch: `causal` shows that.
    with torch.set_grad_enabled(not example.looks_ahead):
        packed_BLD = model(tokens_BL, Documents(ids_BL, LENGTH))
        for _, (start, stop) in _runs(bounds):
            alone_BLD = model(tokens_BL[:, start:stop], Documents(None, stop - start))
            worst = max(worst, relative_error(packed_BLD[:, start:stop], alone_BLD))
            if example.looks_ahead:
                continue
            weight = model.embedding.weight
            (grad_VD,) = torch.autograd.grad(packed_BLD[:, start:stop].square().sum(), weight, retain_graph=True)
            others = torch.cat([tokens_BL[0, :start], tokens_BL[0, stop:]])
            worst = max(worst, float(grad_VD[others].abs().max()))
    return at_most(worst, EXACT, "documents packed together see each other")


@torch.no_grad()
def stepwise(example: Example) -> float:
    """One full pass equals any prefill in two parts, and one step a token."""
    return in_parts(example.built(), _tokens(2))


def in_parts(model: Any, tokens_BL: Tensor) -> float:
    """How far a model, or one that sees images, that reads tokens (B, L) over states is from one that reads them at once."""
    (batch, length), worst = tokens_BL.shape, 0.0
    whole_BLD: Tensor = model(tokens_BL, Documents(None, length))
    for stops in [(split, length) for split in range(1, length)] + [tuple(range(1, length + 1))]:
        states = model.new_states(batch, length, torch.float64)
        parts = [
            model(tokens_BL[:, start:stop], Documents(None, stop - start, start=start), states)
            for start, stop in itertools.pairwise((0, *stops))
        ]
        worst = max(worst, relative_error(torch.cat(parts, 1), whole_BLD))
    return at_most(worst, EXACT, "passes in parts differ from one pass")


def complete(example: Subject) -> float:
    """On meta nothing has memory; then every weight has axes and a distribution that fills it, and buffers start at 0."""
    with torch.device("meta"):
        model = example.model.build()
    solid = [name for name, tensor in _tensors_of(model) if not tensor.is_meta]
    if solid:
        raise BrokenError(f"{solid[0]} has memory on meta")
    materialise(model, torch.device("cpu"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    initialise(model, 0)  # raises where a parameter has no axes
    unfilled = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if unfilled:
        raise BrokenError(f"{unfilled[0]} is not filled by its initial distribution")
    if not example.loss(model)[0].isfinite():
        raise BrokenError("the loss of the initial model is no number")
    return 0.0


def counted(example: Example) -> float:
    """FLOPs of a training pass are what torch's counter measures over the plain path.

    Where a router decides how many experts a token meets, by the rows that there were.
    """
    model = example.built().float()
    for mixer in model.mixers():
        mixer.use_plain()
    tokens_BL, targets_BL = _batch()
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens_BL, targets_BL, Documents(None, LENGTH))[0].backward()
    declared = flops_per_token(model, LENGTH)["full"] * tokens_BL.numel()
    for ffn in model.ffns():
        if isinstance(ffn, Routed):
            a_row = 6 * sum(weight.numel() for weight in ffn.experts.parameters()) / ffn.router.num_experts
            num_rows = int(ffn.router.loads_E.sum() - ffn.router.dropped)
            declared += a_row * (num_rows - tokens_BL.numel() * ffn.router.top_k)
    measured = counter.get_total_flops()
    if declared != measured:
        raise BrokenError(f"declares {declared:.0f} FLOPs where {measured} are measured")
    return 0.0


@torch.no_grad()
def stored(example: Example) -> float:
    """A state holds the declared bytes once it has seen so many positions, counted from its storages."""
    model = example.built()
    for length, dtype in itertools.product((5, LENGTH), (torch.float32, torch.bfloat16)):
        model.to(torch.float32)
        states = model.new_states(1, length, dtype)
        model(_tokens(1)[:, :length], Documents(None, length), states, dtype=dtype)
        for mixer, state in zip(model.mixers(), (state for state in states if state is not None), strict=True):
            declared, held = mixer.state_bytes(length, dtype), stored_bytes(state)
            if declared != held:
                raise BrokenError(f"declares {declared} bytes after {length} positions in {dtype} and holds {held}")
    return 0.0


def narrow(example: Subject) -> float:
    """With bf16 activations the loss is that of fp64 but for rounding, and every weight has a finite gradient of its dtype."""
    model = example.built()
    wide = float(example.loss(model)[1].nll)
    model = model.float()
    objective, sums = example.loss(model, torch.bfloat16)
    objective.backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None and not (weight.grad.dtype is weight.dtype and weight.grad.isfinite().all()):
            raise BrokenError(f"the gradient of {name} is not finite or of another dtype in bf16")
    return at_most(abs(float(sums.nll) - wide) / wide, BF16, "the loss in bf16 differs from fp64")


def saved(example: Subject) -> float:
    """Weights and states come back from a checkpoint with the same bits, into a model drawn otherwise."""
    model, other = example.built(), example.built()
    tensors, restored = _logical(model), _logical(other)
    with torch.no_grad():
        for tensor in restored.values():
            tensor.zero_()
    with tempfile.TemporaryDirectory() as folder:
        load_into(open_checkpoint(save(Path(folder), 1, tensors, {})), restored)
    with torch.no_grad():
        if not torch.equal(example.hidden(model), example.hidden(other)):
            raise BrokenError("a model read back computes something else: something is neither a weight nor a state")
    if any(not torch.equal(tensor, restored[name]) for name, tensor in tensors.items()):
        raise BrokenError("weights read back differ")
    return 0.0


def described(example: Subject) -> float:
    """The configuration comes back from its JSON as itself, and builds the same weights."""
    again = from_dict(json.loads(to_json(example.model)), type(example.model))
    if again != example.model or to_dict(again) != to_dict(example.model):
        raise BrokenError("the configuration read back differs")
    return 0.0


SINGLE: Mapping[str, Contract] = {
    "causal": causal,
    "packing": isolated,
    "steps": stepwise,
    "meta": complete,
    "FLOPs": counted,
    "bytes": stored,
    "bf16": narrow,
    "files": saved,
    "config": described,
}
"""Contracts that one process tries in a moment, by the head of their column."""


def _descendants(cls: type[Kind]) -> Iterator[type[Kind]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from itertools.chain(model.named_parameters(), model.named_buffers())
    for name, module in model.named_modules():
        yield from ((f"{name}.{key}", value) for key, value in vars(module).items() if isinstance(value, Tensor))


def _logical(model: nn.Module) -> dict[str, Tensor]:
    named = itertools.chain(named_weights(model), named_states(model))
    return {full_name: getattr(block, name).detach() for full_name, block, name in named}


def _leak(model: Decoder, tokens_BL: Tensor, place: int) -> float:
    """How far outputs before a place move with the token there; `BrokenError` where its own output does not move."""
    docs, changed_BL = Documents(None, LENGTH), tokens_BL.clone()
    changed_BL[0, place] = (changed_BL[0, place] + 1) % VOCABULARY
    before_BLD, after_BLD = model(tokens_BL, docs).detach(), model(changed_BL, docs).detach()
    if torch.equal(before_BLD[:, place], after_BLD[:, place]):
        raise BrokenError("an output does not depend on its own token")
    return relative_error(after_BLD[:, :place], before_BLD[:, :place])


def _gradient_leak(model: Decoder, tokens_BL: Tensor) -> float:
    """The largest gradient that an output of the first half has by a token of the second; all tokens differ."""
    half = LENGTH // 2
    hidden_BLD = model(tokens_BL, Documents(None, LENGTH))
    (grad_VD,) = torch.autograd.grad(hidden_BLD[:, :half].square().sum(), model.embedding.weight)
    return float(grad_VD[tokens_BL[0, half:]].abs().max())


def _distinct_tokens() -> Tensor:
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))[None, :LENGTH]


def _tokens(batch: int, seed: int = 3) -> Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def _batch() -> tuple[Tensor, Tensor]:
    return _tokens(2), _tokens(2, 4)


def _runs(bounds: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(itertools.pairwise(bounds)))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value; NaN where anything is."""
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max().clamp_min(1e-300))


def at_most(error: float, allowed: float, what: str) -> float:
    if not error <= allowed:
        raise BrokenError(f"{what}: by {error:.1e}, allowed {allowed:.0e}")
    return error
