"""Experts on other ranks: gradients, weights after steps, biases and checkpoints are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.blocks.base import Router, Routing
from surefoot.blocks.ffn.moe import Local, MoEConfig
from surefoot.blocks.routers.sigmoid import SigmoidConfig
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.checkpoint.load import read_tensors
from surefoot.config import ConfigError, override
from surefoot.dist.mesh import own_mesh
from surefoot.dist.pool import Pool
from surefoot.models.decoder import DecoderConfig
from surefoot.parallel.apply import check, lay_out
from surefoot.parallel.expert import Exchange
from surefoot.parallel.plan import Plan
from surefoot.train.run import Run
from tests.parallel import parity
from tests.parallel.parity import BATCH, LENGTH, assert_same_as_one_process, decoder
from tests.parallel.test_routed import biases, routed
from tests.spread import spread
from tests.train.test_ranks import assert_same_run, fit, newest, save_again

PLANS = [
    Plan(expert=2),
    Plan(expert=2, zero=1),
    Plan(expert=2, zero=2, replicate=2),
    Plan(expert=2, zero=1, replicate=2, tensor=2),
    Plan(expert=2, shard=2, zero=1),
    Plan(expert=2, shard=4, zero=1),
    Plan(expert=2, shard=2, zero=2),
    Plan(expert=2, shard=2, zero=3),
    Plan(expert=2, shard=4, zero=3),
    Plan(expert=2, replicate=2, shard=2, zero=1),
    Plan(expert=2, replicate=2, shard=2, zero=3),
    Plan(expert=2, tensor=2),
    Plan(expert=2, shard=2, zero=3, tensor=2),
    Plan(expert=2, context=2),
    Plan(expert=2, shard=2, zero=3, context=2, context_kind="ring"),
    Plan(expert=2, context=2, tensor=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
@pytest.mark.parametrize("router", [TopKConfig(balance_loss=0.3, z_loss=0.1), SigmoidConfig(balance_loss=0.3)])
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan, router: TopKConfig | SigmoidConfig) -> None:
    assert_same_as_one_process(pool, plan, routed(router), num_micro=1 if plan.num_data_ranks == 8 else 2)


def one_expert_wanted_by_all() -> DecoderConfig:
    """So few choices among so many experts that most get no token, on most ranks."""
    ffn = MoEConfig(num_experts=24, top_k=1, hidden=4, router=TopKConfig(softmax_over="all"))
    return decoder(depth=2).model_copy(update={"ffn": ffn})


@pytest.mark.parametrize("plan", [Plan(expert=8), Plan(expert=4, shard=2, zero=3), Plan(expert=2, shard=4, zero=1)])
def test_ranks_whose_experts_have_no_tokens(pool: Pool, plan: Plan) -> None:
    assert_same_as_one_process(pool, plan, one_expert_wanted_by_all())


def mostly_padding(vocab_size: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Only the first two rows have targets: most ranks have nothing to learn from, and route their tokens all the same."""
    tokens_BL, targets_BL, ids_BL = parity_batch(vocab_size, batch)
    targets_BL[2:] = -100
    return tokens_BL, targets_BL, ids_BL


parity_batch = parity.ragged_batch


def padded_share(plan: Plan, config: DecoderConfig) -> parity.Share | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "ragged_batch", mostly_padding)
        return parity.share(plan, config, 1)


@pytest.mark.parametrize("plan", [Plan(expert=2, shard=4, zero=1), Plan(expert=2, shard=2, zero=3)], ids=Plan.describe)
def test_a_rank_of_padding_takes_part(pool: Pool, plan: Plan) -> None:
    assert BATCH // plan.num_data_ranks <= 2
    config = routed(SigmoidConfig(balance_loss=0.3))
    expected, _ = parity.whole([padded_share(Plan(), config)])
    found, _ = parity.whole(pool.run(padded_share, plan, config))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-14, msg=name)


def test_biases_follow_the_loads_of_all_ranks(pool: Pool) -> None:
    expected = biases(Plan(), 8)
    assert expected is not None
    for plan in (Plan(expert=2), Plan(expert=2, shard=2, zero=3), Plan(expert=2, tensor=2)):
        for found in pool.run(biases, plan, 2)[: plan.num_ranks]:
            assert found is not None
            for name, bias in found[0].items():
                assert torch.equal(bias, expected[0][name])
            assert found[1] == pytest.approx(expected[1], rel=1e-9)


def moved(loads: list[list[int]]) -> tuple[list[int], bool] | None:
    """One exchange of rows that carry where they come from: what this rank's experts get, and whether all come back."""
    mesh = own_mesh(Plan(expert=2).grid)
    if mesh is None:
        return None
    group = mesh.group("expert")
    assert group is not None
    chosen = [expert for expert, load in enumerate(loads[mesh.rank]) for _ in range(load)]
    experts_TK = torch.tensor(chosen, dtype=torch.int64).view(-1, 1)
    num_tokens = len(experts_TK)
    x_TD = (torch.arange(num_tokens).double() + 100 * mesh.rank)[:, None].requires_grad_()
    counts = torch.bincount(experts_TK.flatten(), minlength=4)[:4]
    weights_TK = torch.where(experts_TK < 4, 2.0, 0.0).double()
    routing = Routing(experts_TK, weights_TK, counts, torch.zeros(()))
    rows, held, back = Exchange(Local(), group).send(x_TD, routing)
    y_TD = back(rows * 3)
    y_TD.sum().backward()
    is_right = torch.equal(y_TD, 3 * weights_TK * x_TD) and torch.equal(x_TD.grad, 3 * weights_TK)  # type: ignore[arg-type]
    return [*held.tolist(), *rows.flatten().int().tolist()], is_right


