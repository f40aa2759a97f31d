"""What a pipeline rank holds: stages of a model, what passes between them beside the stream, and weights that several use.

A stage keeps the model's full names, so that what trains, saves and loads weights knows no stages.

What a layer reads of an earlier stage's in `shared` (keys and values of other layers, embeddings) travels behind the stream, and
its gradient back. A weight that several stages use (of what layers have in common, or the embedding's where the last stage has it
too) is of the first of them: the others keep copies, whose gradients are added to the owner's and which are brought up to date
after each step (`parallel.copies`).

Of a model that reads images the first stage has the encoder, and what it makes of images travels to where it is read.

Legend: B batch, L this rank's length of the sequence, S width of the residual stream.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from surefoot.blocks.base import EMBEDDED, TOKENS, Common, Mixer, Shared
from surefoot.blocks.embedding import Embedding
from surefoot.models.decoder import Decoder, Layer
from surefoot.models.multimodal import Multimodal
from surefoot.models.routing import take_auxiliary
from surefoot.ops.autograd import apply as differentiably
from surefoot.ops.documents import Documents

EMBEDDING, HEAD, EMBEDDING_AHEAD = "embedding.weight", "head.weight", "embedding_ahead.weight"

FEATURES = "features"
"""The name under which stages find what `Multimodal.features` makes of images."""

Feed = tuple[Tensor, Tensor, Documents, *tuple[Tensor, ...]]
"""Tokens and targets, (B, L) each, and documents of one micro-batch, as this rank sees them. For a model that reads images also
those, and where each of these tokens looks (`Multimodal.looks_of`), if not everywhere."""


class Left(NamedTuple):
    """Something in `shared` that an earlier layer, or the embedding (None), leaves for later ones."""

    name: str
    writer: Mixer | None

    def empty(self, batch: int, length: int, embedded: Tensor, others: Mapping[str, Tensor]) -> Tensor:
        """What it is of a micro-batch (batch, length), on meta; `embedded` as embeddings are, `others` as no layer leaves."""
        if self.writer is None:
            return embedded if self.name == EMBEDDED else others[self.name]
        return self.writer.leaves(batch, length, embedded.dtype)[self.name]


def handed_on(model: Decoder, bounds: Sequence[int], reading: Sequence[int] = ()) -> list[list[Left]]:
    """What each stage is given beside the stream: what it or a later one reads, and an earlier one has left. Before the layers in
    `reading` something reads `FEATURES`."""
    given: list[dict[str, Left]] = [{} for _ in bounds[1:]]
    for stage, start in enumerate(bounds[1:-1], 1):
        if any(index >= start for index in reading):
            given[stage][FEATURES] = Left(FEATURES, None)
    writers: dict[str, tuple[int, Mixer | None]] = {EMBEDDED: (-1, None)}
    for index, layer in enumerate(model._layers()):
        if layer.mixer is None:
            continue
        for name in layer.mixer.reads:
            written, writer = writers[name]
            for stage, start in enumerate(bounds[1:-1], 1):
                if written < start <= index:
                    given[stage][name] = Left(name, writer)
        for name in layer.mixer.leaves(1, 1, torch.float32):
            writers[name] = index, layer.mixer
    return [[found[name] for name in sorted(found)] for found in given]


class Stage(nn.Module):
    """Consecutive layers of a decoder, with the embedding before the first and norm and head after the last.

    `copies` maps a weight that another stage owns to the name it has there. `given` is what comes beside the stream, and `passed`
    what goes on beside it.
    """

    def __init__(self, model: Decoder, index: int, bounds: Sequence[int], reader: Multimodal | None = None) -> None:
        super().__init__()
        self.index, self.config = index, model.config
        # In a tuple, as its parts are those of `ImageStage` and not of this stage.
        self._reader = (reader,)
        self.is_first, self.is_last = index == 0, index == len(bounds) - 2
        self.embedding = model.embedding if self.is_first else None
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(bounds[index], bounds[index + 1])})
        self.norm = model.norm if self.is_last else None
        self.head = model.head if self.is_last else None
        shared = shared_weights(model, bounds)
        self.copies = {one.copy: one.owner for one in shared if one.copy_stage == index}
        self.ahead = model.ahead if self.is_last else None
        self.embedding_ahead = None if self.ahead is None else cast(Embedding, _twin(model.embedding))
        if self.head is not None and model.config.tied:
            self.head.register_parameter("weight", nn.Parameter(self.head.weight.detach().clone()))
            self.head.axes["weight"] = model.embedding.axes["weight"]
        given = handed_on(model, bounds, () if reader is None else reader.reading_layers())
        # Within tuples, so that writers on other stages do not become parts of this one.
        self.given, self.passed = (tuple(stage) for stage in (*given, [])[index : index + 2])
        _part_common(model, self._layers(), bounds[index])
        self._feeds: Sequence[Feed] = ()
        self._num_tokens, self._dtype = 1, torch.float32
        self.sums = (0.0, 0.0)

    @property
    def reader(self) -> Multimodal | None:
        """What reads images, as far as it is here."""
        return self._reader[0]

    def begin(self, feeds: Sequence[Feed], num_tokens: int, dtype: torch.dtype) -> None:
        """Before the passes of one step."""
        self._feeds, self._num_tokens, self._dtype = feeds, num_tokens, dtype
        self.sums = (0.0, 0.0)

    def forward(self, x_BLS: Tensor, *given: Tensor, number_1: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Micro-batch `number_1`: the first stage reads its tokens, not `x_BLS`; the last returns (1,), its share of the
        step's objective. All others return the stream, and behind it what they pass on, if anything."""
        tokens_BL, targets_BL, docs, *seeing = self._feeds[int(number_1)]
        reader, looks = self.reader, seeing[1] if len(seeing) > 1 else None
        shared: Shared = {TOKENS: tokens_BL}
        for left, x in zip(self.given, given, strict=True):
            shared[left.name] = differentiably(_SendableGradient, x)
        if self.embedding is not None:
            embedded_BLD = self.embedding(tokens_BL, self._dtype)
            if reader is not None:
                shared[FEATURES] = reader.features(seeing[0], self._dtype)
                embedded_BLD = reader.placed(embedded_BLD, shared[FEATURES], looks)
            x_BLS = self.config.expand(embedded_BLD)
            if self.config.reads_embedded:
                shared[EMBEDDED] = embedded_BLD
        between = None if reader is None or FEATURES not in shared else reader.between(shared[FEATURES], looks)
        for name, layer in self.layers.items():
            if between is not None:
                x_BLS = between(int(name), x_BLS)
            x_BLS, new = layer(x_BLS, docs, None, shared)
            shared = shared | new
        auxiliary = take_auxiliary(self)
        if self.norm is None or self.head is None:
            x_BLS = x_BLS if auxiliary is None else _with_loss(x_BLS, auxiliary / self._num_tokens)
            # Copies: what only passes through is no result of a stage's, and FSDP warns of views.
            return (x_BLS, *(shared[left.name].clone() for left in self.passed)) if self.passed else x_BLS
        targets_BL = targets_BL if reader is None else reader.textual(targets_BL)
        hidden_BLD = self.norm(self.config.connection.collapse(x_BLS))
        objective, sums = self.head.loss(hidden_BLD, targets_BL)
        self.sums = (self.sums[0] + sums.nll.item(), self.sums[1] + sums.z.item())
        if self.ahead is not None and self.embedding_ahead is not None and torch.is_grad_enabled():
            objective = objective + self.ahead.loss(
                hidden_BLD, tokens_BL, targets_BL, docs, self.embedding_ahead, self.head
            )
        objective = objective if auxiliary is None else objective + auxiliary
        return objective.reshape(1) / self._num_tokens  # no view: FSDP hooks on what a stage returns

    def _layers(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers.values()))


