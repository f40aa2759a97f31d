"""Models that read images under every layout: the gradients, and the training, of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.blocks.encoders.vision import VisionConfig
from surefoot.blocks.fusion.cross_attention import CrossAttentionConfig
from surefoot.blocks.fusion.projector import ProjectorConfig
from surefoot.blocks.fusion.resampler import ResamplerConfig
from surefoot.config import ConfigError
from surefoot.dist.mesh import own_mesh
from surefoot.dist.pool import Pool, RankError
from surefoot.models.cross_fusion import CrossFusionConfig
from surefoot.models.late_fusion import LateFusion, LateFusionConfig
from surefoot.models.layers import named_layers
from surefoot.models.multimodal import MultimodalConfig
from surefoot.ops.loss import IGNORED
from surefoot.optim.adamw import AdamWConfig
from surefoot.parallel import apply as apply_module
from surefoot.parallel import compiled
from surefoot.parallel import shard as shard_module
from surefoot.parallel import tensor as tensor_module
from surefoot.parallel.apply import Laid, check, lay_out
from surefoot.parallel.context import runs_of
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from surefoot.parallel.shard import DataParallel
from surefoot.precision.policy import PrecisionConfig
from surefoot.study.trial import Share, image_batch, trial
from surefoot.study.verify import judge, reference_of, shrunk
from surefoot.train.run import Run
from tests.parallel.parity import BATCH, LENGTH, assert_same_as_one_process, decoder, share, whole
from tests.spread import spread

IMAGE = 7
VISION = VisionConfig(image_size=4, patch_size=2, width=12, depth=3, num_heads=2, hidden=20)
LATE = LateFusionConfig(
    text=decoder(), vision=VISION, projector=ProjectorConfig(), image_token=IMAGE, feature_layer=-2, class_token="kept"
)
CROSS = CrossFusionConfig(
    text=decoder(tied=True, num_kv_heads=4),
    vision=VISION,
    cross=CrossAttentionConfig(num_heads=2, hidden=24, gate="vector", qk_norm="head"),
    every=2,
    resampler=ResamplerConfig(num_latents=3, depth=1, num_heads=2, head_size=4, qk_norm="head"),
)
BY_NAME = {"late": LATE, "cross": CROSS}

References = dict[str, tuple[list[Share], dict[str, float]]]

PLANS = [
    Plan(tensor=2, context=2),
    Plan(shard=2, zero=3),
    Plan(context=2, context_kind="ulysses"),
    Plan(shard=2, zero=1, tensor=2),
    Plan(replicate=2, shard=2, zero=3),
    Plan(shard=2, context=2, context_kind="ring", tensor=2),
    Plan(tensor=2),
    Plan(shard=4, zero=3, reshard=2),
    Plan(replicate=2, shard=2, zero=1),
    Plan(shard=4, zero=1),
    Plan(replicate=2, context=2, context_kind="ring", tensor=2),
    Plan(shard=2, zero=2),
    Plan(shard=2, zero=2, context=2, context_kind="ulysses"),
    Plan(replicate=2),
    Plan(shard=2, zero=3, tensor=2),
    Plan(context=4, context_kind="ring"),
    Plan(shard=2, zero=1, context=2, tensor=2),
    Plan(context=2),
    Plan(replicate=2, shard=2, zero=3, tensor=2),
    Plan(pipeline=2),
    Plan(pipeline=4, schedule="gpipe"),
    Plan(pipeline=2, schedule="interleaved", tensor=2),
    Plan(pipeline=2, schedule="zero-bubble"),
    Plan(pipeline=2, schedule="zbv", shard=2, zero=3),
    Plan(pipeline=2, schedule="dualpipev", context=2),
    Plan(pipeline=2, schedule="1f1b", shard=2, zero=1, tensor=2),
    Plan(pipeline=2, schedule="zbv"),
    Plan(pipeline=2, schedule="1f1b", replicate=2, shard=2, zero=3),
]


def named(value: Any) -> str:
    return value if isinstance(value, str) else str(value.describe())


@pytest.mark.parametrize(
    ("plan", "fusion"),
    [
        *spread([(plan, fusion) for fusion in BY_NAME for plan in PLANS], 2),
        (Plan(tensor=2, context=2, context_kind="ulysses"), "cross"),
    ],
    ids=named,
)
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan, fusion: str) -> None:
    assert_same_as_one_process(pool, plan, BY_NAME[fusion], num_micro=2 if plan.pipeline == 1 else 4)


@pytest.mark.parametrize("fusion", BY_NAME)
def test_the_batch_asks_what_layouts_could_get_wrong(fusion: str) -> None:
    config = BY_NAME[fusion]
    tokens_BL, targets_BL, ids_BL, images, *seen = image_batch(config, LENGTH, BATCH)
    assert ids_BL.max() > 1
    assert not torch.equal(images[0], images[1])
    if not isinstance(config, LateFusionConfig):
        assert {int(row) for row in seen[0].sum(-1).unique()} == {0, 1, 2}
        return
    is_image_BL = tokens_BL == IMAGE
    assert is_image_BL.sum(1).tolist() == [2 * config.num_features] * BATCH
    assert not (targets_BL == IMAGE).any()
    assert (targets_BL == IGNORED).any()
    # Tokens of one image, in one document, on both sides of an edge between chunks of two ranks, and between runs of one.
    for edge in (run.start for size in (2, 4) for run in runs_of(0, size, LENGTH)[1:]):
        is_across_B = is_image_BL[:, edge - 1] & is_image_BL[:, edge] & (ids_BL[:, edge - 1] == ids_BL[:, edge])
        assert is_across_B.any(), edge
    # And a rank's own tokens do not tell which features are theirs.
    for rank in range(2):
        own_BL = torch.cat([is_image_BL[:, run] for run in runs_of(rank, 2, LENGTH)], 1)
        index_BL = torch.cat([(is_image_BL.cumsum(1) - 1)[:, run] for run in runs_of(rank, 2, LENGTH)], 1)
        assert (own_BL & (index_BL != own_BL.cumsum(1) - 1)).any(), rank


# -- training, with a fault and without ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tiny: Callable[..., Run]) -> Run:
    """AdamW with decay: where nothing gives a gradient, a weight must stay."""
    small = shrunk(tiny("data.sequence_length=48"))
    return small.model_copy(update={"optim": AdamWConfig(lr=0.01, weight_decay=0.5)})


@pytest.fixture(scope="module")
def references(run: Run) -> References:
    return {fusion: reference_of(run, reader=config) for fusion, config in BY_NAME.items()}


def nothing_wrong(_patch: pytest.MonkeyPatch) -> None:
    """No fault."""


def planted(
    fault: Callable[[pytest.MonkeyPatch], None], run: Run, plan: Plan, folder: Path, reader: MultimodalConfig
) -> Share | None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        return trial(run, plan, 2, folder, range(16), reader)


@pytest.mark.parametrize(
    ("plan", "fusion"),
    spread(
        [
            (plan, fusion)
            for plan in (
                Plan(shard=2, zero=1),
                Plan(shard=2, zero=3, tensor=2),
                Plan(replicate=2, shard=2, zero=3),
                Plan(shard=2, zero=2, context=2, context_kind="ring"),
                Plan(tensor=2, context=2),
                Plan(replicate=2, shard=2, zero=1, tensor=2),
                Plan(shard=2, zero=1, context=2, tensor=2),
            )
            for fusion in BY_NAME
        ],
        3,
    ),
    ids=named,
)
def test_training_is_that_of_one_process(
    pool: Pool, run: Run, references: References, plan: Plan, fusion: str, tmp_path: Path
) -> None:
    shares = pool.run(planted, nothing_wrong, run, plan, tmp_path, BY_NAME[fusion])
    shares_of_one, allowed = references[fusion]
    verdict = judge(plan, shares, shares_of_one, allowed)
    assert verdict.failure is None
    assert max(allowed.values()) < 1e-7  # or anything would pass
    gradients = shares_of_one[0].parts["gradients"]
    unread = {name for name, (_, _, gradient) in gradients.items() if not gradient.any()}
    parts = {"late": ("vision.norm_class", "vision.layers.2"), "cross": ("vision.norm_class",)}[fusion]
    assert unread == {name for name in gradients if name.startswith(parts)} != set()


def looks_found_after_the_cut(patch: pytest.MonkeyPatch) -> None:
    """A rank counts image tokens among its own ones."""

    def feed(self: Laid, tokens: Tensor, targets: Tensor, ids: Tensor, images: Tensor) -> Any:
        *cut, docs = apply_module.context.cut(self.mesh, tokens, targets, ids)
        own = cut[0] == IMAGE
        return *cut, docs, images, torch.where(own, own.cumsum(1) - 1, -1)

    patch.setattr(Laid, "_feed", feed)


def every_rank_reads_the_first_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tensor_module._OwnRun, "__call__", lambda self, x: x.chunk(self.size, 1)[0])


def image_parts_are_whole_and_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Gradients of parts for images are taken for those of all tokens."""
    real = DataParallel._sum_over_tensor_ranks

    def sum_over(self: DataParallel) -> None:
        kept = {
            local.name: local.part.grad.clone()
            for local in self.locals
            if not local.name.startswith("text") and local.part.grad is not None
        }
        real(self)
        for local in self.locals:
            if local.name in kept and local.part.grad is not None:
                local.part.grad.copy_(kept[local.name])

    patch.setattr(DataParallel, "_sum_over_tensor_ranks", sum_over)


