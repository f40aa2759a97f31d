"""Context parallelism: each sequence is cut over the `context` ranks, and attention finds the keys that lie elsewhere.

A sequence of 2n chunks over n ranks: rank r holds chunks r and 2n - 1 - r, so that under a causal mask every rank has
the same work (Dubey et al., 2024, section 3.3.2). Everything but attention sees this rank's tokens only; `attend` of each
softmax mixer is swapped for one of

    gather     all keys and values are gathered; a chunk of queries attends to those before it   (Dubey et al., 2024)
    ulysses    heads for sequence and back: all of the sequence for some of the heads           (Jacobs et al., 2023)
    ring       keys and values go round a ring, one rank's at a time, parts are merged            (Liu et al., 2023)

A mixer with a state carries it from chunk to chunk instead (`ContextRuns`): each rank tells all what its chunks make of nothing,
and works out what comes before its own. Sparse attention, whose queries may select any block, has all keys gathered by the same
means, whichever kind is asked for.

A rank holds all keys in gather, all of the sequence for 1/n of the heads in ulysses, 1/n of the keys (twice) in ring.
What is sent never depends on the data; only what is computed does.

Legend: B batch, L this rank's length, S whole length, H query heads, G key-value heads, K head size, V size of a value, X size
of whichever, I queries and J keys of a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from surefoot.blocks.base import Block, Mixer, Routed, Router
from surefoot.config import ConfigError
from surefoot.dist.collectives import all_to_all, gather, pass_on, sum_
from surefoot.dist.mesh import Mesh
from surefoot.models.initialise import named_weights
from surefoot.ops.attention import Attend, attend
from surefoot.ops.autograd import apply as differentiably
from surefoot.ops.documents import EVERYTHING, Documents, Reach
from surefoot.ops.partial_attention import attend_part, attend_part_backward, merge
from surefoot.ops.runs import Runs
from surefoot.ops.scores import PLAIN, Scores

Kind = Literal["gather", "ulysses", "ring"]

_SEQUENCE, _HEADS = 1, 2


@runtime_checkable
class _HoldsAttend(Protocol):
    attend: Attend


@runtime_checkable
class _HoldsRuns(Protocol):
    runs: Runs


def check(model: nn.Module, size: int, kind: Kind, tensor: int, sequence_length: int) -> None:
    """`ConfigError` where `size` ranks cannot share sequences or heads. The model is whole, may be on meta, and is one that
    `tensor` ranks can share."""
    if size == 1:
        return
    heads: list[tuple[int, str]] = []
    for name, mixer in model.named_modules():
        if not isinstance(mixer, Mixer) or mixer.is_composite:
            continue
        if isinstance(mixer, _HoldsRuns):
            _check_runs(name, mixer, size, sequence_length)
            continue
        if not isinstance(mixer, _HoldsAttend):
            raise ConfigError(
                "plan.context",
                size,
                f"{name} ({type(mixer).__name__}) has no form for a cut sequence; use plan.context=1",
            )
        for _, block, weight in named_weights(mixer):
            for axis, length in zip(block.axes[weight], getattr(block, weight).shape, strict=True):
                if axis in {"heads", "kv_heads"}:
                    heads.append((length // block.units.get(axis, 1) // tensor, f"{axis} of {name}"))

    def is_legal(candidate: int) -> bool:
        divides = sequence_length % (2 * candidate * tensor) == 0
        return candidate == 1 or (divides and (kind != "ulysses" or all(num % candidate == 0 for num, _ in heads)))

    nearest = min(filter(is_legal, range(1, sequence_length + 1)), key=lambda d: (abs(d - size), d))
    share = "" if tensor == 1 else f" on each of {tensor} tensor ranks"
    if kind == "ulysses":
        for num, what in heads:
            if num % size:
                raise ConfigError(
                    "plan.context",
                    size,
                    f"must divide {num} {what}{share} where plan.context_kind is ulysses; nearest that does: {nearest}, or "
                    "use plan.context_kind=gather or ring",
                )
    unit = 2 * size * tensor
    if sequence_length % unit:
        longer = max(unit, round(sequence_length / unit) * unit)
        raise ConfigError(
            "plan.context",
            size,
            f"2 x {size} chunks{share} ({unit}) must divide {sequence_length} data.sequence_length; nearest that does: "
            f"{nearest}, or use data.sequence_length={longer}",
        )


def _check_runs(name: str, mixer: Mixer, size: int, sequence_length: int) -> None:
    run = sequence_length // (2 * size)
    if run < mixer.least_run:
        raise ConfigError(
            "plan.context",
            size,
            f"leaves chunks of {run} positions, and {name} needs {mixer.least_run}; use "
            f"data.sequence_length={2 * size * mixer.least_run} or more",
        )


def kind_of(part: nn.Module, kind: Kind) -> Kind | None:
    """How a part of a layer finds keys that lie elsewhere where `kind` is asked for; None where it has no keys."""
    if isinstance(part, Mixer) and part.gathers_keys:
        return "gather"
    return kind if isinstance(part, Mixer) and isinstance(part, _HoldsAttend) else None


def rows_of(attention: Block, left: Mapping[str, int]) -> tuple[int, int]:
    """Numbers of a position's queries, and of its keys and values together, all heads; `left` says how many an earlier layer has
    left under each name, for those who read them find them anew."""
    q_rows, kv_rows = (
        sum(getattr(attention, name).shape[0] for name, axes in attention.axes.items() if axes[0] == axis)
        for axis in ("heads", "kv_heads")
    )
    read = attention.reads if isinstance(attention, Mixer) else ()
    return q_rows, kv_rows + sum(left[name] for name in read)


def apply(model: nn.Module, mesh: Mesh, kind: Kind) -> None:
    """Swap the attention of every mixer, and have routers count choices over whole sequences."""
    group = mesh.group("context")
    if group is None:
        return
    forms: dict[Kind, type[Gather | Ulysses | Ring]] = {"gather": Gather, "ulysses": Ulysses, "ring": Ring}
    form = forms[kind](group, mesh.index("context"), mesh.size("context"))
    for block in model.modules():
        if isinstance(block, Mixer) and isinstance(block, _HoldsAttend):
            block.attend = form
        elif isinstance(block, Mixer | Routed) and isinstance(block, _HoldsRuns):
            block.runs = ContextRuns(group, mesh.index("context"), mesh.size("context"))
        elif isinstance(block, Router):
            block.pool = lambda counts: sum_(counts.clone(), group)


def cut(
    mesh: Mesh, tokens_BS: Tensor, targets_BS: Tensor, ids_BS: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor, Documents, *tuple[Tensor, ...]]:
    """This rank's tokens and targets, (B, L) each, where documents lie among them, and of whatever else there is a token
    (B, S, …) the same."""
    length, size = tokens_BS.shape[1], mesh.size("context")
    docs = Documents(ids_BS, length)
    if size == 1:
        return tokens_BS, targets_BS, docs, *others
    runs = runs_of(mesh.index("context"), size, length)
    tokens_BL, targets_BL, *own = (torch.cat([x[:, run] for run in runs], 1) for x in (tokens_BS, targets_BS, *others))
    return tokens_BL, targets_BL, docs.cut(runs), *own


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The chunks that a rank holds, in the order in which they lie there: an early one, and the late one to match."""
    return rank, 2 * size - 1 - rank


