"""Checkpoints of a run over ranks: equal at load in any layout, one copy on disk, and all ranks of one mind about them."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.checkpoint import saver
from surefoot.checkpoint.config import CheckpointConfig
from surefoot.checkpoint.load import latest, open_checkpoint, read_tensors
from surefoot.checkpoint.metadata import tensor_metadata
from surefoot.config import CheckpointError, override
from surefoot.dist.layout import Layout, Place, Split
from surefoot.dist.mesh import Grid, own_mesh
from surefoot.dist.pool import Pool
from surefoot.observe.folder import RunFolder
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.base import Param
from surefoot.parallel.plan import Plan
from surefoot.train.agree import Ranks
from surefoot.train.facts import weights_hash
from surefoot.train.run import Run
from surefoot.train.state import Progress, parts_of, restore
from surefoot.train.trainer import Trainer
from tests.train.test_ranks import assert_same_run, fit, fit_and_catch, newest

Tiny = Callable[..., Run]


@pytest.fixture(scope="module")
def run(tiny: Tiny) -> Run:
    return override(tiny(), ["precision.compute=fp64", "model.mixer.num_kv_heads=2"])


@pytest.fixture(scope="module")
def four_ranks(pool: Pool, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that four ranks began."""
    path = tmp_path_factory.mktemp("four") / "run"
    pool.run(fit, run.model_copy(update={"plan": Plan(shard=2, tensor=2)}), path, 3)
    return path


def held(run: Run, path: Path) -> dict[str, tuple[tuple[slice, ...] | None, torch.Tensor]] | None:
    """What a rank holds after it has read a run's newest checkpoint: which part of each weight and moment, and its entries."""
    mesh = own_mesh(run.plan.grid)
    if mesh is None:
        return None
    trainer = Trainer(run, RunFolder(path), rank=mesh.rank)
    trainer._set_up()
    state, found = trainer.optimizer.state(), {}
    for param in trainer.params:
        box = None if param.place is None else param.place.box.slices
        found[f"model/{param.name}"] = (box, param.tensor.detach().clone())
        for moment, tensor in state[param.name].items():
            is_cut = tensor.shape == param.tensor.shape
            found[f"optim/{param.name}/{moment}"] = (box if is_cut else None, tensor.clone())
    return found


@pytest.mark.parametrize(
    "second",
    [Plan(), Plan(tensor=2), Plan(shard=2, zero=1), Plan(replicate=2, shard=4), Plan(shard=2, tensor=2, context=2)],
    ids=Plan.describe,
)
def test_weights_and_moments_are_equal_at_load(
    pool: Pool, run: Run, tmp_path: Path, four_ranks: Path, second: Plan
) -> None:
    saved = read_tensors(newest(four_ranks))
    path = tmp_path / "run"
    shutil.copytree(four_ranks, path)
    shares = pool.run(held, run.model_copy(update={"plan": second}), path)[: second.num_ranks]
    expected = {name for name in saved if not name.startswith("random/")}
    for share in shares:
        assert share.keys() == expected
        for name, (box, tensor) in share.items():
            assert torch.equal(tensor, saved[name] if box is None else saved[name][box]), name


def test_a_checkpoint_of_ranks_is_one_copy_in_their_files(four_ranks: Path) -> None:
    checkpoint = newest(four_ranks)
    files = sorted(file.name for file in checkpoint.path.glob("*.distcp"))
    assert files == [f"__{rank}_0.distcp" for rank in range(4)]
    tensors = tensor_metadata(checkpoint.metadata)
    for name, described in tensors.items():
        assert sum(math.prod(chunk.sizes) for chunk in described.chunks) == math.prod(described.size), name
        is_matrix = name.startswith("model/layers") and len(described.size) == 2
        assert not is_matrix or max(math.prod(chunk.sizes) for chunk in described.chunks) * 4 == math.prod(
            described.size
        )


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


def save_watched(run: Run, path: Path) -> tuple[int, int] | None:
    """The largest tensor made to save, and the largest that was written."""
    mesh = own_mesh(run.plan.grid)
    if mesh is None:
        return None
    trainer = Trainer(run, RunFolder(path), rank=mesh.rank)
    trainer._set_up()
    written: list[int] = []
    write = saver.write_parts

    def spy(directory: Path, rank: int, parts: Any) -> Any:
        kept = list(parts)
        written.extend(part.tensor.nbytes for _, part in kept)
        with Largest() as made:
            done = write(directory, rank, kept)
        written.append(made.bytes)
        return done

    with pytest.MonkeyPatch.context() as patch, Largest() as largest:
        patch.setattr(saver, "write_parts", spy)
        trainer._save("asynchronous")
        trainer.saver.finish()
    return largest.bytes, max(written)


