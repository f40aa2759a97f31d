"""Latent attention: the absorbed form is the naive one, decoding touches the latent alone, layouts keep the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from surefoot.blocks.mixers.mla import MLA, MLAConfig
from surefoot.blocks.rope import YarnScaling
from surefoot.config import ConfigError, from_dict, to_dict
from surefoot.dist.pool import Pool
from surefoot.infer.states import stored_bytes
from surefoot.ops.attention import attend_plain
from surefoot.ops.documents import Documents
from surefoot.parallel.apply import check
from surefoot.parallel.plan import Plan
from tests.parallel.parity import LENGTH, assert_same_as_one_process, decoder
from tests.redraw import redraw

WIDTH = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "low rank": {"q_latent_size": 10, "rope": "half"},
    "yarn": {"rope_scaling": YarnScaling(factor=4.0, original_length=16), "scale": 0.4},
}


def config(**changes: Any) -> MLAConfig:
    sizes = {"num_heads": 4, "latent_size": 12, "head_size": 6, "rope_size": 4, "value_size": 5, "rope_theta": 20.0}
    return MLAConfig(**(sizes | changes))


def built(**changes: Any) -> MLA:
    """fp64, and every weight drawn."""
    return redraw(config(**changes).build(width=WIDTH, output_scale=1.0), std=0.5)


def x(length: int) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def by_hand(mixer: MLA, inputs: Tensor, ids: list[int]) -> Tensor:
    """One query of one head at a time, as the paper's equations say."""
    sizes = mixer.config
    heads, nope, turning, latent = sizes.num_heads, sizes.head_size, sizes.rope_size, sizes.latent_size
    scaling = sizes.rope_scaling
    theta = torch.tensor([sizes.rope_theta ** (-2 * i / turning) for i in range(turning // 2)], dtype=torch.float64)
    theta, amplitude = (theta, 1.0) if scaling is None else (scaling.stretch(theta, 20.0), scaling.tables_amplitude)

    def turned(vector: Tensor, position: int) -> Tensor:
        order = slice(None) if sizes.rope == "interleaved" else [0, 2, 1, 3]  # half-split pairs side by side
        pairs = torch.view_as_complex(vector[order].reshape(-1, 2)) * torch.polar(
            torch.full_like(theta, amplitude), theta * position
        )
        return torch.view_as_real(pairs).flatten()  # a common order of queries and keys changes no product

    def normed(vector: Tensor, norm: Any) -> Tensor:
        return vector / (vector.square().mean() + norm.eps).sqrt() * norm.scale

    rows = []
    for row in inputs:
        outputs = []
        for i in range(len(row)):
            positions = [j for j in range(i + 1) if ids[j] == ids[i]]
            first, values = positions[0], []
            for head in range(heads):
                own = mixer.wq[head * (nope + turning) : (head + 1) * (nope + turning)]
                query = own @ (row[i] if mixer.norm_q is None else normed(mixer.wq_down @ row[i], mixer.norm_q))
                q = torch.cat((query[:nope], turned(query[nope:], i - first)))
                scores, contents = [], []
                for j in positions:
                    c = normed(mixer.w_down @ row[j], mixer.norm_c)
                    assert c.shape == (latent,)
                    k = torch.cat((mixer.up_k.by_head(c.dtype)[head] @ c, turned(mixer.w_kr @ row[j], j - first)))
                    scores.append(q @ k * (sizes.scale or (nope + turning) ** -0.5))
                    contents.append(mixer.up_v.by_head(c.dtype)[head] @ c)
                values.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(contents))
            outputs.append(mixer.out.weight @ torch.cat(values))
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_what_the_paper_says(options: dict[str, Any]) -> None:
    mixer, inputs, ids = built(**options), x(9), [0, 0, 0, 0, 1, 1, 1, 1, 1]
    found = mixer(inputs, Documents(torch.tensor([ids, ids]), 9))
    expected = by_hand(mixer, inputs, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    names = [name for name, _ in mixer.named_parameters()]
    for name, ours, theirs in zip(
        names,
        torch.autograd.grad(found.square().sum(), list(mixer.parameters())),
        torch.autograd.grad(expected.square().sum(), list(mixer.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_absorbed_is_naive(options: dict[str, Any]) -> None:
    mixer, docs = built(**options), Documents(None, 7, start=4)
    generator = torch.Generator().manual_seed(3)
    q, qr, latent = (torch.randn(2, *shape, generator=generator).double() for shape in ((7, 4, 6), (7, 4, 4), (11, 16)))
    torch.testing.assert_close(
        mixer.absorbed(q, qr, latent, docs), mixer.naive(q, qr, latent, docs), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("cuts", [(1,) * 14, (14,), (9, 1, 1, 1, 1, 1), (5, 2, 7), (1, 13)])
def test_stepping_equals_one_pass(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    mixer, inputs = built(**options), x(14)
    whole = mixer(inputs, Documents(None, 14))
    state, parts = mixer.new_state(2, 14, torch.float64), []
    with torch.no_grad():
        for piece in inputs.split(cuts, 1):
            parts.append(mixer(piece, Documents(None, piece.shape[1], start=state.length), state))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    assert stored_bytes(state) == 2 * mixer.state_bytes(14, torch.float64) == 2 * 14 * (12 + 4) * 8


def test_deepseek_v3_holds_the_published_bytes_a_token() -> None:
    """61 layers x (512 + 64) x 2 bytes (Zhao et al., 2025, table 1: 70.272 KB)."""
    sizes = MLAConfig(num_heads=128, latent_size=512, q_latent_size=1536, head_size=128, rope_size=64, value_size=128)
    with torch.device("meta"):
        mixer = sizes.build(width=7168, output_scale=1.0)
    assert 61 * mixer.state_bytes(1, torch.bfloat16) == 70_272
    assert mixer.decode_bytes(1000, torch.bfloat16) == 1000 * 1152


def test_decoding_makes_no_keys_or_values() -> None:
    """Its products are those counted for it, and far fewer than expanding what is kept."""
    length, mixer = 40, built()
    state = mixer.new_state(1, length, torch.float64)
    mixer.attend = attend_plain
    with torch.no_grad():
        mixer(x(length - 1)[:1], Documents(None, length - 1), state)
        with FlopCounterMode(display=False) as counter:
            mixer(x(1)[:1], Documents(None, 1, start=length - 1), state)
    assert counter.get_total_flops() == mixer.decode_flops(length)
    expanding = 2 * 12 * 4 * (6 + 5) * length
    assert mixer.decode_flops(length) < expanding
    with FlopCounterMode(display=False) as counter:
        mixer(x(length)[:1], Documents(None, length))
    assert counter.get_total_flops() == mixer.flops(length, causal=False) * length


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor=2),
        Plan(tensor=4, shard=2, zero=3),
        Plan(shard=2, zero=1),
        *(Plan(context=2, context_kind=kind, tensor=2) for kind in ("gather", "ulysses", "ring")),
    ],
    ids=Plan.describe,
)
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan) -> None:
    mixers = {"mixer": config(q_latent_size=10), "other_mixers": {"s": config()}, "mixer_pattern": "ms"}
    assert_same_as_one_process(pool, plan, decoder(depth=2).model_copy(update=mixers), num_micro=2)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(tensor=3), "must divide 4 heads of layers.0.mixer"),
        (Plan(context=3, context_kind="ulysses"), "must divide 4 heads of layers.0.mixer"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(plan: Plan, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(plan, decoder().model_copy(update={"mixer": config()}), LENGTH)
    assert said in str(caught.value)


def test_its_description_survives_writing() -> None:
    assert from_dict(to_dict(config(**OPTIONS["yarn"])), MLAConfig) == config(**OPTIONS["yarn"])
