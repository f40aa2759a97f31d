"""The compiled passes against PyTorch's, at every shape, stride and special value; and life without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.data.cache import cache_directory
from surefoot.ops import loss, norm, rope, swiglu
from surefoot.ops.native import build, calls

pytestmark = pytest.mark.skipif(build.library() is None, reason=f"elementwise passes are {build.status()}")


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on operations use PyTorch's passes."""
    return lambda: monkeypatch.setattr(calls, "library", lambda: None)


def run(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = function(*leaves)
    generator = torch.Generator().manual_seed(5)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare(by_torch: Callable[[], None], function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Both ways against fp64: the compiled one is at least as close, up to one rounding."""
    exact = run(function, [x.double() if x.is_floating_point() else x for x in inputs])
    compiled = run(function, inputs)
    by_torch()
    plain = run(function, inputs)
    for found, other, reference in zip(compiled, plain, exact, strict=True):
        assert found.dtype == other.dtype
        assert found.shape == other.shape
        scale = reference.norm() + 1e-30
        error, allowed = (found.double() - reference).norm() / scale, (other.double() - reference).norm() / scale
        assert error <= 1.05 * allowed + 1e-7, (error, allowed)


def draw(*shape: int, seed: int = 0, size: float = 2.0) -> Tensor:
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 16), (2, 3, 33), (64, 256), (4, 5, 6, 8)])
def test_rms_norm(by_torch: Callable[[], None], shape: tuple[int, ...]) -> None:
    weight = 1 + 0.3 * torch.randn(shape[-1], generator=torch.Generator().manual_seed(2))
    compare(by_torch, lambda x, w: norm.rms_norm(x, w, 1e-6), [draw(*shape), weight])


@pytest.mark.parametrize("z_weight", [0.0, 0.3])
@pytest.mark.parametrize("size", [2.0, 60.0])
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(1, 1), (3, 7), (70, 33), (200, 300)])
def test_cross_entropy(
    by_torch: Callable[[], None], num_rows: int, vocabulary: int, size: float, z_weight: float
) -> None:
    targets = torch.randint(vocabulary, (num_rows,), generator=torch.Generator().manual_seed(4))
    targets[1::3] = loss.IGNORED
    weight = torch.randn(vocabulary, 16, generator=torch.Generator().manual_seed(2))
    compare(
        by_torch,
        lambda x, w: loss.linear_cross_entropy(x, w, targets, z_weight)[0],
        [draw(num_rows, 16, size=size), weight],
    )


def test_a_logit_that_is_not_a_number_spoils_its_row_alone() -> None:
    logits = draw(3, 40)
    logits[1, 20] = float("nan")
    found = calls.cross_entropy(logits, torch.tensor([1, 2, 3]), 0.0, writes=True)
    assert found is not None
    assert found[0].isnan().tolist() == [False, True, False]
    assert logits.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 33), (2, 5, 64)])
def test_swiglu(by_torch: Callable[[], None], shape: tuple[int, ...]) -> None:
    compare(by_torch, swiglu.swiglu, [draw(*shape, size=4.0), draw(*shape, seed=1)])


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 5, 3, 6), (3, 8, 2, 32)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_rotate(by_torch: Callable[[], None], shape: tuple[int, int, int, int], is_packed: bool) -> None:
    batch, length, _, size = shape
    positions = torch.randint(0, 500, (batch, length) if is_packed else (length,), generator=torch.manual_seed(3))

    def function(x: Tensor) -> Tensor:
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        return rope.rotate(x, rope.rope_tables(positions, rope.frequencies(size, 100.0), dtype))

    compare(by_torch, function, [draw(*shape)])


def test_views_are_read_as_they_look() -> None:
    tables = rope.rope_tables(torch.arange(5), rope.frequencies(8, 10.0), torch.float32)
    heads = draw(2, 5, 6, 8)
    part = heads.split((4, 2), 2)[1]
    assert torch.equal(rope.rotate(part, tables), rope.rotate(part.contiguous(), tables))
    turned = draw(5, 2, 6, 8).transpose(0, 1)
    assert torch.equal(rope.rotate(turned, tables), rope.rotate(turned.contiguous(), tables))
    wide = draw(4, 12)
    gate, up = wide.chunk(2, -1)
    assert torch.equal(swiglu.swiglu(gate, up), swiglu.swiglu(gate.contiguous(), up.contiguous()))
    assert torch.equal(norm.rms_norm(gate, torch.ones(6), 1e-6), norm.rms_norm(gate.contiguous(), torch.ones(6), 1e-6))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_stays_visible(value: float) -> None:
    """A bad activation must reach the loss, not vanish in a conversion."""
    x = draw(3, 8)
    x[1, 2] = value
    y = norm.rms_norm(x, torch.ones(8), 1e-6)
    assert not y[1].isfinite().all()
    assert y[[0, 2]].isfinite().all()
    gated = swiglu.swiglu(draw(3, 8), x)
    assert not bool(gated[1, 2].isfinite())
    nan_payload = torch.tensor([0x7FFF, 0xFFFF - 0x10000], dtype=torch.int16).view(torch.bfloat16)
    assert swiglu.swiglu(torch.ones(2, dtype=torch.bfloat16), nan_payload).isnan().all()


def test_the_gate_over_its_whole_range() -> None:
    """Every finite bf16 number: no overflow on either side, and silu of far negative numbers is 0."""
    gate = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()]
    y = swiglu.swiglu(gate, torch.ones_like(gate))
    exact = gate.double() * torch.sigmoid(gate.double())
    assert y.isfinite().all()
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-30)


def test_rounding_is_to_nearest() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).reshape(1, 64, 32, 2)
    cos, sin = torch.full((64, 1, 1), 0.7), torch.full((64, 1, 1), 0.3)
    left, right = x.double().chunk(2, -1)
    exact = torch.cat((left * cos.double() - right * sin.double(), right * cos.double() + left * sin.double()), -1)
    found, nearest = rope.rotate(x, (cos, sin)), exact.float().to(torch.bfloat16)
    assert (found != nearest).float().mean() < 0.005  # fp32 arithmetic may fall on the other side of a tie
    torch.testing.assert_close(found, nearest, rtol=2**-7, atol=1e-6)


PROGRAM = (
    "import torch\nfrom surefoot.ops.native.build import status\nfrom surefoot.ops.swiglu import swiglu\n"
    "x = torch.ones(4, dtype=torch.bfloat16)\nprint(status())\nprint(swiglu(x, x).tolist())\n"
)


def status_with(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return done.stdout.splitlines()


def test_without_a_compiler_pytorch_does_it(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    compiler = tmp_path / "broken" / "cc"
    compiler.write_text("#!/bin/sh\necho 'cc: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    expected = [str([0.73046875] * 4)]
    assert status_with(PATH=str(tmp_path), SUREFOOT_CACHE=str(tmp_path / "a"))[0] == "PyTorch's (no C compiler)"
    broken = status_with(PATH=f"{tmp_path / 'broken'}:/usr/bin:/bin", SUREFOOT_CACHE=str(tmp_path / "b"))
    assert broken == ["PyTorch's (cc failed: cc: no such thing)", *expected]
    assert status_with(SUREFOOT_NATIVE="0") == ["PyTorch's (SUREFOOT_NATIVE=0)", *expected]


def test_a_spoilt_library_is_made_again(tmp_path: Path) -> None:
    first = status_with(SUREFOOT_CACHE=str(tmp_path))
    (library,) = (tmp_path / "kernels").glob("*.so")
    library.write_bytes(library.read_bytes()[:1000])
    assert status_with(SUREFOOT_CACHE=str(tmp_path)) == first
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".so"]


def test_it_is_kept_where_all_caches_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in ("", str(tmp_path / "chosen"), "~/elsewhere"):
        for base in ("", str(tmp_path / "xdg")):
            monkeypatch.setenv("SUREFOOT_CACHE", chosen)
            monkeypatch.setenv("XDG_CACHE_HOME", base)
            assert build._cache() == cache_directory()
