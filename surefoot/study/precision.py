"""The error budget of number formats: what each does to every product of a model, and to its loss.

A model is trained for a few steps, since at the start of training numbers are not yet what they will be. Then the operands of
every product are taken from one pass in fp32, and each format multiplies them by itself: what its output and its gradients
are off by is its own error, not one it was handed. And from the same weights each format trains a few steps on the same
samples: the differences of its losses from fp32's, over several seeds, are the loss gap.

Legend: N rows, R rows sorted by group, E groups, I inputs, O outputs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from surefoot.blocks.base import Block, Exact, Product
from surefoot.config import ConfigError
from surefoot.data.dataset import Batch, Dataset
from surefoot.dist.mesh import Mesh
from surefoot.optim.base import Optimizer, Param
from surefoot.parallel.apply import Laid, check, lay_out
from surefoot.parallel.plan import Plan
from surefoot.precision import swap
from surefoot.precision.kinds import Name
from surefoot.precision.meter import Meter
from surefoot.precision.policy import PrecisionConfig
from surefoot.precision.product import Sharing
from surefoot.train.agree import Ranks
from surefoot.train.run import Run
from surefoot.train.state import laid_params
from surefoot.train.step import micro_batches, take_step

Numbers = Literal["bf16"] | Name
FORMATS: tuple[Numbers, ...] = ("bf16", *get_args(Name))

WARM_UP, STEPS, SEEDS, BATCH, SAMPLES = 10, 4, 3, 8, 4
"""Steps before, steps of each format, seeds; samples a step, at most, and of the pass whose products are looked into."""

TOO_SATURATED, TOO_UNDERFLOWED, TOO_FAR = 1e-3, 0.2, 1.5
"""Shares of an operand, and error over the median of all layers, above which a layer should not be narrow."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Error:
    """One product in one format: relative errors of output and of the gradients of input and weights, and the largest shares
    of an operand that saturated and underflowed."""

    output: float
    input_gradient: float
    weight_gradient: float
    saturated: float = 0.0
    underflowed: float = 0.0

    @property
    def largest(self) -> float:
        """Of the three errors."""
        return max(self.output, self.input_gradient, self.weight_gradient)


@dataclass(frozen=True)
class Gap:
    """Held-out loss of a format over that of fp32, nats a token, from the same weights on the same samples; one a seed."""

    seeds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.seeds)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return statistics.stdev(self.seeds) / math.sqrt(len(self.seeds)) if len(self.seeds) > 1 else math.nan


@dataclass(frozen=True)
class Budget:
    """What was found: errors by format and product (`layers.3.mixer.wq+wk+wv`), gaps, and why a format cannot be used."""

    errors: Mapping[Numbers, Mapping[str, Error]]
    gaps: Mapping[Numbers, Gap]
    refused: Mapping[Numbers, str]

    def to_keep(self, numbers: Numbers) -> dict[int, str]:
        """Layers that stand out in a format, and why."""
        by_layer: dict[int, dict[str, Error]] = {}
        for name, error in self.errors[numbers].items():
            by_layer.setdefault(int(name.split(".")[1]), {})[name] = error
        largest = {layer: max(error.largest for error in found.values()) for layer, found in by_layer.items()}
        usual = statistics.median(largest.values())
        reasons = {}
        for layer, found in by_layer.items():
            saturated, underflowed = (
                max((getattr(error, what), name) for name, error in found.items())
                for what in ("saturated", "underflowed")
            )
            if saturated[0] > TOO_SATURATED:
                reasons[layer] = f"{saturated[1]} saturates in {saturated[0]:.1%}"
            elif underflowed[0] > TOO_UNDERFLOWED:
                reasons[layer] = f"{underflowed[1]} underflows in {underflowed[0]:.0%}"
            elif largest[layer] > TOO_FAR * usual:
                reasons[layer] = f"its error is {largest[layer] / usual:.1f} times the usual"
        return reasons


