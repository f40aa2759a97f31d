"""What the policy refuses, and which weights' products it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.config import ConfigError
from surefoot.models.decoder import DecoderConfig
from surefoot.precision.policy import PrecisionConfig, Types, weight_role
from surefoot.precision.swap import quantised


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"keep_first": 1}, ("keep_first: 1", "drop it")),
        ({"gradients": "e5m2"}, ("gradients: 'e5m2'", "drop it")),
        ({"weight_gradients": "compute"}, ("weight_gradients", "drop it")),
        ({"products": "nvfp4", "gradients": "e4m3"}, ("gradients: 'e4m3'", "e2m1")),
        ({"products": "rowwise", "tile": 64}, ("tile: 64", "products=blockwise")),
        ({"products": "mxfp8", "history": 4}, ("history: 4", "products=delayed")),
        ({"products": "blockwise", "tile": 24}, ("tile: 24", "multiple of 16")),
        ({"products": "fp8"}, ("products: 'fp8'", "'rowwise'")),
        ({"products": "rowwise", "keep_layers": (-1,)}, ("keep_layers: -1",)),
        ({"rounding": "kahan"}, ("rounding: 'kahan'", "parameters=bf16")),
        ({"accumulate": "bf16"}, ("accumulate: 'bf16'", "reduce=bf16")),
        ({"narrow_roles": ("vocabulary",)}, ("narrow_roles", "drop it")),
        ({"parameters": "bf16", "narrow_roles": ()}, ("narrow_roles", "at least one")),
        ({"parameters": "bf16", "narrow_roles": ("matrix", "matrix")}, ("narrow_roles", "once")),
    ],
)
def test_what_has_no_effect_is_refused(values: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        PrecisionConfig(**values)
    assert all(word in str(error.value) for word in words)


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"layers.{name}", layer) for name, layer in model.get_submodule("layers").named_children()]


def test_only_matrices_of_inner_layers_are_narrowed() -> None:
    config = DecoderConfig(
        vocab_size=64,
        width=32,
        depth=5,
        mixer=AttentionConfig(num_heads=2, num_kv_heads=1),
        ffn=MoEConfig(num_experts=4, top_k=2, hidden=16, shared_hidden=16),
    )
    with torch.device("meta"):
        model = config.build()
    found = [name for name, _, _ in quantised(layers(model), PrecisionConfig(products="rowwise", keep_layers=(2,)))]
    own = ["mixer.wq", "mixer.wk", "mixer.wv", "mixer.wo"]
    own += [f"ffn.{name}" for name in ("shared_gate", "shared_up", "shared_down")]
    own += [f"ffn.experts.{name}" for name in ("w_gate", "w_up", "w_down")]
    assert found == [f"layers.{layer}.{name}" for layer in (1, 3) for name in own]


def test_roles_follow_from_axes() -> None:
    assert weight_role(("vocab", "embed")) == "vocabulary"
    assert weight_role(("routes", "embed")) == "router"
    assert weight_role(("embed",)) == weight_role(("heads",)) == "vector"
    assert weight_role(("per_head", "embed")) == weight_role(("kv_heads", "taps")) == "state"
    assert weight_role(("kv_heads", "rank")) == weight_role(("streams", "embed")) == "state"
    assert weight_role(("experts", "ffn", "embed")) == weight_role(("heads", "embed")) == "matrix"


def test_high_roles_stay_high_unless_named() -> None:
    asked = {"parameters": "bf16", "reduce": "bf16", "accumulate": "bf16", "optimizer_state": "bf16"}
    wide, narrow = torch.float32, torch.bfloat16
    config = PrecisionConfig(**asked)
    assert config.types("matrix") == Types(narrow, narrow, narrow, narrow, "stochastic")
    for role in ("vocabulary", "router", "state", "vector"):
        assert config.types(role) == Types(wide, wide, wide, wide)
    named = PrecisionConfig(**asked, narrow_roles=("vocabulary",))
    assert named.types("matrix") == Types(wide, wide, wide, wide)
    assert named.types("vocabulary").parameters is narrow
    assert not PrecisionConfig().is_narrow
    assert config.in_wide("fp64") == PrecisionConfig(compute="fp64")
