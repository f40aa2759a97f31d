"""What a decoder and a model that reads images are alike in: a language model, and layers with full names."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from surefoot.models.decoder import Decoder
from surefoot.models.multimodal import Multimodal


@runtime_checkable
class _Stacked(Protocol):
    def stacks(self) -> dict[str, dict[str, nn.Module]]: ...


def text_of(model: Decoder | Multimodal) -> Decoder:
    """The language model: all of it where it reads no images."""
    return model.text if isinstance(model, Multimodal) else model


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that passes go through with their full names: of a decoder, of a model with images, or of a stage of one."""
    if isinstance(model, _Stacked):
        return [
            (f"{stack}.{name}", layer) for stack, layers in model.stacks().items() for name, layer in layers.items()
        ]
    return [(f"layers.{name}", layer) for name, layer in model.get_submodule("layers").named_children()]
