"""Softmax attention with grouped key-value heads.

Legend: B batch, L length (queries), S keys, D width, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from surefoot.blocks.base import EXAMPLE_VOCABULARY, TOKENS, Block, Initial, Mixer, MixerConfig, Shared
from surefoot.blocks.mixers.cache import KVState, NoState, mean_seen, most_kept
from surefoot.blocks.norm import HeadsNorm, RMSNorm
from surefoot.blocks.rope import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling
from surefoot.config import FieldError
from surefoot.ops.attention import Attend, attend, attend_plain
from surefoot.ops.documents import Documents, Reach
from surefoot.ops.lookup import lookup
from surefoot.ops.scores import Scores

_OF_KEYS = (
    "num_kv_heads",
    "head_size",
    "rope",
    "rope_theta",
    "rope_share",
    "rope_scaling",
    "window",
    "keep_first",
)
"""Options that a layer must have in common with the one whose keys it reads."""


class AttentionConfig(MixerConfig):
    """Causal attention with rotary positions (Su et al., 2021) and grouped key-value heads (Ainslie et al., 2023)."""

    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0, description="each serves num_heads / num_kv_heads query heads")
    head_size: int | None = Field(default=None, gt=0, multiple_of=2, description="width / num_heads where not given")
    rope: Literal["half", "interleaved", "none"] = Field(
        default="half",
        description="component i turns with i + half (Hugging Face), 2i with 2i + 1 (interleaved), or none do (NoPE)",
    )
    rope_theta: float = Field(default=10_000.0, gt=1, description="longest wavelength is 2 pi times this")
    rope_share: float = Field(default=1.0, gt=0, le=1, description="share of a head's components, the first, that turn")
    rope_scaling: RopeScaling | None = None
    qk_norm: Literal["none", "head", "width"] = Field(
        default="head",
        description="RMS norm of queries and keys, each head by itself (Henry et al., 2020) or all together (OLMo 2)",
    )
    norm_eps: float = Field(default=1e-6, gt=0)
    norm_offset: Literal[0, 1] = Field(default=0, description="as a decoder's, of the norms of each head")
    scale: float | None = Field(default=None, gt=0, description="of products; 1 / sqrt(head_size) where not given")
    softcap: float | None = Field(
        default=None, gt=0, description="scores become softcap tanh(score / softcap) (Gemma 2, 2024)"
    )
    window: int | None = Field(
        default=None, gt=0, description="tokens that a query sees, itself the last; all if not given"
    )
    keep_first: int = Field(
        default=0, ge=0, description="tokens that begin a document and stay in sight of all (Xiao et al., 2023)"
    )
    sinks: Literal["none", "learned"] = Field(
        default="none", description="a learned score of no key for each head (gpt-oss; OpenAI, 2025)"
    )
    gate: Literal["none", "sigmoid"] = Field(
        default="none", description="of each component before the output projection (Qiu et al., 2025)"
    )
    bias: Literal["none", "qkv"] = Field(default="none", description="of which projections")
    value_rows: int | None = Field(
        default=None,
        gt=0,
        description="the vocabulary's: what a token adds to its own values, times a learned number (modded-nanogpt, 2024)",
    )
    leaves: str | None = Field(
        default=None, min_length=1, description="name under which later layers may read its keys and values"
    )
    reads: str | None = Field(
        default=None,
        min_length=1,
        description="name of the keys and values to use, made by an earlier layer (Brandon et al., 2024; Sun et al., 2024)",
    )

    @field_validator("qk_norm", mode="before")
    @classmethod
    def _once_a_boolean(cls, value: object) -> object:
        return {True: "head", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise FieldError("num_kv_heads", self.num_kv_heads, f"must divide num_heads {self.num_heads}")
        return self

    @model_validator(mode="after")
    def _all_is_in_effect(self) -> Self:
        if self.keep_first and self.window is None:
            raise FieldError("keep_first", self.keep_first, "has no effect without window; give both or neither")
        if self.norm_offset and self.qk_norm != "head":
            raise FieldError("norm_offset", self.norm_offset, "is of qk_norm=head alone; leave it out")
        if self.rope == "none" and (self.rope_scaling is not None or self.rope_share != 1):
            raise FieldError("rope", "none", "leaves rope_scaling and rope_share without effect; leave them out")
        if self.reads is not None and self.leaves is not None:
            raise FieldError("leaves", self.leaves, f"has no keys of its own to leave where reads={self.reads}")
        if self.reads is not None and self.value_rows is not None:
            raise FieldError("value_rows", self.value_rows, f"has no values to be added to where reads={self.reads}")
        return self

    @property
    def token_rows(self) -> int | None:
        """Of the values' embedding."""
        return self.value_rows

    @property
    def leaves_shared(self) -> str | None:
        """Keys and values."""
        return self.leaves

    @property
    def needs_shared(self) -> str | None:
        """Keys and values."""
        return self.reads

    def check_writer(self, writer: MixerConfig) -> None:
        """Heads, reach and positions must be those of the keys."""
        if not isinstance(writer, AttentionConfig):
            raise FieldError("reads", self.reads, f"was left by {type(writer).__name__}; name what attention leaves")
        # Without a size of its own, a head's follows from their number.
        for name in (*_OF_KEYS, *(["num_heads"] if self.head_size is None else [])):
            own, theirs = getattr(self, name), getattr(writer, name)
            if own != theirs:
                raise FieldError(name, own, f"must be {theirs} as in the layer that leaves {self.reads}")

    @property
    def example_writer(self) -> AttentionConfig | None:
        """See `MixerConfig.example_writer`."""
        return None if self.reads is None else self.model_copy(update={"reads": None, "leaves": self.reads})

    def check_width(self, width: int) -> None:
        """Without a head size of its own, the width must give an even one; an even number of components turn."""
        size, rest = divmod(width, self.num_heads)
        if self.head_size is None and (rest or size % 2):
            unit = 2 * self.num_heads
            nearest = max(unit, round(width / unit) * unit)
            raise FieldError(
                "width", width, f"must give an even head size over {self.num_heads} heads; nearest is {nearest}"
            )
        size = self.head_size or size
        turning = self.rope_share * size
        if turning % 2:
            nearest_share = max(2, 2 * round(turning / 2)) / size
            raise FieldError(
                "width",
                width,
                f"gives heads of {size}, of which rope_share={self.rope_share} is no even number; nearest that is: "
                f"{nearest_share}",
            )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        example = partial(cls, num_heads=4, rope_theta=20.0)
        return {
            "gqa": example(num_kv_heads=2),
            "mqa": example(num_kv_heads=1),
            "no qk-norm": example(num_kv_heads=4, qk_norm="none"),
            "norm of the width": example(num_kv_heads=2, qk_norm="width"),
            "window": example(num_kv_heads=2, window=7),
            "first and window": example(num_kv_heads=2, window=7, keep_first=3),
            "learned sinks": example(num_kv_heads=2, window=7, sinks="learned"),
            "softcap and scale": example(num_kv_heads=2, softcap=2.0, scale=0.5),
            "gate and biases": example(num_kv_heads=2, gate="sigmoid", bias="qkv"),
            "no positions": example(num_kv_heads=2, rope="none"),
            "partial, interleaved": example(num_kv_heads=2, rope="interleaved", rope_share=0.5),
            "linear": example(num_kv_heads=2, rope_scaling=LinearScaling(factor=2.0)),
            "llama3": example(num_kv_heads=2, rope_scaling=Llama3Scaling(factor=4.0, original_length=32)),
            "values of tokens": example(num_kv_heads=2, value_rows=EXAMPLE_VOCABULARY),
            "shared keys and values": example(num_kv_heads=2, reads="keys"),
            "shared window": example(num_kv_heads=2, window=7, reads="keys"),
            "yarn": example(num_kv_heads=2, rope_scaling=YarnScaling(factor=4.0, original_length=16)),
        }

    def build(self, *, width: int, output_scale: float) -> Attention:
        """The mixer itself."""
        return Attention(self, width, output_scale)


