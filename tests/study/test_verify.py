"""`verify` passes layouts that are right, and each kind of planted fault is caught by the check that is for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLU
from surefoot.blocks.routers.sigmoid import SigmoidConfig
from surefoot.cli.verbs import verify as verb
from surefoot.config import ConfigError, override
from surefoot.dist.layout import Layout
from surefoot.dist.pool import Pool
from surefoot.optim.muon import Muon
from surefoot.parallel import apply as apply_module
from surefoot.parallel import shard as shard_module
from surefoot.parallel.apply import Laid
from surefoot.parallel.copies import Copies
from surefoot.parallel.plan import Plan
from surefoot.parallel.shard import DataParallel, FullySharded, Replicated, Zero1
from surefoot.study import resume as resume_module
from surefoot.study import verify as verify_module
from surefoot.study.trial import MAGNITUDES, Share, trial
from surefoot.study.verify import judge, legal_plans, parse_plan, reference_of, shrunk, verify
from surefoot.train.run import Run

Tiny = Callable[..., Run]


@pytest.fixture(scope="module")
def run(tiny: Tiny) -> Run:
    return shrunk(override(tiny(), ["model.mixer.num_kv_heads=2", "model.mixer.rope_theta=20", "model.z_loss=0.01"]))


def test_right_layouts_pass(run: Run, pool: Pool) -> None:
    said: list[str] = []
    plans = [Plan(shard=2, tensor=2), Plan(replicate=2, context=2, context_kind="ring"), Plan(shard=4, zero=1)]
    verdicts = verify(run, plans, pool, lambda verdict: said.append(verdict.plan.describe()))
    assert [verdict.failure for verdict in verdicts] == [None] * 3
    assert said == [plan.describe() for plan in plans]
    assert all(verdict.worst["initial weights"] == 0 for verdict in verdicts)


def test_only_what_was_compared_is_reported(run: Run, pool: Pool) -> None:
    plans = [Plan(shard=2), Plan(replicate=2)]
    with_start, without = verify(run, plans, pool, lambda _: None, restarted=plans[:1])
    assert with_start.failure is None
    assert without.failure is None
    assert with_start.worst.keys() == set(verify_module.QUANTITIES)
    assert without.worst.keys() == set(verify_module.QUANTITIES) - verify_module.OF_RESTART


def test_layouts_of_experts_are_tried_where_there_are_experts(run: Run, pool: Pool) -> None:
    assert not any(plan.expert > 1 for plan in legal_plans(run, 8))
    ffn = MoEConfig(num_experts=6, top_k=2, hidden=12, router=SigmoidConfig())
    routed = run.model_copy(update={"model": run.model.model_copy(update={"ffn": ffn})})
    plans = legal_plans(routed, 8)
    assert {plan.expert for plan in plans} == {1, 2}  # 4 and 8 do not divide 6
    assert any(plan.expert > 1 and plan.pipeline > 1 for plan in plans)
    chosen = [Plan(expert=2), Plan(expert=2, zero=1), Plan(shard=2, expert=2, tensor=2, zero=2)]
    assert all(plan in plans for plan in (chosen[0], chosen[2]))
    assert [verdict.failure for verdict in verify(routed, chosen, pool, lambda _: None)] == [None] * 3


# -- faults, planted inside the ranks ----------------------------------------------------------------------------------


def gradient_times_ranks(patch: pytest.MonkeyPatch) -> None:
    """A weight that tensor parallelism cuts gets its gradient once a rank too often."""
    real = Replicated.reduce

    def reduce(self: Any) -> None:
        real(self)
        for local in self.locals:
            if local.layout.is_cut_along("tensor"):
                local.part.grad.mul_(self.mesh.size("tensor"))

    patch.setattr(Replicated, "reduce", reduce)


def norm_counted_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Layout, "counts_at", lambda *_: True)


def one_tensor_not_reduced(patch: pytest.MonkeyPatch) -> None:
    real = shard_module.sum_all_
    patch.setattr(shard_module, "sum_all_", lambda tensors, group: real(tensors[1:], group))


def local_token_count(patch: pytest.MonkeyPatch) -> None:
    real = Laid.accumulate

    def accumulate(self: Laid, micro_batches: Any, num_tokens: int, dtype: torch.dtype) -> tuple[float, float]:
        own = sum(int((targets >= 0).sum()) for _, targets, _ in micro_batches)
        return real(self, micro_batches, own * self.mesh.size("replicate", "shard"), dtype)

    patch.setattr(Laid, "accumulate", accumulate)


def qk_norm_without_its_partial_gradient(patch: pytest.MonkeyPatch) -> None:
    real = DataParallel._sum_over_tensor_ranks

    def sum_over(self: Any) -> None:
        kept = {local.name: local.part.grad.clone() for local in self.locals if local.axes == ("head",)}
        real(self)
        for local in self.locals:
            if local.name in kept:
                local.part.grad.copy_(kept[local.name])

    patch.setattr(DataParallel, "_sum_over_tensor_ranks", sum_over)


def start_differing_by_rank(patch: pytest.MonkeyPatch) -> None:
    real = apply_module.generator_for
    patch.setattr(apply_module, "generator_for", lambda seed, name: real(seed + dist.get_rank(), name))


def stale_weights(patch: pytest.MonkeyPatch) -> None:
    """Weights are not brought up to date after the optimizer moved its parts, once the model is under way."""
    real, calls = Zero1.after_step, [0]

    def after_step(self: Any) -> None:
        calls[0] += 1
        if calls[0] <= 2:
            real(self)

    patch.setattr(Zero1, "after_step", after_step)


def weights_kept_from_before(patch: pytest.MonkeyPatch) -> None:
    """FSDP2 gathers weights ahead of their use; those that evaluation left gathered are used again after the update."""
    patch.setattr(FullySharded, "after_step", lambda _: None)


def stale_copy(patch: pytest.MonkeyPatch) -> None:
    """The head's copy of the embedding stays as it started."""
    real, calls = Copies.refresh, [0]

    def refresh(self: Any) -> None:
        calls[0] += 1
        if calls[0] <= 1:
            real(self)

    patch.setattr(Copies, "refresh", refresh)


