"""`surefoot generate`."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefoot.checkpoint.load import latest, load_into, open_checkpoint, read_tensors
from surefoot.config import CheckpointError, Config, RunError, from_dict, load_json, to_dict
from surefoot.infer.engine import generate
from surefoot.infer.sampling import SamplingConfig
from surefoot.models.initialise import named_weights
from surefoot.train.run import Run


def run(
    folder: Path, prompt: str, num_tokens: int, sampling: dict[str, Any], cached: bool, step: int | None, allow: list[str]
) -> None:
    """Print the prompt and its continuation as it is drawn."""
