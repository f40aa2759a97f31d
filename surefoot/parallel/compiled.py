"""Layers through torch's compiler (Ansel et al., 2024), each by itself, under any plan.

What a layer does by hand-written gradients (products, attention, norms, scans, whatever sends between ranks) stays outside of the
graphs: `ops.autograd.apply` says why. So is all that surrounds layers: the loss, FSDP's gathers, recomputation, the schedule.
What is left to compile is elementwise work between those.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from surefoot.config import ConfigError
from surefoot.models.layers import named_layers

BACKEND = "inductor"
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_COMPILERS = ("g++", "clang++")


@dataclass
class Compilation:
    """Layers that are compiled in their first passes; `describe` counts what came of it."""

    num_layers: int
    cache: str

    def announce(self) -> str:
        """Before the first step."""
        return (
            f"{self.num_layers} layers are compiled: the first step takes a minute or more, less where {self.cache} has them "
            "already"
        )

    def facts(self) -> dict[str, int]:
        """Graphs of this process so far, and the places where the compiler left a layer to Python."""
        from torch._dynamo.utils import counters  # noqa: PLC0415 - only where a compiler runs

        return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}

    def describe(self) -> str:
        """After the first step."""
        found = self.facts()
        return f"compiled {found['graphs']} graphs; {found['breaks']} places between them run as they are"


def check(wanted: str) -> None:
    """`ConfigError` where there is nothing to compile with."""
    if wanted == "none" or torch.cuda.is_available():
        return
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), *_COMPILERS) if name):
        raise ConfigError(
            "plan.compile", wanted, "needs a C++ compiler on a CPU, and none is on the PATH; install g++ or use none"
        )


def compile_layers(wanted: str, modules: Sequence[nn.Module]) -> Compilation | None:
    """Have each layer of a model or of stages compiled when it first runs; None where that is not wanted."""
    if wanted == "none":
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = os.environ.setdefault(_CACHE, str(home / "surefoot" / "inductor"))
    layers = [layer for module in modules for _, layer in named_layers(module)]
    # Layers share their code but not their shapes, types of mixer or hooks: each may take its own graphs.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * len(layers))
    # The tracer looks at every tensor in passing.
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning
    )
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=BACKEND)
    return Compilation(len(layers), cache)
