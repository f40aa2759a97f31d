"""Run folders with the shapes of real runs: power-law loss with noise, warm-up and decay, early clipping."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

TOKENS_A_STEP = 2048
PARAMETERS = 6_300_000
SAMPLE = 'def read(path):\n    """Read the file."""\n    with open(path) as file:\n        return file.read()\n'


def config(name: str, *, learning_rate: float, num_steps: int, seed: int = 0) -> dict[str, Any]:
    """A resolved configuration."""
    return {
        "$type": "surefoot.train.run.Run",
        "name": name,
        "model": {"$type": "surefoot.models.decoder.DecoderConfig", "dim": 256, "num_layers": 8, "z_loss": 1e-4},
        "optim": {"$type": "surefoot.optim.muon.MuonConfig", "lr": learning_rate, "weight_decay": 0.1},
        "schedule": {"$type": "surefoot.optim.schedule.Cosine", "warmup": 0.05},
        "train": {"num_steps": num_steps, "batch": 8, "micro_batch": None, "seed": seed},
        "observe": {"prompts": ["def read(", "import "], "sample_every": 100},
    }


def facts(num_steps: int) -> dict[str, Any]:
    """The facts of a run that has not finished."""
    return {
        "surefoot": "0.1.0",
        "git": "e49f0e4c1d",
        "versions": {"python": "3.12.4", "torch": "2.13.0", "numpy": "2.3.1"},
        "device": {
            "kind": "cpu",
            "name": "Intel(R) Xeon(R) Processor @ 2.10GHz",
            "cores": 2,
            "threads": 2,
            "amx": False,
        },
        "data": {
            "source": "python standard library",
            "sha256": "9f" * 32,
            "bytes": 10_712_331,
            "tokenizer": "bpe-4096",
        },
        "parameters": {"total": PARAMETERS, "non_embedding": 5_251_424, "matmul": 6_291_456, "vector": 8_544},
        "flops_per_token": {"6N_total": 6.0 * PARAMETERS, "full": 4.1e7, "causal": 3.9e7},
        "plan": {"steps": num_steps, "tokens": num_steps * TOKENS_A_STEP, "epochs": 1.37},
        "optimizer": [
            {"role": "matrix", "kind": "muon", "tensors": 56, "lr_scale": 1.0, "weight_decay": 0.1},
            {"role": "vector", "kind": "adam", "tensors": 33, "lr_scale": 0.3, "weight_decay": 0.0},
        ],
    }


def metrics(num_steps: int, *, learning_rate: float, floor: float = 1.9, seed: int = 0) -> list[dict[str, Any]]:
    """One record a step."""
    random = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []
    seconds, num_clipped = 0.0, 0
    for step in range(1, num_steps + 1):
        progress = step / num_steps
        warm = min(1.0, progress / 0.05)
        factor = warm * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        loss = floor + (8.3 - floor) * (1 + 600 * progress) ** -0.55 + random.normal(0, 0.05)
        norm = 0.35 * math.exp(random.normal(0, 0.18)) * (1 + 5 * math.exp(-30 * progress))
        norm *= 9.0 if random.random() < 0.004 else 1.0
        step_seconds = 0.24 * math.exp(random.normal(0, 0.05)) + (1.1 if step == 1 else 0.0)
        seconds += step_seconds
        num_clipped += norm > 1
        ratios = {"matrix": 2.1e-3, "vector": 4e-4, "vocabulary": 9e-4}
        lines.append(
            {
                "step": step,
                "loss": loss,
                "bits_per_byte": loss / math.log(2) / 3.3,
                "z_loss": 1e-4 * 40 / step,
                "learning_rate": factor * learning_rate,
                "gradient_norm": norm,
                "clip_coefficient": min(1.0, 1 / norm),
                "clip_fraction": num_clipped / step,
                "update_ratio": {
                    role: ratio * factor * math.exp(random.normal(0, 0.1)) for role, ratio in ratios.items()
                },
                "tokens_per_second": TOKENS_A_STEP / step_seconds,
                "mfu": 0.41 * 0.24 / step_seconds,
                "memory_bytes": 912_000_000 + min(step, 40) * 1_000_000,
                "tokens": step * TOKENS_A_STEP,
                "flops": step * TOKENS_A_STEP * 3.9e7,
                "samples": step * 8,
                "step_seconds": step_seconds,
                "data_seconds": 0.002 * math.exp(random.normal(0, 0.4)),
                "seconds": seconds,
                "token_hash": f"{step:016x}",
            }
        )
    return lines


def evaluations(lines: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """Held-out evaluations every so many steps, the last of the whole split."""
    chosen = [line for line in lines if line["step"] % every == 0]
    return [
        {
            "step": line["step"],
            "split": "heldout",
            "loss": line["loss"] + 0.04,
            "bits_per_byte": (line["loss"] + 0.04) / math.log(2) / 3.3,
            "tokens": 300_000 if line is chosen[-1] else 16_384,
            "bytes": 990_000.0,
            "seconds": 4.2,
            "is_whole": line is chosen[-1],
        }
        for line in chosen
    ]


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    """A JSON-lines file."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make_run(
    folder: Path, *, num_steps: int = 400, learning_rate: float = 0.01, floor: float = 1.9, seed: int = 0
) -> Path:
    """A finished run in `folder`."""
    (folder / "samples").mkdir(parents=True)
    lines = metrics(num_steps, learning_rate=learning_rate, floor=floor, seed=seed)
    evaluated = evaluations(lines, max(1, num_steps // 10))
    known = facts(num_steps) | {
        "result": {"heldout_bits_per_byte": evaluated[-1]["bits_per_byte"], "seconds": lines[-1]["seconds"]}
    }
    settings = config(folder.name, learning_rate=learning_rate, num_steps=num_steps, seed=seed)
    (folder / "run.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "facts.json").write_text(json.dumps(known), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "evaluations.jsonl", evaluated)
    for step in range(num_steps // 4, num_steps + 1, max(1, num_steps // 4)):
        completions = [
            {"prompt": "def read(", "text": SAMPLE[9:]},
            {"prompt": "import ", "text": f"os\nimport step_{step}\n"},
        ]
        (folder / "samples" / f"step-{step:08d}.json").write_text(json.dumps(completions), encoding="utf-8")
    return folder