def copy_without_its_gradient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copies, "add_gradients", lambda _: None)


def leaking_documents(patch: pytest.MonkeyPatch) -> None:
    """Only this layout forgets where documents end."""
    real = apply_module.context.cut
    patch.setattr(
        apply_module.context,
        "cut",
        lambda mesh, tokens, targets, ids: real(mesh, tokens, targets, torch.zeros_like(ids)),
    )


def lost_moment(patch: pytest.MonkeyPatch) -> None:
    """One weight's momentum does not come back from a checkpoint."""
    real = Muon.restore

    def restore(self: Any, state: Any) -> None:
        real(self, state)
        next(iter(self.state().values()))["momentum"].zero_()

    patch.setattr(Muon, "restore", restore)


def swapped_parts(patch: pytest.MonkeyPatch) -> None:
    """Ranks save each other's rows."""
    real = resume_module.parts_of

    def parts_of(*arguments: Any) -> Any:
        parts = real(*arguments)
        name = "model/layers.0.mixer.wq"
        if name in parts:
            parts[name] = replace(parts[name], tensor=parts[name].tensor.flip(0))
        return parts

    patch.setattr(resume_module, "parts_of", parts_of)


def planted(
    fault: Callable[[pytest.MonkeyPatch], None], run: Run, plan: Plan, folder: Path, num_micro: int = 1
) -> Share | None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        return trial(run, plan, num_micro, folder)


