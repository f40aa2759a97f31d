"""Recomputation changes no bit of any gradient, counts routers once and keeps as many bytes as it says."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from surefoot.blocks.base import Routing, Tokens
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.routers.sigmoid import Sigmoid, SigmoidConfig
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.config import ConfigError
from surefoot.dist.mesh import own_mesh
from surefoot.dist.pool import Pool
from surefoot.models import routing
from surefoot.models.decoder import DecoderConfig
from surefoot.models.routing import routers
from surefoot.observe.folder import RunFolder
from surefoot.observe.schema import Hook
from surefoot.ops.documents import Documents
from surefoot.parallel.apply import Laid, lay_out
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import Budget, RecomputeConfig
from surefoot.train.run import Run
from surefoot.train.trainer import Trainer
from tests.parallel.parity import BATCH, LENGTH, decoder, ragged_batch
from tests.spread import spread

CPU = torch.device("cpu")
MODES = [
    RecomputeConfig(mode="full"),
    RecomputeConfig(mode="full", every=2),
    RecomputeConfig(mode="selective"),
    RecomputeConfig(mode="budget", budget="300KiB"),
]


def routed(router: TopKConfig | SigmoidConfig | None = None) -> DecoderConfig:
    ffn = MoEConfig(num_experts=6, top_k=2, hidden=12, shared_hidden=8, router=router or TopKConfig(balance_loss=0.3))
    return decoder().model_copy(update={"ffn": ffn})


def laid_out(plan: Plan, config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Laid | None:
    mesh = own_mesh(plan.grid)
    if mesh is None:
        return None
    return lay_out(plan, config, mesh, sequence_length=LENGTH, dtype=dtype, device=CPU, seed=0)


def gradients(
    plan: Plan, config: DecoderConfig, dtype: torch.dtype, compute: torch.dtype
) -> tuple[dict[str, Tensor], list[float]] | None:
    """Of two steps over two or four micro-batches each: the gradients, and what the routers counted."""
    laid = laid_out(plan, config, dtype)
    if laid is None:
        return None
    size = BATCH // plan.num_data_ranks
    first = laid.mesh.index("replicate", "shard", "expert") * size
    own = [tensor[first : first + size] for tensor in ragged_batch(config.vocab_size)]
    micro = list(zip(*(tensor.chunk(4 if plan.pipeline > 1 else 2) for tensor in own), strict=True))
    for _ in range(2):
        laid.accumulate(micro, 100, compute)
    found = {local.name: local.part.grad.clone() for local in laid.locals if local.part.grad is not None}
    assert len(found) == len(laid.locals)
    assert all(router._pending is None for router in routers(laid.model))
    return found, routing.drain(laid.model)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=RecomputeConfig.describe)
@pytest.mark.parametrize(
    "config", [decoder(), routed(), routed(SigmoidConfig(balance_loss=0.3))], ids=["plain", "softmax", "sigmoid"]
)
def test_no_bit_of_a_gradient_changes(
    config: DecoderConfig, mode: RecomputeConfig, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    expected, found = gradients(Plan(), config, *dtypes), gradients(Plan(recompute=mode), config, *dtypes)
    assert expected is not None
    assert found is not None
    for name, gradient in expected[0].items():
        assert torch.equal(found[0][name], gradient), name
    assert found[1] == expected[1]


PLANS: list[dict[str, Any]] = [
    {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 3},
    {"tensor": 2},
    {"shard": 2, "tensor": 2, "zero": 2},
    {"context": 2},
    {"context": 2, "context_kind": "ring"},
    {"context": 2, "context_kind": "ulysses"},
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "zbv"},
    {"pipeline": 2, "schedule": "interleaved", "shard": 2},
]


LAYOUTS = [
    (axes, mode, is_routed)
    for axes in (*PLANS, {"expert": 2}, {"expert": 2, "shard": 2})
    for mode in MODES
    for is_routed in (False, True)
    if not (mode.mode == "budget" and "pipeline" in axes) and (is_routed or "expert" not in axes)
]


@pytest.mark.parametrize(("axes", "mode", "is_routed"), spread(LAYOUTS, 5))
def test_no_bit_changes_under_layouts(pool: Pool, axes: dict[str, Any], mode: RecomputeConfig, is_routed: bool) -> None:
    config, dtypes = routed() if is_routed else decoder(), (torch.float32, torch.float32)
    expected = pool.run(gradients, Plan(**axes), config, *dtypes)
    found = pool.run(gradients, Plan(**axes, recompute=mode), config, *dtypes)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert all(torch.equal(other[0][name], gradient) for name, gradient in one[0].items())
            assert other[1] == one[1]


class Alive(TorchDispatchMode):
    """The storages that operations made and that are alive, seen from below everything under test."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {
                leaf.untyped_storage()._cdata: leaf.untyped_storage()
                for leaf in tree_leaves(tree)
                if isinstance(leaf, Tensor)
            }
            for tree in ((args, kwargs), result)
        )
        self.made += [weakref.ref(storage) for key, storage in made.items() if key not in given]  # no views of weights
        return result

    @property
    def num_bytes(self) -> int:
        found = [storage for ref in self.made if (storage := ref()) is not None]
        return sum({storage._cdata: storage.nbytes() for storage in found}.values())


