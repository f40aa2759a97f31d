"""`Block`: a module that names its weights' logical axes, knows no mesh and has no dtype policy.

Legend: B batch, L length, D width, T tokens, E experts, K experts a token, R = T·K rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.config import Config
from surefoot.ops.autograd import is_again
from surefoot.ops.documents import Documents
from surefoot.ops.grouped import grouped_linear
from surefoot.ops.linear import linear

EXAMPLE_WIDTH, EXAMPLE_EXPERTS, EXAMPLE_VOCABULARY = 32, 8, 64
"""Of the models in which examples of blocks are tried."""


@dataclass(frozen=True)
class Initial:
    """How a weight starts: every entry `mean` plus `std` times a standard normal."""

    std: float = 0.0
    mean: float = 0.0

    def draw(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The full weight in fp32 on the CPU; the same for every device and layout."""
        full = torch.full(shape, self.mean, dtype=torch.float32)
        return full if self.std == 0 else full.add_(torch.randn(shape, generator=generator), alpha=self.std)


class Product(Protocol):
    """Multiplies activations by weights of a block, which it is told by their names there."""

    def linear(self, x: Tensor, weights_OI: Mapping[str, Tensor]) -> Tensor:
        """As `ops.linear`: x (..., I) through one weight, or through several side by side, (..., ΣO)."""

    def grouped(self, x_RI: Tensor, counts_E: Tensor, name: str, weight_EOI: Tensor) -> Tensor:
        """As `ops.grouped_linear`: rows (R, I) through their group's matrix, (R, O)."""


class Exact:
    """In the dtype of the activations."""

    def linear(self, x: Tensor, weights_OI: Mapping[str, Tensor]) -> Tensor:
        """See `Product.linear`."""
        return linear(x, *weights_OI.values())

    def grouped(self, x_RI: Tensor, counts_E: Tensor, name: str, weight_EOI: Tensor) -> Tensor:  # noqa: ARG002
        """See `Product.grouped`."""
        return grouped_linear(x_RI, counts_E, weight_EOI)


class Block(nn.Module):
    """A module whose own weights each carry logical axes and an initial distribution.

    `axes[name]` names the axes of weight `name`, output axis first. Layouts, optimizer groups and counts derive from it.
    `units[axis]` is how many entries along an axis belong together and are never parted (a head); 1 where not given.
    `used[axis]` is the share of the entries along an axis that one token meets (of experts, say); 1 where not given.
    `states[name]` names the axes of a buffer that is part of the function: it starts at 0, learns otherwise than by gradient,
    is whole in every layout, and checkpoints hold it beside the weights.
    `product` multiplies by its weights and may be swapped for one in narrower numbers; products that must stay as they are
    (a router's) do not go through it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.product: Product = Exact()
        self.axes: dict[str, tuple[str, ...]] = {}
        self.units: dict[str, int] = {}
        self.used: dict[str, float] = {}
        self.initial: dict[str, Initial] = {}
        self.states: dict[str, tuple[str, ...]] = {}

    def add_weight(self, name: str, shape: tuple[int, ...], axes: tuple[str, ...], initial: Initial) -> nn.Parameter:
        """Register one weight, unfilled; `models.initialise` fills it by its full name."""
        if len(shape) != len(axes):
            raise ValueError(f"{name} has {len(shape)} dimensions and {len(axes)} axes")
        weight = nn.Parameter(torch.empty(shape))
        self.register_parameter(name, weight)
        self.axes[name], self.initial[name] = axes, initial
        return weight

    def linear(self, x: Tensor, *names: str) -> Tensor:
        """x (..., I) through one weight of this block, or through several side by side, (..., ΣO), in x's dtype."""
        return self.product.linear(x, {name: getattr(self, name) for name in names})

    def grouped_linear(self, x_RI: Tensor, counts_E: Tensor, name: str) -> Tensor:
        """Rows (R, I) sorted by group through their group's matrix of a weight, (R, O), in x's dtype."""
        return self.product.grouped(x_RI, counts_E, name, getattr(self, name))

    def add_state(
        self, name: str, shape: tuple[int, ...], axes: tuple[str, ...], dtype: torch.dtype | None = None
    ) -> None:
        """Register one buffer of `states`; a count is of an integer `dtype`, which stays whatever weights are."""
        self.register_buffer(name, torch.zeros(shape, dtype=dtype))
        self.states[name] = axes