class ImageStage(nn.Module):
    """A stage of a model that reads images: one of its language model, and what is before and between those layers; the first
    has the encoder."""

    def __init__(self, model: Multimodal, index: int, bounds: Sequence[int]) -> None:
        super().__init__()
        # The model as far as it is here: the same modules under the same names, and what it does with them.
        reader = copy.copy(model)
        reader._modules = self._modules
        self._reader = (reader,)
        self.text = Stage(model.text, index, bounds, reader)
        here = range(bounds[index], bounds[index + 1])
        for name, part in model.named_children():
            if name == "cross":
                readers = zip(model.reading_layers(), part.named_children(), strict=True)
                self.add_module(name, nn.ModuleDict({number: one for at, (number, one) in readers if at in here}))
            elif name != "text" and index == 0:
                self.add_module(name, part)
        self.copies = {f"text.{copied}": f"text.{owner}" for copied, owner in self.text.copies.items()}

    def unread(self) -> list[nn.Module]:
        """See `Multimodal.unread`."""
        return self._reader[0].unread() if self.text.is_first else []

    def stacks(self) -> dict[str, dict[str, nn.Module]]:
        """See `Multimodal.stacks`."""
        return self._reader[0].stacks()

    def forward(self, x_BLS: Tensor, *given: Tensor, number_1: Tensor) -> Tensor | tuple[Tensor, ...]:
        """See `Stage.forward`."""
        found: Tensor | tuple[Tensor, ...] = self.text(x_BLS, *given, number_1=number_1)
        return found


