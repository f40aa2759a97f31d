"""A dry run: memory against real passes and by hand, refusals as in training, nothing left behind, worlds of any size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from surefoot.cli.main import main
from surefoot.cli.verbs.dry import parse_memory, shown
from surefoot.config import ConfigError, override, to_json
from surefoot.dist import mesh as mesh_module
from surefoot.dist.fake import META, fake_world
from surefoot.dist.mesh import Grid
from surefoot.models.count import build_meta, count_parameters
from surefoot.parallel.schedules import Schedule
from surefoot.recipes.find import find_recipe
from surefoot.study.dry import dry_run, remedies, telling_ranks
from surefoot.train.run import Run
from tests.spread import spread

Tiny = Callable[..., Run]


def clean() -> bool:
    return not dist.is_initialized() and not mesh_module._GROUPS


def test_nothing_is_left_behind_also_after_an_error(tiny: Tiny) -> None:
    dry_run(tiny("plan.shard=4"))
    assert clean()
    with pytest.raises(ZeroDivisionError), fake_world(Grid({"shard": 4}), 1):
        print(1 // (dist.get_rank() - 1))
    assert clean()
    assert torch.ones(2).tolist() == [1.0, 1.0]
    assert torch.ones(2).device.type == "cpu"
    q = torch.randn(1, 1, 2, 4)
    assert bool(F.scaled_dot_product_attention(q, q, q).isfinite().all())


def test_the_generator_of_the_process_is_not_used(tiny: Tiny) -> None:
    before = torch.get_rng_state()
    dry_run(tiny("plan.shard=2"))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_ledger_sees_storages_come_grow_and_go() -> None:
    with fake_world(Grid({}), 0) as world:
        gone = torch.zeros(1000)
        world.ledger.open([])
        assert (gone.device, world.ledger.live) == (META, 0)
        x = torch.zeros(100)
        view, copy = x.view(10, 10), x * 2
        assert world.ledger.live == 800
        del copy
        assert (world.ledger.live, world.ledger.peak) == (400, 800)
        x.untyped_storage().resize_(0)
        assert world.ledger.live == 0
        x.untyped_storage().resize_(400)
        del x
        assert world.ledger.live == 400
        del view
        assert world.ledger.live == 0


def test_one_process_by_hand(tiny: Tiny) -> None:
    """Weights, two moments and a step count of each weight, and gradients of one process."""
    run = tiny("train.batch=2", "model.depth=3")
    found = dry_run(run)
    model = build_meta(run.model)
    numbers = count_parameters(model)["total"]
    matrices = sum(w.numel() for layer in model.layers for w in layer.parameters() if w.dim() == 2)
    others = [w for w in model.parameters() if w.dim() == 1 or w is model.embedding.weight or w is model.head.weight]
    assert found.holdings.parameters == numbers
    assert found.holdings.parameter_bytes == found.gradient_bytes == 4 * numbers
    assert found.holdings.state_bytes == 4 * (matrices + 2 * (numbers - matrices) + len(others))
    assert found.flows == {}


def test_activations_are_those_of_real_passes(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real pass with the fused kernel in the place of blocked attention keeps as many bytes."""
    from surefoot.blocks.mixers import attention as mixer
    from surefoot.ops import attention as ops
    from surefoot.ops.documents import EVERYTHING, Documents

    run = tiny("train.batch=3", "model.mixer.num_kv_heads=2", "data.sequence_length=64")

    def attend(q: Tensor, k: Tensor, v: Tensor, docs: Documents, *_options: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        bias = ops._shared_bias(docs, q.dtype, EVERYTHING)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
        return found[0].transpose(1, 2)

    monkeypatch.setattr(mixer, "attend", attend)
    model = run.model.build()
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    tokens, ids = torch.zeros(3, 64, dtype=torch.long), torch.arange(64).expand(3, 64) // 20
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        base = tensor._base if tensor._is_view() else tensor
        if not isinstance(base, torch.nn.Parameter):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        objective, _ = model.loss(tokens, tokens, Documents(ids, 64), dtype=torch.float32)
    assert objective.requires_grad
    assert dry_run(run).activation_bytes == sum(kept.values())


def test_micro_batches_between_first_and_last_count_as_often_as_they_run(tiny: Tiny) -> None:
    """Gathers go with micro-batches, the reduction with the step; whole gradients are kept between passes."""

    def flows(num: int) -> dict[str, int]:
        run = tiny("plan.shard=2", f"train.batch={2 * num}", "train.micro_batch=1")
        return {flow.kind: amount.calls for flow, amount in dry_run(run).flows.items()}

    two, nine = flows(2), flows(9)
    assert nine["all-gather"] * 2 == two["all-gather"] * 9
    assert nine["reduce-scatter"] == two["reduce-scatter"]
    once = dry_run(tiny("plan.shard=2", "train.batch=2", "train.micro_batch=1"))
    twice = dry_run(tiny("plan.shard=2", "train.batch=4", "train.micro_batch=1"))
    assert twice.gradient_bytes > 1.9 * once.gradient_bytes


def test_more_of_anything_shared_is_less_on_each(tiny: Tiny) -> None:
    alone = dry_run(tiny())
    for change in ("plan.shard=2", "plan.tensor=2", "plan.context=2"):
        found = dry_run(tiny("model.mixer.num_kv_heads=2", change))
        assert found.peak_bytes < alone.peak_bytes, change


def test_a_thousand_ranks(tiny: Tiny) -> None:
    run = override(find_recipe("llama-8b"), ["model.depth=4", "plan.shard=128", "plan.tensor=8", "train.micro_batch=1"])
    found = dry_run(run)
    model = build_meta(run.model)
    assert run.plan.num_ranks == 1024
    numbers = count_parameters(model)["total"]
    assert found.holdings.parameters == pytest.approx(numbers / 1024, rel=0.01)
    assert found.holdings.state_bytes == pytest.approx(2 * found.holdings.parameter_bytes, rel=0.01)


@pytest.fixture(scope="module")
def piped(tiny: Tiny) -> Run:
    return tiny("model.depth=16", "plan.pipeline=4", "train.batch=16", "train.micro_batch=1")


@pytest.mark.parametrize(
    ("schedule", "passes"),
    [
        ("gpipe", [16, 16, 16, 16]),
        ("1f1b", [4, 3, 2, 1]),
        # 2 (ranks - rank - 1) + (stages a rank - 1) ranks before the first backward pass (Narayanan et al., 2021), and it.
        ("interleaved", [11, 9, 7, 5]),
    ],
)
def test_a_schedule_keeps_as_many_micro_batches_as_its_paper_says(piped: Run, schedule: str, passes: list[int]) -> None:
    run = override(piped, [f"plan.schedule={schedule}"])
    found = [dry_run(run, rank) for rank in range(4)]
    assert [each.in_flight for each in found] == passes
    assert all(each.gradient_bytes > 0.95 * each.holdings.parameter_bytes for each in found)
    assert all(each.kept_bytes <= each.in_flight * each.activation_bytes for each in found)
    assert found[0].kept_bytes > found[0].in_flight * found[0].activation_bytes / len(found[0].stages) * 0.9


@pytest.mark.parametrize("schedule", spread(((schedule,) for schedule in get_args(Schedule)), 3))
def test_no_rank_of_a_pipeline_holds_more_than_those_that_tell(piped: Run, schedule: str) -> None:
    run = override(piped, [f"plan.schedule={schedule}", "model.depth=13"])
    told = max(dry_run(run, rank).peak_bytes for rank in telling_ranks(run))
    assert told == max(dry_run(run, rank).peak_bytes for rank in range(4))


def test_a_pipeline_of_thousands(tiny: Tiny) -> None:
    run = override(
        find_recipe("llama-8b"),
        [
            "model.depth=8",
            "plan.pipeline=4",
            "plan.replicate=16",
            "plan.shard=8",
            "plan.tensor=8",
            "train.micro_batch=1",
        ],
    )
    run = override(run, ["train.batch=1024"])
    assert run.plan.num_ranks == 4096
    found = [dry_run(run, rank) for rank in telling_ranks(run)]
    assert [each.rank for each in found] == [0, 2048, 3072, 4095]
    assert [each.stages for each in found] == [(0,), (2,), (3,), (3,)]  # the third has most layers


@pytest.mark.long
def test_seventy_billion_on_512_ranks() -> None:
    found = dry_run(override(find_recipe("llama-70b"), ["plan.shard=64", "plan.tensor=8", "train.micro_batch=1"]))
    assert found.holdings.parameters == pytest.approx(70.55e9 / 512, rel=0.01)


# -- the command -------------------------------------------------------------------------------------------------------

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Tiny) -> Command:
    (tmp_path / "tiny.json").write_text(to_json(tiny()))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["surefoot", "train", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.json"]
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


def test_it_prints_what_ranks_hold_and_send(command: Command) -> None:
    code, text, error = command(
        "tiny.json", "--dry-run", "--ranks", "4", "--set", "plan.tensor=2", "--set", "model.mixer.num_kv_heads=2"
    )
    assert (code, error) == (0, "")
    assert "shard 2, tensor 2, ZeRO-3 (4 ranks)" in text
    for part in (
        "parameters held",
        "optimizer state",
        "kept for backward",
        "most alive at once",
        "shard: all-gather",
        "not known",
    ):
        assert part in text


def test_it_prints_the_stages_of_a_pipeline(command: Command) -> None:
    code, text, error = command(
        "tiny.json", "--dry-run", "--ranks", "2", "--set", "plan.pipeline=2", "--set", "train.micro_batch=1"
    )
    assert (code, error) == (0, "")
    lines = {line[:40].strip(): line[40:].split() for line in text.splitlines()}
    assert lines["stages"] == ["0", "1"]
    assert lines["of so many passes through a stage"] == ["2", "1"]
    assert "pipeline: send" in text


def test_it_says_what_does_not_fit_and_what_would(command: Command, tiny: Tiny) -> None:
    peak = dry_run(tiny("plan.shard=2", "train.batch=16")).peak_bytes
    arguments = ("tiny.json", "--dry-run", "--ranks", "2", "--set", "train.batch=16")
    assert command(*arguments, "--device-memory", "1GiB")[:1] == (0,)
    code, text, _ = command(*arguments, "--device-memory", f"{0.9 * peak / 1024:.0f}KiB")
    assert code == 1
    assert "does not fit in" in text
    assert "nearest remedy: --set train.micro_batch=" in text
    code, text, _ = command(*arguments, "--device-memory", "1KiB")
    assert code == 1
    assert "no change of the plan is enough" in text


@pytest.mark.parametrize(
    "sets",
    [
        ["plan.tensor=3"],
        ["plan.context=5"],
        ["plan.shard=3"],
        ["plan.reshard=2"],
        ["plan.shard=2", "plan.tensor=4"],
        ["plan.pipeline=6", "train.batch=12"],
        ["plan.pipeline=3", "plan.schedule=zbv", "train.batch=12"],
        ["model.widht=3"],
    ],
)
def test_what_training_refuses_a_dry_run_refuses_alike(command: Command, sets: list[str]) -> None:
    arguments = ["tiny.json", "--ranks", "6", *(part for item in sets for part in ("--set", item))]
    code, _, error = command(*arguments)
    assert code == 2
    assert command(*arguments, "--dry-run") == (2, "", error)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["tiny.json", "--device-memory", "h100"], "goes with --dry-run only"),
        (["tiny.json", "--dry-run", "--out", "x"], "--out"),
        (["tiny.json", "--dry-run", "--device-memory", "much"], "is not a size like 80GiB"),
        (["--dry-run"], "RECIPE"),
    ],
)
def test_options_that_have_no_effect_are_refused(command: Command, arguments: list[str], part: str) -> None:
    code, _, error = command(*arguments)
    assert code == 2
    assert part in error


def test_sizes() -> None:
    assert parse_memory("79GiB") == parse_memory("h100") == 79 << 30
    assert parse_memory("1.5GB") == 1_500_000_000
    assert (shown(80 << 30), shown(1536), shown(12)) == ("80 GiB", "1.5 KiB", "12 B")
    with pytest.raises(ConfigError):
        parse_memory("80 gallons")


def test_remedies_are_legal_and_keep_the_ranks(tiny: Tiny) -> None:
    run = tiny("plan.replicate=2", "plan.shard=2", "plan.zero=1", "train.batch=16")
    found = list(remedies(run))
    assert found[0][0] == ["plan.zero=3"]
    assert {changed.plan.num_ranks for _, changed in found} == {4}
