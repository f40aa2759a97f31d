"""What passes between pipeline stages beside the stream, and weights that several stages use."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch

from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.common import CommonBlockConfig
from surefoot.blocks.mixers.rwkv7 import RWKV7Config
from surefoot.dist.mesh import Mesh
from surefoot.dist.pool import Pool
from surefoot.models.count import build_meta
from surefoot.models.decoder import DecoderConfig
from surefoot.ops.documents import Documents
from surefoot.parallel.pipeline import Pipeline
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from surefoot.parallel.schedules import Schedule
from surefoot.parallel.stages import Stage, handed_on, repeating, shared_weights
from tests.parallel.parity import assert_same_as_one_process, decoder
from tests.spread import spread

SCHEDULES = get_args(Schedule)
KEYS = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=4, rope_theta=20.0, leaves="keys")
READER = KEYS.model_copy(update={"leaves": None, "reads": "keys"})
VALUES = RWKV7Config(num_heads=4, head_size=4, rank=3, gate_rank=3, block=8)
COMMON = CommonBlockConfig(
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_size=8, rope_theta=20.0), hidden=20, rank=3
)


def model(pattern: str, first: Any, other: Any, **more: Any) -> DecoderConfig:
    changes = {"mixer": first, "other_mixers": {"r": other}, "mixer_pattern": pattern, **more}
    return decoder(depth=8).model_copy(update=changes)


MODELS = {
    "one layer's keys in all": model("mrrrrrrr", KEYS, READER),
    "keys in twos and threes": model("mrmrrmrr", KEYS, READER),
    "first values": model("mrrrrrrr", VALUES, VALUES.model_copy(update={"values": "mixed"})),
    "common block": model("mrmmmrmr", KEYS.model_copy(update={"leaves": None}), COMMON),
    "common block, tied": model("rmrm", KEYS.model_copy(update={"leaves": None}), COMMON, tied=True),
    "token after the next": decoder(depth=8).model_copy(update={"ahead_weight": 0.3}),
    "token after the next, tied": decoder(depth=8, tied=True).model_copy(update={"ahead_weight": 0.3}),
}
PLANS = [
    *(Plan(pipeline=2, schedule=schedule) for schedule in SCHEDULES),
    Plan(pipeline=4, schedule="interleaved"),
    Plan(pipeline=2, schedule="1f1b", tensor=2, shard=2, zero=3),
    Plan(pipeline=2, schedule="zbv", replicate=2, shard=2, zero=2),
    Plan(pipeline=2, schedule="interleaved", tensor=2, shard=2, zero=1),
    Plan(pipeline=4, schedule="gpipe", recompute=RecomputeConfig(mode="full")),
]


@pytest.mark.parametrize(
    ("name", "plan"),
    spread(itertools.product(MODELS, PLANS), 4),
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
def test_gradients_are_those_of_one_process(pool: Pool, name: str, plan: Plan) -> None:
    assert_same_as_one_process(pool, plan, MODELS[name], num_micro=4)


@pytest.mark.parametrize("name", ["one layer's keys in all", "first values", "common block"])
def test_beside_context_parallelism(pool: Pool, name: str) -> None:
    assert_same_as_one_process(pool, Plan(pipeline=2, context=2), MODELS[name], num_micro=4)


def test_only_what_is_read_later_is_handed_on() -> None:
    given = handed_on(build_meta(MODELS["keys in twos and threes"]), [0, 1, 2, 4, 8])
    assert [[left.name for left in stage] for stage in given] == [[], ["keys.k", "keys.v"], [], ["keys.k", "keys.v"]]
    given = handed_on(build_meta(MODELS["common block"]), [0, 2, 6, 8])
    assert [[left.name for left in stage] for stage in given] == [[], ["embedded"], ["embedded"]]
    assert handed_on(build_meta(decoder(depth=8)), [0, 4, 8]) == [[], []]


def test_each_stage_has_one_copy_of_what_layers_have_in_common() -> None:
    config, bounds = MODELS["common block"], [0, 2, 5, 8]
    weights = shared_weights(build_meta(config), bounds)
    assert {(one.owner_stage, one.copy_stage) for one in weights} == {(0, 2)}
    whole = build_meta(config)
    stages = [Stage(whole, index, bounds) for index in range(3)]
    assert [len(stage.copies) for stage in stages] == [0, 0, len(weights)]
    assert set(stages[2].copies.values()) == {one.owner for one in weights}
    last = [dict(stages[2].layers[index].named_parameters()) for index in ("5", "7")]
    name = "mixer.common.attention.wq"
    assert last[0][name] is last[1][name]
    assert last[0][name] is not stages[0].get_parameter(f"layers.1.{name}")


def test_weights_that_repeat_in_a_stage_are_not_left_for_later_and_that_is_said(pool: Pool) -> None:
    plan, config = Plan(pipeline=2, schedule="zbv"), MODELS["common block"].model_copy(update={"mixer_pattern": "mrrr"})
    assert_same_as_one_process(pool, plan, config, num_micro=4)
    assert repeating(build_meta(config), [0, 2, 4, 6, 8]) == {1, 3}
    assert repeating(build_meta(config), [0, 2, 3, 4, 6, 7, 8]) == set()
    said = Pipeline(plan, [], Mesh(Plan().grid), torch.device("cpu"), {1, 3}).announce()
    assert said is not None
    assert said.startswith("plan.schedule=zbv: 2 of 4 stages do not")


def test_what_is_left_has_the_declared_shapes() -> None:
    for name in ("one layer's keys in all", "first values"):
        built = MODELS[name].build()
        for dtype in (torch.float32, torch.bfloat16):
            mixer, shared = built.mixers()[0].to(dtype), {}
            for weight in mixer.parameters():
                torch.nn.init.normal_(weight, std=0.1)
            mixer(torch.randn(2, 12, 16, dtype=dtype), Documents(None, 12), None, shared)
            declared = mixer.leaves(2, 12, dtype)
            assert {key: (x.shape, x.dtype) for key, x in shared.items()} == {
                key: (x.shape, x.dtype) for key, x in declared.items()
            }
