"""What every rank does before its first step: device, data, and the model laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from surefoot.config import ConfigError
from surefoot.data.dataset import Dataset
from surefoot.dist.heartbeat import Heartbeat
from surefoot.dist.mesh import Mesh
from surefoot.dist.startup import choose_device, free_memory, set_threads, tune_allocator
from surefoot.ops.loss import working_bytes
from surefoot.optim.base import Optimizer, Param
from surefoot.parallel.apply import Laid, check, lay_out
from surefoot.parallel.holdings import held_bytes
from surefoot.parallel.pipeline import Pipeline
from surefoot.parallel.recompute import Budget
from surefoot.train.agree import Ranks
from surefoot.train.run import Run
from surefoot.train.state import laid_params


@dataclass
class Ready:
    """A run as one of its ranks has it before the first step; `params` are its parts of the weights, which
    `optimizer` moves."""

    device: torch.device
    ranks: Ranks
    dataset: Dataset
    laid: Laid
    params: list[Param]
    optimizer: Optimizer


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
    free = None
    if run.plan.recompute.device_share is not None:  # before this rank or, after the data, another one takes any
        try:
            free = free_memory(device)
        except ValueError as error:
            raise ConfigError("plan.recompute.budget", run.plan.recompute.budget, str(error)) from None
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
    if laid.compilation is not None:
        say(laid.compilation.announce())
    if isinstance(laid.passes, Pipeline) and (words := laid.passes.announce()) is not None:
        say(words)
    params = laid_params(laid)
    optimizer = run.optim.build(params)
    if free is not None:
        say(fit_device(run, laid, optimizer, free))
    return Ready(device, ranks, dataset, laid, params, optimizer)


def fit_device(run: Run, laid: Laid, optimizer: Optimizer, memory: int) -> str:
    """Give a budget that is a share of a device the bytes that its `memory` has left for activations, and say so; `ConfigError`
    where that is nothing."""
    assert isinstance(laid.recomputation, Budget)
    state = sum(tensor.nbytes for moments in optimizer.state().values() for tensor in moments.values())
    held = held_bytes(run.plan, laid.data_parallel, run.rank_batch // run.micro_batch)
    # Around the layers: what the embedding, the last norm and the head read and write.
    num_tokens = run.micro_batch * run.data.sequence_length // run.plan.context
    dtype, width = run.precision.compute_dtype, run.model.width
    around = 4 * num_tokens * width * dtype.itemsize
    around += working_bytes(num_tokens, -(-run.model.vocab_size // run.plan.tensor), width, dtype)
    return laid.recomputation.fit(memory, held.parameters + held.gradients + held.gathered + state, around)
