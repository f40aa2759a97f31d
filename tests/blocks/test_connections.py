"""Connections against their formulas written out token by token, and against the plain residual where they start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.blocks.base import ConnectionConfig
from surefoot.blocks.connections.first import First, FirstConfig
from surefoot.blocks.connections.hyper import Hyper, HyperConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.initialise import generator_for, initialise, named_weights
from surefoot.ops.documents import Documents

WIDTH, NUM = 6, 3


def redrawn(block: torch.nn.Module) -> torch.nn.Module:
    block.double()
    with torch.no_grad():
        for full_name, owner, name in named_weights(block):
            weight = getattr(owner, name)
            weight.copy_(torch.randn(weight.shape, generator=generator_for(0, full_name)).double())
    return block


def decoder(connection: ConnectionConfig) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=20,
        width=8,
        depth=3,
        mixer=AttentionConfig(num_heads=2, num_kv_heads=1),
        ffn=SwiGLUConfig(hidden=12),
        connection=connection,
    )


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("index", [0, 4])
def test_hyper_connections_by_the_papers_equations(dynamic: bool, index: int) -> None:
    block = redrawn(HyperConfig(streams=NUM, dynamic=dynamic).build(width=WIDTH, index=index))
    assert isinstance(block, Hyper)
    streams, output = draw(1, 2, NUM * WIDTH).requires_grad_(), draw(1, 2, WIDTH, seed=1).requires_grad_()
    found_input, write = block(streams)
    found = write(output)
    inputs, wanted = [], []
    for token in range(2):
        h = streams[0, token].view(NUM, WIDTH)
        a_m, b, a_r = (
            torch.eye(NUM).double()[index % NUM] + block.read,
            0 + block.write,
            torch.eye(NUM).double() + block.mix,
        )
        if dynamic:
            normed = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * block.norm.scale
            a_m = a_m + block.scale_read * torch.tanh(normed @ block.w_read[0])
            b = b + block.scale_write * torch.tanh(normed @ block.w_write[0])
            a_r = a_r + block.scale_mix * torch.tanh(normed @ block.w_mix.t())
        inputs.append(sum(a_m[i] * h[i] for i in range(NUM)))
        wanted.append(
            torch.cat([sum(a_r[i, j] * h[i] for i in range(NUM)) + b[j] * output[0, token] for j in range(NUM)])
        )
    assert torch.allclose(found_input[0], torch.stack(inputs), rtol=0, atol=1e-12)
    assert torch.allclose(found[0], torch.stack(wanted), rtol=0, atol=1e-12)
    sources, weights = [streams, output, *block.parameters()], draw(1, 2, NUM * WIDTH, seed=2)
    ours = torch.autograd.grad((found * weights).sum() + found_input.sum(), sources)
    theirs = torch.autograd.grad((torch.stack(wanted) * weights[0]).sum() + torch.stack(inputs).sum(), sources)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_the_embedding_comes_back_by_learned_scalars() -> None:
    block = redrawn(FirstConfig().build(width=WIDTH, index=0))
    assert isinstance(block, First)
    streams, output = draw(2, 3, 2 * WIDTH), draw(2, 3, WIDTH, seed=1)
    read, write = block(streams)
    mixed = block.keep * streams[..., :WIDTH] + block.first * streams[..., WIDTH:]
    assert torch.allclose(read, mixed, rtol=0, atol=1e-14)
    assert torch.allclose(write(output)[..., :WIDTH], mixed + output, rtol=0, atol=1e-14)
    assert torch.equal(write(output)[..., WIDTH:], streams[..., WIDTH:])


@pytest.mark.parametrize("connection", [HyperConfig(streams=3), HyperConfig(streams=2, dynamic=False), FirstConfig()])
def test_they_start_as_the_plain_residual(connection: ConnectionConfig) -> None:
    """Up to the final norm's epsilon: hyper-connections end with a multiple of the plain stream."""
    tokens, docs = torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(0)), Documents(None, 7)
    hidden = []
    for config in (decoder(connection), decoder(connection).model_copy(update={"connection": decoder_plain()})):
        model = config.build()
        initialise(model, 0)
        hidden.append(model.double()(tokens, docs))
    assert torch.allclose(hidden[0], hidden[1], rtol=0, atol=1e-5)


def decoder_plain() -> ConnectionConfig:
    default: ConnectionConfig = DecoderConfig.model_fields["connection"].default
    return default


def test_learning_tells_streams_apart() -> None:
    model = decoder(HyperConfig(streams=3)).build()
    redrawn(model)
    tokens = torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(0))
    objective, _ = model.loss(tokens, tokens, Documents(None, 7))
    objective.backward()
    assert all(bool((weight.grad != 0).any()) for weight in model.parameters())
