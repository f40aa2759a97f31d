"""One optimizer step: micro-batches to gradients, gradients to new weights.

Legend: B batch, L length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.data.dataset import Batch
from surefoot.models.decoder import Decoder
from surefoot.ops.documents import Documents
from surefoot.optim.base import Optimizer
from surefoot.optim.clip import clip_, gradient_norm


@dataclass(frozen=True)
class StepResult:
    """Sums and norms of one step. `nll` and `z` are summed over the step's valid tokens."""

    nll: float
    z: float
    num_tokens: int
    gradient_norm: float
    clip_coefficient: float

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are numbers; when not, the weights were left as they were."""
        return math.isfinite(self.nll) and math.isfinite(self.gradient_norm)


def micro_batches(batch: Batch, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Documents]]:
    """Tokens (B, L), targets (B, L) and documents of `size` rows at a time, on the device."""
    for start in range(0, len(batch.tokens_BL), size):
        rows = slice(start, start + size)
        tokens_BL, targets_BL, ids_BL = (
            torch.from_numpy(array[rows]).to(device, non_blocking=True)
            for array in (batch.tokens_BL, batch.targets_BL, batch.documents_BL)
        )
        yield tokens_BL, targets_BL, Documents(ids_BL, tokens_BL.shape[1])


def accumulate(
    model: Decoder, batch: Batch, micro_batch: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Add the gradient of (sum over valid tokens) / (valid tokens of the whole batch) and return the nll and z sums.

    The divisor is the step's own token count, so the gradient is the same however the batch is cut.
    """
    nll, z = 0.0, 0.0
    divisor = max(1, batch.num_tokens)
    for tokens_BL, targets_BL, docs in micro_batches(batch, micro_batch, device):
        objective, sums = model.loss(tokens_BL, targets_BL, docs, dtype=dtype)
        torch.autograd.backward(objective / divisor)
        nll += sums.nll.item()
        z += sums.z.item()
    return nll, z


def take_step(
    model: Decoder,
    weights: Sequence[Tensor],
    optimizer: Optimizer,
    batch: Batch,
    *,
    scale: float,
    micro_batch: int,
    max_gradient_norm: float | None,
    device: torch.device,
    dtype: torch.dtype,
) -> StepResult:
    """Train on one batch with learning rates times `scale`. A loss or norm that is not finite changes no weight."""
    optimizer.zero_grad()
    nll, z = accumulate(model, batch, micro_batch, device, dtype)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = gradient_norm(gradients)
    result_norm, coefficient = float(norm), 1.0
    if math.isfinite(result_norm) and max_gradient_norm is not None:
        coefficient = clip_(gradients, norm, max_gradient_norm)
    result = StepResult(nll, z, batch.num_tokens, result_norm, coefficient)
    if result.is_finite:
        optimizer.step(scale)
    return result
