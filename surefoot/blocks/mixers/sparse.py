"""Native sparse attention (Yuan et al., 2025): each query attends to blocks told in one vector each, to all tokens of the few
blocks that it weighs most among those, and to a window; gates add the three up.

    y_h = Σ_b sigmoid(g_b,h · x) attend_b(q_h, k_b, v_b),   b in compressed, selected, window

Every branch has keys and values of its own. Blocks are counted from where a document starts, so that packing changes nothing, and
may be compressed once their last token is there. What a query selects, its key-value head decides: all heads of one share it.

Legend: B batch, L length (queries), S tokens so far, D width, H query heads, G key-value heads, K head size, N compressed blocks
so far, C tokens in one, J selectable blocks, O compressed blocks that share tokens with one, P tokens selected, X whatever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.base import Initial, Mixer, MixerConfig, Shared
from surefoot.blocks.mixers.cache import KVState, mean_seen, most_kept
from surefoot.blocks.mixers.sparse_parts import BRANCHES, Compression, Gates
from surefoot.blocks.norm import RMSNorm
from surefoot.blocks.rope import Rope, RopeScaling
from surefoot.config import FieldError
from surefoot.ops.attention import attend, attend_plain
from surefoot.ops.autograd import decided
from surefoot.ops.documents import EVERYTHING, Documents, Reach
from surefoot.ops.partial_attention import attend_part
from surefoot.ops.runs import OneRun, Runs, of_all_runs
from surefoot.ops.scores import Scores
from surefoot.ops.seen_attention import Seen, attend_seen, attend_seen_plain, weights_seen

_ALWAYS = 3
"""Blocks that are selected whatever they weigh: the first of the document, the query's own and the one before it."""


