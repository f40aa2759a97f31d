"""Layers by pattern, norms in every place, scales and softcaps: against a decoder written out in a few plain lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.blocks.connections.add import AddConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.config import ConfigError, from_dict, override, to_dict
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.ops.documents import Documents
from tests.redraw import redraw

VOCAB, WIDTH = 40, 16
ATTENTION, WIDE = (
    AttentionConfig(num_heads=2, num_kv_heads=1),
    AttentionConfig(num_heads=4, num_kv_heads=2, head_size=8),
)
SMALL, LARGE = SwiGLUConfig(hidden=12), SwiGLUConfig(hidden=20)
SCALES = {"embedding_scale": 3.0, "connection": AddConfig(scale=0.3), "logit_scale": 0.25, "logit_softcap": 2.0}


def config(**changes: Any) -> DecoderConfig:
    values: dict[str, Any] = {"vocab_size": VOCAB, "width": WIDTH, "depth": 4, "mixer": ATTENTION, "ffn": SMALL}
    return DecoderConfig(**(values | changes))


def built(described: DecoderConfig) -> Decoder:
    """In fp64, with every weight and scale away from where it starts."""
    return redraw(described.build())


def plain_norm(x: Tensor, scale: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale


def plain_logits(model: Decoder, tokens: Tensor, docs: Documents) -> Tensor:
    """What the configuration says, in the order in which one would write it down."""
    described = model.config
    weights = dict(model.named_parameters())
    pre, post = described.norm_placement in {"pre", "sandwich"}, described.norm_placement in {"post", "sandwich"}

    def through(name: str, x: Tensor, wanted: bool) -> Tensor:
        return plain_norm(x, weights[f"{name}.scale"]) if wanted else x

    x = weights["embedding.weight"][tokens] * described.embedding_scale
    for index, layer in enumerate(model.layers):
        prefix, start = f"layers.{index}", x
        if layer.mixer is not None:
            y = layer.mixer(through(f"{prefix}.norm_mixer", x, pre), docs)
            x = x + described.connection.scale * through(f"{prefix}.norm_mixer_out", y, post)
        if layer.ffn is not None:
            if described.arrangement == "parallel" and layer.mixer is not None:
                normed = through(f"{prefix}.norm_mixer", start, pre)
            else:
                normed = through(f"{prefix}.norm_ffn", x, pre)
            x = x + described.connection.scale * through(f"{prefix}.norm_ffn_out", layer.ffn(normed), post)
    x = plain_norm(x, weights["norm.scale"])
    logits = described.logit_scale * x @ weights["embedding.weight" if described.tied else "head.weight"].t()
    cap = described.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_placement": "post"},
        {"norm_placement": "sandwich", "tied": True},
        {"arrangement": "parallel"},
        {"arrangement": "parallel", "norm_placement": "sandwich"},
        SCALES,
        {"other_mixers": {"w": WIDE}, "mixer_pattern": "wm", "other_ffns": {"l": LARGE}, "ffn_pattern": "fffl"},
        {"mixer_pattern": "m-", "ffn_pattern": "-f", "connection": AddConfig(scale=0.5)},
        {"mixer_pattern": "m-", "arrangement": "parallel"},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_are_those_of_the_plain_decoder(changes: dict[str, Any]) -> None:
    model = built(config(z_loss=0.01, **changes))
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    docs = Documents(torch.tensor([[0] * 5 + [1] * 7, [0] * 12]), 12)
    targets = tokens.roll(-1, 1)
    logits = plain_logits(model, tokens, docs)
    assert torch.allclose(model.logits(model(tokens, docs)), logits, rtol=0, atol=1e-12)
    total = logits.logsumexp(-1)
    nll = (total - logits.gather(-1, targets[..., None])[..., 0]).sum()
    wanted = torch.autograd.grad(nll + 0.01 * total.square().sum(), list(model.parameters()))
    objective, sums = model.loss(tokens, targets, docs)
    found = torch.autograd.grad(objective, list(model.parameters()))
    assert sums.nll.item() == pytest.approx(nll.item(), rel=1e-12)
    for (name, _), ours, theirs in zip(model.named_parameters(), found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11), name
    assert all(gradient.abs().max() > 0 for gradient in found)


def test_stepping_over_patterns_equals_one_pass() -> None:
    model = built(config(other_mixers={"w": WIDE}, mixer_pattern="w-mm", norm_placement="sandwich"))
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = model(tokens, Documents(None, 9))
    states = model.new_states(2, 9, torch.float64)
    parts = [
        model(tokens[:, start:stop], Documents(None, stop - start, start=start), states)
        for start, stop in ((0, 4), (4, 5), (5, 9))
    ]
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


def test_a_configuration_with_patterns_comes_back_from_json() -> None:
    described = config(other_mixers={"w": WIDE}, mixer_pattern="wm")
    assert from_dict(to_dict(described), DecoderConfig) == described
    changed = override(described, ["other_mixers.w.num_heads=8"])
    assert changed.other_mixers["w"].num_heads == 8  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"other_mixers\.w\.num_kv_heads: 3"):
        override(described, ["other_mixers.w.num_kv_heads=3"])


def test_in_short_keeps_one_layer_of_each_kind() -> None:
    described = config(
        depth=12,
        other_mixers={"w": WIDE},
        mixer_pattern="wwwm",
        other_ffns={"l": LARGE},
        ffn_pattern="l" * 3 + "f" * 9,
    )
    short = described.in_short(1)
    assert (short.mixer_pattern, short.ffn_pattern, short.depth) == ("wmw", "lff", 3)
    assert described.in_short(4).depth == 6
    built(short)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config(mixer_pattern="mmm"), "mixer_pattern: 'mmm': has 3 letters, which must divide depth 4"),
        (lambda: config(mixer_pattern="mw"), "mixer_pattern: 'mw': has the letter w, which other_mixers does not"),
        (lambda: config(other_mixers={"w": WIDE}), "has no w, so other_mixers.w would be nowhere"),
        (lambda: config(other_mixers={"m": WIDE}), "other_mixers: 'm': must be one letter other than m"),
        (lambda: config(other_mixers={"-": WIDE}, mixer_pattern="-m"), "must be one letter other than m"),
        (lambda: config(mixer_pattern="m-", ffn_pattern="f-"), "leaves layer 1 without mixer and network"),
        (lambda: config(arrangement="parallel", norm_placement="post"), "norm_placement: 'post': needs"),
        (lambda: config(mixer_pattern=""), "mixer_pattern: '': "),
    ],
)
def test_patterns_that_do_not_fit_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
