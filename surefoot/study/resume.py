"""A stop and a new start in the middle of a trial: what a layout saves, it loads with the same bits, and so does one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from surefoot.checkpoint.config import CheckpointConfig
from surefoot.checkpoint.load import open_checkpoint, read_tensors
from surefoot.checkpoint.manifest import step_name
from surefoot.checkpoint.saver import Saver
from surefoot.optim.base import Optimizer, Param
from surefoot.train.agree import Ranks
from surefoot.train.state import Progress, parts_of, restore


def stop_and_go_on(
    params: list[Param], optimizer: Optimizer, ranks: Ranks, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save, lose and load again all weights and moments, as a run does that is stopped; all ranks call it together.

    By weight which entries came back with other bits (of a moment: all or none), and on the first rank what one process finds
    in the checkpoint.
    """
    with Saver(folder, CheckpointConfig(), ranks.group, announce=print) as saver:
        saver.save(1, parts_of(params, optimizer, ranks), {"progress": vars(Progress())}, "blocking")
    before = {param.name: param.tensor.detach().clone() for param in params}
    moments = {name: {key: tensor.clone() for key, tensor in held.items()} for name, held in optimizer.state().items()}
    for param in params:
        param.tensor.detach().fill_(float("nan") if param.tensor.is_floating_point() else -1)
    optimizer.restore(
        {name: {key: torch.zeros_like(tensor) for key, tensor in held.items()} for name, held in moments.items()}
    )
    checkpoint = open_checkpoint(folder / step_name(1), ranks.group)
    restore(checkpoint, params, optimizer, ranks)
    after = optimizer.state()
    changed = {}
    for param in params:
        is_other = any(
            not torch.equal(tensor, after[param.name][key]) for key, tensor in moments.get(param.name, {}).items()
        )
        changed[param.name] = (param.tensor.detach() != before[param.name]) | is_other
    alone = read_tensors(checkpoint) if ranks.is_first else {}
    return changed, {name: tensor for name, tensor in alone.items() if not name.startswith("random/")}
