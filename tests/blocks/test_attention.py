"""Attention as a mixer: stepping, states, norms, gates, and rotary frequencies against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from surefoot.blocks.mixers.attention import Attention, AttentionConfig
from surefoot.blocks.rope import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling
from surefoot.config import ConfigError, from_dict, to_dict
from surefoot.infer.states import stored_bytes
from surefoot.ops.attention import attend_plain
from surefoot.ops.documents import Documents
from surefoot.ops.rope import frequencies, rope_tables, rotate, rotate_plain
from tests.redraw import redraw

WIDTH = 32
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {"qk_norm": "none"},
    "width": {"qk_norm": "width", "gate": "sigmoid", "bias": "qkv"},
    "capped": {"softcap": 2.0, "scale": 0.4, "rope": "none"},
    "window": {"window": 5, "rope": "interleaved", "rope_share": 0.5},
    "itself": {"window": 1},
    "sinks": {"window": 4, "sinks": "learned", "rope_scaling": YarnScaling(factor=4.0, original_length=8)},
    "first": {"window": 4, "keep_first": 3},
}


def config(**changes: object) -> AttentionConfig:
    return AttentionConfig(**({"num_heads": 4, "num_kv_heads": 2, "rope_theta": 20.0} | changes))  # type: ignore[arg-type]


def built(**changes: object) -> Attention:
    """fp64, and every weight drawn."""
    return redraw(config(**changes).build(width=WIDTH, output_scale=1.0), mean=0.5, std=0.5)


def x(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "cuts", [(1,) * 20, (2, 1, 3, 1, 1, 9, 3), (13, 1, 1, 1, 1, 1, 2), (20,), (4, 1, 1, 14), (3, 17)]
)
def test_stepping_equals_one_pass(options: dict[str, object], cuts: tuple[int, ...]) -> None:
    """Prefill of any length, also longer than the window, in any parts."""
    mixer, inputs = built(**options), x(20)
    whole = mixer(inputs, Documents(None, 20))
    state, parts = mixer.new_state(2, 20, torch.float64), []
    with torch.no_grad():
        for piece in inputs.split(cuts, 1):
            parts.append(mixer(piece, Documents(None, piece.shape[1], start=state.length), state))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="room for 20 positions and would hold 21"):
        mixer(inputs[:, :1], Documents(None, 1, start=20), state)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("room", [1, 3, 6, 40])
def test_a_state_holds_the_bytes_it_says(options: dict[str, object], room: int) -> None:
    mixer, held = built(**options), []
    state = mixer.new_state(1, room, torch.bfloat16)
    for length in range(room + 1):
        held.append(stored_bytes(state))
        if length < room:
            state.extend(*(torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16),) * 2)
    assert set(held) == {mixer.state_bytes(room, torch.bfloat16)}


def test_a_window_bounds_the_state() -> None:
    windowed, all_of_it = built(window=5, keep_first=2), built()
    sizes = [windowed.state_bytes(length, torch.bfloat16) for length in (3, 7, 8, 10_000)]
    assert sizes == [2 * 2 * 8 * 2 * kept for kept in (3, 7, 7, 7)]
    assert all_of_it.state_bytes(10_000, torch.bfloat16) == 2 * 2 * 8 * 2 * 10_000


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_documents_are_kept_apart(options: dict[str, object]) -> None:
    mixer, inputs = built(**options), x(16)
    packed = mixer(inputs, Documents(torch.tensor([[0] * 5 + [1] * 11] * 2), 16))
    for run in (slice(0, 5), slice(5, 16)):
        alone = mixer(inputs[:, run], Documents(None, run.stop - run.start))
        torch.testing.assert_close(packed[:, run], alone, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_weight_has_an_effect(options: dict[str, object]) -> None:
    mixer = built(**options)
    mixer(x(12), Documents(None, 12)).square().sum().backward()
    for name, weight in mixer.named_parameters():
        expects_none = options == OPTIONS["itself"] and name in {"wq", "wk", "norm_q.scale", "norm_k.scale"}
        assert (float(weight.grad.abs().max()) < 1e-12) == expects_none, name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_flops_are_those_of_the_plain_form_and_of_what_is_seen(options: dict[str, object]) -> None:
    length, mixer = 24, built(**options)
    mixer.attend = attend_plain
    with FlopCounterMode(display=False) as counter:
        mixer(x(length, 1), Documents(None, length))
    assert counter.get_total_flops() == mixer.flops(length, causal=False) * length
    num_seen = int(Documents(None, length).mask(mixer.scores.reach).sum())
    unseen = mixer.flops(length, causal=False) - mixer.flops(length, causal=True)
    assert unseen * length == pytest.approx(4 * WIDTH * (length**2 - num_seen))
    last = int(Documents(None, length).mask(mixer.scores.reach)[..., -1, :].sum())
    assert mixer.flops(length, causal=False) - mixer.decode_flops(length) == 4 * WIDTH * (length - last)


@pytest.mark.parametrize("kind", ["head", "width"])
def test_qk_norm_hides_the_size_of_queries_and_keys(kind: str) -> None:
    mixer, inputs, docs = built(qk_norm=kind, norm_eps=1e-12), x(9), Documents(None, 9)
    before = mixer(inputs, docs)
    with torch.no_grad():
        mixer.wq.mul_(10)
        mixer.wk.mul_(3)
    torch.testing.assert_close(mixer(inputs, docs), before, rtol=0, atol=1e-9)
    with torch.no_grad():
        mixer.wq[:8] *= 10
    is_same = torch.allclose(mixer(inputs, docs), before, rtol=0, atol=1e-9)
    assert is_same == (kind == "head")


def test_an_open_gate_is_none() -> None:
    mixer, inputs, docs = built(gate="sigmoid"), x(9), Documents(None, 9)
    plain = built()
    plain.load_state_dict({name: value for name, value in mixer.state_dict().items() if name != "w_gate"})
    with torch.no_grad():
        mixer.w_gate.zero_()
    torch.testing.assert_close(2 * mixer(inputs, docs), plain(inputs, docs), rtol=0, atol=1e-13)


def test_a_bias_is_added_before_the_turn() -> None:
    mixer, inputs, docs = built(bias="qkv", qk_norm="none"), x(9), Documents(None, 9)
    plain = built(qk_norm="none")
    plain.load_state_dict({name: value for name, value in mixer.state_dict().items() if name[0] != "b"})
    found = mixer(inputs, docs)
    wider = torch.cat((inputs, torch.ones(2, 9, 1).double()), -1)  # a bias is a weight of a constant input
    for name in "qkv":
        weight, bias = getattr(plain, f"w{name}"), getattr(mixer, f"b{name}")
        setattr(plain, f"w{name}", torch.nn.Parameter(torch.cat((weight, bias[:, None]), 1)))
    torch.testing.assert_close(plain(wider, docs), found, rtol=0, atol=1e-13)


# Rotary positions.


def inverse_frequencies(scaling: RopeScaling | None, size: int, theta: float) -> list[float]:
    """Pair by pair, from the papers' text."""
    found = []
    for pair in range(size // 2):
        plain = theta ** (-2 * pair / size)
        if isinstance(scaling, LinearScaling):
            plain /= scaling.factor
        elif isinstance(scaling, Llama3Scaling):
            wavelength = 2 * math.pi / plain
            if wavelength > scaling.original_length / scaling.low_factor:
                plain /= scaling.factor
            elif wavelength >= scaling.original_length / scaling.high_factor:
                smooth = scaling.original_length / wavelength - scaling.low_factor
                smooth /= scaling.high_factor - scaling.low_factor
                plain = (1 - smooth) * plain / scaling.factor + smooth * plain
        elif isinstance(scaling, YarnScaling):
            bounds = []
            for turns in (scaling.fast_turns, scaling.slow_turns):
                # The pair of which original_length positions are so many turns.
                bounds.append(size * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta)))
            low, high = bounds
            if scaling.bounds == "whole":
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, size - 1)
            kept = 1 - min(1.0, max(0.0, (pair - low) / (high - low)))
            plain = plain / scaling.factor * (1 - kept) + plain * kept
        found.append(plain)
    return found