@pytest.mark.parametrize(
    ("fault", "plan", "said"),
    [
        (gradient_times_ranks, Plan(tensor=2), "gradients: "),
        (norm_counted_twice, Plan(replicate=2), "gradient norm: "),
        (one_tensor_not_reduced, Plan(replicate=2), "gradients: copies of embedding.weight differ"),
        (local_token_count, Plan(replicate=2), "gradients: "),
        (
            qk_norm_without_its_partial_gradient,
            Plan(tensor=2),
            "gradients: copies of layers.0.mixer.norm_q.scale differ",
        ),
        (start_differing_by_rank, Plan(replicate=2), "initial weights: copies of"),
        (start_differing_by_rank, Plan(shard=2), "initial weights: "),
        (stale_weights, Plan(shard=2, zero=1), "evaluation: "),
        (weights_kept_from_before, Plan(shard=2, zero=2), "updated weights: "),
        (lost_moment, Plan(shard=2), "resume: layers.0."),
        (swapped_parts, Plan(tensor=2), "resume: layers.0.mixer.wq "),
        (leaking_documents, Plan(replicate=2), "loss: "),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value.describe() if isinstance(value, Plan) else None),
)
def test_each_fault_is_caught(
    run: Run, pool: Pool, fault: Callable[[pytest.MonkeyPatch], None], plan: Plan, said: str, tmp_path: Path
) -> None:
    verdict = judge(plan, pool.run(planted, fault, run, plan, tmp_path), *reference_of(run))
    assert verdict.failure is not None
    assert verdict.failure.startswith(said), verdict.failure


@pytest.mark.parametrize(
    ("fault", "said"),
    [(copy_without_its_gradient, "gradients: embedding.weight"), (stale_copy, "evaluation: ")],
)
def test_a_fault_of_tied_stages_is_caught(
    run: Run, pool: Pool, fault: Callable[[pytest.MonkeyPatch], None], said: str, tmp_path: Path
) -> None:
    run, plan = override(run, ["model.tied=true", "model.depth=2"]), Plan(pipeline=2)
    reference = reference_of(run)
    assert judge(plan, pool.run(trial, run, plan, 4, tmp_path / "right"), *reference).failure is None
    verdict = judge(plan, pool.run(planted, fault, run, plan, tmp_path / "wrong", 4), *reference)
    assert verdict.failure is not None
    assert verdict.failure.startswith(said), verdict.failure


def test_what_is_allowed_is_measured(run: Run) -> None:
    _, allowed = reference_of(run)
    assert allowed.keys() == set(verify_module.QUANTITIES)
    assert all(allowed.pop(quantity) == 0 for quantity in verify_module.EXACT)
    assert all(verify_module.FLOOR <= value / verify_module.MARGIN < 1e-9 for value in allowed.values())


@pytest.fixture(scope="module")
def wide(tiny: Tiny) -> Run:
    """Heads, hidden widths and sequences of several tiles, so that ranks may share them out."""
    sets = ["model.mixer.num_kv_heads=2", "model.mixer.head_size=32", "model.ffn.hidden=64", "data.sequence_length=128"]
    return override(tiny(), sets)


@pytest.mark.parametrize("compute", ["fp64", "bf16"])
def test_chance_is_not_taken_for_noise(run: Run, monkeypatch: pytest.MonkeyPatch, compute: str) -> None:
    """Noise that a block draws itself would allow any fault."""
    plain = SwiGLU.gate
    monkeypatch.setattr(SwiGLU, "gate", lambda self, *args: torch.nn.functional.dropout(plain(self, *args), 0.1))
    with pytest.raises(ConfigError, match=r"is another one each time: the gradient of .* as dropout does"):
        reference_of(shrunk(run, compute))


def test_largest_magnitudes_are_compared(wide: Run, pool: Pool, tmp_path: Path) -> None:
    sets = ["precision.products=rowwise", "precision.keep_first=0", "precision.keep_last=0"]
    small = shrunk(override(wide, sets))
    reference = reference_of(small)
    shares = pool.run(trial, small, Plan(tensor=2), 1, tmp_path)
    found = judge(Plan(tensor=2), shares, *reference)
    assert found.failure is None
    assert 0 <= found.worst[MAGNITUDES] <= verify_module.UNIT_FP32
    for share in shares:
        if share is not None:
            box, shape, amax = share.parts[MAGNITUDES]["layers.0.mixer.wq/input"]
            share.parts[MAGNITUDES]["layers.0.mixer.wq/input"] = box, shape, amax * (1 + 2**-20)
    assert judge(Plan(tensor=2), shares, *reference).failure == (
        "largest magnitudes: layers.0.mixer.wq/input is off by 9.5e-07, allowed 2.4e-07"
    )


THREE = [Plan(tensor=2), Plan(shard=2, context=2), Plan(pipeline=2, replicate=2)]


