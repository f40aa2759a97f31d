"""Context parallelism has the gradients of one process, keeps documents apart, and refuses what it cannot cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from surefoot.blocks.base import Mixer
from surefoot.config import ConfigError
from surefoot.dist.mesh import Grid, own_mesh
from surefoot.dist.pool import Pool
from surefoot.models.decoder import DecoderConfig
from surefoot.ops.attention import attend, attend_plain
from surefoot.ops.documents import Documents
from surefoot.ops.partial_attention import (
    attend_part,
    attend_part_backward,
    attend_part_backward_plain,
    attend_part_plain,
    merge,
)
from surefoot.parallel import context
from surefoot.parallel.apply import check
from surefoot.parallel.context import Gather, Kind, Ring, Ulysses, runs_of
from surefoot.parallel.plan import Plan
from tests.parallel.parity import LENGTH, assert_same_as_one_process, decoder, share

KINDS: tuple[Kind, ...] = get_args(Kind)
FORMS = {"gather": Gather, "ulysses": Ulysses, "ring": Ring}

BESIDE: list[dict[str, Any]] = [
    {},
    {"tensor": 2},
    {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 2},
    {"shard": 2, "zero": 3},
    {"replicate": 2},
]
FURTHER: list[dict[str, Any]] = [
    {"context": 2, "shard": 2, "zero": 3, "tensor": 2},
    {"context": 2, "replicate": 2, "shard": 2, "zero": 1},
    {"context": 2, "replicate": 2, "shard": 2, "zero": 3},
]
LAYOUTS = [{"context": size, **beside} for size in (2, 4) for beside in BESIDE] + FURTHER
PLANS = [Plan(context_kind=kind, **layout) for layout in LAYOUTS for kind in KINDS]


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan) -> None:
    # Ulysses shares out key-value heads: as many as there are context ranks, on each tensor rank, and not one more.
    num_kv_heads = 8 if plan.context_kind == "ulysses" and plan.context * plan.tensor == 8 else 4
    config = decoder(num_heads=8, num_kv_heads=num_kv_heads, depth=2, tied=plan.context == 4)
    assert_same_as_one_process(pool, plan, config, num_micro=2)


def test_loss_sums_are_each_ranks_own_tokens(pool: Pool) -> None:
    config = decoder()
    alone = share(Plan(), config, 1)
    plan = Plan(context=4, replicate=2, context_kind="ring")
    shares = pool.run(share, plan, config, 1)
    assert alone is not None
    assert sum(found.nll for found in shares) == pytest.approx(alone.nll, rel=1e-12)


# What attention alone does: inputs, documents and a form on `size` ranks against the plain reference.

BATCH, HEAD_SIZE = 2, 8


def documents(name: str, length: int) -> Documents:
    """`ragged`: lengths from 1 up, in one row; the other row is one document over all shards."""
    if name == "single":
        return Documents(None, length)
    ids_BL = torch.zeros(BATCH, length, dtype=torch.long)
    if name == "ragged":
        ends = [0, 1, 4, length // 4 + 1, length // 2 + 3, length - 2]
        ids_BL[1, ends] = 1
        ids_BL = ids_BL.cumsum(1)
    else:  # a document for each chunk: every pair of different chunks is blind
        ids_BL[:] = torch.arange(length) // (length // 8)
    return Documents(ids_BL, length)


def qkv(length: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH, length, heads, HEAD_SIZE, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


def output_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    gradients = torch.autograd.grad(y, leaves, dy)
    return [y.detach(), *gradients]


def part_of(x: Tensor, size: int, rank: int) -> Tensor:
    return torch.cat([x[:, run] for run in runs_of(rank, size, x.shape[1])], 1)


def local_attention(kind: Kind, size: int, inputs: list[Tensor], dy: Tensor, docs: Documents) -> list[Tensor] | None:
    """Output and gradients of this rank's part."""
    mesh = own_mesh(Grid({"context": size}))
    if mesh is None:
        return None
    rank, group = mesh.rank, mesh.group("context")
    assert group is not None
    form = FORMS[kind](group, rank, size)
    own = docs.cut(runs_of(rank, size, docs.length))
    local = [part_of(x, size, rank) for x in inputs]
    return output_and_gradients(lambda q, k, v: form(q, k, v, own), local, part_of(dy, size, rank))


