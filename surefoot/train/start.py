"""A run that starts from weights it did not draw: its folder with a checkpoint of step 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from surefoot.checkpoint.save import save
from surefoot.dist.mesh import Mesh
from surefoot.models.initialise import materialise
from surefoot.observe.folder import RunFolder
from surefoot.parallel.plan import Plan
from surefoot.train.agree import Ranks
from surefoot.train.run import Run
from surefoot.train.state import Progress, named_params, parts_of, states_of


def write_start(folder: RunFolder, run: Run, weights: Mapping[str, Tensor]) -> Path:
    """Save all weights and states of the run's model, by full name, beside moments as its optimizer starts them.

    Any layout may go on from there. Returns the checkpoint.
    """
    cpu = torch.device("cpu")
    with torch.device("meta"):
        model = run.model.build().to(run.precision.weight_dtype)
    run.precision.retype(model)
    materialise(model, cpu)
    params, states = named_params(model, run.precision), states_of(model)
    for param in params + states:
        param.tensor.detach().copy_(weights[param.name])
    torch.manual_seed(run.train.seed)
    parts = parts_of(params + states, run.optim.build(params), Ranks(Mesh(Plan().grid, 0), cpu))
    tensors = {name: part.tensor for name, part in parts.items()}
    return save(folder.checkpoints, 0, tensors, {"progress": vars(Progress())})
