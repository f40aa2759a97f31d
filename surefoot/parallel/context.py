"""Context parallelism: each sequence is cut over the `context` ranks, and attention finds the keys that lie elsewhere.

A sequence of 2n chunks over n ranks: rank r holds chunks r and 2n - 1 - r, so that under a causal mask every rank has
the same work (Dubey et al., 2024, section 3.3.2). Everything but attention sees this rank's tokens only; `attend` of each
softmax mixer is swapped for one of

    gather     all keys and values are gathered; a chunk of queries attends to those before it   (Dubey et al., 2024)
    ulysses    heads for sequence and back: all of the sequence for some of the heads           (Jacobs et al., 2023)
    ring       keys and values go round a ring, one rank's at a time, parts are merged            (Liu et al., 2023)

A rank holds all keys in gather, all of the sequence for 1/n of the heads in ulysses, 1/n of the keys (twice) in ring.
What is sent never depends on the data; only what is computed does.

Legend: B batch, L this rank's length, S whole length, H query heads, G key-value heads, K head size, I queries and J keys
of a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from surefoot.blocks.base import Mixer, Router
from surefoot.config import ConfigError
from surefoot.dist.collectives import all_to_all, gather, pass_on, sum_
from surefoot.dist.mesh import Mesh
from surefoot.ops.attention import attend
from surefoot.ops.autograd import apply as differentiably
from surefoot.ops.documents import Documents
from surefoot.ops.partial_attention import attend_part, attend_part_backward, merge

Kind = Literal["gather", "ulysses", "ring"]

_SEQUENCE, _HEADS = 1, 2


@runtime_checkable
class _HoldsAttend(Protocol):
    attend: Callable[[Tensor, Tensor, Tensor, Documents], Tensor]


def check(model: nn.Module, size: int, kind: Kind, tensor: int, sequence_length: int) -> None:
    """`ConfigError` where `size` ranks cannot share sequences or heads. The model is whole, may be on meta, and is one that
    `tensor` ranks can share."""
    if size == 1:
        return
    heads: list[tuple[int, str]] = []
    for name, mixer in model.named_modules():
        if not isinstance(mixer, Mixer):
            continue
        if not isinstance(mixer, _HoldsAttend):
            raise ConfigError(
                "plan.context", size, f"{name} ({type(mixer).__name__}) mixes without attention; use plan.context=1"
            )
        for weight, axes in mixer.axes.items():
            for axis, length in zip(axes, getattr(mixer, weight).shape, strict=True):
                if axis in {"heads", "kv_heads"}:
                    heads.append((length // mixer.units.get(axis, 1) // tensor, f"{axis} of {name}"))

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
        elif isinstance(block, Router):
            block.pool = lambda counts: sum_(counts.clone(), group)


def cut(mesh: Mesh, tokens_BS: Tensor, targets_BS: Tensor, ids_BS: Tensor) -> tuple[Tensor, Tensor, Documents]:
    """This rank's tokens and targets, (B, L) each, and where documents lie among them."""
    length, size = tokens_BS.shape[1], mesh.size("context")
    docs = Documents(ids_BS, length)
    if size == 1:
        return tokens_BS, targets_BS, docs
    runs = runs_of(mesh.index("context"), size, length)
    tokens_BL, targets_BL = (torch.cat([x[:, run] for run in runs], 1) for x in (tokens_BS, targets_BS))
    return tokens_BL, targets_BL, docs.cut(runs)


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The chunks that a rank holds, in the order in which they lie there: an early one, and the late one to match."""
    return rank, 2 * size - 1 - rank


def runs_of(rank: int, size: int, length: int) -> tuple[slice, ...]:
    """Where they lie in the whole sequence."""
    run = length // (2 * size)
    return tuple(slice(chunk * run, (chunk + 1) * run) for chunk in chunks_of(rank, size))


class ContextAttention(ABC):
    """Attention of this rank's queries over the keys of all ranks of a group."""

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._by_rank = [chunk for rank in range(size) for chunk in chunks_of(rank, size)]
        self._by_place = sorted(range(2 * size), key=self._by_rank.__getitem__)

    def __call__(self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, docs: Documents) -> Tensor:
        """(B, L, H, K). `docs` are those of a cut sequence, as `cut` gives them."""
        if docs.whole is None:
            raise ValueError("a context-parallel model wants sequences that are cut (parallel.context.cut)")
        return self.attend(q_BLHK, k_BLGK, v_BLGK, docs, docs.whole)

    @abstractmethod
    def attend(self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, docs: Documents, whole: Documents) -> Tensor:
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

    def attend(self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, docs: Documents, whole: Documents) -> Tensor:
        """A chunk's queries are the last of the keys that they may see, as in decoding."""
        num_groups = k_BLGK.shape[_HEADS]
        kv_BSGK = self.in_place(gather(torch.cat((k_BLGK, v_BLGK), _HEADS), _SEQUENCE, self.group))
        k_BSGK, v_BSGK = kv_BSGK.split(num_groups, _HEADS)
        y = [
            attend(q_BIHK, k_BSGK[:, : run.stop], v_BSGK[:, : run.stop], whole.run(run.start, run.stop))
            for q_BIHK, run in zip(q_BLHK.chunk(2, _SEQUENCE), docs.runs, strict=True)
        ]
        return torch.cat(y, _SEQUENCE)


