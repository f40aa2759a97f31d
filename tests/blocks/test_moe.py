"""Routed feed-forward networks against a loop over tokens, and what routing must not depend on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from surefoot.blocks.base import RouterConfig
from surefoot.blocks.ffn.moe import MoE, MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.routers.sigmoid import Sigmoid, SigmoidConfig
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.config import ConfigError
from surefoot.infer.engine import generate
from surefoot.infer.sampling import SamplingConfig
from surefoot.models.count import build_meta, count_parameters, flops_per_token
from surefoot.models.decoder import DecoderConfig
from surefoot.models.initialise import initialise, materialise, named_states
from surefoot.models.routing import balance, drain, statistics, take_auxiliary
from surefoot.ops.attention import attend_plain
from surefoot.ops.documents import Documents
from tests.redraw import redraw

WIDTH, VOCAB = 12, 40
ROUTERS: dict[str, RouterConfig] = {
    "chosen": TopKConfig(balance_loss=0.3, z_loss=0.2),
    "all": TopKConfig(softmax_over="all", balance_loss=0.3, z_loss=0.2),
    "sigmoid": SigmoidConfig(balance_loss=0.3, scale=2.5),
}


def moe(router: RouterConfig, seed: int = 0, **changes: int) -> MoE:
    values: dict[str, int] = {"num_experts": 6, "top_k": 2, "hidden": 10} | changes
    block = MoEConfig(router=router, **values).build(width=WIDTH, output_scale=1.0).double()
    initialise(block, seed)
    if isinstance(block.router, Sigmoid):
        block.router.bias_E.copy_(torch.linspace(-0.2, 0.2, values["num_experts"]))
    return block


def decoder(router: RouterConfig, **changes: object) -> DecoderConfig:
    values: dict[str, object] = {
        "vocab_size": VOCAB,
        "width": 16,
        "depth": 2,
        "mixer": AttentionConfig(num_heads=2, num_kv_heads=1),
        "ffn": MoEConfig(num_experts=6, top_k=2, hidden=10, shared_hidden=6, router=router),
    }
    return DecoderConfig(**(values | changes))


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def by_token(block: MoE, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
    """Each token by itself: scores, the two largest, its experts one after the other; and the losses by definition."""
    config, weight, losses, rows = block.config.router, block.router.weight, [], []
    num_experts, top_k = block.config.num_experts, block.config.top_k
    for sequence in x_BLD:
        chosen_by, all_scores = torch.zeros(num_experts, dtype=torch.float64), []
        for x in sequence:
            logits = torch.stack([row @ x for row in weight])
            if isinstance(config, SigmoidConfig):
                scores = 1 / (1 + torch.exp(-logits))
                assert isinstance(block.router, Sigmoid)
                order = sorted(range(num_experts), key=lambda e: -(scores[e] + block.router.bias_E[e]).item())
                chosen = order[:top_k]
                weights = config.scale * scores[chosen] / scores[chosen].sum()
                all_scores.append(scores / scores.sum())
            else:
                assert isinstance(config, TopKConfig)
                scores = torch.exp(logits) / torch.exp(logits).sum()
                chosen = sorted(range(num_experts), key=lambda e: -logits[e].item())[:top_k]
                weights = scores[chosen] / (scores[chosen].sum() if config.softmax_over == "chosen" else 1)
                all_scores.append(scores)
                losses.append(config.z_loss * torch.log(torch.exp(logits).sum()) ** 2)
            y = torch.zeros_like(x)
            for expert, share in zip(chosen, weights, strict=True):
                gate, up = block.experts.w_gate[expert] @ x, block.experts.w_up[expert] @ x
                y = y + share * (block.experts.w_down[expert] @ (gate * torch.sigmoid(gate) * up))
                chosen_by[expert] += 1
            if block.config.shared_hidden:
                gate, up = block.shared_gate @ x, block.shared_up @ x
                y = y + block.shared_down @ (gate * torch.sigmoid(gate) * up)
            rows.append(y)
        shares, means = chosen_by / chosen_by.sum(), torch.stack(all_scores).mean(0)
        losses.append(config.balance_loss * len(sequence) * num_experts * (shares * means).sum())
    return torch.stack(rows).view_as(x_BLD), torch.stack(losses).sum()


@pytest.mark.parametrize(
    ("kind", "top_k"), [("all", 1), *((kind, top_k) for kind in ROUTERS for top_k in (2, 6))], ids=str
)
@pytest.mark.parametrize("shared_hidden", [0, 7])
def test_equals_a_loop_over_tokens(kind: str, shared_hidden: int, top_k: int) -> None:
    """Outputs, auxiliary losses and every gradient, the router's included."""
    block = moe(ROUTERS[kind], shared_hidden=shared_hidden, top_k=top_k)
    x = draw(3, 5, WIDTH).requires_grad_()
    direction = draw(3, 5, WIDTH, seed=2)
    leaves = [x, *block.parameters()]
    results = []
    for run in (lambda: (block(x), take_auxiliary(block)), lambda: by_token(block, x)):
        y, auxiliary = run()
        assert auxiliary is not None
        gradients = torch.autograd.grad((y * direction).sum() + auxiliary, leaves)
        results.append((y, auxiliary, *gradients))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_tokens_do_not_see_each_other(router: RouterConfig) -> None:
    """A token's output is the same in any order and any company: alone, among all, moved to another place."""
    block, x = moe(router), draw(1, 20, WIDTH)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    y = block(x)
    torch.testing.assert_close(block(x[:, order]), y[:, order], rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.cat([block(x[:, i : i + 1]) for i in range(20)], 1), y, rtol=0, atol=1e-14)