@pytest.mark.parametrize(
    ("scaling", "size", "theta"),
    [
        (LinearScaling(factor=4.0), 64, 1e4),
        (Llama3Scaling(factor=8.0, original_length=8192), 128, 5e5),
        (Llama3Scaling(factor=32.0, original_length=8192), 64, 5e5),
        (YarnScaling(factor=40.0, original_length=4096), 64, 1e4),
        (YarnScaling(factor=32.0, original_length=4096, bounds="exact"), 64, 1.5e5),
    ],
    ids=repr,
)
def test_frequencies_are_those_of_the_papers(scaling: RopeScaling, size: int, theta: float) -> None:
    found = scaling.stretch(frequencies(size, theta), theta)
    expected = inverse_frequencies(scaling, size, theta)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    plain = frequencies(size, theta)
    assert (found < plain).any()
    if not isinstance(scaling, LinearScaling):
        assert found[0] == plain[0]
        assert found[-1] == pytest.approx(float(plain[-1]) / scaling.factor)


def test_published_values_of_llama_3() -> None:
    """Wavelengths over 8192 tokens are divided by 8, under 2048 kept (the rule of the released weights)."""
    scaling, plain = Llama3Scaling(factor=8.0, original_length=8192), frequencies(128, 5e5)
    ratio = plain / scaling.stretch(plain, 5e5)
    wavelength = 2 * math.pi / plain
    torch.testing.assert_close(ratio[wavelength > 8192], torch.full_like(ratio[wavelength > 8192], 8.0))
    assert (ratio[wavelength < 2048] == 1).all()
    between = ratio[(wavelength > 2048) & (wavelength < 8192)]
    assert ((between > 1) & (between < 8)).all()


