"""Narrow caches: rounding is what it says, plain pieces equal one pass, and the loss moves by little."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.cache import NarrowBuffer, NarrowKind, State
from surefoot.blocks.mixers.mamba2 import Mamba2Config
from surefoot.blocks.mixers.mla import MLAConfig
from surefoot.infer.fidelity import cache_loss
from surefoot.infer.states import narrow, stored_bytes
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.models.initialise import initialise
from surefoot.ops.documents import EVERYTHING, Documents

VOCAB = 50
MIXERS = {
    "full": AttentionConfig(num_heads=4, num_kv_heads=2),
    "window": AttentionConfig(num_heads=4, num_kv_heads=2, window=9, keep_first=2),
    "latent": MLAConfig(num_heads=4, latent_size=12, head_size=6, rope_size=4, value_size=5),
}


def built(mixer: object) -> Decoder:
    model = DecoderConfig(vocab_size=VOCAB, width=32, depth=2, mixer=mixer, ffn=SwiGLUConfig(hidden=48)).build()
    initialise(model, 0)
    return model.double()


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_narrow_buffer_rounds_each_vector_by_its_largest_entry(kind: NarrowKind) -> None:
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    x[0, 1, 2], x[1, 3] = 0, 1e-30
    buffer = NarrowBuffer(torch.zeros(2, 7, 3, 8), kind)
    buffer[:, 1:6] = x
    found, scale = buffer[:, 1:6], x.abs().amax(-1, keepdim=True)
    step = scale / 127 / 2 if kind == "int8" else torch.maximum(x.abs() / 16, scale / 448 / 512)
    assert ((found - x).abs() <= step * (1 + 1e-5)).all()
    assert (found - x).abs().max() > 1e-3
    assert torch.equal(found.abs().amax(-1), scale[..., 0])
    assert not buffer[:, 0].any()


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_reading_by_pieces_is_one_pass(mixer: object) -> None:
    model, ids = built(mixer), tokens()
    logits = model.logits(model(ids, Documents(None, 40)))[:, :-1]
    wanted = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    for piece in (1, 7, 16, 40):
        found = cache_loss(model, [ids], None, dtype=torch.float64, piece=piece)
        assert found.nll == pytest.approx(wanted, abs=1e-6)
        assert found.tokens == 78


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_a_narrow_cache_changes_the_loss_by_little_and_takes_fewer_bytes(mixer: object, kind: NarrowKind) -> None:
    model, ids = built(mixer).float(), tokens()
    plain, found = (cache_loss(model, [ids], each, dtype=torch.float32, piece=3) for each in (None, kind))
    assert 0 < abs(found.nll - plain.nll) < (0.01 if kind == "int8" else 0.05)
    vectors = sum(
        buffer[..., 0].numel() for state in model.new_states(2, 40, torch.float32) for buffer in state.buffers
    )
    assert found.state_bytes == plain.state_bytes // 4 + 4 * vectors


def test_states_of_other_kinds_stay_as_they_are() -> None:
    model = built(Mamba2Config(num_heads=4, head_size=8, state_size=4))
    states = model.new_states(1, 8, torch.float32)
    before = stored_bytes(states)
    assert narrow(states, "int8") == 0
    assert stored_bytes(states) == before
    with pytest.raises(ValueError, match="no layer of this model keeps keys"):
        cache_loss(model, [tokens()], "int8", dtype=torch.float64)


def test_a_state_in_use_is_not_narrowed() -> None:
    state = State(((1, 4, 2),), EVERYTHING, dtype=torch.float32, device=torch.device("cpu"))
    state.append(torch.ones(1, 1, 2))
    with pytest.raises(ValueError, match="before it holds anything"):
        state.narrow("int8")
