"""What a decoder and a model that reads images are alike in: a language model, and layers with full names."""

from __future__ import annotations

from torch import nn

from surefoot.models.decoder import Decoder
from surefoot.models.multimodal import Multimodal


def text_of(model: Decoder | Multimodal) -> Decoder:
    """The language model: all of it where it reads no images."""
    return model.text if isinstance(model, Multimodal) else model


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that passes go through with their full names: of a decoder, of some stage of one, of a model with images."""
    if isinstance(model, Multimodal):
        return [(f"{stack}.{i}", layer) for stack, layers in model.stacks().items() for i, layer in enumerate(layers)]
    return [(f"layers.{name}", layer) for name, layer in model.get_submodule("layers").named_children()]
