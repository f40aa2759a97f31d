"""Every option of attention under context and tensor parallelism: outputs and gradients of one process."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.rope import LinearScaling, YarnScaling
from surefoot.dist.mesh import Grid, own_mesh
from surefoot.dist.pool import Pool
from surefoot.ops.attention import attend_plain
from surefoot.ops.documents import Documents, Reach
from surefoot.ops.scores import Scores
from surefoot.parallel.context import Kind, Ring, runs_of
from surefoot.parallel.plan import Plan
from tests.parallel.parity import assert_same_as_one_process, decoder
from tests.parallel.test_context import FORMS, documents, joined, output_and_gradients, part_of

KINDS: tuple[Kind, ...] = get_args(Kind)
SCORES = {
    "scale and softcap": Scores(scale=0.6, softcap=1.5),
    "window": Scores(reach=Reach(6)),
    "first": Scores(reach=Reach(5, 2), softcap=2.0),
}


def local(
    kind: Kind, inputs: list[Tensor], dy: Tensor, sinks_H: Tensor, docs: Documents, scores: Scores
) -> tuple[list[Tensor], Tensor] | None:
    """Output and gradients of this rank's part of the tokens, and its part of the gradient of the sinks."""
    size = 4
    mesh = own_mesh(Grid({"context": size}))
    if mesh is None:
        return None
    rank, group = mesh.rank, mesh.group("context")
    assert group is not None
    form, own = FORMS[kind](group, rank, size), docs.cut(runs_of(rank, size, docs.length))
    leaves = [part_of(x, size, rank) for x in inputs]
    *found, dsinks_H = output_and_gradients(
        lambda q, k, v, s: form(q, k, v, own, scores, s), [*leaves, sinks_H], part_of(dy, size, rank)
    )
    return found, dsinks_H


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["single", "ragged"])
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)], ids=str
)
def test_attention_is_the_plain_one(
    pool: Pool, kind: Kind, name: str, scores: Scores, dtype: torch.dtype, tolerance: float
) -> None:
    length, docs = 32, documents(name, 32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, 8, 8), (2, length, 4, 8), (2, length, 4, 6), (2, length, 8, 6)]  # values of another size
    *inputs, dy = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    sinks_H = torch.randn(8, generator=generator, dtype=torch.float64).to(dtype)
    parts = [part for part in pool.run(local, kind, inputs, dy, sinks_H, docs, scores) if part is not None]
    found = [*joined([tensors for tensors, _ in parts], 4, length), sum(dsinks_H.double() for _, dsinks_H in parts)]
    wanted = output_and_gradients(
        lambda q, k, v, s: attend_plain(q, k, v, docs, scores, s),
        [x.double() for x in (*inputs, sinks_H)],
        dy.double(),
    )
    for what, x, y in zip(("y", "dq", "dk", "dv", "dsinks"), found, wanted, strict=True):
        error = float((x - y).norm() / y.norm())
        assert error < tolerance, f"{what} is off by {error:.1e}"


def test_a_ring_leaves_out_what_is_out_of_reach() -> None:
    docs = Documents(None, 32)
    pairs = [pair for source in range(4) for pair in Ring(None, 2, 4).pairs(source, docs, Reach(4))]  # type: ignore[arg-type]
    assert len(pairs) == 4  # each of two chunks sees itself and the one before


WINDOWED = AttentionConfig(
    num_heads=4,
    num_kv_heads=4,
    head_size=8,
    rope="interleaved",
    rope_theta=20.0,
    rope_share=0.5,
    rope_scaling=YarnScaling(factor=4.0, original_length=16),
    qk_norm="width",
    scale=0.5,
    softcap=2.0,
    window=7,
    keep_first=2,
    sinks="learned",
    gate="sigmoid",
    bias="qkv",
)
PLAIN = AttentionConfig(
    num_heads=4, num_kv_heads=4, head_size=4, rope_theta=20.0, rope_scaling=LinearScaling(factor=2.0), qk_norm="none"
)
NOWHERE = AttentionConfig(num_heads=4, num_kv_heads=4, head_size=4, rope="none", window=9, sinks="learned")


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor=2),
        Plan(tensor=4, shard=2, zero=3),
        Plan(shard=2, zero=3),
        Plan(replicate=2, shard=2, zero=1),
        Plan(pipeline=2, tensor=2),
        *(Plan(context=2, context_kind=kind, tensor=2) for kind in KINDS),
        *(Plan(context=4, context_kind=kind, shard=2, zero=3) for kind in KINDS),
    ],
    ids=Plan.describe,
)
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan) -> None:
    config = decoder(depth=4).model_copy(
        update={"mixer": PLAIN, "other_mixers": {"w": WINDOWED, "n": NOWHERE}, "mixer_pattern": "wmnm"}
    )
    assert_same_as_one_process(pool, plan, config, num_micro=2)
