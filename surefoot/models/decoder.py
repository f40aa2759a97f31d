"""A decoder-only language model.

Legend: B batch, L length, T = B·L tokens, D width, S width of the residual stream (D, or several D), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from surefoot.blocks.base import (
    EMBEDDED,
    TOKENS,
    Connection,
    ConnectionConfig,
    FeedForward,
    FeedForwardConfig,
    Mixer,
    MixerConfig,
    MixerState,
    Routed,
    Shared,
)
from surefoot.blocks.connections.add import AddConfig
from surefoot.blocks.embedding import Embedding
from surefoot.blocks.head import Head
from surefoot.blocks.norm import RMSNorm
from surefoot.config import Config, FieldError
from surefoot.models.ahead import Join, following
from surefoot.models.routing import take_auxiliary
from surefoot.ops.documents import Documents
from surefoot.ops.loss import LossSums

NormPlacement = Literal["pre", "post", "sandwich"]


class DecoderConfig(Config):
    """Embedding, `depth` layers of a mixer and a feed-forward network, a final norm, a head.

    Which mixer a layer has, a pattern of letters says: `m` is `mixer`, other letters are keys of `other_mixers`, `-` is
    none. Patterns are repeated up to `depth`. So it is with feed-forward networks, where `f` is `ffn`.
    """

    vocab_size: int = Field(gt=0, description="at least the tokenizer's; more is padding that no text uses")
    width: int = Field(gt=0)
    depth: int = Field(gt=0, description="number of layers")
    mixer: MixerConfig
    other_mixers: dict[str, MixerConfig] = Field(default={}, description="by the letter they have in mixer_pattern")
    mixer_pattern: str = Field(
        default="m", min_length=1, description="as in wwwm (three of four layers have the mixer w)"
    )
    ffn: FeedForwardConfig | None = Field(default=None, description="null where ffn_pattern has no f")
    other_ffns: dict[str, FeedForwardConfig] = Field(default={}, description="by the letter they have in ffn_pattern")
    ffn_pattern: str = Field(default="f", min_length=1, description="as in df (every second layer has the network d)")
    norm_eps: float = Field(default=1e-6, gt=0)
    norm_placement: NormPlacement = Field(
        default="pre", description="RMS norms before each part, after it, or both; never on the residual stream itself"
    )
    norm_offset: Literal[0, 1] = Field(
        default=0, description="what is added to the weights of norms for their scales (1 in Gemma)"
    )
    arrangement: Literal["sequential", "parallel"] = Field(
        default="sequential", description="parallel: mixer and network read the same normed input (Wang, 2021)"
    )
    embedding_scale: float = Field(default=1.0, gt=0, description="multiplies embeddings")
    connection: ConnectionConfig = Field(default=AddConfig(), description="how parts meet the residual stream")
    logit_scale: float = Field(default=1.0, gt=0, description="multiplies logits, before the softcap")
    logit_softcap: float | None = Field(
        default=None, gt=0, description="logits become this times tanh(logits / this) (Gemma 2, 2024)"
    )
    tied: bool = Field(default=False, description="whether the head shares the embedding's weight")
    z_loss: float = Field(
        default=1e-4, ge=0, description="weight of the squared log-partition (Chowdhery et al., 2022)"
    )
    ahead_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of the loss of predicting the token after the next by one more layer (DeepSeek-V3, 2024), in "
        "training alone; 0: none",
    )
    residual_init: Literal["scaled", "zero"] = Field(
        default="scaled",
        description="how projections into the residual stream start: 1/sqrt(2 depth fan-in) (Radford et al., 2019) or 0",
    )

    @model_validator(mode="after")
    def _mixers_fit(self) -> Self:
        for mixer in (self.mixer, *self.other_mixers.values()):
            mixer.check_width(self.width)
            if mixer.token_rows not in (None, self.vocab_size):
                raise FieldError(
                    "vocab_size", self.vocab_size, f"must be the {mixer.token_rows} rows of a mixer's value_rows"
                )
        return self

    @model_validator(mode="after")
    def _patterns_fit(self) -> Self:
        self._check_pattern("mixer_pattern", self.mixer_pattern, "m", "other_mixers", self.other_mixers)
        self._check_pattern("ffn_pattern", self.ffn_pattern, "f", "other_ffns", self.other_ffns)
        if (self.ffn is None) == ("f" in self.ffn_pattern):
            remedy = "has an f, so ffn is needed" if self.ffn is None else "has no f, so ffn would be nowhere"
            raise FieldError("ffn_pattern", self.ffn_pattern, remedy)
        for layer in range(self.depth):
            if self.mixer_of(layer) is None and self.ffn_of(layer) is None:
                raise FieldError("ffn_pattern", self.ffn_pattern, f"leaves layer {layer} without mixer and network")
        return self

    @model_validator(mode="after")
    def _what_is_read_was_left(self) -> Self:
        writers: dict[str, MixerConfig] = {}
        for layer in range(self.depth):
            if (mixer := self.mixer_of(layer)) is None:
                continue
            if (name := mixer.needs_shared) is not None:
                if name not in writers:
                    raise FieldError(
                        "mixer_pattern",
                        self.mixer_pattern,
                        f"has layer {layer} read {name}, which no earlier layer leaves",
                    )
                mixer.check_writer(writers[name])
            if (name := mixer.leaves_shared) is not None:
                writers[name] = mixer
        return self

    @model_validator(mode="after")
    def _arrangement_fits(self) -> Self:
        if self.arrangement == "parallel" and self.norm_placement == "post":
            raise FieldError("norm_placement", "post", "needs arrangement=sequential; use pre or sandwich")
        return self

    @model_validator(mode="after")
    def _the_layer_ahead_stands_alone(self) -> Self:
        mixer = self.mixer_of(self.depth - 1)
        if not self.ahead_weight or mixer is None:
            return self
        if mixer.needs_shared is not None or mixer.is_common:
            what = "shares weights with" if mixer.is_common else f"reads {mixer.needs_shared} of"
            raise FieldError(
                "ahead_weight",
                self.ahead_weight,
                f"copies the last layer, which {what} an earlier one; use 0, or end with another mixer",
            )
        return self

    @property
    def stream_width(self) -> int:
        """Numbers a token between layers."""
        return self.width * self.connection.num_streams

    def expand(self, x_BLD: Tensor) -> Tensor:
        """Embeddings to the residual stream (B, L, S): as many copies as it has vectors."""
        num = self.connection.num_streams
        return x_BLD if num == 1 else x_BLD.repeat(1, 1, num)

    def _check_pattern(self, field: str, pattern: str, first: str, where: str, others: Mapping[str, Config]) -> None:
        if self.depth % len(pattern):
            raise FieldError(field, pattern, f"has {len(pattern)} letters, which must divide depth {self.depth}")
        for letter in others:
            if len(letter) != 1 or not letter.isalpha() or letter == first:
                raise FieldError(where, letter, f"must be one letter other than {first}")
            if letter not in pattern:
                raise FieldError(field, pattern, f"has no {letter}, so {where}.{letter} would be nowhere")
        for letter in pattern:
            if letter not in {first, "-", *others}:
                raise FieldError(field, pattern, f"has the letter {letter}, which {where} does not")

    def mixer_of(self, layer: int) -> MixerConfig | None:
        """The mixer of a layer, counted from 0; None where it has none."""
        letter = self.mixer_letter(layer)
        return None if letter == "-" else self.other_mixers.get(letter, self.mixer)

    def mixer_letter(self, layer: int) -> str:
        """Which of them it is."""
        return self.mixer_pattern[layer % len(self.mixer_pattern)]

    @property
    def reads_embedded(self) -> bool:
        """Whether a layer reads embeddings beside the stream."""
        return any(mixer.reads_embedded for mixer in self._mixers())

    def _mixers(self) -> list[MixerConfig]:
        """Of the layers that have one, in order."""
        return [mixer for layer in range(self.depth) if (mixer := self.mixer_of(layer)) is not None]

    def ffn_of(self, layer: int) -> FeedForwardConfig | None:
        """The feed-forward network of a layer, counted from 0; None where it has none."""
        letter = self.ffn_pattern[layer % len(self.ffn_pattern)]
        return None if letter == "-" else self.other_ffns.get(letter, self.ffn)

    def in_short(self, least: int) -> DecoderConfig:
        """Each combination of mixer and network that occurs, once, in order; at least `least` layers by going round, and twice
        round where layers have parts in common."""
        pairs = list(
            dict.fromkeys(
                (
                    self.mixer_pattern[layer % len(self.mixer_pattern)],
                    self.ffn_pattern[layer % len(self.ffn_pattern)],
                )
                for layer in range(self.depth)
            )
        )
        rounds = max(-(-least // len(pairs)), 2 if any(mixer.is_common for mixer in self._mixers()) else 1)
        patterns = {
            "mixer_pattern": "".join(mixer for mixer, _ in pairs),
            "ffn_pattern": "".join(ffn for _, ffn in pairs),
        }
        return self.model_copy(update={"depth": rounds * len(pairs), **patterns})

    def build(self) -> Decoder:
        """The model, its weights unfilled (`initialise` fills them); use under `torch.device("meta")` to count."""
        return Decoder(self)


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x)); see `DecoderConfig` for where else norms may be and what may be left out."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config = config
        output_scale = 0.0 if config.residual_init == "zero" else (2 * config.depth) ** -0.5
        mixer, ffn = config.mixer_of(index), config.ffn_of(index)
        before, after = config.norm_placement != "post", config.norm_placement != "pre"
        one_norm = config.arrangement == "parallel" and mixer is not None

        def norm(wanted: bool) -> RMSNorm | None:
            return RMSNorm(config.width, config.norm_eps, offset=config.norm_offset) if wanted else None

        # In a parallel layer the network reads what the mixer reads, and one connection adds both.
        parts = 1 if config.arrangement == "parallel" else 2

        def connection(number: int, wanted: bool) -> Connection | None:
            return config.connection.build(width=config.width, index=parts * index + number) if wanted else None

        self.connect_mixer = connection(0, mixer is not None)
        self.norm_mixer = norm(before and mixer is not None)
        self.mixer = None if mixer is None else mixer.build(width=config.width, output_scale=output_scale)
        self.norm_mixer_out = norm(after and mixer is not None)
        self.connect_ffn = connection(parts - 1, ffn is not None and not one_norm)
        self.norm_ffn = norm(before and ffn is not None and not one_norm)
        self.ffn = None if ffn is None else ffn.build(width=config.width, output_scale=output_scale)
        self.norm_ffn_out = norm(after and ffn is not None)
        if isinstance(self.ffn, Routed):
            self.ffn.router.layer = index

    def forward(
        self, x_BLS: Tensor, docs: Documents, state: MixerState | None = None, shared: Shared | None = None
    ) -> tuple[Tensor, Shared]:
        """The stream (B, L, S) to the stream after it, and what this layer leaves for later ones to read.

        Both are returned, so that a wrapper of layers sees all through which gradients come. What earlier layers left is not
        passed on: through FSDP it would come out as a view, on which its hooks may be lost.
        """
        found = shared or {}
        shared = dict(found)
        if self.connect_mixer is not None and self.mixer is not None:
            read_BLD, write = self.connect_mixer(x_BLS)
            normed_BLD = _through(self.norm_mixer, read_BLD)
            y_BLD = _through(self.norm_mixer_out, self.mixer(normed_BLD, docs, state, shared))
            if self.connect_ffn is None and self.ffn is not None:
                y_BLD = y_BLD + _through(self.norm_ffn_out, self._network(normed_BLD, docs, shared))
            x_BLS = write(y_BLD)
        if self.connect_ffn is not None and self.ffn is not None:
            read_BLD, write = self.connect_ffn(x_BLS)
            x_BLS = write(_through(self.norm_ffn_out, self._network(_through(self.norm_ffn, read_BLD), docs, shared)))
        return x_BLS, {name: left for name, left in shared.items() if found.get(name) is not left}

    def _network(self, x_BLD: Tensor, docs: Documents, shared: Shared) -> Tensor:
        """What routes is told which tokens these are."""
        assert self.ffn is not None
        y_BLD: Tensor = self.ffn(x_BLD, docs, shared) if isinstance(self.ffn, Routed) else self.ffn(x_BLD)
        return y_BLD

    def parts(self) -> list[Mixer | FeedForward]:
        """Mixers and networks, those of a composite each by itself."""
        mixers = () if self.mixer is None else self.mixer.parts()
        return [*mixers, *(() if self.ffn is None else (self.ffn,))]

    def part_widths(self) -> int:
        """Numbers of a position that the parts read and write, all together."""
        widths = 0
        for part in self.parts():
            read = (getattr(part, name).shape[-1] for name, axes in part.axes.items() if axes[-1] == "embed")
            widths += int(next(read, self.config.width)) + self.config.width
        return widths

    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token, as its parts count them."""
        mixer = 0.0 if self.mixer is None else self.mixer.flops(length, causal=causal)
        connections = sum(one.flops() for one in (self.connect_mixer, self.connect_ffn) if one is not None)
        return mixer + (0.0 if self.ffn is None else self.ffn.flops()) + connections


