"""The precision pass: which blocks multiply in narrow numbers, and with whom they share scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from surefoot.blocks.base import Block
from surefoot.config import ConfigError
from surefoot.precision.kinds import Kind
from surefoot.precision.meter import Meter
from surefoot.precision.policy import PrecisionConfig, weight_role
from surefoot.precision.product import Operand, Operands, Quantising, Sharing, alone

Cut = Callable[[tuple[str, ...]], int | None]
"""Axes of a weight to the dimension along which ranks share it out, if any."""


def quantised(layers: Sequence[tuple[str, nn.Module]], config: PrecisionConfig) -> Iterator[tuple[str, Block, str]]:
    """The matrices that are to be quantised: full name, block and name there. `layers` are all layers with their names.

    What several layers have in common goes by the first of them, as its name does.
    """
    if config.kind is None:
        return
    met: set[nn.Module] = set()
    for number, (layer, module) in enumerate(layers):
        for path, block in module.named_modules(met, prefix=layer):
            if isinstance(block, Block) and not config.keeps(number, len(layers)):
                for name, axes in block.axes.items():
                    if weight_role(axes) == "matrix":
                        yield f"{path}.{name}", block, name


def check(
    layers: Sequence[tuple[str, nn.Module]],
    config: PrecisionConfig,
    *,
    cut: Cut,
    num_cut: int,
    run: int,
    run_is: str,
) -> None:
    """`ConfigError` where nothing would be quantised, or a tile would lie on two ranks.

    `num_cut` ranks share out axes that `cut` names, and a rank holds runs of `run` consecutive tokens (`run_is` says of what).
    """
    kind = config.kind
    if kind is None:
        return
    for number in config.keep_layers or ():
        if number >= len(layers):
            raise ConfigError("precision.keep_layers", number, f"names no layer; the model has {len(layers)}, from 0")
    found = list(quantised(layers, config))
    if not found:
        raise ConfigError(
            "precision.products",
            config.products,
            f"would be in no layer: of {len(layers)}, precision.keep_first, keep_last and keep_layers keep all; lower them",
        )
    if kind.has_tiles and run % kind.length:
        raise ConfigError(
            "precision.products", config.products, f"has tiles of {kind.length} tokens, which must divide {run_is}"
        )
    for full_name, block, name in found:
        dim = cut(block.axes[name])
        if num_cut > 1 and kind.has_tiles and dim is not None:
            size, rest = divmod(getattr(block, name).shape[dim], num_cut)
            if rest or size % kind.length:
                raise ConfigError(
                    "plan.tensor",
                    num_cut,
                    f"gives each rank {size} {block.axes[name][dim]} of {full_name}, through which a tile of {kind.length} "
                    f"(precision.products {config.products}) would be cut; use fewer ranks or {_remedy(config, kind)}",
                )


def _remedy(config: PrecisionConfig, kind: Kind) -> str:
    smaller = "a smaller precision.tile or " if config.products == "blockwise" and kind.length > 1 else ""
    return f"{smaller}precision.products=rowwise"


def swap(
    layers: Sequence[tuple[str, nn.Module]],
    config: PrecisionConfig,
    *,
    cut: Cut,
    sharing: Sharing,
    device: torch.device,
) -> Meter | None:
    """Have the blocks of a whole model quantise; what watches them, or None where nothing is quantised."""
    kind = config.kind
    if kind is None:
        return None
    found = list(quantised(layers, config))
    meter = Meter([full_name for full_name, _, _ in found], device, config.history_steps)
    operands: dict[Block, dict[str, Operands]] = {}
    for full_name, block, name in found:
        dim = cut(block.axes[name])
        # The last two dimensions are those of the matrix: (…, O, I).
        outputs, inputs = (sharing.features if dim == len(block.axes[name]) - back else alone for back in (2, 1))
        operands.setdefault(block, {})[name] = Operands(
            input=Operand(kind, meter, full_name, "input", (sharing.tokens, inputs), sharing.expert_tokens),
            weight=Operand(kind, meter, full_name, "weight", (outputs, inputs)),
            gradient=Operand(kind, meter, full_name, "gradient", (sharing.tokens, outputs), sharing.expert_tokens),
        )
    for block, own in operands.items():
        block.product = Quantising(kind, own, narrows_weight_gradients=config.weight_gradients != "compute")
    return meter