class Connection(Block):
    """How one part of a layer (mixer or network) reads the residual stream and writes to it.

    The stream of a token is S = `num_streams` · D numbers: one vector, or several side by side.
    """

    @abstractmethod
    def forward(self, x_BLS: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """(what the part reads (B, L, D), write); `write` turns what the part returns (B, L, D) into the stream after it."""

    @abstractmethod
    def flops(self) -> float:
        """Forward FLOPs a token."""


class ConnectionConfig(Config):
    """Describes the connections of a model."""

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {}

    @property
    def num_streams(self) -> int:
        """Vectors a token."""
        return 1

    @abstractmethod
    def build(self, *, width: int, index: int) -> Connection:
        """The connection of part `index` of a model of `width`, counted from 0."""

    def collapse(self, x_BLS: Tensor) -> Tensor:
        """The stream after the last layer to what the final norm reads (B, L, D)."""
        return x_BLS


class MixerState(Protocol):
    """What a mixer keeps of the past."""

    @property
    def length(self) -> int:
        """Positions seen so far."""


Shared = dict[str, Tensor]
"""What layers of one pass leave for later ones, by name: keys and values that several layers use, say."""

TOKENS = "tokens"
"""The name under which every layer finds the ids (B, L) of the tokens it is at."""

EMBEDDED = "embedded"
"""The name under which a layer whose mixer `reads_embedded` finds the embeddings (B, L, D) of its tokens."""


class Common(nn.Module):
    """Parts that several layers have in common: one module, whose weights have the name that the first of them gives."""


class Mixer(Block):
    """Mixes along the sequence: causal, never across a document; stepping with a state equals one full pass."""

    least_run = 1
    """Positions that a stretch of a cut sequence needs at least."""

    reads: tuple[str, ...] = ()
    """What it reads in `shared` that an earlier layer left there, or the decoder under `EMBEDDED`."""

    part = 0
    """Which part of its heads is here, counted from 0: tensor parallelism cuts them in order and sets it."""

    gathers_keys = False
    """Whether its keys and values come from all runs of a cut sequence, whatever the kind of context parallelism."""

    def parts(self) -> Sequence[Mixer | FeedForward]:
        """What is laid out by itself: the mixer, or the mixers and networks that a composite is made of, what lies between them
        acting on each position alone."""
        return (self,)

    @property
    def is_composite(self) -> bool:
        """Whether it is made of others."""
        return self.parts()[0] is not self

    def share(self, first: Mixer) -> None:
        """Use the parts that all layers of one letter have in common, those of the `first` of them. Most have none."""

    @abstractmethod
    def forward(self, x_BLD: Tensor, docs: Documents, state: Any = None, shared: Shared | None = None) -> Tensor:
        """(B, L, D) to (B, L, D); with a state, continues from it and advances it in place. May add to `shared`."""

    def leaves(self, batch: int, length: int, dtype: torch.dtype) -> Shared:  # noqa: ARG002 - most leave nothing
        """What a pass over (batch, length) in `dtype` leaves in `shared` for later layers: by name, on meta."""
        return {}

    @abstractmethod
    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> MixerState:
        """An empty state with room for `length` positions."""

    @abstractmethod
    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token (multiply and add are two) in a sequence of `length`; `causal` leaves out masked scores."""

    @abstractmethod
    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Bytes one sequence's state holds after `length` positions."""

    def use_plain(self) -> None:
        """Compute by the plain form from now on, the one whose FLOPs are `flops(length, causal=False)`."""

    def decode_flops(self, length: int) -> float:
        """FLOPs of one more position after `length`: those of a full pass, all keys seen, unless decoding has its own form."""
        return self.flops(length, causal=False)

    def decode_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Bytes of one sequence's state that one more position moves: all of it, read once, unless it says otherwise."""
        return self.state_bytes(length, dtype)


class MixerConfig(Config):
    """Describes a mixer."""

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """Small ones by what is particular to each, for models of `EXAMPLE_WIDTH`: the contract is run on all of them.

        One for each option that changes the mathematics, in tens of dimensions, with heads that two ranks can share.
        """
        return {}

    @property
    def example_writer(self) -> MixerConfig | None:
        """For a mixer that reads `shared`: one that leaves there what it needs."""
        return None

    def check_width(self, width: int) -> None:
        """Raise `FieldError` where the mixer cannot have this model width."""

    @property
    def token_rows(self) -> int | None:
        """Rows of what it looks up by token, which must be the vocabulary's; None where it looks up nothing."""
        return None

    @property
    def leaves_shared(self) -> str | None:
        """The name under which it leaves something in `shared` for later layers."""
        return None

    @property
    def needs_shared(self) -> str | None:
        """The name under which an earlier layer must have left something."""
        return None

    @property
    def reads_embedded(self) -> bool:
        """Whether it reads embeddings beside the stream."""
        return False

    @property
    def is_common(self) -> bool:
        """Whether layers with this mixer have parts in common."""
        return False

    def check_writer(self, writer: MixerConfig) -> None:
        """Raise `FieldError` where it cannot use what `writer`, the last that left what it needs, leaves."""

    @abstractmethod
    def build(self, *, width: int, output_scale: float) -> Mixer:
        """A mixer of `width`; the projection back into the residual stream starts at `output_scale` / sqrt(fan-in)."""


class FeedForward(Block):
    """Acts on each position by itself."""

    @abstractmethod
    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""

    @abstractmethod
    def flops(self) -> float:
        """Forward FLOPs a token."""


class FeedForwardConfig(Config):
    """Describes a feed-forward network."""

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {}

    @abstractmethod
    def build(self, *, width: int, output_scale: float) -> FeedForward:
        """A network of `width`; the projection back into the residual stream starts at `output_scale` / sqrt(fan-in)."""


class Tokens(NamedTuple):
    """What is known of tokens beside their activations: their ids (T,), and places in their documents from 0 (T,)."""

    ids_T: Tensor
    places_T: Tensor


class Counts(NamedTuple):
    """What a router counted in a whole step, over all ranks and micro-batches: how many tokens chose each expert, and
    what it `noted` beside that (`Routing.noted_N`); in fp64."""

    loads_E: Tensor
    noted_N: Tensor


class Routing(NamedTuple):
    """Which experts each token goes to.

    `experts_TK` are their numbers, all different for a token; `weights_TK` what their outputs count, in at least fp32;
    `loads_E` how many tokens chose each expert; `auxiliary` the weighted auxiliary losses summed over the tokens, a scalar
    (0 where no gradients are recorded). Where `is_partial`, some of `experts_TK` are the number of experts: no expert, in
    no load and of weight 0; then K may be any number up to that of experts.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    loads_E: Tensor
    auxiliary: Tensor
    is_partial: bool = False
    noted_N: Tensor | None = None


def own_counts(counts: Tensor) -> Tensor:
    """The counts themselves: no other process holds parts of the same sequences."""
    return counts


class Router(Block):
    """Chooses experts and never moves tokens; computes in at least fp32, and looks at no other token to choose.

    One that does where it is trained, where gradients are recorded, says so in `looks_ahead`: its choices there may
    depend on the future, and on what else lies in the batch. Nothing does without gradients.

    What it learns otherwise than by gradient is a state, moved by `balance` alone. `pool` turns counts of this
    process into counts of all processes that hold other parts of the same sequences; it may be swapped for a sum over them.
    """

    looks_ahead: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    """Whether it needs to be told what the tokens are, beside their activations."""

    loads_E: Tensor
    noted_N: Tensor
    dropped: Tensor
    auxiliary: Tensor

    def __init__(self, num_experts: int, top_k: int, num_noted: int = 0) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.layer = 0
        """Which layer of the model it is in: what is drawn or hashed must differ between layers."""
        self.pool: Callable[[Tensor], Tensor] = own_counts
        self.is_counting = False
        """Whether passes without gradients count the step's choices, ahead of the passes that train (`whole_step`)."""
        self.step_counts: Tensor | None = None
        """What such passes counted, loads and what was noted; None where the pass at hand is all of the step."""
        self.register_buffer("loads_E", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("noted_N", torch.zeros(num_noted, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("auxiliary", torch.zeros(()), persistent=False)
        self._pending: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None = None

    @property
    def num_counts(self) -> int:
        """How many numbers it has counted after a step: loads, what it noted, choices dropped, auxiliary losses."""
        return self.num_experts + len(self.noted_N) + 2

    @property
    def whole_step(self) -> bool:
        """Whether its losses are of the choices of a whole step, over all data ranks and micro-batches."""
        return False

    @abstractmethod
    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:
        """Tokens (T, D), whole sequences of `length` one after the other, to their experts.

        One that `reads_tokens` raises `ValueError` where it is not told what they are.
        """

    def balance(self, counts: Counts) -> None:
        """After an optimizer step: adapt to what all its tokens chose."""

    @abstractmethod
    def flops(self) -> float:
        """Forward FLOPs a token."""

    def keep(self, routing: Routing, share: float, dropped: Tensor | None = None) -> None:
        """Hold what `take` is to return: of the auxiliary losses, the `share` that this process's copy stands for.

        `dropped` of the choices are not carried out. A pass that is run again for its backward was counted the first time.
        """
        if is_again():
            return
        found, loads_E, noted_N = routing.auxiliary, routing.loads_E, routing.noted_N
        is_trained = torch.is_grad_enabled()
        self._pending = (found * share, found.detach(), loads_E, noted_N, dropped) if is_trained else None
        if self.is_counting and not is_trained:
            counts = loads_E if noted_N is None else torch.cat((loads_E, noted_N))
            self.step_counts = counts if self.step_counts is None else self.step_counts + counts

    def take(self) -> Tensor | None:
        """The auxiliary losses of the last forward pass, once; counts its choices too. None where nothing is held."""
        if self._pending is None:
            return None
        (auxiliary, whole, loads_E, noted_N, dropped), self._pending = self._pending, None
        self.loads_E += loads_E
        self.auxiliary += whole
        if noted_N is not None:
            self.noted_N += noted_N
        if dropped is not None:
            self.dropped += dropped
        return auxiliary


class LearnedRouter(Router):
    """A router that goes by one product of a token with a learned vector an expert."""

    def __init__(self, width: int, num_experts: int, top_k: int, num_noted: int = 0) -> None:
        super().__init__(num_experts, top_k, num_noted)
        self.weight = self.add_weight("weight", (num_experts, width), ("routes", "embed"), Initial(std=width**-0.5))

    def logits(self, x_TD: Tensor) -> Tensor:
        """(T, E), in at least fp32."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        return F.linear(x_TD.to(wide), self.weight.to(wide))

    def flops(self) -> float:
        """Forward FLOPs a token."""
        return 2.0 * self.weight.numel()


class RouterConfig(Config):
    """Describes a router."""

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`; they are tried with `EXAMPLE_EXPERTS` experts, 2 a token."""
        return {}

    def check_top_k(self, top_k: int) -> None:
        """Raise `FieldError` where the router cannot learn from choosing so many."""

    def check_experts(self, num_experts: int, top_k: int) -> None:
        """Raise `FieldError` where it cannot choose `top_k` of `num_experts`."""

    @abstractmethod
    def build(self, *, width: int, num_experts: int, top_k: int) -> Router:
        """A router of tokens of `width` to `top_k` of `num_experts` experts."""


class Dispatch(Protocol):
    """Moves tokens to experts and back. On one process it sorts; between processes it is swapped for an exchange."""

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """(rows (R, D) sorted by expert, how many rows each expert held here has, back).

        `back` turns the experts' outputs (R, D) into each token's weighted sum (T, D).
        """


class Experts(Block):
    """Networks stacked along the axis `experts`, the first of each of its weights; what is here of them may be a part."""

    @abstractmethod
    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert (R, D), `counts_E` of each expert here, to rows (R, D)."""

    @property
    @abstractmethod
    def share(self) -> float:
        """Of each expert's hidden units, the share that is here: 1 unless tensor parallelism cuts them."""


class Routed(FeedForward):
    """A feed-forward network in experts, of which each token meets a few. `dispatch` may be swapped for a parallel form."""

    router: Router
    experts: Experts
    dispatch: Dispatch

    @abstractmethod
    def forward(self, x_BLD: Tensor, docs: Documents | None = None, shared: Shared | None = None) -> Tensor:
        """(B, L, D) to (B, L, D). Ids of the tokens lie in `shared` under `TOKENS` where the router reads them; with neither
        documents nor ids, each row is one document of unknown words."""