@pytest.mark.parametrize("products", ["tensorwise", "delayed", "blockwise"])
def test_narrow_products_agree_to_the_last_digits(wide: Run, pool: Pool, products: str) -> None:
    sets = [f"precision.products={products}", "precision.keep_first=0", "precision.keep_last=0"]
    verdicts = verify(shrunk(override(wide, sets)), THREE, pool, lambda _: None)
    assert [verdict.failure for verdict in verdicts] == [None] * 3
    assert all(verdict.worst["gradients"] < 1e-11 for verdict in verdicts)


def test_layouts_in_bf16_are_as_far_from_fp64_as_one_process(wide: Run, pool: Pool, tmp_path: Path) -> None:
    small = shrunk(wide, "bf16")
    verdicts = verify(small, THREE, pool, lambda _: None)
    assert [verdict.failure for verdict in verdicts] == [None] * 3
    assert all(verdict.worst["gradients"] > 1e-4 for verdict in verdicts), "bf16 would have been in effect"
    verdict = judge(THREE[0], pool.run(planted, gradient_times_ranks, small, THREE[0], tmp_path), *reference_of(small))
    assert verdict.failure is not None


def test_all_means_all_that_is_legal(run: Run) -> None:
    plans = legal_plans(run, 8)
    assert len(plans) == len(set(plans)) > 40
    assert max(plan.num_ranks for plan in plans) == 8
    assert {plan.tensor for plan in plans} == {1, 2}  # two heads: four ranks cannot share them
    assert {plan.num_ranks for plan in legal_plans(run, 2)} == {2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shard", "is not a list"),
        ("", "is not a list"),
        ("shrad=2", "did you mean"),
        ("shard=0", "shard"),
        ("shard=x", "shard"),
        ("shard=2,tensor=2,shard=4", "gives shard twice"),
    ],
)
def test_a_plan_that_is_none(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_plan(text)


USERS_BLOCK = """
from surefoot.blocks.mixers.attention import Attention, AttentionConfig
from surefoot.recipes.quickstart import quickstart


class GatedConfig(AttentionConfig):
    def build(self, *, width, output_scale):
        return Gated(self, width, output_scale)


class Gated(Attention):
    # Attention with a gain, the mean of a few weights.
    def __init__(self, config, width, output_scale):
        super().__init__(config, width, output_scale)
        self.gain = self.add_weight("gain", (config.num_heads,), ("gains",), self.initial["wq"])

    def forward(self, x_BLD, docs, state=None, shared=None):
        return super().forward(x_BLD, docs, state, shared) * (1 + MEAN)


def mine():
    base = quickstart()
    mixer = GatedConfig(num_heads=4, num_kv_heads=2)
    return base.model_copy(update={"model": base.model.model_copy(update={"mixer": mixer})})
"""


@pytest.mark.parametrize(
    ("mean", "code", "said"),
    [
        ("self.gain.mean()", 0, "2 of 2 layouts train the same model"),
        ("self.wq.shape[0] * self.gain.mean()", 1, "furthest off of all gradients is that of layers.0.mixer.gain"),
    ],
    ids=["right", "wrong"],
)
def test_a_users_own_block(tmp_path: Path, capsys: pytest.CaptureFixture[str], mean: str, code: int, said: str) -> None:
    """One that counts the rows of its weights, which tensor parallelism cuts, trains another model, and is told so."""
    file = tmp_path / "mine.py"
    file.write_text(USERS_BLOCK.replace("MEAN", mean))
    sets = ["model.width=16", "model.depth=1", "model.vocab_size=64"]
    assert verb.run(f"{file}:mine", ["shard=2", "tensor=2"], False, 2, sets, []) == code
    assert said in capsys.readouterr().out


def test_the_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code = verb.run(
        "quickstart", ["tensor=2"], False, 2, ["model.width=16", "model.depth=1", "model.vocab_size=64"], []
    )
    said = capsys.readouterr().out
    assert code == 0
    assert "1 of 1 layouts train the same model" in said
    with pytest.raises(ConfigError, match="--all"):
        verb.run("quickstart", [], False, 2, [], [])