def _names(kept: str) -> tuple[str, str]:
    """Under which keys and values lie in `shared` that are left as `kept`."""
    return f"{kept}.k", f"{kept}.v"


class Sinks(Block):
    """One score for each head that belongs to no key."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.scores_H = self.add_weight("scores_H", (num_heads,), ("heads",), Initial())


class Values(Block):
    """One vector a token id, times one learned number; each rank of a cut has all ids for its own heads."""

    def __init__(self, num_rows: int, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.head_size, self.units = head_size, {"kv_heads": head_size}
        shape = (num_rows, num_heads * head_size)
        self.weight = self.add_weight("weight", shape, ("words", "kv_heads"), Initial(std=1.0))
        self.share = self.add_weight("share", (1,), ("head",), Initial(mean=0.5))

    def forward(self, v_BLGK: Tensor, tokens_BL: Tensor) -> Tensor:
        """Values and those of their tokens, (B, L, G, K)."""
        wide = torch.promote_types(v_BLGK.dtype, self.weight.dtype)
        found_BLGK = lookup(tokens_BL, self.weight, wide).unflatten(-1, (-1, self.head_size))
        added_BLGK: Tensor = v_BLGK + (self.share * found_BLGK).to(v_BLGK.dtype)
        return added_BLGK


class Attention(Mixer):
    """Grouped-query attention; see `AttentionConfig`. `attend` may be swapped for a parallel form.

    What comes out is as wide as what goes in unless `out_width` says otherwise.
    """

    def __init__(self, config: AttentionConfig, width: int, output_scale: float, out_width: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_size = config.head_size or width // config.num_heads
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        self.units = {"heads": self.head_size, "kv_heads": self.head_size}
        fan_in = Initial(std=width**-0.5)
        self.wq = self.add_weight("wq", (q_size, width), ("heads", "embed"), fan_in)
        if config.reads is not None:
            self.reads = _names(config.reads)
        if not self.reads:
            self.add_weight("wk", (kv_size, width), ("kv_heads", "embed"), fan_in)
            self.add_weight("wv", (kv_size, width), ("kv_heads", "embed"), fan_in)
        output = Initial(std=output_scale * q_size**-0.5)
        self.wo = self.add_weight("wo", (out_width or width, q_size), ("embed", "heads"), output)
        if config.gate == "sigmoid":
            self.add_weight("w_gate", (q_size, width), ("heads", "embed"), fan_in)
        if config.bias == "qkv":
            self.add_weight("bq", (q_size,), ("heads",), Initial())
            if not self.reads:
                self.add_weight("bk", (kv_size,), ("kv_heads",), Initial())
                self.add_weight("bv", (kv_size,), ("kv_heads",), Initial())
        self.norm_q = self._norm(self.num_heads, "heads")
        self.norm_k = None if self.reads else self._norm(self.num_kv_heads, "kv_heads")
        self.sinks = Sinks(self.num_heads) if config.sinks == "learned" else None
        self.values: Values | None = None
        if config.value_rows is not None:
            self.values = Values(config.value_rows, self.num_kv_heads, self.head_size)
        self.rope: Rope | None = None
        if config.rope != "none":
            size = int(config.rope_share * self.head_size)
            self.rope = Rope(size, config.rope_theta, config.rope, config.rope_scaling)
        self.scores = Scores(config.scale, config.softcap, Reach(config.window, config.keep_first))
        self.attend: Attend = attend

    def _norm(self, num_heads: int, axis: str) -> RMSNorm | HeadsNorm | None:
        if self.config.qk_norm == "width":
            return HeadsNorm(num_heads, self.head_size, self.config.norm_eps, axis)
        if self.config.qk_norm == "none":
            return None
        return RMSNorm(self.head_size, self.config.norm_eps, "head", offset=self.config.norm_offset)

    def forward(
        self, x_BLD: Tensor, docs: Documents, state: KVState | NoState | None = None, shared: Shared | None = None
    ) -> Tensor:
        """(B, L, D) to (B, L, D); with a state, queries also see the positions it holds."""
        heads = self._project(x_BLD)
        q_BLHK = self._place(heads["q"], self.norm_q, docs)
        k_BSGK, v_BSGK = self._keys_and_values(heads, docs, state, shared)
        sinks_H = None if self.sinks is None else self.sinks.scores_H
        y_BLHK = self.attend(q_BLHK, k_BSGK, v_BSGK, docs.over(k_BSGK.shape[1]), self.scores, sinks_H)
        if "gate" in heads:
            y_BLHK = y_BLHK * heads["gate"].sigmoid()
        return self.linear(y_BLHK.flatten(2), "wo")

    def _project(self, x_BLD: Tensor) -> dict[str, Tensor]:
        """Queries, keys, values and what the gate reads, as far as they are its own, heads apart."""
        names = [name for name in ("q", "k", "v", "_gate") if f"w{name}" in self.axes]
        weights = [f"w{name}" for name in names]
        # The weights say how many heads there are: under tensor parallelism they hold this rank's.
        parts = self.linear(x_BLD, *weights).split([getattr(self, weight).shape[0] for weight in weights], -1)
        heads = {}
        for name, part in zip(names, parts, strict=True):
            bias = getattr(self, f"b{name}").to(part.dtype) if f"b{name}" in self.axes else None
            x_BLX = part if bias is None else part + bias
            heads[name.removeprefix("_")] = x_BLX.unflatten(-1, (-1, self.head_size))
        return heads

    def _place(self, x_BLHK: Tensor, norm: RMSNorm | HeadsNorm | None, docs: Documents) -> Tensor:
        """Queries or keys normed, then turned to their positions."""
        normed_BLHK = x_BLHK if norm is None else norm(x_BLHK)
        return normed_BLHK if self.rope is None else self.rope.turn(normed_BLHK, self.rope.tables(docs, x_BLHK.dtype))

    def _keys_and_values(
        self, heads: dict[str, Tensor], docs: Documents, state: KVState | NoState | None, shared: Shared | None
    ) -> tuple[Tensor, Tensor]:
        """Those of this layer, or of the one that it reads; with past ones where there is a state."""
        shared = {} if shared is None else shared
        if self.config.reads is not None:
            if isinstance(state, NoState):
                state.length += docs.length
            k_BSGK, v_BSGK = (shared[name] for name in self.reads)
            return k_BSGK, v_BSGK
        k_BSGK, v_BSGK = self._place(heads["k"], self.norm_k, docs), heads["v"]
        if self.values is not None:
            v_BSGK = self.values(v_BSGK, shared[TOKENS])
        if isinstance(state, KVState):
            k_BSGK, v_BSGK = state.extend(k_BSGK, v_BSGK)
        if self.config.leaves is not None:
            shared.update(zip(_names(self.config.leaves), (k_BSGK, v_BSGK), strict=True))
        return k_BSGK, v_BSGK

    def use_plain(self) -> None:
        """See `Mixer.use_plain`: all scores, those that the mask hides too."""
        self.attend = attend_plain

    def leaves(self, batch: int, length: int, dtype: torch.dtype) -> Shared:
        """See `Mixer.leaves`: keys and values."""
        if self.config.leaves is None:
            return {}
        shape = (batch, length, self.get_parameter("wk").shape[0] // self.head_size, self.head_size)
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name in _names(self.config.leaves)}

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> KVState | NoState:
        """Empty key and value buffers with room for `length` positions, or for those in reach; none where it reads others'."""
        if self.reads:
            return NoState()
        shape = (batch, length, self.num_kv_heads, self.head_size)
        return KVState(shape, shape, self.scores.reach, dtype=dtype, device=self.wq.device)

    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token: projections, and scores and sums over `length` keys; when causal, over those it sees."""
        keys = mean_seen(self.scores.reach, length) if causal else length
        return self._projection_flops() + 4.0 * self.num_heads * self.head_size * keys

    def decode_flops(self, length: int) -> float:
        """Over the keys in reach."""
        return self._projection_flops() + 4.0 * self.num_heads * self.head_size * most_kept(self.scores.reach, length)

    def _projection_flops(self) -> float:
        return 2.0 * sum(weight.numel() for weight in self.parameters(recurse=False) if weight.dim() == 2)

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Two buffers of `length` positions, or of those in reach; nothing where it reads others'."""
        return 0 if self.reads else self.decode_bytes(length, dtype)

    def decode_bytes(self, length: int, dtype: torch.dtype) -> int:
        """The keys and values in reach, whoever holds them."""
        return 2 * most_kept(self.scores.reach, length) * self.num_kv_heads * self.head_size * dtype.itemsize
