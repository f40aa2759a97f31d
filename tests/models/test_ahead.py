"""Predicting the token after the next: the equations, documents, what is reported, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from surefoot.blocks.connections.hyper import HyperConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.models.count import build_meta, count_parameters, flops_per_token
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.ops.documents import Documents
from surefoot.parallel.apply import check
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from surefoot.planner.serving import Serving
from tests.parallel.parity import LENGTH, assert_same_as_one_process, decoder, ragged_batch
from tests.redraw import redraw

WEIGHT = 0.3


def config(**changes: Any) -> DecoderConfig:
    return DecoderConfig(**(dict(decoder(depth=2)) | {"ahead_weight": WEIGHT, "z_loss": 0.0} | changes))


def built(**changes: Any) -> Decoder:
    return redraw(config(**changes).build())


def batch(num: int = 2) -> tuple[Tensor, Tensor, Documents]:
    """Texts: a target is the next token, but at the end of a document and where none is wanted."""
    tokens_BL, drawn_BL, ids_BL = ragged_batch(61)
    targets_BL = tokens_BL.roll(-1, 1)
    targets_BL[:, -1] = tokens_BL[:, 0]
    targets_BL[:, :-1][ids_BL[:, 1:] != ids_BL[:, :-1]] = -100
    targets_BL[drawn_BL < 0] = -100
    return tokens_BL[-num:], targets_BL[-num:], Documents(ids_BL[-num:], LENGTH)


def by_hand(model: Decoder, tokens_BL: Tensor, targets_BL: Tensor, docs: Documents) -> Tensor:
    """The second loss, one token's cross-entropy after the other."""
    ahead, total = model.ahead, torch.zeros((), dtype=torch.float64)
    assert ahead is not None
    assert docs.ids_BL is not None

    def normed(x: Tensor, norm: Any) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.scale

    hidden_BLD = normed(model(tokens_BL, docs), ahead.norm_hidden)
    embedded_BLD = normed(model.embedding.weight[tokens_BL], ahead.norm_embedding)
    embedded_BLD = torch.cat((embedded_BLD[:, 1:], embedded_BLD[:, :1]), 1)
    joined_BLD = torch.cat((hidden_BLD, embedded_BLD), -1) @ ahead.join.weight.mT
    out_BLD = normed(ahead.layer(joined_BLD, docs)[0], ahead.norm_out)
    for row, ids in enumerate(docs.ids_BL.tolist()):
        for i in range(LENGTH - 1):
            if ids[i] == ids[i + 1] and targets_BL[row, i + 1] >= 0:
                logits = model.head.weight @ out_BLD[row, i]
                total = total + F.cross_entropy(logits[None], targets_BL[row, i + 1][None], reduction="sum")
    return total


def test_it_is_what_the_paper_says() -> None:
    model = built()
    tokens_BL, targets_BL, docs = batch()
    objective, sums = model.loss(tokens_BL, targets_BL, docs)
    plain, plain_sums = redraw(config(ahead_weight=0.0).build()).loss(tokens_BL, targets_BL, docs)
    expected = plain + WEIGHT * by_hand(model, tokens_BL, targets_BL, docs)
    torch.testing.assert_close(objective, expected, rtol=1e-12, atol=0)
    assert torch.equal(sums.nll, plain_sums.nll)
    wanted = torch.autograd.grad(
        model.head.loss(model(tokens_BL, docs), targets_BL)[0] + WEIGHT * by_hand(model, tokens_BL, targets_BL, docs),
        list(model.parameters()),
    )
    found = torch.autograd.grad(objective, list(model.parameters()))
    for (name, _), ours, theirs in zip(model.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=name)


def test_it_starts_as_the_model_without_it_and_decides_no_logits() -> None:
    """Where nothing is trained it does not run, and the objective is that of the next token."""
    model, (tokens_BL, targets_BL, docs) = built(), batch()
    with torch.no_grad():
        objective, sums = model.loss(tokens_BL, targets_BL, docs)
    assert torch.equal(objective, sums.nll)
    plain = redraw(config(ahead_weight=0.0).build())
    assert torch.equal(model(tokens_BL, docs), plain(tokens_BL, docs))


def test_no_gradient_crosses_documents() -> None:
    model, (tokens_BL, _, _) = built(), batch(1)
    ids_BL = torch.tensor([[0] * 20 + [1] * 28])
    targets_BL = torch.randint(61, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    targets_BL[:, 20:] = -100
    tokens_BL = torch.cat((torch.arange(20), torch.arange(28) + 30))[None]
    objective, _ = model.loss(tokens_BL, targets_BL, Documents(ids_BL, LENGTH))
    (grad_VD,) = torch.autograd.grad(objective, model.embedding.weight)
    assert grad_VD[:20].any(-1).all()
    assert not grad_VD[30:].any()


def test_its_flops_and_weights_are_counted_where_it_trains_and_not_where_it_serves() -> None:
    model, (tokens_BL, targets_BL, _) = built().float(), batch()
    for layer in (*model.layers, model.ahead.layer):
        layer.mixer.use_plain()
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens_BL, targets_BL, Documents(None, LENGTH))[0].backward()
    assert counter.get_total_flops() == flops_per_token(model, LENGTH)["full"] * tokens_BL.numel()
    more = count_parameters(model)["total"] - count_parameters(build_meta(config(ahead_weight=0.0)))["total"]
    assert more == sum(weight.numel() for weight in model.ahead.parameters())
    with_it, without = (Serving(config(ahead_weight=weight), torch.bfloat16) for weight in (WEIGHT, 0.0))
    assert with_it.weight_bytes == without.weight_bytes


PLANS = [
    Plan(tensor=2),
    Plan(tensor=2, shard=2, zero=1),
    Plan(shard=2, zero=2),
    Plan(shard=2, zero=3, tensor=2),
    Plan(replicate=2, recompute=RecomputeConfig(mode="full")),
]


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan, tied: bool) -> None:
    assert_same_as_one_process(pool, plan, config(tied=tied, z_loss=0.01), num_micro=2)


@pytest.mark.parametrize(
    ("changes", "plan"),
    [
        ({"ffn": MoEConfig(num_experts=4, top_k=2, hidden=12)}, Plan(expert=2)),
        ({"connection": HyperConfig(streams=2), "norm_placement": "post"}, Plan(tensor=2)),
    ],
    ids=["experts", "streams"],
)
def test_other_layers_too(pool: Pool, changes: dict[str, Any], plan: Plan) -> None:
    assert_same_as_one_process(pool, plan, config(**changes), num_micro=2)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(context=2), "leaves the token after a chunk's last on another rank"),
    ],
)
def test_layouts_that_part_what_it_needs_are_refused(plan: Plan, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(plan, config(), LENGTH)


def test_a_last_layer_that_reads_others_keys_is_refused() -> None:
    keys = {"num_heads": 4, "num_kv_heads": 2}
    with pytest.raises(ConfigError, match=r"ahead_weight: 0\.3: copies the last layer, which reads keys"):
        config(
            mixer=AttentionConfig(**keys, leaves="keys"),
            other_mixers={"r": AttentionConfig(**keys, reads="keys")},
            mixer_pattern="mr",
        )