def runs_of(rank: int, size: int, length: int) -> tuple[slice, ...]:
    """Where they lie in the whole sequence."""
    run = length // (2 * size)
    return tuple(slice(chunk * run, (chunk + 1) * run) for chunk in chunks_of(rank, size))


def order_of(size: int) -> tuple[list[int], list[int]]:
    """The chunks of all ranks as they lie rank by rank, and where each chunk of the sequence lies among them."""
    by_rank = [chunk for rank in range(size) for chunk in chunks_of(rank, size)]
    return by_rank, sorted(range(2 * size), key=by_rank.__getitem__)


class ContextRuns:
    """The two chunks that a rank holds, among those of all ranks of a group."""

    num_runs = 2

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None:
        self.group, self.own = group, list(chunks_of(rank, size))
        _, self._by_place = order_of(size)

    def spread(self, x_BR: Tensor) -> Tensor:
        """See `Runs.spread`."""
        return gather(x_BR.contiguous(), 1, self.group)[:, self._by_place]

    def pick(self, x_BA: Tensor) -> Tensor:
        """See `Runs.pick`."""
        return x_BA[:, self.own]


class ContextAttention(ABC):
    """Attention of this rank's queries over the keys of all ranks of a group."""

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._by_rank, self._by_place = order_of(size)

    def __call__(
        self,
        q_BLHK: Tensor,
        k_BSGK: Tensor,
        v_BSGV: Tensor,
        docs: Documents,
        scores: Scores = PLAIN,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """(B, L, H, V), of this rank's keys (S = L). `docs` are those of a cut sequence, as `cut` gives them."""
        if docs.whole is None:
            raise ValueError("a context-parallel model wants sequences that are cut (parallel.context.cut)")
        return self.attend(q_BLHK, k_BSGK, v_BSGV, docs, docs.whole, scores, sinks_H)

    @abstractmethod
    def attend(
        self,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGV: Tensor,
        docs: Documents,
        whole: Documents,
        scores: Scores,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """The attention itself."""

    def in_place(self, x_BSHK: Tensor) -> Tensor:
        """What the ranks hold, one after another, in the order of the sequence."""
        chunks = x_BSHK.chunk(2 * self.size, _SEQUENCE)
        return torch.cat([chunks[number] for number in self._by_place], _SEQUENCE)

    def by_rank(self, x_BSHK: Tensor) -> Tensor:
        """The other way."""
        chunks = x_BSHK.chunk(2 * self.size, _SEQUENCE)
        return torch.cat([chunks[number] for number in self._by_rank], _SEQUENCE)


class Gather(ContextAttention):
    """Keys and values of all ranks; their gradients are summed where they came from."""

    def attend(
        self,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGV: Tensor,
        docs: Documents,
        whole: Documents,
        scores: Scores,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """A chunk's queries are the last of the keys that they may see, as in decoding."""
        kv_BSGX = self.in_place(gather(torch.cat((k_BLGK, v_BLGV), -1), _SEQUENCE, self.group))
        k_BSGK, v_BSGV = kv_BSGX.split((k_BLGK.shape[-1], v_BLGV.shape[-1]), -1)
        y = [
            attend(
                q_BIHK,
                k_BSGK[:, : run.stop],
                v_BSGV[:, : run.stop],
                whole.run(run.start, run.stop),
                scores,
                sinks_H,
            )
            for q_BIHK, run in zip(q_BLHK.chunk(2, _SEQUENCE), docs.runs, strict=True)
        ]
        return torch.cat(y, _SEQUENCE)


class Ulysses(ContextAttention):
    """All of the sequence for this rank's share of the heads."""

    def attend(
        self,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGV: Tensor,
        docs: Documents,  # noqa: ARG002
        whole: Documents,
        scores: Scores,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Query heads go where their key-value heads go: both are shared out in order."""
        size = max(q_BLHK.shape[-1], v_BLGV.shape[-1])
        shares = [
            F.pad(x, (0, size - x.shape[-1])).unflatten(_HEADS, (self.size, -1)) for x in (q_BLHK, k_BLGK, v_BLGV)
        ]
        heads = torch.cat(shares, _HEADS + 1).flatten(_HEADS, _HEADS + 1)
        some = self.in_place(all_to_all(heads, _HEADS, _SEQUENCE, self.group))
        q_BSHK, k_BSGK, v_BSGV = (
            x_BSHX[..., : of.shape[-1]]
            for x_BSHX, of in zip(
                some.split([share.shape[_HEADS + 1] for share in shares], _HEADS), (q_BLHK, k_BLGK, v_BLGV), strict=True
            )
        )
        own_sinks_H = None if sinks_H is None else sinks_H.chunk(self.size)[self.rank]
        y_BSHV = self.by_rank(attend(q_BSHK, k_BSGK, v_BSGV, whole, scores, own_sinks_H))
        return all_to_all(y_BSHV, _SEQUENCE, _HEADS, self.group)


class Ring(ContextAttention):
    """Keys and values of one rank at a time, sent on while they are used."""

    def attend(
        self,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGV: Tensor,
        docs: Documents,  # noqa: ARG002
        whole: Documents,
        scores: Scores,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Heads first inside."""
        q_BHLK, k_BGLK, v_BGLV = (x.transpose(1, 2) for x in (q_BLHK, k_BLGK, v_BLGV))
        y_BHLV: Tensor = differentiably(_RingFunction, q_BHLK, k_BGLK, v_BGLV, sinks_H, self, whole, scores)
        return y_BHLV.transpose(1, 2)

    def pairs(
        self, source: int, whole: Documents, reach: Reach = EVERYTHING
    ) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """This rank's runs of queries against `source`'s runs of keys, where they see anything: where each lies on its
        rank, and what is seen (None: everything)."""
        length = whole.length
        run = length // (2 * self.size)
        here = (slice(0, run), slice(run, 2 * run))
        for queries, query_run in zip(here, runs_of(self.rank, self.size, length), strict=True):
            for keys, key_run in zip(here, runs_of(source, self.size, length), strict=True):
                if key_run.start > query_run.start:
                    continue
                key = ("seen", query_run.start, key_run.start, reach)
                is_any, seen = whole.derive(key, partial(_seen, whole, query_run, key_run, reach))
                if is_any:
                    yield queries, keys, seen


class _RingFunction(torch.autograd.Function):
    """Forward keeps the merged log-sum-exp; backward goes round again, with the gradients of what goes round behind it."""

    is_costly = True
    communicates = True

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BGLK: Tensor,
        v_BGLV: Tensor,
        sinks_H: Tensor | None,
        ring: Ring,
        whole: Documents,
        scores: Scores,
    ) -> Tensor:
        wide = torch.promote_types(q_BHLK.dtype, torch.float32)
        y_BHLV = q_BHLK.new_zeros((*q_BHLK.shape[:3], v_BGLV.shape[-1]), dtype=wide)
        lse_BHL = q_BHLK.new_full(q_BHLK.shape[:3], float("-inf"), dtype=wide)
        kv = torch.cat((k_BGLK, v_BGLV), -1)
        kv_here = kv
        for source, is_last in _sources(ring):
            arrival = None if is_last else pass_on(kv, ring.group)
            k, v = _parted(kv, q_BHLK)
            for queries, keys, seen in ring.pairs(source, whole, scores.reach):
                part = attend_part(q_BHLK[:, :, queries], k[:, :, keys], v[:, :, keys], seen, scores)
                y_BHLV[:, :, queries], lse_BHL[:, :, queries] = merge(
                    y_BHLV[:, :, queries], lse_BHL[:, :, queries], *part
                )
            kv = kv if arrival is None else arrival()
        if sinks_H is not None:
            # One more part, whose output is 0.
            sinks_BHL = sinks_H.to(wide)[:, None].expand_as(lse_BHL)
            y_BHLV, lse_BHL = merge(y_BHLV, lse_BHL, torch.zeros_like(y_BHLV), sinks_BHL)
        ctx.save_for_backward(q_BHLK, kv_here, y_BHLV, lse_BHL, sinks_H)
        ctx.ring, ctx.whole, ctx.scores = ring, whole, scores
        return y_BHLV.to(q_BHLK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None, None]:
        q_BHLK, kv, y_BHLV, lse_BHL, sinks_H = ctx.saved_tensors
        ring, dtype = ctx.ring, q_BHLK.dtype
        dq_BHLK = torch.zeros_like(q_BHLK, dtype=y_BHLV.dtype, memory_format=torch.contiguous_format)
        dsinks_H = None
        if sinks_H is not None:
            along_BHL = torch.linalg.vecdot(grads[0].to(y_BHLV.dtype), y_BHLV)
            sunk_BHL = (sinks_H.to(y_BHLV.dtype)[:, None] - lse_BHL).exp()
            dsinks_H = -(sunk_BHL * along_BHL).sum((0, 2)).to(sinks_H.dtype)
        homecoming: Callable[[], Tensor] | None = None
        for source, is_last in _sources(ring):
            arrival = None if is_last else pass_on(kv, ring.group)
            dkv = torch.zeros_like(kv, dtype=y_BHLV.dtype)
            (k, v), (dk_here, dv_here) = _parted(kv, q_BHLK), _parted(dkv, q_BHLK)
            for queries, keys, seen in ring.pairs(source, ctx.whole, ctx.scores.reach):
                dq, dk, dv = attend_part_backward(
                    grads[0][:, :, queries],
                    q_BHLK[:, :, queries],
                    k[:, :, keys],
                    v[:, :, keys],
                    y_BHLV[:, :, queries],
                    lse_BHL[:, :, queries],
                    seen,
                    ctx.scores,
                )
                dq_BHLK[:, :, queries] += dq
                dk_here[:, :, keys] += dk
                dv_here[:, :, keys] += dv
            # What the ranks before added for this source arrived meanwhile; after the last it goes home.
            if homecoming is not None:
                dkv += homecoming()
            homecoming = pass_on(dkv, ring.group, tag=1)
            kv = kv if arrival is None else arrival()
        assert homecoming is not None
        dk_BGLK, dv_BGLV = _parted(homecoming().to(dtype), q_BHLK)
        return dq_BHLK.to(dtype), dk_BGLK, dv_BGLV, dsinks_H, None, None, None


def _parted(kv_BGLX: Tensor, q_BHLK: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the keys, which are as large as queries, and of the values."""
    size = q_BHLK.shape[-1]
    return kv_BGLX[..., :size], kv_BGLX[..., size:]


def _sources(ring: Ring) -> Iterator[tuple[int, bool]]:
    """Whose keys are here, step by step, and whether it is the last step: its own first, so that no query starts blind."""
    for step in range(ring.size):
        yield (ring.rank - step) % ring.size, step == ring.size - 1


def _seen(whole: Documents, queries: slice, keys: slice, reach: Reach) -> tuple[bool, Tensor | None]:
    """Whether these queries see any of these keys, and which (None: all)."""
    mask = whole.mask_between(queries, keys, reach)
    return bool(mask.any()), None if bool(mask.all()) else mask