class Ahead(nn.Module):
    """From hidden states to those that the model's own head predicts the token after the next from; see `models.ahead`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.norm_hidden, self.norm_embedding, self.norm_out = (
            RMSNorm(config.width, config.norm_eps, offset=config.norm_offset) for _ in range(3)
        )
        self.join = Join(config.width)
        self.layer = Layer(config, config.depth - 1)

    def forward(self, hidden_BLD: Tensor, next_BLD: Tensor, tokens_BL: Tensor, docs: Documents) -> Tensor:
        """Hidden states, and embeddings and ids of the next tokens, (B, L, D) and (B, L), to hidden states (B, L, D)."""
        joined_BLD = self.join(self.norm_hidden(hidden_BLD), self.norm_embedding(next_BLD))
        x_BLS, _ = self.layer(self.config.expand(joined_BLD), docs, None, {TOKENS: tokens_BL})
        found_BLD: Tensor = self.norm_out(self.config.connection.collapse(x_BLS))
        return found_BLD

    def loss(
        self,
        hidden_BLD: Tensor,
        tokens_BL: Tensor,
        targets_BL: Tensor,
        docs: Documents,
        embedding: Embedding,
        head: Head,
    ) -> Tensor:
        """Its term of the objective, weighted, summed over targets; `embedding` and `head` are the model's own."""
        next_BL, after_BL = following(tokens_BL, targets_BL, docs)
        ahead_BLD = self(hidden_BLD, embedding(next_BL, hidden_BLD.dtype), next_BL, docs)
        weighted: Tensor = self.config.ahead_weight * head.loss(ahead_BLD, after_BL)[0]
        return weighted

    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token, without the head."""
        return self.join.flops() + self.layer.flops(length, causal=causal)


def _through(norm: RMSNorm | None, x_BLD: Tensor) -> Tensor:
    if norm is None:
        return x_BLD
    normed_BLD: Tensor = norm(x_BLD)
    return normed_BLD


class Decoder(nn.Module):
    """A decoder-only language model; see `DecoderConfig`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config, self.reads_embedded = config, config.reads_embedded
        std = config.width**-0.5 if config.tied else 1.0
        self.embedding = Embedding(config.vocab_size, config.width, std=std, scale=config.embedding_scale)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.depth))
        firsts: dict[str, Mixer] = {}
        for index, layer in enumerate(self._layers()):
            if layer.mixer is not None:
                layer.mixer.share(firsts.setdefault(config.mixer_letter(index), layer.mixer))
        self.norm = RMSNorm(config.width, config.norm_eps, offset=config.norm_offset)
        tied = self.embedding.weight if config.tied else None
        self.head = Head(
            config.vocab_size,
            config.width,
            config.z_loss,
            tied,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
        )
        self.ahead = Ahead(config) if config.ahead_weight else None

    def forward(
        self,
        tokens_BL: Tensor,
        docs: Documents,
        states: Sequence[MixerState | None] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Token ids (B, L) to final hidden states (B, L, D), computed in `dtype` (the weights' own by default)."""
        embedded_BLD = self.embedding(tokens_BL, dtype or self.embedding.weight.dtype)
        return self.read(embedded_BLD, tokens_BL, docs, states)

    def read(
        self,
        x_BLD: Tensor,
        tokens_BL: Tensor,
        docs: Documents,
        states: Sequence[MixerState | None] | None = None,
        between: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Embeddings (B, L, D), of tokens or of anything else in their places, to final hidden states (B, L, D).

        `between` is given the number of each layer and its stream, and returns the stream that the layer reads.
        """
        x_BLS = self.config.expand(x_BLD)
        shared: Shared = {TOKENS: tokens_BL, EMBEDDED: x_BLD} if self.reads_embedded else {TOKENS: tokens_BL}
        for index, layer in enumerate(self.layers):
            if between is not None:
                x_BLS = between(index, x_BLS)
            x_BLS, left = layer(x_BLS, docs, states[index] if states is not None else None, shared)
            shared = shared | left
        hidden: Tensor = self.norm(self.config.connection.collapse(x_BLS))
        return hidden

    def loss(
        self, tokens_BL: Tensor, targets_BL: Tensor, docs: Documents, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, LossSums]:
        """The objective summed over valid targets (differentiable), and its parts; divide by the step's tokens once.

        Routers add their auxiliary losses, summed over all tokens, to the objective; `models.routing` says what they were. So
        does the prediction of the token after the next where gradients are recorded; the parts are of the next token alone.
        """
        hidden_BLD: Tensor = self(tokens_BL, docs, dtype=dtype)
        objective, sums = self.head.loss(hidden_BLD, targets_BL)
        if self.ahead is not None and torch.is_grad_enabled():
            objective = objective + self.ahead.loss(hidden_BLD, tokens_BL, targets_BL, docs, self.embedding, self.head)
        auxiliary = take_auxiliary(self)
        return (objective if auxiliary is None else objective + auxiliary), sums

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) to logits (..., V)."""
        scores: Tensor = self.head(hidden)
        return scores

    def new_states(self, batch: int, length: int, dtype: torch.dtype) -> list[MixerState | None]:
        """One empty state a layer, with room for `length` positions; None for a layer without a mixer."""
        return [
            None if layer.mixer is None else layer.mixer.new_state(batch, length, dtype) for layer in self._layers()
        ]

    def mixers(self) -> list[Mixer]:
        """Of the layers that have one, in order."""
        return [layer.mixer for layer in self._layers() if layer.mixer is not None]

    def ffns(self) -> list[FeedForward]:
        """Of the layers that have one, in order."""
        return [layer.ffn for layer in self._layers() if layer.ffn is not None]

    def _layers(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))
