"""Recomputation (Chen et al., 2016): activations that backward makes again instead of finding them kept.

A layer that is recomputed keeps its input, and of what it computes the results that the mode names. Backward runs it again
up to the last thing it needs, taking kept results from `ops.autograd` instead of computing them. What crosses between ranks
is sent again; what routers chose is kept in every mode.

    full       keeps no result
    selective  keeps products and attention, makes the elementwise again (Korthikanti et al., 2022, have it the other way
               round: where scores are held whole, attention is what is worth making again)
    budget     keeps the results that cost the most time a byte, as many as fit: in bytes that are given, or in a share of the
               device's memory less what else a step holds there
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from surefoot.config import Config, ConfigError, FieldError
from surefoot.models.layers import named_layers
from surefoot.ops.autograd import Call, Tape

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_FORMS = "a size as in 512MiB, a share of the device's memory as in 80%, or the word device"
_DEVICE_SHARE = 0.9


class RecomputeConfig(Config):
    """Which layers are run again in backward, and what they keep from the first run."""

    mode: Literal["none", "full", "selective", "budget"] = Field(
        default="none",
        description="full keeps a layer's input alone; selective also results of products and attention (a GPU's fused "
        "attention is run again); budget what fits",
    )
    every: int = Field(default=1, ge=1, description="full, selective: recompute each k-th layer, the first one first")
    budget: str | None = Field(
        default=None,
        description="budget: bytes that the layers of one micro-batch may keep on a rank, as in 512MiB; or 80%, of the memory "
        "free on the device, less parameters, gradients, optimizer state and the loss or a layer under way; device is 90%",
    )

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.every > 1 and self.mode not in {"full", "selective"}:
            raise FieldError("every", self.every, "has an effect only with mode full or selective; drop it")
        if self.budget is None and self.mode == "budget":
            raise FieldError("budget", None, f"must be {_FORMS}")
        if self.budget is not None and self.mode != "budget":
            raise FieldError("budget", self.budget, "has an effect only with mode=budget; set that or drop it")
        if self.budget is not None and self.budget_bytes is None and self.device_share is None:
            raise FieldError("budget", self.budget, f"is not {_FORMS}")
        return self

    @property
    def budget_bytes(self) -> int | None:
        """The budget as a number; None where it is a share of a device."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", self.budget or "")
        return None if found is None else int(float(found[1]) * _UNITS[found[2]])

    @property
    def device_share(self) -> float | None:
        """The share of a device's memory that a step may take; None where the budget is a number."""
        if self.budget == "device":
            return _DEVICE_SHARE
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", self.budget or "")
        share = 0.0 if found is None else float(found[1]) / 100
        return share if 0 < share <= 1 else None

    def describe(self) -> str:
        """In a few words."""
        if self.device_share is not None:
            return f"recomputation to fit {100 * self.device_share:g}% of the device"
        if self.mode == "budget":
            return f"recomputation within {self.budget}"
        return f"{self.mode} recomputation" + (f" of every {self.every}. layer" if self.every > 1 else "")


class Recomputation:
    """What the recomputed layers of a rank kept in their last passes, in bytes: their inputs and kept results."""

    def __init__(self) -> None:
        self.kept: dict[int, int] = {}

    @property
    def kept_bytes(self) -> int:
        """Of all recomputed layers, measured in their last forward pass."""
        return sum(self.kept.values())

    def keeps(self, _layer: int, call: Call) -> bool:
        """Whether a layer keeps the result of a call."""
        raise NotImplementedError

    @property
    def measures(self) -> bool:
        """Whether calls are to be timed."""
        return False

    def facts(self) -> dict[str, int | float | None] | None:
        """For the record; None while it is not known what will be kept."""
        return {"kept_bytes": self.kept_bytes}

    def describe(self) -> str:
        """For the console."""
        return f"{len(self.kept)} recomputed layers keep {self.kept_bytes / 2**20:.1f} MiB of a micro-batch"

    def finished(self, layer: int, tape: Tape, inputs: Sequence[Tensor]) -> None:
        """After a layer's first run."""
        self.kept[layer] = sum(tensor.nbytes for tensor in inputs) + tape.kept_bytes


class Full(Recomputation):
    """Keeps no result."""

    def keeps(self, _layer: int, call: Call) -> bool:  # noqa: ARG002 - none is
        """See `Recomputation.keeps`."""
        return False


class Selective(Recomputation):
    """Keeps results of products and attention."""

    def keeps(self, _layer: int, call: Call) -> bool:
        """See `Recomputation.keeps`."""
        return is_costly(call)


