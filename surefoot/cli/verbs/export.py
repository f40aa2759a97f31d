"""`surefoot export`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch

from surefoot.checkpoint.gguf import write_gguf
from surefoot.checkpoint.hub import SETTINGS, copy_beside, open_published, read_published, theirs_of, write_published
from surefoot.checkpoint.load import Checkpoint, latest, open_checkpoint, read_tensors
from surefoot.cli.verbs.import_ import BESIDE, SOURCE
from surefoot.config import CheckpointError, ConfigError, DataError, RunError, load_json
from surefoot.infer.against import compare
from surefoot.models.hf.family import Family, families, function_of, settings_for
from surefoot.models.hf.gguf import describe
from surefoot.models.hf.settings import Json
from surefoot.train.run import Run

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def run(place: Path, to: str, out: Path | None, family: str | None, dtype: str | None, allow: list[str]) -> None:
    """Write a run's newest checkpoint, or a named one, in another program's format, and check it there."""
    if to not in ("hf", "gguf"):
        raise ConfigError("--to", to, "must be hf or gguf")
    folder, checkpoint = _open(place)
    chosen = load_json(folder / "run.json", Run, allow=allow)
    own, settings, source = _settings(folder, chosen, family)
    if dtype is None:
        named = settings.get("dtype", settings.get("torch_dtype"))
        dtype = named if source is not None and named in _DTYPES else "float32"
    if dtype not in _DTYPES:
        raise ConfigError("--dtype", dtype, f"must be one of {', '.join(_DTYPES)}")
    target = out or folder / "exported" / to
    if target.exists():
        raise RunError(f"{target}: already exists; give --out another name")
    weights = read_tensors(checkpoint, "model/")
    target.mkdir(parents=True)
    try:
        _say(f"step {checkpoint.step} as {own.architecture} in {dtype}")
        theirs = theirs_of(own, chosen.model, weights, _DTYPES[dtype])
        _write_tokenizer(chosen, target, source)
        if to == "gguf":
            print(f"{write_gguf(target, describe(own, settings, theirs), chosen.name)}: written")
        else:
            write_published(target, settings, theirs, _DTYPES[dtype])
            back = read_published(open_published(target), own, chosen.model, torch.float32)
            rounded = sum(int((back[name] != weight).sum()) for name, weight in weights.items())
            if rounded:
                _say(f"{rounded:,} weights were rounded to {dtype}")
            print(f"{target}: {compare(target, chosen.model, back)}")
    except BaseException:
        shutil.rmtree(target)
        raise


def _open(place: Path) -> tuple[Path, Checkpoint]:
    """A run's folder and its newest checkpoint, or the run of a checkpoint that is named."""
    if not (place / "run.json").is_file() and (place.parent.parent / "run.json").is_file():
        return place.parent.parent, open_checkpoint(place)
    if not (place / "run.json").is_file():
        raise RunError(f"{place}: is neither a run folder nor a checkpoint in one; name one of them")
    checkpoint = latest(place / "checkpoints", announce=_say)
    if checkpoint is None:
        raise CheckpointError(f"{place}: has no complete checkpoint yet; wait for one or train it")
    return place, checkpoint


def _settings(folder: Path, chosen: Run, name: str | None) -> tuple[Family, Json, Path | None]:
    """Of the family asked for, that of the model it came from, or the first that fits; in the source's words where it can."""
    known, source = families(), folder / SOURCE
    if name is not None and name not in known:
        raise ConfigError("--family", name, f"must be one of {', '.join(sorted(known))}")
    original: Json = json.loads((source / SETTINGS).read_text()) if (source / SETTINGS).is_file() else {}
    if name in (None, original.get("model_type")) and original:
        family = known[original["model_type"]]
        if function_of(family.decoder(original, str(source / SETTINGS))) == function_of(chosen.model):
            return family, original, source
        return family, original | family.settings_of(chosen.model), source
    family, settings = (
        settings_for(chosen.model) if name is None else (known[name], known[name].settings_of(chosen.model))
    )
    return family, settings | {"max_position_embeddings": chosen.data.sequence_length}, None


def _write_tokenizer(chosen: Run, target: Path, source: Path | None) -> None:
    copied = [] if source is None else copy_beside(source, target, tuple(name for name in BESIDE if name != SETTINGS))
    if "tokenizer.json" in copied:
        return
    try:
        chosen.data.build_tokenizer(announce=_say).save(target)
    except DataError as error:
        _say(f"without a tokenizer: {error}")


def _say(text: str) -> None:
    print(f"surefoot: {text}", file=sys.stderr)