def unread_weights_get_zeros(patch: pytest.MonkeyPatch) -> None:
    """ZeRO-1 takes no gradient for one of 0, by which weights decay."""
    real = shard_module._Family.reduce

    def reduce(self: Any) -> None:
        real(self)
        for part in self.parts:
            part.grad = torch.zeros_like(part) if part.grad is None else part.grad

    patch.setattr(shard_module._Family, "reduce", reduce)


@pytest.mark.parametrize(
    ("fault", "plan", "fusion", "said"),
    [
        (looks_found_after_the_cut, Plan(context=2), "late", "loss: "),
        (every_rank_reads_the_first_run, Plan(tensor=2), "late", "loss: "),
        (every_rank_reads_the_first_run, Plan(tensor=2), "cross", "loss: "),
        (image_parts_are_whole_and_not_summed, Plan(tensor=2), "late", "gradients: copies of "),
        (image_parts_are_whole_and_not_summed, Plan(tensor=2), "cross", "gradients: copies of "),
        (unread_weights_get_zeros, Plan(shard=2, zero=1), "late", "saved state: "),
    ],
    ids=lambda value: value.__name__ if callable(value) else named(value),
)
def test_faults_are_caught(
    pool: Pool,
    run: Run,
    references: References,
    fault: Callable[[pytest.MonkeyPatch], None],
    plan: Plan,
    fusion: str,
    said: str,
    tmp_path: Path,
) -> None:
    shares = pool.run(planted, fault, run, plan, tmp_path, BY_NAME[fusion])
    assert said in (judge(plan, shares, *references[fusion]).failure or "")