def alive_after(laid: Laid) -> int:
    """Bytes that the layers hold between forward and backward, the input of the first one included."""
    x_BLD = torch.randn(BATCH, LENGTH, laid.model.config.stream_width, requires_grad=True)
    docs = Documents(ragged_batch(61)[2], LENGTH)
    with torch.no_grad():
        for layer in laid.model.layers:
            layer(x_BLD, docs)  # what all layers share of the documents is made here
    first = x_BLD
    with Alive() as alive:
        for layer in laid.model.layers:
            x_BLD, _ = layer(x_BLD, docs)
        num_bytes = alive.num_bytes + first.nbytes - x_BLD.nbytes
    x_BLD.sum().backward()
    return num_bytes


@pytest.mark.parametrize("config", [decoder(), routed()], ids=["plain", "routed"])
def test_bytes_are_those_that_are_alive(config: DecoderConfig) -> None:
    alive = {}
    for mode in ("none", "full", "selective"):
        laid = laid_out(Plan(recompute=RecomputeConfig(mode=mode)), config)
        assert laid is not None
        alive[mode] = alive_after(laid)
        if laid.recomputation is not None:
            # Auxiliary losses are alive too, and what they are made of.
            assert alive[mode] == pytest.approx(laid.recomputation.kept_bytes, rel=0.1)
    assert alive["full"] < 0.6 * alive["selective"] < 0.6 * alive["none"]


@pytest.mark.parametrize("config", [decoder(), routed()], ids=["plain", "routed"])
@pytest.mark.parametrize("share", [0.35, 0.6, 0.85])
def test_a_budget_is_used_and_kept(config: DecoderConfig, share: float) -> None:
    whole = laid_out(Plan(), config)
    assert whole is not None
    wanted = int(share * alive_after(whole)) // 1000
    laid = laid_out(Plan(recompute=RecomputeConfig(mode="budget", budget=f"{wanted}KB")), config)
    assert laid is not None
    assert isinstance(laid.recomputation, Budget)
    alive_after(laid)
    assert alive_after(laid) == pytest.approx(1000 * wanted, rel=0.1)
    assert laid.recomputation.predicted_bytes == pytest.approx(laid.recomputation.kept_bytes, rel=0.01)
    assert laid.recomputation.kept_bytes <= 1000 * wanted


def test_a_budget_below_the_layers_inputs_is_refused() -> None:
    laid = laid_out(Plan(recompute=RecomputeConfig(mode="budget", budget="1KB")), decoder())
    assert laid is not None
    with pytest.raises(ConfigError, match=r"plan\.recompute\.budget"):
        alive_after(laid)


class Tied(Sigmoid):
    """Chooses others each time it is asked."""

    num_asked = 0

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:
        Tied.num_asked += 1
        with torch.no_grad():
            self.bias_E.copy_(torch.arange(6.0).roll(Tied.num_asked))
        return super().forward(x_TD, length, tokens)


def test_choices_are_repeated_where_another_run_would_choose_otherwise() -> None:
    config = routed(SigmoidConfig(balance_loss=0.3))
    found = []
    for mode in ("none", "full"):
        laid = laid_out(Plan(recompute=RecomputeConfig(mode=mode)), config)
        assert laid is not None
        Tied.num_asked = 0
        for router in routers(laid.model):
            router.__class__ = Tied
        laid.accumulate([ragged_batch(61)], 100, torch.float32)
        found.append(({local.name: local.part.grad for local in laid.locals}, routing.drain(laid.model)))
        assert Tied.num_asked == (4 if mode == "none" else 8)
    for name, gradient in found[0][0].items():
        assert gradient is not None
        assert torch.equal(gradient, found[1][0][name]), name
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("every", {"every": 2}),
        ("budget", {"mode": "budget"}),
        ("budget", {"mode": "full", "budget": "1GiB"}),
        ("budget", {"mode": "budget", "budget": "much"}),
    ],
)
def test_what_has_no_effect_is_refused(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=field):
        RecomputeConfig(**values)


def test_a_budget_is_refused_in_a_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"recompute\.mode"):
        Plan(pipeline=2, recompute=RecomputeConfig(mode="budget", budget="1GiB"))


@pytest.mark.parametrize("assignments", [["mode=selective"], ["mode=budget", "budget=200KiB"]], ids=str)
def test_a_run_says_what_it_keeps_and_ends_with_the_same_bits(
    tiny: Callable[..., Run], tmp_path: Path, assignments: list[str]
) -> None:
    said: list[str] = []

    class Listener(Hook):
        def on_message(self, text: str) -> None:
            said.append(text)

    weights = {}
    for name, changes in (("none", []), ("again", [f"plan.recompute.{each}" for each in assignments])):
        run = tiny("train.num_steps=3", "checkpoint.every=null", "train.batch=4", "train.micro_batch=2", *changes)
        trainer = Trainer(run, RunFolder.create(tmp_path / name, run), [Listener()])
        assert trainer.fit()
        weights[name] = [param.tensor.clone() for param in trainer.params]
    assert all(torch.equal(one, other) for one, other in zip(*weights.values(), strict=True))
    assert sum("recomputed layers keep" in line for line in said) == 1
    facts = json.loads((tmp_path / "again" / "facts.json").read_text())["recomputation"]
    assert facts["kept_bytes"] > 0
    assert facts.get("predicted_bytes", facts["kept_bytes"]) == facts["kept_bytes"]
