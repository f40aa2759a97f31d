"""The formulas of `planner.traffic` against what ranks issue: eight real ones over gloo, and fake ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.blocks.base import Initial, Router, RouterConfig, Routing, Tokens
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.common import CommonBlockConfig
from surefoot.blocks.mixers.side_by_side import SideBySideConfig
from surefoot.blocks.mixers.sparse import SparseConfig
from surefoot.config import override
from surefoot.dist.count import Amount, Counter, Counting, Flow
from surefoot.dist.mesh import own_mesh
from surefoot.dist.pool import Pool
from surefoot.models.routing import drain
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.base import gradients_of
from surefoot.optim.clip import clip_, global_norm
from surefoot.parallel.apply import lay_out
from surefoot.parallel.plan import Plan
from surefoot.planner.traffic import traffic
from surefoot.study.dry import Holdings, dry_run, holdings, workload
from surefoot.study.trial import ragged_batch
from surefoot.train.agree import Ranks
from surefoot.train.run import Run
from surefoot.train.state import laid_params
from tests.spread import spread

Tiny = Callable[..., Run]

PLANS: list[dict[str, Any]] = [
    {"replicate": 8},
    {"shard": 8, "zero": 1},
    {"shard": 8, "zero": 2},
    {"shard": 8, "zero": 3},
    {"shard": 8, "zero": 3, "reshard": 2},
    {"replicate": 2, "shard": 2, "zero": 1},
    {"replicate": 2, "shard": 4, "zero": 3},
    {"tensor": 2},
    {"tensor": 4},
    {"context": 2, "context_kind": "gather"},
    {"context": 4, "context_kind": "ulysses"},
    {"context": 4, "context_kind": "ring"},
    {"shard": 2, "tensor": 2, "context": 2, "context_kind": "ring"},
    {"replicate": 2, "tensor": 2, "context": 2, "context_kind": "ulysses"},
    {"shard": 2, "zero": 1, "tensor": 2, "context": 2},
    {"replicate": 2, "shard": 2, "zero": 2, "tensor": 2},
]

PIPELINES: list[dict[str, Any]] = [
    {"pipeline": 2, "schedule": "gpipe"},
    {"pipeline": 4, "schedule": "1f1b"},
    {"pipeline": 4, "schedule": "interleaved"},
    {"pipeline": 2, "schedule": "zbv", "tensor": 2},
    {"pipeline": 2, "schedule": "gpipe", "shard": 2, "zero": 3, "tensor": 2},
    {"pipeline": 2, "schedule": "1f1b", "shard": 2, "zero": 3, "context": 2, "context_kind": "ring"},
    {"pipeline": 2, "schedule": "interleaved", "replicate": 2, "shard": 2, "zero": 3},
    {"pipeline": 2, "schedule": "1f1b", "shard": 4, "zero": 2},
    {"pipeline": 2, "schedule": "zero-bubble", "shard": 2, "zero": 3},
    {"pipeline": 2, "schedule": "dualpipev", "shard": 2, "zero": 1, "tensor": 2},
]


def name(plan: dict[str, Any] | str) -> str:
    return plan if isinstance(plan, str) else ",".join(f"{key}={value}" for key, value in plan.items())


def ranks_of(plan: dict[str, Any]) -> int:
    """Ranks among which a batch is shared."""
    ranks: int = plan.get("replicate", 1) * plan.get("shard", 1)
    return ranks


def over(tiny: Tiny, plan: dict[str, Any], *more: str, optimizer: str = "muon") -> Run:
    """Two micro-batches a rank, four heads of each kind, and sizes that eight ranks do not divide."""
    run = tiny(
        "model.vocab_size=261",
        "model.width=24",
        "model.mixer.num_heads=4",
        "model.mixer.num_kv_heads=4",
        "model.ffn.hidden=28",
        "train.batch=8" if ranks_of(plan) <= 4 else "train.batch=16",
        "train.micro_batch=1",
    )
    run = override(run, [*(f"plan.{key}={value}" for key, value in plan.items()), *more])
    return run if optimizer == "muon" else run.model_copy(update={"optim": AdamWConfig()})


def issued(run: Run) -> tuple[Holdings, dict[Flow, Amount]] | None:
    """What this rank of the pool holds and sends in a step of the run; None where the plan does not use it."""
    mesh, cpu = own_mesh(run.plan.grid), torch.device("cpu")
    if mesh is None:
        return None
    length, dtype = run.data.sequence_length, run.precision.weight_dtype
    laid = lay_out(run.plan, run.model, mesh, sequence_length=length, dtype=dtype, device=cpu, seed=0)
    ranks, params = Ranks(mesh, cpu), laid_params(laid)
    optimizer = run.optim.build(params)
    work = workload(run)
    batch = [
        tensor[:1].repeat(work.num_micro_batches * work.micro_batch, 1)
        for tensor in ragged_batch(run.model.vocab_size, work.sequence_length)
    ]
    micro_batches: Any = list(zip(*(tensor.split(work.micro_batch) for tensor in batch), strict=True))
    counter = Counter()
    with Counting(counter):
        losses = laid.accumulate(micro_batches, 100, run.precision.compute_dtype)
        ranks.sums(*losses, *drain(laid.model))
        clip_(gradients_of(params), global_norm(params, ranks.group), 1.0)
        optimizer.step(1.0)
        laid.after_step()
    return holdings(laid, optimizer), counter.flows(run.plan.grid)


def assert_equal(counted: dict[Flow, Amount], expected: dict[Flow, float]) -> None:
    assert counted.keys() == expected.keys()
    for flow, amount in counted.items():
        assert amount.sent == pytest.approx(expected[flow], rel=1e-9), flow


@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_real_ranks_send_what_the_formulas_and_the_dry_run_say(tiny: Tiny, pool: Pool, plan: dict[str, Any]) -> None:
    assert_known(over(tiny, plan), pool)


TIED = ("true", "false")
PIPELINES_TIED = [(plan, TIED[(number + other) % 2]) for number, plan in enumerate(PIPELINES) for other in (0, 1)]
"""Every schedule comes first once, tied and untied in turn."""


@pytest.mark.parametrize(("plan", "tied"), spread(PIPELINES_TIED, 4), ids=name)
def test_so_do_the_ranks_of_a_pipeline(tiny: Tiny, pool: Pool, plan: dict[str, Any], tied: str) -> None:
    """Nine layers, which no number of stages divides, and as many micro-batches as every schedule takes."""
    run = over(
        tiny, plan, "model.depth=9", f"model.tied={tied}", "train.batch=32", f"train.micro_batch={4 // ranks_of(plan)}"
    )
    assert_known(run, pool)


def assert_known(run: Run, pool: Pool) -> None:
    """Every rank holds and sends what its dry run and the formulas say."""
    for rank, found in enumerate(pool.run(issued, run)):
        if found is None:
            continue
        held, counted = found
        assert_equal(counted, traffic(run.plan, run.model, run.optim, workload(run), rank))
        dry = dry_run(run, rank)
        assert dry.holdings == held
        assert dry.flows == counted


class EvenConfig(RouterConfig):
    """A router that wants all experts alike, whatever the tokens are: then bytes are known."""

    def build(self, *, width: int, num_experts: int, top_k: int) -> Even:
        """The router itself."""
        return Even(width, num_experts, top_k)


class Even(Router):
    """Token t goes to experts t K, t K + 1, …"""

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__(num_experts, top_k)
        self.scale = self.add_weight("scale", (width,), ("embed",), Initial(mean=1.0))

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:  # noqa: ARG002 - looks at none
        """See `Router.forward`."""
        number_TK = torch.arange(len(x_TD) * self.top_k, device=x_TD.device).view(-1, self.top_k)
        experts_TK = number_TK % self.num_experts
        loads = torch.full((self.num_experts,), number_TK.numel() // self.num_experts, device=x_TD.device)
        weight = (self.scale.float() * x_TD.float()).mean(1, keepdim=True).expand(-1, self.top_k)
        return Routing(experts_TK, weight.contiguous(), loads, torch.zeros((), device=x_TD.device))

    def flops(self) -> float:
        """None."""
        return 0.0


EXPERT_PLANS: list[dict[str, Any]] = [
    {"expert": 2},
    {"expert": 2, "zero": 1},
    {"expert": 4, "zero": 2, "replicate": 2},
    {"expert": 2, "shard": 2, "zero": 1},
    {"expert": 2, "shard": 2, "zero": 2, "tensor": 2},
    {"expert": 2, "shard": 4, "zero": 3},
    {"expert": 2, "shard": 2, "zero": 3, "replicate": 2},
    {"expert": 2, "shard": 2, "zero": 3, "context": 2},
]


@pytest.mark.parametrize("plan", EXPERT_PLANS, ids=name)
def test_rows_that_travel_to_experts_are_those_of_the_formula(tiny: Tiny, pool: Pool, plan: dict[str, Any]) -> None:
    base = over(tiny, {key: value for key, value in plan.items() if key != "expert"}, "train.batch=16")
    ffn = MoEConfig(num_experts=8, top_k=2, hidden=28, router=EvenConfig())
    run = base.model_copy(update={"model": base.model.model_copy(update={"ffn": ffn}), "plan": Plan(**plan)})
    assert_known(run, pool)


def test_with_adamw_no_matrix_travels(tiny: Tiny, pool: Pool) -> None:
    run = over(tiny, {"shard": 4, "tensor": 2}, optimizer="adamw")
    held, counted = pool.run(issued, run)[5]
    assert not any(flow.kind == "all-to-all" for flow in counted)
    assert_equal(counted, traffic(run.plan, run.model, run.optim, workload(run), 5))
    assert dry_run(run, 5).holdings == held


@pytest.mark.parametrize("plan", [{"shard": 64}, {"replicate": 4, "shard": 8, "tensor": 2, "context": 2}], ids=name)
def test_fake_ranks_of_worlds_that_are_not_here(tiny: Tiny, plan: dict[str, Any]) -> None:
    run = over(tiny, plan, "train.batch=320", "train.micro_batch=1", "precision.compute=bf16")
    for rank in (0, 17, run.plan.num_ranks - 1):
        counted = dict(dry_run(run, rank).flows)
        assert_equal(counted, traffic(run.plan, run.model, run.optim, workload(run), rank))


AHEAD: list[dict[str, Any]] = [
    {"shard": 2, "zero": 3, "tensor": 2},
    {"shard": 2, "zero": 1, "tensor": 2},
    {"replicate": 2, "shard": 2, "zero": 2},
]


@pytest.mark.parametrize("plan", AHEAD, ids=name)
def test_predicting_the_token_after_the_next_is_in_the_formulas(tiny: Tiny, pool: Pool, plan: dict[str, Any]) -> None:
    """It passes embedding and head again, and one more layer."""
    assert_known(over(tiny, plan, "model.ahead_weight=0.3"), pool)


COMMON: list[dict[str, Any]] = [
    {"shard": 4, "zero": 3},
    {"shard": 2, "zero": 2},
    {"shard": 4, "zero": 3, "reshard": 2},
    {"shard": 2, "zero": 1, "tensor": 2},
    {"shard": 2, "zero": 3, "tensor": 2},
    {"replicate": 2, "shard": 2, "zero": 3},
    {"tensor": 2, "context": 2, "context_kind": "ring"},
]


@pytest.mark.parametrize("plan", COMMON, ids=name)
def test_what_layers_have_in_common_travels_for_each_of_them(tiny: Tiny, pool: Pool, plan: dict[str, Any]) -> None:
    run = over(tiny, plan)
    attention = AttentionConfig(num_heads=4, num_kv_heads=4)
    changes = {
        "depth": 4,
        "mixer": SideBySideConfig(mixers=(attention, attention)),
        "other_mixers": {"a": CommonBlockConfig(attention=attention, hidden=24, rank=4)},
        "mixer_pattern": "am",
    }
    assert_known(run.model_copy(update={"model": run.model.model_copy(update=changes)}), pool)


SPARSE: list[dict[str, Any]] = [
    {"context": 2, "context_kind": "ring"},
    {"context": 4, "context_kind": "ulysses"},
    {"context": 2, "tensor": 2, "context_kind": "gather"},
]


@pytest.mark.parametrize("plan", SPARSE, ids=name)
def test_sparse_attention_has_all_its_keys_gathered_by_any_kind(tiny: Tiny, pool: Pool, plan: dict[str, Any]) -> None:
    run = over(tiny, plan)
    sizes = {"compressed_size": 4, "compressed_stride": 2, "selected_size": 4, "num_selected": 3, "window": 5}
    mixer = SparseConfig(num_heads=4, num_kv_heads=2, **sizes)
    model = run.model.model_copy(update={"mixer": mixer, "depth": 2})
    assert_known(run.model_copy(update={"model": model}), pool)


HANDED: list[dict[str, Any]] = [
    {"pipeline": 4, "schedule": "1f1b", "zero": 1, "shard": 2},
    {"pipeline": 2, "schedule": "interleaved", "tensor": 2},
    {"pipeline": 2, "schedule": "zbv", "context": 2},
    {"pipeline": 2, "schedule": "gpipe", "replicate": 2, "tensor": 2},
]


@pytest.mark.parametrize("plan", HANDED, ids=name)
@pytest.mark.parametrize("kind", ["keys", "common", "ahead"])
def test_what_stages_hand_on_and_share(tiny: Tiny, pool: Pool, plan: dict[str, Any], kind: str) -> None:
    """Keys that a later stage reads, embeddings and weights of a block that layers share, and one more prediction."""
    run = over(tiny, plan, "train.batch=32", f"train.micro_batch={4 // ranks_of(plan)}")
    attention = AttentionConfig(num_heads=4, num_kv_heads=4)
    first, other = attention, CommonBlockConfig(attention=attention, hidden=24, rank=4)
    if kind == "keys":
        first = attention.model_copy(update={"leaves": "keys"})
        other = attention.model_copy(update={"reads": "keys"})
    changes: dict[str, Any] = {"depth": 8, "mixer": first, "other_mixers": {"r": other}, "mixer_pattern": "mrrr"}
    if kind == "ahead":
        run = override(run, ["plan.context=1"])  # the token after a chunk's last is elsewhere
        changes = {"depth": 8, "ahead_weight": 0.3}
    assert_known(run.model_copy(update={"model": run.model.model_copy(update=changes)}), pool)
