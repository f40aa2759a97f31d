"""What every rank does before its first step: device, data, and the model laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from surefoot.config import ConfigError
from surefoot.data.dataset import Dataset
from surefoot.dist.heartbeat import Heartbeat
from surefoot.dist.mesh import Mesh
from surefoot.dist.startup import choose_device, set_threads, tune_allocator
from surefoot.optim.base import Param
from surefoot.parallel.apply import Laid, check, lay_out
from surefoot.train.agree import Ranks
from surefoot.train.run import Run
from surefoot.train.state import laid_params


@dataclass
class Ready:
    """A run as one of its ranks has it before the first step; `params` are its parts of the weights."""

    device: torch.device
    ranks: Ranks
    dataset: Dataset
    laid: Laid
    params: list[Param]


def get_ready(run: Run, rank: int, heartbeat: Heartbeat, say: Callable[[str], None]) -> Ready:
    """All ranks call it together, with torch's process group there if they are several; `ConfigError` names what does not fit."""
    try:
        device = choose_device(run.train.device)
    except ValueError as error:
        raise ConfigError("train.device", run.train.device, str(error)) from None
    set_threads(run.train.threads)
    if device.type == "cpu":
        tune_allocator()
    check(run.plan, run.model, run.data.sequence_length, run.precision)
    mesh = Mesh(run.plan.grid, rank)
    ranks = Ranks(mesh, device, heartbeat)
    with ranks.first_alone():
        dataset: Dataset = run.data.build(announce=say)
    if dataset.vocab_size > run.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            run.model.vocab_size,
            f"is smaller than the tokenizer's; use {dataset.vocab_size} or more",
        )
    laid = lay_out(
        run.plan,
        run.model,
        mesh,
        sequence_length=run.data.sequence_length,
        dtype=run.precision.weight_dtype,
        device=device,
        seed=run.train.seed,
        precision=run.precision,
    )
    return Ready(device, ranks, dataset, laid, laid_params(laid))