class SharedWeight(NamedTuple):
    """A weight of which another stage than its owner's has a copy: its names there and here, and both stages."""

    owner: str
    copy: str
    owner_stage: int
    copy_stage: int


def shared_weights(model: Decoder | Multimodal, bounds: Sequence[int]) -> list[SharedWeight]:
    """All of them, in an order that all ranks share."""
    if isinstance(model, Multimodal):
        return [
            one._replace(owner=f"text.{one.owner}", copy=f"text.{one.copy}")
            for one in shared_weights(model.text, bounds)
        ]
    last = len(bounds) - 2
    if not last:
        return []
    found = [SharedWeight(EMBEDDING, HEAD, 0, last)] if model.config.tied else []
    if model.ahead is not None:
        found.append(SharedWeight(EMBEDDING, EMBEDDING_AHEAD, 0, last))
    for layers, inside in _common_weights(model):
        names = [f"layers.{layer}.{inside}" for layer in layers]
        stages = [_stage_of(layer, bounds) for layer in layers]
        for stage in dict.fromkeys(stages):
            if stage != stages[0]:
                found.append(SharedWeight(names[0], names[stages.index(stage)], stages[0], stage))
    return found


def repeating(model: Decoder, bounds: Sequence[int]) -> set[int]:
    """Stages in which several layers use the same weights: torch 2.13 cannot there compute gradients of weights apart."""
    stages = [[_stage_of(layer, bounds) for layer in layers] for layers, _ in _common_weights(model)]
    return {stage for users in stages for stage in users if users.count(stage) > 1}


def _common_weights(model: Decoder) -> list[tuple[list[int], str]]:
    """Of each weight that layers have in common: those layers, and its name in each of them."""
    users: dict[int, tuple[list[int], str]] = {}
    for index, layer in enumerate(model._layers()):
        for part, module in layer.named_modules():
            if isinstance(module, Common):
                for name, weight in module.named_parameters():
                    users.setdefault(id(weight), ([], f"{part}.{name}"))[0].append(index)
    return list(users.values())


def _stage_of(layer: int, bounds: Sequence[int]) -> int:
    return bisect_right(bounds, layer) - 1


def _part_common(model: Decoder, layers: Sequence[Layer], start: int) -> None:
    """Give layers from `start` on twins, which they share, of what they have in common with earlier ones."""
    earlier = {
        id(module) for layer in model._layers()[:start] for module in layer.modules() if isinstance(module, Common)
    }
    twins: dict[int, nn.Module] = {}
    for layer in layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if id(child) in earlier:
                    setattr(parent, name, twins.setdefault(id(child), _twin(child)))


def _twin(module: nn.Module) -> nn.Module:
    """The same with weights of its own, unfilled; what hangs on it (hooks, groups of ranks) is shared."""
    twin = copy.copy(module)
    # Hooks are kept in dictionaries: what is hung on one of the two later must not hang on the other.
    twin.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()
    }
    twin._parameters = {
        name: None if weight is None else nn.Parameter(torch.empty_like(weight))
        for name, weight in module._parameters.items()
    }
    twin._modules = {name: None if child is None else _twin(child) for name, child in module._modules.items()}
    return twin


class _WithLoss(torch.autograd.Function):
    """A copy, since FSDP hooks on what a stage returns and warns of views."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=grads[0].device)


def _with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """x, whose backward pass is also that of `loss`: the step's objective has losses that arise before the last stage."""
    with_loss: Tensor = differentiably(_WithLoss, x, loss)
    return with_loss


class _SendableGradient(torch.autograd.Function):
    """Nothing but that the gradient lies in memory as it is sent: in one run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return grads[0].contiguous()