class Budget(Recomputation):
    """Keeps the results that cost the most time a byte.

    The first micro-batch keeps nothing, and each call is timed in it; what is kept from then on is picked once. Ranks may
    pick differently, so calls that communicate are kept in any case: ranks must agree on those.

    With a share of a device instead of bytes, `fit` must be called before the first pass.
    """

    def __init__(self, num_bytes: int | None, num_layers: int, share: float | None = None) -> None:
        super().__init__()
        self.given, self.num_layers, self.share = num_bytes, num_layers, share
        self.device_bytes = self.held_bytes = self.under_way_bytes = 0
        self.predicted_bytes: int | None = None
        self.seconds_again = 0.0
        self._has_kept = False
        self._calls: dict[tuple[int, int], Call] = {}
        self._least: dict[int, int] = {}
        self._picked: set[tuple[int, int]] = set()

    @property
    def num_bytes(self) -> int:
        """What may be kept. Of a device's memory the loss takes some, and later a layer that backward is in: its results and as
        much for their gradients, which is known after the first micro-batch."""
        if self.given is not None:
            return self.given
        return int((self.share or 0) * self.device_bytes) - self.held_bytes - self.under_way_bytes

    def fit(self, device_bytes: int, held_bytes: int, loss_bytes: int) -> str:
        """Take a share of so much memory, of which a step holds so much beside activations and the loss takes so much for a
        while; the outcome in words. `ConfigError` where nothing is left."""
        self.device_bytes, self.held_bytes, self.under_way_bytes = device_bytes, held_bytes, loss_bytes
        text = (
            f"{100 * (self.share or 0):g}% of {device_bytes / 2**20:,.1f} MiB less {held_bytes / 2**20:,.1f} MiB of parameters, "
            f"gradients and optimizer state and {loss_bytes / 2**20:,.1f} MiB for the loss"
        )
        if self.num_bytes <= 0:
            raise ConfigError(
                "plan.recompute.budget",
                f"{100 * (self.share or 0):g}%",
                f"leaves nothing for activations ({text}); use more ranks (plan.shard), a smaller model or a larger device",
            )
        return f"recomputation fits the device: activations may take {self.num_bytes / 2**20:,.1f} MiB, {text}"

    @property
    def measures(self) -> bool:
        """See `Recomputation.measures`."""
        return self.predicted_bytes is None

    def keeps(self, layer: int, call: Call) -> bool:
        """See `Recomputation.keeps`."""
        return communicates(call) or (layer, call.index) in self._picked

    def finished(self, layer: int, tape: Tape, inputs: Sequence[Tensor]) -> None:
        """See `Recomputation.finished`."""
        super().finished(layer, tape, inputs)
        self._has_kept = self.predicted_bytes is not None
        if self.predicted_bytes is None:
            self._least[layer] = self.kept[layer]
            self._calls |= {(layer, call.index): call for call in tape.calls if not communicates(call)}
            if len(self._least) == self.num_layers:
                self._pick()

    def facts(self) -> dict[str, int | float | None] | None:
        """See `Recomputation.facts`. The first micro-batch, which measures, does not count."""
        if not self._has_kept:
            return None
        found: dict[str, int | float | None] = {
            "kept_bytes": self.kept_bytes,
            "predicted_bytes": self.predicted_bytes,
            "budget_bytes": self.num_bytes,
            "seconds_again": self.seconds_again,
        }
        if self.share is not None:
            found |= {
                "device_bytes": self.device_bytes,
                "device_share": self.share,
                "held_bytes": self.held_bytes,
                "under_way_bytes": self.under_way_bytes,
            }
        return found

    def describe(self) -> str:
        """See `Recomputation.describe`."""
        less = (
            f" after {self.under_way_bytes / 2**20:.1f} for the loss or a layer under way"
            if self.share is not None
            else ""
        )
        return (
            f"{super().describe()} (budget {self.num_bytes / 2**20:.1f} MiB{less}, predicted "
            f"{(self.predicted_bytes or 0) / 2**20:.1f}); its backward repeats about {1000 * self.seconds_again:.0f} ms "
            "of operations"
        )

    def _pick(self) -> None:
        total = sum(self._least.values())
        if self.share is not None:
            of_layers = [0] * self.num_layers
            for (layer, _), call in self._calls.items():
                of_layers[layer] += call.num_bytes
            self.under_way_bytes = max(self.under_way_bytes, 2 * max(of_layers))
        if total > self.num_bytes:
            what = "is" if self.share is None else "bytes are left of the device, which is"
            give = "that or more, or " if self.share is None else ""
            raise ConfigError(
                "plan.recompute.budget",
                self.num_bytes,
                f"{what} less than the {total} bytes that full recomputation keeps; give {give}a smaller train.micro_batch",
            )
        by_worth = sorted(self._calls.items(), key=lambda item: (-item[1].seconds / max(1, item[1].num_bytes), item[0]))
        for place, call in by_worth:
            if total + call.num_bytes <= self.num_bytes:
                self._picked.add(place)
                total += call.num_bytes
            else:
                self.seconds_again += call.seconds
        self.predicted_bytes = total


def is_costly(call: Call) -> bool:
    """Whether it is a product or attention."""
    return getattr(call.function, "is_costly", False)


def communicates(call: Call) -> bool:
    """Whether other ranks take part in it."""
    return getattr(call.function, "communicates", False)


def recompute(config: RecomputeConfig, modules: Sequence[nn.Module]) -> Recomputation | None:
    """Have layers of a model or of stages run again in backward. FSDP's hooks, put around a layer later, lie outside."""
    layers = [layer for module in modules for _, layer in named_layers(module)]
    if config.mode == "none":
        return None
    chosen = layers[:: config.every]
    kinds: dict[str, Callable[[], Recomputation]] = {
        "full": Full,
        "selective": Selective,
        "budget": partial(Budget, config.budget_bytes, len(chosen), config.device_share),
    }
    found = kinds[config.mode]()
    for index, layer in enumerate(chosen):
        layer.forward = _Recomputed(layer.forward, index, found)
    return found


class _Recomputed:
    """A layer's forward pass, run again in backward; as it was where no gradients are recorded."""

    def __init__(self, forward: Callable[..., Any], layer: int, recomputation: Recomputation) -> None:
        self.forward, self.layer, self.recomputation = forward, layer, recomputation

    def __call__(self, *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*arguments)
        tape = Tape(partial(self.recomputation.keeps, self.layer), self.recomputation.measures)
        # No state of random generators: models draw no numbers in a pass.
        result = checkpoint(
            self.forward,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (tape.first(), tape.again()),
        )
        self.recomputation.finished(self.layer, tape, [x for x in arguments if isinstance(x, Tensor)])
        return result
