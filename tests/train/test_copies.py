"""One flipped bit in one copy of one tensor is found, whatever the layout; agreeing copies raise nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.config import RunError, override
from surefoot.data.loader import Loader
from surefoot.dist.layout import Layout, Split
from surefoot.dist.mesh import Grid, own_mesh
from surefoot.dist.pool import Pool
from surefoot.models.count import build_meta
from surefoot.models.initialise import named_weights
from surefoot.observe.folder import RunFolder
from surefoot.parallel.plan import Plan
from surefoot.train.copies import Deviation, Seen, _compare, _number, _slot, deviations, held
from surefoot.train.run import Run
from surefoot.train.trainer import Trainer

Tiny = Callable[..., Run]
Flip = tuple[int, str]


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    """Change one bit of the last entry."""
    integers = {4: torch.int32, 8: torch.int64}[tensor.element_size()]
    tensor.view(integers).view(-1)[-1:].bitwise_xor_(1 << bit)


class Flipping(Trainer):
    """Flips a bit of a named tensor on one rank in step 4, after its update: a later one would spread it or heal it."""

    plant: Flip | None = None

    def _step(self, loader: Loader) -> None:
        super()._step(loader)
        if self.plant is not None and self.progress.step == 4 and self.rank == self.plant[0]:
            (tensor,) = [one.tensor for one in self._held() if one.name == self.plant[1]]
            flip(tensor)

    def _held(self) -> list[Any]:
        return held(self.laid.data_parallel, self.params, self.optimizer)


def fit(run: Run, path: Path, plant: Flip | None = None) -> str | None:
    """What a rank's run ended with; None where the plan does not use it."""
    mesh = own_mesh(run.plan.grid)
    if mesh is None:
        return None
    folder = RunFolder.create(path, run) if mesh.rank == 0 else RunFolder(path)
    trainer = Flipping(run, folder, rank=mesh.rank)
    trainer.plant = plant
    try:
        return str(trainer.fit())
    except RunError as error:
        return str(error)


@pytest.fixture(scope="module")
def run(tiny: Tiny) -> Run:
    return override(
        tiny(),
        [
            "data.sequence_length=32",
            "model.mixer.num_kv_heads=2",
            "observe.fingerprint_every=2",
            "checkpoint.every=4",
            "train.num_steps=6",
        ],
    )


def names(run: Run) -> list[str]:
    return [name for name, _, _ in named_weights(build_meta(run.model))]


@pytest.mark.parametrize(
    ("plan", "role", "victim", "deviating"),
    [
        (Plan(replicate=4), "norm", 2, "rank 2 deviates from the other 3"),
        (Plan(replicate=4), "matrix/momentum", 3, "rank 3 deviates from the other 3"),
        (Plan(replicate=4), "norm/step", 1, "rank 1 deviates from the other 3"),
        (Plan(replicate=2), "matrix", 1, "ranks 0, 1 hold different bits"),
        (Plan(shard=4, zero=1), "matrix", 1, "rank 1 deviates from the other 3"),
        (Plan(replicate=2, shard=2, zero=1), "matrix/momentum", 3, "ranks 1, 3 hold different bits"),
        (Plan(replicate=2, shard=2), "norm/second_moment", 2, "ranks 0, 2 hold different bits"),
        (Plan(tensor=4), "norm", 3, "rank 3 deviates from the other 3"),
        (Plan(shard=2, tensor=2), "norm", 1, "ranks 0, 1 hold different bits"),
        (Plan(replicate=3, tensor=2), "matrix", 3, "rank 3 deviates from the other 2"),
    ],
    ids=lambda value: value.describe() if isinstance(value, Plan) else None,
)
def test_a_flipped_bit_is_named(
    pool: Pool, run: Run, tmp_path: Path, plan: Plan, role: str, victim: int, deviating: str
) -> None:
    if plan.tensor == 4:
        run = override(run, ["model.mixer.num_heads=4", "model.mixer.num_kv_heads=4"])
    if plan.replicate == 3:
        run = override(run, ["train.batch=6"])
    known = names(run)
    norm = next(name for name in known if "norm" in name)
    matrix = next(name for name in known if name.endswith("wq"))
    name = role.replace("norm", norm).replace("matrix", matrix)
    path = tmp_path / "run"
    said = pool.run(fit, run.model_copy(update={"plan": plan}), path, (victim, name))[: plan.num_ranks]
    assert len(set(said)) == 1
    assert said[0] is not None
    assert said[0].startswith(f"step 4: {name}: {deviating}")
    assert "copies agreed at step 2" in said[0]
    evidence = json.loads((path / "evidence" / "step-00000004" / "copies.json").read_text())
    assert evidence["tensors"][0]["name"] == name
    assert not (path / "checkpoints").exists()  # none was made of copies that differ


