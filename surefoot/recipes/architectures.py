"""The quickstart with other architectures at equal training FLOPs a token; `benchmarks/architectures.py` compares them."""

from typing import Any

from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.delta_net import GatedDeltaNetConfig
from surefoot.blocks.mixers.mamba2 import Mamba2Config
from surefoot.blocks.mixers.mla import MLAConfig
from surefoot.blocks.routers.hash import HashConfig
from surefoot.blocks.routers.quantile import QuantileConfig
from surefoot.blocks.routers.relu import ReLUConfig
from surefoot.blocks.routers.sigmoid import SigmoidConfig
from surefoot.blocks.routers.sinkhorn import SinkhornConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.recipes.quickstart import quickstart
from surefoot.train.run import Run


def quickstart_window() -> Run:
    """Three layers with a window of 64 to one that sees all"""
    window = AttentionConfig(num_heads=2, num_kv_heads=2, window=64)
    return _variant("window", other_mixers={"w": window}, mixer_pattern="wwwm", ffn=SwiGLUConfig(hidden=424))


def quickstart_mamba2() -> Run:
    """Three layers of Mamba-2 to one of attention"""
    state = Mamba2Config(num_heads=4, head_size=64, state_size=32, block=32)
    return _variant("mamba2", other_mixers={"s": state}, mixer_pattern="sssm", ffn=SwiGLUConfig(hidden=328))


def quickstart_delta() -> Run:
    """Three layers of Gated DeltaNet to one of attention"""
    delta = GatedDeltaNetConfig(num_heads=2, key_size=64, value_size=64, block=32)
    return _variant("delta", other_mixers={"d": delta}, mixer_pattern="dddm", ffn=SwiGLUConfig(hidden=352))


def quickstart_mla() -> Run:
    """Multi-head latent attention, whose cache is a quarter"""
    latent = MLAConfig(num_heads=2, latent_size=48, head_size=48, rope_size=16, value_size=64)
    return _variant("mla", mixer=latent, ffn=SwiGLUConfig(hidden=416))


def quickstart_moe_sigmoid() -> Run:
    """quickstart-moe with DeepSeek-V3's router: sigmoids, and a bias that evens out the loads"""
    ffn = MoEConfig(num_experts=8, top_k=2, hidden=192, router=SigmoidConfig())
    return _variant("moe-sigmoid", ffn=ffn)


def quickstart_moe_sinkhorn() -> Run:
    """quickstart-moe with a router that balances while it chooses (and so looks ahead in training)"""
    ffn = MoEConfig(num_experts=8, top_k=2, hidden=192, router=SinkhornConfig())
    return _variant("moe-sinkhorn", ffn=ffn)


def quickstart_moe_relu() -> Run:
    """quickstart-moe with gates that are positive or off, about two a token (and more in early steps)"""
    return _variant("moe-relu", ffn=MoEConfig(num_experts=8, top_k=2, hidden=192, router=ReLUConfig()))


def quickstart_moe_quantile() -> Run:
    """quickstart-moe with prices of experts that even out the loads, without a rate or a loss"""
    return _variant("moe-quantile", ffn=MoEConfig(num_experts=8, top_k=2, hidden=192, router=QuantileConfig()))


def quickstart_moe_hash() -> Run:
    """quickstart-moe with experts by hashes of words: what routers that learn must beat"""
    return _variant("moe-hash", ffn=MoEConfig(num_experts=8, top_k=2, hidden=192, router=HashConfig()))


def _variant(name: str, **changes: Any) -> Run:
    base = quickstart()
    model = DecoderConfig(**(dict(base.model) | changes))
    return base.model_copy(update={"name": f"quickstart-{name}", "model": model})