def test_all_tokens_to_one_expert_leave_the_others_empty() -> None:
    block = moe(TopKConfig(softmax_over="all"), top_k=1)
    with torch.no_grad():
        block.router.weight.zero_()
        block.router.weight[4] = 1.0
    x = draw(2, 6, WIDTH).abs().requires_grad_()
    y = block(x)
    torch.testing.assert_close(y, by_token(block, x)[0], rtol=1e-11, atol=1e-12)
    y.sum().backward()
    take_auxiliary(block)
    assert block.router.loads_E.tolist() == [0, 0, 0, 0, 12, 0]
    assert block.experts.w_up.grad is not None
    assert [bool(gradient.any()) for gradient in block.experts.w_up.grad] == [False] * 4 + [True, False]
    found = statistics(block, drain(block), 12)
    assert (found["load_entropy"], found["max_load_share"], found["dead_experts"]) == (0.0, 1.0, 5.0)
    assert drain(block) == [0.0] * 8


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_ties_are_broken_alike_for_every_token(router: RouterConfig) -> None:
    block = moe(router, top_k=3)
    with torch.no_grad():
        block.router.weight.zero_()
        if isinstance(block.router, Sigmoid):
            block.router.bias_E.zero_()
    experts_TK = block.router(draw(9, WIDTH), 9).experts_TK
    assert (experts_TK == experts_TK[0]).all()
    assert len(set(experts_TK[0].tolist())) == 3


def test_the_router_computes_wide() -> None:
    """Logits in fp32 from bf16 activations: equal to the router fed the same numbers in fp32."""
    block = moe(TopKConfig()).float()
    x = draw(30, WIDTH).bfloat16()
    narrow, wide = block.router(x, 30), block.router(x.float(), 30)
    assert narrow.weights_TK.dtype is torch.float32
    assert torch.equal(narrow.experts_TK, wide.experts_TK)
    assert torch.equal(narrow.weights_TK, wide.weights_TK)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_gradients_do_not_depend_on_micro_batches(router: RouterConfig) -> None:
    """At sequence scope, with ragged targets; at micro-batch scope they do."""
    model = redraw(decoder(router).build())
    ids, targets = tokens(4, 8), tokens(4, 8, seed=1)
    targets[0, 3:] = -100

    def gradients(size: int) -> list[Tensor]:
        model.zero_grad()
        for part, wanted in zip(ids.split(size), targets.split(size), strict=True):
            model.loss(part, wanted, Documents(None, 8))[0].backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for found, wanted in zip(gradients(1), gradients(4), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    loads = drain(model)
    assert sum(loads) > 0
    for layer in model.layers:
        layer.ffn.router.config = router.model_copy(update={"scope": "micro_batch"})
    pairs = zip(gradients(1), gradients(4), strict=True)
    assert max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs) > 1e-6


def test_auxiliary_losses_reach_the_objective_once() -> None:
    model = redraw(decoder(ROUTERS["chosen"]).build())
    ids = tokens(2, 8)
    objective, sums = model.loss(ids, ids, Documents(None, 8))
    drained = drain(model)
    auxiliary = statistics(model, drained, 1)["auxiliary_loss"]
    assert auxiliary > 0
    assert objective.item() == pytest.approx(float(sums.nll + model.config.z_loss * sums.z) + auxiliary, rel=1e-9)
    assert take_auxiliary(model) is None
    with torch.no_grad():
        model.loss(ids, ids, Documents(None, 8))
    assert set(drain(model)) == {0.0}


def test_the_bias_follows_the_loads_of_a_whole_step() -> None:
    """b += rate sign(mean - load); it decides who is chosen, and is in no weight and no gradient."""
    block = moe(SigmoidConfig(bias_rate=0.01))
    router = block.router
    assert isinstance(router, Sigmoid)
    before = router.bias_E.clone()
    x = draw(2, 9, WIDTH)
    for part in x:  # two micro-batches
        block(part[None])
        take_auxiliary(block)
    sums = drain(block)
    loads = torch.bincount(router(x.flatten(0, 1), 9).experts_TK.flatten(), minlength=6)
    assert sums[:-1] == [*loads.tolist(), 0.0]
    balance(block, sums)
    torch.testing.assert_close(router.bias_E - before, 0.01 * (6.0 - loads.double()).sign())
    routing = router(x.flatten(0, 1), 9)
    torch.testing.assert_close(routing.weights_TK.sum(1), torch.ones(18, dtype=torch.float64))
    router.bias_E += 3.0  # the same for all: nothing changes
    assert torch.equal(router(x.flatten(0, 1), 9).weights_TK, routing.weights_TK)
    assert not router.bias_E.requires_grad