def joined(parts: list[list[Tensor] | None], size: int, length: int) -> list[Tensor]:
    """The parts of all ranks in their places."""
    present = [part for part in parts if part is not None]
    whole = [x.new_full((x.shape[0], length, *x.shape[2:]), float("nan")) for x in present[0]]
    for rank, part in enumerate(present):
        for full, x in zip(whole, part, strict=True):
            for run, chunk in zip(runs_of(rank, size, length), x.chunk(2, 1), strict=True):
                full[:, run] = chunk
    return whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["single", "ragged", "apart"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_attention_is_the_plain_one(
    pool: Pool, kind: Kind, name: str, size: int, dtype: torch.dtype, tolerance: float
) -> None:
    length = 32
    inputs, docs = qkv(length, 8, 4, dtype), documents(name, length)
    dy = qkv(length, 8, 4, dtype)[0].flip(0, 1)
    found = joined(pool.run(local_attention, kind, size, inputs, dy, docs), size, length)
    wide = [x.double() for x in inputs]
    expected = output_and_gradients(lambda q, k, v: attend_plain(q, k, v, docs), wide, dy.double())
    for what, x, y in zip(("y", "dq", "dk", "dv"), found, expected, strict=True):
        error = float((x - y).norm() / y.norm())
        assert x.dtype is dtype
        assert error < tolerance, f"{what} is off by {error:.1e}"


@pytest.mark.parametrize("kind", ["gather", "ring"])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_key_value_heads_that_do_not_divide(pool: Pool, kind: Kind, num_kv_heads: int) -> None:
    length, size = 16, 4
    inputs, docs = qkv(length, 3, num_kv_heads, torch.float64), documents("ragged", length)
    found = joined(pool.run(local_attention, kind, size, inputs, inputs[0], docs), size, length)
    expected = output_and_gradients(lambda q, k, v: attend_plain(q, k, v, docs), inputs, inputs[0])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_other_documents_do_not_matter_to_the_bit(pool: Pool, kind: Kind, dtype: torch.dtype) -> None:
    length, size = 32, 4
    docs = documents("ragged", length)
    assert docs.ids_BL is not None
    changed = docs.ids_BL[1] == 4
    assert 0 < changed.sum() < length
    inputs = qkv(length, 4, 4, dtype)
    dy = inputs[0].flip(0, 1)
    others = [x.clone() for x in inputs]
    for x in (*others, other_dy := dy.clone()):
        x[1, changed] = 100 * x[1, changed] + 7
    before = joined(pool.run(local_attention, kind, size, inputs, dy, docs), size, length)
    after = joined(pool.run(local_attention, kind, size, others, other_dy, docs), size, length)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[0], y[0])
        assert torch.equal(x[1, ~changed], y[1, ~changed])
        assert not torch.equal(x[1, changed], y[1, changed])


# Parts of attention, in one process.


PLAIN = (attend_part_plain, attend_part_backward_plain)
RUNNING = (attend_part, attend_part_backward)


