"""`surefoot generate`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from surefoot.checkpoint.load import Checkpoint, latest, open_checkpoint
from surefoot.checkpoint.manifest import step_name
from surefoot.config import ConfigError, RunError, load_json
from surefoot.data.tokenizer import Tokenizer
from surefoot.dist.startup import choose_device, set_threads
from surefoot.infer.engine import generate
from surefoot.infer.sampling import SamplingConfig
from surefoot.train.run import Run
from surefoot.train.state import load_model


def run(
    folder: Path,
    prompt: str,
    num_tokens: int,
    sampling: dict[str, Any],
    cached: bool,
    step: int | None,
    allow: list[str],
) -> None:
    """Print the prompt and its continuation as it is drawn."""
    choose = SamplingConfig(**sampling).build()
    chosen = load_json(folder / "run.json", Run, allow=allow)
    checkpoint = _checkpoint(folder, step)
    set_threads(chosen.train.threads)
    device = choose_device("auto")
    model = load_model(chosen, checkpoint, device)
    tokenizer = chosen.data.build_tokenizer(announce=_say)
    ids = [tokenizer.document, *tokenizer.encode_batch([prompt])[0].tolist()]
    new = generate(
        model,
        ids,
        num_tokens,
        choose,
        dtype=torch.float32 if device.type == "cpu" else chosen.precision.compute_dtype,
        end=tokenizer.document,
        cached=cached,
        vocab_size=tokenizer.vocab_size,
    )
    sys.stdout.write(prompt)
    _stream(tokenizer, new)


def _checkpoint(folder: Path, step: int | None) -> Checkpoint:
    place = folder / "checkpoints"
    if step is not None:
        if not (place / step_name(step)).is_dir():
            there = ", ".join(sorted(path.name for path in place.glob("step-*"))) or "none"
            raise ConfigError("--step", step, f"there is no such checkpoint in {place}; there are: {there}")
        return open_checkpoint(place / step_name(step))
    checkpoint = latest(place, announce=_say)
    if checkpoint is None:
        raise RunError(f"{folder}: has no complete checkpoint yet; wait for one or continue it with --resume")
    return checkpoint


def _stream(tokenizer: Tokenizer, ids: Iterable[int]) -> None:
    """Print text as it comes: a token may end inside a character, which is held back until it is whole."""
    seen: list[int] = []
    shown = ""
    for token in ids:
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write(tokenizer.decode(seen)[len(shown) :] + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