class SparseConfig(MixerConfig):
    """Native sparse attention (Yuan et al., 2025) with rotary positions and grouped key-value heads."""

    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0, description="each serves num_heads / num_kv_heads query heads")
    head_size: int | None = Field(default=None, gt=0, multiple_of=2, description="width / num_heads where not given")
    rope_theta: float = Field(default=10_000.0, gt=1, description="longest wavelength is 2 pi times this")
    rope_scaling: RopeScaling | None = None
    qk_norm: Literal["none", "head"] = Field(default="head", description="RMS norm of queries and keys of each branch")
    norm_eps: float = Field(default=1e-6, gt=0)
    compressed_size: int = Field(default=32, gt=0, description="tokens that one compressed key and value tell of")
    compressed_stride: int = Field(default=16, gt=0, description="from the start of one such block to that of the next")
    selected_size: int = Field(default=64, gt=0, description="tokens of a block that is selected as a whole")
    num_selected: int = Field(
        default=16, ge=_ALWAYS, description="blocks a query selects, among them always the first, its own and the last"
    )
    window: int = Field(default=512, gt=0, description="tokens that a query sees in any case, itself the last")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise FieldError("num_kv_heads", self.num_kv_heads, f"must divide num_heads {self.num_heads}")
        for name in ("compressed_size", "selected_size"):
            if getattr(self, name) % self.compressed_stride:
                raise FieldError(
                    "compressed_stride", self.compressed_stride, f"must divide {name} {getattr(self, name)}"
                )
        return self

    def check_width(self, width: int) -> None:
        """Without a head size of its own, the width must give an even one."""
        size, rest = divmod(width, self.num_heads)
        if self.head_size is None and (rest or size % 2):
            unit = 2 * self.num_heads
            nearest = max(unit, round(width / unit) * unit)
            raise FieldError(
                "width", width, f"must give an even head size over {self.num_heads} heads; nearest is {nearest}"
            )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        example = partial(cls, num_heads=4, num_kv_heads=2, rope_theta=20.0, window=5)
        return {
            "overlapping": example(compressed_size=4, compressed_stride=2, selected_size=4, num_selected=4),
            "wide blocks": example(compressed_size=8, compressed_stride=4, selected_size=4, num_selected=3),
            "all selected": example(
                qk_norm="none", compressed_size=2, compressed_stride=2, selected_size=4, num_selected=8
            ),
        }

    def build(self, *, width: int, output_scale: float) -> Sparse:
        """The mixer itself."""
        return Sparse(self, width, output_scale)

    def num_blocks(self, length: int) -> int:
        """Blocks of which the last token is among the first `length` of a document."""
        return max(0, (length - self.compressed_size) // self.compressed_stride + 1)

    def rest(self, length: int) -> int:
        """Tokens that blocks not yet whole will need, at most: all but one of a block."""
        return min(length, self.compressed_size - 1)


class Blocks(NamedTuple):
    """Where blocks lie among S tokens, for each row or (B = 1) for all.

    `ends_BN` are the last tokens of compressed blocks in order, `is_there_BN` says which places of a row are such;
    `own_BS` numbers the selectable block of each token over the row, `first_BS` the first of its document; `parts_BJO`
    are the compressed blocks (N: none) that share tokens with a selectable one, with `shares_O` strides each.
    """

    ends_BN: Tensor
    is_there_BN: Tensor
    own_BS: Tensor
    first_BS: Tensor
    parts_BJO: Tensor
    shares_O: Tensor


def blocks_among(docs: Documents, config: SparseConfig) -> Blocks:
    """Those of `docs`, made once for all layers that count alike."""
    key = ("sparse", config.compressed_size, config.compressed_stride, config.selected_size)
    return docs.derive(key, lambda: _blocks(docs, config))


def _blocks(docs: Documents, config: SparseConfig) -> Blocks:
    size, stride, chosen = config.compressed_size, config.compressed_stride, config.selected_size
    num_tokens, device = docs.start + docs.length, docs.positions.device
    offsets_O = torch.arange(size // stride + chosen // stride - 1, device=device)
    # In strides; the first of them begins all but one before the selectable block does.
    shares_O = torch.minimum(offsets_O + 1, offsets_O.flip(0) + 1).clamp_max(min(size, chosen) // stride)
    # One place at least, so that compression has a gradient in every batch.
    if not docs.is_packed:
        num_blocks, positions_S = config.num_blocks(num_tokens), torch.arange(num_tokens, device=device)
        ends_N = torch.arange(max(1, num_blocks), device=device) * stride + size - 1
        own_S = positions_S // chosen
        before_J = torch.arange(-(-num_tokens // chosen), device=device) * (chosen // stride) - size // stride + 1
        parts_JO = before_J[:, None] + offsets_O
        parts_JO = torch.where((parts_JO >= 0) & (parts_JO < num_blocks), parts_JO, len(ends_N))
        is_there_N = ends_N < num_tokens
        return Blocks(
            ends_N.clamp_max(num_tokens - 1)[None],
            is_there_N[None],
            own_S[None],
            torch.zeros_like(own_S)[None],
            parts_JO[None],
            shares_O,
        )
    # A packed batch starts at 0: tokens so far are those that are here.
    positions_BS = docs.positions
    is_end_BS = (positions_BS >= size - 1) & ((positions_BS - size + 1) % stride == 0)
    num_places = max(1, int(is_end_BS.sum(1).max()))
    ends_BN = torch.sort(~is_end_BS, dim=1, stable=True).indices[:, :num_places]
    own_BS = (positions_BS % chosen == 0).cumsum(1) - 1
    numbers_J = torch.arange(int(own_BS.max()) + 1, device=device)
    # Where each starts; a row that has fewer repeats its last token, and no query asks for those.
    starts_BJ = torch.searchsorted(own_BS, numbers_J.expand(len(own_BS), -1).contiguous()).clamp_max(num_tokens - 1)
    before_BJ1 = (is_end_BS.cumsum(1) - is_end_BS.long()).gather(1, starts_BJ)[..., None]
    # By their numbers in the document: what is less than 0 is no block, and before_BJ1 then counts other documents' alone.
    inside_BJO = (positions_BS.gather(1, starts_BJ) // stride - size // stride + 1)[..., None] + offsets_O
    parts_BJO = before_BJ1 + torch.minimum(inside_BJO, offsets_O)
    parts_BJO = torch.where((inside_BJO >= 0) & (parts_BJO < num_places), parts_BJO, num_places)
    is_there_BN = is_end_BS.gather(1, ends_BN)
    return Blocks(ends_BN, is_there_BN, own_BS, own_BS - positions_BS // chosen, parts_BJO, shares_O)


class SparseState:
    """Keys and values: those of compressed blocks, of all tokens to select from, of the window, and of the tokens whose blocks
    are not whole yet, as they were projected."""

    def __init__(self, batch: int, room: int, mixer: Sparse, dtype: torch.dtype) -> None:
        config, heads, device = mixer.config, (mixer.num_kv_heads, mixer.head_size), mixer.wq.device
        self.length = 0

        def kept(places: int, reach: Reach) -> KVState:
            shape = (batch, places, *heads)
            return KVState(shape, shape, reach, dtype=dtype, device=device)

        self.compressed = kept(config.num_blocks(room), EVERYTHING)
        self.selected = kept(room, EVERYTHING)
        self.window = kept(room, Reach(config.window))
        self.rest = torch.zeros((2, batch, config.rest(room), *heads), dtype=dtype, device=device)

    def with_rest(self, new_XBLGK: Tensor) -> Tensor:
        """New tokens behind those of blocks not whole before; keeps the last of them for the next time."""
        num_kept, room = min(self.length, self.rest.shape[2]), self.rest.shape[2]
        both = torch.cat((self.rest[:, :, :num_kept], new_XBLGK), 2)
        num_left = min(both.shape[2], room)
        self.rest[:, :, :num_left] = both[:, :, both.shape[2] - num_left :]
        return both


class Sparse(Mixer):
    """See `SparseConfig`. `runs` may be swapped where the sequence is cut: what a query selects may lie anywhere, so that then
    keys and values of all runs are brought here."""

    gathers_keys = True

    def __init__(self, config: SparseConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.config = config
        self.runs: Runs = OneRun()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_size = config.head_size or width // config.num_heads
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        self.units = {"heads": self.head_size, "kv_heads": self.head_size}
        fan_in = Initial(std=width**-0.5)
        self.wq = self.add_weight("wq", (q_size, width), ("heads", "embed"), fan_in)
        for branch in BRANCHES:
            self.add_weight(f"wk_{branch}", (kv_size, width), ("kv_heads", "embed"), fan_in)
            self.add_weight(f"wv_{branch}", (kv_size, width), ("kv_heads", "embed"), fan_in)
        self.wo = self.add_weight("wo", (width, q_size), ("embed", "heads"), Initial(std=output_scale * q_size**-0.5))
        self.gates = Gates(self.num_heads, width)
        self.compress_k = Compression(config.compressed_size, self.head_size)
        self.compress_v = Compression(config.compressed_size, self.head_size)
        self.norm_q = self._norm()
        self.norm_k_compressed, self.norm_k_selected, self.norm_k_window = (self._norm() for _ in BRANCHES)
        self.rope = Rope(self.head_size, config.rope_theta, "half", config.rope_scaling)
        self.scores = Scores(reach=Reach(config.window))
        self.is_plain = False

    def _norm(self) -> RMSNorm | None:
        return RMSNorm(self.head_size, self.config.norm_eps, "head") if self.config.qk_norm == "head" else None

    def forward(
        self,
        x_BLD: Tensor,
        docs: Documents,
        state: SparseState | None = None,
        shared: Shared | None = None,  # noqa: ARG002 - keeps its keys and values to itself
    ) -> Tensor:
        """(B, L, D) to (B, L, D); with a state, queries also see the positions it holds."""
        names = ["wq", *(f"w{which}_{branch}" for branch in BRANCHES for which in "kv")]
        # The weights say how many heads there are: under tensor parallelism they hold this rank's.
        sizes = [getattr(self, name).shape[0] for name in names]
        heads = [x.unflatten(-1, (-1, self.head_size)) for x in self.linear(x_BLD, *names).split(sizes, -1)]
        q_BLHK, k_BLGK, v_BLGK, chosen_k_BSGK, chosen_v_BSGK, window_k_BSGK, window_v_BSGK = heads
        tables = self.rope.tables(docs, x_BLD.dtype)
        q_BLHK = self.rope.turn(_through(self.norm_q, q_BLHK), tables)
        chosen_k_BSGK = self.rope.turn(_through(self.norm_k_selected, chosen_k_BSGK), tables)
        window_k_BSGK = self.rope.turn(_through(self.norm_k_window, window_k_BSGK), tables)
        whole = docs if docs.whole is None else docs.whole
        k_BLGK, v_BLGK, *of_tokens = of_all_runs(
            (k_BLGK, v_BLGK, chosen_k_BSGK, chosen_v_BSGK, window_k_BSGK, window_v_BSGK), self.runs
        )
        blocks = blocks_among(whole, self.config)
        k_BNGK, v_BNGK = self._compressed(k_BLGK, v_BLGK, whole, blocks, state)
        if state is not None:
            state.length += docs.length
            of_tokens = [*state.selected.extend(*of_tokens[:2]), *state.window.extend(*of_tokens[2:])]
        is_decoding = state is not None and docs.length == 1
        by_run = []
        for q_BIHK, run in zip(q_BLHK.chunk(len(docs.runs), 1), docs.runs, strict=True):
            view = _View(whole, run, blocks, self.config)
            by_run.append(self._attend(q_BIHK, (k_BNGK, v_BNGK), of_tokens, view, is_decoding=is_decoding))
        branches = torch.cat(by_run, 2)
        y_BLHK = torch.stack([gate * y for gate, y in zip(self.gates(x_BLD), branches, strict=True)]).sum(0)
        return self.linear(y_BLHK.flatten(2), "wo")

    def _attend(
        self,
        q_BIHK: Tensor,
        of_blocks: tuple[Tensor, Tensor],
        of_tokens: Sequence[Tensor],
        view: _View,
        *,
        is_decoding: bool,
    ) -> Tensor:
        """What each branch makes of one run of queries, (3, B, I, H, K): over compressed keys and values; over those to select
        from, and those of the window, up to the run's end."""
        k_BNGK, v_BNGK = of_blocks
        chosen_k_BSGK, chosen_v_BSGK, window_k_BSGK, window_v_BSGK = (
            x_BSGK[:, : view.queries.stop] for x_BSGK in of_tokens
        )
        if self.is_plain:
            compressed_BIHK, weights_BHIN = attend_seen_plain(q_BIHK, k_BNGK, v_BNGK, view.of_blocks)
            weights_BGIN = weights_BHIN.detach().unflatten(1, (k_BNGK.shape[2], -1)).sum(2)
            view.choose(lambda: weights_BGIN)
            selected_BIHK, _ = attend_seen_plain(q_BIHK, chosen_k_BSGK, chosen_v_BSGK, view.of_tokens)
        else:
            compressed_BIHK = attend_seen(q_BIHK, k_BNGK, v_BNGK, view.of_blocks)
            view.choose(lambda: weights_seen(q_BIHK, k_BNGK, view.of_blocks))
            form = view.attend_chosen if is_decoding else attend_seen
            selected_BIHK = form(q_BIHK, chosen_k_BSGK, chosen_v_BSGK, view.of_tokens)
        in_window = attend_plain if self.is_plain else attend
        docs = view.run.over(window_k_BSGK.shape[1])
        window_BIHK = in_window(q_BIHK, window_k_BSGK, window_v_BSGK, docs, self.scores)
        return torch.stack((compressed_BIHK, selected_BIHK, window_BIHK))

    def _compressed(
        self, k_BLGK: Tensor, v_BLGK: Tensor, docs: Documents, blocks: Blocks, state: SparseState | None
    ) -> tuple[Tensor, Tensor]:
        """Keys, turned to the last positions of their blocks, and values of all blocks so far; one place at least."""
        size, stride = self.config.compressed_size, self.config.compressed_stride
        if docs.is_packed or docs.start + docs.length < size:
            if state is None:
                within_C = torch.arange(1 - size, 1, device=k_BLGK.device)
                tokens_BNC = (blocks.ends_BN[..., None] + within_C).clamp_min(0)
                rows_B11 = torch.arange(len(k_BLGK), device=k_BLGK.device)[:, None, None]
                positions_BN = docs.positions.expand(len(blocks.ends_BN), -1).gather(1, blocks.ends_BN)
                return self._compress(k_BLGK[rows_B11, tokens_BNC], v_BLGK[rows_B11, tokens_BNC], positions_BN)
            state.with_rest(torch.stack((k_BLGK, v_BLGK)))
            return (k_BLGK.new_zeros((len(k_BLGK), 1, *k_BLGK.shape[2:])),) * 2
        first = 0
        if state is not None:
            first = self.config.num_blocks(docs.start)
            both_XBSGK = state.with_rest(torch.stack((k_BLGK, v_BLGK)))
            begin = first * stride - (docs.start + docs.length - both_XBSGK.shape[2])
            k_BLGK, v_BLGK = both_XBSGK[:, :, begin:]
        num_new = self.config.num_blocks(docs.start + docs.length) - first
        if num_new:
            k_BNCGK, v_BNCGK = (x.unfold(1, size, stride).movedim(-1, 2) for x in (k_BLGK, v_BLGK))
            k_BNGK, v_BNGK = self._compress(k_BNCGK, v_BNCGK, blocks.ends_BN[0, first:])
        else:
            k_BNGK, v_BNGK = k_BLGK[:, :0], v_BLGK[:, :0]
        return (k_BNGK, v_BNGK) if state is None else state.compressed.extend(k_BNGK, v_BNGK)

    def _compress(self, k_BNCGK: Tensor, v_BNCGK: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        tables = self.rope.tables_at(positions, k_BNCGK.dtype)
        k_BNGK = self.rope.turn(_through(self.norm_k_compressed, self.compress_k(k_BNCGK)), tables)
        return k_BNGK, self.compress_v(v_BNCGK)

    def use_plain(self) -> None:
        """See `Mixer.use_plain`: all scores, those that masks hide too."""
        self.is_plain = True

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> SparseState:
        """Empty, with room for `length` positions."""
        return SparseState(batch, length, self, dtype)

    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token: projections, compression, and scores and sums of three branches.

        Without gradient, and not counted, are the scores by which blocks are chosen.
        """
        config, num_blocks = self.config, max(1, self.config.num_blocks(length))
        keys = float(num_blocks + 2 * length)
        if causal:
            size, stride = config.compressed_size, config.compressed_stride
            visible = num_blocks * (length - size + 1) - stride * num_blocks * (num_blocks - 1) / 2
            keys = max(0.0, visible) / length + self._mean_chosen(length) + mean_seen(self.scores.reach, length)
        return self._projection_flops() + self._block_flops() * num_blocks / length + self._score_flops() * keys

    def decode_flops(self, length: int) -> float:
        """Over blocks, what is selected of tokens, and the window; a block is compressed every so many tokens."""
        num_blocks, chosen = self.config.num_blocks(length), self._most_chosen(length)
        keys = num_blocks * 1.5 + chosen + most_kept(self.scores.reach, length)
        return (
            self._projection_flops() + self._block_flops() / self.config.compressed_stride + self._score_flops() * keys
        )

    def _projection_flops(self) -> float:
        return 2.0 * (sum(weight.numel() for weight in self.parameters(recurse=False)) + self.gates.weight.numel())

    def _block_flops(self) -> float:
        return self.num_kv_heads * (self.compress_k.flops() + self.compress_v.flops())

    def _score_flops(self) -> float:
        return 4.0 * self.num_heads * self.head_size

    def _most_chosen(self, length: int) -> int:
        return min(length, self.config.num_selected * self.config.selected_size)

    def _mean_chosen(self, length: int) -> float:
        """Tokens that a query of one document of `length` selects on average: all but one block are whole."""
        size, most = self.config.selected_size, self._most_chosen(length)
        num_full, rest = divmod(length - most, size)
        own = num_full * size * (size + 1) / 2 + rest * (rest + 1) / 2
        return (most * (most + 1) / 2 + (length - most) * (self.config.num_selected - 1) * size + own) / length

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Two buffers each: of blocks, of all positions, of the window, and of what blocks to come need."""
        kept = length + most_kept(self.scores.reach, length)
        return self._bytes(kept + self.config.num_blocks(length) + self.config.rest(length), dtype)

    def decode_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Of all positions those selected are read alone."""
        kept = self._most_chosen(length) + most_kept(self.scores.reach, length)
        return self._bytes(kept + self.config.num_blocks(length) + self.config.rest(length), dtype)

    def _bytes(self, positions: int, dtype: torch.dtype) -> int:
        return 2 * positions * self.num_kv_heads * self.head_size * dtype.itemsize


class _View:
    """What one run of queries sees of blocks and, once blocks are chosen, of tokens; `docs` are those of the whole sequence."""

    def __init__(self, docs: Documents, queries: slice, blocks: Blocks, config: SparseConfig) -> None:
        self.docs, self.queries, self.blocks, self.config = docs, queries, blocks, config
        self.is_chosen_BGLJ: Tensor | None = None

    @property
    def run(self) -> Documents:
        """The queries by themselves, over all keys up to their last."""
        docs, queries = self.docs, self.queries
        return docs if queries == docs.runs[0] else docs.run(queries.start, queries.stop)

    def _among(self, run: slice) -> slice:
        """Where some of these queries lie in the whole sequence."""
        return slice(self.queries.start + run.start, self.queries.start + run.stop)

    def of_blocks(self, run: slice) -> Tensor:
        """Those whose last token the queries see, (B, 1, I, N)."""
        docs, (ends_BN, is_there_BN, *_), queries = self.docs, self.blocks, self._among(run)
        if not docs.is_packed:
            return docs.mask_between(queries, ends_BN[0]) & is_there_BN[0]
        mask_B1IS = docs.mask_between(queries, slice(0, docs.length))
        places_B1IN = ends_BN[:, None, None].expand(-1, 1, mask_B1IS.shape[2], -1)
        return mask_B1IS.gather(-1, places_B1IN) & is_there_BN[:, None, None]

    def of_tokens(self, run: slice) -> Tensor:
        """Those in chosen blocks, (B, G, I, J); all that documents let them see where there are no more blocks than chosen."""
        queries = self._among(run)
        mask_B1IJ = self.docs.mask_between(queries, slice(0, queries.stop))
        if self.is_chosen_BGLJ is None:
            return mask_B1IJ
        chosen_BGIJ = self.is_chosen_BGLJ[:, :, run]
        own_B11J = self.blocks.own_BS[:, None, None, : queries.stop]
        return chosen_BGIJ.gather(-1, own_B11J.expand(*chosen_BGIJ.shape[:3], -1)) & mask_B1IJ

    def choose(self, weigh: Callable[[], Tensor]) -> None:
        """Choose blocks by what `weigh` gives each compressed one, (B, G, L, N). Of equals the earlier."""
        blocks, most = self.blocks, self.config.num_selected
        num_blocks = blocks.parts_BJO.shape[1]
        if num_blocks <= most:
            return

        def make() -> Tensor:
            weights_BGLN = F.pad(weigh(), (0, 1))
            shape = (*weights_BGLN.shape[:3], num_blocks)
            worth_BGLJ = weights_BGLN.new_zeros(shape)
            for part_BJ, share in zip(blocks.parts_BJO.unbind(-1), blocks.shares_O.tolist(), strict=True):
                worth_BGLJ += share * weights_BGLN.gather(-1, part_BJ[:, None, None].expand(shape))
            own_BL1, first_BL1 = (x_BS[:, self.queries, None] for x_BS in (blocks.own_BS, blocks.first_BS))
            numbers_J = torch.arange(num_blocks, device=own_BL1.device)
            is_seen_BLJ = (first_BL1 <= numbers_J) & (numbers_J <= own_BL1)
            is_always_BLJ = (numbers_J == first_BL1) | (numbers_J >= own_BL1 - 1)
            worth_BGLJ = worth_BGLJ.masked_fill(is_always_BLJ[:, None], float("inf"))
            worth_BGLJ = worth_BGLJ.masked_fill(~is_seen_BLJ[:, None], float("-inf"))
            best_BGLX = worth_BGLJ.argsort(dim=-1, descending=True, stable=True)[..., :most]
            is_best_BGLJ = torch.zeros(shape, dtype=torch.bool, device=best_BGLX.device).scatter_(-1, best_BGLX, True)
            return is_best_BGLJ & is_seen_BLJ[:, None]

        self.is_chosen_BGLJ = decided(make)

    def attend_chosen(self, q_B1HK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, seen: Seen) -> Tensor:
        """`attend_seen` of the last position of one document: no key or value of a block that is not chosen is read."""
        if self.is_chosen_BGLJ is None:
            return attend_seen(q_B1HK, k_BSGK, v_BSGK, seen)
        size, num_heads = self.config.selected_size, q_B1HK.shape[2]
        is_chosen_BGJ = self.is_chosen_BGLJ[:, :, 0]
        chosen_BGX = torch.sort(~is_chosen_BGJ, dim=-1, stable=True).indices[..., : self.config.num_selected]
        tokens_BGP = (chosen_BGX[..., None] * size + torch.arange(size, device=chosen_BGX.device)).flatten(2)
        is_seen_BGP = is_chosen_BGJ.gather(-1, chosen_BGX).repeat_interleave(size, -1) & (tokens_BGP < k_BSGK.shape[1])
        places_BGP1 = tokens_BGP.clamp_max(k_BSGK.shape[1] - 1)[..., None].expand(-1, -1, -1, k_BSGK.shape[-1])
        k_BGPK, v_BGPK = (x_BSGK.transpose(1, 2).gather(2, places_BGP1) for x_BSGK in (k_BSGK, v_BSGK))
        seen_BH1P = is_seen_BGP.repeat_interleave(num_heads // k_BGPK.shape[1], 1)[:, :, None]
        y_BH1K, _ = attend_part(q_B1HK.transpose(1, 2), k_BGPK, v_BGPK, seen_BH1P)
        return y_BH1K.transpose(1, 2).to(q_B1HK.dtype)


def _through(norm: RMSNorm | None, x_BLHK: Tensor) -> Tensor:
    if norm is None:
        return x_BLHK
    normed_BLHK: Tensor = norm(x_BLHK)
    return normed_BLHK