@pytest.mark.parametrize("plan", [Plan(replicate=2, shard=2), Plan(shard=2, zero=1, context=2, context_kind="ring")])
def test_a_good_run_agrees(pool: Pool, run: Run, tmp_path: Path, plan: Plan) -> None:
    said = pool.run(fit, run.model_copy(update={"plan": plan}), tmp_path / "run")
    assert said[: plan.num_ranks] == ["True"] * plan.num_ranks


def test_null_never_looks(pool: Pool, run: Run, tmp_path: Path) -> None:
    never = override(run, ["observe.fingerprint_every=null", "plan.replicate=2"])
    said = pool.run(fit, never, tmp_path / "run", (1, names(run)[1]))
    assert said[:2] == ["True"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_every_bit_of_every_entry_counts(dtype: torch.dtype) -> None:
    tensor = (torch.arange(60) % 11 % 2 if dtype is torch.bool else torch.arange(60) % 11).to(dtype).view(5, 12)
    size = tensor.element_size()
    before = int(_number(tensor))
    assert before == int(_number(tensor.clone()))
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    for entry in (0, 1, 31, 59):
        for bit in range(1 if dtype is torch.bool else 8 * size):
            changed = tensor.clone()
            changed.view(integers).view(-1)[entry : entry + 1].bitwise_xor_(_one(bit, size))
            assert int(_number(changed)) != before
    assert int(_number(tensor.flip(0))) != before
    assert int(_number(torch.zeros(0, dtype=dtype))) == 0


def _one(bit: int, size: int) -> int:
    """A word of one bit; the highest is the sign."""
    return 1 << bit if size == 1 or bit < 8 * size - 1 else -(1 << bit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_signs_do_not_cancel(dtype: torch.dtype) -> None:
    tensor = torch.arange(1.0, 61.0).to(dtype)
    numbers = {int(_number(tensor * sign)) for sign in (1, -1)}
    for i, j in ((0, 1), (2, 59), (7, 8)):
        changed = tensor.clone()
        changed[[i, j]] *= -1
        numbers.add(int(_number(changed)))
    assert len(numbers) == 5


def test_pieces_of_a_large_tensor_have_weights_of_their_own() -> None:
    tensor = torch.zeros(3 << 20)
    tensor[5] = 1.0
    moved = torch.zeros(3 << 20)
    moved[(1 << 20) + 5] = 1.0
    assert int(_number(tensor)) != int(_number(moved))


def test_stages_hold_different_sets() -> None:
    """Over 2 stages x 2 replicas: each stage's own weights, also where two stages call theirs by one name."""
    grid, slot = Grid({"pipeline": 2, "replicate": 2}), _slot(Layout((4,)))
    everybody = [
        {"first": Seen(slot, 1), "count": Seen(slot, 5)},
        {"first": Seen(slot, 1), "count": Seen(slot, 5)},
        {"last": Seen(slot, 2), "count": Seen(slot, 6)},
        {"last": Seen(slot, 3), "count": Seen(slot, 6)},
    ]
    assert [(one.name, one.ranks) for one in _compare(everybody, grid)] == [("last", (2, 3))]


def test_only_the_same_part_is_compared() -> None:
    grid = Grid({"shard": 2, "tensor": 2})
    slot = _slot(Layout((4, 4), (Split(0, ("tensor",)),)))
    everybody = [{"w": Seen(slot, number)} for number in (1, 2, 1, 3)]
    assert list(_compare(everybody, grid)) == [Deviation("w", {1: 2, 3: 3})]
    assert not list(_compare([{"w": Seen(slot, number)} for number in (1, 2, 1, 2)], grid))


def test_copies_take_one_collective(pool: Pool, run: Run) -> None:
    assert pool.run(count_collectives, run.model_copy(update={"plan": Plan(replicate=2, tensor=2)}))[:4] == [1] * 4


def count_collectives(run: Run) -> int | None:
    mesh = own_mesh(run.plan.grid)
    if mesh is None:
        return None
    path = Path("/nonexistent")
    trainer = Trainer(run, RunFolder(path), rank=mesh.rank)
    trainer.folder.rewind = lambda _step: None  # type: ignore[method-assign]
    trainer.folder.write_json = lambda _name, _value: None  # type: ignore[method-assign]
    trainer._set_up()
    group = trainer.ranks.group
    assert group is not None
    before = group._get_sequence_number_for_group()
    assert deviations(held(trainer.laid.data_parallel, trainer.params, trainer.optimizer), trainer.ranks) == []
    return group._get_sequence_number_for_group() - before