@pytest.mark.parametrize(
    ("forms", "dtype", "tolerance"),
    [
        (PLAIN, torch.float64, 1e-14),
        (PLAIN, torch.float32, 1e-6),
        (PLAIN, torch.bfloat16, 1e-2),  # what a machine with fast bf16 products runs
        (RUNNING, torch.float32, 1e-6),
        (RUNNING, torch.bfloat16, 1e-2),
    ],
)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_parts_merge_to_the_whole(
    forms: tuple[Any, Any], dtype: torch.dtype, tolerance: float, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.ops.partial_attention._BLOCK_BYTES", 1)  # blocks of 16 queries
    length, (forward, backward) = 40, forms
    docs = documents("ragged", length)
    inputs = qkv(length, 4, num_kv_heads, dtype)
    expected = output_and_gradients(
        lambda q, k, v: attend_plain(q, k, v, docs), [x.double() for x in inputs], inputs[0].double()
    )
    q, k, v, dy = (x.transpose(1, 2) for x in (*inputs, inputs[0]))
    cuts = [slice(24, 40), slice(0, 24)]  # the first hides all from most queries
    parts = [forward(q, k[:, :, cut], v[:, :, cut], docs.mask()[..., cut]) for cut in cuts]
    blind = ~docs.mask()[..., cuts[0]].any(-1).expand(BATCH, 4, length)
    assert blind.any()
    assert (parts[0][0][blind] == 0).all()
    assert (parts[0][1][blind] == float("-inf")).all()
    y, lse = merge(*parts[0], *parts[1])
    nothing = (torch.zeros_like(y), torch.full_like(lse, float("-inf")))
    assert all(torch.equal(a, b) for a, b in zip(merge(*nothing, y, lse), (y, lse), strict=True))
    assert torch.equal(merge(*nothing, *nothing)[0], nothing[0])
    pieces = [backward(dy, q, k[:, :, cut], v[:, :, cut], y, lse, docs.mask()[..., cut]) for cut in cuts]
    dq = pieces[0][0] + pieces[1][0]
    dk, dv = (torch.cat((pieces[1][i], pieces[0][i]), 2) for i in (1, 2))
    for found, there in zip((y, dq, dk, dv), expected, strict=True):
        assert found.dtype is torch.promote_types(dtype, torch.float32)
        assert (found.transpose(1, 2) - there).norm() / there.norm() < tolerance


# Documents in parts.


@pytest.mark.parametrize("name", ["single", "ragged", "apart"])
def test_a_run_sees_all_before_it(name: str) -> None:
    docs = documents(name, 32)
    run = docs.run(8, 20)
    assert docs.run(8, 20) is run
    assert torch.equal(run.mask().expand(BATCH, 1, 12, 20), docs.mask().expand(BATCH, 1, 32, 32)[:, :, 8:20, :20])
    assert torch.equal(run.positions.expand(BATCH, 12), docs.positions.expand(BATCH, 32)[:, 8:20])
    q, k, v = qkv(32, 4, 2, torch.float64)
    torch.testing.assert_close(
        attend(q[:, 8:20], k[:, :20], v[:, :20], run), attend_plain(q, k, v, docs)[:, 8:20], rtol=1e-12, atol=1e-12
    )


def test_a_cut_counts_on_in_the_whole() -> None:
    docs = documents("ragged", 32)
    part = docs.cut(runs_of(1, 2, 32))
    assert part.runs == (slice(8, 16), slice(16, 24))
    assert part.whole is docs
    assert torch.equal(part.positions, docs.positions[:, 8:24])
    far = docs.cut(runs_of(0, 2, 32))
    assert torch.equal(far.positions, torch.cat((docs.positions[:, :8], docs.positions[:, 24:]), 1))
    q, k, v = qkv(16, 4, 2, torch.float64)
    with pytest.raises(ValueError, match="parallel form"):
        attend(q, k, v, documents("single", 32).cut(runs_of(0, 2, 32)))
    with pytest.raises(ValueError, match="ask its whole"):
        part.mask()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_has_the_same_work(size: int) -> None:
    """Pairs of chunks to compute: one for each chunk's own, and 2n - 1 others on every rank."""
    length = 12 * size
    docs = Documents(None, length)
    places = torch.cat([torch.arange(length)[run] for rank in range(size) for run in runs_of(rank, size, length)])
    assert sorted(places.tolist()) == list(range(length))
    group: Any = None
    for rank in range(size):
        pairs = [seen for source in range(size) for *_, seen in Ring(group, rank, size).pairs(source, docs)]
        assert (len(pairs), sum(seen is not None for seen in pairs)) == (2 * size + 1, 2)
    apart = documents("apart", 32)
    assert sum(1 for source in range(4) for _ in Ring(group, 2, 4).pairs(source, apart)) == 2


# Refusals.


@pytest.mark.parametrize(
    ("plan", "config", "length", "said"),
    [
        (Plan(context=4), decoder(), 20, ("4", "(8) must divide 20 data.sequence_length", "does: 5", "length=16")),
        (Plan(context=2, tensor=2), decoder(), 20, ("2 tensor ranks (8)", "20", "does: 1", "length=16")),
        (
            Plan(context=4, context_kind="ulysses"),
            decoder(),
            LENGTH,
            (
                "must divide 2 kv_heads of layers.0.mixer where plan.context_kind is ulysses",
                "does: 2",
                "gather or ring",
            ),
        ),
        (
            Plan(context=2, tensor=2, context_kind="ulysses"),
            decoder(),
            LENGTH,
            ("1 kv_heads of layers.0.mixer on each of 2 tensor ranks", "does: 1"),
        ),
        (Plan(context=3, context_kind="ulysses"), decoder(), 48, ("4 heads of layers.0.mixer", "does: 2")),
    ],
)
def test_what_cannot_be_cut_is_refused_with_numbers(
    plan: Plan, config: DecoderConfig, length: int, said: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(plan, config, length)
    for part in ("plan.context", *said):
        assert part in str(caught.value)


class _Recurrent(Mixer):
    """Has no `attend` to swap."""


def test_a_mixer_without_attention_is_refused_by_name() -> None:
    model = nn.ModuleDict({"layer": _Recurrent()})
    context.check(model, 1, "gather", 1, 48)
    with pytest.raises(ConfigError, match=r"plan.context: 2: layer \(_Recurrent\)"):
        context.check(model, 2, "gather", 1, 48)


def test_a_whole_sequence_is_not_taken_for_a_part() -> None:
    group: Any = None
    q, k, v = qkv(8, 4, 2, torch.float64)
    for form in FORMS.values():
        with pytest.raises(ValueError, match="that are cut"):
            form(group, 0, 2)(q, k, v, Documents(None, 8))


def test_a_plan_says_what_its_context_kind_does() -> None:
    assert Plan(context=2, context_kind="ring").describe() == "context 2, ring attention"
    assert "ring has no effect" in Plan(context_kind="ring").describe()
    assert Plan().describe() == "one process"