@pytest.mark.parametrize(
    "loads",
    [
        [[2, 0, 1, 0], [0, 1, 1, 1]],
        [[0, 0, 0, 0], [3, 0, 0, 0]],
        [[0] * 4, [0] * 4],
        # The fifth number counts choices that a router took back.
        [[2, 0, 1, 0, 2], [0, 1, 1, 1, 0]],
        [[0, 0, 0, 0, 3], [1, 0, 0, 0, 1]],
    ],
)
def test_rows_arrive_by_expert_and_come_back(pool: Pool, loads: list[list[int]]) -> None:
    found = pool.run(moved, loads)[:2]
    starts = [[sum(row[:expert]) for expert in range(4)] for row in loads]
    for rank, share in enumerate(found):
        assert share is not None
        held, wanted = (2 * rank, 2 * rank + 1), []
        for expert in held:
            for source in range(2):
                first = 100 * source + starts[source][expert]
                wanted += list(range(first, first + loads[source][expert]))
        assert share[0] == [loads[0][e] + loads[1][e] for e in held] + wanted
        assert share[1]


def held_by(plan: Plan) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]] | None:
    mesh = own_mesh(plan.grid)
    if mesh is None:
        return None
    config, device = routed(SigmoidConfig()), torch.device("cpu")
    laid = lay_out(plan, config, mesh, sequence_length=LENGTH, dtype=torch.float32, device=device, seed=0)
    assert all(not isinstance(block, Router) or block.loads_E.shape == (6,) for block in laid.model.modules())
    return {local.name: (local.layout.shape, tuple(local.part.shape)) for local in laid.locals}


def test_each_rank_keeps_its_share_and_no_more(pool: Pool) -> None:
    for plan in (
        Plan(expert=2, shard=3, zero=3),
        Plan(expert=2, shard=3, zero=1),
        Plan(expert=6, zero=1),
        Plan(expert=6),
    ):
        for share in pool.run(held_by, plan)[: plan.num_ranks]:
            assert share is not None
            for name, (whole, part) in share.items():
                if ".experts." in name:
                    assert part == (1, *whole[1:])
                else:  # other weights are shared over all data ranks, also those along `expert`
                    assert part[0] <= -(-whole[0] // 6)


@pytest.mark.parametrize(
    ("plan", "config", "said"),
    [
        (
            Plan(expert=4),
            routed(SigmoidConfig()),
            "plan.expert: 4: must divide 6 experts of layers.0.ffn.experts.w_gate; near",
        ),
        (Plan(expert=2), decoder(), "plan.expert: 2: the model has no experts to share out"),
    ],
)
def test_what_cannot_be_shared_is_refused(plan: Plan, config: DecoderConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(plan, config, LENGTH)


@pytest.fixture(scope="module")
def run(tiny: Callable[..., Run]) -> Run:
    """Eight steps with Muon and biases that move, copies compared after each."""
    base = override(tiny(), ["precision.compute=fp64", "model.mixer.num_kv_heads=2", "observe.fingerprint_every=1"])
    ffn = MoEConfig(num_experts=4, top_k=2, hidden=12, router=SigmoidConfig(bias_rate=0.01))
    return base.model_copy(update={"model": base.model.model_copy(update={"ffn": ffn})})


@pytest.fixture(scope="module")
def straight(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("straight") / "run"
    fit(run, path)
    return path


@pytest.mark.parametrize(
    ("first", "second"),
    spread(
        [
            (Plan(expert=2, shard=2), Plan(expert=4)),
            (Plan(), Plan(expert=4)),
            (Plan(expert=2, shard=2, zero=1, tensor=2), Plan(expert=4, context=2)),
            (Plan(pipeline=2, shard=2), Plan(expert=2, replicate=2)),
            (Plan(pipeline=2, expert=2), Plan(shard=4)),
            (Plan(expert=2, shard=2), Plan()),
        ],
        6,
    ),
    ids=Plan.describe,
)
def test_a_checkpoint_crosses_layouts_of_experts(
    pool: Pool, run: Run, straight: Path, tmp_path: Path, first: Plan, second: Plan
) -> None:
    """Saved after five steps under one plan, it is the same bits under another, and the end is that of one process."""
    path, reopened = tmp_path / "run", tmp_path / "reopened"
    stopped = pool.run(fit, run.model_copy(update={"plan": first}), path, 5)
    assert [end for end in stopped if end is not None] == [False] * first.num_ranks
    saved = read_tensors(newest(path))
    assert any(name.endswith("bias_E") for name in saved)
    over = run.model_copy(update={"plan": second})
    pool.run(save_again, over, path, reopened)
    again = read_tensors(newest(reopened))
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved if not name.startswith("random/"))
    pool.run(fit, over, path)
    assert_same_run(path, straight)
