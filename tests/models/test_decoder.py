"""The decoder: initialisation by name, counts against measurement, packing isolation, stepping, accumulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.config import ConfigError
from surefoot.models.count import build_meta, count_parameters, flops_per_token
from surefoot.models.decoder import DecoderConfig
from surefoot.models.initialise import initialise
from surefoot.models.presets import SIZES, decoder
from surefoot.ops.attention import attend_plain
from surefoot.ops.documents import Documents
from surefoot.ops.loss import IGNORED
from tests.redraw import redraw

VOCAB = 50


def config(**changes: object) -> DecoderConfig:
    values: dict[str, object] = {
        "vocab_size": VOCAB,
        "width": 32,
        "depth": 2,
        "mixer": AttentionConfig(num_heads=4, num_kv_heads=2),
        "ffn": SwiGLUConfig(hidden=48),
    }
    return DecoderConfig(**(values | changes))


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_counts_equal_the_built_model(tied: bool) -> None:
    model = config(tied=tied).build()
    counts = count_parameters(model)
    assert counts["total"] == sum(parameter.numel() for parameter in model.parameters())
    head = VOCAB * 32
    assert counts["non_embedding"] == counts["total"] - head * (1 if tied else 2)
    assert counts["matmul"] == sum(p.numel() for p in model.parameters() if p.dim() > 1) - (0 if tied else head)
    assert count_parameters(build_meta(config(tied=tied))) == counts


@pytest.mark.parametrize("tied", [False, True])
def test_flops_equal_measured_flops(tied: bool) -> None:
    """Counted by torch over the plain attention, whose products it sees one by one."""
    length, batch = 24, 3
    model = config(tied=tied).build()
    initialise(model, 0)
    for layer in model.layers:
        layer.mixer.attend = attend_plain
    ids = tokens(batch, length)
    with FlopCounterMode(display=False) as counter:
        objective, _ = model.loss(ids, ids, Documents(None, length))
        objective.backward()
    assert counter.get_total_flops() == flops_per_token(model, length)["full"] * batch * length


def test_causal_flops_leave_out_exactly_the_masked_scores() -> None:
    length = 16
    counts = flops_per_token(build_meta(config()), length)
    masked = length * (length - 1) // 2
    assert (counts["full"] - counts["causal"]) * length == 3 * 2 * 4 * 32 * masked


def test_state_bytes_equal_the_buffers() -> None:
    model = config().build()
    for dtype in (torch.float32, torch.bfloat16):
        states = model.new_states(1, 40, dtype)
        held = sum(buffer.untyped_storage().nbytes() for state in states for buffer in state.buffers)
        assert held == sum(layer.mixer.state_bytes(40, dtype) for layer in model.layers)


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    shallow, deep = config(depth=1).build(), config(depth=3).build()
    for model in (shallow, deep):
        initialise(model, seed=5)
    assert torch.equal(shallow.layers[0].mixer.wq, deep.layers[0].mixer.wq)
    assert not torch.equal(deep.layers[0].mixer.wq, deep.layers[1].mixer.wq)
    initialise(shallow, seed=6)
    assert not torch.equal(shallow.layers[0].mixer.wq, deep.layers[0].mixer.wq)


@pytest.mark.parametrize("residual_init", ["scaled", "zero"])
def test_initial_scales(residual_init: str) -> None:
    model = config(width=128, depth=4, residual_init=residual_init).build()
    initialise(model, 0)
    layer = model.layers[0]
    wanted = 0.0 if residual_init == "zero" else (2 * 4 * 128) ** -0.5
    assert layer.mixer.wo.std().item() == pytest.approx(wanted, rel=0.05)
    assert layer.mixer.wq.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert (layer.norm_ffn.scale == 1).all()


def test_meta_init_fills_every_weight() -> None:
    model = build_meta(config()).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    initialise(model, 0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert list(model.buffers()) == []


def test_a_parameter_without_axes_is_refused() -> None:
    model = config().build()
    model.register_parameter("stray", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(TypeError, match="stray names no axes"):
        initialise(model, 0)


def test_outputs_see_only_the_past() -> None:
    model = redraw(config().build())
    ids = tokens(1, 12)
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % VOCAB
    docs = Documents(None, 12)
    before, after = model(ids, docs), model(changed, docs)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_packed_neighbours_are_untouched(dtype: torch.dtype) -> None:
    """Perturbing one document changes no output and no gradient of its neighbours: exactly 0."""
    model = redraw(config().build())
    if dtype is not torch.float64:
        model.float()
    ids = tokens(2, 16)
    documents = torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * 16], dtype=torch.int32)
    targets = tokens(2, 16, seed=1)
    changed = ids.clone()
    changed[0, 5:11] = (changed[0, 5:11] + 7) % VOCAB

    def run(batch: Tensor, wanted: Tensor) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        docs = Documents(documents, 16)
        hidden = model(batch, docs, dtype=dtype)
        model.loss(batch, wanted, docs, dtype=dtype)[0].backward()
        return hidden.detach(), [
            parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
        ]

    elsewhere = targets.clone()
    elsewhere[0, 5:11] = IGNORED  # only the neighbours ask for gradients
    (hidden, gradients), (hidden_changed, gradients_changed) = run(ids, elsewhere), run(changed, elsewhere)
    assert torch.equal(hidden[0, :5], hidden_changed[0, :5])
    assert torch.equal(hidden[0, 11:], hidden_changed[0, 11:])
    assert torch.equal(hidden[1], hidden_changed[1])
    assert (hidden[0, 5:11] != hidden_changed[0, 5:11]).any(-1).all()
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_changed, strict=True))


def test_a_packed_document_equals_the_document_alone() -> None:
    model = redraw(config().build())
    ids = tokens(1, 16)
    packed = model(ids, Documents(torch.tensor([[0] * 5 + [1] * 11]), 16))
    alone = model(ids[:, 5:], Documents(None, 11))
    torch.testing.assert_close(packed[:, 5:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("split", [1, 4, 11])
def test_stepping_with_a_state_equals_one_pass(split: int) -> None:
    model = redraw(config().build())
    ids = tokens(2, 12)
    whole = model(ids, Documents(None, 12))
    states = model.new_states(2, 12, torch.float64)
    parts = [model(ids[:, :split], Documents(None, split), states)]
    parts += [model(ids[:, i : i + 1], Documents(None, 1, start=i), states) for i in range(split, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="room for 12 positions"):
        model(ids[:, :1], Documents(None, 1, start=12), states)


@pytest.mark.parametrize("change", [{"norm_mixer": 1.5}, {"norm_ffn": 1.5}, {"norm": 1.5}])
def test_every_norm_matters(change: dict[str, float]) -> None:
    model = redraw(config().build())
    ids, docs = tokens(1, 8), Documents(None, 8)
    before = model(ids, docs)
    with torch.no_grad():
        for name, factor in change.items():
            (model.norm if name == "norm" else getattr(model.layers[0], name)).scale.mul_(factor)
    assert not torch.allclose(model(ids, docs), before)


@pytest.mark.parametrize("name", SIZES)
def test_preset_sizes_are_what_their_names_say(name: str) -> None:
    total = count_parameters(build_meta(decoder(name, vocab_size=256 if name == "1m" else 4096)))["total"]
    named = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert 0.7 < total / named < 1.45


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 30}, r"DecoderConfig.width: 30: must give an even head size over 4 heads; nearest is 32"),
        ({"depth": 0}, "DecoderConfig.depth: 0: must be greater than 0"),
        ({"widht": 3}, "did you mean DecoderConfig.width"),
    ],
)
def test_bad_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**change)


def test_kv_heads_must_divide() -> None:
    with pytest.raises(ConfigError, match="num_kv_heads: 3: must divide num_heads 4"):
        AttentionConfig(num_heads=4, num_kv_heads=3)
