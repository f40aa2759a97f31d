"""Hash, ReLU, noisy, BASE and quantile routing, and limited room, each against its definition written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.optimize import linprog
from torch import Tensor

from surefoot.blocks.base import RouterConfig, Tokens
from surefoot.blocks.ffn.moe import MoE, MoEConfig
from surefoot.blocks.routers.base_layer import BASEConfig
from surefoot.blocks.routers.hash import HashConfig
from surefoot.blocks.routers.noisy import Noisy, NoisyConfig
from surefoot.blocks.routers.quantile import OCTAVES, PARTS, Quantile, QuantileConfig, _bin, _edges, quantile
from surefoot.blocks.routers.relu import ReLU, ReLUConfig
from surefoot.blocks.routers.sigmoid import Sigmoid, SigmoidConfig
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.config import ConfigError
from surefoot.models.routing import balance, drain, statistics, take_auxiliary
from surefoot.ops.assign import assign
from surefoot.ops.balance import variation_loss
from surefoot.ops.documents import Documents
from tests.redraw import redraw

WIDTH, EXPERTS, TOP_K = 12, 8, 2


def moe(router: RouterConfig, capacity_factor: float | None = None, num_experts: int = EXPERTS) -> MoE:
    config = MoEConfig(num_experts=num_experts, top_k=TOP_K, hidden=10, router=router, capacity_factor=capacity_factor)
    return redraw(config.build(width=WIDTH, output_scale=1.0))


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(num_tokens: int, seed: int = 3) -> Tokens:
    ids_T = torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    return Tokens(ids_T, torch.arange(num_tokens))


def test_a_hash_is_of_the_id_and_the_layer_alone() -> None:
    router = moe(HashConfig()).router
    tokens = words(400)
    routing = router(draw(400, WIDTH), 400, tokens)
    by_id: dict[int, list[int]] = {}
    for number, experts in zip(tokens.ids_T.tolist(), routing.experts_TK.tolist(), strict=True):
        assert by_id.setdefault(number, experts) == experts
        assert len(set(experts)) == TOP_K
    assert len({tuple(experts) for experts in by_id.values()}) > 20
    assert torch.equal(routing.weights_TK, torch.full((400, TOP_K), 0.5, dtype=torch.float64))
    many = Tokens(torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64))
    loads = router(draw(40_000, 1), 40_000, many).loads_E
    # Binomial: within six deviations of even.
    assert (loads - 10_000).abs().max() < 6 * math.sqrt(40_000 * 0.25 * 0.75)
    router.layer = 1
    assert (router(draw(400, WIDTH), 400, tokens).experts_TK != routing.experts_TK).any(1).float().mean() > 0.5


@pytest.mark.parametrize("router", [HashConfig(), NoisyConfig()])
def test_who_must_know_the_words_says_so(router: RouterConfig) -> None:
    with pytest.raises(ValueError, match="needs the ids of the tokens"):
        moe(router)(draw(1, 4, WIDTH).requires_grad_())


def test_relu_gates_are_all_the_weights_there_are() -> None:
    """Outputs, the loss and every gradient, sequence by sequence."""
    block = moe(ReLUConfig(start=0.3))
    assert isinstance(block.router, ReLU)
    block.router.growths_1 += 2
    x = draw(3, 7, WIDTH).requires_grad_()
    direction, leaves = draw(3, 7, WIDTH, seed=2), [x, *block.parameters()]
    y, auxiliary = block(x), take_auxiliary(block)
    assert auxiliary is not None
    gates_BLE = torch.clamp(x @ block.router.weight.T, min=0)
    experts, rows = block.experts, []
    for gates_E, token in zip(gates_BLE.flatten(0, 1), x.flatten(0, 1), strict=True):
        row = torch.zeros_like(token)
        for e in range(EXPERTS):
            gate, up = experts.w_gate[e] @ token, experts.w_up[e] @ token
            row = row + gates_E[e] * (experts.w_down[e] @ (gate * torch.sigmoid(gate) * up))
        rows.append(row)
    losses = []
    for gates_LE in gates_BLE:
        shares_E = (gates_LE > 0).double().sum(0) * EXPERTS / (TOP_K * 7)
        losses.append((shares_E * gates_LE.sum(0)).sum())
    wanted, wanted_loss = torch.stack(rows).view_as(x), 0.3 * 1.2**2 * torch.stack(losses).sum()
    torch.testing.assert_close(y, wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(auxiliary, wanted_loss, rtol=1e-11, atol=0)
    found = torch.autograd.grad((y * direction).sum() + auxiliary, leaves)
    for ours, theirs in zip(found, torch.autograd.grad((wanted * direction).sum() + wanted_loss, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("chosen", "moves"), [(255, -1), (256, 0), (257, 1)])
def test_the_coefficient_follows_the_choices_of_a_whole_step(chosen: int, moves: int) -> None:
    """128 tokens in two micro-batches, top 2: 256 choices are as many as are wanted."""
    router = moe(ReLUConfig()).router
    assert isinstance(router, ReLU)
    for _ in range(3):
        balance(router, [float(chosen), *[0.0] * (EXPERTS - 1), 128.0, 0.0, 0.0])
    assert router.growths_1.tolist() == [3 * moves]
    assert router.growths_1.dtype is torch.int64, "a narrow model counts as well"


def test_relu_comes_to_its_number_of_experts() -> None:
    """Each gate wants a number of its own; the loss takes as much off all as leaves two of eight a token."""
    block = moe(ReLUConfig(start=1e-3, growth=1.05))
    router, wanted = block.router, draw(64, EXPERTS).abs()
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS, WIDTH))
    x, means = torch.nn.functional.pad(wanted, (0, WIDTH - EXPERTS)).requires_grad_(), []
    optimizer = torch.optim.SGD([x], lr=0.5)
    for _ in range(250):
        routing = router(x, 16)
        router.keep(routing, 1.0)
        auxiliary = router.take()
        assert auxiliary is not None
        optimizer.zero_grad()
        (auxiliary + 0.5 * (routing.weights_TK - wanted).square().sum()).backward()
        optimizer.step()
        sums = drain(block)
        balance(block, sums)
        means.append(sum(sums[:EXPERTS]) / 64)
    assert means[0] == EXPERTS
    assert means[-1] == pytest.approx(TOP_K, abs=0.25)


def test_noisy_top_k_equals_its_definition() -> None:
    block = moe(NoisyConfig(importance_loss=0.3, load_loss=0.2))
    router, x, tokens = block.router, draw(12, WIDTH), words(12)
    assert isinstance(router, Noisy)
    noise_TE = router._noise(tokens, x.device)
    found = router(x, 6, tokens)
    logits, deviations = x @ router.weight.T, torch.log1p((x @ router.noise.T).exp())
    noisy, rows, chances = logits + noise_TE * deviations, [], []
    for t in range(12):
        order = sorted(range(EXPERTS), key=lambda e: -noisy[t, e].item())
        assert found.experts_TK[t].tolist() == order[:TOP_K]
        row, chance = torch.zeros(EXPERTS, dtype=torch.float64), []
        exponentials = noisy[t, order[:TOP_K]].exp()
        rows.append(row.scatter(0, torch.tensor(order[:TOP_K]), exponentials / exponentials.sum()))
        for e in range(EXPERTS):
            others = sorted((noisy[t, o] for o in range(EXPERTS) if o != e), key=lambda value: -value.item())
            chance.append(
                torch.distributions.Normal(0.0, 1.0).cdf((logits[t, e] - others[TOP_K - 1]) / deviations[t, e])
            )
        chances.append(torch.stack(chance))
    wanted = torch.zeros((), dtype=torch.float64)
    for weight, shares in ((0.3, torch.stack(rows)), (0.2, torch.stack(chances))):
        for part in shares.split(6):
            sums = part.sum(0)
            wanted = wanted + 6 * weight * sums.var(correction=0) / sums.mean().square()
    torch.testing.assert_close(found.auxiliary, wanted, rtol=1e-10, atol=0)
    leaves = [router.weight, router.noise]
    for ours, theirs in zip(
        torch.autograd.grad(found.auxiliary, leaves), torch.autograd.grad(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


def test_noise_is_normal_and_of_layer_step_word_and_place() -> None:
    router = moe(NoisyConfig()).router
    assert isinstance(router, Noisy)
    tokens = words(5000)
    noise = router._noise(tokens, torch.device("cpu"))
    assert torch.equal(noise, router._noise(tokens, torch.device("cpu")))
    assert abs(float(noise.mean())) < 5 / math.sqrt(noise.numel())
    assert float(noise.var()) == pytest.approx(1, abs=0.05)
    assert float((noise.abs() < 0.6744897501960817).double().mean()) == pytest.approx(0.5, abs=0.02)
    seen = [noise]
    moved = tokens._replace(places_T=tokens.places_T + 1)
    seen += [router._noise(moved, torch.device("cpu"))[:5000]]
    router.layer = 1
    seen += [router._noise(tokens, torch.device("cpu"))]
    balance(router, [0.0] * router.num_counts)
    seen += [router._noise(tokens, torch.device("cpu"))]
    correlations = np.corrcoef(torch.stack(seen).flatten(1).numpy())
    assert np.abs(correlations - np.eye(4)).max() < 6 / math.sqrt(noise.numel())
    with torch.no_grad():
        x = draw(5, WIDTH)
        plain = (x @ router.weight.T).topk(TOP_K)
        assert torch.equal(router(x, 5).experts_TK, plain.indices)


def test_parts_of_a_sequence_have_the_loss_and_gradient_of_the_whole() -> None:
    shares = draw(3, 10, 5).exp().requires_grad_()
    whole = variation_loss(shares.sum(1), 10)
    totals = torch.cat((shares.detach().sum(1), torch.full((3, 1), 10.0, dtype=torch.float64)), 1)
    parts = [variation_loss(part.sum(1), part.shape[1], lambda _: totals) for part in shares.split((4, 6), 1)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-13, atol=0)
    found, wanted = (torch.autograd.grad(loss, shares)[0] for loss in (sum(parts), whole))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def best_total(scores_TE: Tensor, top_k: int) -> tuple[float, np.ndarray]:
    """By linear programming, whose best corner is whole numbers."""
    num_tokens, num_experts = scores_TE.shape
    room = np.full(num_experts, num_tokens * top_k // num_experts)
    room[: num_tokens * top_k % num_experts] += 1
    by_token = sparse.kron(sparse.eye(num_tokens), np.ones((1, num_experts)))
    by_expert = sparse.kron(np.ones((1, num_tokens)), sparse.eye(num_experts))
    wanted = np.concatenate([np.full(num_tokens, top_k), room])
    found = linprog(-scores_TE.numpy().ravel(), A_eq=sparse.vstack([by_token, by_expert]), b_eq=wanted, bounds=(0, 1))
    return -found.fun, room


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (3, 8, 2), (41, 5, 3), (60, 6, 1), (64, 4, 3), (9, 4, 4)]
)
@pytest.mark.parametrize("kind", ["plain", "skewed", "few kinds", "equal"])
def test_an_assignment_is_balanced_and_nearly_the_best(
    num_tokens: int, num_experts: int, top_k: int, kind: str
) -> None:
    scores = draw(num_tokens, num_experts, seed=num_tokens)
    if kind == "skewed":
        scores = scores + torch.linspace(0, 4, num_experts)
    elif kind == "few kinds":
        scores = scores[torch.arange(num_tokens) % 3 % num_tokens] + 1e-3 * draw(num_tokens, num_experts)
    elif kind == "equal":
        scores = torch.zeros_like(scores)
    experts = assign(scores, top_k, 1e-3)
    best, room = best_total(scores, top_k)
    assert all(len(set(row)) == top_k for row in experts.tolist())
    assert torch.bincount(experts.flatten(), minlength=num_experts).tolist() == room.tolist()
    allowed = num_tokens * top_k * 1e-3 * float(scores.max() - scores.min()) + 1e-6
    assert float(scores.gather(1, experts).sum()) >= best - allowed


def test_base_balances_in_training_and_is_greedy_elsewhere() -> None:
    block, x = moe(BASEConfig()), draw(256, WIDTH) + 1.0
    routing, logits = block.router(x, 256), x @ block.router.weight.T
    assert routing.loads_E.tolist() == [64] * EXPERTS
    torch.testing.assert_close(routing.weights_TK, logits.gather(1, routing.experts_TK).sigmoid())
    with torch.no_grad():
        plain = block.router(x, 256)
    assert torch.equal(plain.experts_TK, logits.topk(TOP_K).indices)
    assert plain.loads_E.max() > 100


def test_a_quantile_of_counts_is_that_of_the_numbers() -> None:
    margins = draw(4000, EXPERTS) * 0.3 + torch.linspace(-0.2, 0.2, EXPERTS)
    router = moe(QuantileConfig()).router
    counts = torch.stack([torch.bincount(column, minlength=2 * OCTAVES * PARTS + 1) for column in _bin(margins).T])
    assert counts.sum() == margins.numel()
    assert len(router.noted_N) == counts.numel()
    found, wanted = quantile(counts.double(), 0.75), torch.quantile(margins, 0.75, 0)
    edges = _edges(torch.device("cpu"))
    widths = (edges[1:] - edges[:-1])[_bin(wanted)]
    assert ((found - wanted).abs() <= widths).all()


def test_quantiles_even_out_skewed_loads_in_a_few_steps() -> None:
    block = moe(QuantileConfig())
    router = block.router
    assert isinstance(router, Quantile)
    x, peaks = draw(4, 512, WIDTH) + 0.7, []
    for _ in range(12):
        for part in x:  # four micro-batches
            block(part[None])
            take_auxiliary(block)
        sums = drain(block)
        peaks.append(statistics(block, sums, 2048)["max_load_share"] * EXPERTS)
        balance(block, sums)
    assert peaks[0] > 1.5
    assert peaks[-1] < 1.03
    assert abs(float(router.prices_E.sum())) < 1e-9
    routing, scores = router(x[0], 512), (x[0] @ router.weight.T).sigmoid()
    assert torch.equal(routing.experts_TK, (scores - router.prices_E).topk(TOP_K).indices)
    chosen = scores.gather(1, routing.experts_TK)
    torch.testing.assert_close(routing.weights_TK, chosen / chosen.sum(1, keepdim=True))


@pytest.mark.parametrize("router", [NoisyConfig(), QuantileConfig()])
def test_one_normalised_choice_is_refused(router: RouterConfig) -> None:
    with pytest.raises(ConfigError, match="top_k: 1: gives every choice"):
        MoEConfig(num_experts=4, top_k=1, hidden=4, router=router)


@pytest.mark.parametrize("router", [TopKConfig(), ReLUConfig()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("factor", [0.5, 1.0, 8.0])
def test_what_comes_late_in_a_document_finds_no_room(router: RouterConfig, factor: float) -> None:
    block, x = moe(router, factor), draw(2, 20, WIDTH).requires_grad_()
    ids = torch.tensor([[0] * 3 + [1] * 17, [0] * 20])
    y = block(x, Documents(ids, 20))
    take_auxiliary(block)
    routing = block.router(x.flatten(0, 1), 20)
    used: dict[tuple[int, int, int], int] = {}
    rows, dropped, experts = [], 0, block.experts
    for number, token in enumerate(x.flatten(0, 1)):
        row, document = torch.zeros_like(token), int(ids.flatten()[number])
        size = int((ids[number // 20] == document).sum())
        for e, weight in zip(routing.experts_TK[number].tolist(), routing.weights_TK[number], strict=True):
            if e == EXPERTS:
                continue
            key = number // 20, document, e
            used[key] = used.get(key, 0) + 1
            if used[key] > math.ceil(factor * TOP_K * size / EXPERTS):
                dropped += 1
                continue
            gate, up = experts.w_gate[e] @ token, experts.w_up[e] @ token
            row = row + weight * (experts.w_down[e] @ (gate * torch.sigmoid(gate) * up))
        rows.append(row)
    wanted = torch.stack(rows).view_as(x)
    torch.testing.assert_close(y, wanted, rtol=1e-11, atol=1e-12)
    direction, leaves = draw(2, 20, WIDTH, seed=2), [x, block.router.weight, *experts.parameters()]
    gradients = [torch.autograd.grad((z * direction).sum(), leaves) for z in (y, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert (dropped == 0) == (factor == 8.0)
    sums = drain(block)
    assert sums[:EXPERTS] == routing.loads_E.tolist()
    assert statistics(block, sums, 40)["dropped_share"] == pytest.approx(dropped / sum(sums[:EXPERTS]))
    with torch.no_grad():
        free = moe(router)
        torch.testing.assert_close(block(x, Documents(ids, 20)), free(x), rtol=0, atol=1e-13)


def test_biases_follow_what_was_chosen_and_not_what_found_room() -> None:
    block = moe(SigmoidConfig(bias_rate=0.1), 0.25)
    assert isinstance(block.router, Sigmoid)
    x = draw(1, 64, WIDTH)
    loads = block.router(x[0], 64).loads_E
    block(x)
    take_auxiliary(block)
    balance(block, drain(block))
    torch.testing.assert_close(block.router.bias_E, 0.1 * (16.0 - loads.double()).sign())