def test_the_bias_evens_out_skewed_loads() -> None:
    block = moe(SigmoidConfig(bias_rate=0.01, balance_loss=0.0), num_experts=8)
    with torch.no_grad():
        for _, owner, name in named_states(block):
            getattr(owner, name).zero_()
    x = draw(1, 512, WIDTH) + 0.7
    peaks = []
    for _ in range(300):
        block(x)
        take_auxiliary(block)
        sums = drain(block)
        peaks.append(statistics(block, sums, 512)["max_load_share"] * 8)
        balance(block, sums)
    assert peaks[0] > 1.6
    assert peaks[-1] < 1.25


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_flops_and_parameters_are_those_of_the_experts_met(router: RouterConfig) -> None:
    config, length, batch = decoder(router, other_ffns={"o": SwiGLUConfig(hidden=20)}, ffn_pattern="of"), 24, 3
    model = config.build()
    initialise(model, 0)
    for layer in model.layers:
        layer.mixer.attend = attend_plain
    ids = tokens(batch, length)
    with FlopCounterMode(display=False) as counter:
        model.loss(ids, ids, Documents(None, length))[0].backward()
    assert counter.get_total_flops() == flops_per_token(model, length)["full"] * batch * length
    counts = count_parameters(build_meta(config))
    assert counts["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert counts["total"] - counts["active"] == 4 * 3 * 16 * 10


def test_the_pattern_gives_each_layer_its_network() -> None:
    dense, routed = SwiGLUConfig(hidden=20), decoder(TopKConfig()).ffn

    def kinds(config: DecoderConfig) -> list[bool]:
        return [isinstance(layer.ffn, MoE) for layer in config.build().layers]

    assert kinds(decoder(TopKConfig(), depth=4, other_ffns={"o": dense}, ffn_pattern="offf")) == [
        False,
        True,
        True,
        True,
    ]
    assert (
        kinds(decoder(TopKConfig(), depth=4, ffn=dense, other_ffns={"o": routed}, ffn_pattern="fo"))
        == [False, True] * 2
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoEConfig(num_experts=2, top_k=3, hidden=4), "top_k: 3: must be at most num_experts 2"),
        (lambda: MoEConfig(num_experts=2, top_k=1, hidden=4), "top_k: 1: gives every choice weight 1"),
        (lambda: MoEConfig(num_experts=2, top_k=1, hidden=4, router=SigmoidConfig()), "gives every choice one weight"),
        (
            lambda: decoder(TopKConfig(), ffn_pattern="fff"),
            "ffn_pattern: 'fff': has 3 letters, which must divide depth 2",
        ),
        (
            lambda: decoder(TopKConfig(), ffn_pattern="of"),
            "ffn_pattern: 'of': has the letter o, which other_ffns does not",
        ),
        (
            lambda: decoder(TopKConfig(), other_ffns={"o": SwiGLUConfig(hidden=4)}),
            "has no o, so other_ffns.o would be nowhere",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_initial_weights_have_the_scale_of_their_fan_in() -> None:
    config = MoEConfig(num_experts=8, top_k=2, hidden=64, router=SigmoidConfig())
    with torch.device("meta"):
        block = config.build(width=32, output_scale=0.5)
    materialise(block, torch.device("cpu"))
    initialise(block, 0)
    assert block.experts.w_up.std().item() == pytest.approx(32**-0.5, rel=0.05)
    assert block.experts.w_down.std().item() == pytest.approx(0.5 * 64**-0.5, rel=0.05)
    assert not torch.equal(block.experts.w_up[0], block.experts.w_up[1])
    assert all(not buffer.any() for buffer in block.buffers())


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_a_decoder_of_experts_is_causal_and_isolates_documents(router: RouterConfig) -> None:
    model, ids = redraw(decoder(router).build()), tokens(1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % VOCAB
    before, after = (model(x, Documents(documents, 12)) for x in (ids, changed))
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-14)
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()
    alone = model(ids[:, 5:], Documents(None, 7))
    torch.testing.assert_close(before[:, 5:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_generation_with_a_cache_equals_generation_without(router: RouterConfig) -> None:
    model = redraw(decoder(router).build())
    choose = SamplingConfig(temperature=1.0, seed=4)
    runs = [
        list(generate(model, [1, 2, 3], 20, choose.build(), dtype=torch.float64, cached=cached))
        for cached in (True, False)
    ]
    assert runs[0] == runs[1]


def test_statistics_of_even_loads() -> None:
    block = moe(TopKConfig())
    found = statistics(block, [2.0] * 6 + [3.0, 3.0], 6)
    assert found["load_entropy"] == pytest.approx(1.0)
    assert math.isclose(found["max_load_share"], 1 / 6)
    assert (found["dead_experts"], found["dropped_share"], found["auxiliary_loss"]) == (0.0, 0.25, 0.5)