class Ulysses(ContextAttention):
    """All of the sequence for this rank's share of the heads."""

    def attend(self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, docs: Documents, whole: Documents) -> Tensor:  # noqa: ARG002
        """Query heads go where their key-value heads go: both are shared out in order."""
        shares = [x.unflatten(_HEADS, (self.size, -1)) for x in (q_BLHK, k_BLGK, v_BLGK)]
        heads = torch.cat(shares, _HEADS + 1).flatten(_HEADS, _HEADS + 1)
        some = self.in_place(all_to_all(heads, _HEADS, _SEQUENCE, self.group))
        q_BSHK, k_BSGK, v_BSGK = some.split([share.shape[_HEADS + 1] for share in shares], _HEADS)
        y_BSHK = self.by_rank(attend(q_BSHK, k_BSGK, v_BSGK, whole))
        return all_to_all(y_BSHK, _SEQUENCE, _HEADS, self.group)


class Ring(ContextAttention):
    """Keys and values of one rank at a time, sent on while they are used."""

    def attend(self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, docs: Documents, whole: Documents) -> Tensor:  # noqa: ARG002
        """Heads first inside."""
        y_BHLK: Tensor = differentiably(
            _RingFunction, *(x.transpose(1, 2) for x in (q_BLHK, k_BLGK, v_BLGK)), self, whole
        )
        return y_BHLK.transpose(1, 2)

    def pairs(self, source: int, whole: Documents) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """This rank's runs of queries against `source`'s runs of keys, where they see anything: where each lies on its
        rank, and what is seen (None: everything)."""
        length = whole.length
        run = length // (2 * self.size)
        here = (slice(0, run), slice(run, 2 * run))
        for queries, query_run in zip(here, runs_of(self.rank, self.size, length), strict=True):
            for keys, key_run in zip(here, runs_of(source, self.size, length), strict=True):
                if key_run.start > query_run.start:
                    continue
                key = ("seen", query_run.start, key_run.start)
                is_any, seen = whole.derive(key, partial(_seen, whole, query_run, key_run))
                if is_any:
                    yield queries, keys, seen


class _RingFunction(torch.autograd.Function):
    """Forward keeps the merged log-sum-exp; backward goes round again, with the gradients of what goes round behind it."""

    is_costly = True
    communicates = True

    @staticmethod
    def forward(ctx: Any, q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, ring: Ring, whole: Documents) -> Tensor:
        wide = torch.promote_types(q_BHLK.dtype, torch.float32)
        y_BHLK = torch.zeros_like(q_BHLK, dtype=wide, memory_format=torch.contiguous_format)
        lse_BHL = q_BHLK.new_full(q_BHLK.shape[:3], float("-inf"), dtype=wide)
        kv = torch.stack((k_BGLK, v_BGLK))
        ctx.save_for_backward(q_BHLK, kv, y_BHLK, lse_BHL)
        ctx.ring, ctx.whole = ring, whole
        for source, is_last in _sources(ring):
            arrival = None if is_last else pass_on(kv, ring.group)
            for queries, keys, seen in ring.pairs(source, whole):
                part = attend_part(q_BHLK[:, :, queries], kv[0, :, :, keys], kv[1, :, :, keys], seen)
                y_BHLK[:, :, queries], lse_BHL[:, :, queries] = merge(
                    y_BHLK[:, :, queries], lse_BHL[:, :, queries], *part
                )
            kv = kv if arrival is None else arrival()
        return y_BHLK.to(q_BHLK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BHLK, kv, y_BHLK, lse_BHL = ctx.saved_tensors
        ring, dtype = ctx.ring, q_BHLK.dtype
        dq_BHLK = torch.zeros_like(y_BHLK)
        homecoming: Callable[[], Tensor] | None = None
        for source, is_last in _sources(ring):
            arrival = None if is_last else pass_on(kv, ring.group)
            dkv = torch.zeros_like(kv, dtype=y_BHLK.dtype)
            for queries, keys, seen in ring.pairs(source, ctx.whole):
                dq, dk, dv = attend_part_backward(
                    grads[0][:, :, queries],
                    q_BHLK[:, :, queries],
                    kv[0, :, :, keys],
                    kv[1, :, :, keys],
                    y_BHLK[:, :, queries],
                    lse_BHL[:, :, queries],
                    seen,
                )
                dq_BHLK[:, :, queries] += dq
                dkv[0, :, :, keys] += dk
                dkv[1, :, :, keys] += dv
            # What the ranks before added for this source arrived meanwhile; after the last it goes home.
            if homecoming is not None:
                dkv += homecoming()
            homecoming = pass_on(dkv, ring.group, tag=1)
            kv = kv if arrival is None else arrival()
        assert homecoming is not None
        dk_BGLK, dv_BGLK = homecoming().to(dtype)
        return dq_BHLK.to(dtype), dk_BGLK, dv_BGLK, None, None


def _sources(ring: Ring) -> Iterator[tuple[int, bool]]:
    """Whose keys are here, step by step, and whether it is the last step: its own first, so that no query starts blind."""
    for step in range(ring.size):
        yield (ring.rank - step) % ring.size, step == ring.size - 1


def _seen(whole: Documents, queries: slice, keys: slice) -> tuple[bool, Tensor | None]:
    """Whether these queries see any of these keys, and which (None: all)."""
    mask = whole.mask_between(queries, keys)
    return bool(mask.any()), None if bool(mask.all()) else mask