def test_yarn_makes_scores_larger() -> None:
    assert YarnScaling(factor=16.0, original_length=64).tables_amplitude == pytest.approx(0.1 * math.log(16) + 1)
    assert YarnScaling(factor=16.0, original_length=64, amplitude=1.0).tables_amplitude == 1.0
    docs, scaling = Documents(None, 4), YarnScaling(factor=16.0, original_length=64)
    cos, sin = Rope(8, 1e4, scaling=scaling).tables(docs, torch.float64)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, scaling.tables_amplitude**2))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rotations_are_the_plain_ones(layout: str, size: int, dtype: torch.dtype) -> None:
    heads = torch.randn(2, 6, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    tables = rope_tables(torch.arange(5, 11), frequencies(size, 20.0), torch.promote_types(dtype, torch.float32), 1.3)
    pairs = []
    for function in (rotate, rotate_plain):
        leaf = heads.clone().requires_grad_()
        y = function(leaf, tables, layout)
        assert y.dtype is dtype
        pairs.append((y, *torch.autograd.grad(y, leaf, heads.flip(1))))
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    for fast, plain in zip(*pairs, strict=True):
        torch.testing.assert_close(fast, plain, rtol=0, atol=tolerance)
    assert torch.equal(pairs[0][0][..., size:], heads[..., size:])


def test_interleaved_is_half_split_in_another_order() -> None:
    heads = torch.randn(2, 6, 3, 8).double()
    tables = rope_tables(torch.arange(6), frequencies(8, 20.0), torch.float64)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(rotate(heads[..., order], tables, "interleaved"), rotate(heads, tables, "half")[..., order])


def test_without_positions_order_matters_only_by_what_is_seen() -> None:
    mixer, inputs, docs = built(rope="none"), x(8), Documents(None, 8)
    swapped = inputs[:, [2, 0, 1, 3, 4, 5, 6, 7]]
    torch.testing.assert_close(mixer(swapped, docs)[:, 3:], mixer(inputs, docs)[:, 3:], rtol=0, atol=1e-13)
    assert not torch.allclose(built()(swapped, docs)[:, 3:], built()(inputs, docs)[:, 3:])


# What is refused, and what is read of old.


def test_a_boolean_of_old_is_understood() -> None:
    for old, new in ((True, "head"), (False, "none")):
        written = to_dict(config()) | {"qk_norm": old}
        assert from_dict(written, AttentionConfig).qk_norm == new
    scaled = config(rope_scaling=Llama3Scaling(factor=8.0, original_length=8192))
    assert from_dict(to_dict(scaled), AttentionConfig) == scaled


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keep_first": 2}, "keep_first: 2: has no effect without window"),
        ({"rope": "none", "rope_share": 0.5}, "rope: 'none': leaves rope_scaling and rope_share without effect"),
        ({"window": 0}, "window: 0: must be greater than 0"),
        ({"softcap": -1.0}, "softcap: -1.0: must be greater than 0"),
        ({"rope": "spiral"}, "rope: 'spiral'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert said in str(caught.value)


def test_an_odd_number_of_components_cannot_turn() -> None:
    with pytest.raises(ValueError, match=r"of 8, of which rope_share=0.3 is no even number; nearest that is: 0.25"):
        config(rope_share=0.3).check_width(32)
    config(rope_share=0.25).check_width(32)
