"""One optimizer step: micro-batches to gradients, gradients to new weights.

Legend: B batch, L length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.data.dataset import Batch
from surefoot.models import routing
from surefoot.optim.base import Optimizer, Param, gradients_of
from surefoot.optim.clip import clip_, global_norm
from surefoot.parallel.apply import Laid, MicroBatch
from surefoot.train.agree import Ranks


@dataclass(frozen=True)
class StepResult:
    """Sums and norms of one step over all ranks. `nll` and `z` are summed over the step's valid tokens.

    `router` is `models.routing.statistics`, empty where nothing is routed, `products` `precision.meter.Meter.end_step`, empty
    where products are not narrowed.
    """

    nll: float
    z: float
    num_tokens: int
    gradient_norm: float
    clip_coefficient: float
    router: dict[str, float]
    products: dict[str, dict[str, float]]

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are numbers; when not, the weights were left as they were."""
        return math.isfinite(self.nll) and math.isfinite(self.gradient_norm)


def micro_batches(batch: Batch, size: int, device: torch.device) -> list[MicroBatch]:
    """Tokens, targets and document numbers (B, L) of `size` rows at a time, on the device."""
    arrays = (batch.tokens_BL, batch.targets_BL, batch.documents_BL)
    tokens_BL, targets_BL, ids_BL = (torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)
    starts = range(0, len(tokens_BL), size)
    return [(tokens_BL[start:][:size], targets_BL[start:][:size], ids_BL[start:][:size]) for start in starts]


def take_step(
    laid: Laid,
    ranks: Ranks,
    params: Sequence[Param],
    optimizer: Optimizer,
    batch: Batch,
    *,
    num_tokens: int,
    scale: float,
    micro_batch: int,
    max_gradient_norm: float | None,
    device: torch.device,
    dtype: torch.dtype,
) -> StepResult:
    """Train on this rank's part of a batch of `num_tokens` valid tokens, with learning rates times `scale`.

    The divisor is the step's own token count, so the gradient is the same however the batch is cut. A loss or norm that
    is not finite changes no weight, on any rank.
    """
    ranks.heartbeat.enter("forward-backward")
    optimizer.zero_grad()
    routing.forget(laid.model)
    losses = laid.accumulate(micro_batches(batch, micro_batch, device), max(1, num_tokens), dtype)
    nll, z, *routed = ranks.sums(*losses, *routing.drain(laid.model))
    norm = global_norm(params, ranks.group)
    result_norm, coefficient = float(norm), 1.0
    if math.isfinite(result_norm) and max_gradient_norm is not None:
        coefficient = clip_(gradients_of(params), norm, max_gradient_norm)
    statistics = routing.statistics(laid.model, routed, max(1, num_tokens))
    products = ranks.end_step(laid.meter) if laid.meter is not None else {}
    result = StepResult(nll, z, num_tokens, result_norm, coefficient, statistics, products)
    if result.is_finite:
        ranks.heartbeat.enter("optimizer")
        optimizer.step(scale)
        laid.after_step()
        routing.balance(laid.model, routed)
    return result