# -- recomputation and compiled layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", BY_NAME)
@pytest.mark.parametrize(
    "mode",
    [
        RecomputeConfig(mode="full"),
        RecomputeConfig(mode="selective", every=2),
        RecomputeConfig(mode="budget", budget="300KiB"),
    ],
    ids=RecomputeConfig.describe,
)
def test_recomputation_changes_no_bit_of_a_gradient(fusion: str, mode: RecomputeConfig) -> None:
    config = BY_NAME[fusion]
    (expected, _), (found, _) = (whole([share(plan, config, 2)]) for plan in (Plan(), Plan(recompute=mode)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def laid_out(plan: Plan, config: MultimodalConfig, precision: PrecisionConfig) -> Laid | None:
    mesh = own_mesh(plan.grid)
    if mesh is None:
        return None
    return lay_out(
        plan,
        config,
        mesh,
        sequence_length=LENGTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
        precision=precision,
    )


@pytest.mark.parametrize("fusion", BY_NAME)
def test_all_layers_that_are_read_are_recomputed(fusion: str) -> None:
    config = BY_NAME[fusion]
    laid = laid_out(Plan(recompute=RecomputeConfig(mode="full")), config, PrecisionConfig(compute="fp32"))
    assert laid is not None
    laid.accumulate([image_batch(config, LENGTH, BATCH)], 100, torch.float32)
    assert laid.recomputation is not None
    assert all(size > 0 for size in laid.recomputation.kept.values())
    assert len(laid.recomputation.kept) == len(named_layers(laid.model)) == {"late": 4 + 2, "cross": 4 + 3 + 2}[fusion]


@pytest.mark.parametrize(
    ("plan", "fusion"),
    spread(
        [
            (Plan(recompute=RecomputeConfig(mode=mode), **axes), fusion)
            for axes in ({"shard": 2, "zero": 3, "tensor": 2}, {"shard": 2, "zero": 2, "context": 2})
            for mode in ("full", "selective")
            for fusion in BY_NAME
        ],
        3,
    ),
    ids=named,
)
def test_recomputation_under_layouts(pool: Pool, plan: Plan, fusion: str) -> None:
    assert_same_as_one_process(pool, plan, BY_NAME[fusion], num_micro=2)


def traced(plan: Plan, config: MultimodalConfig) -> Any:
    """The share of a rank whose layers are traced."""
    compiled.BACKEND = "aot_eager"
    try:
        found = share(plan.model_copy(update={"compile": "layers"}), config, 1)
        from torch._dynamo.utils import counters

        assert found is None or counters["stats"]["unique_graphs"] > 0
    finally:
        compiled.BACKEND = "inductor"
        torch.compiler.reset()
    return found


@pytest.mark.parametrize(
    ("plan", "fusion"),
    spread(
        [
            (plan, fusion)
            for plan in (Plan(), Plan(shard=2, zero=3, tensor=2), Plan(context=2, shard=2))
            for fusion in ("cross", "late")
        ],
        6,
    ),
    ids=named,
)
def test_compiled_layers_change_no_gradient(pool: Pool, plan: Plan, fusion: str) -> None:
    config = BY_NAME[fusion]
    config = config.model_copy(update={"text": config.text.model_copy(update={"depth": 2})})
    expected, _ = whole([share(Plan(), config, 1)])
    found, _ = whole(pool.run(traced, plan, config, timeout=300))
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-11, atol=1e-12, msg=name)


# -- what else goes by a model's layers ----------------------------------------------------------------------------------


def test_products_are_narrow_in_the_text_alone() -> None:
    precision = PrecisionConfig(compute="fp32", products="rowwise", keep_first=0, keep_last=0)
    check(Plan(), CROSS, LENGTH, precision)
    laid = laid_out(Plan(), CROSS, precision)
    assert laid is not None
    laid.accumulate([image_batch(CROSS, LENGTH, BATCH)], 100, torch.float32)
    assert laid.meter is not None
    names = {name for name, _ in laid.meter.rows}
    assert {".".join(name.split(".")[:3]) for name in names} == {f"text.layers.{number}" for number in range(4)}


@pytest.mark.parametrize(
    ("plan", "length", "said"),
    [
        (Plan(expert=2), LENGTH, "the model has no experts to share out"),
        (Plan(tensor=3), LENGTH, "must divide 4 heads of text.layers.0.mixer"),
        (Plan(tensor=2), 15, "15 data.sequence_length"),
        (Plan(context=4, context_kind="ulysses", tensor=2), LENGTH, "must divide 2 heads of text.layers.0.mixer"),
    ],
    ids=lambda value: named(value) if isinstance(value, Plan) else None,
)
@pytest.mark.parametrize("fusion", BY_NAME)
def test_what_cannot_be_laid_out_says_why(fusion: str, plan: Plan, length: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(plan, BY_NAME[fusion], length)


def test_heads_of_an_encoder_need_not_divide() -> None:
    """Three tensor ranks share six heads of the text; the encoder has two, and is whole."""
    config = LATE.model_copy(update={"text": decoder(num_heads=6, num_kv_heads=3)})
    check(Plan(tensor=3), config, LENGTH)


def too_few_features(plan: Plan) -> None:
    laid = laid_out(plan, LATE, PrecisionConfig(compute="fp32"))
    if laid is None:
        return
    tokens_BL, targets_BL, ids_BL, images = image_batch(LATE, LENGTH, BATCH)
    laid.accumulate([(tokens_BL, targets_BL, ids_BL, images[:, :1])], 100, torch.float32)


def test_a_text_with_other_image_tokens_is_refused_before_it_is_cut(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"texts have \[10, .*image tokens, and their images 5 features each"):
        pool.run(too_few_features, Plan(context=2))


def test_a_late_model_wants_places_and_not_who_sees() -> None:
    model = LATE.build()
    assert isinstance(model, LateFusion)
    tokens_BL, _, _, images = image_batch(LATE, LENGTH, BATCH)
    with pytest.raises(ValueError, match="leave seen_BLN out"):
        model.looks_of(tokens_BL, images, torch.ones(BATCH, LENGTH, 2))
