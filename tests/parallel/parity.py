"""Gradients of one batch under a plan, put together from all ranks, in fp64, with nothing left at its initial value.

Norm scales start at 1 and biases at 0, where a dropped or doubled one would not be seen: all that starts alike is drawn anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.data.dataset import Batch
from surefoot.dist.layout import Box
from surefoot.dist.mesh import DATA, own_mesh
from surefoot.dist.pool import Pool
from surefoot.models.count import build_meta
from surefoot.models.decoder import DecoderConfig
from surefoot.models.initialise import constant_starts, generator_for
from surefoot.models.multimodal import ModelConfig, MultimodalConfig
from surefoot.optim.adamw import AdamWConfig
from surefoot.parallel.apply import check, lay_out
from surefoot.parallel.plan import Plan
from surefoot.study.trial import image_batch
from surefoot.train.agree import Ranks
from surefoot.train.state import laid_params, states_of
from surefoot.train.step import take_step

BATCH, LENGTH = 8, 48


def decoder(
    *,
    vocab_size: int = 61,
    width: int = 16,
    tied: bool = False,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    depth: int = 4,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        width=width,
        depth=depth,
        mixer=AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=4, rope_theta=20.0),
        ffn=SwiGLUConfig(hidden=24),
        tied=tied,
        z_loss=0.01,
    )


def ragged_batch(vocab_size: int, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    """Documents of very different lengths, one of them a whole row, and a third of the targets not to be predicted."""
    generator = torch.Generator().manual_seed(1)
    tokens_BL, targets_BL = (torch.randint(vocab_size, (batch, LENGTH), generator=generator) for _ in range(2))
    targets_BL[torch.rand(batch, LENGTH, generator=generator) < 0.3] = -100
    ids_BL = (torch.rand(batch, LENGTH, generator=generator) < 0.2).long().cumsum(1)
    ids_BL[0] = 0
    return tokens_BL, targets_BL, ids_BL


@dataclass
class Share:
    """What one rank holds after a backward pass: (box, gradient if there is one, value) by name."""

    nll: float
    parts: dict[str, tuple[Box, Tensor | None, Tensor]]
    shapes: dict[str, tuple[int, ...]]


def share(plan: Plan, config: ModelConfig, num_micro: int, num_samples: int = BATCH) -> Share | None:
    """This rank's share of the gradients of `ragged_batch`, or of one with images; None on a rank that the plan does not use."""
    mesh = own_mesh(plan.grid)
    if mesh is None:
        return None
    check(plan, config, LENGTH)
    laid = lay_out(plan, config, mesh, sequence_length=LENGTH, dtype=torch.float64, device=torch.device("cpu"), seed=0)
    with torch.no_grad():
        starts = constant_starts(build_meta(config))
        for local in laid.locals:
            if local.name in starts:
                drawn = torch.randn(local.layout.shape, generator=generator_for(1, local.name), dtype=torch.float64)
                box = local.layout.box(mesh.grid, mesh.coordinates)
                local.part.copy_((starts[local.name] + 0.3 * drawn)[box.slices])
    laid.after_step()
    is_reader = isinstance(config, MultimodalConfig)
    batch = image_batch(config, LENGTH, num_samples) if is_reader else ragged_batch(config.vocab_size, num_samples)
    size = num_samples // plan.num_data_ranks
    first = mesh.index(*DATA) * size
    own = [tensor[first : first + size] for tensor in batch]
    micro_batches = list(zip(*(tensor.chunk(num_micro) for tensor in own), strict=True))
    nll, _ = laid.accumulate(micro_batches, int((batch[1] >= 0).sum()), torch.float64)
    return Share(
        nll,
        {
            local.name: (
                local.layout.box(mesh.grid, mesh.coordinates),
                None if local.part.grad is None else local.part.grad.detach().clone(),
                local.part.detach().clone(),
            )
            for local in laid.locals
        },
        {local.name: local.layout.shape for local in laid.locals},
    )


def whole(shares: list[Share | None]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Full gradients and values; copies of one part on several ranks must agree to the last bits."""
    gradients: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for found in shares:
        if found is None:
            continue
        for name, (box, gradient, value) in found.parts.items():
            for full, part, tolerance in ((gradients, gradient, 1e-13), (values, value, 0.0)):
                if part is None:
                    continue
                if name not in full:
                    full[name] = torch.full(found.shapes[name], float("nan"), dtype=torch.float64)
                there = full[name][box.slices]
                if part.numel() and not there.isnan().all():
                    torch.testing.assert_close(
                        there, part, rtol=tolerance, atol=tolerance, msg=f"copies of {name} differ"
                    )
                full[name][box.slices] = part
    for full in (gradients, values):
        for name, tensor in full.items():
            assert not tensor.isnan().any(), f"no rank holds all of {name}"
    return gradients, values


_ONE: dict[tuple[str, int], tuple[dict[str, Tensor], dict[str, Tensor]]] = {}


def assert_same_as_one_process(
    pool: Pool, plan: Plan, config: ModelConfig, num_micro: int = 1, batch: int = BATCH
) -> float:
    """Gradients and initial weights under `plan` against one process; returns the worst relative error of a gradient."""
    key = repr(config), batch
    if key not in _ONE:
        _ONE[key] = whole([share(Plan(), config, 1, batch)])
    expected_gradients, expected_values = _ONE[key]
    gradients, values = whole(pool.run(share, plan, config, num_micro, batch))
    assert gradients.keys() == expected_gradients.keys()
    worst, least = 0.0, 1e-12 * max(float(expected.norm()) for expected in expected_gradients.values())
    for name, value in expected_values.items():
        assert torch.equal(values[name], value), f"{name} starts otherwise"
    for name, expected in expected_gradients.items():
        if expected.norm() < least:  # 0 but for rounding, as of a bias of keys that all queries see
            assert gradients[name].norm() < least, f"gradient of {name} is not 0"
            continue
        error = float((gradients[name] - expected).norm() / expected.norm())
        assert error < 1e-12, f"gradient of {name} is off by {error:.1e}"
        worst = max(worst, error)
    return worst


def three_steps(
    config: DecoderConfig, plan: Plan, micro_batch: int
) -> tuple[dict[str, Tensor], dict[str, float]] | None:
    """Every state after three steps on the same batch, and what the last one says of its routers; None on a rank without part."""
    mesh, cpu, dtype = own_mesh(plan.grid), torch.device("cpu"), torch.float64
    if mesh is None:
        return None
    laid = lay_out(plan, config, mesh, sequence_length=LENGTH, dtype=dtype, device=cpu, seed=0)
    ranks, params = Ranks(mesh, cpu), laid_params(laid)
    optimizer = AdamWConfig(lr=0.01).build(params)
    tokens, targets, documents = (tensor[ranks.own(BATCH)].numpy() for tensor in ragged_batch(61))
    batch = Batch(tokens, targets, documents, np.zeros(len(tokens), dtype=np.int64), int((targets >= 0).sum()), 0.0)
    statistics: dict[str, float] = {}
    for _ in range(3):
        statistics = take_step(
            laid,
            ranks,
            params,
            optimizer,
            batch,
            num_tokens=int((ragged_batch(61)[1] >= 0).sum()),
            scale=1.0,
            micro_batch=micro_batch,
            max_gradient_norm=1.0,
            device=cpu,
            dtype=dtype,
        ).router
    return {state.name: state.tensor.clone() for state in states_of(laid.model, mesh)}, statistics
