"""Routers that limit, balance or let experts choose, each against its definition written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.blocks.base import RouterConfig, Routing
from surefoot.blocks.ffn.moe import Local, MoE, MoEConfig
from surefoot.blocks.routers.expert_choice import ExpertChoiceConfig
from surefoot.blocks.routers.sigmoid import Sigmoid, SigmoidConfig
from surefoot.blocks.routers.sinkhorn import SinkhornConfig, log_plan
from surefoot.config import ConfigError
from surefoot.models.initialise import initialise
from surefoot.models.routing import take_auxiliary
from surefoot.ops.rows import sum_rows, sum_rows_plain

WIDTH, EXPERTS, TOP_K = 12, 8, 2


def moe(router: RouterConfig) -> MoE:
    block = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, hidden=10, router=router).build(width=WIDTH, output_scale=1.0)
    block.double()
    initialise(block, 0)
    return block


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(block: MoE, x_TD: Tensor, routing: Routing) -> Tensor:
    """Every token through every expert, times its weight there: 0 where it was not sent."""
    rows = []
    for x, chosen, weights in zip(x_TD, routing.experts_TK, routing.weights_TK, strict=True):
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            gate, up = block.experts.w_gate[expert] @ x, block.experts.w_up[expert] @ x
            share = weights[chosen == expert].sum()
            y = y + share * (block.experts.w_down[expert] @ (gate * torch.sigmoid(gate) * up))
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("router", [ExpertChoiceConfig(), SinkhornConfig()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_equals_a_dense_sum_with_zeros(router: RouterConfig, num_tokens: int) -> None:
    """Outputs and every gradient, where tokens have no expert, one, or all."""
    block, x = moe(router), draw(1, num_tokens, WIDTH).requires_grad_()
    direction, leaves = draw(1, num_tokens, WIDTH, seed=2), [x, *block.parameters()]
    found = block(x)
    take_auxiliary(block)
    routing = block.router(x[0], num_tokens)
    wanted = dense(block, x[0], routing)[None]
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    gradients = [torch.autograd.grad((y * direction).sum(), leaves) for y in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    loads = torch.bincount(routing.experts_TK.flatten(), minlength=EXPERTS + 1)[:EXPERTS]
    assert torch.equal(routing.loads_E, loads)


def test_each_expert_takes_the_tokens_that_score_it_highest() -> None:
    block, x = moe(ExpertChoiceConfig()), draw(40, WIDTH)
    routing, scores = block.router(x, 40), (x @ block.router.weight.T).softmax(1)
    assert routing.loads_E.tolist() == [10] * EXPERTS
    for expert in range(EXPERTS):
        order = sorted(range(40), key=lambda token: -scores[token, expert].item())
        assert set((routing.experts_TK == expert).any(1).nonzero().flatten().tolist()) == set(order[:10])
    numbers = (routing.experts_TK < EXPERTS).sum(1)
    assert numbers.min() < TOP_K < numbers.max(), "tokens have different numbers of experts"
    assert not routing.weights_TK[routing.experts_TK == EXPERTS].any()


def test_tokens_choose_where_nothing_is_trained() -> None:
    block, x = moe(ExpertChoiceConfig()), draw(1, 20, WIDTH)
    with torch.no_grad():
        alone = torch.cat([block(x[:, place : place + 1]) for place in range(20)], 1)
        torch.testing.assert_close(block(x), alone, rtol=0, atol=1e-13)


def test_the_plan_is_balanced() -> None:
    logits = 3 * draw(64, EXPERTS) + torch.linspace(0, 4, EXPERTS, dtype=torch.float64)
    plan = log_plan(logits, 300).exp()
    torch.testing.assert_close(plan.sum(1), torch.full((64,), 1 / 64, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(plan.sum(0), torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64), rtol=1e-8, atol=0)
    # Scaling rows and columns leaves the odds between two tokens and two experts.
    odds = plan.log()[0, 0] + plan.log()[5, 3] - plan.log()[0, 3] - plan.log()[5, 0]
    assert float(odds) == pytest.approx(float(logits[0, 0] + logits[5, 3] - logits[0, 3] - logits[5, 0]))


def test_sinkhorn_evens_out_skewed_loads_and_weights_by_the_plain_logits() -> None:
    block, x = moe(SinkhornConfig()), draw(512, WIDTH) + 1.0
    with torch.no_grad():
        plain = block.router(x, 512)
    balanced = block.router(x, 512)
    assert balanced.loads_E.max() < 0.7 * plain.loads_E.max()
    logits = x @ block.router.weight.T
    torch.testing.assert_close(balanced.weights_TK, logits.gather(1, balanced.experts_TK).sigmoid())


def test_experts_come_from_the_groups_of_the_best_pairs() -> None:
    block = moe(SigmoidConfig(num_groups=4, top_groups=2))
    assert isinstance(block.router, Sigmoid)
    block.router.bias_E.copy_(draw(EXPERTS, seed=5) * 0.1)
    x = draw(60, WIDTH)
    routing, scores = block.router(x, 60), (x @ block.router.weight.T).sigmoid()
    limited = 0
    for token in range(60):
        biased = (scores[token] + block.router.bias_E).tolist()
        groups = sorted(range(4), key=lambda g: -sum(biased[2 * g : 2 * g + 2]))[:2]
        inside = [expert for expert in range(EXPERTS) if expert // 2 in groups]
        wanted = sorted(inside, key=lambda expert: -biased[expert])[:TOP_K]
        limited += wanted != sorted(range(EXPERTS), key=lambda expert: -biased[expert])[:TOP_K]
        assert routing.experts_TK[token].tolist() == wanted
        chosen = scores[token, wanted]
        torch.testing.assert_close(routing.weights_TK[token], chosen / chosen.sum())
    assert limited > 5, "the limit never mattered"


def test_the_z_loss_of_sigmoids_is_the_squared_log_partition() -> None:
    block, x = moe(SigmoidConfig(balance_loss=0.0, z_loss=0.5)), draw(30, WIDTH)
    (found,) = torch.autograd.grad(block.router(x, 30).auxiliary, block.router.weight)
    wanted = torch.zeros_like(found)
    for token in x:
        exponentials = (block.router.weight @ token).exp()
        # d/dw of log(Z)² / 2 is log(Z) times the softmax, for each token's own features.
        wanted += exponentials.sum().log() * torch.outer(exponentials / exponentials.sum(), token)
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("router", "said"),
    [
        (SigmoidConfig(num_groups=3), "router.num_groups: 3: must give 8 experts groups of 2 or more"),
        (SigmoidConfig(num_groups=8), "router.num_groups: 8: must give 8 experts groups of 2 or more"),
        (SigmoidConfig(num_groups=4, top_groups=5), "router.top_groups: 5: must be 1 to num_groups 4"),
    ],
)
def test_groups_that_do_not_fit_are_refused(router: SigmoidConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        moe(router)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_missing_copies_take_and_give_nothing(dtype: torch.dtype) -> None:
    """Also in the compiled pass, which bf16 takes; a token without any expert is 0, and no row at all is no error."""
    experts_TK = torch.tensor([[0, 3], [3, 3], [2, 0], [3, 1]])
    wide = torch.promote_types(dtype, torch.float32)
    weights_TK = (draw(4, 2) * (experts_TK < 3)).to(wide)
    routing = Routing(experts_TK, weights_TK, torch.tensor([2, 1, 1]), torch.zeros(()), is_partial=True)
    x_TD = draw(4, 16).to(dtype).requires_grad_()
    x_RD, counts_E, back = Local().send(x_TD, routing)
    assert torch.equal(x_RD, x_TD[[0, 2, 3, 2]])
    assert counts_E.tolist() == [2, 1, 1]
    wanted = x_TD.to(wide) * weights_TK.sum(1, keepdim=True)
    found = back(x_RD)
    torch.testing.assert_close(found, wanted.to(dtype), rtol=1e-2 if dtype is torch.bfloat16 else 1e-12, atol=1e-12)
    assert not found[1].any()
    gradients = [torch.autograd.grad(y.sum(), x_TD, retain_graph=True)[0] for y in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=2e-2 if dtype is torch.bfloat16 else 1e-12, atol=1e-12)
    none = Routing(torch.full_like(experts_TK, 3), weights_TK * 0, torch.zeros(3).long(), torch.zeros(()), True)
    empty_RD, _, back = Local().send(x_TD, none)
    assert empty_RD.shape == (0, 16)
    assert not back(empty_RD).any()


def test_sums_with_missing_rows_equal_autograd() -> None:
    rows_TK, x, weights = torch.tensor([[1, 3], [3, 3], [2, 0]]), draw(3, 5), draw(3, 2, seed=2)
    weights[rows_TK == 3] = 0
    outcomes = []
    for function in (sum_rows, sum_rows_plain):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = function(leaves[0], rows_TK, leaves[1])
        outcomes.append((y, *torch.autograd.grad((y * draw(3, 5, seed=4)).sum(), leaves)))
    for found, wanted in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