def budget(run: Run, dataset: Dataset, formats: Sequence[Numbers], announce: Callable[[str], None]) -> Budget:
    """The budget of a run on one process. Says how it gets on."""
    precisions, refused = {}, {}
    for numbers in formats:
        try:
            precisions[numbers] = _precision(run, numbers)
            check(Plan(), run.model, run.data.sequence_length, precisions[numbers])
        except ConfigError as error:
            refused[numbers] = str(error)
            precisions.pop(numbers, None)
    errors: dict[Numbers, dict[str, Error]] = {}
    gaps: dict[Numbers, list[float]] = {numbers: [] for numbers in precisions}
    for seed in range(SEEDS):
        announce(f"seed {seed + 1} of {SEEDS}: {WARM_UP} steps to begin with")
        start = _Training(run, PrecisionConfig(compute="fp32"), dataset, run.train.seed + seed)
        start.take(0, WARM_UP)
        if seed == 0:
            announce(f"seed 1 of {SEEDS}: every product in {len(precisions)} formats")
            errors = _errors(start, precisions)
        exact = _continued(start, PrecisionConfig(compute="fp32"))
        for numbers, precision in precisions.items():
            announce(f"seed {seed + 1} of {SEEDS}: {STEPS} steps in {numbers}")
            gaps[numbers].append(_continued(start, precision) - exact)
    return Budget(errors, {numbers: Gap(tuple(values)) for numbers, values in gaps.items()}, refused)


def _precision(run: Run, numbers: Numbers) -> PrecisionConfig:
    """The format under the recipe's choice of layers; all of them where the model has too few to keep any."""
    if numbers == "bf16":
        return PrecisionConfig(compute="bf16")
    own = run.precision
    ends = (own.keep_first, own.keep_last) if run.model.depth > 2 else (0, 0)
    return PrecisionConfig(
        compute="bf16", products=numbers, keep_first=ends[0], keep_last=ends[1], keep_layers=own.keep_layers
    )


class _Training:
    """A run on one process, without its folder."""

    def __init__(self, run: Run, precision: PrecisionConfig, dataset: Dataset, seed: int) -> None:
        self.run, self.precision, self.dataset, self.seed = run, precision, dataset, seed
        mesh = Mesh(Plan().grid)
        self.ranks = Ranks(mesh, _CPU)
        self.laid: Laid = lay_out(
            Plan(),
            run.model,
            mesh,
            sequence_length=run.data.sequence_length,
            dtype=precision.weight_dtype,
            device=_CPU,
            seed=seed,
            precision=precision,
        )
        self.params: list[Param] = laid_params(self.laid)
        self.optimizer: Optimizer = run.optim.build(self.params)
        self.size = min(BATCH, run.train.batch)

    def batch(self, step: int) -> Batch:
        """Other samples for each seed."""
        first = (self.seed * (WARM_UP + STEPS) + step) * self.size
        return self.dataset.batch(first, self.size)

    def take(self, first: int, num_steps: int) -> None:
        """Steps at the full learning rate, after a short way up to it."""
        for step in range(first, first + num_steps):
            batch = self.batch(step)
            take_step(
                self.laid,
                self.ranks,
                self.params,
                self.optimizer,
                batch,
                num_tokens=batch.num_tokens,
                scale=min(1.0, (step + 1) / WARM_UP),
                micro_batch=self.size,
                max_gradient_norm=self.run.train.max_gradient_norm,
                device=_CPU,
                dtype=self.precision.compute_dtype,
            )

    def heldout_loss(self) -> float:
        """Nats a token on one batch."""
        batch = next(iter(self.dataset.heldout(self.size)))
        nll = self.laid.evaluate(micro_batches(batch, self.size, _CPU), self.precision.compute_dtype)
        return nll / batch.num_tokens


@torch.no_grad()
def _copied(start: _Training, precision: PrecisionConfig) -> _Training:
    other = _Training(start.run, precision, start.dataset, start.seed)
    for ours, theirs in zip(other.params, start.params, strict=True):
        ours.tensor.copy_(theirs.tensor)
    other.optimizer.restore(start.optimizer.state())
    return other


def _continued(start: _Training, precision: PrecisionConfig) -> float:
    """Held-out loss after some more steps in other numbers."""
    training = _copied(start, precision)
    training.take(WARM_UP, STEPS)
    return training.heldout_loss()


# -- products ----------------------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """Operands of one product of a pass in fp32; `counts_E` where rows are sorted by group."""

    block: Block
    x: Tensor
    weights: Mapping[str, Tensor]
    counts_E: Tensor | None
    gradient: Tensor | None = None