def test_no_rank_makes_a_whole_tensor_to_save_it(pool: Pool, run: Run, tmp_path: Path) -> None:
    large = override(run, ["model.width=64", "model.vocab_size=4096"])
    whole = 4096 * 64 * 8
    for plan, share in ((Plan(shard=2, tensor=2), 4), (Plan(replicate=2, shard=2), 2)):
        path = tmp_path / plan.describe()
        RunFolder.create(path, large)
        seen = pool.run(save_watched, large.model_copy(update={"plan": plan}), path)[: plan.num_ranks]
        assert all(max(found) == whole // share for found in seen), seen


def fail_on_rank_1(run: Run, path: Path) -> str:
    """The disk of rank 1 is full when step 4 is saved."""
    write = saver.write_parts

    def fail(directory: Path, rank: int, parts: Any) -> Any:
        if rank == 1 and "step-00000004" in directory.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(directory, rank, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_parts", fail)
        return fit_and_catch(run, path)


def test_a_full_disk_of_one_rank_ends_all_and_the_run_goes_on_later(pool: Pool, run: Run, tmp_path: Path) -> None:
    over = run.model_copy(update={"plan": Plan(shard=2)})
    said = pool.run(fail_on_rank_1, over, tmp_path / "run")[:2]
    assert said[0] == said[1]
    assert "step-00000004: cannot be saved (rank 1: No space left on device)" in said[0]
    assert [entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    pool.run(fit, over, tmp_path / "run")
    fit(run, tmp_path / "straight")
    assert_same_run(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize("plan", [Plan(shard=2, tensor=2)], ids=Plan.describe)
def test_saving_in_the_background_changes_no_bit(pool: Pool, run: Run, tmp_path: Path, plan: Plan) -> None:
    for mode in ("asynchronous", "blocking"):
        changed = override(run, [f"checkpoint.mode={mode}", "train.num_steps=4", "observe.evaluate_every=null"])
        pool.run(fit, changed.model_copy(update={"plan": plan}), tmp_path / mode)
    results = [
        json.loads((tmp_path / mode / "facts.json").read_text())["result"] for mode in ("asynchronous", "blocking")
    ]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    first, second = (read_tensors(newest(tmp_path / mode)) for mode in ("asynchronous", "blocking"))
    assert all(torch.equal(first[name], second[name]) for name in second if not name.startswith("random/"))
    assert results[0]["weights_sha256"] == weights_hash(
        sorted(read_tensors(newest(tmp_path / "blocking"), "model/").items())
    )


def stages(path: Path) -> tuple[str, list[str]] | None:
    """Two pipeline ranks with weights of their own save and restore; the hash of all weights, and what is refused."""
    mesh = own_mesh(Grid({"pipeline": 2, "tensor": 2}))
    if mesh is None:
        return None
    ranks = Ranks(mesh, torch.device("cpu"))

    def params(fill: bool) -> list[Param]:
        found = []
        for name, (value, held_by) in stage_weights().items():
            if mesh.index("pipeline") == held_by:
                place = Place(Layout(tuple(value.shape), (Split(0, ("tensor",)),)), mesh)
                part = value[place.box.slices].clone()
                found.append(Param(name, part if fill else torch.zeros_like(part), ("ffn", "embed"), place))
        return found

    saved = params(fill=True)
    optimizer = AdamWConfig().build(saved)
    for param in saved:
        optimizer.state()[param.name]["first_moment"].copy_(2 * param.tensor)
        optimizer.state()[param.name]["step"].fill_(7)
    with saver.Saver(path, CheckpointConfig(), ranks.group, print) as writer:
        writer.save(1, parts_of(saved, optimizer, ranks), {"progress": vars(Progress(step=1))}, "asynchronous")
        writer.finish()
    checkpoint = latest(path, print, ranks.group)
    assert checkpoint is not None
    loaded = params(fill=False)
    other = AdamWConfig().build(loaded)
    assert restore(checkpoint, loaded, other, ranks).step == 1
    for param, wanted in zip(loaded, saved, strict=True):
        assert torch.equal(param.tensor, wanted.tensor)
        assert torch.equal(other.state()[param.name]["first_moment"], 2 * wanted.tensor)
        assert other.state()[param.name]["step"] == 7
    said = []
    for lacking in ("second", "first"):
        fewer = [param for param in params(fill=False) if param.name != lacking]
        try:
            restore(checkpoint, fewer, AdamWConfig().build(fewer), ranks)
        except CheckpointError as error:
            said.append(str(error))
    return weights_hash(ranks.weights(saved)), said


def stage_weights() -> dict[str, tuple[torch.Tensor, int]]:
    values = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(1))
    values[0, 0, 0] = -0.0
    return {
        name: (value, number % 2)
        for number, (name, value) in enumerate(zip(("first", "second", "third", "fourth"), values, strict=True))
    }


def test_ranks_may_hold_different_weights(pool: Pool, tmp_path: Path) -> None:
    """As pipeline stages do: two weights on each."""
    found = pool.run(stages, tmp_path)[:4]
    expected = weights_hash((name, value) for name, (value, _) in sorted(stage_weights().items()))
    for digest, said in found:
        assert digest == expected
        assert ["weight second is in it only" in said[0], "weight first is in it only" in said[1]] == [True, True]
    checkpoint = open_checkpoint(tmp_path / "step-00000001")
    weights = read_tensors(checkpoint, "model/")
    assert weights.keys() == stage_weights().keys()
    assert all(torch.equal(weights[name], value) for name, (value, _) in stage_weights().items())
