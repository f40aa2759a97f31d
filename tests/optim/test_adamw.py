"""AdamW against a plain reference in Python floats, its groups, and its state."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.config import CheckpointError, ConfigError, from_dict, override, to_dict
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.base import OptimizerConfig, Param
from surefoot.optim.muon import MuonConfig

SHAPES = {
    "embedding": ((5, 4), ("vocab", "embed")),
    "up": ((6, 4), ("ffn", "embed")),
    "down": ((4, 6), ("embed", "ffn")),
    "experts": ((2, 6, 4), ("experts", "ffn", "embed")),
    "norm": ((4,), ("embed",)),
}


def make_params(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Param]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Param(name, torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype), axes)
        for name, (shape, axes) in SHAPES.items()
    ]


def set_gradients(params: list[Param], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        noise = torch.randn(param.tensor.shape, generator=generator, dtype=torch.float64)
        param.tensor.grad = noise.to(param.tensor.dtype)


def plain_adamw(
    values: list[float],
    gradients: list[list[float]],
    lrs: list[float],
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> list[float]:
    """Algorithm 2 of Loshchilov and Hutter (2019), one number at a time."""
    first, second = [0.0] * len(values), [0.0] * len(values)
    for step, (row, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        for i, g in enumerate(row):
            first[i] = betas[0] * first[i] + (1 - betas[0]) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g * g
            corrected = first[i] / (1 - betas[0] ** step)
            root = math.sqrt(second[i] / (1 - betas[1] ** step))
            values[i] -= lr * decay * values[i] + lr * corrected / (root + eps)
    return values


def test_equals_a_plain_reference() -> None:
    config = AdamWConfig(
        lr=0.03,
        vocabulary_lr=0.05,
        vector_lr=0.01,
        weight_decay=0.2,
        vocabulary_weight_decay=0.07,
        betas=(0.8, 0.97),
        eps=1e-3,
    )
    params = make_params()
    starts = [param.tensor.flatten().tolist() for param in params]
    optimizer = config.build(params)
    scales, history = [0.5, 1.0, 0.25, 0.0, 0.7], []
    for step, scale in enumerate(scales):
        set_gradients(params, step)
        history.append([param.tensor.grad.flatten().tolist() for param in params])  # type: ignore[union-attr]
        optimizer.step(scale)
    rates = {"embedding": (0.05, 0.07), "norm": (0.01, 0.0)}
    for index, param in enumerate(params):
        lr, decay = rates.get(param.name, (0.03, 0.2))
        expected = plain_adamw(
            starts[index], [row[index] for row in history], [lr * scale for scale in scales], (0.8, 0.97), 1e-3, decay
        )
        # The kernel holds its step counts in fp32 but raises the betas in fp64.
        torch.testing.assert_close(
            param.tensor.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13, msg=param.name
        )


def test_equals_torch_bitwise() -> None:
    params, twins = make_params(torch.float32), make_params(torch.float32)
    optimizer = AdamWConfig(lr=0.01, weight_decay=0.1, vocabulary_weight_decay=0.1).build(params)
    matrices = [twin.tensor for twin in twins if twin.role != "vector"]
    vectors = [twin.tensor for twin in twins if twin.role == "vector"]
    theirs = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    for step in range(3):
        set_gradients(params, step)
        set_gradients(twins, step)
        optimizer.step(1.0)
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param.tensor, twin.tensor), param.name


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()], ids=lambda config: type(config).__name__)
class TestEveryOptimizer:
    def test_each_parameter_is_in_exactly_one_group(self, config: OptimizerConfig) -> None:
        params = make_params()
        groups = config.build(params).groups()
        assert sorted(name for group in groups for name in group.names) == sorted(SHAPES)
        assert sum(group.num_elements for group in groups) == sum(param.tensor.numel() for param in params)

    def test_n_steps_save_restore_m_steps_is_n_plus_m_steps(self, config: OptimizerConfig) -> None:
        straight, first, second = (make_params(torch.float32) for _ in range(3))
        through, before, after = config.build(straight), config.build(first), config.build(second)
        for step in range(3):
            set_gradients(straight, step)
            set_gradients(first, step)
            through.step(0.5)
            before.step(0.5)
        after.restore(
            {name: {key: t.clone() for key, t in tensors.items()} for name, tensors in before.state().items()}
        )
        for source, target in zip(first, second, strict=True):
            target.tensor.copy_(source.tensor)
        for step in range(3, 6):
            set_gradients(straight, step)
            set_gradients(second, step)
            through.step(0.9)
            after.step(0.9)
        for left, right in zip(straight, second, strict=True):
            assert torch.equal(left.tensor, right.tensor), left.name
        for name, tensors in through.state().items():
            for key, tensor in tensors.items():
                assert torch.equal(tensor, after.state()[name][key]), (name, key)

    def test_a_stale_state_would_show(self, config: OptimizerConfig) -> None:
        """The test above can fail: without the restored state the same steps end elsewhere."""
        with_state, without = make_params(), make_params()
        optimizer = config.build(with_state)
        set_gradients(with_state, 0)
        optimizer.step(1.0)
        for source, target in zip(with_state, without, strict=True):
            target.tensor.copy_(source.tensor)
        fresh = config.build(without)
        set_gradients(with_state, 1)
        set_gradients(without, 1)
        optimizer.step(1.0)
        fresh.step(1.0)
        for left, right in zip(with_state, without, strict=True):
            assert not torch.equal(left.tensor, right.tensor), left.name

    def test_state_is_complete_before_the_first_step(self, config: OptimizerConfig) -> None:
        params = make_params()
        optimizer = config.build(params)
        keys = {name: set(tensors) for name, tensors in optimizer.state().items()}
        assert set(keys) == set(SHAPES)
        set_gradients(params, 0)
        optimizer.step(1.0)
        assert {name: set(tensors) for name, tensors in optimizer.state().items()} == keys

    def test_a_state_that_does_not_fit_changes_nothing(self, config: OptimizerConfig) -> None:
        optimizer = config.build(make_params())

        def copy() -> dict[str, dict[str, torch.Tensor]]:
            return {name: {key: t.clone() + 1 for key, t in ts.items()} for name, ts in optimizer.state().items()}

        missing, extra, short, shape, dtype = (copy() for _ in range(5))
        del missing["norm"]
        extra["ghost"] = {"momentum": torch.zeros(3)}
        del short["norm"]["second_moment"]
        shape["norm"]["first_moment"] = torch.zeros(5, dtype=torch.float64)
        dtype["norm"]["first_moment"] = torch.zeros(4)
        for bad, word in (
            (missing, "1 missing (norm)"),
            (extra, "1 extra (ghost)"),
            (short, "norm: 1 missing (second_moment)"),
            (shape, "norm/first_moment: is float64 (5,)"),
            (dtype, "norm/first_moment: is float32 (4,)"),
        ):
            with pytest.raises(CheckpointError) as caught:
                optimizer.restore(bad)
            assert word in str(caught.value)
            assert "\n" not in str(caught.value)
        assert all(not tensor.any() for tensors in optimizer.state().values() for tensor in tensors.values())

    def test_without_a_gradient_nothing_moves(self, config: OptimizerConfig) -> None:
        params = make_params()
        optimizer = config.build(params)
        set_gradients(params, 0)
        still = {"embedding", "up", "norm"}
        starts = {param.name: param.tensor.clone() for param in params}
        for param in params:
            if param.name in still:
                param.tensor.grad = None
        optimizer.step(1.0)
        for param in params:
            assert torch.equal(param.tensor, starts[param.name]) is (param.name in still)
            assert any(tensor.any() for tensor in optimizer.state()[param.name].values()) is (param.name not in still)

    def test_zero_grad_drops_every_gradient(self, config: OptimizerConfig) -> None:
        params = make_params()
        optimizer = config.build(params)
        set_gradients(params, 0)
        optimizer.zero_grad()
        assert all(param.tensor.grad is None for param in params)

    def test_steps_parameters_that_require_gradients(self, config: OptimizerConfig) -> None:
        weight = torch.nn.Parameter(torch.ones(3, 4))
        optimizer = config.build([Param("w", weight, ("ffn", "embed"))])
        weight.square().sum().backward()
        optimizer.step(1.0)
        assert not torch.equal(weight, torch.ones(3, 4))
        assert weight.is_leaf
        assert weight.requires_grad
        assert not any(t.requires_grad for tensors in optimizer.state().values() for t in tensors.values())

    def test_round_trip(self, config: OptimizerConfig) -> None:
        assert from_dict(to_dict(config), OptimizerConfig) == config

    @pytest.mark.parametrize(
        ("assignment", "path"),
        [("lr=0", "lr"), ("lr=-1.0", "lr"), ("weight_decay=-0.1", "weight_decay"), ("betas=[0.9,1.0]", "betas"),
         ("vocabulary_lr=0", "vocabulary_lr"), ("eps=0", "eps"), ("learning_rate=1", "learning_rate")],
    )  # fmt: skip
    def test_bad_values_are_named(self, config: OptimizerConfig, assignment: str, path: str) -> None:
        with pytest.raises(ConfigError) as caught:
            override(config, [assignment])
        assert path in caught.value.path
        assert "\n" not in str(caught.value)