class _Probe(Exact):
    """Multiplies exactly and keeps the operands."""

    def __init__(self, block: Block, path: str, seen: dict[str, _Seen]) -> None:
        self.block, self.path, self.seen = block, path, seen

    def linear(self, x: Tensor, weights_OI: Mapping[str, Tensor]) -> Tensor:
        """See `Product.linear`."""
        return self._keep(_Seen(self.block, x.detach(), dict(weights_OI), None), super().linear(x, weights_OI))

    def grouped(self, x_RI: Tensor, counts_E: Tensor, name: str, weight_EOI: Tensor) -> Tensor:
        """See `Product.grouped`."""
        seen = _Seen(self.block, x_RI.detach(), {name: weight_EOI}, counts_E)
        return self._keep(seen, super().grouped(x_RI, counts_E, name, weight_EOI))

    def _keep(self, seen: _Seen, y: Tensor) -> Tensor:
        self.seen[f"{self.path}.{'+'.join(seen.weights)}"] = seen
        y.register_hook(lambda gradient: setattr(seen, "gradient", gradient))
        return y


def _errors(start: _Training, precisions: Mapping[Numbers, PrecisionConfig]) -> dict[Numbers, dict[str, Error]]:
    """Each product of every layer, also of those that a run would keep."""
    training = _copied(start, PrecisionConfig(compute="fp32"))
    layers = [(f"layers.{name}", layer) for name, layer in training.laid.text.layers.named_children()]
    before, now = (_operands(training, layers, step) for step in (WARM_UP, WARM_UP + 1))
    found: dict[Numbers, dict[str, Error]] = {}
    for numbers, precision in precisions.items():
        everywhere = precision
        if precision.kind is not None:
            everywhere = precision.model_copy(update={"keep_first": 0, "keep_last": 0, "keep_layers": None})
        meter = swap.swap(layers, everywhere, cut=lambda _: None, sharing=Sharing(), device=_CPU)
        products = {block: block.product for block in _blocks(layers)} if meter is not None else {}
        if meter is not None and precision.history_steps is not None:
            for seen in before.values():
                _multiply(products[seen.block], seen, torch.bfloat16)
            meter.end_step(lambda x: x, lambda x: x)
        found[numbers] = {name: _error(products.get(seen.block, Exact()), meter, seen) for name, seen in now.items()}
    return found


def _blocks(layers: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[Block]:
    for _, layer in layers:
        for module in layer.modules():
            if isinstance(module, Block):
                yield module


def _operands(training: _Training, layers: Sequence[tuple[str, torch.nn.Module]], step: int) -> dict[str, _Seen]:
    """Of all products of one pass."""
    seen: dict[str, _Seen] = {}
    for layer, module in layers:
        for path, block in module.named_modules(prefix=layer):
            if isinstance(block, Block):
                block.product = _Probe(block, path, seen)
    batch = training.batch(step)
    (feed,) = micro_batches(batch, training.size, _CPU)
    few = (feed[0][:SAMPLES], feed[1][:SAMPLES], feed[2][:SAMPLES])
    training.laid.accumulate([few], max(1, int((few[1] >= 0).sum())), torch.float32)
    return seen


def _error(product: Product, meter: Meter | None, seen: _Seen) -> Error:
    exact = _multiply(Exact(), seen, torch.float32)
    off = [_distance(ours, true) for ours, true in zip(_multiply(product, seen, torch.bfloat16), exact, strict=True)]
    rows: list[dict[str, float]] = []
    if meter is not None:
        history = meter.state()
        rows = list(meter.end_step(lambda x: x, lambda x: x).values())
        meter.restore(history)  # every product is looked at in the same step
    return Error(
        output=off[0],
        input_gradient=off[1],
        weight_gradient=max(off[2:]),
        saturated=max((row["saturated"] for row in rows), default=0.0),
        underflowed=max((row["underflowed"] for row in rows), default=0.0),
    )


def _multiply(product: Product, seen: _Seen, dtype: torch.dtype) -> list[Tensor]:
    """Output, gradient of the input, gradients of the weights, from operands in `dtype` and weights in fp32."""
    assert seen.gradient is not None, "the loss does not depend on this product"
    x = seen.x.to(dtype).requires_grad_()
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in seen.weights.items()}
    if seen.counts_E is None:
        y = product.linear(x, weights)
    else:
        ((name, weight_EOI),) = weights.items()
        y = product.grouped(x, seen.counts_E, name, weight_EOI)
    return [y.detach(), *torch.autograd.grad(y, [x, *weights.values()], seen.gradient.to(dtype))]


def _distance(ours: Tensor, true: Tensor) -> float:
    return float((ours.double() - true.double()).norm() / true.double().norm().clamp_min(1e-300))
