"""RWKV-7 against the PyPI package `rwkv`, where it is installed, and the values that its layers share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.blocks.mixers.rwkv7 import FIRST_VALUES, RWKV7, RWKV7Config
from surefoot.config import ConfigError
from surefoot.models.initialise import generator_for, named_weights
from surefoot.ops.documents import Documents
from surefoot.parallel.plan import Plan
from tests.parallel.parity import assert_same_as_one_process, decoder

WIDTH, HEADS, SIZE, LENGTH = 128, 2, 64, 40


def built(config: RWKV7Config, width: int = WIDTH, seed: int = 0) -> RWKV7:
    mixer = config.build(width=width, output_scale=1.0)
    with torch.no_grad():
        for full_name, block, name in named_weights(mixer):
            weight = getattr(block, name)
            noise = torch.randn(weight.shape, generator=generator_for(seed, full_name))
            weight.copy_(noise * weight.shape[-1] ** -0.5 if weight.dim() == 2 else 0.5 + 0.3 * noise)
    return mixer


def theirs(model: object, mixer: RWKV7, layer: int, x_LD: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Their function on our weights, inputs first: what it returns for the layer, and the first layer's values."""
    weights = {name: weight.detach() for name, weight in mixer.named_parameters()}
    zero = torch.zeros(1)
    mixes = [weights[f"mix_{stream}"] for stream in "rwkvag"]
    narrow = []
    for stream in "wav":
        has = f"{stream}_down" in weights
        narrow += (
            [weights[f"{stream}_bias"], weights[f"{stream}_down"].t(), weights[f"{stream}_up"].t()]
            if has
            else [zero] * 3
        )
    y, _, _, first = model.RWKV_x070_TMix_seq(  # type: ignore[attr-defined]
        layer, HEADS, SIZE, x_LD, torch.zeros(WIDTH), first, torch.zeros(HEADS, SIZE, SIZE),
        *mixes, *narrow, weights["g_down"].t(), weights["g_up"].t(),
        weights["removed"], weights["replaced"], weights["bonus"],
        *(weights[f"w_{name}"].t() for name in ("r", "k", "v", "out")), weights["norm_scale"], weights["norm_bias"],
    )  # fmt: skip
    return y, first


def test_two_layers_equal_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}.items():
        monkeypatch.setenv(name, value)
    model = pytest.importorskip("rwkv.model")
    x = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    config = RWKV7Config(num_heads=HEADS, head_size=SIZE, rank=8, gate_rank=12)
    own, mixed = built(config), built(config.model_copy(update={"values": "mixed"}), seed=1)
    shared: dict[str, Tensor] = {}
    first = torch.zeros(LENGTH, WIDTH)
    with torch.no_grad():
        for layer, mixer in enumerate((own, mixed)):
            wanted, first = theirs(model, mixer, layer, x[0], first)
            found = mixer(x, Documents(None, LENGTH), None, shared)[0]
            assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_values_of_the_first_layer_matter_to_later_ones() -> None:
    x = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(0))
    mixer = built(RWKV7Config(num_heads=2, head_size=4, rank=3, gate_rank=3, values="mixed"), 16)
    docs = Documents(None, 12)
    found = [mixer(x, docs, None, {FIRST_VALUES: torch.full((1, 12, 8), value)}) for value in (0.0, 1.0)]
    assert not torch.allclose(*found)
    with pytest.raises(ValueError, match="needs an earlier layer's values in shared"):
        mixer(x, docs, None, {})


@pytest.mark.parametrize("plan", [Plan(shard=2, zero=3), Plan(tensor=2), Plan(context=2)], ids=Plan.describe)
def test_shared_values_are_laid_out_right(pool: object, plan: Plan) -> None:
    config = RWKV7Config(num_heads=4, head_size=4, rank=3, gate_rank=5, block=8)
    base = dict(decoder())
    others = {"o": config, "x": config.model_copy(update={"values": "mixed"})}
    model = type(decoder())(**(base | {"other_mixers": others, "mixer_pattern": "oxmx"}))
    assert_same_as_one_process(pool, plan, model, num_micro=2)  # type: ignore[arg-type]


def test_values_that_nobody_left_are_refused_before_a_model_is_built() -> None:
    config = RWKV7Config(num_heads=4, head_size=4, rank=3, gate_rank=5, values="mixed")
    own = config.model_copy(update={"values": "own", "num_heads": 2, "head_size": 8})
    for mixers, said in (
        ({"mixer": config}, "which no earlier layer leaves"),
        ({"mixer": own}, "must be 2 as in the layer"),
    ):
        others = {"other_mixers": {"x": config}, "mixer_pattern": "mx"} if mixers["mixer"] is own else {}
        with pytest.raises(ConfigError, match=said):
            type(decoder())(**(dict(decoder()) | mixers | others))
