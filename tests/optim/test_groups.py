"""Roles by axes, and the weight decay and rate every role gets."""

from __future__ import annotations

import pytest
import torch

from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.base import OptimizerConfig, Param, Role
from surefoot.optim.groups import split_by_role
from surefoot.optim.muon import MuonConfig

AXES: dict[tuple[str, ...], Role] = {
    ("vocab", "embed"): "vocabulary",
    ("vocab",): "vocabulary",
    ("heads", "embed"): "matrix",
    ("embed", "ffn"): "matrix",
    ("experts", "ffn", "embed"): "matrix",
    ("embed",): "vector",
    ("head_dim",): "vector",
    (): "vector",
}


@pytest.mark.parametrize(("axes", "role"), AXES.items())
def test_role(axes: tuple[str, ...], role: Role) -> None:
    assert Param("w", torch.zeros([2] * len(axes)), axes).role == role


def test_axes_must_name_every_dimension() -> None:
    with pytest.raises(ValueError, match="w has 2 dimensions"):
        Param("w", torch.zeros(2, 2), ("embed",))


DEFAULT = {"matrix": (0.002, 0.1), "vocabulary": (0.002, 0.0), "vector": (0.002, 0.0)}
CHOSEN = {"matrix": (0.002, 0.3), "vocabulary": (0.004, 0.05), "vector": (0.006, 0.0)}


@pytest.mark.parametrize("kind", [AdamWConfig, MuonConfig])
@pytest.mark.parametrize(
    ("values", "table"),
    [
        ({}, DEFAULT),
        ({"vocabulary_lr": 0.004, "vector_lr": 0.006, "weight_decay": 0.3, "vocabulary_weight_decay": 0.05}, CHOSEN),
    ],
    ids=["default", "chosen"],
)
def test_rate_and_weight_decay_of_every_role(
    kind: type[OptimizerConfig], values: dict[str, float], table: dict[str, tuple[float, float]]
) -> None:
    """Seen on the weights, not on the description: a gradient of zero leaves the decay alone, one step of it."""
    params = [
        Param(str(index), torch.full([3] * len(axes), 2.0, dtype=torch.float64), axes)
        for index, axes in enumerate(AXES)
    ]
    optimizer = kind(lr=0.002, **values).build(params)
    groups = {name: group for group in optimizer.groups() for name in group.names}
    for param in params:
        param.tensor.grad = torch.zeros_like(param.tensor)
    optimizer.step(0.5)
    for param in params:
        lr, decay = table[param.role]
        assert (groups[param.name].lr, groups[param.name].weight_decay) == (lr, decay)
        assert groups[param.name].role == param.role
        torch.testing.assert_close(
            param.tensor, torch.full_like(param.tensor, 2 * (1 - 0.5 * lr * decay)), rtol=1e-15, atol=0
        )


def test_description_is_one_line() -> None:
    group = AdamWConfig(lr=0.01).build([Param("w", torch.zeros(30, 40), ("ffn", "embed"))]).groups()[0]
    assert str(group) == "matrix: 1 weights, 1,200 numbers, AdamW, lr 0.01, weight decay 0.1"


def test_methods_of_muon() -> None:
    params = [Param(str(index), torch.zeros([2] * len(axes)), axes) for index, axes in enumerate(AXES)]
    methods = {group.role: group.method for group in MuonConfig().build(params).groups()}
    assert methods == {"matrix": "Muon", "vocabulary": "AdamW", "vector": "AdamW"}


def test_a_parameter_that_comes_twice_is_refused() -> None:
    weight = torch.zeros(2, 2)
    one = Param("one", weight, ("ffn", "embed"))
    for other in (Param("tied", weight, ("ffn", "embed")), Param("one", torch.zeros(2, 2), ("ffn", "embed"))):
        with pytest.raises(ValueError, match=f"{other.name} comes twice"):
            split_by_role([one, other])
    with pytest.raises(ValueError, match="at least one"):
        split_by_role([])
