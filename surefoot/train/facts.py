"""What a run was: the machine, the versions, the counts under every convention, the plan.

`facts.json` holds what the configuration alone cannot say.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import surefoot
from surefoot.config import fingerprint
from surefoot.data.dataset import Dataset
from surefoot.dist.startup import describe_device
from surefoot.models.count import build_meta, count_parameters, flops_per_token
from surefoot.ops.matmul import mm, widens_bf16
from surefoot.ops.native.build import status
from surefoot.train.run import Run
from surefoot.train.state import named_params

# Dense bf16 FLOP/s of the vendors' data sheets, by the start of the device's name.
_GPU_PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300": 2250e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """The FLOP/s that MFU divides by, and where the number comes from.

    A GPU's comes from its data sheet (`None` for one we do not list or a dtype other than bf16). A CPU has no such
    number that holds for its clock and its neighbours, so the best of a few large matrix products is taken.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = next((value for prefix, value in _GPU_PEAKS.items() if name.startswith(prefix)), None)
        return (
            (peak, f"data sheet of {name}, dense bf16")
            if dtype is torch.bfloat16
            else (None, "not listed for this dtype")
        )
    size, best = 1024, float("inf")
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(8):
        started = time.perf_counter()
        mm(left, right, dtype)
        best = min(best, time.perf_counter() - started)
    kind = "bf16 products run as fp32 GEMMs" if dtype is torch.bfloat16 and widens_bf16(device) else str(dtype)[6:]
    return 2 * size**3 / best, f"best of 8 products of {size}x{size} matrices measured at the start ({kind})"


def gather(
    run: Run,
    dataset: Dataset,
    device: torch.device,
    peak: tuple[float | None, str],
) -> dict[str, Any]:
    """The facts of a run, JSON-ready."""
    model = build_meta(run.model)
    groups = run.optim.build(named_params(model)).groups()  # of the whole model: a pipeline rank holds some of it
    return {
        "surefoot": surefoot.__version__,
        "git": _git_revision(),
        "versions": {"python": platform.python_version(), **_versions("torch", "numpy", "tokenizers", "pydantic")},
        "device": describe_device(device)
        | ({"kernels": status()} if device.type == "cpu" else {})
        | {"peak_flops": peak[0], "peak_source": peak[1]},
        "configuration": fingerprint(run),
        "data": dataset.facts(),
        "precision": {"compute": run.precision.compute, "weights": run.precision.describe()},
        "parameters": count_parameters(model),
        "flops_per_token": flops_per_token(model, run.data.sequence_length),
        "mfu": "flops_per_token.causal x tokens a second / device.peak_flops",
        "plan": {
            "steps": run.train.num_steps,
            "tokens": run.tokens,
            "samples": run.train.num_steps * run.train.batch,
            "layout": run.plan.describe(),
            "epochs": run.train.num_steps * run.train.batch / dataset.num_samples_per_epoch,
        },
        "optimizer": [vars(group) for group in groups],
    }


def weights_hash(weights: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over names and bytes of the weights, which come by name: equal exactly when every weight is bitwise equal."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _versions(*packages: str) -> dict[str, str]:
    return {package: metadata.version(package) for package in packages}


def _git_revision() -> str | None:
    """Revision of the working directory's repository, marked `+` when it has uncommitted changes."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, timeout=10, cwd=Path.cwd()
        ).stdout

    try:
        return git("rev-parse", "HEAD").strip() + (
            "+" if git("status", "--porcelain", "--untracked-files=no").strip() else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None
