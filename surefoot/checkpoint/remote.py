"""Models by their name on the Hugging Face hub (extra `hf`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.config import CheckpointError


def fetch(name: str, patterns: Sequence[str]) -> Path:
    """The local folder of a published model, of which only files that match `patterns` are fetched."""
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - an extra
    except ImportError:
        raise CheckpointError(
            f"{name}: is not a folder, and to fetch a model by name needs pip install surefoot[hf]"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the library raises its own, requests' and urllib's
        raise CheckpointError(
            f"{name}: is neither a folder nor a model that can be fetched ({str(error).splitlines()[0]}); check the name"
        ) from None
