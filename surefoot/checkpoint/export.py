"""Checkpoints for other programs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from surefoot.checkpoint.load import Checkpoint, read_tensors
from surefoot.checkpoint.manifest import reason
from surefoot.config import CheckpointError


def export_safetensors(checkpoint: Checkpoint, file: Path, prefix: str = "model/") -> Path:
    """Write the tensors under `prefix`, by the rest of their names, as one safetensors file and return it.

    An existing file is replaced only by a whole one. `CheckpointError` where nothing is under `prefix`, a dtype is foreign
    to safetensors, or the file cannot be written.
    """
    tensors = read_tensors(checkpoint, prefix)
    if not tensors:
        first = min(checkpoint.tensors, default="nothing")
        raise CheckpointError(f"{checkpoint.path}: holds no tensor under {prefix!r} (it holds {first!r}, …)")
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.replace(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({reason(error)}); give another place") from None
    except (SafetensorError, KeyError, ValueError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{file}: cannot be written ({text}); give another place or prefix") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return file
